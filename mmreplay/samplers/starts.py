"""Ranks of legal starts, and views narrowed to the newest of each environment.

A legal start's *rank* is its place among all of a view: environment by environment,
oldest first. `View.start_at` gives the start of a rank; here is the way back.

Runs of starts, found by rank or by position whatever their number.

A *run* is a stretch of positions of one environment, as a rule an episode, in which
some are *starts*: its first position, and those that the stride divides. Runs arrive
at one end and leave at the other, as rows do, and ranks count every start that ever
was: nothing that stays has to be counted again when others come or go.

Where the steps of an episode that can be drawn begin and stop.

All but a few of an episode's rows can be drawn: what cannot lies at its ends, and
looking from there finds the edge in as few rows as it is away.

A buffer as seen by a sampler of windows: legal starts are those of whole windows.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import END, FINAL, START, EpisodeIndex
from mmreplay.errors import EmptyError
from mmreplay.ring import Span
from mmreplay.samplers.base import BufferIdentity, View

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
    def home(self) -> BufferIdentity:
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


Found = tuple[Ids, Ids, Ids]
"""Of runs: begin, stop, and the starts of the environment before, int64 ``[N]``."""

MIN_ROOM = 4


def num_starts(begin: Ids, stop: Ids, stride: int) -> Ids:
    """Count the starts of ``[begin, stop)``, where begin is one; int64 ``[N]``."""
    if stride == 1:
        return (stop - begin).clip(0)
    return np.where(stop > begin, (stop - 1) // stride - begin // stride + 1, 0)


class StartRuns:
    """Runs of each environment, oldest first; the newest may still grow.

    Costs 24 bytes a run and O(log runs) a look-up; taking in and dropping runs cost
    their number, amortised. Not thread-safe.

    Attributes:
        stride: Distance of starts within a run.
        total: int64 ``[E]``, starts of all finished runs ever taken in.
        ends: int64 ``[E]``, those and the starts of the newest runs.
        oldest: int64 ``[E]``, stop of the oldest finished run; where there is none,
            one that no position reaches.
    """

    def __init__(self, num_envs: int, stride: int) -> None:
        """Make one without runs.

        Args:
            num_envs: Environments.
            stride: At least 1.
        """
        self.stride = stride
        self.total = np.zeros(num_envs, np.int64)
        self.ends = np.zeros(num_envs, np.int64)
        self._open = self._open_stop = np.zeros(num_envs, np.int64)
        self.oldest = np.full(num_envs, np.iinfo(np.int64).max)
        # Each environment has room of its own in the columns, [room, room_stop), of
        # which [first, stop) is in use. Enlarging one moves it to the end.
        self._first = np.arange(num_envs) * MIN_ROOM
        self._stop = self._first.copy()
        self._room = self._first.copy()
        self._room_stop = self._first + MIN_ROOM
        self._columns = np.zeros((3, num_envs * MIN_ROOM), np.int64)
        self._name()

    def _name(self) -> None:
        self._begins, self._stops, self._before = self._columns

    def push(self, env_id: int, begin: Ids, stop: Ids, counts: Ids) -> None:
        """Take in runs of one environment, newer than those it has.

        Args:
            env_id: The environment.
            begin: int64 ``[N]``, first start of each run, growing.
            stop: int64 ``[N]``, one past where the last start may be.
            counts: int64 ``[N]``, starts of each run; one with none is left out.
        """
        some = np.flatnonzero(counts)
        if len(some) == 0:
            return
        if len(some) < len(counts):
            begin, stop, counts = begin[some], stop[some], counts[some]
        self._make_room(env_id, len(counts))
        first = int(self._stop[env_id])
        here = slice(first, first + len(counts))
        ends = np.cumsum(counts) + self.total[env_id]
        self._begins[here], self._stops[here] = begin, stop
        self._before[here] = ends - counts
        self.total[env_id] = ends[-1]
        self._stop[env_id] += len(counts)
        self.oldest[env_id] = self._stops[self._first[env_id]]

    def _make_room(self, env_id: int, more: int) -> None:
        first, stop = int(self._first[env_id]), int(self._stop[env_id])
        if stop + more <= self._room_stop[env_id]:
            return
        need, room = stop - first + more, int(self._room[env_id])
        if 2 * need > self._room_stop[env_id] - room:
            room = self._columns.shape[1]
            if room > 4 * int((self._stop - self._first).sum()) + 64 * len(self._first):
                room = self._compact()
                first, stop = int(self._first[env_id]), int(self._stop[env_id])
            wider = np.zeros((3, room + 2 * need), np.int64)
            wider[:, :room] = self._columns
            self._room[env_id], self._room_stop[env_id] = room, room + 2 * need
            self._columns = wider
            self._name()
        self._columns[:, room : room + stop - first] = self._columns[:, first:stop]
        self._first[env_id], self._stop[env_id] = room, room + stop - first

    def _compact(self) -> int:
        """Lay all runs end to end and return where they end."""
        sizes = self._stop - self._first
        stops = np.cumsum(sizes)
        where = np.repeat(self._first - (stops - sizes), sizes) + np.arange(stops[-1])
        self._columns = self._columns[:, where]
        self._room = self._first = stops - sizes
        self._room, self._room_stop = self._room.copy(), stops.copy()
        self._stop = stops
        return int(stops[-1])

    def drop(self, env_id: int, position: int) -> None:
        """Drop the runs of one environment that stop at a position or before it."""
        first, stop = int(self._first[env_id]), int(self._stop[env_id])
        first += int(np.searchsorted(self._stops[first:stop], position, side="right"))
        self._first[env_id] = first
        empty = first == stop
        self.oldest[env_id] = np.iinfo(np.int64).max if empty else self._stops[first]

    def __len__(self) -> int:
        """Finished runs of all environments."""
        return int((self._stop - self._first).sum())

    def reopen(self, begins: Ids, stops: Ids) -> None:
        """Say what the newest run of each environment is, which still grows.

        Args:
            begins: int64 ``[E]``, first starts, beyond all finished runs.
            stops: int64 ``[E]``, one past where the last start may be.
        """
        self._open, self._open_stop = begins, stops
        self.ends = self.total + num_starts(begins, stops, self.stride)

    def at_ranks(self, env_ids: Ids, ranks: Ids) -> Found:
        """Find runs by the ranks of their starts.

        Args:
            env_ids: int64 ``[N]``.
            ranks: int64 ``[N]``, of starts that were not dropped.
        """
        which = self._search(self._before, env_ids, ranks)
        return self._found(which, env_ids, ranks >= self.total[env_ids])

    def at_positions(self, env_ids: Ids, positions: Ids) -> Found:
        """Find the newest runs that begin at positions or before.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``; where no run begins before, the oldest is found.
        """
        which = self._search(self._begins, env_ids, positions)
        newest = (positions >= self._open[env_ids]) | (self._first == self._stop)[
            env_ids
        ]
        return self._found(which, env_ids, newest)

    def _found(self, which: Ids, env_ids: Ids, newest: NDArray[np.bool_]) -> Found:
        # Clipped: of an environment without finished runs, anything may be found.
        begin = self._begins.take(which, mode="clip")
        stop = self._stops.take(which, mode="clip")
        before = self._before.take(which, mode="clip")
        if newest.any():
            begin = np.where(newest, self._open[env_ids], begin)
            stop = np.where(newest, self._open_stop[env_ids], stop)
            before = np.where(newest, self.total[env_ids], before)
        return begin, stop, before

    def below(self, env_ids: Ids, positions: Ids) -> Ids:
        """Ranks: how many starts each environment ever had before a position.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, not before the starts that were dropped.

        Returns:
            int64 ``[N]``.
        """
        begin, stop, before = self.at_positions(env_ids, positions)
        found: Ids = before + num_starts(
            begin, np.minimum(positions, stop), self.stride
        )
        return found

    def starts_at(self, env_ids: Ids, ranks: Ids) -> Ids:
        """Positions of starts by rank; see `at_ranks`."""
        begin, _, before = self.at_ranks(env_ids, ranks)
        if self.stride == 1:
            return begin + (ranks - before)
        beyond: Ids = (begin // self.stride + (ranks - before)) * self.stride
        np.maximum(begin, beyond, out=beyond)
        return beyond

    def _search(self, column: Ids, env_ids: Ids, values: Ids) -> Ids:
        """Index of the last run whose column is at most the value."""
        if len(self._first) == 1:
            first, stop = int(self._first[0]), int(self._stop[0])
            found = np.searchsorted(column[first:stop], values, side="right") - 1
            return np.maximum(found, 0) + first
        low, high = self._first[env_ids], self._stop[env_ids]
        least = low
        # One bisection for all: a search each would cost a call an environment.
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            below = column.take(middle, mode="clip") <= values
            below &= low < high
            low = np.where(below, middle + 1, low)
            high = np.where(below, high, middle)
        return np.maximum(low - 1, least)


MAX_WIDTH = 64
MAX_RUNS = 1 << 16


def last_legal(view: View, env_ids: Ids, lows: Ids, stops: Ids) -> Ids:
    """Find where the last legal starts of stretches are.

    Args:
        view: Looked at, see `View.starts`.
        env_ids: int64 ``[N]``.
        lows: int64 ``[N]``, first rows of the stretches, within `starts`.
        stops: int64 ``[N]``, one past their last rows, within `starts`.

    Returns:
        int64 ``[N]``, one past the last legal start of each stretch; its low where
        it has none.
    """
    found = lows.copy()
    # In pieces, so that opening a buffer of any size takes little memory.
    for first in range(0, len(lows), MAX_RUNS):
        piece = slice(first, first + MAX_RUNS)
        _from_the_end(view, env_ids[piece], lows[piece], stops[piece], found[piece])
    return found


def _from_the_end(view: View, env_ids: Ids, lows: Ids, stops: Ids, found: Ids) -> None:
    todo = np.flatnonzero(stops > lows)
    tops, width = stops[todo], 1
    while len(todo):
        rows = tops[:, None] - np.arange(1, width + 1)
        inside = rows >= lows[todo, None]
        rows = np.where(inside, rows, lows[todo, None])
        legal = view.legal(np.repeat(env_ids[todo], width), rows.reshape(-1))
        legal = legal.reshape(rows.shape) & inside
        hit = legal.any(1)
        found[todo[hit]] = rows[hit, legal[hit].argmax(1)] + 1
        left = np.flatnonzero(~hit & inside[:, -1])
        todo, tops = todo[left], tops[left] - width
        width = min(MAX_WIDTH, 4 * width)


def first_known(view: View, env_ids: Ids, firsts: Ids, stops: Ids) -> Ids:
    """Find the first rows that begin an episode or are legal starts.

    Args:
        view: Looked at, see `View.starts`.
        env_ids: int64 ``[N]``.
        firsts: int64 ``[N]``, within `starts`.
        stops: int64 ``[N]``, where to stop looking, within `starts`.

    Returns:
        int64 ``[N]``; stops where there is none.
    """
    found = np.maximum(firsts, stops)
    todo, width = np.flatnonzero(stops > firsts), 1
    lows = firsts[todo]
    while len(todo):
        rows = lows[:, None] + np.arange(width)
        inside = rows < stops[todo, None]
        rows = np.where(inside, rows, stops[todo, None] - 1)
        ids, flat = np.repeat(env_ids[todo], width), rows.reshape(-1)
        known = view.legal(ids, flat) | ((view.flags(ids, flat) & START) != 0)
        known = known.reshape(rows.shape)
        hit = known.any(1)
        found[todo[hit]] = rows[hit, known[hit].argmax(1)]
        left = np.flatnonzero(~hit & inside[:, -1])
        todo, lows = todo[left], lows[left] + width
        width = min(MAX_WIDTH, 4 * width)
    return found


@dataclass(frozen=True, slots=True)
class WindowShape:
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


class EpisodeFilter(Protocol):
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

    def __init__(
        self, view: View, shape: WindowShape, choice: EpisodeFilter | None = None
    ) -> None:
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
    def home(self) -> BufferIdentity:
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
        self._runs = StartRuns(num_envs, shape.stride)
        # All steps, by which windows that go across episodes are counted out.
        lattice = shape.across and shape.stride > 1
        self._steps = StartRuns(num_envs, 1) if lattice else self._runs
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
        self, choice: EpisodeFilter, env_id: int, lows: Ids, oldest: int, counts: Ids
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

    def _choose_newest(
        self, choice: EpisodeFilter, starts: Ids, until: Ids, lows: Ids
    ) -> Ids:
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
