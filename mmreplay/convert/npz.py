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

from mmreplay.convert import npy, skrl, skrl_read, zip_layout, zips
from mmreplay.convert.array_file import ArrayWriter, Piece
from mmreplay.convert.arrays import ArrayReader, Column, Stored, Stream
from mmreplay.convert.base import Notes, Reader, Writer
from mmreplay.convert.description import MAX_NBYTES, MEMBER, Description
from mmreplay.convert.losses import refuse_empty
from mmreplay.convert.npz_packed import ENDING, LEVEL, PackedWriter
from mmreplay.convert.plain import PlainReader
from mmreplay.convert.skrl import Kinds, SkrlWriter
from mmreplay.convert.skrl_read import SkrlReader
from mmreplay.convert.zips import Entry
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.files import File
from mmreplay.schema.dtypes import canonical_name, storage_dtype
from mmreplay.schema.naming import left_out
from mmreplay.sums import crc32


class NpzPlan:
    """Where everything lies; see `arrays.Plan`."""

    sum = staticmethod(crc32)

    def __init__(self, kinds: Kinds, told: bytes | None = None) -> None:
        """Lay a file out.

        Args:
            kinds: Dtype name and shape of every array by name.
            told: The description, where there is to be one.
        """
        self._layout = zip_layout.Layout()
        self._heads: dict[str, bytes] = {}
        self.pieces: dict[str, Piece] = {}
        self._told = b""
        if told is not None:
            self._told = npy.encode(np.dtype("u1"), (len(told),)) + told
            self._layout.add(MEMBER + ENDING, len(self._told))
        for name, (dtype, shape) in kinds.items():
            stored = storage_dtype(dtype)
            head = npy.encode(stored, shape)
            row_nbytes = stored.itemsize * int(np.prod(shape[1:], dtype=object))
            nbytes = len(head) + shape[0] * row_nbytes
            member = self._layout.add(name + ENDING, nbytes)
            self._heads[name] = head
            offset = member.offset + len(head)
            self.pieces[name] = Piece(offset, row_nbytes, crc32(memoryview(head)))
        self.nbytes = self._layout.nbytes

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `arrays.Plan.around`."""
        crcs = {name + ENDING: crc for name, crc in sums.items()}
        if self._told:
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
    compression_level: int | None = None,
    layout: str | None = None,
) -> Writer:
    """Make an npz file as a target.

    Args:
        target: The file.
        description: What will come.
        overwrite: Replace what is there.
        compression: ``"deflate"``, or None for members that can be mapped.
        compression_level: Of deflate, from 1, the fastest, to 9; 6 by default.
        layout: ``"skrl"`` for a memory of skrl or rofunc.

    Raises:
        SchemaError: Compression, its level or layout is none of these, or the layout
            cannot hold a field.
    """
    _check(description, compression, compression_level, layout)
    if layout is not None:
        return SkrlWriter(target, description, NpzPlan, overwrite)
    if compression is not None:
        level = LEVEL if compression_level is None else compression_level
        return PackedWriter(target, description, level, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def _plan(description: Description) -> NpzPlan:
    return NpzPlan(description.arrays, description.to_bytes())


def _check(
    description: Description,
    compression: str | None,
    level: int | None,
    layout: str | None,
) -> None:
    skrl.check_layout(layout)
    if layout is not None:
        skrl.refuse_dtypes(description, "npz", "bfloat16")
    if layout is not None and compression is not None:
        raise SchemaError(
            f"compression: got {compression!r} with layout={layout!r}, expected None "
            "with it; leave one of them out"
        )
    if compression not in (None, "deflate"):
        raise SchemaError(
            f"compression: got {compression!r}, expected 'deflate', the one that npz "
            "has, or None; leave it out"
        )
    if level is None:
        return
    if type(level) is not int or not 1 <= level <= 9:
        raise SchemaError(
            f"compression_level: got {level!r}, expected an integer in [1, 9]; leave "
            f"it out for {LEVEL}"
        )
    if compression is None:
        raise SchemaError(
            f"compression_level: got {level!r} without compression, expected it with "
            "compression='deflate' only; name that one as well, or leave it out"
        )


def planned(
    description: Description,
    *,
    compression: str | None = None,
    compression_level: int | None = None,
    layout: str | None = None,
) -> int | None:
    """Bytes of the file, unless it is packed; see `registry.planned`."""
    _check(description, compression, compression_level, layout)
    if layout is not None:
        refuse_empty(description.rows, skrl.LAYOUT)
    return None if compression or layout else _plan(description).nbytes


def open_reader(
    path: Path,
    *,
    allow_expansion: bool = False,
    layout: str | None = None,
    size: int | None = None,
    cursor: int | None = None,
) -> Reader:
    """Open an npz file as a source, ours or anybody's.

    Args:
        path: The file.
        allow_expansion: Unpack members that hold more than 1,000 times what they
            take.
        layout: ``"skrl"`` for a memory of skrl or rofunc; those named as they name
            them are known.
        size: Steps of such a memory that were written, where its NaNs do not tell.
        cursor: The oldest step of such a memory that is full.
    """
    theirs = skrl_read.meant(path, layout, size, cursor)
    file = File.open(path, None)
    try:
        notes = Notes()
        columns, told = _columns(file, notes, allow_expansion)
        if theirs:
            return SkrlReader(file, columns, notes, size, cursor)
        if told is None:
            return PlainReader(file, columns, notes)
        return ArrayReader(file, columns, _description(file, told), notes)
    except BaseException:
        file.close()
        raise


def _columns(
    file: File, notes: Notes, allow_expansion: bool
) -> tuple[dict[str, Column], Entry | None]:
    """The arrays, and the member of the description, if there is one."""
    columns: dict[str, Column] = {}
    entries = zips.parse(file)
    for name, entry in entries.items():
        zips.refuse_bomb(file, entry, allow_expansion)
        if name != MEMBER + ENDING:
            column = _column(file, entry, notes)
            if column is not None:
                columns[name.removesuffix(ENDING)] = column
    return columns, entries.get(MEMBER + ENDING)


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
    header, name = _header(file, entry), entry.name.removesuffix(ENDING)
    try:
        dtype = canonical_name(header.dtype)
    except SchemaError:
        told = f"array {entry.name!r} of {header.dtype} can be no field"
        left_out(notes, name, f"{told}, and was left out")
        return None
    if header.columns_first and len(header.shape) > 1:
        told = f"array {entry.name!r} lies in Fortran order, and was left out"
        left_out(notes, name, f"{told}: save numpy.ascontiguousarray of it")
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
