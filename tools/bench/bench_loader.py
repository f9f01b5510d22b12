"""How near does ReplayLoader come to a bare gather, and does a learner wait for it?

Warm, three kinds of batches: 256 and 4,096 vector transitions, and 256 rows of pixels
(6.9 MiB). The bare gather copies as many rows, at positions drawn beforehand, out of
one packed array (np.take into memory that is used again): no draw, no check, no tensor.
Printed are the loader's batches over the bare gather's, turn by turn, and its batches a
second, in the median turn and in the best tenth; then the share of its time that a
learner waits whose steps take 5 ms, of which it computes all of it, or half of it while
it waits for a GPU in the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import Field, ReplayBuffer, ReplayLoader, Schema, UniformSampler
from tools.bench import transitions
from tools.bench.turns import Side, medians_us, race, rounded, run_benchmark, speedups

SHAPE = (84, 84, 4)
STEP_S = 5e-3
MAX_CALLS = 200
BLOCK = 256
PREFETCH = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of it.

    Attributes:
        blocks: Of `transitions.BLOCK` vector transitions.
        frames: Rows of pixels.
        turns: Of each race.
        steps: Of the learner.
    """

    blocks: int
    frames: int
    turns: int
    steps: int


QUICK = Sizes(40, 1024, 5, 40)
FULL = Sizes(977, 20_000, 40, 1000)


@contextmanager
def vectors(folder: Path, sizes: Sizes) -> Iterator[ReplayBuffer]:
    """A buffer of vector transitions whose next observations are derived."""
    rows = sizes.blocks * transitions.BLOCK
    with transitions.make(folder / "vectors", rows, derived=True) as buffer:
        transitions.fill(buffer, rows)
        yield buffer


@contextmanager
def pixels(folder: Path, sizes: Sizes) -> Iterator[ReplayBuffer]:
    """A buffer of frames, in the page cache."""
    schema = Schema({"pixels": Field(SHAPE, "uint8")})
    with ReplayBuffer.create(folder / "pixels", schema, sizes.frames) as buffer:
        for first in range(0, sizes.frames - BLOCK + 1, BLOCK):
            buffer.extend(pixels=frames(np.arange(first, first + BLOCK)))
        yield buffer


def frames(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Frames of some positions: noise that begins with the position."""
    noise = np.random.default_rng(0).integers(0, 255, (BLOCK, *SHAPE), np.uint8)
    found = noise[numbers % BLOCK]
    found.reshape(len(numbers), -1)[:, :8] = numbers[:, None].view(np.uint8)
    return found


def bare(buffer: ReplayBuffer, batch_size: int) -> Side:
    """Copy as many rows of as many bytes out of one array, at drawn positions."""
    rng = np.random.default_rng(0)
    names = [path for path in buffer.schema.paths if "ted" not in path]
    nbytes = sum(buffer.schema[path].nbytes for path in names)
    source = np.ones((buffer.capacity, nbytes), np.uint8).view(f"V{nbytes}")[:, 0]
    rows = 2 * batch_size if "observation" in buffer.schema else batch_size
    drawn = rng.integers(buffer.capacity - 1, size=(64, rows))
    if rows > batch_size:
        # A row and the one after it, as next observations are read.
        drawn[:, 1::2] = drawn[:, ::2] + 1
    out, turn = np.empty(rows, source.dtype), [0]

    def side() -> None:
        turn[0] = (turn[0] + 1) % len(drawn)
        source.take(drawn[turn[0]], 0, out, "clip")

    return side


def throughput(buffer: ReplayBuffer, batch_size: int, turns: int) -> dict[str, Any]:
    """Race the loader, and sample, against the bare gather."""
    sampler = UniformSampler(seed=0)
    buffer.sampler = sampler
    with ReplayLoader(buffer, batch_size, prefetch=PREFETCH) as loader:
        check(next(loader), batch_size)
        sides: dict[str, Side] = {
            "bare": bare(buffer, batch_size),
            "sample": lambda: buffer.sample(batch_size),
            "loader": lambda: next(loader),
        }
        for _ in range(len(sides)):
            # The last one counts: the first ones find cold caches.
            start = perf_counter()
            sides["bare"]()
            bare_s = perf_counter() - start
        calls = max(2, min(MAX_CALLS, int(0.02 / bare_s)))
        # What threads made while others were timed is not counted.
        times = race(sides, turns, calls, ahead=PREFETCH + 1)
    over = speedups({name: 1 / t for name, t in times.items()}, "bare")
    return {
        "over_the_bare_gather": over,
        "batches_a_second": rounded(1e6 / medians_us(times)["loader"]),
        # Where another guest of the host halves the clock, the median is its measure.
        "batches_a_second_in_the_best_tenth": rounded(1 / float(np.quantile(times["loader"], 0.1))),
    }


def check(batch: Any, batch_size: int) -> None:
    """Refuse a batch that is not what was asked for."""
    if len(batch) != batch_size:
        raise AssertionError(f"The batch must have {batch_size} steps, got {len(batch)}.")
    if "pixels" in batch:
        check_frames(batch)
    if "reward" in batch:
        transitions.check({path: batch[path] for path in batch}, "loader")


def check_frames(batch: Any) -> None:
    """Refuse frames that are not those of the positions drawn."""
    expected = frames(np.asarray(batch.positions))
    if not np.array_equal(np.asarray(batch["pixels"]), expected):
        raise AssertionError("loader: frames are not those of their positions")


def waited(buffer: ReplayBuffer, batch_size: int, steps: int, busy: float) -> float:
    """Share of its time that a learner waits for batches.

    Args:
        buffer: What it learns from.
        batch_size: Steps a batch.
        steps: Of the learner.
        busy: Share of its step that it computes; in the rest it sleeps.
    """
    matrix = np.ones((160, 160), np.float32)
    with ReplayLoader(buffer, batch_size, prefetch=PREFETCH) as loader:
        next(loader)
        waits, begin = 0.0, perf_counter()
        for _ in range(steps):
            asked = perf_counter()
            batch = next(loader)
            begun = perf_counter()
            waits += begun - asked
            while perf_counter() - begun < busy * STEP_S:
                matrix @ matrix
            sleep(max(0.0, STEP_S - (perf_counter() - begun)))
            del batch
        return waits / (perf_counter() - begin)


def measure(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure everything."""
    found: dict[str, Any] = {"learner_waits": {}}
    with vectors(folder, sizes) as buffer:
        for batch_size in (256, 4096):
            found[f"vectors_{batch_size}"] = throughput(buffer, batch_size, sizes.turns)
        found["learner_waits"]["vectors_256"] = waits(buffer, sizes)
    with pixels(folder, sizes) as buffer:
        found["pixels_256"] = throughput(buffer, 256, sizes.turns)
        found["learner_waits"]["pixels_256"] = waits(buffer, sizes)
    return found


def waits(buffer: ReplayBuffer, sizes: Sizes) -> dict[str, float]:
    """Shares of a learner that computes, and of one that waits for a GPU."""
    return {
        name: rounded(waited(buffer, 256, sizes.steps, busy))
        for name, busy in (("computing", 1.0), ("beside_a_gpu", 0.5))
    }


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(folder, QUICK if options.quick else FULL),
        one_torch_thread=True,
    )


if __name__ == "__main__":
    main()
