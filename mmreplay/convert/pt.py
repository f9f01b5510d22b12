"""pt: a dict of tensors as ``torch.save`` writes it, a valid zip, checksums included.

``torch.load(path, weights_only=True, mmap=True)`` reads it without a copy. Its header
is a pickle written opcode by opcode, which takes neither torch nor the memory of the
tensors; ``weights_only=True`` allows exactly these opcodes.

torch itself parses the headers of all files, always with ``weights_only=True``; the
tensors' bytes are then read from where it found them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32
from mmreplay.convert import registry, zip_file
from mmreplay.convert.array_file import (
    ArrayColumn,
    ArrayReader,
    ArraySpan,
    ArrayWriter,
    Kinds,
    Stored,
    Stream,
    read_description,
)
from mmreplay.convert.base import Notes, Reader, Writer, doubt_sums
from mmreplay.convert.description import KEY, MAX_NBYTES, Description
from mmreplay.convert.undescribed import (
    POSITION_COLUMNS,
    PlainReader,
    in_place,
    needless_autoreset,
    no_integers,
)
from mmreplay.convert.zip_file import Entry
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, undone_by
from mmreplay.format.metadata import Autoreset
from mmreplay.schema.dtypes import DTYPES, array_nbytes, storage_dtype
from mmreplay.schema.naming import left_out
from mmreplay.schema.source_names import name_fields, own_names_of

if TYPE_CHECKING:
    import torch

# The dtypes of early versions of torch are named by classes of storages; later ones
# have untyped storages, and the dtype separately.
STORAGES = {
    "bool": "BoolStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "bfloat16": "BFloat16Storage",
}
TensorKinds = Mapping[str, tuple[str, tuple[int, ...]]]
Arrays = Mapping[str, NDArray[np.generic]]
ROOT = "archive"
MAX_HEADER_NBYTES = 16 << 20
MAX_DEPTH = 8
UNPICKLER = "WeightsUnpickler error:"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
StoredTensor = tuple[str, tuple[int, ...], int, int, int]
"""Dtype, shape and offset of a tensor in the file; offset and bytes of its storage."""


def open_reader(
    path: Path,
    *,
    layout: str | None = None,
    size: int | None = None,
    cursor: int | None = None,
    fields: Sequence[str] | None = None,
    autoreset: Autoreset | None = None,
) -> Reader:
    """Open a pt file as a source, by mmreplay or others; no pickle is executed.

    Args:
        path: The file.
        layout: ``"skrl"`` for a memory of skrl or rofunc; the default if the file
            has a name of theirs.
        size: Written steps of such a memory, if its NaNs do not show them.
        cursor: The oldest step of such a memory, if it is full.
        fields: See `name_fields`.
        autoreset: Of rows with positions and without a description, which may not say
            it: ``"next_step"``, ``"same_step"`` or ``"disabled"``.

    Raises:
        FormatError: It is no such file.
        CorruptError: It is damaged.
    """
    other = registry.find_layout("pt", layout, path)
    if other is not None:
        if autoreset is not None:
            raise needless_autoreset(path, autoreset)
        return other.open_reader("pt", path, size=size, cursor=cursor, fields=fields)
    registry.refuse_layout_options("pt", size=size, cursor=cursor)
    file = File.open(path, None)
    with undone_by(file.close):
        notes = Notes()
        own_names: dict[str, str] = {}
        columns = read_columns(file, notes, fields=fields, own_names=own_names)
        return _reader(file, columns, notes, own_names, autoreset)


def open_writer(
    target: Path, description: Description, *, overwrite: bool = False, layout: str | None = None
) -> Writer:
    """Make a pt file as a target.

    Args:
        target: The file.
        description: Of the rows.
        overwrite: Replace an existing file.
        layout: ``"skrl"`` for a memory of skrl or rofunc.

    Raises:
        SchemaError: The layout is unknown, or cannot hold the rows.
    """
    other = registry.find_layout("pt", layout)
    if other is not None:
        return other.open_writer("pt", target, description, overwrite=overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def planned(description: Description, *, layout: str | None = None) -> int | None:
    """Bytes of the file; see `registry.planned`."""
    other = registry.find_layout("pt", layout)
    if other is not None:
        other.planned("pt", description)
    return None if layout else _plan(description).nbytes


def _plan(description: Description) -> PtPlan:
    return PtPlan(description.arrays, description.to_bytes())


def read_columns(
    file: File,
    notes: Notes,
    numbers: dict[str, int] | None = None,
    fields: Sequence[str] | None = None,
    own_names: dict[str, str] | None = None,
) -> dict[str, ArrayColumn]:
    """The tensors of a torch file, by path.

    Args:
        file: Open for reading.
        notes: Receives notes about what is left out.
        numbers: Receives the integers of the file, which otherwise are left out.
        fields: See `name_fields`.
        own_names: Receives paths by names such as ``['obs']['pixels']``, of tensors
            in nested dicts.

    Raises:
        FormatError: It is no torch file of a dict of tensors.
        CorruptError: It is damaged.
    """
    entries = _entries(file)
    tensors = {}
    held = _tensors(file, notes, numbers)
    paths = {own: path for own, (path, _) in held.items()}
    for own, path in name_fields(paths, file.path, notes, fields).items():
        tensors[path] = held[own][1]
        if own_names is not None and own != path:
            own_names[own] = path
    storages = [(entries.get(begin), nbytes) for *_, begin, nbytes in tensors.values()]
    if any(nbytes and entry and entry.crc == 0 for entry, nbytes in storages):
        if KEY in tensors:
            # torch can leave checksums out; mmreplay never does.
            doubt_sums(notes, file.path.name, "checksum of some members")
        else:
            notes.note("some members have no checksum, and were read unchecked")
    return {name: _column(file, entries, tensor) for name, tensor in tensors.items()}


def _reader(
    file: File,
    columns: dict[str, ArrayColumn],
    notes: Notes,
    own_names: Mapping[str, str],
    autoreset: Autoreset | None,
) -> Reader:
    described = columns.pop(KEY, None)
    if described is None:
        own = own_names_of(own_names)
        return in_place(PlainReader(file, columns, notes, own_names=own, autoreset=autoreset))
    if autoreset is not None:
        raise needless_autoreset(file.path, autoreset)
    dtype, shape = described.dtype, described.shape
    nbytes = shape[0] if len(shape) == 1 else MAX_NBYTES + 1
    if dtype != "uint8" or nbytes > MAX_NBYTES:
        raise FormatError(
            f"{file.path}: tensor {KEY!r} must be at most {MAX_NBYTES} bytes of JSON, "
            f"got {dtype}{list(shape)}."
        )
    what = f"{file.path}: {KEY!r}"
    description = read_description(described.open(), nbytes, what)
    return ArrayReader(file, columns, description, notes)


def _entries(file: File) -> dict[int, Entry]:
    """Members by the offset of their data; checks all but the tensors' bytes.

    Raises:
        FormatError: It is no torch file, or an old, a packed or a big-endian one.
        CorruptError: It is damaged.
    """
    entries = zip_file.parse(file)
    root = next(iter(entries), "").partition("/")[0]
    for name, entry in entries.items():
        inside, segments = name.startswith(f"{root}/"), name.split("/")
        if not inside or ".." in segments or entry.method != zip_file.STORED:
            raise FormatError(
                f"{file.path}: member {name!r} at byte {entry.offset} is compressed or "
                f"outside {root!r}, unlike the members that torch.save writes."
            )
        if not name.startswith(f"{root}/data/"):
            if entry.nbytes > MAX_HEADER_NBYTES:
                raise FormatError(
                    f"{file.path}: member {name!r} at byte {entry.offset} must have at "
                    f"most {MAX_HEADER_NBYTES} bytes, got {entry.nbytes}."
                )
            zip_file.check(file, entry)
    order = entries.get(f"{root}/byteorder")
    if f"{root}/data.pkl" not in entries:
        raise FormatError(
            f"{file.path} is not a file of torch.save: it is a zip without "
            f"{root}/data.pkl. Name its format with format= (--from)."
        )
    if order is not None and file.pread(order.nbytes, order.offset) != b"little":
        raise FormatError(f"{file.path} is not little-endian. Load and save it on this machine.")
    return {entry.offset: entry for entry in entries.values()}


def _tensors(
    file: File, notes: Notes, numbers: dict[str, int] | None
) -> dict[str, tuple[str, StoredTensor]]:
    """The tensors of a file with their paths, by name, as torch maps them.

    Raises:
        FormatError: torch refuses it, or it is no dict of tensors.
    """
    import torch

    try:
        # By descriptor: another file may have the path by now.
        found = torch.load(
            f"/proc/self/fd/{file.fd}", map_location="cpu", weights_only=True, mmap=True
        )
    except Exception as error:
        # torch lets all errors of its parsers through.
        why = _why(error)
        raise FormatError(
            f"{file.path}: torch refuses its member data.pkl with weights_only=True "
            f"({why}). Save a dict that holds only tensors."
        ) from error
    if not isinstance(found, dict):
        raise FormatError(
            f"{file.path} must hold a dict of tensors, got a {type(found).__name__}. "
            "Save a dict of named tensors."
        )
    maps = _maps()
    tensors = {}
    for name, own, tensor in _flat(found, "", "", 0):
        what = f"{file.path}: tensor {name!r}"
        if type(tensor) is int and numbers is not None:
            numbers[name] = tensor
        elif not isinstance(tensor, torch.Tensor):
            if name in POSITION_COLUMNS:
                raise no_integers(name, f"a {type(tensor).__name__}")
            note = f"{name!r} is a {type(tensor).__name__}, and was left out"
            # A list may hold a text for each row.
            each = isinstance(tensor, list | tuple)
            notes.doubt(note) if each else left_out(notes, name, note)
        elif str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            if name in POSITION_COLUMNS:
                raise no_integers(name, str(tensor.dtype))
            note = f"tensor {name!r} of {tensor.dtype} was left out"
            notes.doubt(note) if tensor.ndim else left_out(notes, name, note)
        else:
            tensors[own] = name, _locate(tensor, maps, what)
    return tensors


def _flat(
    value: dict[Any, Any], prefix: str, keys: str, depth: int
) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of each leaf; names of keys of the outer dict are these."""
    if depth > MAX_DEPTH:
        raise FormatError(f"tensors nest deeper than {MAX_DEPTH} at {prefix!r}. Save a flat dict.")
    for key, each in value.items():
        path, own = f"{prefix}{key}", f"{keys}[{key!r}]"
        if isinstance(each, dict):
            yield from _flat(each, f"{path}/", own, depth + 1)
        else:
            yield path, own if keys or not isinstance(key, str) else key, each


def _locate(tensor: torch.Tensor, maps: list[tuple[int, int, int]], what: str) -> StoredTensor:
    """The place of a tensor, which lies within its storage."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if tensor.layout != _strided() or not tensor.is_contiguous():
        raise FormatError(f"{what} is sparse or not contiguous. Save tensor.contiguous().")
    storage = tensor.untyped_storage()
    first = int(tensor.storage_offset()) * tensor.element_size()
    if first + tensor.numel() * tensor.element_size() > storage.nbytes():
        raise CorruptError(
            f"{what} of shape {list(shape)} is larger than its storage of "
            f"{storage.nbytes()} bytes. The file is damaged."
        )
    if not tensor.numel():
        return dtype, shape, 0, 0, 0
    address = storage.data_ptr()
    for start, stop, offset in maps:
        if start <= address < stop:
            begin = address - start + offset
            return dtype, shape, begin + first, begin, storage.nbytes()
    raise FormatError(f"{what} must have its data in the file, but torch read it.")


def _strided() -> torch.layout:
    import torch

    return torch.strided


def _why(error: Exception) -> str:
    """The reason of an error of torch's unpickler, without the advice around it."""
    lines = ESCAPES.sub("", str(error)).splitlines() or [type(error).__name__]
    reason = next((line for line in lines if UNPICKLER in line), lines[0])
    reason = (reason.partition(UNPICKLER)[2] or reason).partition(" Please use")[0]
    return reason.strip()[:200]


def _maps() -> list[tuple[int, int, int]]:
    """Start, stop and file offset of every mapping of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, *_ = line.split()
        start, stop = addresses.split("-")
        found.append((int(start, 16), int(stop, 16), int(offset, 16)))
    return found


def _column(file: File, entries: dict[int, Entry], tensor: StoredTensor) -> ArrayColumn:
    """A tensor as a column; a storage that it shares is checked at once."""
    dtype, shape, offset, begin, storage_nbytes = tensor
    stored = storage_dtype(dtype)
    if not storage_nbytes:
        return ArrayColumn(dtype, stored, shape, partial(_nothing, file))
    entry = entries.get(begin)
    if entry is None or entry.nbytes != storage_nbytes:
        raise CorruptError(
            f"{file.path}: torch reads {storage_nbytes} bytes at byte {begin}, where "
            "the zip has no member of that size. The file is damaged."
        )
    nbytes = array_nbytes(dtype, shape)
    expected: int | None = entry.crc
    if entry.crc == 0:
        expected = None
    elif nbytes != storage_nbytes:
        zip_file.check(file, entry)
        expected = None
    stream = partial(_stream, file, offset, entry.name, expected)
    return ArrayColumn(dtype, stored, shape, stream, offset)


def _stream(file: File, offset: int, name: str, expected: int | None) -> Stream:
    return Stored(file, offset, f"member {name!r}", crc32, 0, expected)


def _nothing(file: File) -> Stream:
    return Stored(file, 0, "nothing")


class PtPlan:
    """The layout of a file; see `array_file.FilePlan`."""

    sum = staticmethod(crc32)

    def __init__(self, kinds: Kinds, described: bytes | None = None) -> None:
        """Lay a file out.

        Args:
            kinds: Dtype name and shape of every tensor by name.
            described: The description, if the file has one.
        """
        self._layout = zip_file.ZipLayout()
        first = {} if described is None else {KEY: ("uint8", (len(described),))}
        header = encode({**first, **kinds})
        self._around: list[tuple[int, bytes]] = []
        self._sums: dict[str, int] = {}
        self._members: dict[str, str] = {}
        self.spans: dict[str, ArraySpan] = {}
        self._put("data.pkl", header)
        self._put("byteorder", b"little")
        if described is not None:
            self._put("data/0", described)
        for key, (name, (dtype, shape)) in enumerate(kinds.items(), len(first)):
            row_nbytes = array_nbytes(dtype, shape[1:])
            member = self._layout.add(f"{ROOT}/data/{key}", shape[0] * row_nbytes)
            self._members[name] = member.name
            self.spans[name] = ArraySpan(member.offset, row_nbytes, 0, shape[0])
        self._put("version", b"3\n")
        self.nbytes = self._layout.nbytes

    def _put(self, name: str, data: bytes) -> None:
        member = self._layout.add(f"{ROOT}/{name}", len(data))
        self._around.append((member.offset, data))
        self._sums[member.name] = crc32(memoryview(data))

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `array_file.FilePlan.around`."""
        yield from self._around
        crcs = {self._members[name]: crc for name, crc in sums.items()}
        yield from self._layout.around(self._sums | crcs)


def encode(tensors: TensorKinds) -> bytes:
    """The pickle of a dict of contiguous tensors, storages numbered in its order.

    Args:
        tensors: Dtype and shape by name.
    """
    items = b"".join(
        _text(name) + _tensor(str(key), dtype, shape)
        for key, (name, (dtype, shape)) in enumerate(tensors.items())
    )
    return b"\x80\x02}(" + items + b"u."


def _tensor(key: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """A call of torch's function that builds a tensor."""
    count = math.prod(shape)
    old = dtype in STORAGES
    storage = _name("torch", STORAGES[dtype]) if old else _name("torch.storage", "UntypedStorage")
    size = count if old else array_nbytes(dtype, shape)
    saved = _tuple(_text("storage"), storage, _text(key), _text("cpu"), _number(size))
    hooks = _name("collections", "OrderedDict") + b")R"
    items = [
        saved + b"Q",
        _number(0),
        _tuple(*map(_number, shape)),
        _tuple(*map(_number, _strides(shape))),
        b"\x89",
        hooks,
    ]
    if not old:
        items.append(_name("torch", dtype))
    build = "_rebuild_tensor_v2" if old else "_rebuild_tensor_v3"
    return _name("torch._utils", build) + _tuple(*items) + b"R"


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


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"
