"""How much memory of their own do DataLoader workers take over a large buffer?

A buffer of pixels is read by four workers, by fork and by spawn, each of which has
gathered a share of it when it is looked at. Printed is what the workers have of their
own (``Private_Dirty`` of smaps_rollup: mapped pages of the files are not in it, they
are the page cache's), in all and as a share of the buffer, beside the same workers
over a dataset of a few rows: the difference is what the buffer costs.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from mmreplay import Field, ReplayBuffer, ReplayStream, Schema, UniformSampler
from tools.bench.turns import rounded, run_benchmark

SHAPE = (84, 84, 4)
ROW = 84 * 84 * 4
BLOCK = 256
BATCH = 128
WORKERS = 4
MIB = 1 << 20


def fill(path: Path, rows: int) -> None:
    """Write a buffer of so many rows of pixels."""
    schema = Schema({"pixels": Field(SHAPE, "uint8")})
    rng = np.random.default_rng(0)
    block = rng.integers(0, 255, (BLOCK, *SHAPE), np.uint8)
    with ReplayBuffer.create(path, schema, rows) as buffer:
        for first in range(0, rows, BLOCK):
            buffer.extend(pixels=block[: min(BLOCK, rows - first)])


def private_nbytes(pid: int) -> int:
    """Bytes that a process has of its own, with those it shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    sizes = dict(line.split(":", 1) for line in lines[1:])
    return int(sizes["Private_Dirty"].split()[0]) * 1024


def workers_nbytes(path: Path, context: str, batches: int, workers: int) -> int:
    """Private memory of all workers when each has gathered its share."""
    stream = ReplayStream(path, UniformSampler(seed=0), BATCH)
    loader: DataLoader[Any] = DataLoader(
        stream, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    found = iter(loader)
    for batch in itertools.islice(found, batches):
        assert batch["pixels"].shape == (BATCH, *SHAPE)
    children: list[Any] = found._workers  # type: ignore[attr-defined]
    return sum(private_nbytes(child.pid) for child in children)


def measure(folder: Path, nbytes: int, workers: int, contexts: list[str]) -> dict[str, Any]:
    """Measure workers over a buffer of so many bytes, and over a small one."""
    rows = nbytes // ROW
    fill(folder / "large", rows)
    fill(folder / "small", BLOCK)
    # Every row is gathered twice over, so that each worker sees most of the buffer.
    batches = max(4 * workers, 2 * rows // BATCH)
    found: dict[str, Any] = {"buffer_mib": nbytes // MIB, "workers": workers}
    for context in contexts:
        large = workers_nbytes(folder / "large", context, batches, workers)
        small = workers_nbytes(folder / "small", context, 4 * workers, workers)
        found[context] = {
            "private_mib": large // MIB,
            "over_a_small_buffer_mib": (large - small) // MIB,
            "share_of_buffer": rounded(max(0, large - small) / nbytes),
        }
    return found


def main() -> None:
    """Measure and print one line of JSON."""

    def sized(folder: Path, options: argparse.Namespace) -> dict[str, object]:
        nbytes = (128 if options.quick else 2048) * MIB
        workers = 2 if options.quick else WORKERS
        contexts = ["fork"] if options.quick else ["fork", "spawn"]
        return measure(folder, nbytes, workers, contexts)

    run_benchmark(__doc__, sized)


if __name__ == "__main__":
    main()
