"""Buffers without data: what a sampler sees of hundreds of millions of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import START, TERMINATED, EpisodeIndex
from mmreplay.episodes.starts import BufferIdentity, StartView
from mmreplay.ring import Ring, Span

Ids = NDArray[np.int64]


class FixedView(StartView):
    """A view that never changes, of an index and no data."""

    def __init__(self, span: Span, index: EpisodeIndex, starts: Span) -> None:
        """Make one.

        Args:
            span: What is alive.
            index: The episodes.
            starts: Where legal starts lie.
        """
        num_envs = len(span.first)
        ring = Ring.sized(int(span.lengths.max()), num_envs)
        self.home = BufferIdentity(ring, None, bytes(16), 1)
        self.num_illegal = 0
        self._span, self._index, self._starts = span, index, starts

    @property
    def span(self) -> Span:
        """What is alive."""
        return self._span

    @property
    def index(self) -> EpisodeIndex:
        """The episodes."""
        return self._index

    @property
    def starts(self) -> Span:
        """Where legal starts lie."""
        return self._starts


class SimulatedView(FixedView):
    """One environment whose episodes all have the same length; see `View`."""

    def __init__(self, rows: int, episode: int) -> None:
        """Index the rows.

        Args:
            rows: How many are alive.
            episode: Steps in each episode.
        """
        self._episode = episode
        span = Span(np.zeros(1, np.int64), np.array([rows]))
        index = EpisodeIndex(1, derived=False, final_follows=False)
        index.update(span, self._flags_between)
        super().__init__(span, index, span)

    def _flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
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
