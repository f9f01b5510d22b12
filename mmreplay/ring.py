"""Where a step lives in a circular buffer.

A *position* counts every row ever written to one environment and never wraps.
A *slot* is the place that holds it: ``slot == position % slots``. A *row* is the
place in the files, of all environments. Positions are what the API hands out,
because a slot means another step after one lap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels

Ids = NDArray[np.int64]
Layout = Literal["env_major", "time_major"]
LAYOUTS: tuple[Layout, ...] = ("env_major", "time_major")
# Up to here a sequence of one environment should be one contiguous read; above,
# one step of all environments should be one write.
ENV_MAJOR_NUM_ENVS = 32
MAX_RESERVE = 4096
# Small rows come fast: with so many bytes, the reserve lasts for a few syncs.
RESERVE_NBYTES = 8 << 20
# A ring of a few thousand rows needs such a reserve too: a sixteenth of its rows is
# written within one sync. Below this capacity, the reserve would be most of the disk.
LEAST_CAPACITY = 1024
LEAST_RESERVE = 512
LEAST_NBYTES = 1 << 20
MAX_BLOCK_ROWS = 1024
CHUNK_ROWS = 1 << 20

_steps = kernels.load("steps")

Run = tuple[int, int, int]
"""(row, first, stop): items ``[first, stop)`` of a batch go to rows from row on."""


@dataclass(frozen=True, slots=True)
class Span:
    """What is alive at one moment: positions ``[first, stop)`` per environment.

    Attributes:
        first: int64 ``[E]``, the oldest position alive.
        stop: int64 ``[E]``, the next position to be written.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> int(buffer.span.lengths.sum()) >= len(buffer)  # rows, final ones too
        True
    """

    first: NDArray[np.int64]
    stop: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 ``[E]``, rows alive per environment."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Ring:
    """The arithmetic of one buffer's rows.

    ``slots`` exceed the capacity by the reserve, which is given up ahead of the
    writing, and by one block, so that no block with a living row is ever being
    overwritten. They are whole blocks, so that a block never crosses the wrap.

    Attributes:
        capacity: Rows kept per environment.
        num_envs: Environments.
        layout: ``"env_major"`` (row = env * slots + slot) or ``"time_major"``
            (row = slot * num_envs + env).
        reserve: Rows per environment that may be given up ahead of the head.
        block_rows: Rows per environment under one checksum; a power of two.
        slots: Rows per environment on disk.
    """

    capacity: int
    num_envs: int
    layout: Layout
    reserve: int
    block_rows: int
    slots: int

    @classmethod
    def sized(
        cls, capacity: int, num_envs: int, layout: Layout | None = None, row_nbytes: int = 0
    ) -> Ring:
        """Choose reserve, block and slots for a capacity.

        Args:
            capacity: Rows per environment to keep readable.
            num_envs: Environments.
            layout: None chooses by num_envs.
            row_nbytes: Bytes of one row, where the reserve is to suit it.
        """
        if layout is None:
            small = num_envs <= ENV_MAJOR_NUM_ENVS
            layout = "env_major" if small else "time_major"
        sixteenth = max(1, capacity // 16)
        # Two at least: a step and its final row are published together.
        step_nbytes = row_nbytes * num_envs
        most, least = MAX_RESERVE, sixteenth
        if step_nbytes:
            most = max(most, RESERVE_NBYTES // step_nbytes)
        if step_nbytes and capacity >= LEAST_CAPACITY:
            least = max(least, min(LEAST_RESERVE, LEAST_NBYTES // step_nbytes))
        reserve = max(2, min(most, least))
        block_rows = 1 << (min(MAX_BLOCK_ROWS, sixteenth).bit_length() - 1)
        blocks = -(-(capacity + reserve + block_rows) // block_rows)
        return cls(capacity, num_envs, layout, reserve, block_rows, blocks * block_rows)

    @property
    def num_rows(self) -> int:
        """Rows on disk, of all environments."""
        return self.slots * self.num_envs

    @property
    def wide(self) -> int:
        """Rows of a step that lie side by side: those of all environments, or one."""
        return self.num_envs if self.layout == "time_major" else 1

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Slots, environments, and whether it is time-major, as kernels take it."""
        return self.slots, self.num_envs, self.layout == "time_major"

    @property
    def num_blocks(self) -> int:
        """Blocks of one environment."""
        return self.slots // self.block_rows

    def row(self, env_id: int, position: int) -> int:
        """Row of one position."""
        slot = position % self.slots
        if self.layout == "env_major":
            return env_id * self.slots + slot
        return slot * self.num_envs + env_id

    def rows(self, env_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of positions.

        Args:
            env_ids: int64 ``[B]``, in ``[0, num_envs)``.
            positions: int64 ``[B]``, or any shape that broadcasts with env_ids.

        Returns:
            int64 ``[B]``.
        """
        slots = positions % self.slots
        if self.num_envs == 1:
            return slots
        if self.layout == "env_major":
            return env_ids * self.slots + slots
        return slots * self.num_envs + env_ids

    def newest(
        self, rows: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The newest step that each row has held.

        Args:
            rows: int64 ``[N]``, contiguous.
            stops: int64 ``[E]``, the next position to be written.

        Returns:
            env_ids and positions, int64 ``[N]`` each; below 0 where there was none.
        """
        env_ids, positions = np.empty_like(rows), np.empty_like(rows)
        _steps.locate_positions(rows, stops, *self.shape, env_ids, positions)
        return env_ids, positions

    def split_at_wrap(self, env_id: int, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Split positions ``[first, stop)`` of one environment at the wrap.

        Returns:
            One or two ``(row, step, count)``: count rows from row on, each step rows
            after the last one.
        """
        spans = []
        while first < stop:
            count = min(stop - first, self.slots - first % self.slots)
            spans.append((self.row(env_id, first), self.wide, count))
            first += count
        return spans

    def block_runs(self, first: int, count: int) -> list[Run]:
        """Runs of count steps of all environments from one position on.

        The batch is laid out as the ring is: environment by environment when
        env-major, step by step when time-major.
        """
        block_runs: list[Run] = []
        wide = self.wide
        for env_id in range(self.num_envs // wide):
            item = env_id * count
            for row, _, steps in self.split_at_wrap(env_id, first, first + count):
                block_runs.append((row, item, item + steps * wide))
                item += steps * wide
        return block_runs


def runs(rows: NDArray[np.int64]) -> list[Run]:
    """Group rows that follow each other on disk, in the order given.

    Args:
        rows: int64 ``[N]``, N at least 1.
    """
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    firsts = rows[edges[:-1]].tolist()
    return [(row, edges[i], edges[i + 1]) for i, row in enumerate(firsts)]


def position_chunks(ring: Ring, first: Ids, stop: Ids) -> Iterator[tuple[Ids, Ids]]:
    """Lay ranges of positions end to end, at most some million at a time.

    Args:
        ring: For its environments.
        first: int64 ``[E]``.
        stop: int64 ``[E]``; below first there is nothing.

    Yields:
        env_ids and positions, int64 ``[N]`` each, N at least 1.
    """
    if ring.num_envs == 1:
        yield from _chunks(0, int(first[0]), int(stop[0]))
        return
    lengths = np.maximum(stop - first, 0)
    total = int(lengths.sum())
    if total == 0:
        return
    if total <= CHUNK_ROWS:
        some = np.flatnonzero(lengths)
        counts = lengths[some]
        edges = np.cumsum(counts) - counts
        yield (np.repeat(some, counts), np.arange(total) + np.repeat(first[some] - edges, counts))
        return
    for env_id in np.flatnonzero(lengths).tolist():
        yield from _chunks(env_id, int(first[env_id]), int(stop[env_id]))


def _chunks(env_id: int, first: int, stop: int) -> Iterator[tuple[Ids, Ids]]:
    for begin in range(first, stop, CHUNK_ROWS):
        positions = np.arange(begin, min(begin + CHUNK_ROWS, stop))
        yield np.full(len(positions), env_id), positions


def one_env(env_ids: NDArray[np.int64]) -> bool:
    """Return whether all rows, at least one, are of one environment."""
    # The first and last row of several environments are seldom of the same one.
    return bool(env_ids[0] == env_ids[-1] and (env_ids == env_ids[0]).all())
