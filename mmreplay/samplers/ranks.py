"""Ranks of legal starts, and views narrowed to the newest of each environment.

A legal start's *rank* is its place among all of a view: environment by environment,
oldest first. `View.start_at` gives the start of a rank; here is the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import EpisodeIndex
from mmreplay.errors import EmptyError
from mmreplay.ring import Span
from mmreplay.samplers.base import Home, View

Ids = NDArray[np.int64]


def num_legal(view: View) -> int:
    """Legal starts of a view."""
    return int(view.starts.lengths.sum()) - view.num_illegal


def nothing_to_draw(view: View, batch_size: int) -> EmptyError:
    """Say that there is no legal start."""
    return EmptyError(
        f"cannot draw {batch_size} steps: got {int(view.span.lengths.sum())} "
        "published rows of which none is a legal start yet, expected at least one; a "
        "step can be drawn when its next observation, and all that transforms read "
        "around it, is there: add steps first"
    )


def legal_before(view: View, env_ids: Ids, positions: Ids) -> Ids:
    """Legal starts, of all environments in rank order, before positions.

    A view that counts them itself, as ``view.legal_before``, is asked; otherwise
    bisects over ranks: log2(illegal rows) calls of `View.start_at`.

    Args:
        view: The buffer now.
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``; outside of `View.starts` the nearest edge counts.

    Returns:
        int64 ``[B]``: the rank of each position that is a legal start.
    """
    starts, illegal = view.starts, view.num_illegal
    own: Callable[[Ids, Ids], Ids] | None = getattr(view, "legal_before", None)
    if own is not None:
        return own(env_ids, positions)
    lengths = starts.lengths
    edges = np.cumsum(lengths) - lengths
    total = int(lengths.sum()) - illegal
    inside = np.clip(positions, starts.first[env_ids], starts.stop[env_ids])
    rows = edges[env_ids] + inside - starts.first[env_ids]
    low: Ids = np.maximum(rows - illegal, 0)
    high: Ids = np.minimum(rows, total)
    while (low < high).any():
        middle = (low + high) // 2
        envs, places = view.start_at(np.minimum(middle, total - 1))
        less = (envs < env_ids) | ((envs == env_ids) & (places < inside))
        less &= low < high
        high = np.where(less, high, np.minimum(middle, high))
        low = np.where(less, middle + 1, low)
    return low


def rank_edges(view: View) -> Ids:
    """First rank of each environment and, last, the number of legal starts.

    Returns:
        int64 ``[E + 1]``.
    """
    starts = view.starts
    edges = np.zeros(len(starts.first) + 1, np.int64)
    if view.num_illegal == 0:
        np.cumsum(starts.lengths, out=edges[1:])
    else:
        edges[:-1] = legal_before(view, np.arange(len(starts.first)), starts.first)
        edges[-1] = num_legal(view)
    return edges


class StretchView(Protocol):
    """A view of which some stretches of legal starts are left, by their ranks.

    Attributes:
        _view: The whole.
        _high: int64 ``[N]``, one past the last rank of each stretch.
        _ends: int64 ``[N]``, legal starts left up to the end of each.
    """

    _view: View
    _high: Ids
    _ends: Ids

    @property
    def home(self) -> Home:
        """See `View.home`."""
        return self._view.home

    @property
    def index(self) -> EpisodeIndex:
        """See `View.index`."""
        return self._view.index

    @property
    def span(self) -> Span:
        """See `View.span`."""
        return self._view.span

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """See `View.flags`."""
        return self._view.flags(env_ids, positions)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """See `View.start_at`."""
        which = np.searchsorted(self._ends, ranks, side="right")
        within: Ids = self._high[which] - (self._ends[which] - ranks)
        return self._view.start_at(within)


class NarrowedView(StretchView):
    """A view of which the oldest legal starts of each environment are left out."""

    def __init__(self, view: View, low: Ids, edges: Ids) -> None:
        """Narrow a view.

        Args:
            view: The buffer now.
            low: int64 ``[E]``, the first rank to keep of each environment.
            edges: int64 ``[E + 1]``, `rank_edges` of the view.
        """
        self._view = view
        self._narrow(low, edges)

    def _narrow(self, low: Ids, edges: Ids) -> None:
        self._low, self._high = low, edges[1:]
        self._ends: Ids = np.cumsum(self._high - low)
        starts = self._view.starts
        first = starts.stop.copy()
        some = np.flatnonzero(low < self._high)
        if len(some):
            first[some] = self._view.start_at(low[some])[1]
        self._starts = Span(first, starts.stop)
        self.num_illegal = int(self._starts.lengths.sum() - self._ends[-1])

    @property
    def starts(self) -> Span:
        """Where legal starts that are left lie; see `View.starts`."""
        return self._starts

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """See `View.legal`."""
        return self._view.legal(env_ids, positions)

    def check_windows(self) -> None:
        """See `samplers.windows_inner.Inner.of`."""
        check: Callable[[], None] | None = getattr(self._view, "check_windows", None)
        if check is not None:
            check()

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """See `legal_before`."""
        low, high = self._low[env_ids], self._high[env_ids]
        ranks = np.clip(legal_before(self._view, env_ids, positions), low, high)
        before: Ids = self._ends[env_ids] - (high - ranks)
        return before


def newest(view: View, counts: Ids, edges: Ids) -> NarrowedView:
    """Keep the newest legal starts of each environment.

    Args:
        view: The buffer now.
        counts: int64 ``[E]``, how many of each at most.
        edges: int64 ``[E + 1]``, `rank_edges` of the view.
    """
    return NarrowedView(view, np.maximum(edges[:-1], edges[1:] - counts), edges)
