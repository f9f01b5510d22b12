"""A number for every row of a ring, in RAM or in a file beside the data.

A `PriorityColumn` is a float32 for each row, its priority, or another number of a
`ColumnKind`. A `PriorityFile` is one that survives the process: it is kept in
``samplers/<name>/`` of the buffer's folder and belongs to the process that draws, also
where that process only reads the buffer. The folder holds

- ``priorities.bin``, mapped: a store into it survives the death of the process at any
  instant, because the page cache does; or the file of another kind, ``uses.bin``;
- ``STATE``, the positions below which rows have a priority of their own. It has two
  slots, stored in turn and without a sync, so a record speaks of the page cache and is
  trusted within the boot that wrote it. Closing syncs the column and then writes a
  CLEAN record, which holds beyond the boot and speaks only of rows that no power cut
  takes back. docs/format.md has the byte offsets;
- ``SYNCED``, where `PriorityFile.sync` was called: a CLEAN record beside STATE, for
  the numbers as they were then, and a PUBLISHED one of the rows that were not durable
  yet;
- ``LOCK``, held by the process that draws.

Without the right to write, or the lock, priorities stay in RAM. `PriorityColumn.where`
says why, and the sampler warns of it.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.disk import files
from mmreplay.disk.files import (
    COPY_ON_WRITE,
    NETWORK,
    File,
    Identity,
    file_system,
    refuse_link,
    rename,
)
from mmreplay.disk.lock import Owner, lock_pid
from mmreplay.episodes.starts import BufferIdentity
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    FullError,
    LockedError,
    ReplayError,
    SchemaError,
    shown,
)
from mmreplay.format import commit
from mmreplay.format.commit import UNTOLD, decode_slot, encode_slot, not_held, same_birth
from mmreplay.format.commit import slot_nbytes as nbytes_of_slot
from mmreplay.process import ProcessGuard
from mmreplay.ring import Ring, runs

COLUMN = "priorities.bin"
STATE = "STATE"
SYNCED = "SYNCED"
LOCK_FILE = "LOCK"
CHUNK_ROWS = 1 << 20
NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

MAGIC = b"MMRSMP01"
HEADER = struct.Struct("<8sIIQQ16s16sQQQ16s")
NUM_SLOTS = 2
MAX_COUNT = 1 << 62

CLEAN = 1
"""The column was synced before this record was, nothing was stored since, and the
rows that it speaks of were durable."""
PUBLISHED = 2
"""The column was synced before this record was, which speaks of all rows published
then, and has the epoch of COMMIT as its cut epoch."""

Ids = NDArray[np.int64]
Numbers = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """What a column holds for each row.

    Attributes:
        file: Name of the file.
        dtype: Little-endian dtype of a number.
        words: What the numbers are, for messages.
    """

    file: str
    dtype: np.dtype[Any]
    words: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize


PRIORITIES = ColumnKind(COLUMN, np.dtype("<f4"), "priorities")
USES = ColumnKind("uses.bin", np.dtype("<u2"), "counts of uses")
KINDS = (PRIORITIES, USES)


def check_name(name: str | None) -> str | None:
    """Return the name of a column, or None for one that stays in RAM.

    Raises:
        SchemaError: It cannot be a folder's name everywhere.
    """
    if name is None or (isinstance(name, str) and NAME.fullmatch(name)):
        return name
    raise SchemaError(
        "name must be 1 to 64 letters, digits, '_', '-' or '.', and not begin with "
        f"'-' or '.', got {shown(name)}. Pass None to store none."
    )


class PriorityColumn:
    """A priority for each row, in RAM.

    Attributes:
        ring: Where rows lie.
        values: float32 ``[num_rows]``; changed by `store`, or directly if `direct`.
        seen: int64 ``[E]``, positions below have a priority of their own; other rows
            may hold anything.
        where: ``"disk"``, or ``"RAM"`` and why.
        direct: Whether what is set in ``values`` is stored.
        closed: Whether it was closed, by itself or with its buffer.
        pid: The process that may use it, or None for any.
        cause: What kept it from the disk; None where nothing did.
        damages: What was wrong with its files when they were opened, so that numbers
            may be lost: a path and why, each.
    """

    direct = True
    closed = False
    pid: int | None = None
    cause: FailedError | FullError | LockedError | None = None
    damages: Sequence[str] = ()

    def __init__(self, ring: Ring, values: Numbers, seen: Ids, where: str) -> None:
        self.ring = ring
        self.values = values
        self.seen = seen
        self.where = where

    @staticmethod
    def blank(ring: Ring, where: str, kind: ColumnKind = PRIORITIES) -> PriorityColumn:
        """Make one that has seen nothing."""
        values = np.zeros(ring.num_rows, kind.dtype)
        return PriorityColumn(ring, values, np.zeros(ring.num_envs, np.int64), where)

    def store(self, rows: Ids, numbers: NDArray[Any] | np.generic) -> None:
        """Set the priorities of rows ``[N]``; of equal rows the last wins."""
        self.values[rows] = numbers

    def see(self, seen: Ids, generation: int) -> None:
        """Record that positions below have priorities of their own, as they do."""
        self.seen = seen

    def sync(self) -> None:
        """Make the numbers outlive a power cut, as far as the rows do."""

    def check_owner(self) -> None:
        """Refuse use in a forked child; a column in RAM is the child's own."""

    def close(self) -> None:
        """Make a file durable and release it; a second call does nothing."""


class PriorityFile(PriorityColumn):
    """A priority for each row, in a mapped file; use `open_column`."""

    def __init__(self, ring: Ring, values: Numbers, seen: Ids, column_files: ColumnFiles) -> None:
        super().__init__(ring, values, seen, "disk")
        self.files = column_files
        self.pid = column_files.owner.pid
        self.direct = column_files.mapped
        self.damages = column_files.damages
        # A column that was dropped, or left open at exit, is closed all the same. The
        # finaliser holds the files only, or it would keep the column alive.
        self._finalizer = weakref.finalize(self, column_files.close_in_owner)
        _open_columns.add(self)

    def store(self, rows: Ids, numbers: NDArray[Any] | np.generic) -> None:
        """Set the priorities of rows; see `PriorityColumn.store`."""
        self.values[rows] = numbers
        if not self.files.mapped:
            self.files.write(np.unique(rows), self.values)

    def see(self, seen: Ids, generation: int) -> None:
        """Record what has priorities of its own; see `PriorityColumn.see`."""
        self.files.write_record(seen, generation, 0)
        self.seen = seen

    def sync(self) -> None:
        """Make the numbers outlive a power cut; see `PriorityColumn.sync`."""
        self.files.sync(self.seen)

    def check_owner(self) -> None:
        """Refuse use in a forked child."""
        self.files.owner.check()

    def release(self) -> None:
        """Close the files; the numbers can still be read, of a copy in RAM."""
        self.closed = True
        # A sampler's tree of them takes four times as much.
        self.values = self.values.copy()
        self.files.close_in_owner()

    def close(self) -> None:
        """Make it durable and release it; see `PriorityColumn.close`."""
        self.closed = True
        self.values = self.values[:0].copy()
        self._finalizer()


_open_columns: weakref.WeakSet[PriorityFile] = weakref.WeakSet()


def close_columns(identities: Sequence[BufferIdentity]) -> None:
    """Close the columns of a buffer that is closed; samplers open them again.

    Args:
        identities: The open buffer's own objects, which differ from those of another
            opening: one of each generation that it had.
    """
    for column in list(_open_columns):
        if any(column.files.home is home for home in identities):
            column.release()


def _release_in_child() -> None:
    # Never unlocked, only closed: the lock is the parent's, and must not live on in
    # a worker after the parent was killed.
    for column in list(_open_columns):
        column.files.release()


os.register_at_fork(after_in_child=_release_in_child)


def open_column(
    home: BufferIdentity, name: str | None, kind: ColumnKind = PRIORITIES
) -> PriorityColumn:
    """Open a buffer's column of that name, or make it; in RAM where that must be.

    Args:
        home: The buffer.
        name: As `check_name` returns it.
        kind: What it holds.

    Raises:
        FormatError: Something other than a regular file has the name of one.
        SchemaError: A column of another kind has the name.
    """
    if name is None or home.folder is None:
        why = "RAM, as name=None asks" if name is None else "RAM, as the data"
        return PriorityColumn.blank(home.ring, why, kind)
    folder = home.folder / "samplers" / name
    try:
        _make_folders(folder)
        system = file_system(folder)
        if system in NETWORK:
            why = f"{folder} is on a network file system ({system})"
            column = PriorityColumn.blank(home.ring, f"RAM: {why}", kind)
            column.cause = FailedError(
                f"{why}, where {kind.words} cannot be kept safely. Put the buffer on a "
                "local disk, or pass name=None: then they end with this process."
            )
            return column
        for other in KINDS:
            if other is not kind and os.path.lexists(folder / other.file):
                raise SchemaError(
                    f"name must be of {kind.words}, got {name!r}, which holds "
                    f"{other.words} of {home.folder}. Choose another name."
                )
        return ColumnFiles(folder, home, _lock(folder), kind).open()
    except (FailedError, FullError, LockedError) as error:
        column = PriorityColumn.blank(home.ring, f"RAM: {error}", kind)
        column.cause = error.with_traceback(None)
        return column


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column of priorities as its files hold it, read-only.

    Attributes:
        ring: The buffer's ring, with the slots that the column was made for.
        values: float32 ``[num_rows]``, mapped; may change while a sampler draws.
        seen: int64 ``[E]``, positions below have a priority of their own.
        trusted: STATE says what was seen; False after a copy or a power cut.
    """

    ring: Ring
    values: Numbers
    seen: Ids
    trusted: bool

    def read(self, env_ids: Ids, positions: Ids) -> Numbers:
        """Priorities of rows that are alive, float32 ``[N]``; -1 where there is none.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
        """
        if not len(self.values):
            return np.full(len(positions), np.float32(-1))
        values = self.values[self.ring.rows(env_ids, positions)]
        seen = self.seen[env_ids]
        own = (positions < seen) & (positions >= seen - self.ring.slots)
        own &= (values >= 0) & (values < np.inf)
        return np.where(own, values, np.float32(-1))


def read_column(home: BufferIdentity, name: str) -> StoredColumn:
    """Read a buffer's column without its lock, while a sampler may use it.

    Neither LOCK nor STATE is opened for writing: a sampler that starts later still
    gets the column. Each number is written by one store, so that none is torn.

    Args:
        home: The buffer, with a folder.
        name: Of the column.

    Raises:
        CorruptError: A file is missing or too short.
    """
    assert home.folder is not None
    folder, num_envs = home.folder / "samplers" / name, home.ring.num_envs
    state = File.open(folder / STATE, None)
    try:
        data = state.pread(min(state.nbytes, NUM_SLOTS * slot_nbytes(num_envs)), 0)
        record = read_record(folder, home, data, state.identity())
    finally:
        state.close()
    file = File.open(folder / COLUMN, None)
    try:
        # The ring may have been resized since: the column has its own slots.
        slots = file.nbytes // (4 * num_envs)
        num_rows = slots * num_envs
        mapping = file.map_readonly() if num_rows else b""
    finally:
        file.close()
    values = np.frombuffer(mapping, "<f4", num_rows)
    ring = replace(home.ring, slots=max(1, slots))
    return StoredColumn(ring, values, known(record, home), record is not None)


class ColumnFiles:
    """Files and lock of one column on disk.

    Attributes:
        folder: Theirs.
        home: The buffer, as it was opened.
        owner: The process that opened them.
        mapped: Whether the numbers are stored through a mapping.
        damages: As in `PriorityColumn`.
    """

    def __init__(self, folder: Path, home: BufferIdentity, lock: File, kind: ColumnKind) -> None:
        self.folder = folder
        self.home = home
        self._kind = kind
        self.owner = ProcessGuard(
            f"the {kind.words} in {folder} were opened",
            "Draw in the main process and let workers gather, or create the sampler in the child",
        )
        self.mapped = file_system(folder) not in COPY_ON_WRITE
        self._boot_id = process.boot_id()
        self._open_files = [lock]
        self._sequence = self._slot = 0
        self._last_seen: tuple[Ids, int] | None = None
        self.damages: list[str] = []

    def open(self) -> PriorityFile:
        """Open the files, or make them; numbers of another ring are carried over."""
        try:
            ring = self.home.ring
            self._state, record = self._open_state()
            self._numbers = self._open_numbers(record)
            self._open_files += [self._numbers]
            # A process that was killed may have made or renamed them without a sync.
            files.sync_folder(self.folder)
            values = self._map()
            seen = known(record, self.home)
            # What follows is stored without a sync: the last record is CLEAN no more.
            self.write_record(seen, self.home.generation, 0)
        except BaseException:
            self.release()
            raise
        return PriorityFile(ring, values, seen, self)

    def _open_state(self) -> tuple[File, StateRecord | None]:
        path, home = self.folder / STATE, self.home
        nbytes = NUM_SLOTS * slot_nbytes(home.ring.num_envs)
        last = None
        try:
            state = File.open(path, nbytes, writable=True)
        except CorruptError:
            # Missing, or too short: nothing is known of the numbers. Only what had
            # been learned is lost.
            size = f"does not have its {nbytes} bytes"
            missing = not os.path.lexists(path)
            self._note_lost_state(f"{path} {'is missing' if missing else size}")
            files.remove_tree(path)
            state = File.create(path, nbytes)
        else:
            data = state.pread(nbytes, 0)
            last = newest(data, home.uuid, home.ring.num_envs)
            void = _records(data, home.uuid, home.ring.num_envs).count(None)
            unwritten = sum(not any(slot) for slot in _slots(data))
            if last is None or void > unwritten:
                self._note_lost_state(f"{path} has {void} damaged records of 2")
        self._open_files += [state]
        self._identity = state.identity()
        clean = None
        if last is not None:
            slot, record = last
            self._slot, self._sequence = 1 - slot, record.sequence
            # This process holds the lock, so that no other one draws.
            here = self._boot_id, self._identity
            clean = trusted(data, home.uuid, home.ring.num_envs, *here)
            if clean is not None and _is_here(clean, *here, not_held):
                return state, clean
        synced = self._synced_record()
        if synced is not None:
            # STATE may have been written back before SYNCED was: numbers go on above
            # both, so that a record stored from now on is the newer one.
            self._sequence = max(self._sequence, synced.sequence)
        return state, both_known(clean, synced, home)

    def _note_lost_state(self, damage: str) -> None:
        """Note damage of STATE where there are numbers that it spoke of."""
        numbers = _existing(self.folder / self._kind.file)
        if numbers is not None:
            if numbers.nbytes and np.frombuffer(numbers.map_readonly(), "u1").any():
                self.damages.append(damage)
            numbers.close()

    def _open_numbers(self, record: StateRecord | None) -> File:
        """Open the numbers as this ring's; their file's size shows which they are of.

        Args:
            record: What STATE says of them, if it is trusted.
        """
        folder, home, kind = self.folder, self.home, self._kind
        ring, path = home.ring, folder / kind.file
        nbytes = kind.itemsize * ring.num_rows
        file = _existing(path)
        if file is not None and file.nbytes == nbytes:
            return file
        former = 0 if file is None else file.nbytes
        is_damaged = False
        if record is not None and record.seen.any():
            # A record of this generation was of a file of this ring.
            is_damaged = record.generation == home.generation
            is_damaged |= not former or former % (kind.itemsize * ring.num_envs) != 0
        if is_damaged:
            size = f"has {former} bytes of {nbytes}"
            self.damages.append(f"{path} {'is missing' if file is None else size}")
        fresh = File.create(_cleared(folder / f"tmp-{kind.file}"), nbytes)
        try:
            if file is not None and is_damaged:
                # What is left of it lies where it lay.
                left = min(former, nbytes)
                fresh.pwrite(file.pread(left - left % kind.itemsize, 0), 0)
            elif file is not None and record is not None:
                _carry(file, ring, record.seen, fresh, kind)
            fresh.sync()
            # The rename is the one switch: a kill on either side of it leaves a column
            # whose size shows which ring it is of, and `seen` is right for both.
            rename(fresh.path, path)
        finally:
            fresh.close()
            if file is not None:
                file.close()
        return File.open(path, nbytes, writable=True)

    def _synced_record(self) -> StateRecord | None:
        """What holds of the numbers that `sync` made durable; None without any."""
        if not (self.folder / SYNCED).exists():
            return None
        record = _read_synced(self.folder, self.home)
        if record is None:
            self.damages.append(f"{self.folder / SYNCED} is damaged")
        return record

    def sync(self, seen: Ids) -> None:
        """Sync the numbers, and record what of them outlives a power cut."""
        self._numbers.sync()
        home, durable = self.home, durable_record(self.home)
        heads = np.zeros_like(seen) if durable is None else durable.heads
        device, inode, birth = self._identity
        record = StateRecord(
            self._sequence,
            home.generation,
            CLEAN,
            self._boot_id,
            home.uuid,
            device,
            inode,
            np.minimum(seen, heads),
            home.cut_epoch,
            birth,
        )
        data = record.encode()
        # Rows that a later commit makes durable keep their numbers, too: the epoch says
        # which opening may have cut them. Unless some of them were cut before this.
        if durable is not None and durable.cut_epoch == home.cut_epoch:
            record = replace(record, flags=PUBLISHED, seen=seen, cut_epoch=durable.epoch)
            data += record.encode()
        files.replace_bytes(self.folder / SYNCED, data)
        files.sync_folder(self.folder)

    def _map(self) -> Numbers:
        if not self.mapped:
            # Where no space can be reserved, a store on a full disk is a SIGBUS:
            # there numbers are kept in RAM as well, and written.
            data = bytearray(self._numbers.nbytes)
            self._numbers.pread_into(memoryview(data), 0)
            return np.frombuffer(data, self._kind.dtype)
        self._state.map_writable()
        self._numbers.map_writable()
        assert self._numbers.mapping is not None
        return np.frombuffer(self._numbers.mapping, self._kind.dtype)

    def write(self, rows: Ids, values: Numbers) -> None:
        """Write the numbers of growing rows, where they are not mapped."""
        for row, first, stop in runs(rows) if len(rows) else []:
            data = values[row : row + stop - first]
            self._numbers.pwrite(data.view(np.uint8).data, self._kind.itemsize * row)

    def write_record(self, seen: Ids, generation: int, flags: int) -> None:
        """Write a record to the slot whose turn it is."""
        device, inode, birth = self._identity
        self._sequence += 1
        record = StateRecord(
            self._sequence,
            generation,
            flags,
            self._boot_id,
            self.home.uuid,
            device,
            inode,
            seen,
            self.home.cut_epoch,
            birth,
        )
        size = slot_nbytes(len(seen))
        self._state.store(record.encode(), size * self._slot)
        # Strictly in turn: one slot is whole while the other is being stored.
        self._slot = 1 - self._slot
        self._last_seen = (seen, generation)

    def close_in_owner(self) -> None:
        """Sync and release everything, but only in the process that opened it."""
        if self.owner.forked or not self._open_files:
            return
        try:
            if self._last_seen is not None:
                seen, generation = self._last_seen
                self._numbers.sync()
                # A power cut drops the rows above, and others are written in their
                # place; the record before this one says what is seen until then.
                durable = durable_record(self.home)
                heads = np.zeros_like(seen) if durable is None else durable.heads
                self.write_record(np.minimum(seen, heads), generation, CLEAN)
                self._state.sync()
                # What follows may be interrupted, and then called again.
                self._last_seen = None
        finally:
            self.release()

    def release(self) -> None:
        """Close the files; the lock, which is the first, last."""
        while self._open_files:
            self._open_files.pop().close()


def _make_folders(folder: Path) -> None:
    for path in (folder.parent, folder):
        refuse_link(path)
        try:
            files.make_folder(path, exist_ok=True)
        except FailedError as error:
            # Another process made it at the same moment.
            if error.errno != errno.EEXIST:
                raise


def _lock(folder: Path) -> File:
    path = folder / LOCK_FILE
    try:
        if not path.exists():
            File.create(path, 0).close()
    except FailedError as error:
        if error.errno != errno.EEXIST:
            raise
    file = File.open(path, None, writable=True)
    try:
        files.disk.lock(file.fd)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            pid = lock_pid(path)
            whose = f" of pid {pid}" if pid else ""
            raise LockedError(
                f"{path} is locked by another sampler{whose}. Close that sampler, or "
                "give this one another name.",
                pid=pid or None,
                host=socket.gethostname() if pid else None,
            ) from error
        raise FailedError(
            f"cannot lock {path}: {error.strerror}. Use a file system that supports flock.",
            errno_=error.errno,
        ) from error
    return file


def _existing(path: Path) -> File | None:
    try:
        return File.open(path, None, writable=True)
    except CorruptError:
        return None


def _cleared(path: Path) -> Path:
    files.remove_tree(path)
    return path


def _carry(old: File, ring: Ring, seen: Ids, fresh: File, kind: ColumnKind) -> None:
    """Copy the numbers of the newest positions into another ring's file."""
    num_slots, rest = divmod(old.nbytes, kind.itemsize * ring.num_envs)
    if rest or not num_slots:
        return
    former = replace(ring, slots=num_slots)
    before = np.frombuffer(old.map_readonly(), kind.dtype)
    after = carried(before, former, ring, seen)
    fresh.pwrite(after.view(np.uint8).data, 0)


def carried(values: Numbers, former: Ring, ring: Ring, seen: Ids) -> Numbers:
    """Numbers of one ring's rows, moved to where another ring has those positions."""
    moved = np.zeros(ring.num_rows, values.dtype)
    slots = min(former.slots, ring.slots)
    for env_id, stop in enumerate(seen.tolist()):
        for first in range(max(0, stop - slots), stop, CHUNK_ROWS):
            positions = np.arange(first, min(first + CHUNK_ROWS, stop))
            ids = np.full(len(positions), env_id)
            moved[ring.rows(ids, positions)] = values[former.rows(ids, positions)]
    return moved


def moved_column(
    column: PriorityColumn, former: BufferIdentity, home: BufferIdentity
) -> PriorityColumn | None:
    """Move a column in RAM to another generation of its buffer, where positions stay.

    Args:
        column: The column.
        former: The buffer that it was of.
        home: The buffer now.

    Returns:
        None where it is another buffer, or the column is on disk and is opened again.
    """
    same = former.uuid == home.uuid and former.ring.num_envs == home.ring.num_envs
    if not same or column.where == "disk":
        return None
    values = carried(column.values, column.ring, home.ring, column.seen)
    seen = home.known(column.seen, former.generation, former.cut_epoch)
    return PriorityColumn(home.ring, values, seen, column.where)


def slot_nbytes(num_envs: int) -> int:
    """Bytes of one slot."""
    return nbytes_of_slot(num_envs, 1)


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One slot's content.

    Attributes:
        sequence: Numbers the records; never falls.
        generation: The data folder whose rows the column was last kept by; informs.
        flags: CLEAN or 0.
        boot_id: 16 bytes, the boot that wrote it.
        uuid: 16 bytes, the buffer.
        device: st_dev of the STATE file.
        inode: st_ino of the STATE file: a copied folder has another.
        seen: int64 ``[E]``, positions below have priorities of their own.
        cut_epoch: The buffer's, when they were seen; see `BufferIdentity`.
        birth: 16 bytes, when the STATE file was created; see `commit.Record`.
    """

    sequence: int
    generation: int
    flags: int
    boot_id: bytes
    uuid: bytes
    device: int
    inode: int
    seen: NDArray[np.int64]
    cut_epoch: int = 0
    birth: bytes = UNTOLD

    def encode(self) -> bytes:
        """Return the slot's bytes."""
        header = HEADER.pack(
            MAGIC,
            self.flags,
            len(self.seen),
            self.sequence,
            self.generation,
            self.boot_id,
            self.uuid,
            self.device,
            self.inode,
            self.cut_epoch,
            self.birth,
        )
        return encode_slot(header, self.seen[None])


def decode(data: bytes, uuid: bytes, num_envs: int) -> StateRecord | None:
    """Return a slot's record, or None where it holds no whole record of this buffer."""
    slot = decode_slot(data, MAGIC, HEADER, num_envs, 1)
    if slot is None:
        return None
    (flags, sequence, generation, boot_id, own_uuid, device, inode, cut_epoch, birth), (seen,) = (
        slot
    )
    if own_uuid != uuid or sequence >= MAX_COUNT:
        return None
    if (seen < 0).any() or (seen >= MAX_COUNT).any():
        return None
    return StateRecord(
        sequence, generation, flags, boot_id, own_uuid, device, inode, seen, cut_epoch, birth
    )


def newest(data: bytes, uuid: bytes, num_envs: int) -> tuple[int, StateRecord] | None:
    """The slot and record of the highest sequence, or None where both are void."""
    slots = _records(data, uuid, num_envs)
    valid = [(slot, record) for slot, record in enumerate(slots) if record is not None]
    return max(valid, key=lambda item: item[1].sequence, default=None)


def trusted(
    data: bytes,
    uuid: bytes,
    num_envs: int,
    boot_id: bytes,
    identity: Identity,
    is_locked: Callable[[], bool] = not_held,
) -> StateRecord | None:
    """The record that says what is there, or None where nothing is known.

    A CLEAN one speaks of durable rows alone. Where it is the newest, the one before
    it says more, as long as the rows above are sure to be the same: within the boot.

    Args:
        data: The STATE file's.
        uuid: 16 bytes, the buffer's.
        num_envs: Environments.
        boot_id: 16 bytes, the running boot's.
        identity: Of the open STATE file.
        is_locked: Returns whether another process draws with the column now; see
            `commit.same_birth`.
    """
    valid = [record for record in _records(data, uuid, num_envs) if record is not None]
    valid.sort(key=lambda record: record.sequence)
    last = valid.pop() if valid else None
    clean = last is not None and bool(last.flags & CLEAN)
    before = valid.pop() if valid and clean else None
    for record in (before, last):
        if record is not None and _is_here(record, boot_id, identity, is_locked):
            return record
    return last if clean else None


def read_record(
    folder: Path, home: BufferIdentity, data: bytes, identity: Identity
) -> StateRecord | None:
    """The record that an opening would go by, without the column's lock.

    Args:
        folder: The column's.
        home: The buffer.
        data: The STATE file's.
        identity: Of the open STATE file.
    """
    here = process.boot_id(), identity, lambda: Owner(folder).alive
    record = trusted(data, home.uuid, home.ring.num_envs, *here)
    if record is not None and _is_here(record, *here):
        return record
    return both_known(record, _read_synced(folder, home), home)


def _read_synced(folder: Path, home: BufferIdentity) -> StateRecord | None:
    """What SYNCED says of rows that are still the same; None if missing or damaged."""
    num_envs, size = home.ring.num_envs, slot_nbytes(home.ring.num_envs)
    try:
        data = files.read_bytes(folder / SYNCED, 2 * size)
    except FormatError:
        return None
    clean = decode(data[:size], home.uuid, num_envs)
    if clean is None or not clean.flags & CLEAN:
        return None
    if len(data) == size:
        return clean
    published = decode(data[size:], home.uuid, num_envs)
    if published is None or not published.flags & PUBLISHED:
        return None
    # COMMIT names only the last opening that cut rows. If another one cut rows before
    # it, or in an earlier generation, any row that was not durable may be gone.
    first = home.cut_epoch <= published.cut_epoch + 1
    if published.generation != home.generation or not first:
        return clean
    return both_known(clean, published, home)


def both_known(
    one: StateRecord | None, other: StateRecord | None, home: BufferIdentity
) -> StateRecord | None:
    """The newer of two records, with what either knows of rows that are the same.

    Both were true, and no number of a row falls: what one knows the other only may
    not have known yet, or not known to be durable.
    """
    if one is None or other is None:
        return one or other
    newer = max(one, other, key=lambda record: record.sequence)
    seen = np.maximum(known(one, home), known(other, home))
    return replace(newer, seen=seen)


def known(record: StateRecord | None, home: BufferIdentity) -> NDArray[np.int64]:
    """Positions below which a column's numbers are still of the buffer's rows.

    Args:
        record: The trusted one, if there is one.
        home: The buffer, which may have lost rows since.

    Returns:
        int64 ``[E]``.
    """
    if record is None:
        return np.zeros(home.ring.num_envs, np.int64)
    return home.known(record.seen, record.generation, record.cut_epoch)


def _is_here(
    record: StateRecord, boot_id: bytes, identity: Identity, is_locked: Callable[[], bool]
) -> bool:
    here = any(boot_id) and record.boot_id == boot_id
    device, inode, birth = identity
    here = here and (record.device, record.inode) == (device, inode)
    return here and same_birth(record.birth, birth, is_locked)


def _records(data: bytes, uuid: bytes, num_envs: int) -> list[StateRecord | None]:
    size = slot_nbytes(num_envs)
    if len(data) != NUM_SLOTS * size:
        return []
    return [decode(slot, uuid, num_envs) for slot in _slots(data)]


def _slots(data: bytes) -> list[bytes]:
    size = len(data) // NUM_SLOTS
    return [data[slot * size : (slot + 1) * size] for slot in range(NUM_SLOTS)]


def durable_record(home: BufferIdentity) -> commit.Record | None:
    """The newest record that no power cut takes back; None where it is not known.

    Its heads never fall: numbers of rows below hold in every copy of the buffer.

    Args:
        home: The buffer; its COMMIT is read again.
    """
    if home.folder is None:
        return None
    num_envs = home.ring.num_envs
    path = home.folder / f"data-{home.generation:06d}" / "COMMIT"
    nbytes = commit.NUM_SLOTS * commit.record_nbytes(num_envs, home.heap_nbytes)
    try:
        file = File.open(path, nbytes)
        try:
            data = file.pread(nbytes, 0)
            # A record that was just written counts once it is on the device.
            file.sync()
        finally:
            file.close()
    except ReplayError:
        # Gone with its generation, or not readable: nothing is lost by knowing less.
        return None
    slots = commit.split(data, home.uuid, home.generation, num_envs, home.heap_nbytes)
    return commit.newest_durable(slots)
