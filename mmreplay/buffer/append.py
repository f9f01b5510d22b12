"""Adds rows to an open buffer: flags them, stores them, and publishes the heads.

A step goes one of two ways. `Appender.try_add` takes a step whose values need no
conversion: the store checks and packs it in one call, and writes the packed rows.
`Appender.add` casts any other step first, and then takes it the same way. Blocks, final
observations and heads that differ by environment go through `Store.write`. Where the
pages of its rows are ready, `FastAppend` stores and publishes a step or a block by one
call of C instead.

The order is the same in all, and makes a kill between any two instructions harmless:
validate, raise the limits if the rows are old ones, write data and flags, publish the
heads. What was written and not published is no row: the next step overwrites it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels, process
from mmreplay.buffer.flag_rules import EpisodeFlags, as_rows, expand, with_final_rows
from mmreplay.buffer.heap_values import BeforeOverwrite as BeforeOverwrite
from mmreplay.buffer.heap_values import Bytes as ValueBytes
from mmreplay.buffer.heap_values import ValueWriter
from mmreplay.buffer.validation import StepValidator, note_progress
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.episodes import BREAK, CUT, END, FINAL, START
from mmreplay.episodes.rules import MIN_ENDS, MIN_KNOWN_ENDS, find_reset_rows
from mmreplay.errors import AutoresetWarning, ReplayError, frames_to_caller
from mmreplay.format.heap import comparable
from mmreplay.process import ProcessGuard
from mmreplay.ring import Ring, Run, runs
from mmreplay.schema import Schema
from mmreplay.storage.commit_state import (
    BOTH_LIVE,
    CommitWriter,
    WritableCommitState,
    refuse_overflow,
)
from mmreplay.storage.committer import Committer
from mmreplay.storage.disk_space import targets
from mmreplay.storage.layout import stored
from mmreplay.storage.store import Columns, Store, rounded_up
from mmreplay.storage.write_path import StepWriters

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel

Array = NDArray[np.int64]
Heads = NDArray[np.int64]
ALLOCATE_AHEAD_NBYTES = 16 << 20
"""Space is reserved so far ahead of the head in the first lap, and at least one row."""
# The check of rows after episode ends reads at most so many flags, ends and rewards.
CHECKED_ROWS = 1 << 20


class Appender:
    """Adds rows to one open buffer.

    All or nothing: everything is validated, then written, then published by moving the
    heads; an exception before that leaves nothing visible. Threads: adds take turns.

    Attributes:
        owner: The process that opened the buffer.
        validator: Checks and casts what users pass.
        checks_ends: Whether rows after episode ends are still to be checked for
            resets of next-step mode, which another ``autoreset`` takes for steps.
        warns_of_ends: Whether `close` warns of `unstored_ends`.
    """

    # Slots, as those of `GenerationReader`: 31 attributes in a dict cost 4 % of an add.
    __slots__ = (
        "_add_lock",
        "_ahead_rows",
        "_allowed",
        "_autoreset",
        "_before_overwrite",
        "_check_at",
        "_commit",
        "_committer",
        "_common_head",
        "_ended",
        "_fast_append",
        "_fields",
        "_first_rows",
        "_flags",
        "_heads",
        "_let_go",
        "_limits",
        "_lowest_limit",
        "_num_ends",
        "_one",
        "_refill_at",
        "_ring",
        "_slots",
        "_store",
        "_tails",
        "_together",
        "_values",
        "checks_ends",
        "owner",
        "validator",
        "warns_of_ends",
    )

    def __init__(
        self,
        store: Store,
        commit: WritableCommitState,
        committer: Committer | None,
        schema: Schema,
        autoreset: str,
        row_nbytes: int,
        fast_append: FastAppend | None = None,
    ) -> None:
        """Continue after the rows that are published.

        Args:
            store: Where rows go.
            commit: Publishes them.
            committer: Makes limits durable before rows are overwritten; None in RAM.
            schema: Of the rows.
            autoreset: Of the buffer's metadata.
            row_nbytes: Bytes of a row.
            fast_append: Stores and publishes by itself, where the store has one.
        """
        self._store, self._commit, self._committer = store, commit, committer
        self._ring = ring = store.ring
        self._autoreset, follows = autoreset, autoreset == "next_step"
        self._flags = EpisodeFlags(schema, ring.num_envs, final_follows=follows)
        self.validator = StepValidator(schema, ring.num_envs)
        self._fields = schema.fields
        self.owner = ProcessGuard(
            "this buffer was opened for writing", "Open the path with mode='r' in the child"
        )
        ends = schema.role("terminated"), schema.role("truncated")
        rewarded = len(schema.role_paths("reward")) == 1
        self.checks_ends = not follows and rewarded and ends != (None, None)
        self._num_ends, self._check_at = 0, MIN_KNOWN_ENDS
        self._before_overwrite: BeforeOverwrite | None = None
        # Limits that the callback let go; None without one.
        self._let_go: Array | None = None
        self._add_lock = threading.Lock()
        self._ahead_rows = max(2, ALLOCATE_AHEAD_NBYTES // max(1, row_nbytes))
        self._slots = ring.slots
        # A step's rows of all environments lie side by side.
        self._together = ring.num_envs == 1 or ring.layout == "time_major"
        self._one, self._limits = np.ones((2, ring.num_envs), np.int64)
        self._allowed = self._limits
        self._first_rows = [env * ring.slots for env in range(ring.num_envs)]
        self._fast_append = fast_append
        self._values: ValueWriter | None = None
        if (space := store.heap_space(commit)) is not None:
            self._values = ValueWriter(store, space, commit, committer)
        # Environments whose end was asked for by `end_episodes`, and not by an opening.
        self._ended = np.zeros(ring.num_envs, bool)
        self.warns_of_ends = True
        self._set_published(commit.heads, commit.limits, commit.tails)

    @property
    def before_overwrite(self) -> BeforeOverwrite | None:
        """Called before rows are overwritten, or end for their values.

        With heads, tails, the heads that are needed and the new limits; it may return
        lower limits.
        """
        return self._before_overwrite

    @before_overwrite.setter
    def before_overwrite(self, callback: BeforeOverwrite | None) -> None:
        # Limits may be ahead of the heads: those below them are asked for, too.
        self._before_overwrite = callback
        self._let_go = None if callback is None else self._heads
        if self._committer is not None:
            # The thread raises limits ahead only over rows that the callback let go.
            self._committer.holds = callback is not None
            self._committer.highest_limits = self._let_go
        if self._values is not None:
            self._values.ask_before(callback)
        self._set_published(self._heads, self._limits, self._tails)

    def start_from(self, heads: Array, tails: Array, heap_heads: Array | None = None) -> None:
        """Publish rows that a copy put into the store, and into its heap."""
        heads = heads.copy()
        self._commit.publish(heads, heads, tails, heap_heads)
        self._set_published(heads, heads, tails)

    def continue_from(self, other: Appender) -> None:
        """Continue the episodes of another appender of the same steps."""
        other._recover_interrupted()
        self._flags.continue_from(other._flags)
        self.before_overwrite = other.before_overwrite
        self.checks_ends, self._ended = other.checks_ends, other._ended
        self.warns_of_ends = other.warns_of_ends
        self._num_ends, self._check_at = other._num_ends, other._check_at
        # Warn once per buffer, also after a resize.
        self.validator.unrounded &= other.validator.unrounded

    def _set_published(self, heads: Array, limits: Array, tails: Array) -> None:
        """Note what was published, and the head that all environments share, if any.

        The arrays themselves are set last, here and wherever they are set: an
        interrupted call is recognised by them, see `_recover_interrupted`.
        """
        # The store clears missing pages below the limits, so it may know of them only
        # now that readers do.
        if limits is not self._limits:
            self._store.give_up(limits)
        first = int(heads[0])
        # Ends of agents are joined in Python: no short way takes such steps.
        equal = self._flags.num_agents is None and (heads == first).all()
        self._common_head = first if equal else -1
        allowed = limits if self._let_go is None else np.minimum(limits, self._let_go)
        self._lowest_limit = int(allowed.min())
        # Limits are raised in the background from here on, so that an add seldom waits
        # for the sync that makes them durable: half a reserve takes longer to fill.
        self._refill_at = self._lowest_limit - self._ring.reserve // 2
        self._allowed = allowed
        self._heads, self._limits, self._tails = heads, limits, tails

    def resume(self, how: str, env_ids: Array | None = None) -> Array:
        """Decide how the next rows follow those on disk, in some environments or all.

        Args:
            how: ``"break"``, ``"truncate"`` or ``"continue"``; see `ReplayBuffer.open`.
            env_ids: int64 ``[N]``; all by default.

        Returns:
            int64 ``[M]``, the environments whose episode this ended.
        """
        if how == "continue":
            self._continue_episodes()
            return np.empty(0, np.int64)
        self._recover_interrupted()
        begun = np.flatnonzero(self._heads)
        begun = begun if env_ids is None else np.intersect1d(begun, env_ids)
        last = self._last_flags(begun, self._heads)
        unfinished = (last & (END | FINAL)) == 0
        unfinished &= (self._heads > self._tails)[begun]
        truncated = np.uint8(CUT if how == "truncate" else 0)
        self._flags.interrupt(begun, np.uint8(START | BREAK) | (unfinished * truncated))
        ended: Array = begun[unfinished]
        return ended

    def end_episodes(self, env_ids: Array | None, discard: bool) -> None:
        """End unfinished episodes; see `ReplayBuffer.end_episodes`."""
        ended = self.resume("break" if discard else "truncate", env_ids)
        self._ended[slice(None) if env_ids is None else env_ids] = False
        self._ended[ended] = True

    def unstored_ends(self, discard: bool) -> Array:
        """Environments whose episode `end_episodes` ended, and no row stores it yet."""
        pending = self._flags.pending
        cut = (pending & (BREAK if discard else CUT)) != 0
        if discard:
            cut &= (pending & CUT) == 0
        return np.flatnonzero(self._ended & cut & (self._heads > self._tails))

    def _continue_episodes(self) -> None:
        """Read the flags of the newest rows, also of dropped rows still on disk.

        An end that was given up before its final row came is still followed by it.
        """
        heads, slots = self._heads, self._ring.slots
        there = np.flatnonzero((heads > 0) & (heads > self._limits - slots))
        self._flags.note(there, self._last_flags(there, heads))
        emptied = there[heads[there] == self._tails[there]]
        self._flags.forget(emptied, np.ones(len(emptied), bool))

    def _last_flags(self, env_ids: Array, heads: Array) -> NDArray[np.uint8]:
        """Flags of the newest rows of some environments that have one."""
        return self._store.flags(self._ring.rows(env_ids, heads[env_ids] - 1))

    def check(self) -> None:
        """Refuse a forked child and an appender whose device failed.

        Raises:
            ForkedError: This process is not the one that opened the buffer.
            FailedError: A sync failed before.
        """
        if self.owner.num_forks != process.num_forks:
            self.owner.check()
        committer = self._committer
        if committer is not None and (committer.failure is not None or committer.commit_overdue):
            committer.check()

    def try_add(self, data: Mapping[str, object], after: Heads | None = None) -> Heads | None:
        """Add one step of each environment, if no value needs a conversion.

        Args:
            data: A nested or flat mapping of values, not validated yet.
            after: The heads that the step follows: None is returned if others are
                published.

        Returns:
            int64 ``[E]``, the heads now published; None for a step that was not added.
        """
        # Refused before the lock: in a forked child another thread of the parent may
        # have held it, for good.
        self.check()
        with self._add_lock:
            self._recover_interrupted()
            if after is not None and self._heads is not after:
                return None
            if self._values is not None:
                heads = self._try_add_values(data)
                return heads  # noqa: RET504  as below
            head, flags = self._common_head, self._flags
            # A step without flags, below the limits: one call of C does all the rest,
            # in 2 us (1.4 in a first lap) instead of 5, three of which were three
            # stores. Below `_refill_at`, so that it never has to wake the committer.
            fast = self._fast_append
            if fast is not None and 0 <= head < self._refill_at and flags.no_boundary():
                heads = fast.add(data, head)
                if heads is not None:
                    # The same order as in `_add_prepared`: the heads last.
                    flags.note_no_flags()
                    self._common_head = head + 1
                    self._heads = heads
                    return heads
            if head < 0:
                return None
            ends = self._store.prepare(data)
            if ends < 0:
                return None
            # Not `return self._add_prepared(...)`: Ctrl-C between the call and the
            # return would leave the lock taken.
            heads = self._add_prepared(ends)
            return heads  # noqa: RET504

    def _try_add_values(self, data: Mapping[str, object]) -> Heads | None:
        """Add one step with values that vary; see `try_add`."""
        values, fast, flags = self._values, self._fast_append, self._flags
        head = self._common_head
        assert values is not None
        if fast is None or not fast.stores or not flags.no_boundary():
            return None
        if not 0 <= head < self._refill_at:
            return None
        stored = values.store_mapped(data) or values.store_plain(data)
        if stored is None:
            return None
        # Where this is no plain step after all, its values are written again: nothing
        # names them yet.
        heads = fast.add(stored[0], head, stored[1])
        if heads is not None:
            flags.note_no_flags()
            self._common_head = head + 1
            self._heads = heads
            values.wake()
        return heads

    def add(
        self, data: Mapping[str, object], final_observation: object = None, env_ids: object = None
    ) -> Heads:
        """Add one step of each environment, or of some; see `ReplayBuffer.add`.

        Returns:
            int64 ``[E]``, the heads now published.
        """
        if final_observation is None and env_ids is None:
            heads = self.try_add(data)
            if heads is not None:
                return heads
        flat, ids = self.validator.flat(data), self.validator.env_ids(env_ids)
        self.check()
        count = self._ring.num_envs if ids is None else len(ids)
        columns: Columns = self.validator.step(flat, count)
        values = self._values
        with self._add_lock:
            self._recover_interrupted()
            value_bytes: ValueBytes = {}
            if final_observation is None and ids is None and self._common_head >= 0:
                heap_heads = None
                # In a final row most values stay empty, and its flags come first.
                if values is None or not self._flags.final_is_next():
                    if values is not None:
                        columns, heap_heads = self._store_values(columns)
                    ends = self._store.prepare(columns)
                    assert ends >= 0, "columns that were cast need no conversion"
                    heads = self._add_prepared(ends, heap_heads)
                    return heads  # noqa: RET504  as in `try_add`
            if values is not None:
                columns, value_bytes = values.spans(columns)
            if self.checks_ends and not self._flags.no_boundary():
                self._check_ends()
                self._num_ends += self._ends_followed(ids)
            block = {}
            for path, column in columns.items():
                dtype, shape = stored(self._fields[path])
                block[path] = np.asarray(column, dtype).reshape(1, count, *shape)
            finals = None
            if final_observation is not None:
                last = self._final(final_observation, (count,), columns)
                if values is not None:
                    last, value_bytes = values.behind(*values.spans(last), value_bytes)
                finals = {path: column[None] for path, column in last.items()}
            self._add_block(block, finals, ids, value_bytes)
            return self._heads

    def _store_values(self, columns: Columns) -> tuple[Columns, Array]:
        """Write the values of one step of all environments.

        Args:
            columns: Per path an array, or `Ragged` of fields that vary.

        Returns:
            The columns with references, and int64 ``[E]``, the heap heads after them.
        """
        values = self._values
        assert values is not None
        if self._ring.num_envs == 1:
            stored = values.store_step(columns)
            if stored is not None:
                return stored
        columns, block = values.block(columns)
        _, heap_heads = values.store_block(block, 0, 1)
        self._note_raised_tails()
        return columns, heap_heads

    def _note_raised_tails(self) -> None:
        """Note tails that were raised for values to be overwritten."""
        commit = self._commit
        if commit.tails is not self._tails:
            self._set_published(commit.heads, commit.limits, commit.tails)

    def _add_prepared(self, ends: int, heap_heads: Array | None = None) -> Heads:
        """Write and publish the step that the store prepared, at equal heads.

        Args:
            ends: What `Store.prepare` returned.
            heap_heads: int64 ``[E]``, after the values of the step; None without any.
        """
        head, flags = self._common_head, self._flags
        if self.checks_ends and not flags.no_boundary():
            # Before the step: a warning that is an error leaves nothing visible.
            self._check_ends()
            self._num_ends += self._ends_followed(None)
        # Before a byte of the row is written: a reader may be copying the row of the
        # last lap that lies there, and finds out from the limit alone.
        if head >= self._lowest_limit:
            self._raise_limits(self._heads + self._one)
        row_flags = flags.step(ends, self._store.ends)
        slot, envs = head % self._slots, self._ring.num_envs
        rows: list[Run]
        # One run of rows, or one for each environment: 4,096 environments side by side
        # are one write per file.
        if self._together:
            rows = [(slot * envs, 0, envs)]
        else:
            rows = [(row + slot, e, e + 1) for e, row in enumerate(self._first_rows)]
        # Published only when all of it is in the files: a reader in another process,
        # and the next opening after a kill, believe every row below the heads.
        self._store.write_prepared(rows, row_flags)
        heads = self._heads + self._one
        self._commit.publish(heads, self._limits, self._tails, heap_heads)
        # Noted only now: an add that raised before must leave no trace. The heads
        # last: see `_recover_interrupted`.
        flags.note_step(row_flags, ends)
        self._common_head = head + 1
        self._heads = heads
        if head >= self._refill_at:
            self._wake_committer()
        if self._values is not None:
            self._values.wake()
        return heads

    def _recover_interrupted(self) -> None:
        """Note what an interrupted call published and had no time to note.

        Ctrl-C may come between any two lines. Every call notes the arrays that it
        published when all else is noted, so an interrupted call is recognised by
        them: three comparisons, in each call.
        """
        commit = self._commit
        heads, limits, tails = commit.heads, commit.limits, commit.tails
        if heads is self._heads and limits is self._limits and tails is self._tails:
            return
        # The flags are read back from the rows, which were stored before the heads were
        # published; whatever of the call came later is made up for here.
        moved = np.flatnonzero(self._heads != heads)
        self._flags.note(moved, self._last_flags(moved, heads))
        emptied = np.flatnonzero((self._tails != tails) & (tails == heads))
        if len(emptied):
            self._flags.forget(emptied, heads[emptied] > 0)
        self._set_published(heads, limits, tails)

    def _final(self, observation: object, lead: tuple[int, ...], columns: Columns) -> Columns:
        """Check final observations of steps; see `StepValidator.final`."""
        self._flags.refuse_final()
        return self.validator.final(observation, self._flags.ended(columns, lead))

    def _wake_committer(self) -> None:
        """Have the limits raised in the background, before an add must wait for it."""
        # Once in half a reserve: until the limits have risen the committer is not woken
        # again, by an add each 2 us while it waits for the disk.
        self._refill_at = self._lowest_limit
        if self._committer is not None:
            self._committer.wake()

    def extend(
        self, data: Mapping[str, object], final_observation: object = None, env_ids: object = None
    ) -> None:
        """Add many steps of each environment, or of some; see `ReplayBuffer.extend`."""
        columns: Columns
        plain = ids = final = None
        if final_observation is None and env_ids is None:
            plain = self.validator.plain_block(data)
        if plain is None:
            flat, ids = self.validator.flat(data), self.validator.env_ids(env_ids)
            self.check()
            count = self._ring.num_envs if ids is None else len(ids)
            columns, steps = self.validator.block(flat, count, joined=False)
            if final_observation is not None:
                final = self._final(final_observation, (steps, count), columns)
        else:
            self.check()
            columns, steps = plain, len(next(iter(plain.values())))
        with self._add_lock:
            self._recover_interrupted()
            if self.checks_ends:
                self._num_ends += self._ends_followed(ids)
            flags = None
            if final is None and ids is None and self._common_head >= 0:
                flags = self._flags.steps(columns, steps)
            # Of final rows most values are left out, row by row.
            rows_alone = flags is not None and (
                self._values is None or self._autoreset != "next_step" or not (flags & FINAL).any()
            )
            if flags is not None and rows_alone:
                contiguous = plain is not None
                ends = self._add_together(columns, flags, contiguous=contiguous)
            else:
                value_bytes: ValueBytes = {}
                if (values := self._values) is not None:
                    columns, value_bytes = values.spans(columns)
                    if final is not None:
                        final, value_bytes = values.behind(*values.spans(final), value_bytes)
                elif plain is not None and self._ring.num_envs == 1:
                    columns = {
                        path: column.reshape(steps, 1, *self._fields[path].shape)
                        for path, column in plain.items()
                    }
                ends = self._add_apart(columns, steps, final, ids, value_bytes)
            if self.checks_ends:
                self._num_ends += ends
                self._check_ends()

    def _add_together(self, columns: Columns, flags: NDArray[np.uint8], *, contiguous: bool) -> int:
        """Write and publish blocks of steps of all environments, at equal heads.

        Args:
            columns: Per path ``[T, E, *shape]``, or ``[T, *shape]`` of one environment;
                of fields that vary `Ragged` or `ValueList`.
            flags: uint8 ``[T, E]``.
            contiguous: They are C-contiguous.

        Returns:
            Ends of episodes that another of these steps follows.
        """
        ring, envs, steps = self._ring, self._ring.num_envs, len(flags)
        values, block = self._values, None
        if values is not None:
            # References, which are written block by block.
            columns, block = values.block(columns)
        if self._together and not contiguous:
            columns = {path: as_rows(ring, values) for path, values in columns.items()}
        # A reserve at a time: limits run at most so far ahead of the heads, so that
        # `limit - slots` never passes the oldest row alive. Each block is published
        # when it is stored: a device that fails in the middle leaves whole blocks, and
        # the error says how many steps are in.
        first = 0
        while first < steps:
            stop, heap_heads = min(first + ring.reserve, steps), None
            try:
                if values is not None and block is not None:
                    # As many as there is space for: a block that waited for the space
                    # of all its values might wait for itself.
                    stop, heap_heads = values.store_block(block, first, stop)
                    self._note_raised_tails()
                block_flags = flags if stop - first == steps else flags[first:stop]
                if self._together:
                    skipped = first * envs
                    self._add_rows(columns, flags, skipped, block_flags, heap_heads)
                else:
                    rows = {p: as_rows(ring, c[first:stop]) for p, c in columns.items()}
                    self._add_rows(rows, block_flags, 0, block_flags, heap_heads)
            except OSError as error:
                note_progress(error, first, steps)
                raise
            if values is not None:
                values.wake()
            first = stop
        return int(np.count_nonzero(flags[:-1] & END)) if self.checks_ends else 0

    def _add_rows(
        self,
        columns: Columns,
        flags: NDArray[np.uint8],
        skipped: int,
        block_flags: NDArray[np.uint8],
        heap_heads: Array | None = None,
    ) -> None:
        """Write and publish one block, at equal heads.

        Args:
            columns: Per path ``[N, *shape]`` in the order of the ring's rows, in one
                axis or two.
            flags: uint8 ``[T, E]`` of all columns.
            skipped: Items of the columns before the block's.
            block_flags: uint8 ``[T, E]`` of the block, at most `reserve` steps.
            heap_heads: int64 ``[E]``, after its values; None without any.
        """
        ring, head, count = self._ring, self._common_head, len(block_flags)
        heads = self._heads + count
        if head + count > self._lowest_limit:
            self._raise_limits(heads)
        row, num_rows = head % self._slots * ring.num_envs, count * ring.num_envs
        fast = self._fast_append
        if fast is not None and fast.extend(columns, skipped, block_flags, row, heads):
            self._note_rows(heads, head + count, block_flags)
            return
        # Without a wrap the block goes to the store as it came, packed straight into
        # the mapping: 18 us for 1,024 rows of 168 bytes, where packing first and
        # writing takes 40 to 57 (tools/bench/bench_add.py).
        if self._together and row + num_rows <= ring.num_rows:
            spans = [(row, skipped, skipped + num_rows)]
            self._store.write(spans, columns, flags.reshape(-1))
        else:
            spans = [
                (row, skipped + first, skipped + stop)
                for row, first, stop in ring.block_runs(head, count)
            ]
            self._store.write(spans, columns, as_rows(ring, flags))
        # A kill before this leaves rows above the heads, which no reader sees and the
        # next writer overwrites.
        self._commit.publish(heads, self._limits, self._tails, heap_heads)
        self._note_rows(heads, head + count, block_flags)

    def _note_rows(self, heads: Array, head: int, block_flags: NDArray[np.uint8]) -> None:
        """Note a block that was published, and the head after it."""
        self._flags.note_all(block_flags[-1])
        self._common_head = head
        # Last: see `_recover_interrupted`.
        self._heads = heads
        if head >= self._refill_at:
            self._wake_committer()

    def _add_apart(
        self,
        columns: Columns,
        steps: int,
        final: Columns | None,
        ids: Array | None,
        value_bytes: ValueBytes,
    ) -> int:
        """The same at heads that differ, of some environments, or with final rows.

        Args:
            columns: Per path ``[T, N, *shape]``.
            steps: T.
            final: Likewise, of the observation's fields: final rows, where a step ends.
            ids: int64 ``[N]``; None for all environments.
            value_bytes: The bytes that spans of both name.

        Returns:
            As `_add_together` does.
        """
        # A step and its final row are published together, and take two rows.
        size = self._ring.reserve if final is None else self._ring.reserve // 2
        first = 0
        while first < steps:
            span = slice(first, min(first + size, steps))
            block = {path: column[span] for path, column in columns.items()}
            last = final and {path: column[span] for path, column in final.items()}
            try:
                first += self._add_block(block, last, ids, value_bytes)
            except OSError as error:
                note_progress(error, first, steps)
                raise
        ends = 0
        for role in ("terminated", "truncated"):
            if (path := self._store.schema.role(role)) is not None:
                ends += int(np.count_nonzero(columns[path][:-1]))
        return ends

    def _add_block(
        self, columns: Columns, final: Columns | None, ids: Array | None, value_bytes: ValueBytes
    ) -> int:
        """Write and publish one block of `_add_apart`, or as much as the heap takes.

        Returns:
            Steps that were added, at least one.
        """
        envs: Array | slice = slice(None) if ids is None else ids
        env_ids = np.arange(self._ring.num_envs) if ids is None else ids
        before, pending = self._flags.before[envs], self._flags.pending[envs]
        count = len(next(iter(columns.values())))
        flags = self._flags.steps(columns, count, (before, pending))
        ended = (flags & END) != 0
        rows_of = expand(ended if final is not None else np.zeros_like(ended))
        row_flags = flags.reshape(-1)[rows_of.source]
        row_flags[rows_of.final] = FINAL
        rows_by_env = with_final_rows(columns, final, rows_of)
        row_envs, heap_heads, values = env_ids[rows_of.env], None, self._values
        if values is not None:
            rows_by_env = values.without_values(rows_by_env, row_flags)
            steps = rows_of.source // len(env_ids)
            fitting = values.count_fitting(row_envs, steps, rows_by_env)
            self._note_raised_tails()
            # A block that waited for all of its bytes might wait for itself.
            if fitting < count:
                columns = {path: column[:fitting] for path, column in columns.items()}
                if final is not None:
                    final = {path: column[:fitting] for path, column in final.items()}
                return self._add_block(columns, final, ids, value_bytes)
            rows_by_env, heap_heads = values.store(row_envs, rows_by_env, value_bytes)
        heads = self._heads.copy()
        heads[envs] += rows_of.counts
        if (heads > self._allowed).any():
            self._raise_limits(heads)
        positions = self._heads[env_ids][rows_of.env] + rows_of.offset
        rows = self._ring.rows(row_envs, positions)
        self._store.write(runs(rows), rows_by_env, row_flags)
        self._commit.publish(heads, self._limits, self._tails, heap_heads)
        self._flags.note(envs, row_flags[np.cumsum(rows_of.counts) - 1])
        self._set_published(heads, self._limits, self._tails)
        if values is not None:
            values.wake()
        return count

    def _raise_limits(self, heads: Array) -> None:
        """Raise the limits to take in heads, before a byte below them is written.

        In this order: the durable limits, so that a power cut never leaves a COMMIT
        that vouches for rows half overwritten; the space, so that a full disk refuses
        here; the published limits, so that readers draw none of these rows again and
        drop those that they are copying.
        """
        refuse_overflow(heads, self._ring.slots)
        # First lap: nothing is overwritten, and no sync is due (`free`). From the
        # second on each raise is a durable record, made in the background when half of
        # a reserve is left; an add that comes here for one waits for its sync.
        limit_step, needed = self._store.limit_step, heads
        now = self._heads, self._limits, heads, self._ahead_rows, limit_step
        target, free = targets(self._ring, self._committer, *now)
        # A callback is asked for whole shards where values vary. Of a shard that is
        # overwritten in part the other rows are put back, and a reader that copies one
        # would look for its value in the heap, which may have given it up.
        whole = not free and self._values is not None and self.before_overwrite
        if whole:
            rounded = rounded_up(heads, limit_step)
            needed = np.where(heads > self._limits, rounded, heads)
        # It may wait for learners, so it comes before any space is reserved, and before
        # a durable limit: after a kill that would be an opening's, and rows gone that
        # are held. It may lower the target, but not below what is needed.
        asked = self.before_overwrite
        if asked is not None:
            target = asked(self._heads, self._tails, needed, target)
            if whole:
                target = target // limit_step * limit_step
            self._let_go = target = np.maximum(target, needed)
        if self._committer is not None:
            self._committer.highest_limits = self._let_go
        if self._committer is not None and not free:
            # A kill, or a power cut, after this and before the rows are written gives
            # up rows that are still there: fewer are alive, and none is wrong.
            durable = self._committer.durable_limits(needed, target)
            target = durable if asked is None else np.minimum(target, durable)
        # Never below the published limits, which readers rely on.
        target = np.maximum(self._limits, target)
        # In any lap: a ring that was enlarged is empty from its head on. A full disk
        # raises here, where nothing has changed yet; a store into a hole would be a
        # SIGBUS.
        self._store.allocate(self._limits, target)
        self._commit.publish(self._heads, target, self._tails)
        self._set_published(self._heads, target, self._tails)

    def clear(self, env_ids: Array | None) -> None:
        """Give up every row of some environments; positions go on."""
        self.check()
        envs: Array | slice = slice(None) if env_ids is None else env_ids
        with self._add_lock:
            self._recover_interrupted()
            # A new array: views of readers in this process hold the old one.
            tails = self._tails.copy()
            tails[envs] = self._heads[envs]
            self._commit.publish(self._heads, self._limits, tails)
            self._flags.forget(envs, self._heads[envs] > 0)
            self._tails = tails

    def drop(self, env_ids: Array, firsts: Array) -> None:
        """Give up the rows below some positions.

        Args:
            env_ids: int64 ``[N]``, each once.
            firsts: int64 ``[N]``, the oldest positions to stay.
        """
        self.check()
        with self._add_lock:
            self._recover_interrupted()
            tails = self._tails.copy()
            tails[env_ids] = np.maximum(tails[env_ids], firsts)
            self._commit.publish(self._heads, self._limits, tails)
            self._tails = tails

    def _ends_followed(self, env_ids: NDArray[np.int64] | None) -> int:
        """Count the episode ends, stored before, that the next step follows."""
        ended = (self._flags.before & (END | FINAL)) != 0
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
            stacklevel=frames_to_caller(),
        )

    def _next_step_rows(self) -> str | None:
        """Read rows after episode ends and others; see `find_reset_rows`."""
        ring, schema, store = self._ring, self._store.schema, self._store
        each = max(4, CHECKED_ROWS // ring.num_envs)
        firsts = np.maximum(self._tails, self._heads - min(each, ring.capacity))
        lengths = (self._heads - firsts)[: CHECKED_ROWS // 4]
        env_ids = np.repeat(np.arange(len(lengths)), lengths)
        offsets = np.arange(len(env_ids)) - (np.cumsum(lengths) - lengths)[env_ids]
        rows = ring.rows(env_ids, firsts[env_ids] + offsets)
        (reward,) = schema.role_paths("reward")
        found, num_ends = find_reset_rows(
            store.flags(rows),
            env_ids,
            lambda some, paths: comparable(store.stored(rows[some], paths)),
            reward=reward,
            numbers=partial(schema[reward].rules.numbers, schema[reward]),
            observation=schema.role_paths("observation"),
            next_observation=schema.role_paths("next_observation"),
        )
        if num_ends:
            self.checks_ends = num_ends < MIN_ENDS
        return found


NUM_HEADS = 64
"""Arrays of heads made at a time, which takes as long as to make one."""
NONE = np.empty(0, np.int64)
"""Limits that no commit state has."""
rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))


class FastAppend:
    """Adds plain steps and blocks to one store and publishes them, in one call of C.

    It stores through mappings, into rows that were reserved for it: rows below the
    limits, whose pages `MappedWriter` made ready. The reservation holds for the limits
    and tails that were published when it was made, and for a second at most. Without it
    3 of the 5 us of a step were the calls that store and publish it
    (tools/bench/bench_adapters.py).
    """

    def __init__(self, ring: Ring, writers: StepWriters, commit: CommitWriter) -> None:
        """Begin without a reservation.

        Args:
            ring: With the rows of its environments side by side.
            writers: Of the rows.
            commit: Publishes them.
        """
        self._commit, self._writers = commit, (writers.records, writers.flags)
        self._kernel = rows.Append(writers.packer, commit.slot)
        self._add, self._extend = self._kernel.add, self._kernel.extend
        commit.fast_append = self._kernel
        self._stride = writers.stride
        self._envs, self._slots = ring.num_envs, ring.slots
        self._limits = self._tails = NONE
        self._heap_tails: Array | None = None
        self._low, self._high, self._until = 0, 0, 0.0
        self._fresh_of, self._fresh = NONE, 0
        self._first, self._next_heads = -NUM_HEADS, [NONE] * NUM_HEADS

    @property
    def stores(self) -> bool:
        """Whether steps may be stored at all."""
        return not self._commit.closed and files.disk.__class__ is Disk

    def add(
        self, data: Mapping[str, object], head: int, heap_heads: Array | None = None
    ) -> Array | None:
        """Store and publish a step that ends no episode and needs no conversion.

        Args:
            data: A nested or flat mapping of values, not validated yet.
            head: The step's position, in every environment.
            heap_heads: int64 ``[E]``, published with it where there is a heap.

        Returns:
            int64 ``[E]``, the heads published; None where nothing was stored.
        """
        commit = self._commit
        if (
            commit.closed
            # A test that replaces the disk counts, fails and cuts its calls, and C
            # makes none of them: such a step goes through `Store.write_prepared`.
            or files.disk.__class__ is not Disk
        ):
            return None
        # By identity: arrays are replaced and never changed, so that the same objects
        # say that limits and tails are those of the reservation, whose copies C
        # publishes with each step.
        row = head % self._slots * self._envs
        reserved = (
            self._limits is commit.limits
            and self._tails is commit.tails
            and (heap_heads is None or self._heap_tails is commit.heap_tails)
            and self._low <= row <= self._high - self._envs
        )
        if not reserved and not self._reserve(row):
            return None
        at, live = head - self._first, commit.next_live
        heads = self._next_heads[at] if 0 <= at < NUM_HEADS else self._heads_after(head)
        offset = commit.size * live
        # A call for each: a step without a heap makes no tuple of its arguments.
        try:
            # C looks at the clock itself: the pages stay ready for a second, and a step
            # takes 2 us. A number that was drawn for nothing leaves a gap, which
            # readers accept: they compare, and count nothing.
            if heap_heads is None:
                added = self._add(data, row, offset, next(commit.numbers), heads)
                if not added and monotonic() >= self._until and self._reserve(row):
                    added = self._add(data, row, offset, next(commit.numbers), heads)
            else:
                bounds = heads, heap_heads
                added = self._add(data, row, offset, next(commit.numbers), *bounds)
                if not added and monotonic() >= self._until and self._reserve(row):
                    added = self._add(data, row, offset, next(commit.numbers), *bounds)
            if not added:
                return None
            # The slot first: if Ctrl-C comes before the heads are noted, `recall` finds
            # the publication in the file, and the next one goes to the other slot.
            commit.next_live = BOTH_LIVE - live
            if heap_heads is not None:
                # Heap heads before heads; see `CommitState`.
                commit.heap_heads = heap_heads
            commit.heads, commit.published = heads, (heads, commit.tails, heap_heads)
        except BaseException:
            # Ctrl-C may come between the publication and its note: as in
            # `CommitWriter.publish`, the file says what was published.
            commit.recall()
            raise
        return heads

    def extend(
        self, columns: Columns, skipped: int, flags: NDArray[np.uint8], row: int, heads: Array
    ) -> bool:
        """Store and publish a block below the limits.

        Args:
            columns: Per path C-contiguous rows in the order of the ring's.
            skipped: Rows of the columns before the block's.
            flags: uint8 ``[T, E]`` of the block, C-contiguous.
            row: The block's first row.
            heads: int64 ``[E]``, published with it.

        Returns:
            Whether the block was added; if not, nothing was stored.
        """
        commit, stride, stop = self._commit, self._stride, row + flags.size
        if not self.stores or commit.heap_tails is not None or stop > self._slots * self._envs:
            return False
        records, marks = self._writers
        fresh = self._fresh_rows()
        offset, nbytes = row * stride, flags.size * stride
        if not marks.ready(row, stop, fresh) or not records.ready_to_fill(
            offset, nbytes, fresh=stop <= fresh
        ):
            return False
        live = commit.next_live
        try:
            self._extend(
                columns,
                skipped,
                flags,
                records.mapping,
                row,
                marks.mapping,
                commit.mapping,
                commit.size * live,
                next(commit.numbers),
                heads,
                commit.limits,
                commit.tails,
            )
            commit.next_live = BOTH_LIVE - live
            commit.heads, commit.published = heads, (heads, commit.tails, None)
        except BaseException:
            # As in `add`.
            commit.recall()
            raise
        return True

    def _fresh_rows(self) -> int:
        """Rows below this one hold nothing yet, where the head has not passed them.

        In the first lap those are rows below the limits: `Store.allocate` reserved
        their space before the limits were published.
        """
        limits = self._commit.limits
        if self._fresh_of is not limits:
            first_lap = int(limits.max()) <= self._slots
            self._fresh = int(limits.min()) * self._envs if first_lap else 0
            self._fresh_of = limits
        return self._fresh

    def _heads_after(self, head: int) -> Array:
        """Heads after a position; those of the next steps are made with them."""
        every = np.arange(head + 1, head + 1 + NUM_HEADS, dtype=np.int64)
        self._next_heads = list(every.repeat(self._envs).reshape(NUM_HEADS, -1))
        self._first = head
        return self._next_heads[0]

    def _reserve(self, row: int) -> bool:
        """Reserve rows from one on, as far as their pages are ready."""
        commit, stride, stop = self._commit, self._stride, row + self._envs
        limits, tails, heap_tails = commit.limits, commit.tails, commit.heap_tails
        fresh = self._fresh_rows()
        # Both files or none: a step is two stores, and a row without its flags would be
        # published with those of the last lap.
        records, flags = self._writers
        if not records.ready(row * stride, stop * stride, fresh * stride):
            return False
        if not flags.ready(row, stop, fresh):
            return False
        # Whole rows within the ready pages of both files. C checks a row against these
        # two numbers alone.
        low = max(-(-records.near // stride), flags.near)
        high = min(records.far // stride, flags.far)
        if not low <= row <= high - self._envs:
            return False
        # The mark of a good reservation comes last: Ctrl-C may come in between.
        self._limits = NONE
        until = min(records.until, flags.until)
        self._kernel.reserve(
            records.mapping,
            flags.mapping,
            commit.mapping,
            limits,
            tails,
            low,
            high,
            until,
            *(() if heap_tails is None else (heap_tails,)),
        )
        self._low, self._high, self._until = low, high, until
        self._heap_tails = heap_tails
        self._limits, self._tails = limits, tails
        return True
