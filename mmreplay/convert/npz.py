"""npz: a zip of npy arrays, one a column, stored so that they can be mapped.

``numpy.load(path, allow_pickle=False)`` reads it, beyond 4 GiB too. bfloat16 fields are
uint16 there; the description in the member ``mmreplay.json`` names them.

Members can be deflated instead. Such a file is written in one pass, although the packed
sizes are not known before: each member gets space for the worst case in a sparse file.
When all rows are in, members are moved together, which writes the packed bytes once
more, and the file is truncated.

npy headers are parsed without numpy, whose parser evaluates a Python literal and lets
its errors through.
"""

from __future__ import annotations

import ast
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32
from mmreplay.convert import registry, zip_file
from mmreplay.convert.array_file import (
    ArrayColumn,
    ArrayReader,
    ArraySpan,
    ArrayWriter,
    BlockArrays,
    Kinds,
    Stored,
    Stream,
    bytes_of,
    read_description,
)
from mmreplay.convert.base import BLOCK_NBYTES, MAX_ROW_NBYTES, Block, Notes, Reader, Writer
from mmreplay.convert.description import MAX_NBYTES, MEMBER, Description
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.convert.undescribed import (
    POSITION_COLUMNS,
    PlainReader,
    in_place,
    needless_autoreset,
    no_integers,
)
from mmreplay.convert.zip_file import ALIGNMENT, Entry, ZipLayout
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, SchemaError, undone_by
from mmreplay.format.metadata import Autoreset
from mmreplay.process import thread_pool
from mmreplay.schema.dtypes import array_nbytes, canonical_name, storage_dtype
from mmreplay.schema.naming import left_out

MAGIC = b"\x93NUMPY"
MAX_HEADER_NBYTES = 16 << 10
MAX_AXES = 64
MAX_AXIS = 1 << 48
ENDING = ".npy"
MAX_UNPACKED_NBYTES = MAX_ROW_NBYTES
"""Of packed arrays in Fortran order, which are unpacked as a whole."""
LEVEL = 6
"""Of deflate by default."""
FLUSH_NBYTES = 64 << 10
"""Deflate flushes after so many bytes: it then packs nothing by more than 790 times,
while readers, ours too, refuse a ratio of 1,000 as a bomb."""


def open_reader(
    path: Path,
    *,
    allow_expansion: bool = False,
    layout: str | None = None,
    size: int | None = None,
    cursor: int | None = None,
    autoreset: Autoreset | None = None,
) -> Reader:
    """Open an npz file as a source, by mmreplay or others.

    Args:
        path: The file.
        allow_expansion: Unpack members to more than 1,000 times their size.
        layout: ``"skrl"`` for a memory of skrl or rofunc; the default if the file
            has a name of theirs.
        size: Written steps of such a memory, if its NaNs do not show them.
        cursor: The oldest step of such a memory, if it is full.
        autoreset: Of rows with positions and without a description, which may not say
            it: ``"next_step"``, ``"same_step"`` or ``"disabled"``.

    Raises:
        FormatError: It is no such file.
        CorruptError: It is damaged.
    """
    other = registry.find_layout("npz", layout, path)
    if other is not None:
        if autoreset is not None:
            raise needless_autoreset(path, autoreset)
        return other.open_reader(
            "npz", path, size=size, cursor=cursor, allow_expansion=allow_expansion
        )
    registry.refuse_layout_options("npz", size=size, cursor=cursor)
    file = File.open(path, None)
    with undone_by(file.close):
        notes = Notes()
        columns, member = read_columns(file, notes, allow_expansion)
        if member is None:
            return in_place(PlainReader(file, columns, notes, autoreset=autoreset))
        if autoreset is not None:
            raise needless_autoreset(path, autoreset)
        return ArrayReader(file, columns, _description(file, member), notes)


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    compression: str | None = None,
    compression_level: int | None = None,
    layout: str | None = None,
) -> Writer:
    """Make an npz file as a target.

    Args:
        target: The file.
        description: Of the rows.
        overwrite: Replace an existing file.
        compression: ``"deflate"``, or None for members that can be mapped.
        compression_level: Of deflate, from 1, the fastest, to 9; 6 by default.
        layout: ``"skrl"`` for a memory of skrl or rofunc.

    Raises:
        SchemaError: Compression, its level or layout is none of these, or the layout
            cannot hold a field.
    """
    other = registry.find_layout("npz", layout)
    _check(compression, compression_level, layout)
    if other is not None:
        return other.open_writer("npz", target, description, overwrite=overwrite)
    if compression is not None:
        level = LEVEL if compression_level is None else compression_level
        return PackedWriter(target, description, level, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def planned(
    description: Description,
    *,
    compression: str | None = None,
    compression_level: int | None = None,
    layout: str | None = None,
) -> int | None:
    """Bytes of the file, if it is not compressed; see `registry.planned`."""
    other = registry.find_layout("npz", layout)
    _check(compression, compression_level, layout)
    if other is not None:
        other.planned("npz", description)
    return None if compression or layout else _plan(description).nbytes


def _check(compression: str | None, level: int | None, layout: str | None) -> None:
    if layout is not None and compression is not None:
        raise SchemaError(
            f"compression must be None with layout={layout!r}, got {compression!r}. "
            "Leave one of them out."
        )
    if compression not in (None, "deflate"):
        raise SchemaError(
            f"compression must be 'deflate' or None, got {compression!r}. Leave it out."
        )
    if level is None:
        return
    if type(level) is not int or not 1 <= level <= 9:
        raise SchemaError(
            f"compression_level must be an integer in [1, 9], got {level!r}. Leave it "
            f"out for {LEVEL}."
        )
    if compression is None:
        raise SchemaError(
            f"compression_level must be None without compression, got {level!r}. Pass "
            "compression='deflate' as well, or leave it out."
        )


def read_columns(
    file: File, notes: Notes, allow_expansion: bool
) -> tuple[dict[str, ArrayColumn], Entry | None]:
    """The arrays, and the member of the description, if there is one."""
    columns: dict[str, ArrayColumn] = {}
    entries = zip_file.parse(file)
    free_nbytes = MAX_UNPACKED_NBYTES
    for name, entry in entries.items():
        zip_file.refuse_bomb(file, entry, allow_expansion)
        if name != MEMBER + ENDING:
            column = _column(file, entry, notes, free_nbytes)
            if column is not None:
                columns[name.removesuffix(ENDING)] = column
                if isinstance(column.open, ColumnsFirst) and column.open.unpacks:
                    free_nbytes -= entry.nbytes
    return columns, entries.get(MEMBER + ENDING)


def _column(file: File, entry: Entry, notes: Notes, free_nbytes: int) -> ArrayColumn | None:
    """The array of a member, or None if it can be no field.

    Args:
        file: Open for reading.
        entry: The member.
        notes: Receives what is left out.
        free_nbytes: Bytes that packed arrays in Fortran order may still take in memory.
    """
    if not entry.name.endswith(ENDING):
        notes.note(f"member {entry.name!r} is no array, and was left out")
        return None
    header, name = _header(file, entry), entry.name.removesuffix(ENDING)
    try:
        dtype = canonical_name(header.dtype)
    except SchemaError:
        if name in POSITION_COLUMNS:
            raise no_integers(name, str(header.dtype)) from None
        problem = f"array {entry.name!r} of {header.dtype} cannot be a field"
        note = f"{problem}, and was left out"
        notes.doubt(note) if header.shape else left_out(notes, name, note)
        return None
    stored = entry.method == zip_file.STORED
    if header.columns_first and len(header.shape) > 1:
        if not stored and entry.nbytes > free_nbytes:
            notes.doubt(
                f"array {entry.name!r} was left out: packed arrays in Fortran order "
                f"may take {MAX_UNPACKED_NBYTES} bytes together; save "
                "numpy.ascontiguousarray of it"
            )
            return None
        rows = ColumnsFirst(file, entry, header)
        return ArrayColumn(dtype, header.dtype, header.shape, rows)
    return ArrayColumn(
        dtype,
        header.dtype,
        header.shape,
        partial(_open, file, entry, header.nbytes),
        entry.offset + header.nbytes if stored else None,
    )


def _description(file: File, entry: Entry) -> Description:
    header = _header(file, entry)
    if header.dtype != np.uint8 or header.data_nbytes > MAX_NBYTES:
        raise FormatError(
            f"{file.path}: member {entry.name!r} must be at most {MAX_NBYTES} bytes of "
            f"JSON, got {header.dtype}{list(header.shape)}."
        )
    stream = _open(file, entry, header.nbytes)
    return read_description(stream, header.data_nbytes, f"{file.path}: {MEMBER}")


def _header(file: File, entry: Entry) -> NpyHeader:
    what = f"{file.path}: member {entry.name!r} at byte {entry.offset}"
    if entry.nbytes < 12:
        raise FormatError(f"{what} must be an npy array, got {entry.nbytes} bytes.")
    stream = _stream(file, entry)
    head = bytearray(12)
    stream.read_into(memoryview(head))
    total = prefix_nbytes(bytes(head), what)
    if total > entry.nbytes or total < 12:
        raise CorruptError(
            f"{what} must begin with a header of {total} bytes, got {entry.nbytes} "
            "bytes in all. The file is truncated or damaged."
        )
    rest = bytearray(total - 12)
    stream.read_into(memoryview(rest))
    header = parse(bytes(head + rest), what)
    if header.nbytes + header.data_nbytes != entry.nbytes:
        raise CorruptError(
            f"{what} must have {header.data_nbytes} bytes of data for "
            f"{header.dtype}{list(header.shape)}, got {entry.nbytes - header.nbytes}. "
            "The file is truncated or damaged."
        )
    return header


def _open(file: File, entry: Entry, skip: int) -> Stream:
    """A stream of an array's data; its checksum covers the header as well."""
    stream = _stream(file, entry)
    stream.read_into(memoryview(bytearray(skip)))
    return stream


def _stream(file: File, entry: Entry) -> Stream:
    if entry.method == zip_file.DEFLATED:
        return zip_file.Deflated(file, entry)
    what = f"member {entry.name!r}"
    return Stored(file, entry.offset, what, crc32, 0, entry.crc)


class ColumnsFirst:
    """Makes streams of the rows of an array in Fortran order, as if it were in C order.

    Its bytes lie column after column, so that rows are gathered from all over it. The
    checksum is compared before the first row is read, and packed bytes are unpacked
    into memory.

    Attributes:
        unpacks: The member is packed.
    """

    def __init__(self, file: File, entry: Entry, header: NpyHeader) -> None:
        self._file, self._entry, self._header = file, entry, header
        self.unpacks = entry.method != zip_file.STORED
        self._unpacked: bytearray | None = None
        self._checked = False

    def __call__(self) -> Stream:
        """See `ArrayColumn.open`."""
        if not self._checked:
            self._check()
        return RowsOfColumns(self.pread_into, self._header)

    def _check(self) -> None:
        nbytes = self._header.data_nbytes
        stream = _open(self._file, self._entry, self._header.nbytes)
        kept = bytearray(nbytes if self.unpacks else min(nbytes, BLOCK_NBYTES))
        view = memoryview(kept)
        for first in range(0, nbytes, BLOCK_NBYTES):
            size = min(BLOCK_NBYTES, nbytes - first)
            begin = first if self.unpacks else 0
            stream.read_into(view[begin : begin + size])
        stream.finish()
        self._unpacked = kept if self.unpacks else None
        self._checked = True

    def pread_into(self, view: memoryview, offset: int) -> None:
        """Read bytes of the array from an offset on."""
        if self._unpacked is not None:
            view[:] = memoryview(self._unpacked)[offset : offset + len(view)]
            return
        begin = self._entry.offset + self._header.nbytes
        self._file.pread_into(view, begin + offset)


class RowsOfColumns(Stream):
    """Bytes in C order of an array that lies in Fortran order; see `Stream`."""

    def __init__(self, pread_into: Callable[[memoryview, int], None], header: NpyHeader) -> None:
        self._pread_into, self._at = pread_into, 0
        self._dtype, self._shape = header.dtype, header.shape
        self._count = math.prod(header.shape[1:])

    def read_into(self, view: memoryview) -> None:
        """See `Stream.read_into`."""
        row_nbytes = self._count * self._dtype.itemsize
        size = max(1, BLOCK_NBYTES // row_nbytes)
        while view:
            first, skipped = divmod(self._at, row_nbytes)
            rows = min(size, -(-(skipped + len(view)) // row_nbytes))
            data = self._rows(first, rows).reshape(-1).view(np.uint8).data
            part = data[skipped : skipped + len(view)]
            view[: len(part)] = part
            self._at += len(part)
            view = view[len(part) :]

    def _rows(self, first: int, rows: int) -> NDArray[np.generic]:
        columns: NDArray[np.generic] = np.empty((self._count, rows), self._dtype)
        for number, column in enumerate(columns):
            place = (number * self._shape[0] + first) * self._dtype.itemsize
            self._pread_into(column.view(np.uint8).data, place)
        lying = columns.reshape(*reversed(self._shape[1:]), rows)
        return np.ascontiguousarray(lying.T)

    def finish(self) -> None:
        """See `Stream.finish`: the checksum was compared before."""


class NpzPlan:
    """The layout of a file; see `array_file.FilePlan`."""

    sum = staticmethod(crc32)

    def __init__(self, kinds: Kinds, described: bytes | None = None) -> None:
        """Lay a file out.

        Args:
            kinds: Dtype name and shape of every array by name.
            described: The description, if the file has one.
        """
        self._layout = ZipLayout()
        self._heads: dict[str, bytes] = {}
        self.spans: dict[str, ArraySpan] = {}
        self._described = b""
        if described is not None:
            header = encode(np.dtype("u1"), (len(described),))
            self._described = header + described
            self._layout.add(MEMBER + ENDING, len(self._described))
        for name, (dtype, shape) in kinds.items():
            head = encode(storage_dtype(dtype), shape)
            row_nbytes = array_nbytes(dtype, shape[1:])
            nbytes = len(head) + shape[0] * row_nbytes
            member = self._layout.add(name + ENDING, nbytes)
            self._heads[name] = head
            offset = member.offset + len(head)
            start = crc32(memoryview(head))
            self.spans[name] = ArraySpan(offset, row_nbytes, start, shape[0])
        self.nbytes = self._layout.nbytes

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `array_file.FilePlan.around`."""
        crcs = {name + ENDING: crc for name, crc in sums.items()}
        if self._described:
            crcs[MEMBER + ENDING] = crc32(memoryview(self._described))
            yield self._layout.members[0].offset, self._described
        for name, head in self._heads.items():
            yield self.spans[name].offset - len(head), head
        yield from self._layout.around(crcs)


def _plan(description: Description) -> NpzPlan:
    return NpzPlan(description.arrays, description.to_bytes())


class PackedWriter(StagedWriter):
    """Writes a file of deflated members, packed by two threads; see `Writer`."""

    def __init__(self, target: Path, description: Description, level: int, overwrite: bool) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._done = 0
        self._arrays = BlockArrays(description.schema.varying)
        self._heads = heads = _heads(description)
        self._names = [name for name in heads if name != MEMBER]
        largest = ZipLayout()
        for name, (head, nbytes) in heads.items():
            largest.add(name + ENDING, packed_limit(len(head) + nbytes))
        self._pool = thread_pool(2, "mmreplay-export")
        self._file: File | None = None
        self._staging = Staging(target, overwrite=overwrite)
        with undone_by(self.abort):
            self._file = file = self._staging.open(largest.nbytes)
            self._packers = {
                name: MemberPacker(member.name, file, member.offset, level)
                for name, member in zip(heads, largest.members, strict=True)
            }
            for name, (head, _) in heads.items():
                self._packers[name].feed(memoryview(head))
            for name, column in self._arrays.begin().items():
                self._packers[name].feed(bytes_of(column))

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        self._done += len(block)
        jobs = [
            self._pool.submit(self._packers[name].feed, bytes_of(column))
            for name, column in self._arrays.split(block, self._names).items()
        ]
        # Wait for all, even if one fails: after this call no thread reads the block.
        errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None:
                raise error

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, but the source describes "
                f"{self._description.rows}. The source changed during the conversion."
            )
        final = ZipLayout()
        for name, (head, nbytes) in self._heads.items():
            if self._packers[name].nbytes != len(head) + nbytes:
                raise FormatError(
                    f"array {name!r} must have {nbytes} bytes, as was measured, got "
                    f"{self._packers[name].nbytes - len(head)}. The source changed "
                    "during the conversion."
                )
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
        """Close the file once no thread writes to it."""
        self._pool.shutdown()
        super()._close()


class MemberPacker:
    """Packs one member while its bytes come.

    Attributes:
        name: Of the member.
        nbytes: Unpacked bytes so far.
        packed: Packed bytes so far.
        crc: CRC-32 of the unpacked bytes.
        offset: Of its first byte, until it is moved.
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
        """Pack the rest."""
        self._put(self._zip.flush())

    def _put(self, data: bytes) -> None:
        if data:
            self._file.pwrite(data, self.offset + self.packed)
            self.packed += len(data)

    def move(self, offset: int) -> None:
        """Move towards the beginning of the file."""
        zip_file.move_bytes(self._file, self.offset, offset, self.packed)
        self.offset = offset


def packed_limit(nbytes: int) -> int:
    """The largest packed size; measured: 20 bytes more for each 64 KiB of noise."""
    return nbytes + nbytes // 1024 + 4096


def _heads(description: Description) -> dict[str, tuple[bytes, int]]:
    """The first bytes of each member, and the number of bytes that follow."""
    described = description.to_bytes()
    header = encode(np.dtype("u1"), (len(described),))
    found = {MEMBER: (header + described, 0)}
    for name, (dtype, shape) in description.arrays.items():
        found[name] = encode(storage_dtype(dtype), shape), array_nbytes(dtype, shape)
    return found


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The contents of an npy header.

    Attributes:
        dtype: Of any byte order.
        shape: Of the array.
        columns_first: The array is in Fortran order.
        nbytes: Bytes of the header itself.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    columns_first: bool
    nbytes: int

    @property
    def data_nbytes(self) -> int:
        """Bytes of the array, in Python's integers, which do not overflow."""
        return math.prod(self.shape, start=self.dtype.itemsize)


def encode(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """The header of a C-order array, a multiple of 64 bytes."""
    axes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({axes}), }}"
    bare = len(MAGIC) + 4 + len(text) + 1
    text += " " * (-bare % ALIGNMENT) + "\n"
    return MAGIC + struct.pack("<2BH", 1, 0, len(text)) + text.encode("ascii")


def prefix_nbytes(data: bytes, what: str) -> int:
    """Bytes of a header, by its first 12.

    Raises:
        FormatError: It is no header, or too large.
    """
    if len(data) < 12 or data[:6] != MAGIC or data[6] not in (1, 2, 3):
        raise FormatError(
            f"{what} must begin with an npy header of version 1 to 3, got {data[:8]!r}."
        )
    short = data[6] == 1
    (size,) = struct.unpack_from("<H" if short else "<I", data, 8)
    total = int(size) + (10 if short else 12)
    if total > MAX_HEADER_NBYTES:
        raise FormatError(
            f"{what} must have an npy header of at most {MAX_HEADER_NBYTES} bytes, got {total}."
        )
    return total


def parse(data: bytes, what: str) -> NpyHeader:
    """Parse a header.

    Args:
        data: Exactly its bytes.
        what: Its name in errors: file, member and offset.

    Raises:
        FormatError: It is no npy header, or one of Python objects.
    """
    start = 10 if data[6] == 1 else 12
    try:
        value = ast.literal_eval(data[start:].decode("latin-1").strip())
        descr, order, shape = (value[key] for key in ("descr", "fortran_order", "shape"))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise FormatError(
            f"{what} has an npy header that does not describe an array: "
            f"{data[start : start + 60]!r}"
        ) from None
    if type(order) is not bool or not _is_shape(shape):
        raise FormatError(
            f"{what}: shape must be a tuple of sizes and fortran_order True or False, "
            f"got {str(shape)[:80]} and {str(order)[:20]}."
        )
    return NpyHeader(_dtype(descr, what), shape, order, len(data))


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, tuple)
        and len(shape) <= MAX_AXES
        and all(type(axis) is int and 0 <= axis < MAX_AXIS for axis in shape)
    )


def _dtype(descr: object, what: str) -> np.dtype[np.generic]:
    try:
        # A list describes a record, which can be no field; "object" would be pickled.
        dtype = np.dtype(descr) if isinstance(descr, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.hasobject or dtype.itemsize == 0:
        raise FormatError(
            f"{what} must hold numbers, got {str(descr)[:60]!r}. Save plain arrays: "
            "objects, records and pickles are not read."
        )
    return dtype
