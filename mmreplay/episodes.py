"""Where episodes begin and end: the flags of rows, and the index built from them.

The flags are the only truth of boundaries. An episode starts at a row with START
and takes in the rows up to the next START. Its steps are those rows less the
*final row*, which holds the observation that followed the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.ring import Span

START = 1
TERMINATED = 2
TRUNCATED = 4
FINAL = 8
BREAK = 16
CUT = 32
"""The step before this row is reported as truncated (``on_resume="truncate"``)."""
END = TERMINATED | TRUNCATED
ALL_FLAGS = 63
NEVER = (1 << 63) - 1
NUM_QUEUES = 4
SCAN_ROWS = 1 << 22

FlagReader = Callable[[int, int, int], NDArray[np.uint8]]
"""(env_id, first, stop) to uint8 ``[stop - first]``."""


def flags_of_steps(
    before: NDArray[np.uint8],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    final_follows: bool,
) -> NDArray[np.uint8]:
    """Flags of one step of each environment.

    Args:
        before: uint8 ``[N]``, flags of each environment's row before this one; of
            an environment without one, FINAL.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        final_follows: The row after an end is the final row (``"next_step"``).

    Returns:
        uint8 ``[N]``.
    """
    ended = (before & END) != 0
    flags: NDArray[np.uint8] = terminated * np.uint8(TERMINATED)
    flags |= truncated * np.uint8(TRUNCATED)
    if final_follows:
        # What the reset call returned beside the final observation is no step.
        flags = np.where(ended, np.uint8(FINAL), flags)
        ended = (before & FINAL) != 0
    else:
        ended |= (before & FINAL) != 0
    flags |= ended * np.uint8(START)
    return flags


def drawable(
    here: NDArray[np.uint8],
    after: NDArray[np.uint8],
    has_after: NDArray[np.bool_],
    *,
    derived: bool,
    final_follows: bool,
) -> NDArray[np.bool_]:
    """Tell which rows may be drawn as a transition.

    Args:
        here: uint8 ``[B]``, flags of the rows.
        after: uint8 ``[B]``, flags of the rows that follow; any where there is none.
        has_after: bool ``[B]``, whether the following row is published.
        derived: The next observation is read from the following row.
        final_follows: The row after an end is the final row (``"next_step"``).

    Returns:
        bool ``[B]``.
    """
    step: NDArray[np.bool_] = (here & FINAL) == 0
    if not derived:
        return step
    terminated = (here & TERMINATED) != 0
    # An end without a final row: a terminated step needs no next observation, a
    # truncated one cannot be bootstrapped and is left out.
    followed = np.where(
        (here & END) != 0,
        ((after & FINAL) != 0) | terminated,
        (after & START) == 0,
    )
    legal: NDArray[np.bool_] = has_after & followed
    if not final_follows:
        legal |= terminated
    legal &= step
    return legal


@dataclass(frozen=True, slots=True)
class Episodes:
    """Some episodes of one environment, oldest first.

    Attributes:
        env_id: The environment.
        begin: int64 ``[N]``, position of the first step alive.
        end: int64 ``[N]``, one past the last step (a final row is not in it).
        headless: bool ``[N]``, the first steps have left the ring.
        running: bool ``[N]``, no end was seen and the episode is the newest.
    """

    env_id: int
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    headless: NDArray[np.bool_]
    running: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 ``[N]``, steps alive."""
        return self.end - self.begin


class _Positions:
    """A queue of growing positions: appended at one end, dropped at the other."""

    __slots__ = ("_data", "_first", "_stop")

    def __init__(self) -> None:
        self._data = np.empty(8, np.int64)
        self._first = 0
        self._stop = 0

    @property
    def values(self) -> NDArray[np.int64]:
        return self._data[self._first : self._stop]

    def append(self, values: NDArray[np.int64]) -> int:
        """Put values at the end and return how many."""
        need = self._stop + len(values)
        if need > len(self._data):
            alive = self.values
            self._data = np.empty(2 * (len(alive) + len(values)), np.int64)
            self._data[: len(alive)] = alive
            self._first, self._stop = 0, len(alive)
            need = self._stop + len(values)
        self._data[self._stop : need] = values
        self._stop = need
        return len(values)

    def drop_below(self, position: int) -> int:
        """Take away the values below position and return how many."""
        count = int(np.searchsorted(self.values, position))
        self._first += count
        return count


class EpisodeIndex:
    """Episodes of a buffer, kept up to date by looking at new rows' flags only.

    Costs O(new rows) an update and some 24 bytes an episode. Not thread-safe.
    """

    def __init__(self, num_envs: int, *, derived: bool, final_follows: bool) -> None:
        """Make an empty index.

        Args:
            num_envs: Environments.
            derived: As in `drawable`.
            final_follows: As in `drawable`.
        """
        self._derived = derived
        self._final_follows = final_follows
        self._seen = np.zeros(num_envs, np.int64)
        self._first = np.zeros(num_envs, np.int64)
        self._last = np.full(num_envs, FINAL, np.uint8)
        # Per environment, the oldest position in any queue: what to drop is found
        # without a look at each of thousands of environments.
        self._oldest = np.full(num_envs, NEVER, np.int64)
        self._queues = [
            tuple(_Positions() for _ in range(NUM_QUEUES)) for _ in range(num_envs)
        ]
        self._num_finals = 0
        self.num_cuts = 0
        self._num_undrawable = 0
        self._undrawable_of = np.zeros(num_envs, np.int64)
        self._num_begun = np.zeros(num_envs, np.int64)

    def update(self, span: Span, read_flags: FlagReader) -> None:
        """Take in the rows published since the last call, drop those given up.

        Args:
            span: What is alive now.
            read_flags: Gives the flags of a stretch of one environment.
        """
        for env_id in np.flatnonzero(span.stop != self._seen).tolist():
            stop = int(span.stop[env_id])
            seen = int(self._seen[env_id])
            first = max(seen, int(span.first[env_id]))
            if first > seen:
                # Rows came and went unseen: what was seen is not their neighbour.
                self._last[env_id] = FINAL
            # In pieces, so that opening a ring of any size takes little memory.
            for start in range(first, stop, SCAN_ROWS):
                until = min(stop, start + SCAN_ROWS)
                self._take(env_id, start, read_flags(env_id, start, until))
            self._seen[env_id] = stop
        for env_id in np.flatnonzero(self._oldest < span.first).tolist():
            self._drop(env_id, int(span.first[env_id]))
        self._first = span.first

    def _take(self, env_id: int, first: int, flags: NDArray[np.uint8]) -> None:
        if len(flags) == 0:
            return
        starts, finals, ends, undrawable = self._queues[env_id]
        self._num_begun[env_id] += starts.append(_where(flags, START, first))
        self._num_finals += finals.append(_where(flags, FINAL, first))
        cuts = _where(flags, CUT, first) - 1
        self.num_cuts += len(cuts)
        ends.append(np.union1d(_where(flags, END, first), cuts[cuts >= 0]))
        # A row is judged when the one after it is known, so the window begins one
        # row earlier and the newest row waits.
        chain = np.concatenate([self._last[env_id : env_id + 1], flags])
        here, after = chain[:-1], chain[1:]
        known = np.ones(len(here), bool)
        legal = drawable(
            here, after, known, derived=self._derived, final_follows=self._final_follows
        )
        bad = np.flatnonzero(~legal) + first - 1
        self._count_undrawable(env_id, undrawable.append(bad[bad >= 0]))
        self._last[env_id] = flags[-1]
        self._oldest[env_id] = min(_oldest(queue) for queue in self._queues[env_id])

    def _drop(self, env_id: int, first: int) -> None:
        starts, finals, ends, undrawable = self._queues[env_id]
        starts.drop_below(first)
        ends.drop_below(first)
        self._num_finals -= finals.drop_below(first)
        self._count_undrawable(env_id, -undrawable.drop_below(first))
        self._oldest[env_id] = min(_oldest(queue) for queue in self._queues[env_id])

    def _count_undrawable(self, env_id: int, more: int) -> None:
        self._num_undrawable += more
        self._undrawable_of[env_id] += more

    @property
    def num_steps(self) -> int:
        """Steps alive in all environments: rows less final rows."""
        return int((self._seen - self._first).sum()) - self._num_finals

    @property
    def num_undrawable(self) -> int:
        """Rows alive, the newest of each environment aside, that are no start."""
        return self._num_undrawable

    def newest_drawable(self) -> NDArray[np.bool_]:
        """Bool ``[E]``, whether the newest row may be drawn with nothing after it."""
        none = np.zeros(len(self._last), bool)
        legal = drawable(
            self._last, self._last, none,
            derived=self._derived, final_follows=self._final_follows,
        )  # fmt: skip
        return legal & (self._seen > self._first)

    def drawable_at(
        self, starts: Span, ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Drawable rows by rank: environment by environment, oldest first.

        Costs O(num_envs + B log undrawable rows).

        Args:
            starts: The span of this index, less newest rows that cannot be drawn.
            ranks: int64 ``[B]``, in ``[0, drawable rows)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each.
        """
        stops = np.cumsum(starts.lengths - self._undrawable_of)
        env_ids = np.searchsorted(stops, ranks, side="right")
        firsts = np.concatenate([[0], stops])[env_ids]
        positions = starts.first[env_ids] + ranks - firsts
        for env_id in np.unique(env_ids[self._undrawable_of[env_ids] > 0]).tolist():
            here = env_ids == env_id
            bad = self._queues[env_id][3].values
            positions[here] += _passed(bad, positions[here])
        return env_ids, positions

    @property
    def num_begun(self) -> NDArray[np.int64]:
        """int64 ``[E]``, episodes seen to begin so far; not to be written into.

        Who keeps something for each episode looks here for new ones, and takes their
        first positions from `begins`.
        """
        return self._num_begun

    def begins(self, env_id: int) -> NDArray[np.int64]:
        """First positions of the episodes whose first row is alive, growing.

        Returns:
            int64 ``[N]``, a view that costs nothing; not to be written into.
        """
        return self._queues[env_id][0].values

    def sizes(self) -> NDArray[np.int64]:
        """int64 ``[E]``, steps alive in each environment."""
        finals = [len(queues[1].values) for queues in self._queues]
        return self._seen - self._first - np.array(finals, np.int64)

    def episodes(self, env_id: int) -> Episodes:
        """Return the episodes of one environment that have a step alive."""
        first, stop = int(self._first[env_id]), int(self._seen[env_id])
        starts, finals, ends, _ = (queue.values for queue in self._queues[env_id])
        headless = len(starts) == 0 or starts[0] != first
        begin = np.concatenate([[first], starts]) if headless else starts.copy()
        if first == stop:
            begin = begin[:0]
        edge = np.append(begin[1:], stop)[: len(begin)]
        end = edge - np.isin(edge - 1, finals)
        running = ~np.isin(end - 1, ends)
        running[:-1] = False
        cut = np.zeros(len(begin), bool)
        cut[:1] = headless
        alive = end > begin
        return Episodes(env_id, begin[alive], end[alive], cut[alive], running[alive])

    def locate(
        self, env_ids: NDArray[np.int64] | int, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Begin and end of the episodes that hold the positions.

        Args:
            env_ids: int64 ``[B]``, or one environment.
            positions: int64 ``[B]``, alive steps.

        Returns:
            Two int64 ``[B]``; steps to the end are ``end - 1 - position``.
        """
        if isinstance(env_ids, int):
            episodes = self.episodes(env_ids)
            which = np.searchsorted(episodes.begin, positions, side="right") - 1
            return episodes.begin[which], episodes.end[which]
        begin, end = np.empty_like(positions), np.empty_like(positions)
        for env_id in np.unique(env_ids).tolist():
            here = env_ids == env_id
            begin[here], end[here] = self.locate(env_id, positions[here])
        return begin, end


def _passed(bad: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bad positions lie before the rank-th good one.

    Args:
        bad: int64 ``[N]``, growing.
        positions: int64 ``[B]``, where the good ones were if none were bad.
    """
    low = np.zeros(len(positions), np.int64)
    high = np.full(len(positions), len(bad))
    # The i-th bad one has bad[i] - i good ones before it, which never falls; one
    # bisection for all saves writing that column down, which is as long as bad.
    for _ in range(len(bad).bit_length()):
        middle = np.minimum((low + high) // 2, len(bad) - 1)
        before = (low < high) & (bad[middle] - middle <= positions)
        low = np.where(before, middle + 1, low)
        high = np.where(before, high, middle)
    return low


def _where(flags: NDArray[np.uint8], kind: int, first: int) -> NDArray[np.int64]:
    return np.flatnonzero(flags & kind) + first


def _oldest(queue: _Positions) -> int:
    values = queue.values
    return int(values[0]) if len(values) else NEVER
