"""pt: a dict of tensors as ``torch.save`` writes it, a valid zip, checksums included.

``torch.load(path, weights_only=True, mmap=True)`` reads it without a copy. To read
others' files torch itself is asked what they hold, with ``weights_only=True``, always;
their bytes are then read from where it found them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmreplay.convert import pt_header, skrl, skrl_read, zip_layout, zips
from mmreplay.convert.array_file import ArrayWriter, Piece
from mmreplay.convert.arrays import ArrayReader, Column, Stored, Stream
from mmreplay.convert.base import Notes, Reader, Writer
from mmreplay.convert.description import KEY, MAX_NBYTES, Description
from mmreplay.convert.losses import doubt_sums, refuse_empty
from mmreplay.convert.plain import PlainReader
from mmreplay.convert.skrl import Kinds, SkrlWriter
from mmreplay.convert.skrl_read import SkrlReader
from mmreplay.convert.zips import Entry
from mmreplay.errors import CorruptError, FormatError
from mmreplay.files import File
from mmreplay.schema.dtypes import DTYPES, storage_dtype
from mmreplay.schema.naming import left_out
from mmreplay.sums import crc32

if TYPE_CHECKING:
    import torch

ROOT = "archive"
MAX_HEADER_NBYTES = 16 << 20
MAX_DEPTH = 8
UNPICKLER = "WeightsUnpickler error:"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class PtPlan:
    """Where everything lies; see `arrays.Plan`."""

    sum = staticmethod(crc32)

    def __init__(self, kinds: Kinds, told: bytes | None = None) -> None:
        """Lay a file out.

        Args:
            kinds: Dtype name and shape of every tensor by name.
            told: The description, where there is to be one.
        """
        self._layout = zip_layout.Layout()
        first = {} if told is None else {KEY: ("uint8", (len(told),))}
        header = pt_header.encode({**first, **kinds})
        self._around: list[tuple[int, bytes]] = []
        self._sums: dict[str, int] = {}
        self._members: dict[str, str] = {}
        self.pieces: dict[str, Piece] = {}
        self._put("data.pkl", header)
        self._put("byteorder", b"little")
        if told is not None:
            self._put("data/0", told)
        for key, (name, (dtype, shape)) in enumerate(kinds.items(), len(first)):
            row_nbytes = storage_dtype(dtype).itemsize
            row_nbytes *= int(np.prod(shape[1:], dtype=object))
            member = self._layout.add(f"{ROOT}/data/{key}", shape[0] * row_nbytes)
            self._members[name] = member.name
            self.pieces[name] = Piece(member.offset, row_nbytes)
        self._put("version", b"3\n")
        self.nbytes = self._layout.nbytes

    def _put(self, name: str, data: bytes) -> None:
        member = self._layout.add(f"{ROOT}/{name}", len(data))
        self._around.append((member.offset, data))
        self._sums[member.name] = crc32(memoryview(data))

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `arrays.Plan.around`."""
        yield from self._around
        crcs = {self._members[name]: crc for name, crc in sums.items()}
        yield from self._layout.around(self._sums | crcs)


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    layout: str | None = None,
) -> Writer:
    """Make a pt file as a target.

    Args:
        target: The file.
        description: What will come.
        overwrite: Replace what is there.
        layout: ``"skrl"`` for a memory of skrl or rofunc.

    Raises:
        SchemaError: The layout is another.
    """
    skrl.check_layout(layout)
    if layout is not None:
        return SkrlWriter(target, description, PtPlan, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def _plan(description: Description) -> PtPlan:
    return PtPlan(description.arrays, description.to_bytes())


def planned(description: Description, *, layout: str | None = None) -> int | None:
    """Bytes of the file; see `registry.planned`."""
    skrl.check_layout(layout)
    if layout is not None:
        refuse_empty(description.rows, skrl.LAYOUT)
    return None if layout else _plan(description).nbytes


def open_reader(
    path: Path,
    *,
    layout: str | None = None,
    size: int | None = None,
    cursor: int | None = None,
) -> Reader:
    """Open a pt file as a source, ours or anybody's; no pickle is ever executed.

    Args:
        path: The file.
        layout: ``"skrl"`` for a memory of skrl or rofunc; those named as they name
            them are known.
        size: Steps of such a memory that were written, where its NaNs do not tell.
        cursor: The oldest step of such a memory that is full.
    """
    theirs = skrl_read.meant(path, layout, size, cursor)
    file = File.open(path, None)
    try:
        notes = Notes()
        columns = read_columns(file, notes)
        if theirs:
            return SkrlReader(file, columns, notes, size, cursor)
        return _reader(file, columns, notes)
    except BaseException:
        file.close()
        raise


def read_columns(
    file: File, notes: Notes, numbers: dict[str, int] | None = None
) -> dict[str, Column]:
    """The tensors of a torch file by path, whoever wrote it.

    Args:
        file: Open.
        notes: Where what is left out is told.
        numbers: Takes the integers among them, which are told otherwise.

    Raises:
        FormatError: It is no torch file of a dict of tensors.
        CorruptError: It is damaged.
    """
    entries = _entries(file)
    places = _tensors(file, notes, numbers)
    if any(_unsummed(entries, place) for place in places.values()):
        _tell_unsummed(file, KEY in places, notes)
    return {name: _column(file, entries, place) for name, place in places.items()}


def _unsummed(entries: dict[int, Entry], place: Place) -> bool:
    """Whether the member that a tensor lies in has no checksum."""
    entry = entries.get(place[3])
    return place[4] > 0 and entry is not None and entry.crc == 0


def _tell_unsummed(file: File, ours: bool, notes: Notes) -> None:
    if ours:
        # torch leaves checksums out where it is asked to; mmreplay never does.
        doubt_sums(notes, file.path.name, "checksum of some members")
    else:
        notes.note("some members have no checksum, and were read unchecked")


def _reader(file: File, columns: dict[str, Column], notes: Notes) -> Reader:
    told = columns.pop(KEY, None)
    if told is None:
        return PlainReader(file, columns, notes)
    nbytes = told.shape[0] if len(told.shape) == 1 else MAX_NBYTES + 1
    if told.dtype != "uint8" or nbytes > MAX_NBYTES:
        raise FormatError(
            f"{file.path}: tensor {KEY!r} is {told.dtype}{list(told.shape)}, expected "
            f"at most {MAX_NBYTES} bytes of JSON"
        )
    data = bytearray(nbytes)
    stream = told.open()
    stream.read_into(memoryview(data))
    stream.finish()
    described = Description.from_bytes(bytes(data), f"{file.path}: {KEY!r}")
    return ArrayReader(file, columns, described, notes)


def _entries(file: File) -> dict[int, Entry]:
    """Members by the offset of their data; all but the tensors' bytes are checked.

    Raises:
        FormatError: It is no torch file, or an old, a packed or a big-endian one.
        CorruptError: It is damaged.
    """
    entries = zips.parse(file)
    root = next(iter(entries), "").partition("/")[0]
    for name, entry in entries.items():
        inside, parts = name.startswith(f"{root}/"), name.split("/")
        if not inside or ".." in parts or entry.method != zip_layout.STORED:
            raise FormatError(
                f"{file.path}: member {name!r} at byte {entry.offset} is packed or out "
                f"of place, expected it stored under {root!r}, as torch.save writes it"
            )
        if not name.startswith(f"{root}/data/"):
            if entry.nbytes > MAX_HEADER_NBYTES:
                raise FormatError(
                    f"{file.path}: member {name!r} at byte {entry.offset} has "
                    f"{entry.nbytes} bytes, expected at most {MAX_HEADER_NBYTES}"
                )
            zips.check(file, entry)
    order = entries.get(f"{root}/byteorder")
    if f"{root}/data.pkl" not in entries:
        raise FormatError(
            f"{file.path} is a zip without {root}/data.pkl, expected a file of "
            "torch.save; name its format with format= (--from)"
        )
    if order is not None and file.pread(order.nbytes, order.offset) != b"little":
        raise FormatError(
            f"{file.path} says another byte order than little, expected little; load "
            "and save it on this machine"
        )
    return {entry.offset: entry for entry in entries.values()}


Place = tuple[str, tuple[int, ...], int, int, int]
"""Dtype, shape, offset in the file, and offset and bytes of the storage it lies in."""


def _tensors(
    file: File, notes: Notes, numbers: dict[str, int] | None
) -> dict[str, Place]:
    """What torch finds in a file, by path; the tensors themselves are let go.

    Raises:
        FormatError: torch refuses it, or it is no dict of tensors.
    """
    import torch

    try:
        # By descriptor: the path may be another file by now.
        found = torch.load(
            f"/proc/self/fd/{file.fd}", map_location="cpu", weights_only=True, mmap=True
        )
    except Exception as error:
        # torch lets through whatever its parsers stumble over.
        why = _why(error)
        raise FormatError(
            f"{file.path}: torch refuses its member data.pkl with weights_only=True "
            f"({why}), expected a dict of tensors; save one of those only"
        ) from error
    if not isinstance(found, dict):
        raise FormatError(
            f"{file.path} holds a {type(found).__name__}, expected a dict of tensors; "
            "save one by name"
        )
    maps = _maps()
    places = {}
    for name, tensor in _flat(found, "", 0):
        what = f"{file.path}: tensor {name!r}"
        if type(tensor) is int and numbers is not None:
            numbers[name] = tensor
        elif not isinstance(tensor, torch.Tensor):
            told = f"{name!r} is a {type(tensor).__name__}, and was left out"
            left_out(notes, name, told)
        elif str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            left_out(notes, name, f"tensor {name!r} of {tensor.dtype} was left out")
        else:
            places[name] = _place(tensor, maps, what)
    return places


def _flat(value: dict[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise FormatError(
            f"tensors nest deeper than {MAX_DEPTH} at {prefix!r}, expected a flat dict"
        )
    for key, each in value.items():
        path = f"{prefix}{key}"
        if isinstance(each, dict):
            yield from _flat(each, f"{path}/", depth + 1)
        else:
            yield path, each


def _place(tensor: torch.Tensor, maps: list[tuple[int, int, int]], what: str) -> Place:
    """Where a tensor lies, after a check that it lies within what it claims."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if tensor.layout != _strided() or not tensor.is_contiguous():
        raise FormatError(
            f"{what} is sparse or strided, expected a contiguous one; save "
            "tensor.contiguous()"
        )
    storage = tensor.untyped_storage()
    first = int(tensor.storage_offset()) * tensor.element_size()
    if first + tensor.numel() * tensor.element_size() > storage.nbytes():
        raise CorruptError(
            f"{what} of shape {list(shape)} goes beyond its storage of "
            f"{storage.nbytes()} bytes; the file is damaged"
        )
    if not tensor.numel():
        return dtype, shape, 0, 0, 0
    address = storage.data_ptr()
    for start, stop, offset in maps:
        if start <= address < stop:
            begin = address - start + offset
            return dtype, shape, begin + first, begin, storage.nbytes()
    raise FormatError(f"{what} was not mapped by torch, expected it in the file")


def _strided() -> torch.layout:
    import torch

    return torch.strided


def _why(error: Exception) -> str:
    """What torch's unpickler stumbled over, without the advice around it."""
    lines = ESCAPES.sub("", str(error)).splitlines() or [type(error).__name__]
    told = next((line for line in lines if UNPICKLER in line), lines[0])
    told = (told.partition(UNPICKLER)[2] or told).partition(" Please use")[0]
    return told.strip()[:200]


def _maps() -> list[tuple[int, int, int]]:
    """Start, stop and file offset of every mapping of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, *_ = line.split()
        start, stop = addresses.split("-")
        found.append((int(start, 16), int(stop, 16), int(offset, 16)))
    return found


def _column(file: File, entries: dict[int, Entry], place: Place) -> Column:
    """A tensor as a column; where it shares its storage, that is checked at once."""
    dtype, shape, offset, begin, held = place
    stored = storage_dtype(dtype)
    if not held:
        return Column(dtype, stored, shape, partial(_nothing, file))
    entry = entries.get(begin)
    if entry is None or entry.nbytes != held:
        raise CorruptError(
            f"{file.path}: torch finds {held} bytes at byte {begin}, expected a member "
            "of that size; the file is damaged"
        )
    nbytes = stored.itemsize * int(np.prod(shape, dtype=object))
    expected: int | None = entry.crc
    if entry.crc == 0:
        expected = None
    elif nbytes != held:
        zips.check(file, entry)
        expected = None
    stream = partial(_stream, file, offset, entry.name, expected)
    return Column(dtype, stored, shape, stream, offset)


def _stream(file: File, offset: int, name: str, expected: int | None) -> Stream:
    return Stored(file, offset, f"member {name!r}", crc32, 0, expected)


def _nothing(file: File) -> Stream:
    return Stored(file, 0, "nothing")
