"""Published and committed heads: writes and follows the COMMIT file of a generation.

`CommitWriter` belongs to the one writer, `CommitReader` to a reader in any process,
`MemoryCommitState` to a buffer in RAM. To publish is a store into a mapped page, which
survives the process, because the page cache does. A durable slot is written and synced,
and survives a power cut.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk.files import File
from mmreplay.errors import OR_REPAIR, CorruptError, FailedError, FullError, StarvedError
from mmreplay.format import commit
from mmreplay.format.commit import HEADER_NBYTES, Identity, Record

if TYPE_CHECKING:
    from mmreplay.kernels.append import AppendKernel
    from mmreplay.kernels.rows import RowsKernel

FILE_NAME = "COMMIT"
LATEST_NS = (1 << 63) - 1
"""In the year 2262; a clock may be wrong, and a commit is none the worse."""
DISCARDED_ROWS = (
    "these rows were discarded: a writer opened the buffer after a failed sync. Start "
    "again from the rows that are there now."
)
BOTH_LIVE = sum(commit.LIVE_SLOTS)

Array = NDArray[np.int64]


rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))


class Counts(Protocol):
    """What a record says: heads, limits and tails; see `Record`."""

    @property
    def heads(self) -> Array:
        """int64 ``[E]``, likewise all that follow."""

    @property
    def limits(self) -> Array:
        """Rows of a lap before may be overwritten below them."""

    @property
    def tails(self) -> Array:
        """The oldest rows alive."""

    @property
    def heap_heads(self) -> Array | None:
        """Where the next values go; None where no field varies."""

    @property
    def heap_tails(self) -> Array | None:
        """The oldest values alive; likewise."""


def heap_bounds(counts: Counts) -> tuple[Array, Array]:
    """Heap heads and heap tails, int64 ``[E]`` each, where a field varies.

    Args:
        counts: A record, or a state: it says when to ask, beside heads and tails.
    """
    heads, tails = counts.heap_heads, counts.heap_tails
    assert heads is not None
    assert tails is not None
    return heads, tails


class CommitState(Protocol):
    """The heads, limits and tails of a buffer.

    ``heads``, ``limits`` and ``tails`` are int64 ``[E]``, all of one publication. So
    are ``heap_heads`` and ``heap_tails``, which are None where no field varies. An
    array is replaced, never changed, once it was handed out. Heap heads are replaced
    before heads, and heap tails after tails: with heads read first and tails read last,
    the heap's bounds are those of the rows between, or wider.

    Attributes:
        cuts: See `Record`, likewise the next one.
        cut_epoch: Of the opening that last cut rows.
        follows: Another process may publish, which `refresh` finds out.
    """

    follows: bool
    heads: Array
    limits: Array
    tails: Array
    heap_heads: Array | None
    heap_tails: Array | None
    cuts: Array
    cut_epoch: int

    def refresh(self) -> bool:
        """Read COMMIT again; return whether something changed."""

    @property
    def moved(self) -> bool:
        """Whether to open the buffer again: it was resized, or rows were discarded."""

    @property
    def discarded(self) -> bool:
        """Whether published rows were discarded, because their sync failed."""

    def mark_moved(self) -> None:
        """Have the buffer opened again: by each reader of a writer, or by this one."""

    def close(self) -> None:
        """Give the file back."""


class WritableCommitState(CommitState, Protocol):
    """The commit state as its writer sees it; one in RAM, one on disk.

    Attributes:
        published: heads, tails and heap heads of one publication.
    """

    published: tuple[Array, Array, Array | None]

    @property
    def committed(self) -> Counts:
        """What a power cut leaves; in RAM, where none does, what is published."""

    def publish(
        self,
        heads: Array,
        limits: Array,
        tails: Array,
        heap_heads: Array | None = None,
        heap_tails: Array | None = None,
    ) -> None:
        """Make rows visible; see `CommitWriter.publish`."""


class CommitWriter:
    """Publishes and commits in a COMMIT file, for its one writer.

    Threads: one may publish while another writes durable slots; the caller
    serialises each kind.

    Attributes:
        heads: int64 ``[E]``, published.
        limits: int64 ``[E]``, published.
        tails: int64 ``[E]``, published.
        heap_heads: int64 ``[E]``, published; None where no field varies.
        heap_tails: int64 ``[E]``, likewise.
        published: heads, tails and heap heads of one publication.
        slot: What makes publications.
        size: Bytes of one.
        numbers: What numbers those to come.
        next_live: Where the next one goes: one of `commit.LIVE_SLOTS`.
        committed: The last durable record.
        closed: Nothing is published any more.
        fast_append: Stores and publishes steps by itself, where there is one.
    """

    heads: Array
    limits: Array
    tails: Array
    heap_heads: Array | None
    heap_tails: Array | None
    published: tuple[Array, Array, Array | None]

    follows = moved = discarded = False

    def __init__(
        self,
        file: File,
        identity: Identity,
        live: Record,
        durable: Record,
        slot: int,
        heap_nbytes: int = 0,
    ) -> None:
        """Take over after recovery.

        Args:
            file: COMMIT, writable and mapped.
            identity: This buffer, boot and file.
            live: What is published.
            durable: What survives a power cut.
            slot: The durable slot to be written next, not the newest one.
            heap_nbytes: Bytes of each environment's heap; 0 where no field varies.
        """
        self._file = file
        self._identity = identity
        self._epoch = live.epoch
        # One count for both kinds of slot; next() is atomic between threads.
        self.numbers = itertools.count(1 + max(live.sequence, durable.sequence))
        # Recovery put the newest durable record into the other slot. A power cut that
        # tears this one loses an older record, never the last commit (the mutants
        # SingleSlot and RestartSlot0 of tools/torture lose one without this).
        self._next_durable = slot
        self.next_live = commit.LIVE_SLOTS[0]
        self._heap_nbytes = heap_nbytes
        self.size = commit.record_nbytes(live.num_envs, heap_nbytes)
        self.slot = rows.Slot(
            live.encode(),
            commit.SEQUENCE_OFFSET,
            HEADER_NBYTES,
            live.num_envs,
            commit.NUM_HEAP_COLUMNS if heap_nbytes else commit.NUM_COLUMNS,
        )
        self._show(live.heads, live.limits, live.tails, live.heap_heads, live.heap_tails)
        self.cuts, self.cut_epoch = live.cuts, live.cut_epoch
        self.committed, self.closed = durable, False
        self.fast_append: AppendKernel | None = None

    @property
    def file(self) -> File:
        """COMMIT."""
        return self._file

    def refresh(self) -> bool:
        """Return False: this process is the only writer."""
        return False

    def publish(
        self,
        heads: Array,
        limits: Array,
        tails: Array,
        heap_heads: Array | None = None,
        heap_tails: Array | None = None,
    ) -> None:
        """Make rows visible to every reader, and to the next open after a kill.

        Args:
            heads: int64 ``[E]``; rows below are whole.
            limits: int64 ``[E]``, at least heads.
            tails: int64 ``[E]``, the oldest positions that may be read.
            heap_heads: int64 ``[E]``; values below are whole. By default as before.
            heap_tails: int64 ``[E]``, the oldest heap positions that may be read;
                likewise.
        """
        if heap_heads is None:
            heap_heads = self.heap_heads
        if heap_tails is None:
            heap_tails = self.heap_tails
        number = next(self.numbers)
        data = self.slot.publish(number, heads, limits, tails, heap_heads, heap_tails)
        # Rows and flags were stored before, and x86-64 keeps stores in order: a reader
        # that sees this record sees the rows below its heads, too.
        # Two slots strictly in turn (durable records take numbers too), so that one
        # holds the last publication whole while the other is being stored. A kill in
        # the middle tears this slot alone: its checksum fails, and the publication
        # before is the truth.
        # No sync: the page cache outlives the process. This store takes under 1 us, a
        # sync 0.2 to 30 ms.
        try:
            self._file.store(data, self.size * self.next_live)
            self.next_live = BOTH_LIVE - self.next_live
            self._show(heads, limits, tails, heap_heads, heap_tails)
        except BaseException:
            self.recall()
            raise

    @property
    def mapping(self) -> mmap.mmap | None:
        """Of the file, for what stores by itself; None once it is closed."""
        return self._file.mapping

    def recall(self) -> None:
        """Read back the last publication, after a call that was interrupted.

        Ctrl-C may come right after the store: a row that readers may have seen must not
        be written again, nor may the slot that publishes it be overwritten next.
        """
        # Read back, not remembered: nothing in the process says whether Ctrl-C came
        # before the store or after it. A slot that it tore decodes to None, and the
        # publication before stands.
        records = []
        for slot in commit.LIVE_SLOTS:
            data = self._file.pread(self.size, self.size * slot)
            record = commit.decode(data, self._identity.uuid, len(self.heads), self._heap_nbytes)
            if record is not None:
                records.append((record.sequence, slot, record))
        if records:
            _, slot, record = max(records, key=lambda item: item[0])
            self.next_live = BOTH_LIVE - slot
            self._show(
                record.heads, record.limits, record.tails, record.heap_heads, record.heap_tails
            )

    def _show(
        self,
        heads: Array,
        limits: Array,
        tails: Array,
        heap_heads: Array | None,
        heap_tails: Array | None,
    ) -> None:
        self.heap_heads = heap_heads
        self.heads, self.limits, self.tails = heads, limits, tails
        self.heap_tails = heap_tails
        self.published = (heads, tails, heap_heads)

    def give_up(
        self, limits: Array, tails: Array | None = None, heap_tails: Array | None = None
    ) -> None:
        """Make limits durable, before the first row below them is overwritten.

        The record repeats the committed heads: the rows above them may not be on
        the disk yet, and a power cut now must not make them look as if they were.

        Args:
            limits: int64 ``[E]``, at least those of the last durable record.
            tails: int64 ``[E]``, likewise, where the heap is to be overwritten.
            heap_tails: int64 ``[E]``, likewise.
        """
        # Its sequence is above that of the live records. They win all the same within
        # one epoch, or a kill would lose what they publish (mutant LiveSlotByNumber);
        # with the live heads in here, a power cut would bring rows back that never
        # reached the disk (mutant LiveHeadsInReserve).
        record = replace(self.committed, limits=limits)
        if tails is not None:
            # Tails may pass the committed heads, and a record that said so with these
            # heads would be void.
            record = replace(record, tails=tails, heap_tails=heap_tails)
            record = record.with_heads_at_tails()
        self._write_durable(record)

    def commit(
        self, heads: Array, tails: Array, flags: int = 0, heap_heads: Array | None = None
    ) -> None:
        """Write the durable record of rows whose data and checksums were synced.

        Args:
            heads: int64 ``[E]``, what was published when the syncing began.
            tails: int64 ``[E]``, likewise.
            flags: CLEAN at close, MOVED when another folder takes over.
            heap_heads: int64 ``[E]``, likewise; None where no field varies.
        """
        # The higher of both: a limit may have become durable while the rows were
        # synced, and a record that took it back would bring overwritten rows to life
        # after a power cut.
        limits = np.maximum(self.committed.limits, self.limits)
        record = replace(
            self.committed,
            heads=heads,
            tails=tails,
            limits=limits,
            flags=flags,
            heap_heads=heap_heads,
        )
        before = self.committed.heap_tails
        if before is not None and self.heap_tails is not None:
            # Tails of now, not those from before the sync: the values below may be
            # overwritten already, by tails that a raise has made durable since.
            record = replace(
                record,
                tails=np.maximum(self.committed.tails, self.tails),
                heap_tails=np.maximum(before, self.heap_tails),
            ).with_heads_at_tails()
        self._write_durable(record)

    def distrust_page_cache(self) -> None:
        """Make the next open discard what was published and is not committed.

        It needs no sync: within this boot the record is in the page cache, and after a
        reboot live slots are not trusted anyway.
        """
        # To the slot whose turn it is: the last synced record stays in the other one,
        # and a power cut that tears this one still finds it.
        self._put_durable(replace(self.committed, flags=commit.POISONED))

    def _write_durable(self, record: Record) -> None:
        # Written, synced, then noted. A power cut before the sync returns finds the old
        # record here, the new one or a torn slot, and the last commit in the other.
        # A sync that fails raises before anything is noted, and is not made again: on
        # a full thin device the first fdatasync said ENOSPC, the second EIO, and the
        # third success, with 9 of 32 MiB lost.
        record = self._put_durable(record)
        self._file.sync()
        self._next_durable = 1 - self._next_durable
        self.committed = record

    def _put_durable(self, record: Record) -> Record:
        record = replace(
            record,
            sequence=next(self.numbers),
            epoch=self._epoch,
            boot_id=self._identity.boot_id,
            time_ns=min(time.time_ns(), LATEST_NS),
        )
        self._file.pwrite(record.encode(), self.size * self._next_durable)
        return record

    def mark_moved(self) -> None:
        """Make live readers open the buffer again; the last call before close."""
        # By a publication, which readers look for anyway: its higher sequence makes
        # them decode the record, and with it the flag.
        data = self.slot.data
        flags = struct.unpack_from("<I", data, 8)[0] | commit.MOVED
        struct.pack_into("<I", data, 8, flags)
        self.publish(self.heads, self.limits, self.tails)

    def close(self) -> None:
        """Give the file back."""
        # The C append holds views of the mappings: they would stay mapped with it.
        self.closed = True
        if self.fast_append is not None:
            self.fast_append.release()
        self._file.close()


class MemoryCommitState:
    """Heads of a buffer in RAM."""

    follows = moved = discarded = False
    cut_epoch = 0

    def __init__(self, num_envs: int, heap_nbytes: int = 0) -> None:
        self.heads = self.limits = self.tails = np.zeros(num_envs, np.int64)
        self.cuts = self.heads
        self.heap_heads = self.heap_tails = self.heads if heap_nbytes else None
        self.published = (self.heads, self.tails, self.heap_heads)

    def refresh(self) -> bool:
        """Return False: nothing else writes it."""
        return False

    def mark_moved(self) -> None:
        """Do nothing: no other process reads it."""

    @property
    def committed(self) -> MemoryCommitState:
        """What is published: no power cut leaves anything."""
        return self

    def publish(
        self,
        heads: Array,
        limits: Array,
        tails: Array,
        heap_heads: Array | None = None,
        heap_tails: Array | None = None,
    ) -> None:
        """Make rows visible."""
        if heap_heads is not None:
            self.heap_heads = heap_heads
        self.heads, self.limits, self.tails = heads, limits, tails
        if heap_tails is not None:
            self.heap_tails = heap_tails
        self.published = (heads, tails, self.heap_heads)

    def close(self) -> None:
        """Do nothing."""


def refuse_discarded(commit_state: CommitState) -> None:
    """Refuse rows that were copied, if a writer discarded them before.

    Raises:
        FailedError: Another writer may have stored other rows at their positions.
    """
    commit_state.refresh()
    if commit_state.discarded:
        raise FailedError(DISCARDED_ROWS)


def open_commit(
    folder: Path, num_envs: int, heap_nbytes: int, *, writable: bool
) -> tuple[File, bytes]:
    """Open a COMMIT file and return it with its bytes."""
    nbytes = commit.NUM_SLOTS * commit.record_nbytes(num_envs, heap_nbytes)
    file = File.open(folder / FILE_NAME, nbytes, writable=writable)
    try:
        return file, file.pread(nbytes, 0)
    except BaseException:
        file.close()
        raise


def create_commit(
    folder: Path, num_envs: int, heap_nbytes: int, identity: Callable[[File], Record]
) -> None:
    """Create a COMMIT file whose durable slots both hold the first record.

    The others are written, too: readers look at them through a mapping, and to look at
    a hole is a SIGBUS where tmpfs is full.

    Args:
        folder: The new data folder.
        num_envs: Environments.
        heap_nbytes: Bytes of each one's heap; 0 where no field varies.
        identity: Makes the record, given the new file.
    """
    size = commit.record_nbytes(num_envs, heap_nbytes)
    file = File.create(folder / FILE_NAME, commit.NUM_SLOTS * size)
    try:
        # Both durable slots: the first commit overwrites one of them, and a power cut
        # that tears it must find the other.
        data = identity(file).encode()
        for slot in commit.DURABLE_SLOTS:
            file.pwrite(data, size * slot)
        for slot in commit.LIVE_SLOTS:
            file.pwrite(bytes(size), size * slot)
        file.sync()
    finally:
        file.close()


def refuse_overflow(heads: Array, slots: int) -> None:
    """Refuse positions that no record holds, before a limit gets near them.

    Args:
        heads: int64 ``[E]``, to be reached.
        slots: Of the ring; limits stay less than twice as many ahead.

    Raises:
        FullError: They are too high.
    """
    # A limit is less than two rings ahead of its head, and below 2**62 every sum of a
    # position and a length fits int64: no add can wrap a record's numbers around.
    highest = commit.MAX_COUNT - 2 * slots
    if heads.max() >= highest:
        raise FullError(
            f"positions must be below {highest}, got {heads.max()}. Export the rows "
            "and continue in a new buffer.",
            errno_=errno.EOVERFLOW,
        )


def no_durable(folder: Path) -> CorruptError:
    """The error for a COMMIT without a whole durable slot."""
    return CorruptError(
        f"{folder / FILE_NAME} is damaged: neither of its durable slots is valid. "
        f"Restore it from a copy{OR_REPAIR}."
    )


PATIENCE_S = 2.0


class CommitReader:
    """A reader's view of a COMMIT file, which a writer may be changing.

    Never goes back: a lower sequence than one seen is not accepted.
    """

    follows = True

    def __init__(self, file: File, identity: Identity, start: Record, heap_nbytes: int = 0) -> None:
        self._file = file
        self._identity = identity
        self._heap_nbytes = heap_nbytes
        self._size = commit.record_nbytes(start.num_envs, heap_nbytes)
        self._mapping: mmap.mmap | bytes = file.map_readonly()
        self._num_envs = start.num_envs
        # The sequence numbers of both live slots, which lie side by side: one look at
        # them, without a checksum, tells each draw that nothing changed.
        self._numbers = struct.Struct(f"<Q{self._size - commit.SEQUENCE.size}xQ")
        self._first = self._size * commit.LIVE_SLOTS[0] + commit.SEQUENCE_OFFSET
        self.discarded = False
        self.cuts, self.cut_epoch = start.cuts, start.cut_epoch
        self._take(start)

    @property
    def file(self) -> File:
        """COMMIT."""
        return self._file

    def _take(self, record: Record) -> None:
        self.sequence, self._epoch = record.sequence, record.epoch
        self.heap_heads = record.heap_heads
        self.heads, self.limits, self.tails = record.heads, record.limits, record.tails
        self.heap_tails = record.heap_tails
        self.moved = bool(record.flags & commit.MOVED)

    def refresh(self) -> bool:
        """Look again; True if something changed.

        Raises:
            StarvedError: No whole record could be read within two seconds.
        """
        deadline = None
        while True:
            one, other = self._numbers.unpack_from(self._mapping, self._first)
            if one <= self.sequence and other <= self.sequence:
                return False
            # Timed from the first look that fails. A store takes microseconds: after
            # two seconds the writer is stopped, or the file is damaged.
            deadline = deadline or time.monotonic() + PATIENCE_S
            record = self._read(commit.LIVE_SLOTS[other > one])
            if record is not None:
                return self._accept(record)
            if self._neither_valid():
                return False
            if time.monotonic() > deadline:
                raise starved(self._file.path)

    def mark_moved(self) -> None:
        """Note that the buffer must be opened again, whatever the record says."""
        self.moved = True

    def _accept(self, record: Record) -> bool:
        # A lower number is an older state, such as the other slot shows while this one
        # is being stored. To go back to it would serve rows that were overwritten
        # since. A record of another boot or file speaks of another page cache.
        if record.sequence <= self.sequence or not self._identity.trusts(record):
            return False
        if record.cut_epoch > self._epoch:
            # A writer dropped rows that were published to this reader, and other rows
            # may have their positions by now. Heads and limits stay as they were, so
            # that copies under way end, and are then refused.
            self.discarded = self.moved = True
        else:
            self._take(record)
        return True

    def _read(self, slot: int) -> Record | None:
        """Read the newest slot, or, where it is torn and stays so, the other one.

        A writer killed in the middle of a store leaves the slot torn for ever. As
        long as its bytes do not change, nothing later happened, and the other
        slot is the truth: the writer goes on only when its store is done.
        """
        data = self._bytes(slot)
        record = self._decode(data)
        if record is None:
            other = self._decode(self._bytes(BOTH_LIVE - slot))
            if other is not None and self._bytes(slot) == data:
                record = other
        return record

    def _neither_valid(self) -> bool:
        """Whether no writer is publishing: it always leaves one slot valid.

        A power cut may tear both, and they stay so until the next writable open.
        """
        slots = [self._bytes(slot) for slot in commit.LIVE_SLOTS]
        invalid = all(self._decode(data) is None for data in slots)
        return invalid and slots == [self._bytes(slot) for slot in commit.LIVE_SLOTS]

    def _decode(self, data: bytes) -> Record | None:
        return commit.decode(data, self._identity.uuid, self._num_envs, self._heap_nbytes)

    def _bytes(self, slot: int) -> bytes:
        return self._mapping[self._size * slot : self._size * (slot + 1)]

    def close(self) -> None:
        """Give the file and its mapping back; threads that look see what it was."""
        self._file.close()
        # Not closed: a copy that shows one moment has the same one.
        self._mapping = bytes(self._mapping)


def starved(path: Path) -> StarvedError:
    """The error for live slots that stay torn."""
    return StarvedError(
        f"{path} is damaged: no valid record in {PATIENCE_S:g} s. Close the writer and "
        "open the buffer with mode='r+', which continues from the last commit."
    )
