"""How much faster are 32 sequences of 50 steps than the replay libraries'?

Vector transitions (obs f32[17], action f32[6], reward, next_obs f32[17], two
bools), a million rows of 10,000 episodes, as torch tensors. Ours come from the
files' mapping: whole windows inside episodes, across their ends, and padded; with
the next observation stored and derived. TorchRL's slices lie inside episodes as
well; skrl's know neither episodes nor the write cursor. Prints also what a draw
costs, data aside, as the buffer grows to 346 million rows (a simulated index).
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from tools.bench import slices, transitions
from tools.bench.peers import PATHS
from tools.bench.simulated import SimulatedView
from tools.bench.transitions import BLOCK, EPISODE
from tools.bench.turns import OURS, Side, medians_us, race, rounded, run_benchmark, speedups

COUNT = 32
LENGTH = 50
BOUNDARIES = ("episode", "any", "pad")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        blocks: Blocks of 1,024 rows.
        turns: Bursts of each side.
        calls: Draws in a burst.
        rows: Rows of each simulated buffer.
    """

    blocks: int = transitions.CAPACITY // BLOCK
    turns: int = 60
    calls: int = 20
    rows: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8, 346 * 10**6)


QUICK = Sizes(blocks=20, turns=5, calls=4, rows=(10**5, 10**6))


def measure(folder: Path, sizes: Sizes, names: list[str]) -> dict[str, object]:
    """Run all parts and return what is printed."""
    capacity = sizes.blocks * BLOCK
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        for suffix, derived in (("", False), ("_derived", True)):
            buffer = stack.enter_context(
                transitions.make(folder / f"ring{suffix}", capacity, derived=derived)
            )
            transitions.fill(buffer, capacity)
            for boundary in BOUNDARIES:
                view = _reader(stack, buffer.path, boundary)
                check(view.sample(COUNT).torch().fields, OURS, boundary)
                name = OURS if boundary == "episode" else f"{OURS}_{boundary}"
                sides[name + suffix] = _draw(view)
        for name in names:
            draw = slices.MAKERS[name](sizes.blocks, COUNT, LENGTH)
            check(draw(), name, "episode" if name == "torchrl" else "any")
            sides[name] = draw
        times = race(sides, sizes.turns, sizes.calls)
    return {
        "rows": capacity,
        "sequences": [COUNT, LENGTH],
        "speedup": {n: s for n, s in speedups(times).items() if n in names},
        "median_us": medians_us(times),
        "draw_us_by_rows": {
            boundary: {rows: _grown(rows, boundary, sizes) for rows in sizes.rows}
            for boundary in BOUNDARIES
        },
    }


def _reader(stack: ExitStack, path: Path | None, boundary: str) -> mr.ReplayBuffer:
    sampler = mr.SequenceSampler(LENGTH, mr.UniformSampler(seed=0), boundary=boundary)
    assert path is not None
    return stack.enter_context(mr.ReplayBuffer.open(path, sampler=sampler))


def _draw(buffer: mr.ReplayBuffer) -> Side:
    return lambda: buffer.sample(COUNT).torch()


def check(drawn: dict[str, Any], side: str, boundary: str) -> None:
    """Refuse sequences that are not what they are said to be."""
    flat = {path: _rows(path, drawn[path]) for path in PATHS}
    transitions.check(flat, side)
    numbers = flat["reward"].astype(np.int64).reshape(COUNT, LENGTH)
    steps = np.diff(numbers, axis=1)
    good = (steps == 1) | ((steps == 0) if boundary == "pad" else False)
    if not good.all():
        raise AssertionError(f"{side}: the steps of a sequence do not follow each other")
    episodes = numbers // EPISODE
    if boundary != "any" and (episodes != episodes[:, :1]).any():
        raise AssertionError(f"{side}: a sequence goes over the end of an episode")


def _rows(path: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    wide = path in ("observation", "action", "next_observation")
    return array.reshape(COUNT * LENGTH, -1) if wide else array.reshape(-1)


def _grown(rows: int, boundary: str, sizes: Sizes) -> float:
    """Processor microseconds of a draw from so many rows, without their data."""
    view = SimulatedView(rows, EPISODE)
    sampler = mr.SequenceSampler(LENGTH, mr.UniformSampler(seed=0), boundary=boundary)
    sampler.draw(view, COUNT)
    times = []
    for _ in range(sizes.turns):
        # Of the processor: one side alone has no other to be measured against.
        start = thread_time()
        for _ in range(sizes.calls):
            sampler.draw(view, COUNT)
        times.append((thread_time() - start) / sizes.calls)
    return rounded(1e6 * float(np.median(times)))


def main() -> None:
    """Measure and print one line of JSON."""

    def timed(folder: Path, options: argparse.Namespace) -> dict[str, object]:
        names = slices.installed(options.peers)
        start = perf_counter()
        result = measure(folder, QUICK if options.quick else Sizes(), names)
        return result | {"seconds": rounded(perf_counter() - start)}

    run_benchmark(__doc__, timed, one_torch_thread=True)


if __name__ == "__main__":
    main()
