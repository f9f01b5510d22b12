"""The header of a torch file: a dict of tensors, written opcode by opcode.

torch reads it with ``weights_only=True``, which allows just what stands here. Writing
it by hand takes neither torch nor the memory of the tensors.

Named tensors in one safetensors file, written and read a block of rows at a time.

For files whose tensors another library names and lays out; a buffer of our own goes
through `safetensors`.

pt: a dict of tensors as ``torch.save`` writes it, a valid zip, checksums included.

``torch.load(path, weights_only=True, mmap=True)`` reads it without a copy. To read
others' files torch itself is asked what they hold, with ``weights_only=True``, always;
their bytes are then read from where it found them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32
from mmreplay.convert import registry, safetensors, zip_file
from mmreplay.convert import zip_file as zips
from mmreplay.convert.array_file import (
    ArrayColumn,
    ArrayFile,
    ArrayReader,
    ArrayWriter,
    Kinds,
    Piece,
    Stored,
    Stream,
)
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    Block,
    Notes,
    Reader,
    Writer,
    doubt_sums,
)
from mmreplay.convert.description import KEY, MAX_NBYTES, Description
from mmreplay.convert.safetensors import Columns, SafetensorsPlan
from mmreplay.convert.staging import Staging
from mmreplay.convert.undescribed import PlainReader
from mmreplay.convert.zip_file import Entry
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError
from mmreplay.schema.dtypes import DTYPES, storage_dtype
from mmreplay.schema.naming import left_out

if TYPE_CHECKING:
    import torch

# torch names the dtypes it has had from the start by classes of storages; those that
# came later lie in untyped ones, with the dtype beside.
STORAGES = {
    "bool": "BoolStorage", "int8": "CharStorage", "int16": "ShortStorage",
    "int32": "IntStorage", "int64": "LongStorage", "uint8": "ByteStorage",
    "float16": "HalfStorage", "float32": "FloatStorage", "float64": "DoubleStorage",
    "bfloat16": "BFloat16Storage",
}  # fmt: skip

TensorKinds = Mapping[str, tuple[str, tuple[int, ...]]]


def encode(tensors: TensorKinds) -> bytes:
    """A dict of contiguous tensors, whose storages are numbered in its order.

    Args:
        tensors: Dtype and shape by name.
    """
    items = b"".join(
        _text(name) + _tensor(str(key), dtype, shape)
        for key, (name, (dtype, shape)) in enumerate(tensors.items())
    )
    return b"\x80\x02}(" + items + b"u."


def _tensor(key: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """A call of the function with which torch puts a tensor together."""
    count = 1
    for axis in shape:
        count *= axis
    old = dtype in STORAGES
    storage = (
        _name("torch", STORAGES[dtype])
        if old
        else _name("torch.storage", "UntypedStorage")
    )
    size = count if old else count * storage_dtype(dtype).itemsize
    saved = _tuple(_text("storage"), storage, _text(key), _text("cpu"), _number(size))
    hooks = _name("collections", "OrderedDict") + b")R"
    parts = [
        saved + b"Q", _number(0), _tuple(*map(_number, shape)),
        _tuple(*map(_number, _strides(shape))), b"\x89", hooks,
    ]  # fmt: skip
    if not old:
        parts.append(_name("torch", dtype))
    build = "_rebuild_tensor_v2" if old else "_rebuild_tensor_v3"
    return _name("torch._utils", build) + _tuple(*parts) + b"R"


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    for axis in range(len(shape)):
        stride = 1
        for size in shape[axis + 1 :]:
            stride *= max(1, size)
        yield stride


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes([number])
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _name(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


Arrays = Mapping[str, NDArray[np.generic]]


def block_rows(columns: Columns) -> int:
    """Rows of all columns that make a block, at least 1.

    Args:
        columns: Dtype name and shape of a row by name.
    """
    nbytes = sum(
        storage_dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
        for dtype, shape in columns.values()
    )
    return max(1, BLOCK_NBYTES // max(1, nbytes))


def write_tensors(
    target: Path,
    columns: Columns,
    rows: int,
    read: Callable[[int, int], Arrays],
    told: Mapping[str, str],
) -> None:
    """Write a file, which replaces what is there whole, or not at all.

    Args:
        target: The file.
        columns: Dtype name and shape of a row by name.
        rows: Of every tensor.
        read: Gives rows ``[first, stop)`` of all of them, ``[stop - first, *shape]``.
        told: Texts for the file's metadata.
    """
    plan = SafetensorsPlan(columns, rows, told)
    staging = Staging(target, overwrite=True)
    try:
        file = ArrayFile(staging.open(plan.nbytes), plan, rows)
        try:
            step = block_rows(columns)
            for first in range(0, rows, step):
                stop = min(rows, first + step)
                none = np.zeros(stop - first, np.int64)
                flags = none.astype(np.uint8)
                file.write(Block(read(first, stop), none, none, flags))
            file.finish()
        finally:
            file.close()
        staging.publish()
    finally:
        staging.abort()


class TensorFile:
    """A safetensors file that is open for reading; use ``with``.

    Attributes:
        told: The file's metadata.
        shapes: Shape of each tensor, rows first.
    """

    def __init__(self, path: Path) -> None:
        """Open it and check its header.

        Raises:
            FormatError: It is no safetensors file, or one that is damaged.
        """
        self._file = File.open(path, None)
        try:
            told, columns = safetensors.parse(self._file)
        except BaseException:
            self._file.close()
            raise
        self.told: Mapping[str, Any] = told
        self.shapes = {name: column.shape for name, column in columns.items()}
        self._columns: dict[str, ArrayColumn] = columns

    def read(self, name: str, first: int, stop: int) -> NDArray[np.generic]:
        """Rows ``[first, stop)`` of a tensor."""
        column = self._columns[name]
        assert column.offset is not None
        out = np.empty((stop - first, *column.shape[1:]), column.stored)
        if out.nbytes:
            place = column.offset + first * column.row_nbytes
            self._file.pread_into(out.reshape(-1).view(np.uint8).data, place)
        return out

    def expect(self, columns: Columns, rows: int) -> None:
        """Refuse a file that does not hold exactly these tensors.

        Raises:
            FormatError: A tensor is missing, unknown, or of another dtype or shape.
        """
        got = {name: (c.dtype, c.shape) for name, c in self._columns.items()}
        wanted = {n: (dtype, (rows, *shape)) for n, (dtype, shape) in columns.items()}
        for name in sorted(got.keys() | wanted.keys()):
            if got.get(name) != wanted.get(name):
                raise FormatError(
                    f"{self._file.path}: tensor {name!r}: got "
                    f"{_told(got.get(name))}, expected {_told(wanted.get(name))}; give "
                    "the metadata that was saved with the file"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _told(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]}{list(tensor[1])}"


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
        self._layout = zip_file.Layout()
        first = {} if told is None else {KEY: ("uint8", (len(told),))}
        header = encode({**first, **kinds})
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
    other = registry.find_layout("pt", layout)
    if other is not None:
        return other.open_writer("pt", target, description, overwrite=overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def _plan(description: Description) -> PtPlan:
    return PtPlan(description.arrays, description.to_bytes())


def planned(description: Description, *, layout: str | None = None) -> int | None:
    """Bytes of the file; see `registry.planned`."""
    other = registry.find_layout("pt", layout)
    if other is not None:
        other.planned("pt", description)
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
    other = registry.find_layout("pt", layout, path)
    if other is not None:
        return other.open_reader("pt", path, size=size, cursor=cursor)
    registry.refuse_layout_options("pt", size=size, cursor=cursor)
    file = File.open(path, None)
    try:
        notes = Notes()
        columns = read_columns(file, notes)
        return _reader(file, columns, notes)
    except BaseException:
        file.close()
        raise


def read_columns(
    file: File, notes: Notes, numbers: dict[str, int] | None = None
) -> dict[str, ArrayColumn]:
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


def _reader(file: File, columns: dict[str, ArrayColumn], notes: Notes) -> Reader:
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
        if not inside or ".." in parts or entry.method != zip_file.STORED:
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


def _column(file: File, entries: dict[int, Entry], place: Place) -> ArrayColumn:
    """A tensor as a column; where it shares its storage, that is checked at once."""
    dtype, shape, offset, begin, held = place
    stored = storage_dtype(dtype)
    if not held:
        return ArrayColumn(dtype, stored, shape, partial(_nothing, file))
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
    return ArrayColumn(dtype, stored, shape, stream, offset)


def _stream(file: File, offset: int, name: str, expected: int | None) -> Stream:
    return Stored(file, offset, f"member {name!r}", crc32, 0, expected)


def _nothing(file: File) -> Stream:
    return Stored(file, 0, "nothing")
