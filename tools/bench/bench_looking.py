"""How long does it take to look at a buffer of ten million steps?

The commands `mmreplay stats` and `mmreplay plot` as they are typed, with the start of
the interpreter, in seconds and in seconds of the processor; and what `stats` computes
beside numpy, which computes the same from arrays that are in memory. Steps are
CartPole's: four floats, an action, a reward and two ends.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.stats import summarize
from tools.bench.turns import OURS, medians_us, race, rounded, run_benchmark, speedups

Columns = dict[str, NDArray[np.generic]]
EPISODE = 22
"""Mean steps of an episode."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        steps: In the buffer.
        num_envs: Environments.
        turns: Of each side.
    """

    steps: int = 10_000_000
    num_envs: int = 8
    turns: int = 5


QUICK = Sizes(steps=200_000, turns=2)


def fill(path: Path, sizes: Sizes) -> Columns:
    """Make a buffer, and return its columns environment by environment."""
    rng = np.random.default_rng(0)
    shape = sizes.steps // sizes.num_envs, sizes.num_envs
    columns: Columns = {
        "observation": rng.normal(size=(*shape, 4)).astype(np.float32),
        "action": rng.integers(0, 2, shape),
        "reward": rng.random(shape, np.float32),
        "terminated": rng.random(shape) < 1 / EPISODE,
        "truncated": np.zeros(shape, np.bool_),
    }
    columns["terminated"][-1] = True
    schema = mr.Schema(
        {name: mr.Field(column.shape[2:], str(column.dtype)) for name, column in columns.items()}
    )
    with mr.ReplayBuffer.create(
        path, schema, shape[0], sizes.num_envs, autoreset="disabled"
    ) as buffer:
        for first in range(0, shape[0], 1 << 16):
            some = slice(first, first + (1 << 16))
            buffer.extend({name: each[some] for name, each in columns.items()})
    return {
        name: np.ascontiguousarray(each.swapaxes(0, 1)).reshape(-1, *each.shape[2:])
        for name, each in columns.items()
    }


def numpy_facts(columns: Columns) -> tuple[dict[str, list[float]], NDArray[np.float64]]:
    """Least, largest, mean and deviation of each column, and returns of episodes."""
    facts = {}
    for name, column in columns.items():
        values = column.astype(np.float64)
        facts[name] = [values.min(), values.max(), values.mean(), values.std()]
    ends = np.flatnonzero(columns["terminated"])
    starts = np.concatenate([[0], ends[:-1] + 1])
    return facts, np.add.reduceat(columns["reward"].astype(np.float64), starts)


def check(columns: Columns, buffer: mr.ReplayBuffer) -> None:
    """Compare what both sides find.

    Raises:
        SystemExit: It differs.
    """
    expected, returns = numpy_facts(columns)
    moments, table = summarize(buffer)
    found = {name: [m.min, m.max, m.mean, m.std] for name, m in moments.items()}
    same = all(np.allclose(found[name], expected[name], 1e-9) for name in expected)
    if not same or not np.allclose(table.returns, returns):
        raise SystemExit(f"stats must find what numpy finds, {expected}, got {found}.")


def command(name: str, path: Path) -> tuple[float, float]:
    """Seconds that a command takes as it is typed, and those of the processor."""
    words = [sys.executable, "-m", "mmreplay", name, str(path)]
    if name == "plot":
        words += ["-o", str(path.with_suffix(".png"))]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
    seconds, after = (perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN))
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used


def measure(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Measure the commands, then the reckoning beside numpy's in turns."""
    columns = fill(folder / "looked_at", sizes)
    names = ["stats", *(["plot"] if find_spec("matplotlib") else [])]
    seconds = {
        name: [command(name, folder / "looked_at") for _ in range(sizes.turns)] for name in names
    }
    middle = {name: np.median(each, 0).tolist() for name, each in seconds.items()}
    with mr.ReplayBuffer.open(folder / "looked_at") as buffer:
        check(columns, buffer)
        times = race(
            {OURS: lambda: summarize(buffer), "numpy": lambda: numpy_facts(columns)}, sizes.turns
        )
    return {
        "steps": sizes.steps,
        "command_s": {n: rounded(each[0]) for n, each in middle.items()},
        "command_cpu_s": {n: rounded(each[1]) for n, each in middle.items()},
        "median_us": medians_us(times),
        "speedup": speedups(times),
    }


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__, lambda folder, options: measure(folder, QUICK if options.quick else Sizes())
    )


if __name__ == "__main__":
    main()
