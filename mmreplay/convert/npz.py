"""npz: a zip of npy arrays, one a column, stored so that they can be mapped.

``numpy.load(path, allow_pickle=False)`` reads it, beyond 4 GiB too. Members can be
deflated instead (`npz_packed`). bfloat16 fields are
uint16 there; the description in the member ``mmreplay.json`` names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mmreplay.convert import npy, zip_layout, zips
from mmreplay.convert.array_file import ArrayWriter, Piece
from mmreplay.convert.arrays import (
    ArrayReader,
    Column,
    Stored,
    Stream,
    crc32,
)
from mmreplay.convert.base import Notes, Reader, Writer
from mmreplay.convert.description import MAX_NBYTES, MEMBER, Description
from mmreplay.convert.npz_packed import ENDING, PackedWriter
from mmreplay.convert.plain import PlainReader
from mmreplay.convert.zips import Entry
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.files import File
from mmreplay.schema.dtypes import canonical_name, storage_dtype


class NpzPlan:
    """Where everything lies; see `arrays.Plan`."""

    sum = staticmethod(crc32)

    def __init__(self, description: Description) -> None:
        self._layout = zip_layout.Layout()
        self._heads: dict[str, bytes] = {}
        self.pieces: dict[str, Piece] = {}
        told = description.to_bytes()
        self._told = npy.encode(np.dtype("u1"), (len(told),)) + told
        self._layout.add(MEMBER + ENDING, len(self._told))
        for name, (dtype, shape) in description.columns.items():
            stored = storage_dtype(dtype)
            head = npy.encode(stored, (description.rows, *shape))
            row_nbytes = stored.itemsize * int(np.prod(shape, dtype=object))
            nbytes = len(head) + description.rows * row_nbytes
            member = self._layout.add(name + ENDING, nbytes)
            self._heads[name] = head
            offset = member.offset + len(head)
            self.pieces[name] = Piece(offset, row_nbytes, crc32(memoryview(head)))
        self.nbytes = self._layout.nbytes

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `arrays.Plan.around`."""
        crcs = {name + ENDING: crc for name, crc in sums.items()}
        crcs[MEMBER + ENDING] = crc32(memoryview(self._told))
        yield self._layout.members[0].offset, self._told
        for name, head in self._heads.items():
            yield self.pieces[name].offset - len(head), head
        yield from self._layout.around(crcs)


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    compression: str | None = None,
    level: int = 6,
) -> Writer:
    """Make an npz file as a target.

    Args:
        target: The file.
        description: What will come.
        overwrite: Replace what is there.
        compression: ``"deflate"``, or None for members that can be mapped.
        level: Of deflate, from 1, the fastest, to 9.

    Raises:
        SchemaError: Compression or level is none of these.
    """
    _check_packing(compression, level)
    if compression is not None:
        return PackedWriter(target, description, level, overwrite)
    return ArrayWriter(target, description, NpzPlan(description), overwrite)


def _check_packing(compression: str | None, level: int) -> None:
    if compression not in (None, "deflate"):
        raise SchemaError(
            f"compression: got {compression!r}, expected 'deflate', the one that npz "
            "has, or None; leave it out"
        )
    if type(level) is not int or not 1 <= level <= 9:
        raise SchemaError(f"level: got {level!r}, expected an integer in [1, 9]")


def planned(
    description: Description, *, compression: str | None = None, level: int = 6
) -> int | None:
    """Bytes of the file, unless it is packed; see `registry.planned`."""
    _check_packing(compression, level)
    return None if compression else NpzPlan(description).nbytes


def open_reader(path: Path, *, allow_expansion: bool = False) -> Reader:
    """Open an npz file as a source, ours or anybody's.

    Args:
        path: The file.
        allow_expansion: Unpack members that hold more than 1,000 times what they
            take.
    """
    file = File.open(path, None)
    try:
        return _reader(file, allow_expansion)
    except BaseException:
        file.close()
        raise


def _reader(file: File, allow_expansion: bool) -> Reader:
    notes = Notes()
    columns: dict[str, Column] = {}
    entries = zips.parse(file)
    for name, entry in entries.items():
        zips.refuse_bomb(file, entry, allow_expansion)
        if name != MEMBER + ENDING:
            column = _column(file, entry, notes)
            if column is not None:
                columns[name.removesuffix(ENDING)] = column
    told = entries.get(MEMBER + ENDING)
    if told is None:
        return PlainReader(file, columns, notes)
    return ArrayReader(file, columns, _description(file, told), notes)


def _stream(file: File, entry: Entry) -> Stream:
    if entry.method == zip_layout.DEFLATED:
        return zips.Deflated(file, entry)
    what = f"member {entry.name!r}"
    return Stored(file, entry.offset, what, crc32, 0, entry.crc)


def _open(file: File, entry: Entry, skip: int) -> Stream:
    """A stream of an array's data, its header read over and checked with it."""
    stream = _stream(file, entry)
    stream.read_into(memoryview(bytearray(skip)))
    return stream


def _header(file: File, entry: Entry) -> npy.Header:
    what = f"{file.path}: member {entry.name!r} at byte {entry.offset}"
    if entry.nbytes < 12:
        raise FormatError(f"{what} has {entry.nbytes} bytes, expected an npy array")
    stream = _stream(file, entry)
    head = bytearray(12)
    stream.read_into(memoryview(head))
    total = npy.prefix_nbytes(bytes(head), what)
    if total > entry.nbytes or total < 12:
        raise CorruptError(
            f"{what} has {entry.nbytes} bytes, expected a header of {total} first; the "
            "file was cut or damaged"
        )
    rest = bytearray(total - 12)
    stream.read_into(memoryview(rest))
    header = npy.parse(bytes(head + rest), what)
    if header.nbytes + header.data_nbytes != entry.nbytes:
        raise CorruptError(
            f"{what} has {entry.nbytes - header.nbytes} bytes of data, expected "
            f"{header.data_nbytes} for {header.dtype}{list(header.shape)}; the file "
            "was cut or damaged"
        )
    return header


def _column(file: File, entry: Entry, notes: Notes) -> Column | None:
    """The array of a member, or None, noted, where it can be no field."""
    if not entry.name.endswith(ENDING):
        notes.note(f"member {entry.name!r} is no array, and was left out")
        return None
    header = _header(file, entry)
    try:
        dtype = canonical_name(header.dtype)
    except SchemaError:
        notes.note(
            f"array {entry.name!r} of {header.dtype} can be no field, and was left out"
        )
        return None
    if header.columns_first and len(header.shape) > 1:
        notes.note(
            f"array {entry.name!r} lies in Fortran order, and was left out: save "
            "numpy.ascontiguousarray of it"
        )
        return None
    stored = entry.method == zip_layout.STORED
    return Column(
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
            f"{file.path}: member {entry.name!r} holds {header.dtype}"
            f"{list(header.shape)}, expected at most {MAX_NBYTES} bytes of JSON"
        )
    stream = _open(file, entry, header.nbytes)
    data = bytearray(header.data_nbytes)
    stream.read_into(memoryview(data))
    stream.finish()
    return Description.from_bytes(bytes(data), f"{file.path}: {MEMBER}")
