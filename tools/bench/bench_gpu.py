"""How near does ReplayLoader come to the copy to a GPU, and does compute hide it?

Pixels of 6.9 MiB a batch, and token sequences of any length, 0.6 MiB on average. One
side copies one pinned batch to the GPU again and again, which is all that the bus
gives; the other takes batches of a loader, and those that it had made before its turn
are not counted. Then a learner computes on the GPU for a while
after each batch: printed is how much longer its steps take than the computing alone.
Where torch finds no GPU it says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay import ReplayBuffer, ReplayLoader, UniformSampler
from tools.bench import token_rows
from tools.bench.bench_loader import FULL, QUICK, SHAPE, Sizes, check_frames, pixels
from tools.bench.turns import Side, race, run_benchmark, speedups

BATCH = 256
SIDE = 4096
MULTIPLICATIONS = 8
THREADS = 4


def measure(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure, or say why not."""
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "torch finds no CUDA device here"}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    with pixels(folder, sizes) as buffer:
        nbytes = BATCH * int(np.prod(SHAPE))
        found.update(by_prefetch(buffer, nbytes, sizes.turns))
    with tokens(folder, sizes) as buffer:
        nbytes = BATCH * 4 * int(token_rows.LENGTHS.mean())
        found["tokens"] = by_prefetch(buffer, nbytes, sizes.turns)
    return found


@contextmanager
def tokens(folder: Path, sizes: Sizes) -> Iterator[ReplayBuffer]:
    """A buffer of token sequences, in the page cache."""
    with token_rows.make(folder / "tokens", sizes.frames) as buffer:
        for first in range(0, sizes.frames - BATCH + 1, BATCH):
            buffer.extend(tokens=token_rows.rows(first, BATCH))
        yield buffer


def by_prefetch(buffer: ReplayBuffer, nbytes: int, turns: int) -> dict[str, Any]:
    """Measure a buffer's loader for several numbers of batches ahead."""
    buffer.sampler = UniformSampler(seed=0)
    return {
        f"prefetch_{prefetch}": {
            "over_the_pinned_copy": throughput(buffer, nbytes, turns, prefetch),
            "steps_over_computing": hidden(buffer, turns, prefetch),
        }
        for prefetch in (1, 2, 4, 8)
    }


def check(batch: Any) -> None:
    """Refuse a batch whose rows are not those of their positions."""
    if "tokens" in batch:
        token_rows.check(batch["tokens"], "loader")
    else:
        check_frames(batch)


def throughput(buffer: ReplayBuffer, nbytes: int, turns: int, prefetch: int) -> float:
    """Race batches of the loader against copies of one pinned batch."""
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(source, device="cuda")

    def bare() -> None:
        there.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    options: dict[str, Any] = {"device": "cuda", "prefetch": prefetch, "num_threads": THREADS}
    with ReplayLoader(buffer, BATCH, **options) as loader:
        check(next(loader).to("cpu"))

        def ours() -> None:
            next(loader)
            torch.cuda.synchronize()

        sides: dict[str, Side] = {"bare": bare, "loader": ours}
        times = race(sides, turns, 20, ahead=prefetch + THREADS)
    return speedups({name: 1 / t for name, t in times.items()}, "bare")["loader"]


def hidden(buffer: ReplayBuffer, turns: int, prefetch: int) -> float:
    """Race steps of computing after a batch against computing alone."""
    import torch

    matrix = torch.randn(SIDE, SIDE, device="cuda")

    def compute() -> None:
        for _ in range(MULTIPLICATIONS):
            matrix @ matrix
        torch.cuda.synchronize()

    options: dict[str, Any] = {"device": "cuda", "prefetch": prefetch, "num_threads": THREADS}
    with ReplayLoader(buffer, BATCH, **options) as loader:

        def step() -> None:
            batch = next(loader)
            items = batch["tokens"].values if "tokens" in batch else batch["pixels"]
            items.sum(dtype=torch.int64)
            compute()

        times = race({"computing": compute, "steps": step}, turns, 10, ahead=prefetch + THREADS)
    return speedups(times, "computing")["steps"]


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__, lambda folder, options: measure(folder, QUICK if options.quick else FULL)
    )


if __name__ == "__main__":
    main()
