"""Files that hold one array a column, ``[rows, *shape]``: npz, pt and safetensors.

The formats differ only in the bytes around the arrays. `ArrayReader` reads the arrays
block by block, all columns together. A field that varies takes two arrays: the items of
all values, one value after another, and where each begins.

`ArrayFile` writes them. A `FilePlan` gives the offset of every array before the first
row, so that each block is written where it belongs; the bytes around the arrays, with
the checksums, come last. Threads compute checksums and keep the device busy while the
caller makes the next rows; both release the interpreter's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.bulk_writer import open_output
from mmreplay.checksums import Sum
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    Block,
    Columns,
    Notes,
    Reader,
    default_rows,
    doubt_undescribed,
    read_ahead,
    refuse_wide,
)
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    OFFSETS,
    POSITION,
    RESERVED,
    VALUES,
    Description,
)
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.convert.values import check_lengths, check_values, refuse_large, split_by_bytes
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, undone_by
from mmreplay.process import thread_pool
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.dtypes import describe, storage_dtype

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype name and shape, rows first, by the name of an array."""


class ArrayReader(Reader):
    """Reads a file with a description; see `Reader`. Others: `PlainReader`."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, ArrayColumn],
        description: Description,
        notes: Notes | None = None,
    ) -> None:
        self.report = notes or Notes()
        self._file = file
        self._description = description
        self._schema = description.schema
        self._columns = self._checked(columns)

    def _checked(self, columns: Mapping[str, ArrayColumn]) -> dict[str, ArrayColumn]:
        """The columns of the description.

        Raises:
            FormatError: One is missing, or of another dtype, shape or length.
        """
        found = {}
        path = self._file.path
        # Of values only the file says how many there are: the offsets must agree.
        totals = {
            each: columns[each + VALUES].shape[0]
            for each in self._schema.varying
            if each + VALUES in columns and columns[each + VALUES].shape
        }
        totals = {each: totals.get(each, 0) for each in self._schema.varying}
        arrays = self._description.arrays_of(self._description.rows, totals)
        for name, (dtype, want) in arrays.items():
            column = columns.get(name)
            if column is None:
                raise FormatError(
                    f"{path} lacks the array {name!r}, which its description names. "
                    "The file was edited after it was written."
                )
            stored = storage_dtype(column.dtype)
            if column.shape != want or stored != storage_dtype(dtype):
                raise FormatError(
                    f"{path}: array {name!r} must be {describe(dtype, want)} as its "
                    f"description says, got {describe(column.dtype, column.shape)}. "
                    "The file was edited after it was written."
                )
            found[name] = column
        for name in columns.keys() - found.keys():
            doubt_undescribed(self.report, name)
        refuse_wide(self._description.row_nbytes, path)
        return found

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        fixed = {name: self._columns[name] for name in self._description.fixed_columns}
        return self._scan(Scan(fixed, rows, self._description.rows, self._varying()))

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: only three columns are read, and checked."""
        columns = {name: self._columns[name] for name in RESERVED}
        return self._scan(Scan(columns, BLOCK_NBYTES // 32, self._description.rows))

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`: no values are read."""
        columns = {name: self._columns[name] for name in RESERVED}
        varying = self._varying()
        rows = BLOCK_NBYTES // 32 // (1 + len(varying))
        return self._scan(Scan(columns, rows, self._description.rows, varying, lengths_only=True))

    def _varying(self) -> dict[str, VaryingColumn]:
        return {
            path: VaryingColumn(
                self._schema.fields[path],
                self._columns[path + OFFSETS],
                self._columns[path + VALUES],
                f"{self._file.path}: field {path!r}",
            )
            for path in self._schema.varying
        }

    def _scan(self, scan: Scan) -> Iterator[Block]:
        for found in scan.blocks():
            env_ids = found.pop(ENV_ID).view(np.int64)
            positions = found.pop(POSITION).view(np.int64)
            yield Block(found, env_ids, positions, found.pop(FLAGS).view(np.uint8))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array, mapped read-only: no copy, whatever its size.

        If another process shortens the file, access to the arrays ends this process,
        as with any mapping.
        """
        return mapped(self._file, self._columns)

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()


def read_description(stream: Stream, nbytes: int, what: str) -> Description:
    """The description that a stream holds, of all its bytes; checked.

    Args:
        stream: Its bytes, from the first on.
        nbytes: How many.
        what: Its file and name in errors.

    Raises:
        FormatError: It is no description.
        CorruptError: It is damaged.
    """
    data = bytearray(nbytes)
    stream.read_into(memoryview(data))
    stream.finish()
    return Description.from_bytes(bytes(data), what)


@dataclass(frozen=True, slots=True)
class VaryingColumn:
    """The two arrays of a field that varies.

    Attributes:
        field: The field.
        offsets: int64 ``[rows + 1]``, where each row's value begins in the values.
        values: ``[total, *inner]``.
        what: File and field, for errors.
    """

    field: Field
    offsets: ArrayColumn
    values: ArrayColumn
    what: str


class Scan:
    """Reads several columns together, block by block, into arrays that are reused."""

    def __init__(
        self,
        columns: Mapping[str, ArrayColumn],
        rows: int,
        count: int,
        varying: Mapping[str, VaryingColumn] | None = None,
        *,
        lengths_only: bool = False,
    ) -> None:
        """Read count rows, in blocks of rows.

        Args:
            columns: Of fields that do not vary.
            rows: Of a block, at most.
            count: Rows of every column.
            varying: By path, fields that vary. Blocks are cut by their bytes, too.
            lengths_only: Read the lengths of values in place of them.
        """
        self._columns = columns
        self._rows, self._count = rows, count
        self._varying = varying or {}
        self._lengths_only = lengths_only

    def blocks(self) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Per column ``[N, *shape]``, little-endian; valid until the next block.

        Of a field that varies `Ragged`, or int64 ``[N]`` where lengths are read.
        """
        return read_ahead(self._read())

    def _read(self) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Read a block; its arrays are valid until the block after the next."""
        streams = {name: column.open() for name, column in self._columns.items()}
        varying = {
            path: ValueStream(each, values=not self._lengths_only)
            for path, each in self._varying.items()
        }
        block_rows = min(self._rows, self._count)
        # Two sets of arrays: one is used while the other is read.
        arrays = [
            {
                name: np.empty((block_rows, *column.shape[1:]), column.stored)
                for name, column in self._columns.items()
            }
            for _ in range(min(2, -(-self._count // self._rows)))
        ]
        for first in range(0, self._count, self._rows):
            size = min(self._rows, self._count - first)
            arrays.reverse()
            found: dict[str, NDArray[np.generic]] = {}
            for name, stream in streams.items():
                array = arrays[0][name][:size]
                if array.size:
                    stream.read_into(array.reshape(-1).view(np.uint8).data)
                found[name] = native(array, self._columns[name].dtype)
            if not varying:
                yield found
                continue
            lengths = {path: each.lengths(first, size) for path, each in varying.items()}
            if self._lengths_only:
                yield found | lengths
                continue
            yield from self._with_values(found, lengths, varying, first)
        for stream in streams.values():
            stream.finish()
        for each in varying.values():
            each.finish()

    def _with_values(
        self,
        columns: dict[str, NDArray[np.generic]],
        lengths: dict[str, NDArray[np.int64]],
        varying: Mapping[str, ValueStream],
        first: int,
    ) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Cut rows by the bytes of their values, which are read now."""
        nbytes = np.sum(
            [each * self._varying[path].field.inner_nbytes for path, each in lengths.items()],
            axis=0,
        )
        for begin, stop in split_by_bytes(nbytes):
            where = f"{next(iter(self._varying.values())).what}, row {first + begin}"
            refuse_large(int(nbytes[begin]), where)
            cut = {name: column[begin:stop] for name, column in columns.items()}
            for path, each in varying.items():
                values: object = each.read(lengths[path][begin:stop], first + begin)
                cut[path] = values  # type: ignore[assignment]  # of fields that vary
            yield cut


class ValueStream:
    """Reads the values of a field that varies, row after row."""

    def __init__(self, column: VaryingColumn, *, values: bool) -> None:
        """Read a column; values only where they are asked for."""
        self._column = column
        self._offsets = column.offsets.open()
        self._values = column.values.open() if values else None
        self._total = column.values.shape[0]
        self._end = int(self._read_offsets(1)[0])
        if self._end:
            raise CorruptError(
                f"{column.what}: offsets must begin with 0, got {self._end}. The file "
                "was edited or damaged: restore it from a copy."
            )

    def _read_offsets(self, count: int) -> NDArray[np.int64]:
        array = np.empty(count, self._column.offsets.stored)
        if count:
            self._offsets.read_into(array.view(np.uint8).data)
        return native(array, "int64").view(np.int64)

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Items of the next values, int64 ``[count]``, all within the array.

        Args:
            first: Number of the first of these rows, for errors.
            count: Rows.

        Raises:
            CorruptError: Offsets fall, or lead beyond the values.
        """
        ends = self._read_offsets(count)
        before = np.concatenate([[self._end], ends[:-1]])
        wrong = np.flatnonzero((ends < before) | (ends > self._total))
        if len(wrong):
            row = int(wrong[0])
            raise CorruptError(
                f"{self._column.what}, row {first + row}: offsets must rise to at most "
                f"{self._total}, the number of items, got {ends[row]} after "
                f"{before[row]}. The file was edited or damaged: restore it from a "
                "copy."
            )
        lengths: NDArray[np.int64] = ends - before
        check_lengths(lengths, self._column.field, self._column.what, first)
        self._end = int(ends[-1]) if count else self._end
        return lengths

    def read(self, lengths: NDArray[np.int64], first: int) -> Ragged:
        """The next values.

        Args:
            lengths: int64 ``[N]``, of `lengths`.
            first: Number of the first of these rows, for errors.
        """
        assert self._values is not None
        field, column = self._column.field, self._column.values
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        items = np.empty((int(offsets[-1]), *column.shape[1:]), column.stored)
        if items.size:
            self._values.read_into(items.reshape(-1).view(np.uint8).data)
        values = Ragged(native(items, column.dtype), offsets)
        check_values(values, field, self._column.what, first)
        return values

    def finish(self) -> None:
        """Check that all was read, and its checksums."""
        if self._end != self._total:
            raise CorruptError(
                f"{self._column.what}: the last offset must be {self._total}, the "
                f"number of items, got {self._end}. The file was edited or damaged: "
                "restore it from a copy."
            )
        self._offsets.finish()
        if self._values is not None:
            self._values.finish()


def native(array: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Stored values in the dtype of a field."""
    wanted = storage_dtype(dtype)
    if wanted.kind == "b":
        # Bytes other than 0 and 1 are no bools, but numpy would accept them.
        bools: NDArray[np.generic] = array.view(np.uint8) != 0
        return bools
    return array if array.dtype == wanted else array.astype(wanted)


def mapped(file: File, columns: Mapping[str, ArrayColumn]) -> dict[str, NDArray[np.generic]]:
    """Columns that are stored unpacked, mapped read-only."""
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


class Stream(Protocol):
    """The bytes of one column, from its first on."""

    def read_into(self, view: memoryview) -> None:
        """Fill view with the next bytes."""

    def finish(self) -> None:
        """Check what was read, all of it, against its checksum."""


class Stored:
    """Bytes that are stored in a file unpacked."""

    def __init__(
        self,
        file: File,
        offset: int,
        what: str,
        sum: Sum | None = None,
        start: int = 0,
        expected: int | None = None,
    ) -> None:
        """Read from offset on, and check the sum if one is expected."""
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
                self._file.path, self._begin, self._what, self._checksum, self._expected or 0
            )


def mismatch(path: Path, offset: int, what: str, got: int, expected: int) -> CorruptError:
    """Return the error for a column whose checksum does not match."""
    return CorruptError(
        f"{path}: {what} at byte {offset} must have checksum {expected:08x}, got "
        f"{got:08x}. The file is damaged: restore it from a copy."
    )


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """One array of a file that is read.

    Attributes:
        dtype: Its name in `schema.dtypes`.
        stored: The file's dtype, of any byte order.
        shape: ``[rows, *shape]``.
        open: Makes a stream of its bytes, from the first row on.
        offset: Of its bytes in the file, or None if they are compressed, or lie in
            another order.
    """

    dtype: str
    stored: np.dtype[np.generic]
    shape: tuple[int, ...]
    open: Callable[[], Stream]
    offset: int | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:], start=self.stored.itemsize)


class ArrayWriter(StagedWriter):
    """Writes one file by a plan; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, plan: FilePlan, overwrite: bool
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._file: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite)
        with undone_by(self.abort):
            file = self._staging.open(plan.nbytes)
            varying = description.schema.varying
            self._file = ArrayFile(file, plan, description.rows, varying)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        assert self._file is not None
        self._file.write(block)

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        self._file.finish()
        self.nbytes = self._staging.publish()


class ArrayFile:
    """Writes the columns of one file, each to its place, row after row."""

    def __init__(self, file: File, plan: FilePlan, rows: int, varying: Sequence[str] = ()) -> None:
        """Write so many rows into an open file, which is closed with this object.

        Args:
            file: Of the size that the plan has.
            plan: Of its arrays.
            rows: Of every column.
            varying: Paths of fields that vary.

        Raises:
            FullError: No space is left for so large a file; it is closed.
        """
        with undone_by(file.close):
            self._output = open_output(file, len(plan.spans))
        self._file = file
        self._plan = plan
        self._rows = rows
        self._done = 0
        self._arrays = BlockArrays(varying)
        # Of each array the rows, or items, that are written.
        self._written = dict.fromkeys(plan.spans, 0)
        self._sums = {name: span.start for name, span in plan.spans.items()}
        self._pool = thread_pool(2, "mmreplay-export")
        if varying:
            with undone_by(self.close):
                self._write(self._arrays.begin())

    @property
    def rows_left(self) -> int:
        """Rows that are still to be written."""
        return self._rows - self._done

    def write(self, block: Block) -> None:
        """Write the next rows; the block's arrays may change after this call."""
        if len(block) > self.rows_left:
            raise FormatError(
                f"got {self._done + len(block)} rows, but the source describes "
                f"{self._rows}. The source changed during the conversion."
            )
        self._write(self._arrays.split(block, self._plan.spans))
        self._done += len(block)

    def _write(self, columns: Columns) -> None:
        """Write the next rows, or items, of arrays."""
        for name, column in columns.items():
            total = self._plan.spans[name].rows
            if total is not None and self._written[name] + len(column) > total:
                raise FormatError(
                    f"array {name!r} must have {total} items, as was measured, got "
                    "more. The source changed during the conversion."
                )
        packing = {
            name: self._pool.submit(bytes_of, column)
            for name, column in columns.items()
            if not column.flags.c_contiguous
        }
        jobs = {}
        try:
            for name, column in columns.items():
                span = self._plan.spans[name]
                job = packing.get(name)
                data = job.result() if job is not None else bytes_of(column)
                jobs[name] = self._pool.submit(self._plan.sum, data, self._sums[name])
                offset = span.offset + self._written[name] * span.row_nbytes
                self._output.write(data, offset)
                self._written[name] += len(column)
        finally:
            # After this call, even a failed one, no thread reads the block.
            wait(packing.values())
            wait(jobs.values())
        self._sums |= {name: job.result() for name, job in jobs.items()}

    def finish(self) -> None:
        """Write the bytes around the columns, and close the file, not yet synced."""
        if self.rows_left:
            raise FormatError(
                f"got {self._done} rows, but the source describes {self._rows}. The "
                "source is truncated."
            )
        for name, span in self._plan.spans.items():
            if span.rows is not None and self._written[name] != span.rows:
                raise FormatError(
                    f"array {name!r} must have {span.rows} items, as was measured, got "
                    f"{self._written[name]}. The source changed during the conversion."
                )
        self._output.finish()
        for offset, data in self._plan.around(self._sums):
            self._file.pwrite(data, offset)
        self.close()

    def close(self) -> None:
        """Stop threads and close the file; a second call does nothing."""
        self._pool.shutdown()
        self._output.close()
        self._file.close()


class BlockArrays:
    """Takes blocks apart into the arrays of a file."""

    def __init__(self, varying: Sequence[str]) -> None:
        """Begin with the first row.

        Args:
            varying: Paths of the fields that are two arrays.
        """
        self._ends = dict.fromkeys(varying, 0)

    def begin(self) -> dict[str, NDArray[np.generic]]:
        """What stands before the first row: the first offset of each field."""
        return {path + OFFSETS: np.zeros(1, np.int64) for path in self._ends}

    def split(self, block: Block, names: Iterable[str]) -> dict[str, NDArray[np.generic]]:
        """The next rows of each array.

        Args:
            block: The next rows.
            names: Of the arrays, which come in this order.
        """
        found: dict[str, NDArray[np.generic]] = {}
        for path, end in self._ends.items():
            values = block.values(path)
            found[path + OFFSETS] = values.offsets[1:] + end
            found[path + VALUES] = values.values
            self._ends[path] = end + len(values.values)
        return {name: found[name] if name in found else block.column(name) for name in names}


class FilePlan(Protocol):
    """The layout of a file that is written.

    Attributes:
        nbytes: Of the file.
    """

    nbytes: int

    @property
    def spans(self) -> Mapping[str, ArraySpan]:
        """The place of each column."""

    @property
    def sum(self) -> Sum:
        """The checksum of a column."""

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """The bytes around the columns, as (offset, bytes), given all checksums."""


@dataclass(frozen=True, slots=True)
class ArraySpan:
    """The place of a column in a file that is written.

    Attributes:
        offset: Of its first byte.
        row_nbytes: Bytes of one row.
        start: Checksum of the bytes before it that its checksum covers as well.
        rows: Rows, or items, that it has place for.
    """

    offset: int
    row_nbytes: int
    start: int = 0
    rows: int | None = None


def bytes_of(column: NDArray[np.generic]) -> memoryview:
    """The bytes of a column; packed fields come as strided views, and are copied."""
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
