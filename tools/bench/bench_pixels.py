"""How near to the disk are filling and drawing pixels, and how far are the peers?

Rows of u8[84,84,4] (28 KB), 50,000 of them in one field on disk. Filling is
measured against TorchRL's LazyMemmapStorage, in turns, in blocks; a warm batch of
256 against one bare ``np.take(out=...)`` of the same rows from the same file; a
cold batch of 256 against 32 threads of ``preadv`` on the same file, and against
LazyMemmapStorage.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import Field, ReplayBuffer, Schema
from tools.bench import cold
from tools.bench.turns import OURS, Times, medians_us, race, rounded, run_benchmark, speedups

SHAPE = (84, 84, 4)
ROW = 84 * 84 * 4
MAPPED = "torchrl_lazy_memmap"
THREADS = 32
LATER = 20
"""Batches between ours and the bare take of the same rows, which would otherwise find
them in the processor's caches."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Rows in the ring and in the peer's storage.
        block: Rows that are added at a time.
        batch: Rows in a batch.
        warm_turns: Warm batches of each side.
        cold_turns: Cold batches of each side.
    """

    rows: int = 50_000
    block: int = 250
    batch: int = 256
    warm_turns: int = 60
    cold_turns: int = 7


QUICK = Sizes(rows=1_000, warm_turns=10, cold_turns=2)


class Pixels:
    """Ours: one field of one ring, with every number needed to find a row."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        # No observation role, so that a draw reads this field alone, once.
        schema = Schema({"pixels": Field(SHAPE, "uint8")})
        self.buffer = ReplayBuffer.create(folder, schema, sizes.rows)
        (self.file,) = (path for path in folder.rglob("f*.bin") if path.name != "flags.bin")
        self._batch = sizes.batch
        self.drawn: deque[NDArray[np.int64]] = deque(maxlen=LATER)

    def extend(self, rows: NDArray[np.uint8]) -> None:
        """Store a block."""
        self.buffer.extend(pixels=rows)

    def sample(self) -> NDArray[np.uint8]:
        """Draw a batch, and note which rows it took: the first lap has no wrap."""
        batch = self.buffer.sample(self._batch)
        self.drawn.append(batch.positions)
        pixels: NDArray[np.uint8] = batch["pixels"]
        return pixels


class LazyMemmap:
    """TorchRL's ReplayBuffer over LazyMemmapStorage."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._torch = import_module("torch")
        self._dict = import_module("tensordict").TensorDict
        data = import_module("torchrl.data")
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self._buffer = data.ReplayBuffer(
            storage=data.LazyMemmapStorage(sizes.rows, scratch_dir=str(folder))
        )
        self._folder = folder
        self._batch = sizes.batch

    @property
    def file(self) -> Path:
        """Where the pixels are."""
        return next(self._folder.rglob("pixels*.memmap"))

    def extend(self, rows: NDArray[np.uint8]) -> None:
        """Store a block."""
        pixels = self._torch.from_numpy(rows)
        self._buffer.extend(self._dict({"pixels": pixels}, batch_size=[len(rows)]))

    def sample(self) -> NDArray[np.uint8]:
        """Draw a batch."""
        drawn: Any = self._buffer.sample(self._batch)
        return np.asarray(drawn["pixels"])


def block(first: int, count: int, shape: tuple[int, ...] = SHAPE) -> NDArray[np.uint8]:
    """Rows that begin with their number, and are noise that no disk can shrink."""
    rng = np.random.default_rng(first)
    nbytes = int(np.prod(shape))
    noise = rng.integers(0, 256, (64, nbytes), np.uint8)
    rows = np.resize(noise, (count, nbytes))
    rows[:, :8] = np.arange(first, first + count)[:, None].view(np.uint8)
    return rows.reshape(count, *shape)


def check(rows: NDArray[np.uint8], side: str, size: int) -> None:
    """Refuse a batch whose rows are not those of the numbers they begin with."""
    flat = rows.reshape(len(rows), -1)
    for row in flat[:8]:
        number = int(row[:8].view(np.int64)[0])
        first = number // size * size
        expected = block(first, size, rows.shape[1:])[number - first].reshape(-1)
        if not np.array_equal(row, expected):
            raise AssertionError(f"{side}: a drawn row is not row {number}")


def measure(folder: Path, sizes: Sizes, peers: bool) -> dict[str, object]:
    """Run all parts and return what is printed."""
    with ExitStack() as stack:
        ours = Pixels(folder / "ours", sizes)
        stack.enter_context(ours.buffer)
        sides: dict[str, Pixels | LazyMemmap] = {OURS: ours}
        if peers:
            (folder / "theirs").mkdir()
            sides[MAPPED] = LazyMemmap(folder / "theirs", sizes)
        filling = fill(folder, sides, sizes)
        # What a later commit would read for its checksums would not stay cold.
        ours.buffer.commit()
        for name, side in sides.items():
            check(side.sample(), name, sizes.block)
        warm = warm_draws(ours, sizes)
        if peers:
            warm |= race({MAPPED: sides[MAPPED].sample}, 10)
        icy = cold_draws(sides, sizes)
        return {
            "rows": sizes.rows,
            "fill_speedup": _fill_speedups(filling),
            "fill_mb_per_s": _rates(filling, sizes.block),
            "warm_over_take": _inverse(warm, "np_take"),
            "warm_us": medians_us(warm),
            "warm_mb_per_s": _rates(warm, sizes.batch),
            "cold_speedup": {k: v for k, v in speedups(icy).items() if k == MAPPED},
            "cold_over_preadv": _inverse(icy, "preadv"),
            "cold_mb_per_s": _rates(icy, sizes.batch),
        }


def _fill_speedups(times: Times) -> dict[str, float]:
    """Speedups over the peer: turn by turn, in all, and where nothing intervened.

    A tenth of the blocks finds memory and disk at leisure; most wait for the one
    (a virtual machine's host gives pages late) or the other.
    """
    if MAPPED not in times:
        return {}
    ours, theirs = times[OURS], times[MAPPED]
    return {
        "turn_by_turn": speedups(times)[MAPPED],
        "total": rounded(float(theirs.sum() / ours.sum())),
        "fastest_tenth": rounded(float(np.quantile(theirs, 0.1) / np.quantile(ours, 0.1))),
    }


def _inverse(times: Times, name: str) -> float:
    """How many times as long as another side ours takes."""
    return rounded(float(np.median(times[OURS] / times[name])))


def _rates(times: Times, rows: int) -> dict[str, float]:
    """Megabytes a second by side, over all turns together."""
    nbytes = rows * ROW
    return {n: rounded(len(t) * nbytes / 1e6 / t.sum()) for n, t in times.items()}


def fill(folder: Path, sides: dict[str, Pixels | LazyMemmap], sizes: Sizes) -> Times:
    """Fill every side, a block each in turns, into memory that the machine has.

    Pages that a virtual machine's host is asked for take ten times as long as what
    is measured here, and fall to either side by chance.
    """
    times: Times = {name: np.empty(sizes.rows // sizes.block) for name in sides}
    names = list(sides)
    for turn in range(sizes.rows // sizes.block):
        rows = block(turn * sizes.block, sizes.block)
        cold.touch_memory(folder, 2 * len(sides) * rows.nbytes)
        for name in names if turn % 2 else reversed(names):
            start = perf_counter()
            sides[name].extend(rows)
            times[name][turn] = perf_counter() - start
    return times


def warm_draws(ours: Pixels, sizes: Sizes) -> Times:
    """A batch of ours, and a take of the same rows from the same file, in turns."""
    pixels = np.memmap(ours.file, np.uint8, "r").reshape(-1, *SHAPE)
    out = np.empty((sizes.batch, *SHAPE), np.uint8)
    # The first look at a page through a mapping is a fault, cached or not: both
    # mappings have looked at all of theirs.
    for first in range(0, sizes.rows, sizes.block):
        rows = np.arange(first, first + sizes.block)
        if not np.array_equal(ours.buffer.get_field("pixels", 0, rows), pixels[rows]):
            raise AssertionError(f"rows {first} and on differ between the mappings")
    if not np.array_equal(ours.sample(), pixels[ours.drawn[-1]]):
        raise AssertionError("np_take: other rows than mmreplay's")

    def take() -> None:
        np.take(pixels, ours.drawn[0], 0, out, "clip")

    sides = {OURS: ours.sample, "np_take": take}
    return race(sides, sizes.warm_turns, warm=LATER)


def cold_draws(sides: dict[str, Pixels | LazyMemmap], sizes: Sizes) -> Times:
    """Batches from the disk: ours, the peer's, and preadv of random rows of ours."""
    names = [*sides, "preadv"]
    times: Times = {name: np.empty(sizes.cold_turns) for name in names}
    rng = np.random.default_rng(1)
    file = sides[OURS].file
    with Preadv(file, sizes.batch) as preadv:
        for turn in range(sizes.cold_turns):
            rows = rng.integers(sizes.rows, size=sizes.batch)
            for name in names if turn % 2 else reversed(names):
                path = file if name == "preadv" else sides[name].file
                cold.drop(path)
                if cold.resident(path) > 0.01:
                    raise AssertionError(f"{path} did not leave the page cache")
                start = perf_counter()
                got = preadv.read(rows) if name == "preadv" else sides[name].sample()
                times[name][turn] = perf_counter() - start
                check(got, name, sizes.block)
    return times


class Preadv:
    """Threads that each read pieces of one file, a system call a piece."""

    def __init__(self, path: Path, batch: int, shape: tuple[int, ...] = SHAPE) -> None:
        """Make some.

        Args:
            path: The file.
            batch: Pieces a batch.
            shape: Of a piece, in bytes.
        """
        self._fd = os.open(path, os.O_RDONLY)
        # As for a mapping that is read at random: no read-ahead of the kernel's.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._pool = ThreadPoolExecutor(THREADS)
        self._out = np.zeros((batch, *shape), np.uint8)
        list(self._pool.map(len, [b""] * THREADS))

    def read(self, rows: NDArray[np.int64], row_nbytes: int = ROW) -> NDArray[np.uint8]:
        """Read the pieces that begin at rows, those of a thread one by one."""
        shares = np.array_split(np.arange(len(rows)), THREADS)
        begins = row_nbytes * rows
        list(self._pool.map(lambda share: self._some(begins, share), shares))
        return self._out

    def _some(self, begins: NDArray[np.int64], share: NDArray[np.int64]) -> None:
        for which in share.tolist():
            os.preadv(self._fd, [self._out[which].data], int(begins[which]))

    def __enter__(self) -> Preadv:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._fd)


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(
            folder,
            QUICK if options.quick else Sizes(),
            options.peers != "" and find_spec("torchrl") is not None,
        ),
        one_torch_thread=True,
    )


if __name__ == "__main__":
    main()
