"""npz with deflated members, written in one pass although nobody knows their sizes.

Each member gets room for the worst case in a sparse file; when all rows are in, members
are moved together, which writes the packed bytes once more, and the file is cut.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from mmreplay.convert import npy
from mmreplay.convert.ahead import Threads
from mmreplay.convert.array_file import bytes_of
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import MEMBER, Description
from mmreplay.convert.staging import Staging
from mmreplay.convert.zip_layout import Layout
from mmreplay.errors import FormatError
from mmreplay.files import File
from mmreplay.schema.dtypes import storage_dtype
from mmreplay.sums import crc32

ENDING = ".npy"
LEVEL = 6
"""Of deflate, where none is given."""
# Deflate is made to flush after so many bytes: it then packs nothing by more than 790
# times, where readers, ours too, refuse what claims 1,000 as a bomb.
FLUSH_NBYTES = 64 << 10
COPY_NBYTES = 1 << 20


def room(nbytes: int) -> int:
    """Bytes that packing takes at most; measured: 20 for each 64 KiB of noise."""
    return nbytes + nbytes // 1024 + 4096


class Packer:
    """One member, packed to its place as its bytes come.

    Attributes:
        name: Of the member.
        nbytes: Bytes it holds so far.
        packed: Bytes it takes so far.
        crc: CRC-32 of what it holds.
        offset: Where it begins for now.
    """

    def __init__(self, name: str, file: File, offset: int, level: int) -> None:
        self.name = name
        self.nbytes = self.packed = self.crc = 0
        self.offset = offset
        self._file = file
        self._zip = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._since = 0

    def feed(self, data: memoryview) -> None:
        """Pack the next bytes."""
        self.crc = crc32(data, self.crc)
        self.nbytes += len(data)
        while data:
            size = min(len(data), FLUSH_NBYTES - self._since)
            self._put(self._zip.compress(data[:size]))
            self._since += size
            if self._since == FLUSH_NBYTES:
                self._put(self._zip.flush(zlib.Z_SYNC_FLUSH))
                self._since = 0
            data = data[size:]

    def finish(self) -> None:
        """Pack what is held back."""
        self._put(self._zip.flush())

    def _put(self, data: bytes) -> None:
        if data:
            self._file.pwrite(data, self.offset + self.packed)
            self.packed += len(data)

    def move(self, offset: int) -> None:
        """Move towards the beginning of the file."""
        for first in range(0, self.packed, COPY_NBYTES):
            size = min(COPY_NBYTES, self.packed - first)
            data = self._file.pread(size, self.offset + first)
            self._file.pwrite(data, offset + first)
        self.offset = offset


class PackedWriter(Writer):
    """Writes such a file; see `Writer`. Columns are packed by two threads."""

    def __init__(
        self, target: Path, description: Description, level: int, overwrite: bool
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._done = 0
        heads = _heads(description)
        whole = Layout()
        for name, (head, nbytes) in heads.items():
            whole.add(name + ENDING, room(len(head) + nbytes))
        self._pool = Threads(2, "mmreplay-export")
        self._file: File | None = None
        self._staging = Staging(target, overwrite=overwrite)
        try:
            self._file = file = self._staging.open(whole.nbytes)
            self._packers = {
                name: Packer(member.name, file, member.offset, level)
                for name, member in zip(heads, whole.members, strict=True)
            }
            for name, (head, _) in heads.items():
                self._packers[name].feed(memoryview(head))
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        self._done += len(block)
        jobs = [
            self._pool.submit(self._packers[name].feed, bytes_of(block.column(name)))
            for name in self._description.columns
        ]
        # All of them, whatever fails: nobody looks at the block after this call.
        errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None:
                raise error

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source changed meanwhile"
            )
        final = Layout()
        for packer in self._packers.values():
            packer.finish()
            member = final.add(packer.name, packer.nbytes, packer.packed)
            packer.move(member.offset)
        sums = {packer.name: packer.crc for packer in self._packers.values()}
        for offset, data in final.around(sums):
            self._file.pwrite(data, offset)
        self._file.resize(final.nbytes)
        self._close()
        self.nbytes = self._staging.publish()

    def _close(self) -> None:
        self._pool.shutdown()
        if self._file is not None:
            self._file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


def _heads(description: Description) -> dict[str, tuple[bytes, int]]:
    """What each member begins with, and the bytes of rows that follow."""
    told = description.to_bytes()
    found = {MEMBER: (npy.encode(np.dtype("u1"), (len(told),)) + told, 0)}
    for name, (dtype, shape) in description.columns.items():
        stored = storage_dtype(dtype)
        row_nbytes = stored.itemsize * int(np.prod(shape, dtype=object))
        head = npy.encode(stored, (description.rows, *shape))
        found[name] = (head, description.rows * row_nbytes)
    return found
