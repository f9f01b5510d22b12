"""Positions laid end to end, and what lies in a row of a ring.

The priority of every row of a buffer, kept in step with what the buffer holds.

New and expired rows are found by comparing what is alive with what was alive when
last looked at, so that nobody need tell, and the writer may be another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.errors import FormatError, SchemaError, StaleError
from mmreplay.ring import Ring, Span
from mmreplay.samplers.base import BufferIdentity, State, View, storable
from mmreplay.samplers.priority_distribution import PriorityDistribution, RunningMaximum
from mmreplay.samplers.priority_file import PriorityFile, carried, open_column

_steps = kernels.load("steps")

CHUNK_ROWS = 1 << 20

Ids = NDArray[np.int64]
Stretches = Iterator[tuple[Ids, Ids]]


def stretches(ring: Ring, first: Ids, stop: Ids) -> Stretches:
    """Lay stretches of positions end to end, at most some million at a time.

    Args:
        ring: For its environments.
        first: int64 ``[E]``.
        stop: int64 ``[E]``; below first there is nothing.

    Yields:
        env_ids and positions, int64 ``[N]`` each, N at least 1.
    """
    if ring.num_envs == 1:
        yield from _pieces(0, int(first[0]), int(stop[0]))
        return
    lengths = np.maximum(stop - first, 0)
    total = int(lengths.sum())
    if total == 0:
        return
    if total <= CHUNK_ROWS:
        some = np.flatnonzero(lengths)
        counts = lengths[some]
        edges = np.cumsum(counts) - counts
        yield (
            np.repeat(some, counts),
            np.arange(total) + np.repeat(first[some] - edges, counts),
        )
        return
    for env_id in np.flatnonzero(lengths).tolist():
        yield from _pieces(env_id, int(first[env_id]), int(stop[env_id]))


def _pieces(env_id: int, first: int, stop: int) -> Stretches:
    for begin in range(first, stop, CHUNK_ROWS):
        positions = np.arange(begin, min(begin + CHUNK_ROWS, stop))
        yield np.full(len(positions), env_id), positions


def places_of(ring: Ring, stop: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Environments and positions of rows that are alive.

    Args:
        ring: Where they lie.
        stop: int64 ``[E]``, the next position to be written.
        rows: int64 ``[B]``.

    Returns:
        int64 ``[B]`` each.
    """
    env_ids, positions = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    rows = np.ascontiguousarray(rows)
    _steps.unplace(rows, stop, *ring.shape, env_ids, positions)
    return env_ids, positions


def alive(span: Span, env_ids: Ids, positions: Ids) -> NDArray[np.bool_] | None:
    """Which places are still in a buffer, bool ``[B]``, or None where all are.

    Args:
        span: What is alive.
        env_ids: int64 ``[B]``, B at least 1.
        positions: int64 ``[B]``.

    Raises:
        SchemaError: An environment is unknown.
        StaleError: A position was never written.
    """
    if env_ids.min() < 0 or env_ids.max() >= len(span.stop):
        raise SchemaError(
            f"env_ids: got values in [{env_ids.min()}, {env_ids.max()}], expected "
            f"them in [0, {len(span.stop)}); pass those of the batch"
        )
    strange = (positions >= span.stop[env_ids]) | (positions < 0)
    if strange.any():
        which = int(np.argmax(strange))
        env_id, position = int(env_ids[which]), int(positions[which])
        raise StaleError(
            f"position {position} of environment {env_id}: got a priority for a "
            "row that was never written, expected one below "
            f"{span.stop[env_id]}; pass the positions of the batch"
        )
    found: NDArray[np.bool_] = positions >= span.first[env_ids]
    return None if found.all() else found


Numbers = NDArray[np.float32]
MakeLaw = Callable[[int], PriorityDistribution]
"""A law for so many rows."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Priorities of one moment.

    Attributes:
        uuid: 16 bytes, the buffer's.
        first: int64 ``[E]``, the oldest position alive.
        seen: int64 ``[E]``, one past the newest with a priority.
        values: float32, environment by environment, oldest first.
    """

    uuid: bytes
    first: Ids
    seen: Ids
    values: Numbers


class Priorities:
    """A column of raw priorities, and the law of those rows that may be drawn.

    A row enters, when it is first seen, at the highest priority of the rows alive or
    the initial one, whichever is larger. It is open to draws while it is a legal
    start, and keeps its priority while it is none.

    Attributes:
        column: Priorities by row, or None before the first look.
        law: Draws rows; those that are open.
        num_legal: Legal starts.
        initial: The least priority that a new row enters at; may be changed.
    """

    column: PriorityFile
    law: PriorityDistribution

    def __init__(self, name: str | None, initial: float, make_law: MakeLaw) -> None:
        """Make one that has seen no buffer.

        Args:
            name: Of the column on disk, or None to keep it in RAM.
            initial: The least priority that a new row enters at.
            make_law: Called for every ring.
        """
        self._name = name
        self.initial = initial
        self._make_law = make_law
        self._home: BufferIdentity | None = None
        self._starts: Span | None = None
        self._torn = False
        self._pending: tuple[Saved, State] | None = None
        self._carried = False
        self.num_legal = 0

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the priorities as they are, and no file or lock."""
        return {
            "name": self._name, "initial": self.initial, "make_law": self._make_law,
            "pending": self.save(), "carried": self._carried or self._pending is None,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on with the priorities at the next look, as after `load`.

        Unlike after `load`, those on disk count where they can be opened, and another
        buffer's next look begins with none: a copy does what the original would do.
        """
        Priorities.__init__(self, state["name"], state["initial"], state["make_law"])
        self._pending, self._carried = state["pending"], state["carried"]

    @property
    def home(self) -> BufferIdentity | None:
        """The buffer, or None before the first look."""
        return self._home

    @property
    def span(self) -> Span:
        """What was alive at the last look."""
        return self._span

    def follow(self, view: View) -> None:
        """Bring everything to the view's moment: O(new rows log rows)."""
        if self._home is not None:
            self.column.check_owner()
            if self.column.closed:
                self._leave()
        starts = view.starts
        if starts is self._starts and not self._torn:
            return
        if self._torn and self._home is not None:
            self._highest.forget()
        span, home = view.span, view.home
        if self._home is not home and not self._at_home(home):
            self.move(home, span)
        elif (span.stop < self._span.stop).any():
            # Positions that were seen are to come again: a view of another moment.
            self.move(home, span)
        self._expire(span)
        self._enter(span)
        self.num_legal = int(starts.lengths.sum()) - view.num_illegal
        self._open(view, starts)
        if self._torn or self._differs():
            # An update was interrupted, or a view changed its mind: judged anew.
            self.reopen(view)
        if self._pending is not None:
            self.law.load_state_dict(self._pending[1])
            self._pending = None
        self._starts = starts

    def reopen(self, view: View) -> None:
        """Judge every row anew: O(rows)."""
        starts = view.starts
        self.law.reset()
        self._torn = True
        self._opened = Span(starts.first, starts.first)
        self._open(view, starts)
        self._torn = False

    def _at_home(self, home: BufferIdentity) -> bool:
        if self._home != home:
            return False
        # Another look at the same: told apart by identity the next time.
        self._home = home
        return True

    def move(self, home: BufferIdentity, span: Span) -> None:
        """Go to a buffer, or to another generation of it, where positions stay."""
        former = self._home
        column = None
        if former is not None:
            same = former.uuid == home.uuid
            same &= former.ring.num_envs == home.ring.num_envs
            if same and self.column.where != "disk":
                old, ring = self.column, home.ring
                values = carried(old.values, old.ring, ring, old.seen)
                seen = home.known(old.seen, former.generation, former.cut_epoch)
                column = PriorityFile(ring, values, seen, old.where)
            self._leave()
        self.column = open_column(home, self._name) if column is None else column
        if self._pending is not None and self._carried:
            others = self._pending[0].uuid != home.uuid
            if others or self.column.where == "disk":
                self._pending = None
        if self._pending is not None:
            self._restore(home, span, self._pending[0])
        known = np.minimum(self.column.seen, span.stop)
        if (known < self.column.seen).any():
            # Above the head nothing is known: of a copy, or after a power cut. Said
            # first: those positions are to be of other rows when they come again.
            self.column.see(known, home.generation)
        self._highest: RunningMaximum[np.float32] = RunningMaximum(np.maximum, 0.0)
        self.law = self._make_law(home.ring.num_rows)
        self._tidy(span)
        self._span = span
        self._opened = Span(span.first, span.first)
        self._starts, self._home = None, home

    def close(self) -> None:
        """Give a column on disk back, for the next look to open; one in RAM stays."""
        if self._home is not None and self.column.where == "disk":
            self._leave()

    def _leave(self) -> None:
        if self._home is not None:
            self._home = self._starts = None
            self.column.close()

    def save(self) -> tuple[Saved, State] | None:
        """What was known at the last look, or is to be known at the next one.

        Returns:
            The priorities, and what holds the law's own state; None where nothing
            is known.
        """
        if self._pending is not None:
            return self._pending
        if self._home is None:
            return None
        ring, column, span = self.column.ring, self.column, self._span
        values = [
            column.values[ring.rows(env_ids, positions)]
            for env_ids, positions in stretches(ring, span.first, column.seen)
        ]
        found = np.concatenate(values) if values else np.empty(0, np.float32)
        uuid, first, seen = self._home.uuid, span.first.copy(), column.seen.copy()
        return Saved(uuid, first, seen, found), self.law.state_dict()

    def load(self, saved: Saved, state: State) -> None:
        """Go on, at the next look, from what was known at another time.

        Args:
            saved: The priorities.
            state: Holds the law's own state.
        """
        self._leave()
        self._pending, self._carried = (saved, state), False

    def _restore(self, home: BufferIdentity, span: Span, saved: Saved) -> None:
        ring = home.ring
        if saved.uuid != home.uuid or len(saved.seen) != ring.num_envs:
            self.column.close()
            raise FormatError(
                f"sampler state: got priorities of the buffer {saved.uuid.hex()} with "
                f"{len(saved.seen)} environments, expected {home.uuid.hex()} with "
                f"{ring.num_envs}; draw from the buffer that the state was saved with"
            )
        ends = np.cumsum(saved.seen - saved.first)
        # Nothing else of the column counts, whatever it has seen since.
        self.column.see(np.minimum(saved.seen, span.stop), home.generation)
        first = np.maximum(saved.first, saved.seen - ring.slots)
        for env_ids, positions in stretches(ring, first, saved.seen):
            places = ends[env_ids] - (saved.seen[env_ids] - positions)
            rows = ring.rows(env_ids, positions)
            self.column.store(rows, saved.values[places])

    def _tidy(self, span: Span) -> None:
        """Clear what is not alive, and what no priority can be, out of a column."""
        column, ring = self.column, self.column.ring
        first, stop = np.minimum(span.first, column.seen), column.seen
        stop = np.maximum(first, stop)
        for env_ids, positions in stretches(ring, stop, first + ring.slots):
            rows = ring.rows(env_ids, positions)
            stray = rows[column.values[rows] != 0]
            if len(stray):
                column.store(stray, np.float32(0))
        for env_ids, positions in stretches(ring, first, stop):
            rows = ring.rows(env_ids, positions)
            values = column.values[rows]
            bad = rows[~((values >= 0) & (values < np.inf))]
            if len(bad):
                column.store(bad, np.float32(self.initial))

    def _expire(self, span: Span) -> None:
        """Take the priorities of rows that were given up out of the column."""
        last = self._span
        if span is last:
            return
        stop = np.minimum(span.first, self.column.seen)
        for env_ids, positions in stretches(self.column.ring, last.first, stop):
            self._store(self.column.ring.rows(env_ids, positions), np.float32(0))
        self._span = span

    def _enter(self, span: Span) -> None:
        """Give rows that are new a priority, and then say that they are seen."""
        seen = self.column.seen
        if (seen == span.stop).all():
            return
        entry = np.float32(max(self.highest(), self.initial))
        ring = self.column.ring
        for env_ids, positions in stretches(
            ring, np.maximum(seen, span.first), span.stop
        ):
            self._store(ring.rows(env_ids, positions), entry)
        assert self._home is not None
        self.column.see(span.stop, self._home.generation)

    def _store(self, rows: Ids, numbers: Numbers | np.float32) -> None:
        self._highest.note(rows)
        self.column.store(rows, numbers)

    def highest(self) -> float:
        """The highest priority of the rows alive that were seen, or 0."""
        return self._highest.look(self.column.values)

    def _open(self, view: View, starts: Span) -> None:
        """Close rows that are no legal starts any more and open those that became it.

        Within both stretches, a view's verdict on a row stays what it was.
        """
        old, ring = self._opened, self.column.ring
        low, high = np.minimum, np.maximum
        for first, stop in (
            (old.first, low(starts.first, old.stop)),
            (high(starts.stop, old.first), old.stop),
        ):
            for env_ids, positions in stretches(ring, first, stop):
                self.law.drop(ring.rows(env_ids, positions))
        for first, stop in (
            (starts.first, low(old.first, starts.stop)),
            (high(old.stop, starts.first), starts.stop),
        ):
            for env_ids, positions in stretches(ring, first, stop):
                legal = view.legal(env_ids, positions)
                rows = ring.rows(env_ids, positions)
                self.law.put(rows[legal], self.column.values)
        self._opened = starts
        # Where every open row has a mass, their count tells whether there is need.
        if not self.law.positive or self._differs():
            moved = (starts.first != old.first) & (starts.first < starts.stop)
            self._judge_oldest(view, np.flatnonzero(moved))

    def _differs(self) -> bool:
        """Whether more or fewer rows are open than there are legal starts."""
        return self.law.positive and self.law.num_open != self.num_legal

    def _judge_oldest(self, view: View, env_ids: Ids) -> None:
        """Judge the first row of starts anew, which may have become a legal one.

        Where starts are some steps apart, the oldest possible one of an episode is
        another after each row that was given up.
        """
        positions = self._opened.first[env_ids]
        legal = view.legal(env_ids, positions)
        rows = self.column.ring.rows(env_ids, positions)
        open_ = self.law.is_open(rows)
        self.law.drop(rows[open_ & ~legal])
        self.law.put(rows[legal & ~open_], self.column.values)

    def update(
        self, view: View, env_ids: Ids, positions: Ids, values: NDArray[np.generic]
    ) -> int:
        """Set priorities, all or none.

        Args:
            view: The buffer now.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; of equal places the last wins.
            values: Real numbers ``[B]``, at least 0 and finite.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: A value cannot be stored.
            StaleError: A position was never written.
        """
        self.follow(view)
        dropped, rows = 0, self._rows_stored(env_ids, positions, values)
        if rows is None:
            numbers = storable(values)
            if len(numbers) == 0:
                return 0
            there = alive(self._span, env_ids, positions)
            if there is not None:
                env_ids, positions = env_ids[there], positions[there]
                numbers, dropped = numbers[there], len(there) - len(positions)
            rows = self.column.ring.rows(env_ids, positions)
            self._torn = True
            self._store(rows, numbers)
        if not self.law.renew(rows, self.column.values):
            # Never opens what is no legal start; a mass of 0 says nothing of that.
            open_ = self.law.is_open(rows)
            closed = np.flatnonzero(~open_)
            legal = self._legal(view, env_ids[closed], positions[closed])
            open_[closed[legal]] = True
            self.law.put(rows[open_], self.column.values)
        self._torn = False
        return dropped

    def _rows_stored(
        self, env_ids: Ids, positions: Ids, values: NDArray[np.generic]
    ) -> Ids | None:
        """Store priorities in one go, as nearly always can be done; None where not."""
        column, span = self.column, self._span
        if values.dtype != np.float32 or not column.direct:
            return None
        rows = np.empty(len(positions), np.int64)
        self._torn = True
        if not _steps.store(
            column.values, np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions), np.ascontiguousarray(values),
            span.first, span.stop, *column.ring.shape, rows,
        ):  # fmt: skip
            self._torn = False
            return None
        # After the storing: whoever is interrupted in between looks at everything.
        self._highest.note(rows)
        return rows

    def check(
        self, view: View, env_ids: Ids, positions: Ids, values: NDArray[np.generic]
    ) -> None:
        """Refuse what `update` would."""
        self.follow(view)
        storable(values)
        if len(positions):
            alive(self._span, env_ids, positions)

    def _legal(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        starts = self._opened
        legal = (positions >= starts.first[env_ids]) & (
            positions < starts.stop[env_ids]
        )
        inside = np.flatnonzero(legal)
        legal[inside] = view.legal(env_ids[inside], positions[inside])
        return legal

    def places(self, rows: Ids) -> tuple[Ids, Ids]:
        """Environments and positions of rows that are alive, int64 ``[B]`` each."""
        return places_of(self.column.ring, self._span.stop, rows)
