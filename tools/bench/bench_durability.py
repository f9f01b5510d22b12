"""What does each level of durability cost a writer that has a pace to keep?

One buffer per level on the same disk: no commit until the end (what survives the
death of the process), a commit every ten seconds, every second, every tenth of one by
the thread, and after every so many steps by hand. Each is given the same steps at the
same pace, in turns of a stretch each; the share of that time in which the caller was
inside `add` or `commit` is printed, and how many times as long as without commits; and
what part of a writer's time, at full speed and committed once a lap, checksums are.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import numpy as np

import mmreplay as mr
from mmreplay.storage.committer import Committer
from tools.bench.turns import rounded, run_benchmark

FIELDS = {
    "observation": mr.Field((84, 84), "uint8"),
    "action": mr.Field((), "int64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}
ENVS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        capacity: Steps of each environment.
        steps_per_s: The pace, of each environment.
        slice_s: Seconds of each turn.
        turns: Turns of each level.
    """

    capacity: int = 20_000
    steps_per_s: int = 250
    slice_s: float = 1.5
    turns: int = 4


FULL = Sizes()
QUICK = Sizes(500, 100, 0.1, 2)
LEVELS: dict[str, tuple[float | None, int]] = {
    "process": (None, 0),
    "power_10_s": (10.0, 0),
    "power_1_s": (1.0, 0),
    "power_100_ms": (0.1, 0),
    "power_100_steps": (None, 100),
    "power_each_step": (None, 1),
}
"""Seconds between commits of the thread, and steps between those by hand."""


class Paced:
    """One buffer and how long calls to it took."""

    def __init__(self, path: Path, level: str, sizes: Sizes) -> None:
        """Make the buffer.

        Args:
            path: Where.
            level: One of `LEVELS`.
            sizes: The pace.
        """
        every, self.by_hand = LEVELS[level]
        self.sizes = sizes
        self.buffer = mr.ReplayBuffer.create(
            path, mr.Schema(FIELDS), sizes.capacity, ENVS, commit_every=every, autoreset="disabled"
        )
        rng = np.random.default_rng(0)
        self.step = {
            "observation": rng.integers(0, 256, (ENVS, 84, 84)).astype(np.uint8),
            "action": np.zeros(ENVS, np.int64),
            "reward": np.zeros(ENVS, np.float32),
            "terminated": np.zeros(ENVS, bool),
        }
        self.shares: list[float] = []

    def turn(self) -> None:
        """Add at the pace for a stretch."""
        count = max(1, int(self.sizes.steps_per_s * self.sizes.slice_s))
        busy, start = 0.0, perf_counter()
        for number in range(1, count + 1):
            begin = perf_counter()
            self.buffer.add(self.step)
            if self.by_hand and number % self.by_hand == 0:
                self.buffer.commit()
            end = perf_counter()
            busy += end - begin
            sleep(max(0.0, start + number / self.sizes.steps_per_s - end))
        self.shares.append(busy / (perf_counter() - start))


def checksum_percent(root: Path, sizes: Sizes) -> float:
    """What of the time that laps and their commits take, checksums are."""
    steps = max(1, sizes.capacity // 10)
    rng = np.random.default_rng(0)
    block = {
        "observation": rng.integers(0, 256, (steps, ENVS, 84, 84)).astype(np.uint8),
        "action": np.zeros((steps, ENVS), np.int64),
        "reward": np.zeros((steps, ENVS), np.float32),
        "terminated": np.zeros((steps, ENVS), bool),
    }
    spent = 0.0
    summed = Committer._sum_blocks

    def timed(self: Committer, *args: Any) -> bool:
        nonlocal spent
        begin = perf_counter()
        try:
            return summed(self, *args)
        finally:
            spent += perf_counter() - begin

    with (
        mr.ReplayBuffer.create(
            root / "sums",
            mr.Schema(FIELDS),
            sizes.capacity,
            ENVS,
            commit_every=None,
            autoreset="disabled",
        ) as buffer,
        mock.patch.object(Committer, "_sum_blocks", timed),
    ):
        begin = perf_counter()
        for number in range(10 * sizes.turns):
            buffer.extend(block)
            if number % 10 == 9:
                buffer.commit()
        return 100 * spent / (perf_counter() - begin)


def measure(sizes: Sizes) -> dict[str, object]:
    """Measure every level; see the module."""
    root = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        sums = checksum_percent(root, replace(sizes, capacity=sizes.capacity // 10))
        shutil.rmtree(root / "sums")
        sides = {level: Paced(root / level, level, sizes) for level in LEVELS}
        for _ in range(sizes.turns):
            for side in sides.values():
                side.turn()
        for side in sides.values():
            side.buffer.close()
    finally:
        shutil.rmtree(root)
    shares = {level: float(np.median(side.shares)) for level, side in sides.items()}
    return {
        "busy_percent": {k: rounded(100 * v) for k, v in shares.items()},
        "checksum_percent": rounded(sums),
        "times_process": {k: rounded(v / shares["process"]) for k, v in shares.items()},
    }


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(__doc__, lambda folder, options: measure(QUICK if options.quick else FULL))


if __name__ == "__main__":
    main()
