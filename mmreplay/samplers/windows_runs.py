"""Runs of starts, found by rank or by position whatever their number.

A *run* is a stretch of positions of one environment, as a rule an episode, in which
some are *starts*: its first position, and those that the stride divides. Runs arrive
at one end and leave at the other, as rows do, and ranks count every start that ever
was: nothing that stays has to be counted again when others come or go.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Found = tuple[Ids, Ids, Ids]
"""Of runs: begin, stop, and the starts of the environment before, int64 ``[N]``."""

MIN_ROOM = 4


def num_starts(begin: Ids, stop: Ids, stride: int) -> Ids:
    """Count the starts of ``[begin, stop)``, where begin is one; int64 ``[N]``."""
    if stride == 1:
        return (stop - begin).clip(0)
    return np.where(stop > begin, (stop - 1) // stride - begin // stride + 1, 0)


class Runs:
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
