"""Files that hold one array a column, ``[rows, *shape]``: npz, pt and safetensors.

They differ in what stands around the arrays. Where each array lies is known before the
first row is written, so every block goes straight to its place; what stands around
them, checksums included, is written last.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import (
    MAX_ROW_NBYTES,
    Block,
    Notes,
    Reader,
    Writer,
    default_rows,
)
from mmreplay.convert.description import ENV_ID, FLAGS, POSITION, Description
from mmreplay.convert.staging import Staging
from mmreplay.errors import CorruptError, FormatError
from mmreplay.files import File
from mmreplay.schema.dtypes import describe, storage_dtype

# Pieces that stay in the processor's caches between checksum and write.
PIECE_NBYTES = 256 << 10
COPY_NBYTES = 64 << 10

Sum = Callable[[memoryview, int], int]


def crc32(data: memoryview, before: int = 0) -> int:
    """The checksum of zip files, going on from one of earlier bytes."""
    return zlib.crc32(data, before)


def crc32c(data: memoryview, before: int = 0) -> int:
    """The checksum of safetensors files of ours, likewise."""
    # The library takes bytes only. Larger copies come fresh from the system each time,
    # and cost eight times what the checksum does.
    for first in range(0, len(data), COPY_NBYTES):
        before = google_crc32c.extend(before, bytes(data[first : first + COPY_NBYTES]))
    return before


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a column lies in a file that is being written.

    Attributes:
        offset: Of its first byte.
        row_nbytes: Bytes of one row.
        start: Checksum of what stands before it under the same checksum.
    """

    offset: int
    row_nbytes: int
    start: int = 0


class Plan(Protocol):
    """Where everything of a file that is to be written lies.

    Attributes:
        nbytes: Of the file.
    """

    nbytes: int

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """Where each column lies."""

    @property
    def sum(self) -> Sum:
        """What checks a column."""

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """What stands around the columns, as (offset, bytes), once sums are known."""


class ArrayWriter(Writer):
    """Writes the columns to their places; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, plan: Plan, overwrite: bool
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._plan = plan
        self._description = description
        self._sums = {name: piece.start for name, piece in plan.pieces.items()}
        self._done = 0
        self._staging = Staging(target, overwrite=overwrite)
        self._file: File | None = None
        try:
            self._file = self._staging.open(plan.nbytes)
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        if self._done + len(block) > self._description.rows:
            raise FormatError(
                f"got {self._done + len(block)} rows, expected the "
                f"{self._description.rows} described; the source changed meanwhile"
            )
        self._write(ENV_ID, block.env_ids)
        self._write(POSITION, block.positions)
        self._write(FLAGS, block.flags)
        for path in self._description.schema.paths:
            self._write(path, block.columns[path])
        self._done += len(block)

    def _write(self, name: str, column: NDArray[np.generic]) -> None:
        assert self._file is not None
        piece = self._plan.pieces[name]
        rows = max(1, PIECE_NBYTES // piece.row_nbytes)
        offset = piece.offset + self._done * piece.row_nbytes
        checksum = self._sums[name]
        for first in range(0, len(column), rows):
            # Packed fields come as strided views: made whole a piece at a time.
            part = np.ascontiguousarray(column[first : first + rows])
            data = part.reshape(-1).view(np.uint8).data
            checksum = self._plan.sum(data, checksum)
            self._file.pwrite(data, offset + first * piece.row_nbytes)
        self._sums[name] = checksum

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source was cut"
            )
        for offset, data in self._plan.around(self._sums):
            self._file.pwrite(data, offset)
        self._close()
        self.nbytes = self._staging.publish()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


class Stream(Protocol):
    """The bytes of one column, from its first on."""

    def read_into(self, view: memoryview) -> None:
        """Fill view with the next bytes."""

    def finish(self) -> None:
        """Check what was read, all of it, against its checksum."""


class Stored:
    """Bytes that lie in a file as they are."""

    def __init__(
        self,
        file: File,
        offset: int,
        what: str,
        sum: Sum | None = None,
        start: int = 0,
        expected: int | None = None,
    ) -> None:
        """Read from offset on, and compare with a checksum where one is expected."""
        self._file, self._offset, self._what = file, offset, what
        self._begin = offset
        self._sum = sum if expected is not None else None
        self._checksum, self._expected = start, expected

    def read_into(self, view: memoryview) -> None:
        """See `Stream.read_into`."""
        self._file.pread_into(view, self._offset)
        self._offset += len(view)
        if self._sum is not None:
            self._checksum = self._sum(view, self._checksum)

    def finish(self) -> None:
        """See `Stream.finish`."""
        if self._sum is not None and self._checksum != self._expected:
            raise mismatch(
                self._file.path, self._begin, self._what, self._checksum,
                self._expected or 0,
            )  # fmt: skip


def mismatch(
    path: Path, offset: int, what: str, got: int, expected: int
) -> CorruptError:
    """The error of a column whose checksum does not match."""
    return CorruptError(
        f"{path}: {what} at byte {offset} has checksum {got:08x}, expected "
        f"{expected:08x}; the file was damaged: restore it from a copy"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a file that is read.

    Attributes:
        dtype: Its name in `schema.dtypes`.
        stored: How the file keeps it, of any byte order.
        shape: ``[rows, *shape]``.
        open: Makes a stream of its bytes, from the first row on.
        offset: Of its bytes in the file, or None where they are compressed.
    """

    dtype: str
    stored: np.dtype[np.generic]
    shape: tuple[int, ...]
    open: Callable[[], Stream]
    offset: int | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        nbytes = self.stored.itemsize
        for axis in self.shape[1:]:
            nbytes *= axis
        return nbytes


class Scan:
    """Reads several columns side by side, block by block, into arrays used again."""

    def __init__(self, columns: Mapping[str, Column], rows: int, count: int) -> None:
        """Read count rows, in blocks of rows."""
        self._columns = columns
        self._rows, self._count = rows, count

    def blocks(self) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Per column ``[N, *shape]``, little-endian; good until the next."""
        streams = {name: column.open() for name, column in self._columns.items()}
        room = min(self._rows, self._count)
        held = {
            name: np.empty((room, *column.shape[1:]), column.stored)
            for name, column in self._columns.items()
        }
        for first in range(0, self._count, self._rows):
            size = min(self._rows, self._count - first)
            found: dict[str, NDArray[np.generic]] = {}
            for name, stream in streams.items():
                part = held[name][:size]
                if part.size:
                    stream.read_into(part.reshape(-1).view(np.uint8).data)
                found[name] = _native(part, self._columns[name])
            yield found
        for stream in streams.values():
            stream.finish()


def _native(array: NDArray[np.generic], column: Column) -> NDArray[np.generic]:
    wanted = storage_dtype(column.dtype)
    if wanted.kind == "b":
        # Any byte but 0 and 1 is no bool, and numpy would take it for one.
        bools: NDArray[np.generic] = array.view(np.uint8) != 0
        return bools
    return array if array.dtype == wanted else array.astype(wanted)


class ArrayReader(Reader):
    """Reads a file of ours; see `Reader`. Others' files: `plain.PlainReader`."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, Column],
        description: Description,
        notes: Notes | None = None,
    ) -> None:
        self.report = notes or Notes()
        self._file = file
        self._description = description
        self._columns = self._checked(columns)

    def _checked(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The columns that the description names, each as it says.

        Raises:
            FormatError: One is missing, or of another dtype, shape or length.
        """
        found = {}
        rows, path = self._description.rows, self._file.path
        for name, (dtype, shape) in self._description.columns.items():
            column = columns.get(name)
            want = (rows, *shape)
            if column is None:
                raise FormatError(
                    f"{path} lacks the array {name!r}, which its description names; "
                    "the file was edited"
                )
            stored = storage_dtype(column.dtype)
            if column.shape != want or stored != storage_dtype(dtype):
                raise FormatError(
                    f"{path}: array {name!r} is {describe(column.dtype, column.shape)}"
                    f", expected {describe(dtype, want)} as its description says; the "
                    "file was edited"
                )
            found[name] = column
        refuse_wide(self._description.row_nbytes, path)
        return found

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        for found in Scan(self._columns, rows, self._description.rows).blocks():
            env_ids = found.pop(ENV_ID).view(np.int64)
            positions = found.pop(POSITION).view(np.int64)
            yield Block(found, env_ids, positions, found.pop(FLAGS).view(np.uint8))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array, mapped read-only: no copy, whatever its size.

        Whoever shortens the file meanwhile ends this process, as with any mapping.
        """
        return mapped(self._file, self._columns)

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()


def mapped(file: File, columns: Mapping[str, Column]) -> dict[str, NDArray[np.generic]]:
    """Columns that lie in a file as they are, mapped read-only."""
    if not file.nbytes:
        return {}
    mapping = file.map_readonly()
    found = {}
    for name, column in columns.items():
        if column.offset is not None:
            count = column.shape[0] * (column.row_nbytes // column.stored.itemsize)
            flat = np.frombuffer(mapping, column.stored, count, column.offset)
            found[name] = flat.reshape(column.shape)
    return found


def refuse_wide(row_nbytes: int, path: Path) -> None:
    """Refuse rows that would not fit in memory, whatever a file says.

    Raises:
        FormatError: A row takes more than 256 MiB.
    """
    if row_nbytes > MAX_ROW_NBYTES:
        raise FormatError(
            f"{path} says {row_nbytes} bytes a row, expected at most {MAX_ROW_NBYTES}; "
            "rows are held whole: split the field"
        )
