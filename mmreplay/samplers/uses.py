"""How often each row was drawn, and samplers that draw none too often.

Counts lie in ``samplers/<name>/uses.bin``, one uint16 a row, with the STATE and LOCK of
a column of priorities (`priority_file`). A draw reserves its uses in RAM, so that no
other draw has them, until its batch is handed out (`holding`); those of a batch that is
not handed out are released. Without a lease a use is stored right before its batch is
handed out, so that no row is used more often than it may, whenever a process dies: *at
most once*. With one, uses are leased in RAM from then on, and what is acknowledged is
stored. A process that dies leaves no lease, and its rows are drawn again: *at least
once*.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, number
from mmreplay.episodes.starts import BufferIdentity, ListedStarts, StartView, num_legal
from mmreplay.errors import (
    DurabilityWarning,
    EmptyError,
    FailedError,
    FormatError,
    FullError,
    SchemaError,
    StaleError,
    frames_to_caller,
    shown,
)
from mmreplay.ring import Span, position_chunks
from mmreplay.samplers import states
from mmreplay.samplers.base import (
    GROUPS,
    STEPS,
    Draw,
    Sampler,
    State,
    View,
    ask,
    call_repr,
    checked,
    traits_of,
)
from mmreplay.samplers.combine import NarrowingSampler, Wrapper, joined, state_of
from mmreplay.samplers.distinct import DistinctSampler
from mmreplay.samplers.holding import all_or_nothing, threads
from mmreplay.samplers.priority_file import (
    MAX_COUNT,
    USES,
    PriorityColumn,
    check_name,
    moved_column,
    open_column,
)
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.uniform import UniformSampler

MAX_USES = (1 << 16) - 1
MAX_ROUNDS = 64
"""Draws of the inner sampler for one batch."""
MAX_SLICED = 64
"""Environments whose rows are looked at one environment after another."""
MAX_ACKNOWLEDGED = 4096
"""Acknowledged batches that are remembered, so that saying it again is harmless."""

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]
Ticket = dict[str, Any]
"""JSON values: the rows of a batch, and which use of each row it is."""


@dataclass(frozen=True, slots=True)
class Uses:
    """Rows of a draw, which use of each it is, and when they were those rows.

    Attributes:
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``, each row once for each of its uses.
        uses: int64 ``[N]``, which use of the row it is, from 1.
        generation: Of the buffer, when they were drawn.
        cut_epoch: Likewise; see `BufferIdentity`.
    """

    env_ids: Ids
    positions: Ids
    uses: Ids
    generation: int
    cut_epoch: int

    def within(self, home: BufferIdentity, span: Span) -> Bools:
        """Which rows are still there, and no others at their positions.

        Args:
            home: The buffer now.
            span: Its rows.
        """
        env_ids = self.env_ids
        # Of rows above a cut others have the positions.
        stop = home.known(span.stop, self.generation, self.cut_epoch)
        there = self.positions >= span.first[env_ids]
        return there & (self.positions < stop[env_ids])


@dataclass(frozen=True, slots=True)
class Lease:
    """Uses of a draw that was not acknowledged yet.

    Attributes:
        uses: They.
        until: When it ends, by `time.monotonic`.
    """

    uses: Uses
    until: float

    def holds(self, draw: Draw) -> bool:
        """Whether a draw is of these rows: each of its steps, groups or episodes.

        Some rows may have left the batch since they were drawn. Of an episode the
        lease is of one step.
        """
        mine = self.uses
        num_envs = 1 + max(mine.env_ids.max(initial=0), draw.env_ids.max(initial=0))
        own = mine.positions * num_envs + mine.env_ids
        held = np.isin(draw.positions * num_envs + draw.env_ids, own)
        if draw.offsets is not None and len(draw.offsets) > 1:
            held = np.logical_or.reduceat(held, draw.offsets[:-1])
        return bool(held.all())


class Reservation:
    """Uses of a draw whose batch was not handed out yet; see `holding.Held`.

    They end with the batch: the counter refers to its reservations weakly.
    """

    def __init__(self, counter: UseCounter, key: int, uses: Uses, opening: int) -> None:
        """Reserve.

        Args:
            counter: It has the uses.
            key: Of the draw.
            uses: The rows.
            opening: Number of the column's, which has to be open until they are stored.
        """
        self._counter, self._key = counter, key
        self.uses, self.opening = uses, opening
        self.active, self._stored = True, False
        self._lease: Lease | None = None

    def store(self) -> None:
        """Store the uses, or begin their lease."""
        self._lease = self._counter.hand_out(self._key, self)
        # After it: what Ctrl-C comes between is not taken back, and no use made twice.
        self._stored, self.active = True, False

    def take_back(self) -> None:
        """Undo `store`, where that was done, and release."""
        if self._stored:
            self._stored = False
            self._counter.take_back(self._key, self.uses, self._lease)
        self.active = False

    def release(self) -> None:
        """Let other draws have the uses."""
        self.active = False


class UseCounts:
    """The uses of a buffer's rows, kept in step with what the buffer holds.

    Attributes:
        column: The counts.
        opening: How often a column was closed, so that others may have had it since.
    """

    column: PriorityColumn
    opening = 0

    def __init__(self, name: str | None) -> None:
        """Make counts that are not of a buffer yet.

        Args:
            name: Of the column on disk, or None to keep it in RAM.
        """
        self._name = name
        self._home: BufferIdentity | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the name, and no file or lock."""
        return {"name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the column at the next look."""
        UseCounts.__init__(self, state["name"])

    @property
    def home(self) -> BufferIdentity | None:
        """The buffer, or None before the first look."""
        return self._home

    def update(self, home: BufferIdentity, span: Span) -> None:
        """Bring the counts up to what the buffer holds now: new rows have no use.

        Args:
            home: The buffer.
            span: Its rows.

        Raises:
            LockedError: Another process counts uses by this name.
            FailedError: The column cannot be stored there.
            FullError: No space is left.
        """
        if self._home is not None:
            self.column.check_owner()
            if self.column.closed:
                self.close()
        if self._home is None or self._home != home:
            self._move(home, span)
        self._home = home
        seen = self.column.seen
        if (seen == span.stop).all():
            return
        first = np.maximum(seen, span.first)
        for env_ids, positions in position_chunks(home.ring, first, span.stop):
            rows = home.ring.rows(env_ids, positions)
            # Of rows that left the ring: their uses were of other steps.
            self.column.store(rows[self.column.values[rows] != 0], np.uint16(0))
        self.column.see(span.stop, home.generation)

    def _move(self, home: BufferIdentity, span: Span) -> None:
        """Move to a buffer, or to another generation of it, where positions stay."""
        former, column, opening = self._home, None, self.opening
        if former is not None:
            column = moved_column(self.column, former, home)
            self.close()
            if former.uuid == home.uuid:
                self.opening = opening
        if column is None:
            column = open_column(home, self._name, USES)
            if column.cause is not None:
                # In RAM the promise would end with this process.
                raise column.cause
            for damage in column.damages:
                warnings.warn(
                    f"{damage}: counts of uses that it held are lost, and rows may be "
                    "used more often than maximum. Clear the buffer to use none again.",
                    DurabilityWarning,
                    stacklevel=frames_to_caller(),
                )
        known = np.minimum(column.seen, span.stop)
        if (known < column.seen).any():
            column.see(known, home.generation)
        self.column = column

    def of(self, env_ids: Ids, positions: Ids) -> NDArray[np.int64]:
        """Uses of rows alive, int64 ``[N]``."""
        rows = self.column.ring.rows(env_ids, positions)
        return self.column.values[rows].astype(np.int64)

    def add(self, uses: Uses, sign: int = 1) -> None:
        """Count uses of the rows that are still there, or with -1 count them no more.

        Raises:
            FailedError: The counts cannot be stored, and are as before.
            FullError: Likewise, as no space is left.
        """
        assert self._home is not None
        column, ring = self.column, self.column.ring
        known = Span(np.maximum(0, column.seen - ring.slots), column.seen)
        there = uses.within(self._home, known)
        rows = ring.rows(uses.env_ids[there], uses.positions[there])
        rows, times = np.unique(rows, return_counts=True)
        if not len(rows):
            return
        before = column.values[rows]
        counts = np.clip(before.astype(np.int64) + sign * times, 0, MAX_USES)
        try:
            column.store(rows, counts.astype(np.uint16))
        except BaseException:
            # Where the file keeps some of them, they are lost with this process.
            with suppress(FailedError, FullError):
                column.store(rows, before)
            raise

    def raise_to(self, env_ids: Ids, positions: Ids, uses: Ids) -> int:
        """Raise the counts of rows alive to at least so many uses, at most 65,535.

        Returns:
            How many rows have a higher count now.
        """
        rows = self.column.ring.rows(env_ids, positions)
        rows, which = np.unique(rows, return_inverse=True)
        wanted = np.zeros(len(rows), np.int64)
        np.maximum.at(wanted, which, uses)
        higher = wanted > self.column.values[rows]
        if higher.any():
            self.column.store(rows[higher], wanted[higher].astype(np.uint16))
        return int(higher.sum())

    def unused(
        self, view: StartView, maximum: int, unavailable: NDArray[np.int64] | None
    ) -> tuple[Ids, Ids]:
        """Legal starts with fewer uses, by environment, oldest first: O(rows).

        Args:
            view: The buffer now.
            maximum: Uses of a row that is left out.
            unavailable: int64 ``[num_rows]``, reserved and leased uses; None for none.
        """
        none = np.empty(0, np.int64)
        found = [(none, none), *self._free(view.starts, maximum, unavailable)]
        env_ids = np.concatenate([ids for ids, _ in found])
        positions = np.concatenate([steps for _, steps in found])
        legal = view.legal(env_ids, positions)
        return env_ids[legal], positions[legal]

    def _free(
        self, span: Span, maximum: int, unavailable: NDArray[np.int64] | None
    ) -> Iterator[tuple[Ids, Ids]]:
        """Rows with fewer uses; see `unused`."""
        ring, values = self.column.ring, self.column.values
        if ring.num_envs > MAX_SLICED:
            for ids, steps in position_chunks(ring, span.first, span.stop):
                rows = ring.rows(ids, steps)
                free = values[rows] < maximum
                if unavailable is not None:
                    free &= values[rows] + unavailable[rows] < maximum
                yield ids[free], steps[free]
            return
        # As slices of the column, a gather of its rows takes ten times as long.
        for env_id in range(ring.num_envs):
            position, stop = int(span.first[env_id]), int(span.stop[env_id])
            for row, step, count in ring.split_at_wrap(env_id, position, stop):
                rows_here = slice(row, row + step * count, step)
                free = values[rows_here] < maximum
                if unavailable is not None:
                    free &= values[rows_here] + unavailable[rows_here] < maximum
                steps = np.flatnonzero(free) + position
                yield np.full(len(steps), env_id), steps
                position += count

    def close(self) -> None:
        """Make a column on disk durable, and let other samplers have it."""
        if self._home is not None:
            self.opening += 1
            self._home = None
            self.column.close()


class UseCounter(Wrapper):
    """Draws each row at most so often, with another sampler.

    The counts are stored beside the rows, in ``samplers/<name>/``, and survive the
    process. Without `lease_s` the uses of a batch are stored right before it is handed
    out: whenever a process dies, no row is used more often than `maximum`, and the rows
    of a batch that was lost are not drawn again. A batch that is not handed out, as a
    transform failed or a loader was closed, uses nothing up. With `lease_s`, which
    needs a `maximum` of 1, a batch is used when ``buffer.acknowledge(batch)`` says so;
    until then, and for at most so many seconds after it was handed out, its rows are
    leased to it in RAM. A process that dies leaves its rows to be drawn again. For
    *exactly once* put ``buffer.ticket(batch)`` into a learner's checkpoint, and pass it
    to ``buffer.acknowledge`` after a restart, before the first draw.

    After a power cut a counter that was not closed starts from 0, unless
    ``buffer.acknowledge(batch, sync=True)`` made its counts durable. One that was
    closed has those of the rows that were committed by then. Where its files
    are damaged, counts are lost, too: a `DurabilityWarning` names the file. One process
    may count by a name; a second one is refused. On a network file system counts cannot
    be kept safely: there a counter needs ``name=None``. For windows put the counter
    inside of the `SequenceSampler`: it counts the steps that windows begin with.

    A draw costs one or more draws of the other sampler; where most rows were used as
    often as they may, O(rows) to list the others, too, 1 ms for a million. A batch is
    shorter where fewer rows are left.

    With a `DistinctSampler` inside no step comes twice in a batch, whatever `maximum`
    is: each set of steps that may be drawn is as likely as each other. Probabilities
    and weights are those of the other sampler: of a `UniformSampler` or
    `DistinctSampler` those among all legal starts, of another one those among the
    starts that it was shown.

    Example:
        >>> schema = mr.Schema({"prompt": mr.Field((), "int64")})
        >>> sampler = mr.UseCounter(1, mr.DistinctSampler(seed=0))
        >>> buffer = mr.ReplayBuffer.create(
        ...     None, schema, 9, engine="memory", sampler=sampler
        ... )
        >>> buffer.extend(prompt=[5, 6, 7])
        >>> len(buffer.sample(2)), len(buffer.sample(2))  # one is left
        (2, 1)
    """

    only_starts = False
    _random: StepGenerator

    def __init__(
        self,
        maximum: int,
        sampler: Sampler | None = None,
        *,
        lease_s: float | None = None,
        name: str | None = "uses",
        seed: int | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            maximum: Uses of each row, 1 to 65,535.
            sampler: Draws from the rows that are left; `UniformSampler` by default.
            lease_s: Seconds for which a batch that was handed out waits to be
                acknowledged, with a maximum of 1; None stores its use before that.
            name: Of the folder that counts are stored in; None keeps them in RAM.
            seed: Of `Draw.key`, and of the default sampler; None takes one from the
                system.

        Raises:
            SchemaError: An argument is out of range, or the sampler counts uses itself.
        """
        way_out = "Give the uses of each row, such as 1."
        self._maximum = integer("maximum", maximum, 1, way_out, maximum=MAX_USES)
        if lease_s is not None:
            way_out = "Give the seconds that a batch takes at most."
            lease_s = number("lease_s", lease_s, above=0, way_out=way_out)
            _refuse_leases_of_many(self._maximum)
        self._lease_s = lease_s
        self._name = check_name(name)
        self._counts = UseCounts(self._name)
        # Several under one key where a state was loaded that had drawn fewer.
        self._leases: dict[int, list[Lease]] = {}
        self._acknowledged: dict[tuple[int, int], None] = {}
        self._set_up()
        self._random = StepGenerator(seed)
        self._step = 0
        inner = UniformSampler(self._random.seed) if sampler is None else sampler
        traits = traits_of(checked(inner))
        if traits.form not in (None, STEPS, GROUPS):
            raise SchemaError(
                "the sampler inside a UseCounter must draw single steps or groups, "
                f"got the {type(inner).__name__}, of {traits.form}. Put the UseCounter "
                "inside of it."
            )
        if counters_in(inner):
            raise SchemaError(
                "the sampler inside a UseCounter must not count uses, got a "
                f"{called_counter(inner)}. Leave out one of the two: the smaller "
                "maximum holds."
            )
        if traits.once:
            # Of an epoch, steps that were used as often as they may would be lost.
            raise SchemaError(
                f"the sampler inside a UseCounter must have no epochs, got "
                f"{type(inner).__name__}. Use a DistinctSampler: each step comes as "
                "often as it may."
            )
        super().__init__([inner])
        self.distinct = traits.distinct
        # A failed batch must not draw others in its place: their uses are counted.
        self.draws_once = True

    def _set_up(self) -> None:
        """Make what no other process has."""
        # Guards counts and leases: batches are handed out beside draws.
        self._lock = threading.RLock()
        self._reserved: weakref.WeakSet[Reservation] = weakref.WeakSet()
        # How often a reservation became a use, which a draw under way has to know.
        self._num_stored = 0
        _counters.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out leases and reservations, which are those of one process."""
        state = self.__dict__ | {"_leases": {}, "_acknowledged": {}}
        del state["_lock"], state["_reserved"], state["_num_stored"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, without leases or reservations.

        Raises:
            SchemaError: It leases rows that may be used more often than once, as could
                be made before.
        """
        if state["_lease_s"] is not None:
            _refuse_leases_of_many(state["_maximum"])
        self.__dict__.update(state)
        self._set_up()

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "maximum": self._maximum,
            "sampler": self.parts[0],
            "lease_s": self._lease_s,
            "name": self._name,
            "seed": self._random.given_seed,
        }

    @property
    def where(self) -> str | None:  # type: ignore[override]  # known after a draw
        """Where counts are: ``"disk"``, or ``"RAM"`` and why; None before a draw."""
        return None if self._counts.home is None else self._counts.column.where

    @property
    def counts_name(self) -> str | None:
        """Of the folder that counts are stored in; None in RAM."""
        return self._name

    @property
    def lease_s(self) -> float | None:
        """Seconds for which a draw waits to be acknowledged; None without leases."""
        return self._lease_s

    def shown(self, view: View) -> View:
        """Return the rows that may be drawn; see `Wrapper.shown`."""
        self._update(view)
        env_ids, positions = self._counts.unused(view, self._maximum, self._unavailable(view))
        return ListedStarts(view, env_ids, positions)

    def can_draw(self, view: View, env_ids: Ids, positions: Ids) -> Bools:
        """Which legal starts may be used once more; see `Sampler.can_draw`."""
        if self.form == GROUPS:
            # A group is used whole: the part is shown those of which each row is left.
            return super().can_draw(view, env_ids, positions)
        self._update(view)
        with self._lock:
            unavailable = self._unavailable(view)
            uses = self._counts.of(env_ids, positions)
        if unavailable is not None:
            uses += unavailable[view.home.ring.rows(env_ids, positions)]
        part = ask(self.parts[0], "can_draw")
        drawn: Bools = (uses < self._maximum) & part(view, env_ids, positions)
        return drawn

    def uses(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.int64]:
        """Return the stored uses of rows alive, int64 ``[N]``.

        Args:
            view: The buffer now.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
        """
        self._update(view)
        return self._counts.of(env_ids, positions)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch, or what is left; see `Sampler.draw`.

        Raises:
            EmptyError: Every legal start was used as often as it may.
            LockedError: Another process counts uses by this name.
        """
        draw = all_or_nothing(self.parts, self._draw, view, batch_size)
        self._step += 1
        return draw

    def _draw(self, view: View, batch_size: int) -> Draw:
        """Draw, and reserve the uses."""
        home = self._update(view)
        ring = view.home.ring
        # Of other draws, as of how many uses that were stored; and of this one.
        others: NDArray[np.int64] | None = None
        num_stored = -1
        own = np.zeros(ring.num_rows, np.int64)
        drawn: list[Draw] = []
        every_env: list[Ids] = []
        every_position: list[Ids] = []
        every_use: list[Ids] = []
        count = 0
        # From all legal starts first, of which those used too often are left out; from
        # a list of the others where that is most of them.
        shown, listed = view, False
        for _ in range(MAX_ROUNDS):
            if listed:
                with self._lock:
                    if num_stored != self._num_stored:
                        others, num_stored = self._unavailable(view), self._num_stored
                    env_ids, positions = self._counts.unused(
                        view, self._maximum, own if others is None else own + others
                    )
                if not len(positions):
                    break
                shown = ListedStarts(view, env_ids, positions)
            try:
                draw = self.parts[0].draw(shown, batch_size - count)
            except EmptyError:
                if drawn:
                    break
                raise
            # A sampler that reads rows looks at the writer: newer ones may be drawn.
            home = self._update(view)
            rows = ring.rows(draw.env_ids, draw.positions)
            with self._lock:
                # Uses of a batch that was handed out meanwhile are reserved no more.
                if num_stored != self._num_stored:
                    others, num_stored = self._unavailable(view), self._num_stored
                uses = self._counts.of(draw.env_ids, draw.positions)
            uses += own[rows] + _occurrences(rows)
            if others is not None:
                uses += others[rows]
            draw, kept = _within(draw, uses <= self._maximum)
            if listed:
                draw.probabilities *= _share_listed(self.parts[0], view, shown)
            if not listed and 2 * np.count_nonzero(kept) < len(kept):
                listed = True
            short = draw.offsets is not None and len(draw.offsets) - 1 < batch_size
            if short and shown is view:
                # Groups of several draws make no batch: all come from one list.
                listed = True
                continue
            # Of a distinct sampler, each row is used up for the rest of the batch.
            np.add.at(own, rows[kept], self._maximum if self.distinct else 1)
            drawn.append(draw)
            every_env.append(draw.env_ids)
            every_position.append(draw.positions)
            every_use.append(uses[kept])
            count += len(draw) if draw.offsets is None else len(draw.offsets) - 1
            # Groups come one after another in one draw alone.
            if count >= batch_size or draw.offsets is not None:
                break
        some = [draw for draw in drawn if len(draw)]
        if not some:
            way_out = "raise maximum"
            if self._lease_s is not None:
                way_out = "wait until leases end"
            raise EmptyError(
                f"cannot draw {batch_size} steps: each of "
                f"{int(view.starts.lengths.sum()) - view.num_illegal} legal starts was "
                f"used {_times(self._maximum)}, or is leased or in a batch drawn "
                f"ahead. Add steps, or {way_out}."
            )
        key = self._random.key(self._step)
        draw = replace(some[0], key=key) if len(some) == 1 else joined(some, key)
        reserved = Uses(
            np.concatenate(every_env),
            np.concatenate(every_position),
            np.concatenate(every_use),
            home.generation,
            home.cut_epoch,
        )
        reservation = Reservation(self, key, reserved, self._counts.opening)
        self._reserved.add(reservation)
        claims = threads.drawing.claims
        assert claims is not None
        claims.append(reservation)
        return draw

    def _update(self, view: View) -> BufferIdentity:
        """Bring the counts up to what the view shows now, and return its buffer."""
        home, span = view.home, view.span
        with self._lock:
            self._counts.update(home, span)
        return home

    def hand_out(self, key: int, reservation: Reservation) -> Lease | None:
        """Store reserved uses; with leases, begin one instead.

        Args:
            key: Of the draw.
            reservation: They; any thread may hand out.

        Raises:
            FailedError: The counts were closed since the draw, so that others may have
                used the rows; or they cannot be stored.
            FullError: No space is left for them.
        """
        with self._lock:
            counts = self._counts
            closed = counts.home is None or counts.column.closed
            if closed or counts.opening != reservation.opening:
                raise FailedError(
                    f"the counts of uses {self._name!r} were closed before a batch "
                    "that they are of was handed out. Draw another batch."
                )
            if self._lease_s is None:
                counts.add(reservation.uses)
                # With the count: none sees it as a use and as a reservation.
                reservation.active = False
                self._num_stored += 1
                return None
            lease = Lease(reservation.uses, monotonic() + self._lease_s)
            self._leases.setdefault(key, []).append(lease)
            return lease

    def take_back(self, key: int, uses: Uses, lease: Lease | None) -> None:
        """Undo `hand_out`, of a batch that was not handed out after all.

        Args:
            key: Of the draw.
            uses: They.
            lease: What `hand_out` returned.
        """
        with self._lock:
            if lease is not None:
                self._end(key, lease)
            elif self._counts.home is not None and not self._counts.column.closed:
                # Where it cannot be stored, the uses are lost, and none is made twice.
                with suppress(FailedError, FullError):
                    self._counts.add(uses, -1)

    def _end(self, key: int, lease: Lease) -> None:
        left = [each for each in self._leases.get(key, []) if each is not lease]
        self._leases[key] = left
        if not left:
            del self._leases[key]

    def _unavailable(self, view: View) -> NDArray[np.int64] | None:
        """Uses that are reserved or leased, int64 ``[num_rows]``; None for none."""
        now, opening = monotonic(), self._counts.opening
        with self._lock:
            for key, leases in list(self._leases.items()):
                self._leases[key] = [lease for lease in leases if lease.until > now]
                if not self._leases[key]:
                    del self._leases[key]
            leased = [each.uses for every in self._leases.values() for each in every]
            reserved = [
                each.uses
                for each in list(self._reserved)
                if each.active and each.opening == opening
            ]
        if not leased and not reserved:
            return None
        home, span = view.home, view.span
        unavailable = np.zeros(home.ring.num_rows, np.int64)
        for drawn in reserved + leased:
            there = drawn.within(home, span)
            rows = home.ring.rows(drawn.env_ids[there], drawn.positions[there])
            np.add.at(unavailable, rows, 1)
        # An acknowledged use is in the count, and its lease may go on.
        for drawn in leased:
            there = drawn.within(home, span)
            rows = home.ring.rows(drawn.env_ids[there], drawn.positions[there])
            counted = drawn.uses[there] <= self._counts.column.values[rows]
            np.subtract.at(unavailable, rows[counted], 1)
        return unavailable

    def ticket(self, view: View, draw: Draw) -> Ticket:
        """Return what acknowledges a draw after a restart; see `ReplayBuffer.ticket`.

        Args:
            view: The buffer now.
            draw: Its key, steps and offsets, as in the batch.

        Raises:
            StaleError: The draw is not leased any more, or was never.
        """
        lease = self._lease_of(draw)
        if lease is None:
            self._refuse_another("ticket", draw)
            raise StaleError(
                "ticket: the batch has no lease. Draw with UseCounter(lease_s=...), "
                "and take the ticket before it is acknowledged or its lease ends."
            )
        drawn = lease.uses
        return {
            "kind": "UseTicket",
            "uuid": view.home.uuid.hex(),
            "generation": drawn.generation,
            "cut_epoch": drawn.cut_epoch,
            "env_ids": drawn.env_ids.tolist(),
            "positions": drawn.positions.tolist(),
            "uses": drawn.uses.tolist(),
        }

    def _lease_of(self, draw: Draw) -> Lease | None:
        """Return the oldest lease with a draw's key and steps; None without one."""
        leases = self._leases.get(draw.key, [])
        return next((lease for lease in leases if lease.holds(draw)), None)

    def _refuse_another(self, method: str, draw: Draw) -> None:
        """Say so where another batch is leased by the key of a draw without a lease.

        Raises:
            StaleError: One is.
        """
        if draw.key in self._leases:
            raise StaleError(
                f"{method}: the lease of the batch has ended, and another batch was "
                "drawn with its key, after load_state_dict of an earlier state. "
                "Acknowledge batches before that, or pass their tickets."
            )

    def acknowledge(self, view: View, what: Draw | Ticket, sync: bool = False) -> int:
        """Store the uses of a draw; see `ReplayBuffer.acknowledge`.

        Args:
            view: The buffer now.
            what: The draw's key, steps and offsets, as in the batch; or its ticket.
            sync: Make all counts outlive a power cut.

        Returns:
            Rows whose count rose.

        Raises:
            StaleError: The draw is not leased any more, or was never.
            FormatError: It is no ticket of this buffer.
        """
        self._update(view)
        with self._lock:
            stored = self._acknowledge(view, what)
        if sync:
            self._counts.column.sync()
        return stored

    def _acknowledge(self, view: View, what: Draw | Ticket) -> int:
        if isinstance(what, Draw):
            lease, key = self._lease_of(what), what.key
            steps = hash((what.env_ids.tobytes(), what.positions.tobytes()))
            if lease is not None:
                stored = self._store(view, lease.uses)
                self._acknowledged[key, steps] = None
                while len(self._acknowledged) > MAX_ACKNOWLEDGED:
                    del self._acknowledged[next(iter(self._acknowledged))]
                self._end(key, lease)
                return stored
            if self._lease_s is not None and (key, steps) not in self._acknowledged:
                self._refuse_another("acknowledge", what)
                raise StaleError(
                    "acknowledge: the batch has no lease, as it ended or another "
                    "sampler drew it. Give a longer lease_s, or pass its ticket."
                )
            return 0
        return self._store(view, _checked_ticket(view, what))

    def _store(self, view: View, uses: Uses) -> int:
        # Rows that were overwritten or cut since have no count to raise.
        there = uses.within(view.home, view.span)
        return self._counts.raise_to(uses.env_ids[there], uses.positions[there], uses.uses[there])

    def state_dict(self, priorities: bool = False) -> State:
        """Seed and step, and the state of the other sampler; no counts.

        Args:
            priorities: With those that the other sampler keeps, as arrays.
        """
        return {
            "kind": "UseCounter",
            "seed": self._random.seed,
            "step": self._step,
            "maximum": self._maximum,
            "parts": [state_of(self.parts[0], priorities)],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        states.check_kind(state, "UseCounter")
        seed = states.stored_integer(state, "seed")
        step = states.stored_integer(state, "step")
        states.same(state, "maximum", self._maximum)
        self.parts[0].load_state_dict(states.parts(state, "parts", 1)[0])
        self._random, self._step = StepGenerator(seed), step

    def close(self) -> None:
        """Make the counts durable, and let other processes have them."""
        with self._lock:
            self._counts.close()
        super().close()


_counters: weakref.WeakSet[UseCounter] = weakref.WeakSet()


def _set_up_in_child() -> None:
    # Another thread of the parent may have held a lock, and batches are the parent's.
    for counter in list(_counters):
        counter._set_up()


os.register_at_fork(after_in_child=_set_up_in_child)


def counters_in(sampler: Sampler) -> list[UseCounter]:
    """Return each `UseCounter` among a sampler and its parts."""
    counters: list[UseCounter] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        counters += [each] if isinstance(each, UseCounter) else []
        waiting += ask(each, "parts")
    return counters


def called_counter(sampler: Sampler) -> str:
    """Name a sampler that counts uses, or has one inside that does."""
    own = isinstance(sampler, UseCounter)
    return "UseCounter" if own else f"{type(sampler).__name__} around a UseCounter"


def _refuse_leases_of_many(maximum: int) -> None:
    """Refuse leases of rows that may be used more often than once.

    Raises:
        SchemaError: They may.
    """
    if maximum > 1:
        raise SchemaError(
            f"maximum must be 1 with lease_s, got {maximum}: acknowledged out of "
            "order, uses of a row would be lost at a kill. Pass maximum=1, or leave "
            "out lease_s."
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _share_listed(sampler: Sampler, view: View, listed: View) -> float:
    """By what to multiply probabilities among some starts for those among all.

    The same for all starts; 1 of a sampler that does not draw each as often.
    """
    # Not through every wrapper: the newest steps of a RecentSampler come more often.
    while isinstance(sampler, NarrowingSampler) or (
        isinstance(sampler, Wrapper) and traits_of(sampler).distinct
    ):
        view, listed = sampler.shown(view), sampler.shown(listed)
        sampler = sampler.parts[0]
    if type(sampler) not in (UniformSampler, DistinctSampler):
        return 1.0
    return num_legal(listed) / num_legal(view)


def _occurrences(rows: Ids) -> Ids:
    """For each row how often it came until then, from 1; int64 ``[N]``."""
    order = np.argsort(rows, kind="stable")
    new = np.ones(len(rows), bool)
    new[1:] = rows[order][1:] != rows[order][:-1]
    firsts = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    result = np.empty(len(rows), np.int64)
    result[order] = np.arange(len(rows)) - firsts + 1
    return result


def _within(draw: Draw, good: Bools) -> tuple[Draw, Bools]:
    """Return what of a draw may be used, and which of its steps that is.

    Groups are used whole or not at all.
    """
    if draw.offsets is None:
        return draw.taken(np.flatnonzero(good)), good
    lengths = np.diff(draw.offsets)
    complete = np.logical_and.reduceat(good, draw.offsets[:-1])
    good = np.repeat(complete, lengths)
    offsets = np.append(0, np.cumsum(lengths[complete]))
    return replace(draw.taken(np.flatnonzero(good)), offsets=offsets), good


def _checked_ticket(view: View, ticket: object) -> Uses:
    """Return a ticket's uses; it comes from a file, so everything is checked."""
    if not isinstance(ticket, dict) or ticket.get("kind") != "UseTicket":
        got = ticket.get("kind") if isinstance(ticket, dict) else ticket
        raise FormatError(
            f"ticket: kind must be 'UseTicket', got {shown(got)}. Pass the batch, or "
            "what ticket returned for it."
        )
    if ticket.get("uuid") != view.home.uuid.hex():
        raise FormatError(
            f"ticket: uuid must be {view.home.uuid.hex()}, got {ticket.get('uuid')!r}. "
            "Pass it to the buffer that drew its batch."
        )
    columns = [
        states.integers(ticket, name, "ticket", "ticket")
        for name in ("env_ids", "positions", "uses")
    ]
    env_ids, positions, uses = columns
    if len({len(column) for column in columns}) > 1 or (
        len(env_ids) and env_ids.max() >= view.home.ring.num_envs
    ):
        raise FormatError(
            "ticket: env_ids, positions and uses must be one number each for every "
            f"row, of environments below {view.home.ring.num_envs}. Pass what ticket "
            "returned, unchanged."
        )
    # Not the counter's own maximum: a ticket outlives a restart with a smaller one.
    if len(uses) and not (uses.min() >= 1 and uses.max() <= MAX_USES):
        raise FormatError(
            f"ticket: uses must be in [1, {MAX_USES}], got values in [{uses.min()}, "
            f"{uses.max()}]. Pass what ticket returned, unchanged."
        )
    # A ticket without them is older than any cut: of rows above it none is raised.
    whens = [ticket.get(name, 0) for name in ("generation", "cut_epoch")]
    if not all(type(when) is int and 0 <= when < MAX_COUNT for when in whens):
        raise FormatError(
            "ticket: generation and cut_epoch must be integers in [0, 2**62), got "
            f"{shown(whens)}. Pass what ticket returned, unchanged."
        )
    return Uses(env_ids, positions, uses, *whens)
