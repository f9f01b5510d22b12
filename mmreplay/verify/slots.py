"""The four slots of COMMIT: whole, of this buffer, and in agreement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.disk.files import File
from mmreplay.disk.lock import Owner
from mmreplay.errors import OR_REPAIR
from mmreplay.format import commit
from mmreplay.format.commit import CHECKSUM, Identity, Record, Slots
from mmreplay.format.metadata import Metadata
from mmreplay.verify.report import Notebook

NAMES = ("D0", "D1", "L0", "L1")
KNOWN_FLAGS = commit.CLEAN | commit.POISONED | commit.MOVED
# A writer stores a slot in a microsecond; one caught in the middle is whole soon.
READS = 20

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Claim:
    """The rows that COMMIT vouches for.

    Attributes:
        firsts: int64 ``[E]``, the oldest position alive.
        heads: int64 ``[E]``, positions below are committed.
        published: int64 ``[E]``, positions below are served to readers; at least the
            heads.
        limits: int64 ``[E]``, positions below may be overwritten one lap earlier.
    """

    firsts: Array
    heads: Array
    published: Array
    limits: Array


class CommitFile:
    """An open COMMIT file that a writer may be using."""

    def __init__(self, file: File, name: str, metadata: Metadata) -> None:
        self._file = file
        self._name = name
        self._metadata = metadata
        self._size = commit.record_nbytes(metadata.ring.num_envs, metadata.heap_nbytes)

    def read(self) -> tuple[bytes, Slots]:
        """Return the file and its records, read again while a slot looks torn."""
        known = self._metadata
        for _ in range(READS):
            data = self._file.pread(commit.NUM_SLOTS * self._size, 0)
            slots = commit.split(
                data, known.uuid, known.generation, known.ring.num_envs, known.heap_nbytes
            )
            if all(
                record is not None or not any(self._bytes(data, slot))
                for slot, record in enumerate(slots)
            ):
                break
        return data, slots

    def limits(self) -> Array:
        """int64 ``[E]``, the highest limits that any slot says now."""
        # One pass may see one live slot old and the other torn; not three.
        seen = [self.read()[1] for _ in range(3)]
        found = [r.limits for slots in seen for r in slots if r is not None]
        return np.max(found, axis=0) if found else self._nothing()

    def bounds(self) -> tuple[Array, Array, Array]:
        """Limits, tails and heap tails, the highest that any slot says now.

        Returns:
            Three int64 ``[E]``.
        """
        # As often as in `limits`.
        seen = [self.read()[1] for _ in range(3)]
        found = [r for slots in seen for r in slots if r is not None]
        if not found:
            return self._nothing(), self._nothing(), self._nothing()
        heap_tails = [r.heap_tails for r in found if r.heap_tails is not None]
        return (
            np.max([r.limits for r in found], axis=0),
            np.max([r.tails for r in found], axis=0),
            np.max(heap_tails, axis=0) if heap_tails else self._nothing(),
        )

    def heap_heads(self) -> Array:
        """int64 ``[E]``, the highest heap heads that any slot says now."""
        seen = [self.read()[1] for _ in range(3)]
        found = [r.heap_heads for slots in seen for r in slots if r is not None]
        known = [heap_heads for heap_heads in found if heap_heads is not None]
        return np.max(known, axis=0) if known else self._nothing()

    def _nothing(self) -> Array:
        return np.zeros(self._metadata.ring.num_envs, np.int64)

    def _bytes(self, data: bytes, slot: int) -> bytes:
        return data[self._size * slot : self._size * (slot + 1)]

    def check(self, notes: Notebook) -> Claim | None:
        """Check every slot, and return what they vouch for, if anything."""
        data, slots = self.read()
        known, folder = self._metadata, self._file.path.parent.parent
        identity = Identity(
            known.uuid,
            known.generation,
            process.boot_id(),
            *self._file.identity(),
            lock_held=lambda: Owner(folder).alive,
        )
        durable = commit.newest_durable(slots)
        for slot, record in enumerate(slots):
            if record is None:
                self._check_void(notes, slot, self._bytes(data, slot))
            else:
                self._check_record(notes, slot, record)
        self._check_order(notes, slots)
        if durable is None:
            notes.note(
                "commit",
                self._name,
                0,
                "none of the two durable slots is valid, so the buffer cannot be "
                f"opened; restore COMMIT from a copy{OR_REPAIR}",
            )
            return None
        live = commit.newest_live(slots, identity)
        if all(slots[slot] is not None for slot in commit.LIVE_SLOTS):
            self._check_live(notes, live, durable)
        return self._claim(slots, durable, live)

    def _note(self, notes: Notebook, slot: int, message: str) -> None:
        notes.note("slot", self._name, self._size * slot, f"{NAMES[slot]}: {message}")

    def _check_void(self, notes: Notebook, slot: int, data: bytes) -> None:
        """Report a torn slot, or a valid one of another buffer."""
        if not any(data):
            if slot in commit.DURABLE_SLOTS:
                self._note(notes, slot, "a durable record is all zeros")
            return
        stored = CHECKSUM.unpack_from(data, len(data) - CHECKSUM.size)[0]
        computed = google_crc32c.value(data[: -CHECKSUM.size])
        if stored == computed:
            self._note(
                notes,
                slot,
                "the record is valid, but not of this buffer and of generation "
                f"{self._metadata.generation}, or its tail, head and limit are out of "
                "order",
            )
            return
        # Also beside a clean close: the next opening may have died at its first
        # store. So no torn slot by itself proves damage.
        notes.note(
            "torn",
            self._name,
            self._size * slot,
            f"{NAMES[slot]}: the checksum must be {stored:08x}, got {computed:08x}; a "
            "crash may leave this, the other slots are used, and the next writer "
            "rewrites it",
        )

    def _check_record(self, notes: Notebook, slot: int, record: Record) -> None:
        ring = self._metadata.ring
        if record.flags & ~KNOWN_FLAGS:
            message = f"flags must be at most {KNOWN_FLAGS}, got {record.flags}"
            self._note(notes, slot, message)
        if record.sequence < 1 or record.epoch < 1:
            self._note(
                notes,
                slot,
                f"sequence and epoch must be at least 1, got {record.sequence} and {record.epoch}",
            )
        for env_id in np.flatnonzero(record.cuts > record.heads)[:1].tolist():
            self._note(
                notes,
                slot,
                f"environment {env_id}: the cut must be at most the head, "
                f"{record.heads[env_id]}, got {record.cuts[env_id]}",
            )
        if slot in commit.LIVE_SLOTS:
            # A durable slot may give up rows that its own heads still count.
            firsts = np.maximum(record.tails, record.heads - ring.capacity)
            over = np.flatnonzero(record.limits - ring.slots > firsts)
            for env_id in over[:1].tolist():
                self._note(
                    notes,
                    slot,
                    f"environment {env_id}: the limit must be at most "
                    f"{firsts[env_id] + ring.slots}, got {record.limits[env_id]}, "
                    "which would overwrite rows alive",
                )

    def _check_order(self, notes: Notebook, slots: Slots) -> None:
        """Within one epoch positions grow with the sequence."""
        for pair in (commit.DURABLE_SLOTS, commit.LIVE_SLOTS):
            found = [(slots[slot], slot) for slot in pair]
            whole = [(r, slot) for r, slot in found if r is not None]
            whole.sort(key=lambda item: (item[0].epoch, item[0].sequence))
            for (older, _), (newer, slot) in pairwise(whole):
                self._check_growth(notes, older, newer, slot)

    def _check_growth(self, notes: Notebook, older: Record, newer: Record, slot: int) -> None:
        if older.epoch != newer.epoch:
            return
        if older.sequence == newer.sequence:
            if older.encode() != newer.encode():
                self._note(
                    notes,
                    slot,
                    f"sequence {newer.sequence} is the same as in another record of its epoch",
                )
            return
        columns = ["heads", "limits", "tails"]
        if older.heap_heads is not None:
            columns += ["heap_heads", "heap_tails"]
        for what in columns:
            before, after = getattr(older, what), getattr(newer, what)
            for env_id in np.flatnonzero(after < before)[:1].tolist():
                self._note(
                    notes,
                    slot,
                    f"environment {env_id}: {what} must not decrease, got "
                    f"{after[env_id]} after {before[env_id]}",
                )

    def _check_live(self, notes: Notebook, live: Record | None, durable: Record) -> None:
        if live is None or live.epoch != durable.epoch:
            return
        for env_id in np.flatnonzero(durable.heads > live.heads)[:1].tolist():
            self._note(
                notes,
                commit.LIVE_SLOTS[0],
                f"environment {env_id}: the published head must be at least the "
                f"committed one, {durable.heads[env_id]}, got {live.heads[env_id]}",
            )

    def _claim(self, slots: Slots, durable: Record, live: Record | None) -> Claim:
        """Return what is committed and alive; see `recovery.settle`."""
        ring = self._metadata.ring
        limits = commit.highest_limit(slots)
        newest = durable if live is None else live
        heads = np.maximum(newest.heads, durable.heads)
        tails = np.maximum(np.maximum(durable.tails, newest.tails), limits - ring.slots)
        firsts = np.maximum(tails, heads - ring.capacity)
        kept = replace(durable, heads=np.maximum(durable.heads, firsts))
        return Claim(firsts, kept.heads, np.maximum(heads, firsts), limits)
