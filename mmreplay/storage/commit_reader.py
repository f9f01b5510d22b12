"""Heads, limits and tails as a reader follows them, in any process."""

from __future__ import annotations

import struct
import time
from pathlib import Path

from mmreplay.errors import StarvedError
from mmreplay.files import File
from mmreplay.format import commit
from mmreplay.format.commit import Identity, Record
from mmreplay.storage.ledger import BOTH_LIVE

PATIENCE_S = 2.0


class CommitReader:
    """A reader's view of a COMMIT file that somebody may be writing.

    Never goes back: a lower sequence than one seen is not accepted.
    """

    def __init__(self, file: File, identity: Identity, start: Record) -> None:
        self._file = file
        self._identity = identity
        self._size = commit.slot_nbytes(start.num_envs)
        self._mapping = file.map_readonly()
        self._num_envs = start.num_envs
        # The sequence numbers of both live slots, which lie side by side.
        self._numbers = struct.Struct(f"<Q{self._size - commit.SEQUENCE.size}xQ")
        self._first = self._size * commit.LIVE_SLOTS[0] + commit.SEQUENCE_OFFSET
        self.cut = False
        self.cuts, self.cut_epoch = start.cuts, start.cut_epoch
        self._take(start)

    @property
    def file(self) -> File:
        """COMMIT."""
        return self._file

    def _take(self, record: Record) -> None:
        self.sequence, self._epoch = record.sequence, record.epoch
        self.heads, self.limits, self.tails = record.heads, record.limits, record.tails
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
            deadline = deadline or time.monotonic() + PATIENCE_S
            record = self._read(commit.LIVE_SLOTS[other > one])
            if record is not None:
                return self._accept(record)
            if self._both_torn():
                return False
            if time.monotonic() > deadline:
                raise starved(self._file.path)

    def _accept(self, record: Record) -> bool:
        if record.sequence <= self.sequence or not self._identity.trusts(record):
            return False
        if record.cut_epoch > self._epoch:
            # What is known here stays as it was, for whoever still looks.
            self.cut = self.moved = True
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

    def _both_torn(self) -> bool:
        """Tell that nobody publishes: a writer always leaves one slot whole.

        A power cut may tear both, and they stay so until the next writable open.
        """
        found = [self._bytes(slot) for slot in commit.LIVE_SLOTS]
        torn = all(self._decode(data) is None for data in found)
        return torn and found == [self._bytes(slot) for slot in commit.LIVE_SLOTS]

    def _decode(self, data: bytes) -> Record | None:
        return commit.decode(data, self._identity.uuid, self._num_envs)

    def _bytes(self, slot: int) -> bytes:
        return self._mapping[self._size * slot : self._size * (slot + 1)]

    def close(self) -> None:
        """Give the file back; the mapping's few pages stay for threads that look."""
        self._file.close()


def starved(path: Path) -> StarvedError:
    """The error for live slots that stay torn."""
    return StarvedError(
        f"{path}: got no whole record in {PATIENCE_S:g} s, expected one in "
        "microseconds; the file is damaged: close the writer, and open the buffer "
        "with mode='r+', which goes on from the last commit"
    )
