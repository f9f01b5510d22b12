"""Queues of growing positions, one an environment, all in one array.

One array, so that a bisection of a batch over thousands of environments is a few
operations on whole columns and not one for each environment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEVER = (1 << 63) - 1
ROOM = 8
MAX_TURNS = 16

Ids = NDArray[np.int64]


class EnvironmentQueues:
    """Appended at one end, dropped at the other; each entry is a few numbers.

    The first number of an entry is its position. Memory is at most some four times
    what is in the queues. Not thread-safe.
    """

    __slots__ = ("_data", "_end", "_first", "_room", "_stop")

    def __init__(self, num_envs: int, width: int = 1) -> None:
        """Make empty queues.

        Args:
            num_envs: How many.
            width: Numbers an entry.
        """
        self._data = np.zeros((width, num_envs * ROOM + 1), np.int64)
        self._first = np.arange(num_envs, dtype=np.int64) * ROOM
        self._stop = self._first.copy()
        self._room = self._first + ROOM
        self._end = num_envs * ROOM

    def values(self, env_id: int, column: int = 0) -> Ids:
        """A column of one queue, int64 ``[N]``, oldest first."""
        return self._data[column, self._first[env_id] : self._stop[env_id]]

    @property
    def columns(self) -> tuple[Ids, Ids, Ids]:
        """Entries of all queues, int64 ``[width, W]``, and where each begins and ends.

        Not to be written into, and of this moment.
        """
        return self._data, self._first, self._stop

    @property
    def lengths(self) -> Ids:
        """int64 ``[E]``, entries in each queue."""
        return self._stop - self._first

    def oldest(self, env_id: int) -> int:
        """Position of the oldest entry, or NEVER."""
        first = self._first[env_id]
        return int(self._data[0, first]) if first < self._stop[env_id] else NEVER

    def oldest_of_each(self) -> Ids:
        """int64 ``[E]``, position of the oldest entry, or NEVER."""
        return np.where(
            self._first < self._stop, self._data[0].take(self._first), NEVER
        )

    def append(self, env_id: int, *columns: Ids) -> int:
        """Put entries at the end of a queue, positions first; return how many."""
        count = len(columns[0])
        if count == 0:
            return 0
        if self._stop[env_id] + count > self._room[env_id]:
            self._move(env_id, count)
        stop = int(self._stop[env_id])
        for column, values in zip(self._data, columns, strict=True):
            column[stop : stop + count] = values
        self._stop[env_id] = stop + count
        return count

    def _move(self, env_id: int, count: int) -> None:
        """Give a queue another place, with room for twice what it will hold."""
        first, stop = int(self._first[env_id]), int(self._stop[env_id])
        room = 2 * (stop - first + count)
        if self._end + room >= self._data.shape[1]:
            self._compact(room)
            first, stop = int(self._first[env_id]), int(self._stop[env_id])
        place = self._end
        self._data[:, place : place + stop - first] = self._data[:, first:stop]
        self._first[env_id], self._stop[env_id] = place, place + stop - first
        self._room[env_id] = self._end = place + room

    def _compact(self, room: int) -> None:
        """Put all queues side by side in a new array, and leave room behind them."""
        lengths = self.lengths
        stops = np.cumsum(lengths)
        total = int(stops[-1])
        data = np.zeros((len(self._data), 2 * (total + room) + 1), np.int64)
        places = np.arange(total) + np.repeat(self._stop - stops, lengths)
        data[:, :total] = self._data[:, places]
        self._data, self._end = data, total
        self._first, self._stop = stops - lengths, stops
        self._room = stops.copy()

    def drop_below(self, env_id: int, position: int) -> int:
        """Take away the entries below a position; return how many."""
        count = int(np.searchsorted(self.values(env_id), position))
        self._first[env_id] += count
        return count

    def find(self, env_ids: Ids, positions: Ids, side: str = "left") -> Ids:
        """Places where positions belong among the entries of their queues.

        Costs O(B log entries).

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``.
            side: ``"left"``: before an equal entry; ``"right"``: behind it.

        Returns:
            int64 ``[B]``, for `at`.
        """
        num_envs = len(self._first)
        if num_envs == 1:
            return self._search(0, positions, side)
        if num_envs > MAX_TURNS:
            if side == "left":
                positions = positions - 1
            return self.bisect(env_ids, positions, 0)
        found = np.empty(len(positions), np.int64)
        for env_id in range(num_envs):
            here = np.flatnonzero(env_ids == env_id)
            if len(here):
                found[here] = self._search(env_id, positions[here], side)
        return found

    def _search(self, env_id: int, positions: Ids, side: str) -> Ids:
        found = self.values(env_id).searchsorted(positions, side)  # type: ignore[call-overload]  # a str for its two literals
        found += self._first[env_id]
        return found  # type: ignore[no-any-return]  # intp is int64 here

    def bisect(self, env_ids: Ids, limits: Ids, slope: int) -> Ids:
        """Places of the first entries beyond limits.

        Args:
            env_ids: int64 ``[B]``.
            limits: int64 ``[B]``.
            slope: What is compared is the position less slope times the entry's
                number in its queue; it must grow, or stay, along the queue.

        Returns:
            int64 ``[B]``, for `at`.
        """
        values = self._data[0]
        first = self._first[env_ids]
        low, high = first, self._stop[env_ids]
        longest = int((high - low).max(initial=0))
        for _ in range(longest.bit_length()):
            middle = (low + high) >> 1
            passed = values.take(middle) - slope * (middle - first) <= limits
            passed &= low < high
            low = np.where(passed, middle + 1, low)
            high = np.where(passed, high, np.minimum(middle, high))
        return low

    def at(self, places: Ids, column: int = 0) -> Ids:
        """Entries at places, int64 ``[B]``; any number where there is none."""
        entries: Ids = self._data[column].take(places, mode="clip")
        return entries

    def number(self, env_ids: Ids, places: Ids) -> Ids:
        """How many entries of their queues lie before places, int64 ``[B]``."""
        return places - self._first[env_ids]
