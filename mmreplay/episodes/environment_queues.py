"""Queues of growing positions, one for each environment, all in one array.

With one array, the bisection of a batch over thousands of environments is a few
operations on whole columns rather than one for each environment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEVER = (1 << 63) - 1
MIN_CAPACITY = 8
MAX_TURNS = 16

Ids = NDArray[np.int64]


class EnvironmentQueues:
    """Entries are appended at one end of a queue and dropped at the other.

    An entry is a few numbers, its columns, of which the first is a position. Memory is
    at most some four times what the entries take. Not thread-safe.
    """

    __slots__ = ("_capacity_stop", "_data", "_end", "_first", "_stop")

    def __init__(self, num_envs: int, width: int = 1) -> None:
        """Make empty queues.

        Args:
            num_envs: How many.
            width: Numbers in an entry.
        """
        self._data = np.zeros((width, num_envs * MIN_CAPACITY + 1), np.int64)
        # A queue is [first, stop) of the array and may grow up to capacity_stop.
        self._first = np.arange(num_envs, dtype=np.int64) * MIN_CAPACITY
        self._stop = self._first.copy()
        self._capacity_stop = self._first + MIN_CAPACITY
        self._end = num_envs * MIN_CAPACITY

    def values(self, env_id: int, column: int = 0) -> Ids:
        """A column of one queue, int64 ``[N]``, oldest first."""
        return self._data[column, self._first[env_id] : self._stop[env_id]]

    @property
    def columns(self) -> tuple[Ids, Ids, Ids]:
        """Entries of all queues, int64 ``[width, W]``, and where each begins and ends.

        Not to be written into; the next change of a queue may replace them.
        """
        return self._data, self._first, self._stop

    @property
    def firsts(self) -> Ids:
        """int64 ``[E]``, index of the oldest entry of each queue, for `at`."""
        return self._first

    @property
    def lengths(self) -> Ids:
        """int64 ``[E]``, entries in each queue."""
        return self._stop - self._first

    def oldest(self, env_id: int, column: int = 0) -> int:
        """Position, or another column, of the oldest entry; NEVER if there is none."""
        first = self._first[env_id]
        return int(self._data[column, first]) if first < self._stop[env_id] else NEVER

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
        if self._stop[env_id] + count > self._capacity_stop[env_id]:
            self._move(env_id, count)
        stop = int(self._stop[env_id])
        for column, values in zip(self._data, columns, strict=True):
            column[stop : stop + count] = values
        self._stop[env_id] = stop + count
        return count

    def _move(self, env_id: int, count: int) -> None:
        """Move a queue to the end, with capacity for twice what it will hold."""
        first, stop = int(self._first[env_id]), int(self._stop[env_id])
        capacity = 2 * (stop - first + count)
        if self._end + capacity >= self._data.shape[1]:
            self._compact(capacity)
            first, stop = int(self._first[env_id]), int(self._stop[env_id])
        moved, length = self._end, stop - first
        self._data[:, moved : moved + length] = self._data[:, first:stop]
        self._first[env_id], self._stop[env_id] = moved, moved + length
        self._capacity_stop[env_id] = self._end = moved + capacity

    def _compact(self, capacity: int) -> None:
        """Lay all queues end to end in a new array, with free capacity behind them."""
        lengths = self.lengths
        stops = np.cumsum(lengths)
        total = int(stops[-1])
        data = np.zeros((len(self._data), 2 * (total + capacity) + 1), np.int64)
        indices = np.arange(total) + np.repeat(self._stop - stops, lengths)
        data[:, :total] = self._data[:, indices]
        self._data, self._end = data, total
        self._first, self._stop = stops - lengths, stops
        self._capacity_stop = stops.copy()

    def drop_below(self, env_id: int, limit: int, column: int = 0) -> int:
        """Drop the oldest entries whose column is below a limit; return how many."""
        count = int(np.searchsorted(self.values(env_id, column), limit))
        self._first[env_id] += count
        return count

    def find(
        self, env_ids: Ids, positions: Ids, side: str = "left", column: int = 0
    ) -> Ids:
        """Indices where positions belong among the entries of their queues.

        Costs O(B log entries).

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, or values of another column.
            side: ``"left"``: before an equal entry; ``"right"``: behind it.
            column: The column to compare with; it never falls along a queue.

        Returns:
            int64 ``[B]``, for `at`.
        """
        num_envs = len(self._first)
        if num_envs == 1:
            return self._search(0, positions, side, column)
        if num_envs > MAX_TURNS:
            if side == "left":
                positions = positions - 1
            return self.bisect(env_ids, positions, 0, column)
        indices = np.empty(len(positions), np.int64)
        for env_id in range(num_envs):
            here = np.flatnonzero(env_ids == env_id)
            if len(here):
                indices[here] = self._search(env_id, positions[here], side, column)
        return indices

    def _search(self, env_id: int, positions: Ids, side: str, column: int) -> Ids:
        values = self.values(env_id, column)
        indices = values.searchsorted(positions, side)  # type: ignore[call-overload]  # a str for its two literals
        indices += self._first[env_id]
        return indices  # type: ignore[no-any-return]  # intp is int64 here

    def bisect(self, env_ids: Ids, limits: Ids, slope: int, column: int = 0) -> Ids:
        """Indices of the first entries beyond limits.

        Args:
            env_ids: int64 ``[B]``.
            limits: int64 ``[B]``.
            slope: What is compared is the column less slope times the entry's number
                in its queue; it must grow, or stay, along the queue.
            column: See `find`.

        Returns:
            int64 ``[B]``, for `at`.
        """
        values = self._data[column]
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

    def at(self, indices: Ids, column: int = 0) -> Ids:
        """Entries at indices, int64 ``[B]``; any number where there is none."""
        entries: Ids = self._data[column].take(indices, mode="clip")
        return entries

    def number(self, env_ids: Ids, indices: Ids) -> Ids:
        """How many entries of their queues lie before indices, int64 ``[B]``."""
        return indices - self._first[env_ids]
