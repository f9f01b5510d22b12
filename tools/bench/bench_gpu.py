"""How near does ReplayLoader come to the copy to a GPU, and does compute hide it?

Pixels of 6.9 MiB a batch. One side copies one pinned batch to the GPU again and again,
which is all that the bus gives; the other takes batches of a loader, and those that it
had made before its turn are not counted. Then a learner computes on the GPU for a while
after each batch: printed is how much longer its steps take than the computing alone.
Where torch finds no GPU it says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmreplay import ReplayBuffer, ReplayLoader, UniformSampler
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
    with pixels(folder, sizes) as buffer:
        buffer.sampler = UniformSampler(seed=0)
        found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
        for prefetch in (1, 2, 4, 8):
            found[f"prefetch_{prefetch}"] = {
                "over_the_pinned_copy": throughput(buffer, sizes.turns, prefetch),
                "steps_over_computing": hidden(buffer, sizes.turns, prefetch),
            }
        return found


def throughput(buffer: ReplayBuffer, turns: int, prefetch: int) -> float:
    """Race batches of the loader against copies of one pinned batch."""
    import torch

    source = torch.zeros((BATCH, *SHAPE), dtype=torch.uint8).pin_memory()
    there = torch.empty_like(source, device="cuda")

    def bare() -> None:
        there.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    options: dict[str, Any] = {
        "device": "cuda",
        "prefetch": prefetch,
        "num_threads": THREADS,
    }
    with ReplayLoader(buffer, BATCH, **options) as loader:
        check_frames(next(loader).to("cpu"))

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

    options: dict[str, Any] = {
        "device": "cuda",
        "prefetch": prefetch,
        "num_threads": THREADS,
    }
    with ReplayLoader(buffer, BATCH, **options) as loader:

        def step() -> None:
            batch = next(loader)
            batch["pixels"].sum(dtype=torch.int64)
            compute()

        times = race(
            {"computing": compute, "steps": step}, turns, 10, ahead=prefetch + THREADS
        )
    return speedups(times, "computing")["steps"]


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(folder, QUICK if options.quick else FULL),
    )


if __name__ == "__main__":
    main()
