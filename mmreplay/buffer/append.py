"""The one writer: it puts rows into a store and moves the heads that publish them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.buffer.flag_rules import EpisodeFlags, as_laid, expand, laid_out
from mmreplay.buffer.validation import Columns, StepValidator, tell
from mmreplay.episodes import BREAK, CUT, END, FINAL, START
from mmreplay.episodes.autoreset import (
    MIN_ENDS,
    MIN_KNOWN_ENDS,
    after_ends,
    next_step_signature,
)
from mmreplay.errors import AutoresetWarning, ReplayError, SchemaError
from mmreplay.process import ProcessGuard
from mmreplay.ring import Run, runs
from mmreplay.schema import Schema
from mmreplay.storage.commit_state import Book, refuse_overflow
from mmreplay.storage.committer import Committer
from mmreplay.storage.disk_space import targets
from mmreplay.storage.fast_append import lane_of
from mmreplay.storage.store import Store

Array = NDArray[np.int64]
Hold = Callable[[Array, Array, Array, Array], Array]
# First-lap space is promised this far ahead of the head, at least one row.
ALLOCATE_AHEAD_NBYTES = 16 << 20
# The check of rows after episode ends reads at most so many flags, ends and rewards.
CHECKED_ROWS = 1 << 20
CHECKED_ENDS = 64
CHECKED_REWARDS = 4096


class Writer:
    """Adds rows to one open buffer.

    All or nothing: everything is validated, then written, then published by moving the
    heads; an exception before that leaves nothing visible. Threads: adds take turns.

    Attributes:
        owner: The process that opened the buffer.
        checks_ends: Whether rows after episode ends are still to be checked for
            resets of next-step mode, which another ``autoreset`` takes for steps.
    """

    def __init__(
        self, store: Store, book: Book, committer: Committer | None,
        schema: Schema, autoreset: str, row_nbytes: int,
    ) -> None:  # fmt: skip
        self._store, self._book, self._committer = store, book, committer
        self._ring = ring = store.ring
        self._autoreset, follows = autoreset, autoreset == "next_step"
        self._marker = EpisodeFlags(schema, ring.num_envs, final_follows=follows)
        self.intake = StepValidator(schema, ring.num_envs)
        self._fields = schema.fields
        self.owner = ProcessGuard(
            "this buffer was opened for writing",
            "open the path with mode='r' in the child",
        )
        ends = schema.role("terminated"), schema.role("truncated")
        rewarded = len(schema.role_paths("reward")) == 1
        self.checks_ends = not follows and rewarded and ends != (None, None)
        self._num_ends, self._check_at = 0, MIN_KNOWN_ENDS
        self.hold: Hold | None = None
        self._add_lock = threading.Lock()
        self._ahead = max(2, ALLOCATE_AHEAD_NBYTES // max(1, row_nbytes))
        self._slots, self._wide = ring.slots, ring.num_envs > 1
        self._straight = not self._wide or ring.layout == "time_major"
        self._one, self._limits = np.ones((2, ring.num_envs), np.int64)
        self._bases = [env * ring.slots for env in range(ring.num_envs)]
        self._lane = lane_of(store, book)
        self._know(book.heads, book.limits, book.tails)

    def adopt(self, heads: Array, tails: Array) -> None:
        """Go on from rows that somebody else put into the store."""
        heads = heads.copy()
        self._book.publish(heads, heads, tails)
        self._know(heads, heads, tails)

    def follow(self, writer: Writer) -> None:
        """Go on where another writer of the same steps stopped."""
        writer._catch_up()
        self._marker.follow(writer._marker)
        self.hold = writer.hold
        self.checks_ends = writer.checks_ends
        self._num_ends, self._check_at = writer._num_ends, writer._check_at
        # Warn once per buffer, also after a resize.
        self.intake.unrounded &= writer.intake.unrounded

    def _know(self, heads: Array, limits: Array, tails: Array) -> None:
        """Note what was published, and the head that all environments share, if any.

        What tells an interrupted call from a whole one, the arrays themselves, is
        set last, here and wherever they are set: see `_catch_up`.
        """
        if limits is not self._limits:
            self._store.give_up(limits)
        first = int(heads[0])
        # Ends of agents are joined in Python: no way for lockstep takes such steps.
        in_step = self._marker.num_agents is None and (heads == first).all()
        self._lockstep = first if in_step else -1
        self._room = int(limits.min())
        self._early = self._room - self._ring.reserve // 2
        self._heads, self._limits, self._tails = heads, limits, tails

    def resume(self, how: str, env_ids: Array | None = None) -> None:
        """Say how the rows on disk are followed, in some environments or all."""
        if how == "continue":
            self._go_on()
            return
        self._catch_up()
        begun = np.flatnonzero(self._heads)
        begun = begun if env_ids is None else np.intersect1d(begun, env_ids)
        last = self._last_flags(begun, self._heads)
        running = ((last & (END | FINAL)) == 0) & (self._heads > self._tails)[begun]
        cut = np.uint8(CUT if how == "truncate" else 0)
        self._marker.interrupt(begun, np.uint8(START | BREAK) | (running * cut))

    def _go_on(self) -> None:
        """Know the newest rows again, also those given up but not overwritten yet.

        An end that was given up before its final row came is still followed by it.
        """
        heads, slots = self._heads, self._ring.slots
        known = np.flatnonzero((heads > 0) & (heads > self._limits - slots))
        self._marker.note(known, self._last_flags(known, heads))
        emptied = known[heads[known] == self._tails[known]]
        self._marker.forget(emptied, np.ones(len(emptied), bool))

    def _last_flags(self, env_ids: Array, heads: Array) -> NDArray[np.uint8]:
        """Flags of the newest rows of some environments that have one."""
        return self._store.flags(self._ring.rows(env_ids, heads[env_ids] - 1))

    def check(self) -> None:
        """Refuse a forked child and a writer whose device failed.

        Raises:
            ForkedError: This process is not the one that opened the buffer.
            FailedError: A sync failed before.
        """
        if self.owner.num_forks != process.num_forks:
            self.owner.check()
        committer = self._committer
        if committer is not None and (committer.failure is not None or committer.owed):
            committer.check()

    def add_plain(self, given: Mapping[str, object]) -> Array | None:
        """Write one step that needs no conversion; None leaves it to `add`.

        In as few calls as can be, which are what a step costs.

        Returns:
            int64 ``[E]``, the heads that it made: see `Book`.
        """
        self.check()
        with self._add_lock:
            self._catch_up()
            head, marker, lane = self._lockstep, self._marker, self._lane
            short = lane and 0 <= head < self._early and marker.calm()
            if lane and short and (heads := lane.add(given, head)) is not None:
                marker.note_calm()
                self._lockstep = head + 1
                self._heads = heads
                return heads
            ends = self._store.wide(given) if self._wide else self._store.step(given)
            if ends < 0 or head < 0:
                return None
            if self.checks_ends and not marker.calm():
                # Before the step: a warning that is an error leaves nothing visible.
                self._check_ends()
                self._num_ends += self._ends_followed(None)
            if head >= self._room:
                self._make_room(self._heads + self._one)
            laid: Columns = given  # type: ignore[assignment]  # arrays where the store looks for them
            if self._wide:
                flags = marker.wide(laid, ends)
                self._store.write_wide(self._places(head), laid, flags)
            else:
                alone = marker.one(ends)
                self._store.write_step(head % self._slots, laid, alone)
            heads = self._heads + self._one
            self._book.publish(heads, self._limits, self._tails)
            # Noted only now: an add that raised before must leave no trace. The heads
            # last: see `_catch_up`.
            if self._wide:
                marker.note_wide(flags, ends)
            else:
                marker.note_one(alone)
            self._lockstep = head + 1
            self._heads = heads
            if head >= self._early:
                self._look_ahead()
            elif lane:
                lane.lease(head + 1)
            return heads

    def _places(self, head: int) -> list[Run]:
        """Where one step of all environments goes."""
        slot, envs = head % self._slots, self._ring.num_envs
        if self._straight:
            return [(slot * envs, 0, envs)]
        return [(base + slot, e, e + 1) for e, base in enumerate(self._bases)]

    def add(
        self,
        given: Mapping[str, object],
        final_observation: object,
        env_ids: NDArray[np.int64] | None,
    ) -> None:
        """Write one step of each environment; see `ReplayBuffer.add`."""
        self.check()
        count = self._ring.num_envs if env_ids is None else len(env_ids)
        columns = self.intake.step(given, count)
        with self._add_lock:
            self._catch_up()
            if self.checks_ends and not self._marker.calm():
                self._check_ends()
                self._num_ends += self._ends_followed(env_ids)
            if final_observation is None and env_ids is None and self._lockstep >= 0:
                self._add_lockstep(columns)
                return
            wide = {
                path: np.asarray(column, field.numpy).reshape(1, count, *field.shape)
                for path, column in columns.items()
                if (field := self._fields[path])
            }
            final = None
            if final_observation is not None:
                given_final = self._final(final_observation, (count,), columns)
                final = {path: column[None] for path, column in given_final.items()}
            self._add_block(wide, final, env_ids)

    def _catch_up(self) -> None:
        """Note what an interrupted call published and had no time to note.

        Ctrl-C may come between any two lines. Every call notes the arrays it
        published when all else is noted, so a call cut short is told by them.
        """
        book = self._book
        heads, limits, tails = book.heads, book.limits, book.tails
        if heads is self._heads and limits is self._limits and tails is self._tails:
            return
        moved = np.flatnonzero(self._heads != heads)
        self._marker.note(moved, self._last_flags(moved, heads))
        emptied = np.flatnonzero((self._tails != tails) & (tails == heads))
        if len(emptied):
            self._marker.forget(emptied, heads[emptied] > 0)
        self._know(heads, limits, tails)

    def _final(
        self, observation: object, lead: tuple[int, ...], columns: Columns
    ) -> Columns:
        """Check final observations of steps; see `Intake.final`."""
        if self._autoreset == "next_step":
            raise SchemaError(
                "final_observation: got one, expected none in a buffer with autoreset="
                "'next_step', where the row after an end holds it; leave it out"
            )
        ended = np.zeros(lead, bool)
        ends = self._marker.ends(columns)
        for role in ("terminated", "truncated"):
            if (path := self._store.schema.role(role)) is not None:
                ended |= np.reshape(np.asarray(ends[path], bool), lead)
        return self.intake.final(observation, ended)

    def _add_lockstep(self, columns: Columns) -> None:
        """Write one step of all environments when their heads are equal."""
        head = self._lockstep
        if head >= self._room:
            self._make_room(self._heads + 1)
        flags = self._marker.step(columns)
        self._store.write(self._places(head), columns, flags)
        heads = self._heads + 1
        self._book.publish(heads, self._limits, self._tails)
        self._marker.note_all(flags)
        self._lockstep = head + 1
        self._heads = heads
        if head >= self._early:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Have the limits raised before an add must wait for it."""
        self._early = self._room
        if self._committer is not None:
            self._committer.wake()

    def extend_plain(self, given: Mapping[str, object]) -> bool:
        """Write many steps that need no conversion; False leaves them to `extend`."""
        self.check()
        with self._add_lock:
            self._catch_up()
            steps = self._store.block(given)
            if steps < 1 or self._lockstep < 0:
                return False
            laid: Columns = given  # type: ignore[assignment]  # arrays, as the store says
            flags, size = self._marker.plain(laid, steps), self._ring.reserve
            if self.checks_ends:
                self._num_ends += self._ends_followed(None)
            for first in range(0, steps, size):
                try:
                    self._add_laid(laid, flags, first, min(first + size, steps))
                except OSError as error:
                    tell(error, first, steps)
                    raise
            if self.checks_ends:
                self._num_ends += int(np.count_nonzero(flags[:-1] & END))
                self._check_ends()
        return True

    def extend(
        self,
        given: Mapping[str, object],
        final_observation: object,
        env_ids: NDArray[np.int64] | None,
    ) -> None:
        """Write many steps of each environment; see `ReplayBuffer.extend`."""
        self.check()
        count = self._ring.num_envs if env_ids is None else len(env_ids)
        columns, steps = self.intake.block(given, count)
        final = None
        if final_observation is not None:
            final = self._final(final_observation, (steps, count), columns)
        size = self._ring.reserve if final is None else self._ring.reserve // 2
        with self._add_lock:
            self._catch_up()
            if self.checks_ends:
                self._num_ends += self._ends_followed(env_ids)
            for first in range(0, steps, size):
                piece = slice(first, min(first + size, steps))
                part = {path: column[piece] for path, column in columns.items()}
                ends = final and {path: column[piece] for path, column in final.items()}
                try:
                    self._add_block(part, ends, env_ids)
                except OSError as error:
                    tell(error, first, steps)
                    raise
            if self.checks_ends:
                for role in ("terminated", "truncated"):
                    if (path := self._store.schema.role(role)) is not None:
                        self._num_ends += int(np.count_nonzero(columns[path][:-1]))
                self._check_ends()

    def _ends_followed(self, env_ids: NDArray[np.int64] | None) -> int:
        """Count the episode ends, stored before, that the next step follows."""
        ended = (self._marker.before & (END | FINAL)) != 0
        ended &= self._heads > self._tails
        return int(np.count_nonzero(ended if env_ids is None else ended[env_ids]))

    def _check_ends(self) -> None:
        """Warn, once, if rows after episode ends look like resets of next-step mode.

        Up to a million flags and a few thousand rows are read when 3 and 32 ends have
        been followed by a row, and no more once 32 were judged.
        """
        if self._num_ends < self._check_at:
            return
        late = self._num_ends >= MIN_ENDS
        self._check_at = self._num_ends + MIN_ENDS if late else MIN_ENDS
        try:
            found = self._next_step_rows()
        except (ReplayError, OSError):
            # Rows that cannot be read are no reason to refuse new ones.
            self.checks_ends = False
            return
        if found is None:
            return
        self.checks_ends = False
        stored = self._store.schema.role("next_observation") is not None
        otherwise = "Otherwise, ignore this warning"
        if stored:
            otherwise = (
                "If they reset within the step, next_observation at an end must be "
                "infos['final_obs'], not the observation that step returned"
            )
        warnings.warn(
            f"autoreset={self._autoreset!r} looks wrong: {found}. If these "
            "environments reset one step after an end, as Gymnasium's vector "
            "environments do by default, such rows are no steps: create the buffer "
            f"with autoreset='next_step'. {otherwise}",
            AutoresetWarning,
            # The user's call of the buffer's, which called the writer's, called this.
            stacklevel=4,
        )

    def _next_step_rows(self) -> str | None:
        """Read rows after episode ends and others; see `next_step_signature`."""
        ring, schema, store = self._ring, self._store.schema, self._store
        each = max(4, CHECKED_ROWS // ring.num_envs)
        firsts = np.maximum(self._tails, self._heads - min(each, ring.capacity))
        lengths = (self._heads - firsts)[: CHECKED_ROWS // 4]
        env_ids = np.repeat(np.arange(len(lengths)), lengths)
        offsets = np.arange(len(env_ids)) - (np.cumsum(lengths) - lengths)[env_ids]
        rows = ring.rows(env_ids, firsts[env_ids] + offsets)
        flags = store.flags(rows)
        after = after_ends(flags, env_ids)
        if not len(after):
            return None
        others = (flags & FINAL) == 0
        others[after] = False
        if len(after) > CHECKED_ENDS:
            after = after[np.arange(CHECKED_ENDS) * len(after) // CHECKED_ENDS]
        # The row before is the end, or its final row with the end before it.
        between = (flags[after - 1] & FINAL) != 0
        ends = after - 1 - between
        stored = schema.role_paths("next_observation")
        known = (env_ids[ends] == env_ids[after]) & (ends >= 0)
        known &= between | bool(stored)
        observed: list[tuple[NDArray[np.generic], ...]] = [(), (), ()]
        if known.any():
            paths = schema.role_paths("observation")
            led = sorted(stored) if stored else paths
            paths = tuple(sorted(paths)) if stored else paths
            observed = [
                tuple(store.gather(rows[at], names)[name] for name in names)
                for at, names in (
                    (ends, paths), (ends if stored else after - 1, led), (after, paths)
                )
            ]  # fmt: skip
        (reward,) = schema.role_paths("reward")
        sample = np.flatnonzero(others)
        if len(sample) > CHECKED_REWARDS:
            sample = sample[np.arange(CHECKED_REWARDS) * len(sample) // CHECKED_REWARDS]
        rewards = [store.gather(rows[at], (reward,))[reward] for at in (after, sample)]
        if schema[reward].dtype == "bfloat16":
            # Stored as bits; the shift drops the sign, so that -0 equals 0.
            rewards = [bits.astype(np.uint16) << 1 for bits in rewards]
        self.checks_ends = len(after) < MIN_ENDS
        return next_step_signature(rewards[0], rewards[1], known, *observed)

    def _add_block(
        self,
        columns: Columns,
        final: Columns | None,
        env_ids: NDArray[np.int64] | None,
    ) -> None:
        """Write and publish a block of at most `reserve` rows an environment."""
        if final is None and env_ids is None and self._lockstep >= 0:
            self._add_lockstep_block(columns)
            return
        envs: NDArray[np.int64] | slice = slice(None) if env_ids is None else env_ids
        ids = np.arange(self._ring.num_envs) if env_ids is None else env_ids
        before, pending = self._marker.before[envs], self._marker.pending[envs]
        flags = self._marker.block(columns, before, pending)
        ended = (flags & END) != 0
        layout = expand(ended if final is not None else np.zeros_like(ended))
        heads = self._heads.copy()
        heads[envs] += layout.counts
        if (heads > self._limits).any():
            self._make_room(heads)
        positions = self._heads[ids][layout.env] + layout.offset
        rows = self._ring.rows(ids[layout.env], positions)
        row_flags = flags.reshape(-1)[layout.source]
        row_flags[layout.final] = FINAL
        self._store.write(runs(rows), laid_out(columns, final, layout), row_flags)
        self._book.publish(heads, self._limits, self._tails)
        self._marker.note(envs, row_flags[np.cumsum(layout.counts) - 1])
        self._know(heads, self._limits, self._tails)

    def _add_lockstep_block(self, columns: Columns) -> None:
        """The same for all environments at equal heads, with no final rows."""
        flags = self._marker.block(columns, self._marker.before, self._marker.pending)
        laid = {path: as_laid(self._ring, column) for path, column in columns.items()}
        self._add_laid(laid, flags, 0, len(flags))

    def _add_laid(
        self, laid: Columns, flags: NDArray[np.uint8], first: int, stop: int
    ) -> None:
        """Write and publish steps ``[first, stop)`` of what is laid out as the rows.

        Args:
            laid: Per path ``[N, *shape]``, in the order of the ring's rows.
            flags: uint8 ``[T, E]``.
            first: Its first step to write; 0 unless the order is step by step.
            stop: The step after the last one.
        """
        ring = self._ring
        skipped, count = first * ring.num_envs, stop - first
        heads = self._heads + count
        if self._lockstep + count > self._room:
            self._make_room(heads)
        row, head = self._lockstep % self._slots * ring.num_envs, self._lockstep + count
        if self._straight and row + count * ring.num_envs <= ring.num_rows:
            places = [(row, skipped, skipped + count * ring.num_envs)]
            self._store.write(places, laid, flags.reshape(-1))
        else:
            places = ring.block_runs(self._lockstep, count)
            places = [(row, skipped + a, skipped + b) for row, a, b in places]
            self._store.write(places, laid, as_laid(ring, flags))
        self._book.publish(heads, self._limits, self._tails)
        self._marker.note_all(flags[stop - 1])
        self._lockstep = head
        self._heads = heads
        if head >= self._early:
            self._look_ahead()

    def _make_room(self, heads: Array) -> None:
        """Raise the limits to take in heads, before a byte below them is written."""
        refuse_overflow(heads, self._ring.slots)
        known = self._heads, self._limits, heads, self._ahead, self._store.grain
        target, free = targets(self._ring, self._committer, *known)
        if self._committer is not None and not free:
            target = np.maximum(self._limits, self._committer.given_up(heads, target))
        if self.hold is not None:
            target = self.hold(self._heads, self._tails, heads, target)
        # In any lap: a ring that was enlarged is empty from its head on.
        target = np.maximum(self._limits, target)
        self._store.allocate(self._limits, target)
        # Readers must know before the first of these rows is overwritten.
        self._book.publish(self._heads, target, self._tails)
        self._know(self._heads, target, self._tails)

    def clear(self, env_ids: NDArray[np.int64] | None) -> None:
        """Give up every row of some environments; positions go on."""
        self.check()
        envs: NDArray[np.int64] | slice = slice(None) if env_ids is None else env_ids
        with self._add_lock:
            self._catch_up()
            tails = self._tails.copy()
            tails[envs] = self._heads[envs]
            self._book.publish(self._heads, self._limits, tails)
            self._marker.forget(envs, self._heads[envs] > 0)
            self._tails = tails

    def drop(self, env_ids: NDArray[np.int64], firsts: NDArray[np.int64]) -> None:
        """Give up the rows below firsts."""
        self.check()
        with self._add_lock:
            self._catch_up()
            tails = self._tails.copy()
            tails[env_ids] = np.maximum(tails[env_ids], firsts)
            self._book.publish(self._heads, self._limits, tails)
            self._tails = tails
