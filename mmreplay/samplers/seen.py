"""The STATE file of a sampler's column as values: two slots, each a record or void.

Slots are stored in turn, without any sync, so a record speaks of the page cache: it
is trusted within the boot that wrote it. What a close syncs holds beyond that, and
speaks only of rows that outlive a power cut. docs/format.md has the byte offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.files import Identity
from mmreplay.format.commit import UNTOLD, not_held, same_birth
from mmreplay.samplers.base import Home

MAGIC = b"MMRSMP01"
HEADER = struct.Struct("<8sIIQQ16s16sQQQ16s")
HEADER_NBYTES = 128
CHECKSUM = struct.Struct("<I")
PAGE_NBYTES = 4096
NUM_SLOTS = 2
MAX_COUNT = 1 << 62

CLEAN = 1
"""The column was synced before this record was, nothing was stored since, and the
rows that it speaks of were durable."""


def slot_nbytes(num_envs: int) -> int:
    """Bytes of one slot: the pages that hold the record and its checksum."""
    needed = HEADER_NBYTES + 8 * num_envs + CHECKSUM.size
    return -(-needed // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class Record:
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
        cut_epoch: The buffer's, when they were seen; see `base.Home`.
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
        data = bytearray(slot_nbytes(len(self.seen)))
        HEADER.pack_into(
            data, 0, MAGIC, self.flags, len(self.seen), self.sequence,
            self.generation, self.boot_id, self.uuid, self.device, self.inode,
            self.cut_epoch, self.birth,
        )  # fmt: skip
        body = self.seen.astype("<i8").tobytes()
        data[HEADER_NBYTES : HEADER_NBYTES + len(body)] = body
        end = len(data) - CHECKSUM.size
        CHECKSUM.pack_into(data, end, google_crc32c.value(bytes(data[:end])))
        return bytes(data)


def decode(data: bytes, uuid: bytes, num_envs: int) -> Record | None:
    """Return a slot's record, or None where it holds no whole record of this buffer."""
    end = len(data) - CHECKSUM.size
    if len(data) != slot_nbytes(num_envs) or data[:8] != MAGIC:
        return None
    if CHECKSUM.unpack_from(data, end)[0] != google_crc32c.value(data[:end]):
        return None
    (_, flags, envs, sequence, generation, boot, own_uuid, device, inode,
     cut_epoch, birth) = HEADER.unpack_from(data)  # fmt: skip
    if own_uuid != uuid or envs != num_envs or sequence >= MAX_COUNT:
        return None
    seen = np.frombuffer(data, "<i8", num_envs, HEADER_NBYTES).astype(np.int64)
    if (seen < 0).any() or (seen >= MAX_COUNT).any():
        return None
    return Record(
        sequence, generation, flags, boot, own_uuid, device, inode, seen, cut_epoch,
        birth,
    )  # fmt: skip


def newest(data: bytes, uuid: bytes, num_envs: int) -> tuple[int, Record] | None:
    """The slot and record of the highest sequence, or None where both are void."""
    slots = _records(data, uuid, num_envs)
    found = [(slot, record) for slot, record in enumerate(slots) if record is not None]
    return max(found, key=lambda item: item[1].sequence, default=None)


def trusted(
    data: bytes, uuid: bytes, num_envs: int, boot_id: bytes, identity: Identity,
    held: Callable[[], bool] = not_held,
) -> Record | None:  # fmt: skip
    """The record that says what is there, or None where nothing is known.

    A CLEAN one speaks of durable rows alone. Where it is the newest, the one before
    it says more, as long as the rows above are sure to be the same: within the boot.

    Args:
        data: The STATE file's.
        uuid: 16 bytes, the buffer's.
        num_envs: Environments.
        boot_id: 16 bytes, the running boot's.
        identity: Of the open STATE file.
        held: Tells whether another process draws with the column now; see
            `commit.same_birth`.
    """
    found = [record for record in _records(data, uuid, num_envs) if record is not None]
    found.sort(key=lambda record: record.sequence)
    last = found.pop() if found else None
    clean = last is not None and bool(last.flags & CLEAN)
    before = found.pop() if found and clean else None
    for record in (before, last):
        if record is not None and _is_here(record, boot_id, identity, held):
            return record
    return last if clean else None


def known(record: Record | None, home: Home) -> NDArray[np.int64]:
    """What a record's column still knows of a buffer: int64 ``[E]``, positions below.

    Args:
        record: The trusted one, if there is one.
        home: The buffer, which may have been cut since.
    """
    if record is None:
        return np.zeros(home.ring.num_envs, np.int64)
    return home.known(record.seen, record.generation, record.cut_epoch)


def _is_here(
    record: Record, boot_id: bytes, identity: Identity, held: Callable[[], bool]
) -> bool:
    here = any(boot_id) and record.boot_id == boot_id
    device, inode, birth = identity
    here = here and (record.device, record.inode) == (device, inode)
    return here and same_birth(record.birth, birth, held)


def _records(data: bytes, uuid: bytes, num_envs: int) -> list[Record | None]:
    size = slot_nbytes(num_envs)
    if len(data) != NUM_SLOTS * size:
        return []
    return [
        decode(data[slot * size : (slot + 1) * size], uuid, num_envs)
        for slot in range(NUM_SLOTS)
    ]
