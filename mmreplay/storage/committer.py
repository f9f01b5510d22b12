"""Commits: makes published rows safe from a power cut, whenever it comes.

Data and flags reach the disk before the checksums, and those before the durable slot
that vouches for both. A failed sync is never tried again. A thread commits every so
many seconds, and raises the durable limits before an add would have to wait for that.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.pause import await_release
from mmreplay.errors import FailedError, FullError, RemovedError, no_thread
from mmreplay.process import Worker
from mmreplay.storage.commit_state import CommitWriter, heap_bounds
from mmreplay.storage.store import CheckedStore, ShardError, rounded_up

Array = NDArray[np.int64]


class Committer:
    """Durable writes of one open buffer.

    Threads: any may call; durable slots are written one at a time. A failed sync
    poisons it: the kernel marks pages clean that never reached the disk, so the
    next sync would succeed and lie.

    Attributes:
        rows_modified: Rows that were there before have changed since the last commit.
        holds: Rows are held: limits and tails are raised as far as that allows.
        highest_limits: int64 ``[E]``, no limit is raised beyond these, since rows are
            held, or may yet be: until an add wakes the thread. None: any may be raised.
        highest_tails: int64 ``[E]``, the same of tails that are raised for values.
    """

    def __init__(
        self,
        store: CheckedStore,
        commit_state: CommitWriter,
        folder: Path | None = None,
        refuse_removed: Callable[[], object] = lambda: None,
    ) -> None:
        """Commit for one writer.

        Args:
            store: Its rows.
            commit_state: Its COMMIT.
            folder: The buffer's, where pauses are asked for.
            refuse_removed: Raises `RemovedError` where the folder is gone; asked after
                each commit, and before another error is raised.
        """
        self._folder = folder
        self.refuse_removed = refuse_removed
        self._store = store
        self._commit_state = commit_state
        self._heap = store.heap_space(commit_state)
        # Rows are held from after the opening on, and none may be lost by then.
        self.holds = False
        self.highest_limits: Array | None = commit_state.limits
        self.highest_tails: Array | None = commit_state.tails
        self._slot_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self.rows_modified = False
        self._stop = False
        self._worker: Worker[None] | None = None
        self.failure: str | None = None
        self.commit_overdue = False

    @property
    def limits(self) -> Array:
        """int64 ``[E]``, limits that a power cut would leave."""
        return self._commit_state.committed.limits

    @property
    def committed(self) -> Array:
        """int64 ``[E]``, heads that a power cut would leave."""
        return self._commit_state.committed.heads

    def check(self) -> None:
        """Make a commit that the thread could not make.

        Raises:
            FailedError: A sync failed before, or the commit fails again.
            FullError: No space is left.
        """
        self._refuse()
        if self.commit_overdue:
            self._make_up()

    def _make_up(self) -> None:
        try:
            self.commit()
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise FailedError(
                f"cannot commit ({type(error).__name__}: {error}), so this call "
                "changed nothing, and a power cut would lose all rows since the last "
                "commit. Call again, or close the buffer."
            ) from error

    def _refuse(self) -> None:
        if self.failure is not None:
            self.refuse_removed()
            raise FailedError(
                f"an earlier sync failed ({self.failure}), so rows added since the "
                "last commit may be lost; the next open discards them. Close the "
                "buffer, check the disk, and open it again."
            )

    def free_blocks(self) -> Array:
        """int64 ``[E]``, blocks that no power cut brings back, free to be overwritten.

        0 in a new buffer; after a clear, or in an enlarged ring, all blocks below its
        first row.
        """
        return self._commit_state.committed.tails // self._store.ring.block_rows

    def durable_limits(self, needed: Array, target: Array) -> Array:
        """Durable limits of at least needed; raised to target where they are not.

        Waits while a snapshot pauses the ring to copy rows.
        """
        # Looked for here and not at each add: a raise comes once in half a reserve, and
        # up to it no row is overwritten that a paused copy may still read.
        if self._folder is not None:
            await_release(self._folder)
        if (self._commit_state.committed.limits < needed).any():
            self._give_up(target)
        return self._commit_state.committed.limits

    def durable_heap_tails(self, needed: Array, wanted: Array) -> tuple[Array, Array]:
        """Durable tails and heap tails with which the heap may be written so far.

        Waits while a snapshot pauses the ring to copy rows.

        Args:
            needed: int64 ``[E]``, heap heads that are to be reached.
            wanted: int64 ``[E]``, those to be reached where a record must be written.

        Returns:
            Two int64 ``[E]``, tails and heap tails.
        """
        if self._folder is not None:
            await_release(self._folder)
        heap, durable = self._heap, self._commit_state.committed
        assert heap is not None
        if (heap_bounds(durable)[1] + heap.nbytes < needed).any():
            self._give_up_values(wanted)
        durable = self._commit_state.committed
        return durable.tails, heap_bounds(durable)[1]

    def _give_up_values(self, wanted: Array, target: Array | None = None) -> None:
        """Make tails durable with which the heap may be written so far.

        Args:
            wanted: int64 ``[E]``, heap heads.
            target: int64 ``[E]``, limits to be raised by the same record.
        """
        heap = self._heap
        assert heap is not None
        # Tails are found under the lock: rows are looked at for where their values
        # begin, and only a durable limit lets one be overwritten.
        with self._slot_lock, _Poisoning(self):
            durable = self._commit_state.committed
            limits, (_, before) = durable.limits, heap_bounds(durable)
            if target is not None:
                limits = np.maximum(limits, self._allowed(target))
            tails, heap_tails = heap.raised(wanted, durable.limits, self.highest_tails)
            if (
                (limits > durable.limits).any()
                or (tails > durable.tails).any()
                or (heap_tails > before).any()
            ):
                self._commit_state.give_up(limits, tails, heap_tails)

    def _give_up(self, target: Array) -> None:
        # Not under the commit's lock: an add that is out of limits waits for one sync
        # of COMMIT (0.2 to 30 ms), not for those of all data files. A commit under way
        # writes its slot before or after this one.
        with self._slot_lock, _Poisoning(self):
            durable, target = self._commit_state.committed.limits, self._allowed(target)
            if (durable < target).any():
                self._commit_state.give_up(np.maximum(durable, target))

    def _allowed(self, target: Array) -> Array:
        """Limits to be raised, without the rows that are held."""
        highest = self.highest_limits
        return target if highest is None else np.minimum(target, highest)

    def commit(self, flags: int = 0) -> None:
        """Make what is published now survive a power cut.

        After any error but a failed sync the call may be made again: nothing is noted
        as done before it is, and everything is written again.

        Raises:
            ShardError: All rows are committed; sealing failed, and will fail again.
            RemovedError: All is committed to a folder that was deleted or replaced.
            FailedError: The device refuses, and this writer commits no more.
            FullError: No space is left.
        """
        self._refuse()
        try:
            self._commit(flags)
        finally:
            # What failed in a folder that is gone failed because of that; and adds are
            # refused from then on, until it is back.
            try:
                self.refuse_removed()
            except RemovedError:
                self.commit_overdue = True
                raise

    def _commit(self, flags: int) -> None:
        with self._commit_lock, _Poisoning(self):
            # Looked up before the syncs: rows that are added while these run may come
            # too late for them, and are left to the next commit (mutant
            # HeadsAfterSync).
            heads, tails, heap_heads = self._commit_state.published
            done = self._commit_state.committed.heads
            # What is set from here on may come too late for the sync.
            self.rows_modified = False
            aside = None
            try:
                # Rows, sums, record, each synced before the next is written. A power
                # cut between two of them leaves the record of the commit before, which
                # vouches for neither: rows above it are discarded, sums of blocks above
                # it are ignored. A record first would vouch for what is not on the
                # disk; in 100 real power cuts of ext4 without the sync of the rows, 82
                # to 91 ended so.
                aside = self._sync()
                if self._sum_blocks(done, heads, tails):
                    self._store.sync_sums()
            except FailedError:
                # The process may be killed in this boot, and its live slots would then
                # publish pages that the kernel counts as clean and never wrote.
                self._distrust_page_cache()
                raise
            with self._slot_lock:
                self._commit_state.commit(heads, tails, flags, heap_heads)
            self.commit_overdue = False
            if aside is not None:
                raise ShardError(
                    f"{str(aside).rstrip('.')}. Every row added so far is committed: "
                    "close the buffer and open it with mode='r+' to seal again.",
                    errno_=aside.errno,
                ) from aside

    def _sync(self) -> ShardError | None:
        """Make the rows durable; return what failed beside them."""
        # Rows that no shard could take are in the staging files, which were synced
        # before the store said so: the commit goes on, and the error comes after it.
        try:
            self._store.sync()
        except ShardError as error:
            return error
        return None

    def _distrust_page_cache(self) -> None:
        """Keep the next open from trusting pages that a failed sync has lost.

        The page cache, whose pages count as clean now, would pass for the disk there.
        """
        if any(file.unsynced for file in self._store.files):
            # A disk that takes no write cannot record it either.
            with self._slot_lock, contextlib.suppress(OSError):
                self._commit_state.distrust_page_cache()

    def _sum_blocks(self, done: Array, heads: Array, tails: Array) -> bool:
        """Write the checksums of the blocks that became whole since done."""
        # At commits and for whole blocks: a checksum at each add costs as many
        # microseconds as the step itself. Blocks are read from the files, as they may
        # have left memory, and never change below the head.
        ring = self._store.ring
        size = ring.block_rows
        wrote = False
        for env_id in np.flatnonzero(heads // size > done // size).tolist():
            # What the ring gave up meanwhile needs no sum, and may be changing.
            stop = int(heads[env_id])
            oldest = -(-(stop - ring.slots) // size)
            first = max(int(done[env_id]) // size, int(tails[env_id]) // size, oldest)
            blocks = range(first, stop // size)
            sums = [self._store.checksum(env_id, block) for block in blocks]
            if sums:
                self._store.write_sums(env_id, first, np.array(sums, np.uint32))
                wrote = True
        return wrote

    def start(self, every_s: float) -> None:
        """Start the thread that commits every so many seconds.

        Raises:
            FailedError: The system has none left.
        """
        self._worker = Worker("mmreplay-commit", partial(self._run, every_s))
        try:
            self._worker.start()
        except RuntimeError as error:
            self._worker = None
            way_out = ", or pass commit_every=None and commit yourself"
            raise no_thread("that commits", error, way_out) from error

    def wake(self) -> None:
        """Ask the thread to raise the durable limits, as an add does."""
        if not self.holds:
            self.highest_limits = self.highest_tails = None
        if self._worker is not None:
            self._worker.put(None)

    def stop(self) -> None:
        """End the thread and wait for it."""
        # Before the last commit of a close: both would write the durable slots in turn,
        # and the thread's could come after the record that says CLEAN.
        self._stop = True
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _run(self, every_s: float, worker: Worker[None]) -> None:
        due = time.monotonic() + every_s
        while not self._stop:
            try:
                left = max(0.0, due - time.monotonic())
                # Several calls that came since the last turn are one.
                with contextlib.suppress(queue.Empty):
                    worker.get(min(left, threading.TIMEOUT_MAX))
                    while True:
                        worker.get(0)
                self._turn(due)
            except Exception:
                if self.failure is not None:
                    # The next call of the user's raises and says why.
                    return
                # Memory or space that was short may be there by the next turn. What
                # was due is made up by a call of the user's, which raises where it
                # cannot: no commit is left out in silence.
                self.commit_overdue = self.commit_overdue or time.monotonic() >= due
            if time.monotonic() >= due:
                due = time.monotonic() + every_s

    def _turn(self, due: float) -> None:
        if self._stop:
            return
        # A whole reserve ahead, asked for when half of one is left: an add waits only
        # if it writes the other half while COMMIT is synced. Half of 64 rows is written
        # in 1 ms and a sync takes 0.5 to 15: 16 environments waited half of their time.
        # In the first lap nothing is overwritten, and no sync is due.
        ring = self._store.ring
        target = rounded_up(self._commit_state.heads + ring.reserve, self._store.limit_step)
        laps, heap = bool((target > ring.slots).any()), self._heap
        if heap is not None and heap.raise_due:
            # One record for both: each waits for the disk.
            self._give_up_values(heap.ahead, target if laps else None)
        elif laps:
            self._give_up(target)
        early = heap is not None and heap.commit_due
        if (early or time.monotonic() >= due) and self._dirty():
            self.commit()

    def _dirty(self) -> bool:
        heads, tails, _ = self._commit_state.published
        done = self._commit_state.committed
        moved = (heads != done.heads).any() or (tails != done.tails).any()
        return bool(moved or self.rows_modified)

    def poison(self, why: str) -> None:
        """Refuse all later commits."""
        self.failure = why


class _Poisoning:
    """Poisons the committer when a durable write fails, and lets the error pass."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._committer.rows_modified = True
        # A write that found the disk full harmed nothing, and may be made again; a
        # failure beside the rows is raised again by each call, and commits continue.
        harmless = isinstance(error, FullError | ShardError)
        if isinstance(error, OSError) and not harmless:
            self._committer.poison(str(error))
