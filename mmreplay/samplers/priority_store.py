"""The priorities of a buffer's rows, kept in step with what the buffer holds.

The store compares the rows alive now with those of its last look to find new and
overwritten rows. So no one has to notify it, and the writer may be another process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.episodes.starts import BufferIdentity, StartView
from mmreplay.errors import (
    DurabilityWarning,
    FormatError,
    SchemaError,
    StaleError,
    frames_to_caller,
)
from mmreplay.ring import Span, position_chunks
from mmreplay.samplers.base import State
from mmreplay.samplers.priority_distribution import PriorityDistribution, RunningMaximum
from mmreplay.samplers.priority_file import PriorityColumn, moved_column, open_column

_steps = kernels.load("steps")

MAX_PRIORITY = float(np.finfo(np.float32).max)
"""The greatest priority that can be stored."""

Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]
MakeDistribution = Callable[[int], PriorityDistribution]
"""Makes a distribution over this many rows."""


@dataclass(frozen=True, slots=True)
class SavedPriorities:
    """Priorities as they were at one look.

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


class PriorityStore:
    """A priority for each row, and the distribution over the rows that may be drawn.

    A row enters, when it is first seen, at the highest priority of the rows alive or
    the initial one, whichever is larger. It is open to draws while it is a legal
    start, and keeps its priority while it is none.

    The store lives as long as the sampler; column and distribution as long as one
    generation of a buffer.

    Attributes:
        column: Priorities by row; set by the first look.
        distribution: Draws rows that are open; set by the first look.
        num_legal: Legal starts.
        initial: The least priority that a new row enters at; may be changed.
    """

    column: PriorityColumn
    distribution: PriorityDistribution

    def __init__(
        self, name: str | None, initial: float, make_distribution: MakeDistribution
    ) -> None:
        """Make one that has seen no buffer.

        Args:
            name: Of the column on disk, or None to keep it in RAM.
            initial: The least priority that a new row enters at.
            make_distribution: Called for every ring.
        """
        self._name = name
        self.initial = initial
        self._make_distribution = make_distribution
        self._home: BufferIdentity | None = None
        self._starts: Span | None = None
        # An interrupted change of column and distribution: both are rebuilt.
        self._interrupted = False
        self._pending: tuple[SavedPriorities, State] | None = None
        self._pickled = False
        self.num_legal = 0

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the priorities as they are, and no file or lock."""
        return {
            "name": self._name,
            "initial": self.initial,
            "make_distribution": self._make_distribution,
            "pending": self.save(),
            "carried": self._pickled or self._pending is None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the pickled priorities from the next look on, as after `load`.

        Unlike after `load`, those on disk count where they can be opened, and another
        buffer's next look begins with none: a copy does what the original would do.
        """
        PriorityStore.__init__(self, state["name"], state["initial"], state["make_distribution"])
        self._pending, self._pickled = state["pending"], state["carried"]

    @property
    def home(self) -> BufferIdentity | None:
        """The buffer, or None before the first look."""
        return self._home

    @property
    def span(self) -> Span:
        """What was alive at the last look."""
        return self._span

    def follow(self, view: StartView) -> None:
        """Bring everything up to what the view shows now: O(new rows log rows)."""
        if self._home is not None:
            column = self.column
            if column.pid is not None and column.pid != os.getpid():
                column.check_owner()
            if column.closed:
                self._leave()
        starts = view.starts
        if starts is self._starts and not self._interrupted:
            return
        if self._interrupted and self._home is not None:
            self._highest.forget()
        span, home = view.span, view.home
        if self._home is home or self._home == home:
            # Another object that is equal is compared by identity the next time.
            self._home = home
            if (span.stop < self._span.stop).any():
                # Positions that were seen will come again: an older view.
                self._move(home, span)
        else:
            self._move(home, span)
        self._clear_overwritten(span)
        self._add_new(span)
        self.num_legal = int(starts.lengths.sum()) - view.num_illegal
        self._open(view, starts)
        if self._interrupted or self._differs():
            # An update was interrupted, or a view's verdict changed.
            self.reopen(view)
        if self._pending is not None:
            self.distribution.load_state_dict(self._pending[1])
            self._pending = None
        self._starts = starts

    def _move(self, home: BufferIdentity, span: Span) -> None:
        """Move to a buffer, or to another generation of it, where positions stay."""
        former = self._home
        column = None
        if former is not None:
            column = moved_column(self.column, former, home)
            self._leave()
        if column is None:
            column = open_column(home, self._name)
            # A learner that restarts while the old one still runs draws on with new
            # priorities: warned of before anything here is changed. Those of a copy or
            # of a state are not new.
            if column.where.startswith("RAM: ") and self._pending is None:
                reason = column.where.removeprefix("RAM: ").rstrip(".")
                warnings.warn(
                    f"the priorities {self._name!r} of {home.folder} start anew in RAM "
                    f"and end with this process: {reason}. To have them in RAM on "
                    "purpose, pass name=None.",
                    DurabilityWarning,
                    stacklevel=frames_to_caller(),
                )
        self.column = column
        self._ring_shape = home.ring.shape
        if self._pending is not None and self._pickled:
            others = self._pending[0].uuid != home.uuid
            if others or self.column.where == "disk":
                self._pending = None
        if self._pending is not None:
            self._restore(home, span, self._pending[0])
        known = np.minimum(self.column.seen, span.stop)
        if (known < self.column.seen).any():
            # Above the head nothing is known: of a copy, or after a power cut. It is
            # recorded first, since other rows will have those positions.
            self.column.see(known, home.generation)
        self._highest: RunningMaximum[np.float32] = RunningMaximum(np.maximum, 0.0)
        self.distribution = self._make_distribution(home.ring.num_rows)
        self._clean(span)
        self._span = span
        self._opened = Span(span.first, span.first)
        self._starts, self._home = None, home

    def _restore(self, home: BufferIdentity, span: Span, saved: SavedPriorities) -> None:
        """Put saved priorities into the column."""
        ring = home.ring
        if saved.uuid != home.uuid or len(saved.seen) != ring.num_envs:
            self.column.close()
            raise FormatError(
                f"sampler state: priorities must be of the buffer {home.uuid.hex()} "
                f"with {ring.num_envs} environments, got {saved.uuid.hex()} with "
                f"{len(saved.seen)}. Draw from the buffer with which the state was "
                "saved."
            )
        ends = np.cumsum(saved.seen - saved.first)
        # Nothing else of the column counts, whatever it has seen since.
        self.column.see(np.minimum(saved.seen, span.stop), home.generation)
        first = np.maximum(saved.first, saved.seen - ring.slots)
        for env_ids, positions in position_chunks(ring, first, saved.seen):
            indices = ends[env_ids] - (saved.seen[env_ids] - positions)
            rows = ring.rows(env_ids, positions)
            self.column.store(rows, saved.values[indices])

    def _clean(self, span: Span) -> None:
        """Clear rows that are not alive and what is no priority from a column."""
        column, ring = self.column, self.column.ring
        first, stop = np.minimum(span.first, column.seen), column.seen
        stop = np.maximum(first, stop)
        for env_ids, positions in position_chunks(ring, stop, first + ring.slots):
            rows = ring.rows(env_ids, positions)
            stray = rows[column.values[rows] != 0]
            if len(stray):
                column.store(stray, np.float32(0))
        for env_ids, positions in position_chunks(ring, first, stop):
            rows = ring.rows(env_ids, positions)
            values = column.values[rows]
            bad = rows[~((values >= 0) & (values < np.inf))]
            if len(bad):
                column.store(bad, np.float32(self.initial))

    def _clear_overwritten(self, span: Span) -> None:
        """Clear the priorities of rows that are no longer alive."""
        last = self._span
        if span is last:
            return
        stop = np.minimum(span.first, self.column.seen)
        for env_ids, positions in position_chunks(self.column.ring, last.first, stop):
            self._store(self.column.ring.rows(env_ids, positions), np.float32(0))
        self._span = span

    def _add_new(self, span: Span) -> None:
        """Give new rows a priority, and then record that they are seen."""
        seen = self.column.seen
        if (seen == span.stop).all():
            return
        entry = np.float32(max(self.highest(), self.initial))
        ring = self.column.ring
        first = np.maximum(seen, span.first)
        for env_ids, positions in position_chunks(ring, first, span.stop):
            self._store(ring.rows(env_ids, positions), entry)
        assert self._home is not None
        self.column.see(span.stop, self._home.generation)

    def _store(self, rows: Ids, numbers: Numbers | np.float32) -> None:
        self._highest.note(rows)
        self.column.store(rows, numbers)

    def highest(self) -> float:
        """The highest priority of the rows alive that were seen, or 0."""
        return self._highest.look(self.column.values)

    def _open(self, view: StartView, starts: Span) -> None:
        """Close rows that are no legal starts any more, and open those that became one.

        Within both ranges, old and new, a view's verdict on a row stays the same.
        """
        old, ring = self._opened, self.column.ring
        low, high = np.minimum, np.maximum
        for first, stop in (
            (old.first, low(starts.first, old.stop)),
            (high(starts.stop, old.first), old.stop),
        ):
            for env_ids, positions in position_chunks(ring, first, stop):
                self.distribution.drop(ring.rows(env_ids, positions))
        for first, stop in (
            (starts.first, low(old.first, starts.stop)),
            (high(old.stop, starts.first), starts.stop),
        ):
            for env_ids, positions in position_chunks(ring, first, stop):
                legal = view.legal(env_ids, positions)
                rows = ring.rows(env_ids, positions)
                self.distribution.put(rows[legal], self.column.values)
        self._opened = starts
        # Where every open row has a mass, their number shows whether there is need.
        if not self.distribution.positive or self._differs():
            moved = (starts.first != old.first) & (starts.first < starts.stop)
            self._recheck_oldest(view, np.flatnonzero(moved))

    def _differs(self) -> bool:
        """Whether more or fewer rows are open than there are legal starts."""
        distribution = self.distribution
        return distribution.positive and distribution.num_open != self.num_legal

    def _recheck_oldest(self, view: StartView, env_ids: Ids) -> None:
        """Check the first row of starts again, which may have become a legal one.

        Where starts are some steps apart, the oldest possible one of an episode is
        another after each row that was overwritten.
        """
        positions = self._opened.first[env_ids]
        legal = view.legal(env_ids, positions)
        rows = self.column.ring.rows(env_ids, positions)
        is_open = self.distribution.is_open(rows)
        self.distribution.drop(rows[is_open & ~legal])
        self.distribution.put(rows[legal & ~is_open], self.column.values)

    def reopen(self, view: StartView) -> None:
        """Close every row and open the legal starts again: O(rows)."""
        starts = view.starts
        self.distribution.reset()
        self._interrupted = True
        self._opened = Span(starts.first, starts.first)
        self._open(view, starts)
        self._interrupted = False

    def update(
        self, view: StartView, env_ids: Ids, positions: Ids, values: NDArray[np.generic]
    ) -> int:
        """Set priorities, all or none.

        Args:
            view: The buffer now.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; of equal steps the last wins.
            values: Real numbers ``[B]``, at least 0 and finite.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: A value cannot be stored.
            StaleError: A position was never written.
        """
        self.follow(view)
        dropped = 0
        numbers = values if values.dtype == np.float32 else storable(values)
        rows = self._store_alive(env_ids, positions, numbers)
        if rows is None:
            numbers = storable(values)
            if len(numbers) == 0:
                return 0
            there = alive(self._span, env_ids, positions)
            if there is not None:
                env_ids, positions = env_ids[there], positions[there]
                numbers, dropped = numbers[there], len(there) - len(positions)
            rows = self.column.ring.rows(env_ids, positions)
            self._interrupted = True
            self._store(rows, numbers)
        if not self.distribution.renew(rows, self.column.values):
            # Never opens what is no legal start; a mass of 0 does not tell.
            is_open = self.distribution.is_open(rows)
            closed = np.flatnonzero(~is_open)
            legal = self._legal(view, env_ids[closed], positions[closed])
            is_open[closed[legal]] = True
            self.distribution.put(rows[is_open], self.column.values)
        self._interrupted = False
        return dropped

    def _store_alive(
        self, env_ids: Ids, positions: Ids, numbers: NDArray[np.generic]
    ) -> Ids | None:
        """Store priorities in one call of the kernel, and return their rows.

        Returns:
            None, and nothing is stored, where a row is not alive, a number is no
            priority, or the column is not stored through its array.
        """
        column, span = self.column, self._span
        if not column.direct:
            return None
        rows = np.empty(len(positions), np.int64)
        self._interrupted = True
        if not _steps.store(
            column.values,
            np.ascontiguousarray(env_ids),
            np.ascontiguousarray(positions),
            np.ascontiguousarray(numbers),
            span.first,
            span.stop,
            *self._ring_shape,
            rows,
        ):
            self._interrupted = False
            return None
        # Noted after the storing: an interrupt in between rebuilds everything.
        self._highest.note(rows)
        return rows

    def _legal(self, view: StartView, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Bool ``[B]``: the positions, of rows alive, that are legal starts."""
        starts = self._opened
        legal: NDArray[np.bool_] = positions >= starts.first[env_ids]
        legal &= positions < starts.stop[env_ids]
        inside = np.flatnonzero(legal)
        legal[inside] = view.legal(env_ids[inside], positions[inside])
        return legal

    def check(
        self, view: StartView, env_ids: Ids, positions: Ids, values: NDArray[np.generic]
    ) -> None:
        """Refuse what `update` would refuse."""
        self.follow(view)
        storable(values)
        if len(positions):
            alive(self._span, env_ids, positions)

    def steps_of(self, rows: Ids) -> tuple[Ids, Ids]:
        """Environments and positions of rows that are alive, int64 ``[B]`` each."""
        env_ids = np.empty(len(rows), np.int64)
        positions = np.empty(len(rows), np.int64)
        rows = np.ascontiguousarray(rows)
        _steps.locate_positions(rows, self._span.stop, *self._ring_shape, env_ids, positions)
        return env_ids, positions

    def save(self) -> tuple[SavedPriorities, State] | None:
        """What was known at the last look, or will be known at the next one.

        Returns:
            The priorities, and the distribution's own state; None where nothing is
            known.
        """
        if self._pending is not None:
            return self._pending
        if self._home is None:
            return None
        ring, column, span = self.column.ring, self.column, self._span
        values = [
            column.values[ring.rows(env_ids, positions)]
            for env_ids, positions in position_chunks(ring, span.first, column.seen)
        ]
        known = np.concatenate(values) if values else np.empty(0, np.float32)
        uuid, first, seen = self._home.uuid, span.first.copy(), column.seen.copy()
        saved = SavedPriorities(uuid, first, seen, known)
        return saved, self.distribution.state_dict()

    def load(self, saved: SavedPriorities, state: State) -> None:
        """Use saved priorities from the next look on.

        Args:
            saved: The priorities.
            state: Holds the distribution's own state.
        """
        self._leave()
        self._pending, self._pickled = (saved, state), False

    def close(self) -> None:
        """Release a column on disk, for the next look to open; one in RAM stays."""
        if self._home is not None and self.column.where == "disk":
            self._leave()

    def _leave(self) -> None:
        if self._home is not None:
            self._home = self._starts = None
            self.column.close()


def storable(values: NDArray[Any]) -> Numbers:
    """Priorities as they are stored, ``[B]``.

    Raises:
        SchemaError: One is negative, NaN, or infinite as float32.
    """
    if len(values) == 0:
        return np.zeros(0, np.float32)
    if values.dtype == np.float16:
        # MAX_PRIORITY would be cast to it, and no infinity is above that one.
        values = values.astype(np.float32)
    # NaN is in no order: it fails both.
    low, high = np.minimum.reduce(values), np.maximum.reduce(values)
    if not (low >= 0 and high <= MAX_PRIORITY):
        which = int(np.argmin((values >= 0) & (values <= MAX_PRIORITY)))
        raise SchemaError(
            "priorities must be finite float32 numbers of at least 0, got "
            f"{values[which]} at {which}. Pass absolute TD errors, and look for the "
            "source of NaN."
        )
    return values.astype(np.float32)


def alive(span: Span, env_ids: Ids, positions: Ids) -> NDArray[np.bool_] | None:
    """Which steps are still in a buffer, bool ``[B]``, or None where all are.

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
            f"env_ids must be in [0, {len(span.stop)}), got values in "
            f"[{env_ids.min()}, {env_ids.max()}]. Pass the env_ids of the batch."
        )
    strange = (positions >= span.stop[env_ids]) | (positions < 0)
    if strange.any():
        which = int(np.argmax(strange))
        env_id, position = int(env_ids[which]), int(positions[which])
        raise StaleError(
            f"position {position} of environment {env_id} was never written: "
            f"positions must be below {span.stop[env_id]}. Pass the positions of the "
            "batch."
        )
    there: NDArray[np.bool_] = positions >= span.first[env_ids]
    return None if there.all() else there
