"""The cursor of a memory, its next cell; memories over one ring share it."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer

RESET = "reset"
"""Key in the statistics: the heads at the last reset, where counting of rows starts."""
LOADING = "loading"
"""Key in the statistics while a file is loaded: environments may differ until then."""

_cursors: weakref.WeakKeyDictionary[ReplayBuffer, Cursor] = weakref.WeakKeyDictionary()


class Cursor:
    """Rows of a ring as its memories count them, from the last reset on.

    Attributes:
        base: int64 ``[E]``, heads at the last reset.
        filled: Whether every row was written.
        memory_index: The row that is written next.
        env_index: The environment whose sample comes next in that row.
        sure: Whether every add was counted; if not, `count_rows` counts again.
    """

    def __init__(self, num_envs: int) -> None:
        """Make the cursor of an empty memory."""
        self.base: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._restart()

    def _restart(self) -> None:
        self.filled = False
        self.memory_index = self.env_index = 0
        self.sure = True

    def count_rows(self, ring: ReplayBuffer) -> None:
        """Count the rows of the ring."""
        statistics = ring.statistics
        self.base = np.array(statistics.get(RESET, [0] * ring.num_envs), np.int64)
        if statistics.get(LOADING) or (ring.span.first < self.base).any():
            self.reset(ring)  # a load, or a reset, that was interrupted
        rows = ring.heads - self.base
        least = int(rows.min())
        self.filled = least >= ring.capacity
        self.memory_index = least % ring.capacity
        self.env_index = int((rows > least).sum())
        self.sure = True

    def moved(self, cells: int, ring: ReplayBuffer) -> bool:
        """Count added cells; return whether that made the memory full."""
        rows, self.env_index = divmod(self.env_index + cells, ring.num_envs)
        self.memory_index += rows
        full = self.memory_index >= ring.capacity
        if full:
            self.memory_index = 0
            self.filled = True
        return full

    def reset(self, ring: ReplayBuffer, *, loading: bool = False) -> None:
        """Remove all samples, also of a load until `loaded` confirms it as complete."""
        self.sure = False
        # In this order the next opening completes a reset that was interrupted.
        ring.commit()
        self.base = ring.heads
        statistics = {key: value for key, value in ring.statistics.items() if key != LOADING}
        statistics |= {RESET: self.base.tolist()} | ({LOADING: True} if loading else {})
        ring.set_statistics(statistics)
        ring.clear()
        self._restart()

    def loaded(self, ring: ReplayBuffer) -> None:
        """Count the rows of a complete load."""
        ring.commit()
        statistics = ring.statistics
        del statistics[LOADING]
        ring.set_statistics(statistics)
        self.count_rows(ring)


def cursor_of(ring: ReplayBuffer) -> Cursor:
    """Return the cursor that all memories over one ring share."""
    found = _cursors.get(ring)
    if found is None:
        found = Cursor(ring.num_envs)
        found.count_rows(ring)
        _cursors[ring] = found
    return found
