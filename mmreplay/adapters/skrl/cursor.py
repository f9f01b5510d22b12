"""Where the next sample of a memory goes: memories over one ring share a cursor."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer

RESET = "reset"
"""Of the buffer's statistics: the heads at the last reset, from where rows count."""
LOADING = "loading"
"""Likewise, while a file is read in: until it is whole, environments differ."""

_cursors: weakref.WeakKeyDictionary[ReplayBuffer, Cursor] = weakref.WeakKeyDictionary()


class Cursor:
    """Rows of a ring as its memories count them, from the last reset on.

    Attributes:
        base: int64 ``[E]``, heads at the last reset.
        filled: Whether every row was written.
        memory_index: The row that is written next.
        env_index: The environment whose sample comes next in that row.
        sure: Every add was counted; where not, `count_rows` counts anew.
    """

    def __init__(self, num_envs: int) -> None:
        """Make one of a memory without samples."""
        self.base: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._restart()

    def _restart(self) -> None:
        self.filled = False
        self.memory_index = self.env_index = 0
        self.sure = True

    def count_rows(self, ring: ReplayBuffer) -> None:
        """Take everything from what the ring holds."""
        told = ring.statistics
        self.base = np.array(told.get(RESET, [0] * ring.num_envs), np.int64)
        if told.get(LOADING) or (ring.span.first < self.base).any():
            self.reset(ring)  # a load, or a reset, that was cut short
        rows = ring.heads - self.base
        least = int(rows.min())
        self.filled = least >= ring.capacity
        self.memory_index = least % ring.capacity
        self.env_index = int((rows > least).sum())
        self.sure = True

    def moved(self, cells: int, ring: ReplayBuffer) -> bool:
        """Count cells that were added; whether that made the memory full."""
        rows, self.env_index = divmod(self.env_index + cells, ring.num_envs)
        self.memory_index += rows
        full = self.memory_index >= ring.capacity
        if full:
            self.memory_index = 0
            self.filled = True
        return full

    def reset(self, ring: ReplayBuffer, *, loading: bool = False) -> None:
        """Give up all samples, also of a load until `loaded` says that it is whole."""
        self.sure = False
        # In this order, what is cut short is finished by the next opening.
        ring.commit()
        self.base = ring.heads
        told = {key: value for key, value in ring.statistics.items() if key != LOADING}
        told |= {RESET: self.base.tolist()} | ({LOADING: True} if loading else {})
        ring.set_statistics(told)
        ring.clear()
        self._restart()

    def loaded(self, ring: ReplayBuffer) -> None:
        """Count the rows of a load that is whole."""
        ring.commit()
        told = ring.statistics
        del told[LOADING]
        ring.set_statistics(told)
        self.count_rows(ring)


def cursor_of(ring: ReplayBuffer) -> Cursor:
    """The cursor that all memories over one ring share."""
    found = _cursors.get(ring)
    if found is None:
        found = Cursor(ring.num_envs)
        found.count_rows(ring)
        _cursors[ring] = found
    return found
