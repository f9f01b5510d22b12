"""A buffer as seen by a sampler of windows: legal starts are those of whole windows.

The steps of an episode that can be drawn are one stretch of positions: only its
newest can be waiting or cut off, only its oldest can have left the ring. So a
window's start is legal by where it lies in its *run*, the stretch of its episode,
and the legal starts of an environment are all those ever seen, less some at both
ends. Nothing here grows with the buffer but the number of episodes.

Starts keep their distance, the stride, from each other: they are the first step of
each episode and the positions that the stride divides. Counted from the first step
alone they would all move when that step leaves the ring, and so would the priorities
that are kept of them; counted by positions alone, short episodes would have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import END, FINAL, START, EpisodeIndex
from mmreplay.ring import Span
from mmreplay.samplers.base import Home, View
from mmreplay.samplers.windows_runs import Ids, Runs, num_starts
from mmreplay.samplers.windows_scan import first_known, last_legal


@dataclass(frozen=True, slots=True)
class Shape:
    """Which starts have a window.

    Attributes:
        before: Steps that the window needs before its start.
        after: Steps that it needs from the start on, with it; at least 1.
        stride: Distance of starts, at least 1.
        across: The steps may be of several episodes, one after the other.
    """

    before: int
    after: int
    stride: int
    across: bool


class Choice(Protocol):
    """Which episodes may have windows at all."""

    @property
    def headless(self) -> bool:
        """Those whose first steps have left the ring may."""

    @property
    def running(self) -> bool:
        """Those that have not ended yet may."""

    def keep(
        self,
        index: EpisodeIndex,
        env_ids: Ids,
        begins: Ids,
        running: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Choose among episodes; of the newest of each environment, again and again.

        Args:
            index: The episodes alive.
            env_ids: int64 ``[N]``.
            begins: int64 ``[N]``, first steps alive.
            running: bool ``[N]``, they have not ended.

        Returns:
            bool ``[N]``.
        """


class WindowView:
    """A view whose legal starts are the starts of windows.

    It is of one moment, that of the last look at `starts`. Costs O(E + episodes that
    came or went) a look and O(log episodes) a start. Not thread-safe.
    """

    def __init__(self, view: View, shape: Shape, choice: Choice | None = None) -> None:
        """Make one.

        Args:
            view: What single steps may be drawn from.
            shape: Which starts have a window.
            choice: Which episodes have any; None for all.
        """
        self._view = view
        self._shape = shape
        self._choice = choice
        self._envs = np.arange(len(view.span.first))
        self._base: Span | None = None
        self._num_begun: Ids = np.zeros(len(self._envs), np.int64)

    @property
    def home(self) -> Home:
        """What this is a view of."""
        return self._view.home

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""
        return self._view.index

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of alive rows; see `samplers.base.View`."""
        return self._view.flags(env_ids, positions)

    @property
    def span(self) -> Span:
        """What is alive."""
        return self._view.span

    @property
    def starts(self) -> Span:
        """Where legal starts lie; whether rows below its stop are one is settled."""
        self.look()
        return self._starts

    @property
    def num_illegal(self) -> int:
        """Rows within `starts`, as last looked at, that start no window."""
        return int(self._starts.lengths.sum()) - self.num_legal

    def look(self) -> int:
        """Look at the buffer now, and return the number of legal starts."""
        base = self._view.starts
        if base is not self._base:
            self._look(base)
        return self.num_legal

    @property
    def num_legal(self) -> int:
        """Legal starts, as last looked at."""
        return int(self._rank_stops[-1])

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Tell legal starts; see `samplers.base.View`."""
        begin, stop, _ = self._runs.at_positions(env_ids, positions)
        legal: NDArray[np.bool_] = (positions >= begin) & (positions < stop)
        legal &= positions >= self._lower[env_ids]
        if self._shape.across:
            legal &= positions < self._starts.stop[env_ids]
        if self._shape.stride > 1:
            legal &= (positions == begin) | (positions % self._shape.stride == 0)
        return legal

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank; see `samplers.base.View`."""
        env_ids = np.searchsorted(self._rank_stops, ranks, side="right")
        within = ranks - self._rank_stops[env_ids] + self._rank_ends[env_ids]
        return env_ids, self._runs.starts_at(env_ids, within)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts of all environments, in rank order, before positions.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; outside of `starts` the nearest edge counts.
        """
        stop = self._starts.stop[env_ids]
        inside = np.clip(positions, np.minimum(self._lower[env_ids], stop), stop)
        ranks = self._runs.below(env_ids, inside)
        ranks = np.clip(ranks, self._rank_firsts[env_ids], self._rank_ends[env_ids])
        before: Ids = self._rank_stops[env_ids] - (self._rank_ends[env_ids] - ranks)
        return before

    def stretches(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """First step and one past the last of the episodes that hold legal starts.

        Where windows are whole, what is returned is less what they need.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``.
        """
        begin, stop, _ = self._runs.at_positions(env_ids, positions)
        known = self._known[env_ids]
        begin = np.where(begin == self._headless[env_ids], known, begin)
        return np.maximum(begin, known), stop

    def steps_around(
        self, env_ids: Ids, positions: Ids
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Positions of the steps of windows that go across episodes.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, legal starts.

        Returns:
            int64 ``[B, before + after]``, steps one after the other, and bool of that
            shape, where episodes begin.
        """
        steps, offsets = self._steps, np.arange(-self._shape.before, self._shape.after)
        around: Ids = positions[:, None] + offsets
        if self._view.num_illegal == 0:
            # Every row is a step, and the next one follows it.
            ids = np.repeat(env_ids, len(offsets))
            flags = self._view.flags(ids, around.reshape(-1)) & START
            return around, flags.reshape(around.shape) != 0
        begin, stop, before = steps.at_positions(env_ids, positions)
        fresh = np.zeros(around.shape, bool)
        # Most windows stay within an episode, where steps follow each other.
        leaves = np.flatnonzero((around[:, 0] < begin) | (around[:, -1] >= stop))
        if len(leaves):
            ranks = (positions - begin + before)[leaves, None] + offsets
            ids = np.repeat(env_ids[leaves], len(offsets))
            found = steps.starts_at(ids, ranks.reshape(-1))
            around[leaves] = found.reshape(ranks.shape)
            flags = self._view.flags(ids, found) & START
            fresh[leaves] = flags.reshape(ranks.shape)
        fresh[:, 0] = self._view.flags(env_ids, around[:, 0]) & START
        return around, fresh

    def _look(self, base: Span) -> None:
        index = self._view.index
        if self._base is None or index is not self._index:
            self._forget(index, base)
        for env_id in np.flatnonzero(index.num_begun != self._num_begun).tolist():
            self._take(env_id, base)
        self._num_begun = index.num_begun.copy()
        self._reopen(base)
        self._drop(base)
        self._bound(base)
        self._base = base

    def _forget(self, index: EpisodeIndex, base: Span) -> None:
        """Forget everything, as of a buffer that was not seen yet."""
        num_envs, shape = len(self._envs), self._shape
        self._index = index
        self._num_begun = np.zeros(num_envs, np.int64)
        self._runs = Runs(num_envs, shape.stride)
        # All steps, by which windows that go across episodes are counted out.
        lattice = shape.across and shape.stride > 1
        self._steps = Runs(num_envs, 1) if lattice else self._runs
        # The newest episode of each environment; what was there before us counts as
        # one whose first step is gone.
        self._open = base.first.copy()
        self._whole = np.zeros(num_envs, bool)
        # First start of the run whose first step was gone when it was taken in.
        self._headless = np.full(num_envs, -1)

    @property
    def _margins(self) -> tuple[int, int]:
        """Steps of a run, at its two ends, that are no start."""
        shape = self._shape
        return (0, 0) if shape.across else (shape.before, shape.after - 1)

    def _take(self, env_id: int, base: Span) -> None:
        """Take in the episodes that are over, since others began after them."""
        fresh = int(self._index.num_begun[env_id] - self._num_begun[env_id])
        begins = self._index.begins(env_id)[-fresh:]
        if len(begins) == 0:
            return
        lows = np.concatenate([self._open[env_id : env_id + 1], begins[:-1]])
        first, stop = base.first[env_id], base.stop[env_id]
        seen = np.clip(lows, first, stop), np.clip(begins, first, stop)
        stops = last_legal(self._view, np.full(len(lows), env_id), *seen)
        self._push(env_id, lows, np.minimum(stops, begins), int(first))
        self._open[env_id], self._whole[env_id] = begins[-1], True

    def _push(self, env_id: int, lows: Ids, stops: Ids, oldest: int) -> None:
        starts = lows + self._margins[0]
        starts[:1] = self._first_starts(starts[:1], self._whole[env_id])
        runs, until = self._runs, stops - self._margins[1]
        counts = num_starts(starts, until, self._shape.stride)
        if self._choice is not None:
            self._choose(self._choice, env_id, lows, oldest, counts)
        if not self._whole[env_id]:
            self._headless[env_id] = starts[0] if counts[0] else -1
        runs.push(env_id, starts, until, counts)
        if self._steps is not runs:
            self._steps.push(env_id, lows, stops, np.maximum(stops - lows, 0))

    def _choose(
        self, choice: Choice, env_id: int, lows: Ids, oldest: int, counts: Ids
    ) -> None:
        """Take the starts from episodes that are not chosen."""
        if not choice.headless:
            counts[lows < oldest] = 0
            counts[:1] *= self._whole[env_id]
        some = np.flatnonzero(counts)
        if len(some):
            begins = np.maximum(lows[some], oldest)
            ids = np.full(len(some), env_id)
            over = np.zeros(len(some), bool)
            counts[some] *= choice.keep(self._index, ids, begins, over)

    def _first_starts(self, starts: Ids, whole: NDArray[np.bool_]) -> Ids:
        """Put the starts of runs whose first step is gone on the stride."""
        stride = self._shape.stride
        first: Ids = np.where(whole, starts, -(-starts // stride) * stride)
        return first

    def _reopen(self, base: Span) -> None:
        """Look how far the newest episodes have come."""
        lows = np.clip(self._open, base.first, base.stop)
        self._open_stop = last_legal(self._view, self._envs, lows, base.stop)
        self._settled = self._open_stop
        starts = self._first_starts(self._open + self._margins[0], self._whole)
        self._headless = np.where(self._whole, self._headless, starts)
        until = self._open_stop - self._margins[1]
        if self._choice is not None:
            until = self._choose_newest(self._choice, starts, until, lows)
        self._runs.reopen(starts, until)
        if self._steps is not self._runs:
            self._steps.reopen(self._open, self._open_stop)

    def _choose_newest(self, choice: Choice, starts: Ids, until: Ids, lows: Ids) -> Ids:
        """Take the starts from newest episodes that are not chosen."""
        some = np.flatnonzero(until > starts)
        last = self._view.flags(some, self._view.span.stop[some] - 1)
        running = (last & (END | FINAL)) == 0
        if not choice.running:
            some, running = some[~running], running[~running]
        if not choice.headless:
            # The first step may be alive and yet before what the view shows.
            whole = self._open[some] >= lows[some]
            some, running = some[whole], running[whole]
        kept = np.zeros(len(starts), bool)
        kept[some] = choice.keep(self._index, some, lows[some], running)
        # Those that are left out may yet be drawn when they are over.
        self._settled = np.where(kept, self._open_stop, self._open)
        return np.where(kept, until, starts)

    def _drop(self, base: Span) -> None:
        """Drop what has left the ring."""
        if self._choice is None or self._choice.headless:
            self._known = first_known(self._view, self._envs, base.first, base.stop)
        else:
            # The first step may be alive and yet before what the view shows.
            self._known = np.array(
                [self._first_begin(*place) for place in enumerate(base.first.tolist())]
            )
            self._known = np.where(self._known < 0, base.stop, self._known)
        for runs in (self._runs, self._steps):
            for env_id in np.flatnonzero(runs.oldest <= self._known).tolist():
                runs.drop(env_id, int(self._known[env_id]))

    def _first_begin(self, env_id: int, first: int) -> int:
        """Where the oldest episode begins at a position or after it; -1 for nowhere."""
        begins = self._index.begins(env_id)
        which = int(np.searchsorted(begins, first))
        return int(begins[which]) if which < len(begins) else -1

    def _bound(self, base: Span) -> None:
        """Find between which ranks, and which positions, starts are legal."""
        if self._shape.across:
            stop, firsts, ends = self._bounds_across(base)
        else:
            self._lower = self._known + self._shape.before
            stop = np.maximum(self._open, self._settled - self._margins[1])
            firsts = self._runs.below(self._envs, self._lower)
            ends = self._runs.ends
        stop = np.clip(stop, base.first, base.stop)
        self._starts = Span(np.minimum(self._lower, stop), stop)
        counts = np.maximum(ends - firsts, 0)
        self._rank_firsts, self._rank_ends = firsts, firsts + counts
        self._rank_stops = np.cumsum(counts)

    def _bounds_across(self, base: Span) -> tuple[Ids, Ids, Ids]:
        """One past the last start, and the ranks of the first and one past the last."""
        steps, envs, shape = self._steps, self._envs, self._shape
        lost = steps.below(envs, self._known)
        firsts, ends = lost + shape.before, steps.ends - (shape.after - 1)
        last = steps.starts_at(envs, np.maximum(ends - 1, lost))
        stop = np.where(ends > lost, last + 1, base.first)
        first = steps.starts_at(envs, np.clip(firsts, lost, steps.ends - 1))
        self._lower = np.where(firsts < steps.ends, first, base.stop)
        if steps is self._runs:
            return stop, firsts, ends
        return stop, self._runs.below(envs, self._lower), self._runs.below(envs, stop)
