"""Buffers without data: what a sampler sees of hundreds of millions of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import START, TERMINATED, EpisodeIndex
from mmreplay.ring import Ring, Span
from mmreplay.samplers.base import BufferIdentity

Ids = NDArray[np.int64]


class SimulatedView:
    """One environment whose episodes all have the same length; see `View`."""

    def __init__(self, rows: int, episode: int) -> None:
        """Index the rows.

        Args:
            rows: How many are alive.
            episode: Steps in each episode.
        """
        self._episode = episode
        self.home = BufferIdentity(Ring.sized(rows, 1), None, bytes(16), 1)
        self.span = Span(np.zeros(1, np.int64), np.array([rows]))
        self.index = EpisodeIndex(1, derived=False, final_follows=False)
        self.index.update(self.span, self._between)
        self.starts = self.span
        self.num_illegal = 0

    def _between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        return self._flags(np.arange(first, stop))

    def _flags(self, positions: Ids) -> NDArray[np.uint8]:
        at = positions % self._episode
        flags: NDArray[np.uint8] = (at == 0) * np.uint8(START)
        flags |= (at == self._episode - 1) * np.uint8(TERMINATED)
        return flags

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """See `View.flags`."""
        return self._flags(positions)

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Every row is a legal start."""
        return np.ones(len(positions), bool)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """See `View.start_at`."""
        return np.zeros(len(ranks), np.int64), ranks
