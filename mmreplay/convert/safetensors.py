"""One safetensors file: a JSON header, checked, and tensors that follow each other.

safetensors in parts: a folder of files of some rows each, and an index.

Names and index are those of the Hugging Face Hub: ``model-00001-of-00004.safetensors``
and ``model.safetensors.index.json``, whose ``weight_map`` gives each tensor one file.
Rows of one column lie in several, so tensors are named for their part as well:
``observation.00001``. What else is to be known stands in the index's ``metadata``.

safetensors: tensors under a JSON header, without a library of its own to write.

The library reads it, slices included. The description, and a CRC32C of every column,
which the format itself lacks, stand in ``__metadata__``. Large ones can be split into
parts under an index (`safetensors_parts`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from mmreplay import strict_json
from mmreplay.checksums import crc32c
from mmreplay.convert import registry
from mmreplay.convert.array_file import (
    ArrayColumn,
    ArrayFile,
    ArrayReader,
    ArrayWriter,
    Piece,
    Stored,
    Stream,
)
from mmreplay.convert.base import Block, Notes, Reader, Writer, doubt_sums, undescribed
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.staging import Staging
from mmreplay.convert.undescribed import PlainReader
from mmreplay.convert.zip_file import ALIGNMENT
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.schema.dtypes import storage_dtype

METADATA = "__metadata__"
SUMS = "mmreplay.crc32c"
MAX_HEADER_NBYTES = 16 << 20
MAX_TENSORS = 10_000
MAX_AXIS = 1 << 48
CODES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}

Columns = Mapping[str, tuple[str, tuple[int, ...]]]


class SafetensorsPlan:
    """Where everything lies; see `array_file.Plan`.

    Attributes:
        tensors: Names of all tensors.
    """

    sum = staticmethod(crc32c)

    def __init__(
        self, columns: Columns, rows: int, told: Mapping[str, str], suffix: str = ""
    ) -> None:
        """Lay a file out.

        Args:
            columns: Dtype name and row shape by name.
            rows: Of every column.
            told: What ``__metadata__`` is to say beside the checksums.
            suffix: What the tensors' names have behind the columns'.
        """
        # The format allows no gaps: columns of large items first are all aligned.
        order = sorted(columns, key=lambda n: -storage_dtype(columns[n][0]).itemsize)
        self._told = dict(told)
        self._suffix = suffix
        self._tensors: dict[str, Any] = {}
        row_nbytes, offsets, end = {}, {}, 0
        for name in order:
            dtype, shape = columns[name]
            each = storage_dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
            row_nbytes[name], offsets[name] = each, end
            self._tensors[name + suffix] = {
                "dtype": CODES[dtype],
                "shape": [rows, *shape],
                "data_offsets": [end, end + each * rows],
            }
            end += each * rows
        start = len(self._header(dict.fromkeys(order, 0)))
        self.pieces = {n: Piece(start + offsets[n], row_nbytes[n]) for n in order}
        self.nbytes = start + end
        self.tensors = tuple(self._tensors)

    def _header(self, sums: Mapping[str, int]) -> bytes:
        crcs = {name + self._suffix: f"{crc:08x}" for name, crc in sums.items()}
        crcs |= {key: f"{_told_sum(text):08x}" for key, text in self._told.items()}
        metadata = {**self._told, SUMS: json.dumps(crcs)}
        value = {METADATA: metadata, **self._tensors}
        data = json.dumps(value, separators=(",", ":")).encode()
        data += b" " * (-(8 + len(data)) % ALIGNMENT)
        if len(data) > MAX_HEADER_NBYTES:
            raise FormatError(
                f"the header takes {len(data)} bytes, expected at most "
                f"{MAX_HEADER_NBYTES}; store smaller statistics with the buffer"
            )
        return struct.pack("<Q", len(data)) + data

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `array_file.Plan.around`."""
        yield 0, self._header({name: sums[name] for name in self.pieces})


def parse(file: File) -> tuple[dict[str, Any], dict[str, ArrayColumn]]:
    """What the header of a file says: its metadata, and every tensor.

    Raises:
        FormatError: It is no safetensors file.
        CorruptError: Its header and its bytes contradict each other.
    """
    start, header = _header(file)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or len(header) > MAX_TENSORS:
        raise FormatError(
            f"{file.path} has {len(header)} tensors, expected at most {MAX_TENSORS}, "
            "and metadata that is an object"
        )
    spans = {name: _tensor(file, name, value) for name, value in header.items()}
    _check_tiled(file, start, spans)
    sums = sums_of(file, metadata)
    _check_told(file, metadata, sums)
    columns = {
        name: _column(file, start + first, name, dtype, shape, sums.get(name))
        for name, (dtype, shape, first, _) in spans.items()
    }
    return metadata, columns


def text(file: File, metadata: dict[str, Any], key: str) -> str:
    """A text of the metadata.

    Raises:
        FormatError: It is none, or is not there.
    """
    told = metadata.get(key)
    if not isinstance(told, str):
        raise FormatError(f"{file.path}: {key!r} in its metadata is no text")
    return told


def check_summed(
    file: File, metadata: dict[str, Any], names: Iterable[str], notes: Notes
) -> None:
    """Check that a file of ours has a checksum of all that it is read for.

    Args:
        file: It.
        metadata: What `parse` found.
        names: Of tensors, and of texts in the metadata.
        notes: Takes the doubt if there is none at all.

    Raises:
        CorruptError: Some have one, and others have none.
    """
    if SUMS not in metadata:
        doubt_sums(notes, file.path.name, repr(SUMS))
        return
    lacking = set(names) - sums_of(file, metadata).keys()
    if lacking:
        raise CorruptError(
            f"{file.path}: {SUMS!r} in its metadata has no checksum of "
            f"{min(lacking)!r}, expected one of all that is there; the file was "
            "damaged: restore it from a copy"
        )


Tensor = tuple[str, tuple[int, ...], int, int]


def _header(file: File) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and what the header says."""
    if file.nbytes < 8:
        raise CorruptError(
            f"{file.path} has {file.nbytes} bytes, expected the 8 of a header's length "
            "at byte 0; it was cut"
        )
    (size,) = struct.unpack("<Q", file.pread(8, 0))
    if size > MAX_HEADER_NBYTES:
        raise FormatError(
            f"{file.path} says a header of {size} bytes at byte 0, expected at most "
            f"{MAX_HEADER_NBYTES}; it is no safetensors file"
        )
    if 8 + size > file.nbytes:
        raise CorruptError(
            f"{file.path} has {file.nbytes} bytes, expected a header of {size} from "
            "byte 8 on; it was cut"
        )
    name = f"{file.path}: the header at byte 8"
    return 8 + size, strict_json.parse(file.pread(size, 8), name)


def _tensor(file: File, name: str, value: object) -> Tensor:
    """Dtype, shape and place that the header gives a tensor, each checked."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(value, dict) or set(value) != keys:
        raise FormatError(
            f"{file.path}: tensor {name!r} is {str(value)[:60]}, expected an object of "
            f"{sorted(keys)}"
        )
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FormatError(
            f"{file.path}: tensor {name!r} has dtype {str(code)[:40]!r}, expected one "
            f"of {', '.join(DTYPES)}; cast it first"
        )
    if not _numbers(shape, 64, MAX_AXIS) or not _numbers(offsets, 2, 1 << 62):
        raise FormatError(
            f"{file.path}: tensor {name!r} has shape {str(shape)[:60]} at "
            f"{str(offsets)[:60]}, expected lists of sizes and of two offsets"
        )
    if len(offsets) != 2:
        raise FormatError(
            f"{file.path}: tensor {name!r} has {len(offsets)} offsets, expected two"
        )
    nbytes = storage_dtype(dtype).itemsize
    for axis in shape:
        nbytes *= axis
    if offsets[0] + nbytes != offsets[1]:
        raise CorruptError(
            f"{file.path}: tensor {name!r} of {dtype}{shape} takes {nbytes} bytes, "
            f"expected {offsets[1] - offsets[0]} as its offsets {offsets} say"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _numbers(value: object, most: int, bound: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(number) is int and 0 <= number < bound for number in value)
    )


def _check_tiled(file: File, start: int, spans: dict[str, Tensor]) -> None:
    """Check that tensors follow each other from the header to the end of the file."""
    end = 0
    for name, (_, _, first, stop) in sorted(spans.items(), key=lambda i: i[1][2:]):
        if first != end:
            raise CorruptError(
                f"{file.path}: tensor {name!r} begins at byte {start + first}, "
                f"expected {start + end}, where the one before it ends"
            )
        end = stop
    if start + end != file.nbytes:
        raise CorruptError(
            f"{file.path} has {file.nbytes} bytes, expected {start + end} as its "
            "header says; it was cut or appended to: restore it from a copy"
        )


def sums_of(file: File, metadata: dict[str, Any]) -> dict[str, int]:
    """Our checksums by tensor, and by text of the metadata, where the file has some.

    Raises:
        FormatError: They are none.
    """
    if SUMS not in metadata:
        return {}
    name = f"{file.path}: {SUMS!r} in its metadata"
    told = text(file, metadata, SUMS)
    value = strict_json.parse(told.encode("utf-8", "replace"), name)
    try:
        return {key: int(crc, 16) for key, crc in value.items()}
    except (TypeError, ValueError):
        raise FormatError(f"{name} holds no checksums of 8 hex digits") from None


def _told_sum(told: str) -> int:
    return crc32c(memoryview(told.encode("utf-8", "replace")))


def _check_told(file: File, metadata: dict[str, Any], sums: dict[str, int]) -> None:
    """Compare our texts in the metadata with their checksums, where there are some."""
    for key, told in metadata.items():
        if key in sums and _told_sum(str(told)) != sums[key]:
            raise CorruptError(
                f"{file.path}: {key!r} in its metadata has checksum "
                f"{_told_sum(str(told)):08x}, expected {sums[key]:08x}; the file was "
                "damaged: restore it from a copy"
            )


def _column(
    file: File, offset: int, name: str, dtype: str, shape: tuple[int, ...],
    crc: int | None,
) -> ArrayColumn:  # fmt: skip
    stream = partial(_stream, file, offset, name, crc)
    return ArrayColumn(dtype, storage_dtype(dtype), shape, stream, offset)


def _stream(file: File, offset: int, name: str, crc: int | None) -> Stream:
    return Stored(file, offset, f"tensor {name!r}", crc32c, 0, crc)


STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
PART, ROWS = "mmreplay.part", "mmreplay.rows"
MAX_INDEX_NBYTES = 16 << 20
MAX_PARTS = 99_999


def part_name(number: int, count: int) -> str:
    """File of a part, counted from 1."""
    return f"{STEM}-{number:05d}-of-{count:05d}.safetensors"


def part_rows(description: Description, part_bytes: float) -> int:
    """Rows of a part of about so many bytes, at least one.

    Raises:
        SchemaError: It is no number of bytes, or makes too many parts.
    """
    sized = type(part_bytes) in (int, float) and 1 <= part_bytes < 1 << 62
    rows = max(1, int(part_bytes // description.row_nbytes)) if sized else 1
    if not sized or description.rows > rows * MAX_PARTS:
        raise SchemaError(
            f"part_bytes: got {part_bytes!r}, expected bytes of a file, such as 5e9, "
            f"that make at most {MAX_PARTS} parts; give a larger number"
        )
    return rows


def _told(number: int, count: int, first: int, stop: int, told: bytes) -> str:
    """What a part says of itself; by the checksum parts of two exports differ."""
    of = f"{google_crc32c.value(told):08x}"
    value = {"part": number, "parts": count, "rows": [first, stop], "of": of}
    return json.dumps(value, separators=(",", ":"))


def owns(folder: Path) -> bool:
    """Whether a folder holds parts and their index, and nothing else."""
    names = {each.name for each in folder.iterdir()}
    count = len(names) - 1
    return names == {INDEX, *(part_name(k + 1, count) for k in range(count))}


class PartsWriter(Writer):
    """Writes the folder, part by part; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, rows: int, overwrite: bool
    ) -> None:
        """Make a folder of parts of so many rows."""
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._rows = rows
        self._count = max(1, -(-description.rows // rows))
        self._bytes = description.to_bytes()
        self._done, self._size = 0, 0
        self._map: dict[str, str] = {}
        self._spans: dict[str, list[int]] = {}
        self._part: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> None:
        number = len(self._spans) + 1
        stop = min(self._done + self._rows, self._description.rows)
        told = _told(number, self._count, self._done, stop, self._bytes)
        plan = SafetensorsPlan(
            self._description.columns, stop - self._done, {PART: told}, f".{number:05d}"
        )
        name = part_name(number, self._count)
        self._spans[name] = [self._done, stop]
        self._map |= dict.fromkeys(plan.tensors, name)
        self._size += plan.nbytes
        file = File.create(self._staging.path / name, plan.nbytes)
        self._part = ArrayFile(file, plan, stop - self._done)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        assert self._part is not None
        first = 0
        while first < len(block):
            if not self._part.room and self._done < self._description.rows:
                self._part.finish()
                self._begin()
            room = self._part.room or len(block)
            piece = block.between(first, first + room)
            self._part.write(piece)
            self._done += len(piece)
            first += len(piece)

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._part is not None
        self._part.finish()
        metadata = {
            "total_size": self._size, KEY: self._bytes.decode(), ROWS: self._spans,
        }  # fmt: skip
        value = {"metadata": metadata, "weight_map": self._map}
        data = json.dumps(value, indent=1).encode()
        if len(data) > MAX_INDEX_NBYTES:
            raise FormatError(
                f"the index takes {len(data)} bytes, expected at most "
                f"{MAX_INDEX_NBYTES}; give a larger part_bytes"
            )
        files.replace_bytes(self._staging.path / INDEX, data)
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._part is not None:
            self._part.close()
        self._staging.abort()


class PartsReader(Reader):
    """Reads such a folder, part by part; see `Reader`."""

    def __init__(self, folder: Path) -> None:
        """Open the index, and look into every part once."""
        self.report = Notes()
        self._folder = folder
        index = folder / INDEX
        self._value = strict_json.parse(
            files.read_bytes(index, MAX_INDEX_NBYTES), str(index)
        )
        self._index = index
        self._description = self._describe()
        self._spans = self._check_spans()
        self._check_map()
        for number in range(1, len(self._spans) + 1):
            self._open(number).close()

    def _metadata(self) -> dict[str, Any]:
        metadata = self._value.get("metadata")
        if not isinstance(metadata, dict) or not {KEY, ROWS} <= metadata.keys():
            raise FormatError(
                f"{self._index} has no metadata of {KEY!r} and {ROWS!r}, expected the "
                "index of a buffer's parts; load files of others one by one"
            )
        return metadata

    def _describe(self) -> Description:
        told, name = self._metadata()[KEY], f"{self._index}: {KEY!r} in its metadata"
        if not isinstance(told, str):
            raise FormatError(f"{name} is no text")
        self._bytes = told.encode("utf-8", "replace")
        return Description.from_bytes(self._bytes, name)

    def _check_spans(self) -> list[tuple[int, int]]:
        """Rows of each part, which follow each other.

        Raises:
            FormatError: They do not, or a part is named otherwise than parts are.
        """
        rows = self._metadata()[ROWS]
        if not isinstance(rows, dict) or not 1 <= len(rows) <= MAX_PARTS:
            raise FormatError(
                f"{self._index}: {ROWS!r} is {str(rows)[:60]}, expected the rows of 1 "
                f"to {MAX_PARTS} parts"
            )
        spans, end = [], 0
        for number, (name, span) in enumerate(rows.items(), 1):
            expected = part_name(number, len(rows))
            # Never a path: what else it says is not even looked at.
            if name != expected:
                raise FormatError(
                    f"{self._index} names the part {name[:80]!r}, expected "
                    f"{expected!r} beside it; it was edited"
                )
            pair = span if isinstance(span, list) and len(span) == 2 else [-1, -1]
            stop = pair[1]
            if type(stop) is not int or pair[0] != end or stop < end:
                raise FormatError(
                    f"{self._index} says rows {str(span)[:60]} of {name}, expected "
                    f"[{end}, ...] as they follow each other; it was edited"
                )
            spans.append((end, stop))
            end = stop
        if end != self._description.rows:
            raise FormatError(
                f"{self._index} says {end} rows in its parts, expected "
                f"{self._description.rows} as its description says; it was edited"
            )
        return spans

    def _check_map(self) -> None:
        """Refuse an index that gives a tensor another file than the one it is in."""
        found = self._value.get("weight_map")
        count = len(self._spans)
        expected = {
            f"{name}.{number:05d}": part_name(number, count)
            for number in range(1, count + 1)
            for name in self._description.columns
        }
        if found != expected:
            found = found if isinstance(found, dict) else {}
            names = found.keys() | expected.keys()
            name = min(n for n in names if found.get(n) != expected.get(n))
            raise FormatError(
                f"{self._index}: weight_map gives tensor {name[:80]!r} the file "
                f"{str(found.get(name))[:80]!r}, expected {expected.get(name)!r}; it "
                "was edited"
            )

    def _open(self, number: int) -> ArrayReader:
        """A part as a reader of its rows, checked against the index."""
        first, stop = self._spans[number - 1]
        count = len(self._spans)
        file = File.open(self._folder / part_name(number, count), None)
        try:
            metadata, columns = parse(file)
            told = text(file, metadata, PART)
            expected = _told(number, count, first, stop, self._bytes)
            if told != expected:
                raise FormatError(
                    f"{file.path} says that it is part {told[:120]}, expected "
                    f"{expected} as {self._index} says; it is of another export"
                )
            names = (f"{name}.{number:05d}" for name in self._description.columns)
            summed = (PART, *names)
            check_summed(file, metadata, summed, self.report)
            return ArrayReader(file, _plain(columns, number), self._rows(stop - first))
        except BaseException:
            file.close()
            raise

    def _rows(self, count: int) -> Description:
        """The description with so many rows, of whichever environment."""
        stop = np.zeros(self._description.num_envs, np.int64)
        stop[0] = count
        return replace(self._description, first=np.zeros_like(stop), stop=stop)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as part:
                yield from part.blocks(rows_per_block)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as part:
                yield from part.marks()

    def close(self) -> None:
        """See `Reader.close`."""


def _plain(columns: dict[str, ArrayColumn], number: int) -> dict[str, ArrayColumn]:
    suffix = f".{number:05d}"
    return {name.removesuffix(suffix): column for name, column in columns.items()}


def refuse_part(file: File, metadata: dict[str, Any]) -> None:
    """Refuse a part alone: its rows are not all.

    Raises:
        FormatError: It is one.
    """
    if PART in metadata:
        raise FormatError(
            f"{file.path} is one part of several, expected their folder or {INDEX}; "
            "name that"
        )


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    part_bytes: float | None = None,
    layout: str | None = None,
    prefix: str | None = None,
) -> Writer:
    """Make a safetensors file as a target, or a folder of them.

    Args:
        target: The file, or the folder.
        description: What will come.
        overwrite: Replace what is there.
        part_bytes: Split into files of about so many bytes, and at least one row,
            in a folder with an index.
        layout: ``"velora"`` for a folder with velora's pair of files.
        prefix: Of the names of that pair; ``"buffer_"`` by default.

    Raises:
        SchemaError: An option is not legal, or the layout cannot hold the fields.
    """
    other = registry.find_layout("safetensors", layout)
    _check(layout, part_bytes, prefix)
    if other is not None:
        return other.open_writer(
            "safetensors", target, description, overwrite=overwrite, prefix=prefix
        )
    if part_bytes is not None:
        rows = part_rows(description, part_bytes)
        return PartsWriter(target, description, rows, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def _plan(description: Description) -> SafetensorsPlan:
    for name in (METADATA, SUMS):
        if name in description.columns:
            raise SchemaError(
                f"field {name!r}: got a name that files of safetensors keep for "
                "themselves, expected another; leave it out with fields=, or choose "
                "another format"
            )
    told = {KEY: description.to_bytes().decode()}
    return SafetensorsPlan(description.columns, description.rows, told)


def _check(layout: str | None, part_bytes: float | None, prefix: str | None) -> None:
    if layout is not None and part_bytes is not None:
        raise SchemaError(
            f"part_bytes: got {part_bytes!r} with layout={layout!r}, expected None "
            "with it, which is one pair of files; leave one of them out"
        )
    if layout is None:
        registry.refuse_layout_options("safetensors", prefix=prefix)


def planned(
    description: Description,
    *,
    part_bytes: float | None = None,
    layout: str | None = None,
    prefix: str | None = None,
) -> int | None:
    """Bytes of the file, or nearly of its parts; see `registry.planned`."""
    other = registry.find_layout("safetensors", layout)
    _check(layout, part_bytes, prefix)
    if other is not None:
        other.planned("safetensors", description, prefix=prefix)
        return None
    if part_bytes is not None:
        part_rows(description, part_bytes)
    return _plan(description).nbytes


def recognizes(path: Path) -> bool:
    """Whether a folder holds parts, or files of another library's layout."""
    if (path / INDEX).is_file():
        return True
    return registry.find_layout("safetensors", None, path) is not None


def open_reader(path: Path, *, layout: str | None = None) -> Reader:
    """Open a safetensors file, an index of parts or their folder as a source.

    Args:
        path: It.
        layout: ``"velora"`` for velora's pair; known where its names and tensors are
            there.
    """
    other = registry.find_layout("safetensors", layout, path)
    if other is not None:
        return other.open_reader("safetensors", path)
    if path.is_dir():
        return PartsReader(path)
    if path.name == INDEX:
        return PartsReader(path.parent)
    file = File.open(path, None)
    try:
        return _reader(file)
    except BaseException:
        file.close()
        raise


def _reader(file: File) -> Reader:
    metadata, columns = parse(file)
    refuse_part(file, metadata)
    notes = Notes()
    if KEY not in metadata:
        if sums_of(file, metadata).keys() & {KEY, PART}:
            raise undescribed(file.path)
        return PlainReader(file, columns, notes)
    told = text(file, metadata, KEY)
    name = f"{file.path}: {KEY!r} in its metadata"
    description = Description.from_bytes(told.encode("utf-8", "replace"), name)
    summed = (KEY, *description.columns)
    check_summed(file, metadata, summed, notes)
    return ArrayReader(file, columns, description, notes)
