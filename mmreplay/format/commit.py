"""The COMMIT file as values: four slots, each one record or void.

Slots 0 and 1 (D0, D1) are durable: written with pwrite and synced. Slots 2 and 3
(L0, L1) are live: stored through a mapping at every publication, and trusted only
within the boot that wrote them, because the page cache that they speak of dies
with it. docs/format.md has the byte offsets.

A slot is whole pages: a header with magic, flags and number of environments, columns of
one int64 for each environment from byte 128 on, and a CRC-32C of all of that in the
last four bytes. Sampler STATE files have slots of the same form (see
`samplers.priority_file`). Each file has its own magic, header and rule for which slot
counts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import NO_BIRTH
from mmreplay.schema.field import HEAP_ALIGNMENT

MAGIC = b"MMRCMT01"
HEADER = struct.Struct("<8sIIQQ16s16sQQQqQQ16s")
NUM_COLUMNS, NUM_HEAP_COLUMNS = 4, 6
"""Of a slot: heads, limits, tails and cuts; then heap heads and heap tails."""
SEQUENCE = struct.Struct("<Q")
SEQUENCE_OFFSET = 16
NUM_SLOTS = 4
DURABLE_SLOTS = (0, 1)
LIVE_SLOTS = (2, 3)

# No count comes near it in the life of a disk; arithmetic above would wrap around.
MAX_COUNT = 1 << 62

UNTOLD = bytes(16)
"""The birth in records of version 0.1, which did not store it."""

CLEAN = 1
POISONED = 2
"""Of a durable record: a sync failed, and live ones of its epoch are not believed."""
MOVED = 4


@dataclass(frozen=True, slots=True)
class Record:
    """One slot's content.

    Attributes:
        sequence: Numbers the records of one buffer; never falls.
        epoch: One more at every writable open.
        flags: CLEAN, POISONED, MOVED.
        boot_id: 16 bytes, the boot that wrote it.
        uuid: 16 bytes, the buffer.
        generation: The data folder that it speaks of.
        device: st_dev of the COMMIT file.
        inode: st_ino of the COMMIT file.
        time_ns: Unix time of a durable record in ns; informs, decides nothing.
        heads: int64 ``[E]``, next position to be written.
        limits: int64 ``[E]``, rows below may have been overwritten already.
        tails: int64 ``[E]``, the oldest positions that may be read.
        cuts: int64 ``[E]``, rows at and above were published after the last cut, or
            cuts, of this boot.
        cut_epoch: Of the opening that last cut rows; 0 if none did.
        cut_rows: How many it knew of.
        birth: 16 bytes, when the COMMIT file was created: `files.BIRTH`,
            `files.NO_BIRTH` or `UNTOLD`.
        heap_heads: int64 ``[E]``, next heap position to be written; None where no
            field varies.
        heap_tails: int64 ``[E]``, the oldest heap positions that may be read; likewise.
    """

    sequence: int
    epoch: int
    flags: int
    boot_id: bytes
    uuid: bytes
    generation: int
    device: int
    inode: int
    time_ns: int
    heads: NDArray[np.int64]
    limits: NDArray[np.int64]
    tails: NDArray[np.int64]
    cuts: NDArray[np.int64]
    cut_epoch: int = 0
    cut_rows: int = 0
    birth: bytes = UNTOLD
    heap_heads: NDArray[np.int64] | None = None
    heap_tails: NDArray[np.int64] | None = None

    @property
    def num_envs(self) -> int:
        """Environments."""
        return len(self.heads)

    def encode(self) -> bytes:
        """Return the slot's bytes."""
        header = HEADER.pack(
            MAGIC,
            self.flags,
            self.num_envs,
            self.sequence,
            self.epoch,
            self.boot_id,
            self.uuid,
            self.generation,
            self.device,
            self.inode,
            self.time_ns,
            self.cut_epoch,
            self.cut_rows,
            self.birth,
        )
        columns = [self.heads, self.limits, self.tails, self.cuts]
        if self.heap_heads is not None and self.heap_tails is not None:
            columns += [self.heap_heads, self.heap_tails]
        return encode_slot(header, np.stack(columns))

    def with_heads_at_tails(self) -> Record:
        """Return the record with its heads at the tails that passed them.

        No row of such an environment is alive: those that the record vouched for were
        given up, and those above it are not known to be on the disk.
        """
        heads = np.maximum(self.heads, self.tails)
        limits = np.maximum(self.limits, heads)
        if self.heap_heads is None or self.heap_tails is None:
            return replace(self, heads=heads, limits=limits)
        heap_heads = np.maximum(self.heap_heads, self.heap_tails)
        return replace(self, heads=heads, limits=limits, heap_heads=heap_heads)


def decode(data: bytes, uuid: bytes, num_envs: int, heap_nbytes: int = 0) -> Record | None:
    """Return a slot's record, or None where it holds no whole record of this buffer.

    Args:
        data: The slot's bytes.
        uuid: 16 bytes, the buffer.
        num_envs: Its environments.
        heap_nbytes: Bytes of the heap of each; 0 where no field varies.
    """
    num_columns = NUM_HEAP_COLUMNS if heap_nbytes else NUM_COLUMNS
    slot = decode_slot(data, MAGIC, HEADER, num_envs, num_columns)
    if slot is None:
        return None
    (
        (
            flags,
            sequence,
            epoch,
            boot_id,
            own_uuid,
            generation,
            device,
            inode,
            time_ns,
            cut_epoch,
            cut_rows,
            birth,
        ),
        columns,
    ) = slot
    heads, limits, tails, cuts, *heap = columns
    if own_uuid != uuid:
        return None
    # Checked although the checksum fits: a forged slot has a fitting one, too. Heads
    # outside of these bounds would make positions negative, or rows alive that the
    # ring does not have.
    if (tails > heads).any() or (heads > limits).any() or (tails < 0).any():
        return None
    if cut_epoch > epoch or (cuts < 0).any():
        return None
    if max(sequence, epoch, limits.max()) >= MAX_COUNT:
        return None
    if heap:
        heap_heads, heap_tails = heap
        # The bounds first, so that the difference cannot wrap around.
        if (heap_tails < 0).any() or (heap_heads >= MAX_COUNT).any():
            return None
        if (heap_heads < heap_tails).any():
            return None
        if (heap_heads - heap_tails > heap_nbytes).any():
            return None
        # Values are laid out from the head on, each at a multiple.
        if ((heap_heads | heap_tails) % HEAP_ALIGNMENT).any():
            return None
    return Record(
        sequence,
        epoch,
        flags,
        boot_id,
        own_uuid,
        generation,
        device,
        inode,
        time_ns,
        heads,
        limits,
        tails,
        cuts,
        cut_epoch,
        cut_rows,
        birth,
        *heap,
    )


def not_held() -> bool:
    """Return False: no other process holds the lock, as this one does."""
    return False


@dataclass(frozen=True, slots=True)
class Identity:
    """What a record must name to be this file's own.

    Attributes:
        uuid: 16 bytes, the buffer.
        generation: The data folder.
        boot_id: 16 bytes, the running boot.
        device: st_dev of the open COMMIT file.
        inode: st_ino of it. A copied folder has another one, but the number may be
            reused once this file is removed.
        birth: 16 bytes, when the file was created.
        lock_held: Tells whether a writer holds the buffer's lock. Asked only where the
            file system has no time of creation.
    """

    uuid: bytes
    generation: int
    boot_id: bytes
    device: int
    inode: int
    birth: bytes = UNTOLD
    lock_held: Callable[[], bool] = not_held

    def trusts(self, record: Record) -> bool:
        """Tell whether a live record speaks of this boot's page cache."""
        # Boot: another one began with an empty page cache. Zero: the system has no boot
        # id, and nothing proves anything. Device and inode: a copied folder has pages
        # of its own. Birth: ext4 gives the inode of a removed file to the next new one.
        return (
            any(self.boot_id)
            and record.boot_id == self.boot_id
            and (record.device, record.inode) == (self.device, self.inode)
            and same_birth(record.birth, self.birth, self.lock_held)
        )


def same_birth(recorded: bytes, actual: bytes, lock_held: Callable[[], bool]) -> bool:
    """Tell whether a record with the file's st_dev and st_ino is about that file.

    Args:
        recorded: 16 bytes, the record's birth.
        actual: 16 bytes, the open file's.
        lock_held: Tells whether a process holds the lock of the folder. Without a
            time of creation, only records of a live process are trusted.
    """
    if recorded == UNTOLD:
        return True
    return lock_held() if NO_BIRTH in (recorded, actual) else recorded == actual


Slots = tuple[Record | None, ...]
"""The records of D0, D1, L0, L1."""


def split(data: bytes, uuid: bytes, generation: int, num_envs: int, heap_nbytes: int = 0) -> Slots:
    """Decode the four slots of a COMMIT file's bytes; see `decode`."""
    size = record_nbytes(num_envs, heap_nbytes)
    records = [
        decode(data[size * slot : size * (slot + 1)], uuid, num_envs, heap_nbytes)
        for slot in range(NUM_SLOTS)
    ]
    return tuple(
        record if record is not None and record.generation == generation else None
        for record in records
    )


def uuids(data: bytes, num_envs: int, heap_nbytes: int = 0) -> set[bytes]:
    """The buffers that the slots speak of, whether their checksums fit or not."""
    size = record_nbytes(num_envs, heap_nbytes)
    heads = [data[size * slot :][: HEADER.size] for slot in range(NUM_SLOTS)]
    return {
        HEADER.unpack(head)[6]
        for head in heads
        if head.startswith(MAGIC) and len(head) == HEADER.size
    }


def newest_durable(slots: Slots) -> Record | None:
    """The newest record that was synced, by (epoch, sequence)."""
    records = [slots[slot] for slot in DURABLE_SLOTS]
    return max((r for r in records if r is not None), key=_order, default=None)


def newest_live(slots: Slots, identity: Identity) -> Record | None:
    """The newest live record to be trusted, if none durable is of a later epoch.

    Within one epoch the live record outranks durable ones of a higher sequence:
    those that raise the limits repeat the last *committed* heads.
    """
    records = [slots[slot] for slot in LIVE_SLOTS]
    live = max(
        (r for r in records if r is not None and identity.trusts(r)), key=_order, default=None
    )
    durable = newest_durable(slots)
    if live is None or durable is None:
        return live
    # After a failed sync the kernel counts pages as clean that it never wrote. They
    # look whole until they are evicted, so that live records of that epoch prove
    # nothing.
    poisoned = bool(durable.flags & POISONED)
    return live if live.epoch >= durable.epoch + poisoned else None


def highest_limit(slots: Slots) -> NDArray[np.int64]:
    """int64 ``[E]``: rows below may have been overwritten, whichever slot says so."""
    # Untrusted ones count here: they may be wrong about rows that exist, but a limit in
    # any of them was in force before its rows were overwritten. Without this, readers
    # after a power cut got rows of the next lap.
    limits = [record.limits for record in slots if record is not None]
    highest: NDArray[np.int64] = np.max(limits, axis=0)
    return highest


def _order(record: Record) -> tuple[int, int]:
    return record.epoch, record.sequence


HEADER_NBYTES = 128
CHECKSUM = struct.Struct("<I")
PAGE_NBYTES = 4096


def record_nbytes(num_envs: int, heap_nbytes: int) -> int:
    """Bytes of one slot of COMMIT.

    Args:
        num_envs: Environments.
        heap_nbytes: Bytes of the heap of each; 0 where no field varies.
    """
    return slot_nbytes(num_envs, NUM_HEAP_COLUMNS if heap_nbytes else NUM_COLUMNS)


def slot_nbytes(num_envs: int, num_columns: int = NUM_COLUMNS) -> int:
    """Bytes of one slot: the pages that hold header, columns and checksum."""
    # Whole pages: the kernel writes them back one by one, and a torn page of one slot
    # must not hold bytes of another. From 124 environments on a slot has several.
    needed = HEADER_NBYTES + 8 * num_columns * num_envs + CHECKSUM.size
    return -(-needed // PAGE_NBYTES) * PAGE_NBYTES


def encode_slot(header: bytes, columns: NDArray[np.int64]) -> bytes:
    """Return the bytes of a slot.

    Args:
        header: At most 128 bytes, packed.
        columns: int64 ``[K, E]``.
    """
    num_columns, num_envs = columns.shape
    data = bytearray(slot_nbytes(num_envs, num_columns))
    data[: len(header)] = header
    body = columns.astype("<i8").tobytes()
    data[HEADER_NBYTES : HEADER_NBYTES + len(body)] = body
    seal(data)
    return bytes(data)


def seal(data: bytearray) -> None:
    """Store the checksum of a slot's bytes at their end."""
    # At the end, over all pages, zeros included: a slot of which only some pages
    # reached the disk does not pass.
    end = len(data) - CHECKSUM.size
    CHECKSUM.pack_into(data, end, google_crc32c.value(bytes(data[:end])))


def decode_slot(
    data: bytes, magic: bytes, header: struct.Struct, num_envs: int, num_columns: int
) -> tuple[tuple[Any, ...], NDArray[np.int64]] | None:
    """Return the header's values and the columns of a slot, or None if it is void.

    A slot that is torn, blank or of another file is an ordinary case and no error: it
    is why each file has several.

    Args:
        data: The slot's bytes.
        magic: The first 8 bytes of a slot of this file.
        header: Begins with the magic, flags and the number of environments.
        num_envs: Environments of the buffer.
        num_columns: K.

    Returns:
        The values of the header that follow the magic, without the number of
        environments, and the columns, int64 ``[K, E]``.
    """
    end = len(data) - CHECKSUM.size
    if len(data) != slot_nbytes(num_envs, num_columns) or data[: len(magic)] != magic:
        return None
    if CHECKSUM.unpack_from(data, end)[0] != google_crc32c.value(data[:end]):
        return None
    _, flags, envs, *values = header.unpack_from(data)
    if envs != num_envs:
        return None
    body = np.frombuffer(data, "<i8", num_columns * num_envs, HEADER_NBYTES)
    columns = body.reshape(num_columns, num_envs).astype(np.int64)
    return (flags, *values), columns
