"""The index of episodes and of the steps that may be drawn, built from flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.episodes.flags import CUT, END, FINAL, START, TERMINATED
from mmreplay.ring import Span

_kernel = kernels.load("steps")
INT64 = np.dtype(np.int64)
"""Given as what it is, it need not be looked up."""

SCAN_ROWS = 1 << 22
LONG_AGO = -(1 << 62)
NEVER = (1 << 63) - 1
MIN_CAPACITY = 8
MAX_TURNS = 16

Ids = NDArray[np.int64]

FlagReader = Callable[[int, int, int], NDArray[np.uint8]]
"""(env_id, first, stop) to uint8 ``[stop - first]``."""
RowReader = Callable[[Ids, Ids], NDArray[np.uint8]]
"""(env_ids, positions), int64 ``[N]`` each, to uint8 ``[N]``."""


@dataclass(frozen=True, slots=True)
class EnvironmentEpisodes:
    """Some episodes of one environment, oldest first.

    Attributes:
        env_id: The environment.
        begin: int64 ``[N]``, position of the first step alive.
        end: int64 ``[N]``, one past the last step (a final row is not in it).
        headless: bool ``[N]``, the first steps have left the ring.
        running: bool ``[N]``, no end was seen and the episode is the newest.
    """

    env_id: int
    begin: Ids
    end: Ids
    headless: NDArray[np.bool_]
    running: NDArray[np.bool_]

    @property
    def lengths(self) -> Ids:
        """int64 ``[N]``, steps alive."""
        return self.end - self.begin


class EpisodeIndex:
    """Episodes of a buffer, kept up to date by looking at new rows' flags only.

    It also knows the *legal starts*: the steps whose data, and the data that is made
    of the rows around them, is known. A step is one if within `after` rows, itself
    the first, its episode ends with a usable end, or the row that many after it is
    there and of its episode; and if `before` rows before it are alive, or its
    episode's first one is. An end is usable if the next observation is known or not
    needed: where it is derived, if the step terminated or a final row follows;
    where it is stored, always.

    Costs O(new rows) an update and some 32 bytes an episode. Not thread-safe.

    Attributes:
        num_illegal: Rows within `starts` that are no legal start.
        num_forced_truncations: Rows seen so far whose CUT flag truncates the step
            before.
        bare: Some episode may have ended without a final row.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        derived: bool,
        final_follows: bool,
        before: int = 0,
        after: int | None = None,
    ) -> None:
        """Make an empty index.

        Args:
            num_envs: Environments.
            derived: The next observation is read from the following row.
            final_follows: The row after an end is the final row (``"next_step"``).
            before: Rows read before a step.
            after: Rows read after it; one where next observations are derived, and
                none where they are stored, if not given.
        """
        self._derived = derived
        self._final_follows = final_follows
        self._before = before
        self._after = int(derived) if after is None else after
        self._seen = np.zeros(num_envs, np.int64)
        self._first = np.zeros(num_envs, np.int64)
        self._last = np.full(num_envs, FINAL, np.uint8)
        # Where the newest episode begins, or the row after its final row.
        self._begin = np.full(num_envs, LONG_AGO)
        # Per environment, the oldest position in any queue: what to drop is found
        # without a look at each of thousands of environments.
        self._oldest = np.full(num_envs, NEVER)
        # Each start has with it where the steps of the episode before it end.
        self._starts = EnvironmentQueues(num_envs, 2)
        self._finals = EnvironmentQueues(num_envs)
        self._illegal = EnvironmentQueues(num_envs)
        self._num_begun = np.zeros(num_envs, np.int64)
        self._num_finals = 0
        self.num_illegal = 0
        self._legal_span: Span | None = None
        self._steps_span: Span | None = None
        self.num_forced_truncations = 0
        self.bare = False

    def update(
        self, span: Span, read_flags: FlagReader, read_rows: RowReader | None = None
    ) -> None:
        """Add the rows published since the last call, drop those no longer alive.

        Args:
            span: What is alive now.
            read_flags: Gives the flags of a stretch of one environment.
            read_rows: Gives the flags of a row each of some; saves time where several
                environments moved.
        """
        self._legal_span = self._steps_span = None
        moved = np.flatnonzero(span.stop != self._seen)
        if read_rows is not None and len(moved) > 1:
            moved = self._take_plain(moved, span, read_rows)
        for env_id in moved.tolist():
            stop = int(span.stop[env_id])
            seen = int(self._seen[env_id])
            first = max(seen, int(span.first[env_id]))
            if first > seen:
                # Rows came and went unseen: what was seen is not their neighbour.
                self._last[env_id] = FINAL
                self._begin[env_id] = LONG_AGO
            # In chunks, so that opening a ring of any size takes little memory.
            for start in range(first, stop, SCAN_ROWS):
                until = min(stop, start + SCAN_ROWS)
                self._take(env_id, start, read_flags(env_id, start, until))
            self._seen[env_id] = stop
        for env_id in np.flatnonzero(self._oldest < span.first).tolist():
            first = int(span.first[env_id])
            self._starts.drop_below(env_id, first)
            self._num_finals -= self._finals.drop_below(env_id, first)
            self.num_illegal -= self._illegal.drop_below(env_id, first)
            self._update_oldest(env_id)
        self._first = span.first
        if self._before:
            self._drop_before_first()

    def _take_plain(self, moved: Ids, span: Span, read_rows: RowReader) -> Ids:
        """Add single steps that begin no episode; return the other environments."""
        seen = self._seen[moved]
        alone = (span.stop[moved] == seen + 1) & (span.first[moved] <= seen)
        env_ids = moved[alone]
        flags = read_rows(env_ids, seen[alone])
        plain = (flags & (START | FINAL)) == 0
        env_ids, flags = env_ids[plain], flags[plain]
        if not self._final_follows:
            self.bare |= bool((flags & END).any())
        self._last[env_ids] = flags
        alone[alone] = plain
        self._seen[env_ids] += 1
        left: Ids = moved[~alone]
        return left

    def _take(self, env_id: int, first: int, flags: NDArray[np.uint8]) -> None:
        if len(flags) == 0:
            return
        if not np.bitwise_or.reduce(flags) & (START | FINAL):
            # What an add of a step or two brings nearly always: nothing begins.
            self._last[env_id] = last = flags[-1]
            self.bare |= bool(last & END) and not self._final_follows
            return
        starts, finals = _where(flags, START, first), _where(flags, FINAL, first)
        chain = np.concatenate([self._last[env_id : env_id + 1], flags])
        # The rows before those that begin an episode: the last ones of others.
        closing = chain[starts - first]
        cuts = (flags[starts - first] & CUT) != 0
        illegal = finals
        if len(starts) and self._after:
            begins = np.concatenate([self._begin[env_id : env_id + 1], starts[:-1]])
            if self._derived:
                usable = (closing & (TERMINATED | FINAL)) != 0
            else:
                usable = ((closing & (END | FINAL)) != 0) | cuts
            rows = _last_rows(begins[~usable], starts[~usable], self._after)
            illegal = np.union1d(finals, rows) if len(finals) else rows
        closed = starts - ((closing & FINAL) != 0)
        self._num_begun[env_id] += self._starts.append(env_id, starts, closed)
        self._num_finals += self._finals.append(env_id, finals)
        self.num_illegal += self._illegal.append(env_id, illegal)
        self.num_forced_truncations += int(np.count_nonzero(cuts))
        alone = flags[-1:] if not self._final_follows else flags[:0]
        self.bare |= bool(((closing & FINAL) == 0).any() or (alone & END).any())
        self._last[env_id] = flags[-1]
        if len(starts):
            self._begin[env_id] = starts[-1]
        if len(finals):
            self._begin[env_id] = max(self._begin[env_id], finals[-1] + 1)
        self._update_oldest(env_id)

    def _update_oldest(self, env_id: int) -> None:
        queues = (self._starts, self._finals, self._illegal)
        self._oldest[env_id] = min(queue.oldest(env_id) for queue in queues)

    def _drop_before_first(self) -> None:
        """Take the rows before the first legal start out of those within them."""
        firsts = self.starts.first
        for env_id in np.flatnonzero(self._illegal.oldest_of_each() < firsts).tolist():
            dropped = self._illegal.drop_below(env_id, int(firsts[env_id]))
            self.num_illegal -= dropped

    def __repr__(self) -> str:
        """Say what it is."""
        return f"<EpisodeIndex of {self.num_steps:,} steps>"

    @property
    def starts(self) -> Span:
        """The stretch of each environment that holds all its legal starts."""
        if self._legal_span is None:
            first, stop = self._first, self._seen
            if self._before:
                # Up to the next episode's beginning, where nothing lies before.
                oldest = np.minimum(self._starts.oldest_of_each(), stop)
                first = np.minimum(first + self._before, oldest)
            if self._after:
                # The newest rows wait for those after them, or for an end.
                stop = np.where(
                    (self._last & self._usable_alone) != 0,
                    stop,
                    np.maximum(self._begin, stop - self._after),
                )
            else:
                stop = stop.copy()
            self._legal_span = Span(first, np.maximum(stop, first))
        return self._legal_span

    @property
    def steps(self) -> Span:
        """The stretch of each environment that holds the steps of windows and episodes.

        All of its rows but final ones are such steps: it is `starts`, and behind it the
        last steps of an episode that ended without a final row.
        """
        if self._steps_span is None:
            starts = self.starts
            whole = (self._last & self.whole_at) != 0
            stop = np.where(whole, self._seen, starts.stop)
            self._steps_span = Span(starts.first, np.maximum(stop, starts.first))
        return self._steps_span

    @property
    def ended(self) -> Span:
        """The stretch of each environment that holds its whole, ended episodes.

        It begins at the oldest first step alive, and stops where the running episode
        begins, or at the newest row where none is running. Final rows lie between.
        """
        first = np.minimum(self._starts.oldest_of_each(), self._seen)
        over = (self._last & (END | FINAL)) != 0
        return Span(first, np.where(over, self._seen, np.maximum(self._begin, first)))

    @property
    def whole_at(self) -> int:
        """Flags of a newest row after which its episode has all its steps.

        A last step whose final row is still to come is not drawn yet.
        """
        return FINAL if self._derived and self._final_follows else END | FINAL

    @property
    def _usable_alone(self) -> int:
        """Flags of a newest row whose episode needs no row after it."""
        if not self._derived:
            return END | FINAL
        return FINAL if self._final_follows else FINAL | TERMINATED

    @property
    def num_finals(self) -> int:
        """Final rows alive."""
        return self._num_finals

    @property
    def num_steps(self) -> int:
        """Steps alive in all environments: rows less final rows."""
        return int((self._seen - self._first).sum()) - self._num_finals

    @property
    def num_legal(self) -> int:
        """Legal starts."""
        return int(self.starts.lengths.sum()) - self.num_illegal

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank: environment by environment, oldest first.

        Costs O(num_envs + B log illegal rows).

        Args:
            ranks: int64 ``[B]``, in ``[0, legal starts)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each.
        """
        return _at_ranks(self.starts, self._illegal, ranks)

    def step_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Rows of `steps` that are no final rows, by rank, as `start_at`."""
        return _at_ranks(self.steps, self._finals, ranks, self._finals_before_steps)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Ranks of positions: how many legal starts come before them.

        Costs O(num_envs + B log illegal rows).

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; outside of `starts` the nearest edge counts.

        Returns:
            int64 ``[B]``, of all environments in the order of `start_at`.
        """
        return _ranks_before(self.starts, self._illegal, env_ids, positions)

    def steps_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """How many steps of `step_at` come before positions, as `legal_before`."""
        before = self._finals_before_steps
        return _ranks_before(self.steps, self._finals, env_ids, positions, before)

    @property
    def num_finals_in_steps(self) -> int:
        """Final rows within `steps`."""
        return int((self._finals.lengths - self._finals_before_steps).sum())

    @property
    def num_unknown_next(self) -> int:
        """Steps that are no legal start, and become none: their next is unknown."""
        num_steps = int(self.steps.lengths.sum()) - self.num_finals_in_steps
        return num_steps - self.num_legal

    @property
    def _finals_before_steps(self) -> Ids:
        """int64 ``[E]``, final rows alive that lie before `steps`."""
        every = np.arange(len(self._first))
        return self._finals.number(every, self._finals.find(every, self.steps.first))

    @property
    def num_begun(self) -> Ids:
        """int64 ``[E]``, episodes seen to begin so far; not to be written into.

        It shows how many episodes are new since an earlier look; `begins` has their
        first positions.
        """
        return self._num_begun

    def begins(self, env_id: int) -> Ids:
        """First positions of the episodes whose first row is alive, growing.

        Returns:
            int64 ``[N]``, a view that costs nothing; not to be written into.
        """
        return self._starts.values(env_id)

    def sizes(self) -> Ids:
        """int64 ``[E]``, steps alive in each environment."""
        return self._seen - self._first - self._finals.lengths

    def episodes(self, env_id: int) -> EnvironmentEpisodes:
        """Return the episodes of one environment that have a step alive.

        Costs O(episodes of the environment); see `locate` for those of some steps.
        """
        first, stop = int(self._first[env_id]), int(self._seen[env_id])
        starts = self._starts.values(env_id)
        closed = self._starts.values(env_id, 1)
        last = int(self._last[env_id])
        end = np.append(closed, stop - ((last & FINAL) != 0))
        missing_start = len(starts) == 0 or starts[0] != first
        if missing_start:
            begin = np.concatenate([[first], starts])
        else:
            begin, end = starts.copy(), end[1:]
        if first == stop:
            begin, end = begin[:0], end[:0]
        unfinished = np.zeros(len(begin), bool)
        unfinished[-1:] = (last & (END | FINAL)) == 0
        without_start = np.zeros(len(begin), bool)
        without_start[:1] = missing_start
        alive = end > begin
        return EnvironmentEpisodes(
            env_id, begin[alive], end[alive], without_start[alive], unfinished[alive]
        )

    def locate(self, env_ids: Ids | int, positions: Ids) -> tuple[Ids, Ids]:
        """Begin and end of the episodes that hold the positions.

        Costs O(B log episodes), whatever the number of environments.

        Args:
            env_ids: int64 ``[B]``, or one environment.
            positions: int64 ``[B]``, alive steps.

        Returns:
            Two int64 ``[B]``; steps to the end are ``end - 1 - position``.
        """
        if isinstance(env_ids, int):
            env_ids = np.full(len(positions), env_ids)
        begin, end = np.empty(len(positions), INT64), np.empty(len(positions), INT64)
        _kernel.locate(
            *self._starts.columns,
            self._first,
            self._seen,
            self._last,
            np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions),
            begin,
            end,
        )
        return begin, end

    def begun(self, env_ids: Ids, positions: Ids) -> Ids:
        """Where the episodes of rows began, or LONG_AGO where that has left the ring.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive.
        """
        after = self._starts.find(env_ids, positions, "right")
        known = self._starts.number(env_ids, after) > 0
        return np.where(known, self._starts.at(after - 1), LONG_AGO)


def _at_ranks(
    span: Span, left_out: EnvironmentQueues, ranks: Ids, before: Ids | None = None
) -> tuple[Ids, Ids]:
    """Rows of a span less those of a queue, by rank; see `EpisodeIndex.start_at`.

    Args:
        span: Within which the rows lie.
        left_out: Positions below its stops that do not count.
        ranks: int64 ``[B]``.
        before: int64 ``[E]``, how many of them lie before the span; None for none.
    """
    lengths = left_out.lengths if before is None else left_out.lengths - before
    stops = np.cumsum(span.lengths - lengths)
    env_ids = np.searchsorted(stops, ranks, side="right")
    within = ranks - np.concatenate([[0], stops])[env_ids]
    positions = span.first[env_ids] + within
    if lengths.any():
        # The i-th row left out has so many counted ones before it as its position
        # less i, which never falls along the queue.
        passed = 0 if before is None else before[env_ids]
        indices = left_out.bisect(env_ids, positions - passed, slope=1)
        positions += left_out.number(env_ids, indices) - passed
    return env_ids, positions


def _ranks_before(
    span: Span, left_out: EnvironmentQueues, env_ids: Ids, positions: Ids, before: Ids | None = None
) -> Ids:
    """Ranks of positions; see `_at_ranks` and `EpisodeIndex.legal_before`."""
    lengths = left_out.lengths if before is None else left_out.lengths - before
    stops = np.cumsum(span.lengths - lengths)
    ranks: Ids = np.concatenate([[0], stops])[env_ids]
    inside = np.clip(positions, span.first[env_ids], span.stop[env_ids])
    ranks += inside - span.first[env_ids]
    if lengths.any():
        passed = 0 if before is None else before[env_ids]
        indices = left_out.find(env_ids, inside)
        ranks -= left_out.number(env_ids, indices) - passed
    return ranks


def _last_rows(begins: Ids, stops: Ids, maximum: int) -> Ids:
    """The last rows of ranges, at most so many of each, one after the other."""
    counts = np.minimum(stops - begins, maximum)
    ends = np.cumsum(counts)
    rows: Ids = np.repeat(stops - ends, counts)
    rows += np.arange(len(rows))
    return rows


def _where(flags: NDArray[np.uint8], kind: int, first: int) -> Ids:
    return np.flatnonzero(flags & kind) + first


class EnvironmentQueues:
    """Queues of growing positions, one for each environment, all in one array.

    With one array, the bisection of a batch over thousands of environments is a few
    operations on whole columns rather than one for each environment. Entries are
    appended at one end of a queue and dropped at the other.

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
        return np.where(self._first < self._stop, self._data[0].take(self._first), NEVER)

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

    def find(self, env_ids: Ids, positions: Ids, side: str = "left", column: int = 0) -> Ids:
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
