"""How fast are adds, draws and updates through the alf adapter beside tensors in RAM?

alf does not install from a registry. In its place stands the least that its documents
ask for: one torch tensor a leaf, stored into and read from by index, and for priorities
a tree of sums in a tensor, set and searched level by level. 16 environments, rows of a
step type, a discount, a reward and an observation f32[24], rings of alf's default
length that are full. A ratio above 1 says that ours takes less time.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.turns import OURS, Side, medians_us, race, run_benchmark, speedups

ENVS, OBSERVATION, WINDOW = 16, 24, 2
THEIRS = "tensors"
Row = namedtuple("Row", ["step_type", "discount", "reward", "observation"])


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        turns: Bursts of each side.
        calls: Calls in a burst.
        batch: Windows in a draw.
        length: Steps kept of each environment.
    """

    turns: int = 100
    calls: int = 20
    batch: int = 256
    length: int = 1024


QUICK = Sizes(turns=3, calls=5, length=64)


def row(number: float) -> Row:
    """One step of every environment, which tells its number."""
    import torch

    told = torch.full((ENVS,), float(number))
    kind = torch.ones(ENVS, dtype=torch.int32)
    return Row(kind, torch.ones(ENVS), told, told[:, None].repeat(1, OBSERVATION))


class Tensors:
    """A ring of one tensor a leaf; its draws are alf's."""

    def __init__(self, prioritized: bool, length: int) -> None:
        import torch

        self._torch, self._length = torch, length
        self._leaves = Row(
            *(torch.zeros(ENVS, length, *leaf.shape[1:], dtype=leaf.dtype) for leaf in row(0))
        )
        self._head = torch.zeros(ENVS, dtype=torch.int64)
        self._size = torch.zeros(ENVS, dtype=torch.int64)
        self._all = torch.arange(ENVS)
        self._base = 1 << (ENVS * self._length - 1).bit_length()
        self._sums = torch.zeros(2 * self._base) if prioritized else None

    def add_batch(self, batch: Row) -> None:
        """Add a row of every environment."""
        slots = self._head % self._length
        for leaf, values in zip(self._leaves, batch, strict=True):
            leaf[self._all, slots] = values
        self._head += 1
        self._size.add_(1).clamp_(max=self._length)
        if self._sums is not None:
            start = (self._head - WINDOW) % self._length
            rows = self._torch.cat(
                [self._all * self._length + start, self._all * self._length + slots]
            )
            fresh = self._torch.ones(2 * ENVS)
            fresh[ENVS:] = 0
            self._set(rows, fresh)

    def _set(self, leaves: Any, values: Any) -> None:
        sums = self._sums
        assert sums is not None
        nodes = leaves + self._base
        sums[nodes] = values
        while int(nodes[0]) > 1:
            nodes = self._torch.unique(nodes // 2)
            sums[nodes] = sums[2 * nodes] + sums[2 * nodes + 1]

    def _find(self, thresholds: Any) -> Any:
        sums = self._sums
        assert sums is not None
        nodes = self._torch.ones_like(thresholds, dtype=self._torch.int64)
        while int(nodes[0]) < self._base:
            left = sums[2 * nodes]
            right = (thresholds >= left) & (sums[2 * nodes + 1] > 0)
            thresholds = thresholds - left * right
            nodes = 2 * nodes + right
        return nodes - self._base

    def get_batch(self, size: int, length: int) -> tuple[Row, tuple[Any, Any]]:
        """Draw windows."""
        torch = self._torch
        if self._sums is None:
            ids = self._all.repeat(size // ENVS)
            turns = torch.arange(size) // ENVS
            share = (turns + torch.rand(size)) / (size // ENVS)
            first = self._head[ids] - self._size[ids]
            starts = self._size[ids] - length + 1
            positions = first + (share * starts).to(torch.int64).clamp(max=self._length - 1)
        else:
            total = self._sums[1]
            leaves = self._find((torch.arange(size) + torch.rand(size)) / size * total)
            ids, slots = leaves // self._length, leaves % self._length
            oldest = self._head[ids] - self._length
            positions = oldest + (slots - oldest) % self._length
        slots = (positions[:, None] + torch.arange(length)) % self._length
        found = Row(*(leaf[ids[:, None], slots] for leaf in self._leaves))
        return found, (ids, positions)

    def update_priority(self, ids: Any, positions: Any, values: Any) -> None:
        """Set priorities of rows that are alive."""
        alive = self._torch.where(positions >= self._head[ids] - self._size[ids])[0]
        rows = ids[alive] * self._length + positions[alive] % self._length
        self._set(rows, values[alive])


def filled(memory: Any, length: int) -> Any:
    """A memory whose ring has come round."""
    for number in range(length + 8):
        memory.add_batch(row(number))
    return memory


def check(memory: Any, batch: int) -> None:
    """Refuse draws that are no windows of the memory.

    Raises:
        AssertionError: A draw is none.
    """
    found, info = memory.get_batch(batch, WINDOW)
    wanted = info[1].numpy()[:, None] + np.arange(WINDOW)
    assert (found.reward.numpy() == wanted).all(), "a row is not what was added"
    assert (found.observation[..., 0] == found.reward).all(), "leaves of other rows"


def sides_of(memory: Any, batch: int, prioritized: bool) -> dict[str, Side]:
    """An add, and a draw with the update that follows it, of one memory."""
    import torch

    step, fresh = row(-1), torch.rand(batch)

    def draw() -> None:
        _, info = memory.get_batch(batch, WINDOW)
        if prioritized:
            memory.update_priority(info[0], info[1], fresh)

    return {"add": lambda: memory.add_batch(step), "draw": draw}


def measure(folder: Path, sizes: Sizes) -> dict[str, object]:
    """Time calls of both, without and with priorities."""
    from mmreplay.adapters.alf import ReplayBuffer

    told: dict[str, object] = {}
    for name in ("uniform", "prioritized"):
        by_priority = name == "prioritized"
        spec = Row(*(leaf[0] for leaf in row(0)))
        ours = ReplayBuffer(
            spec, ENVS, sizes.length, prioritized_sampling=by_priority, path=folder / name
        )
        sides: dict[str, dict[str, Side]] = {}
        theirs = Tensors(by_priority, sizes.length)
        for side, memory in ((OURS, ours), (THEIRS, theirs)):
            check(filled(memory, sizes.length), sizes.batch)
            sides[side] = sides_of(memory, sizes.batch, by_priority)
        for part in ("add", "draw"):
            calls = {side: parts[part] for side, parts in sides.items()}
            times = race(calls, sizes.turns, sizes.calls)
            told[f"{name}_{part}"] = {"speedup": speedups(times), "median_us": medians_us(times)}
        ours.close()
    return told


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: {"alf": measure(folder, QUICK if options.quick else Sizes())},
        one_torch_thread=True,
    )


if __name__ == "__main__":
    main()
