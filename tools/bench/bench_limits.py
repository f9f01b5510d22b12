"""What do the memory and the disk of this machine give, whoever asks?

The limits that the plots draw in: copying between two arrays that the processor's
caches do not hold, reading a cold file from its beginning to its end, and 256 random
rows of 28 KB of it by 32 threads, cold. Nothing here is mmreplay's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from tools.bench import cold
from tools.bench.bench_pixels import ROW, Preadv, block, check
from tools.bench.turns import rounded, run_benchmark

BATCH = 256
BLOCK = 256
READ_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of it.

    Attributes:
        copied_nbytes: Of each of the two arrays.
        rows: Of the file.
        turns: Of each measurement.
    """

    copied_nbytes: int = 512 << 20
    rows: int = 40 * BLOCK * 4
    turns: int = 7


QUICK = Sizes(copied_nbytes=64 << 20, rows=4 * BLOCK, turns=2)


def measure(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Measure each alone: they share what they are limits of."""
    path = folder / "rows"
    cold.touch_memory(folder, 2 * sizes.rows * ROW)
    with path.open("wb") as file:
        for first in range(0, sizes.rows, BLOCK):
            file.write(block(first, BLOCK).tobytes())
    return {
        "memory_mb_per_s": {"memcpy": copying(sizes)},
        "disk_mb_per_s": {
            "one_after_another": scanning(path, sizes),
            "random_28_kb_32_threads": picking(path, sizes),
        },
    }


def copying(sizes: Sizes) -> float:
    """MB a second of one thread's copy."""
    source = np.ones(sizes.copied_nbytes, np.uint8)
    target = np.full(sizes.copied_nbytes, 2, np.uint8)
    seconds = []
    for _ in range(sizes.turns):
        start = perf_counter()
        np.copyto(target, source)
        seconds.append(perf_counter() - start)
    return rounded(sizes.copied_nbytes / 1e6 / float(np.median(seconds)))


def scanning(path: Path, sizes: Sizes) -> float:
    """MB a second of a cold file, read as the kernel reads ahead by itself."""
    into = memoryview(bytearray(READ_NBYTES))
    seconds = []
    for _ in range(sizes.turns):
        fd = _cold(path)
        start = perf_counter()
        while os.readv(fd, [into]):
            pass
        seconds.append(perf_counter() - start)
        os.close(fd)
    return rounded(path.stat().st_size / 1e6 / float(np.median(seconds)))


def picking(path: Path, sizes: Sizes) -> float:
    """MB a second of random rows, cold."""
    rng = np.random.default_rng(0)
    seconds = []
    with Preadv(path, BATCH) as reader:
        for _ in range(sizes.turns):
            os.close(_cold(path))
            rows = rng.integers(sizes.rows, size=BATCH)
            start = perf_counter()
            got = reader.read(rows)
            seconds.append(perf_counter() - start)
            check(got, "preadv", BLOCK)
    return rounded(BATCH * ROW / 1e6 / float(np.median(seconds)))


def _cold(path: Path) -> int:
    """A descriptor of a file without a page in memory.

    Raises:
        SystemExit: The files here live in memory alone.
    """
    cold.drop(path)
    if cold.resident(path) > 0.01:
        raise SystemExit(f"{path}: its pages stay in memory; name a --folder on a disk")
    return os.open(path, os.O_RDONLY)


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__, lambda folder, options: measure(folder, QUICK if options.quick else Sizes())
    )


if __name__ == "__main__":
    main()
