"""safetensors: tensors under a JSON header, in one file or in several parts.

The library reads it, slices included; no library is needed to write it. The
description, and a CRC32C of every column, which the format itself lacks, stand in
``__metadata__``.

Large datasets can be split into a folder of part files with an index, whose names are
those of the Hugging Face Hub: ``model-00001-of-00004.safetensors`` and
``model.safetensors.index.json``. Its ``weight_map`` gives each tensor one file; as the
rows of a column lie in several, tensors have the number of their part as a suffix:
``observation.00001``. The description stands in the index's ``metadata``.

`write_tensors` and `TensorFile` are for files whose tensors another library names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.checksums import crc32c
from mmreplay.convert import registry
from mmreplay.convert.array_file import (
    ArrayColumn,
    ArrayFile,
    ArrayReader,
    ArraySpan,
    ArrayWriter,
    Kinds,
    Stored,
    Stream,
)
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    Block,
    Notes,
    Reader,
    Writer,
    description_lost,
    doubt_sums,
)
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.staging import Staging
from mmreplay.convert.undescribed import PlainReader, in_place, needless_autoreset
from mmreplay.convert.values import Shard
from mmreplay.convert.zip_file import ALIGNMENT
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, SchemaError, undone_by
from mmreplay.format.metadata import Autoreset
from mmreplay.schema.dtypes import array_nbytes, storage_dtype

METADATA = "__metadata__"
SUMS = "mmreplay.crc32c"
MAX_HEADER_NBYTES = 16 << 20
MAX_TENSORS = 10_000
MAX_AXIS = 1 << 48
CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
Columns = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype name and row shape by name."""
Arrays = Mapping[str, NDArray[np.generic]]
Tensor = tuple[str, tuple[int, ...], int, int]
STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
SHARD, ROWS = "mmreplay.part", "mmreplay.rows"
MAX_INDEX_NBYTES = 16 << 20
MAX_SHARDS = 99_999


def open_reader(
    path: Path, *, layout: str | None = None, autoreset: Autoreset | None = None
) -> Reader:
    """Open a safetensors file, an index of parts or their folder as a source.

    Args:
        path: The file or folder.
        layout: ``"velora"`` for velora's pair; the default if the files have its
            names and tensors.
        autoreset: Of rows with positions and without a description, which may not say
            it: ``"next_step"``, ``"same_step"`` or ``"disabled"``.

    Raises:
        FormatError: It is no such file.
        CorruptError: It is damaged.
    """
    other = registry.find_layout("safetensors", layout, path)
    folder = path.is_dir() or path.name == INDEX
    if autoreset is not None and (folder or other is not None):
        raise needless_autoreset(path, autoreset)
    if other is not None:
        return other.open_reader("safetensors", path)
    if path.is_dir():
        return ShardsReader(path)
    if path.name == INDEX:
        return ShardsReader(path.parent)
    file = File.open(path, None)
    with undone_by(file.close):
        return _reader(file, autoreset)


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
        description: Of the rows.
        overwrite: Replace an existing target.
        part_bytes: Split into files of about so many bytes, and at least one row,
            in a folder with an index.
        layout: ``"velora"`` for a folder with velora's pair of files.
        prefix: Of the pair's file names; ``"buffer_"`` by default.

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
        shards = shards_of(description, part_bytes)
        return ShardsWriter(target, description, shards, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def planned(
    description: Description,
    *,
    part_bytes: float | None = None,
    layout: str | None = None,
    prefix: str | None = None,
) -> int | None:
    """Bytes of the file, nearly those of its parts; see `registry.planned`."""
    other = registry.find_layout("safetensors", layout)
    _check(layout, part_bytes, prefix)
    if other is not None:
        other.planned("safetensors", description, prefix=prefix)
        return None
    if part_bytes is not None:
        shards_of(description, part_bytes)
    return _plan(description).nbytes


def recognizes(path: Path) -> bool:
    """Return whether a folder holds parts, or files of another library's layout."""
    if (path / INDEX).is_file():
        return True
    return registry.find_layout("safetensors", None, path) is not None


def _check(layout: str | None, part_bytes: float | None, prefix: str | None) -> None:
    if layout is not None and part_bytes is not None:
        raise SchemaError(
            f"part_bytes must be None with layout={layout!r}, which is one pair of "
            f"files, got {part_bytes!r}. Leave one of them out."
        )
    if layout is None:
        registry.refuse_layout_options("safetensors", prefix=prefix)


def _plan(description: Description) -> SafetensorsPlan:
    for name in (METADATA, SUMS):
        if name in description.columns:
            raise SchemaError(
                f"field {name!r}: safetensors files use this name themselves. Leave "
                "the field out with fields=, or choose another format."
            )
    texts = {KEY: description.to_bytes().decode()}
    return SafetensorsPlan(description.arrays, texts)


def _reader(file: File, autoreset: Autoreset | None) -> Reader:
    metadata, columns = parse(file)
    refuse_shard(file, metadata)
    notes = Notes()
    if KEY not in metadata:
        if sums_of(file, metadata).keys() & {KEY, SHARD}:
            raise description_lost(file.path)
        return in_place(PlainReader(file, columns, notes, autoreset=autoreset))
    if autoreset is not None:
        raise needless_autoreset(file.path, autoreset)
    described = text(file, metadata, KEY).encode("utf-8", "replace")
    name = f"{file.path}: {KEY!r} in its metadata"
    description = Description.from_bytes(described, name)
    summed = (KEY, *_names(description))
    check_summed(file, metadata, summed, notes)
    return ArrayReader(file, columns, description, notes)


def _names(description: Description) -> tuple[str, ...]:
    """Names of the arrays of a file, in order."""
    return tuple(description.arrays_of(0, dict.fromkeys(description.schema.varying, 0)))


def parse(file: File) -> tuple[dict[str, Any], dict[str, ArrayColumn]]:
    """Metadata and tensors of a file, by its header.

    Raises:
        FormatError: It is no safetensors file.
        CorruptError: Its header and its bytes contradict each other.
    """
    start, header = _header(file)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or len(header) > MAX_TENSORS:
        raise FormatError(
            f"{file.path} must have at most {MAX_TENSORS} tensors and an object as "
            f"metadata, got {len(header)} and a {type(metadata).__name__}."
        )
    spans = {name: _tensor(file, name, value) for name, value in header.items()}
    _check_tiled(file, start, spans)
    sums = sums_of(file, metadata)
    _check_texts(file, metadata, sums)
    columns = {
        name: _column(file, start + first, name, dtype, shape, sums.get(name))
        for name, (dtype, shape, first, _) in spans.items()
    }
    return metadata, columns


def _header(file: File) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data, and the header as JSON."""
    if file.nbytes < 8:
        raise CorruptError(
            f"{file.path} must have at least 8 bytes for the length of its header, got "
            f"{file.nbytes}. The file is truncated."
        )
    (size,) = struct.unpack("<Q", file.pread(8, 0))
    if size > MAX_HEADER_NBYTES:
        raise FormatError(
            f"{file.path} must have a header of at most {MAX_HEADER_NBYTES} bytes, got "
            f"{size} at byte 0. It is not a safetensors file."
        )
    if 8 + size > file.nbytes:
        raise CorruptError(
            f"{file.path} must have a header of {size} bytes from byte 8 on, got "
            f"{file.nbytes} bytes in all. The file is truncated."
        )
    name = f"{file.path}: the header at byte 8"
    return 8 + size, strict_json.parse(file.pread(size, 8), name)


def _tensor(file: File, name: str, value: object) -> Tensor:
    """Return the dtype, shape and offsets of a tensor of the header, checked."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(value, dict) or set(value) != keys:
        raise FormatError(
            f"{file.path}: tensor {name!r} must be an object of {sorted(keys)}, got "
            f"{str(value)[:60]}."
        )
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise FormatError(
            f"{file.path}: the dtype of tensor {name!r} must be one of "
            f"{', '.join(DTYPES)}, got {str(code)[:40]!r}. Cast it first."
        )
    if not _numbers(shape, 64, MAX_AXIS) or not _numbers(offsets, 2, 1 << 62):
        raise FormatError(
            f"{file.path}: tensor {name!r} must have lists of sizes and of two "
            f"offsets, got {str(shape)[:60]} and {str(offsets)[:60]}."
        )
    if len(offsets) != 2:
        raise FormatError(
            f"{file.path}: tensor {name!r} must have two offsets, got {len(offsets)}."
        )
    nbytes = array_nbytes(dtype, shape)
    if offsets[0] + nbytes != offsets[1]:
        raise CorruptError(
            f"{file.path}: tensor {name!r} of {dtype}{shape} must take {nbytes} bytes, "
            f"got {offsets[1] - offsets[0]} by its offsets {offsets}."
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _numbers(value: object, max_length: int, bound: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= max_length
        and all(type(number) is int and 0 <= number < bound for number in value)
    )


def _check_tiled(file: File, start: int, spans: dict[str, Tensor]) -> None:
    """Check that tensors follow each other from the header to the end of the file."""
    end = 0
    for name, (_, _, first, stop) in sorted(spans.items(), key=lambda i: i[1][2:]):
        if first != end:
            raise CorruptError(
                f"{file.path}: tensor {name!r} must begin at byte {start + end}, where "
                f"the tensor before it ends, got {start + first}."
            )
        end = stop
    if start + end != file.nbytes:
        raise CorruptError(
            f"{file.path} must have {start + end} bytes as its header says, got "
            f"{file.nbytes}. The file was truncated or appended to: restore it from a "
            "copy."
        )


def _check_texts(file: File, metadata: dict[str, Any], sums: dict[str, int]) -> None:
    """Compare texts of the metadata with their checksums, if there are some."""
    for key, value in metadata.items():
        if key in sums and _text_sum(str(value)) != sums[key]:
            raise CorruptError(
                f"{file.path}: {key!r} in its metadata must have checksum "
                f"{sums[key]:08x}, got {_text_sum(str(value)):08x}. The file is "
                "damaged: restore it from a copy."
            )


def _column(
    file: File, offset: int, name: str, dtype: str, shape: tuple[int, ...], crc: int | None
) -> ArrayColumn:
    stream = partial(_stream, file, offset, name, crc)
    return ArrayColumn(dtype, storage_dtype(dtype), shape, stream, offset)


def _stream(file: File, offset: int, name: str, crc: int | None) -> Stream:
    return Stored(file, offset, f"tensor {name!r}", crc32c, 0, crc)


def sums_of(file: File, metadata: dict[str, Any]) -> dict[str, int]:
    """Checksums by tensor and by text of the metadata; empty if the file has none.

    Raises:
        FormatError: They are no checksums.
    """
    if SUMS not in metadata:
        return {}
    name = f"{file.path}: {SUMS!r} in its metadata"
    encoded = text(file, metadata, SUMS).encode("utf-8", "replace")
    value = strict_json.parse(encoded, name)
    try:
        return {key: int(crc, 16) for key, crc in value.items()}
    except (TypeError, ValueError):
        raise FormatError(f"{name} holds no checksums of 8 hex digits") from None


def text(file: File, metadata: dict[str, Any], key: str) -> str:
    """A text of the metadata.

    Raises:
        FormatError: It is missing, or no text.
    """
    value = metadata.get(key)
    if not isinstance(value, str):
        raise FormatError(f"{file.path}: {key!r} in its metadata is no text")
    return value


def _text_sum(value: str) -> int:
    return crc32c(memoryview(value.encode("utf-8", "replace")))


def check_summed(file: File, metadata: dict[str, Any], names: Iterable[str], notes: Notes) -> None:
    """Check that a file of ours has a checksum of everything that is read.

    Args:
        file: The file.
        metadata: As `parse` returns it.
        names: Of tensors, and of texts in the metadata.
        notes: Receives the doubt if the file has no checksums at all.

    Raises:
        CorruptError: Some have a checksum, and others have none.
    """
    if SUMS not in metadata:
        doubt_sums(notes, file.path.name, repr(SUMS))
        return
    missing = set(names) - sums_of(file, metadata).keys()
    if missing:
        raise CorruptError(
            f"{file.path}: {SUMS!r} in its metadata has no checksum of "
            f"{min(missing)!r}. The file is damaged: restore it from a copy."
        )


class SafetensorsPlan:
    """The layout of one file; see `array_file.FilePlan`.

    Attributes:
        tensors: Names of all tensors.
    """

    sum = staticmethod(crc32c)

    def __init__(self, arrays: Kinds, texts: Mapping[str, str], suffix: str = "") -> None:
        """Lay a file out.

        Args:
            arrays: Dtype name and shape, rows first, by name.
            texts: Entries of ``__metadata__``, besides the checksums.
            suffix: A tensor's name is that of its array and this.
        """
        # The format allows no gaps; with large items first, all arrays are aligned.
        order = sorted(arrays, key=lambda n: -storage_dtype(arrays[n][0]).itemsize)
        self._texts = dict(texts)
        self._suffix = suffix
        self._tensors: dict[str, Any] = {}
        row_nbytes, offsets, end = {}, {}, 0
        for name in order:
            dtype, shape = arrays[name]
            each = array_nbytes(dtype, shape[1:])
            row_nbytes[name], offsets[name] = each, end
            self._tensors[name + suffix] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [end, end + each * shape[0]],
            }
            end += each * shape[0]
        start = len(self._header(dict.fromkeys(order, 0)))
        self.spans = {
            n: ArraySpan(start + offsets[n], row_nbytes[n], 0, arrays[n][1][0]) for n in order
        }
        self.nbytes = start + end
        self.tensors = tuple(self._tensors)

    def _header(self, sums: Mapping[str, int]) -> bytes:
        crcs = {name + self._suffix: f"{crc:08x}" for name, crc in sums.items()}
        crcs |= {key: f"{_text_sum(text):08x}" for key, text in self._texts.items()}
        metadata = {**self._texts, SUMS: json.dumps(crcs)}
        value = {METADATA: metadata, **self._tensors}
        data = json.dumps(value, separators=(",", ":")).encode()
        data += b" " * (-(8 + len(data)) % ALIGNMENT)
        if len(data) > MAX_HEADER_NBYTES:
            raise FormatError(
                f"the header must take at most {MAX_HEADER_NBYTES} bytes, got "
                f"{len(data)}. Store smaller statistics with the buffer."
            )
        return struct.pack("<Q", len(data)) + data

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """See `array_file.FilePlan.around`."""
        yield 0, self._header({name: sums[name] for name in self.spans})


class ShardsReader(Reader):
    """Reads a folder of parts, one after another; see `Reader`."""

    def __init__(self, folder: Path) -> None:
        """Open the index, and check every part."""
        self.report = Notes()
        self._folder = folder
        index = folder / INDEX
        self._value = strict_json.parse(files.read_bytes(index, MAX_INDEX_NBYTES), str(index))
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
                f"{self._index} has no metadata of {KEY!r} and {ROWS!r}, so it is not "
                "the index of a buffer. Load files of other tools one by one."
            )
        return metadata

    def _describe(self) -> Description:
        value, name = self._metadata()[KEY], f"{self._index}: {KEY!r} in its metadata"
        if not isinstance(value, str):
            raise FormatError(f"{name} is no text")
        self._bytes = value.encode("utf-8", "replace")
        return Description.from_bytes(self._bytes, name)

    def _check_spans(self) -> list[tuple[int, int]]:
        """Rows of each part.

        Raises:
            FormatError: They do not follow each other, or a part has another name.
        """
        rows = self._metadata()[ROWS]
        if not isinstance(rows, dict) or not 1 <= len(rows) <= MAX_SHARDS:
            raise FormatError(
                f"{self._index}: {ROWS!r} must have the rows of 1 to {MAX_SHARDS} "
                f"files, got {str(rows)[:60]}."
            )
        spans, end = [], 0
        for number, (name, span) in enumerate(rows.items(), 1):
            expected = shard_name(number, len(rows))
            # Before anything is opened: the name could be a path elsewhere.
            if name != expected:
                raise FormatError(
                    f"{self._index} must name the file {expected!r}, got "
                    f"{name[:80]!r}. The index was edited after it was written."
                )
            pair = span if isinstance(span, list) and len(span) == 2 else [-1, -1]
            stop = pair[1]
            if type(stop) is not int or pair[0] != end or stop < end:
                raise FormatError(
                    f"{self._index}: the rows of {name} must be [{end}, ...], got "
                    f"{str(span)[:60]}. The index was edited after it was written."
                )
            spans.append((end, stop))
            end = stop
        if end != self._description.rows:
            raise FormatError(
                f"{self._index} says {end} rows in its files, but its description says "
                f"{self._description.rows}. The index was edited after it was written."
            )
        return spans

    def _check_map(self) -> None:
        """Refuse an index that names a wrong file for a tensor."""
        found = self._value.get("weight_map")
        count = len(self._spans)
        expected = {
            f"{name}.{number:05d}": shard_name(number, count)
            for number in range(1, count + 1)
            for name in _names(self._description)
        }
        if found != expected:
            found = found if isinstance(found, dict) else {}
            names = found.keys() | expected.keys()
            name = min(n for n in names if found.get(n) != expected.get(n))
            raise FormatError(
                f"{self._index}: weight_map must give tensor {name[:80]!r} the file "
                f"{expected.get(name)!r}, got {str(found.get(name))[:80]!r}. The index "
                "was edited after it was written."
            )

    def _open(self, number: int) -> ArrayReader:
        """A reader of one part, checked against the index."""
        first, stop = self._spans[number - 1]
        count = len(self._spans)
        file = File.open(self._folder / shard_name(number, count), None)
        with undone_by(file.close):
            metadata, columns = parse(file)
            shard = text(file, metadata, SHARD)
            expected = _shard_text(number, count, first, stop, self._bytes)
            if shard != expected:
                raise FormatError(
                    f"{file.path} says that it is part {shard[:120]}, but "
                    f"{self._index} says {expected}. The file is of another export."
                )
            names = (f"{name}.{number:05d}" for name in _names(self._description))
            summed = (SHARD, *names)
            check_summed(file, metadata, summed, self.report)
            return ArrayReader(file, _plain(columns, number), self._rows(stop - first))

    def _rows(self, count: int) -> Description:
        """The description with so many rows, all of environment 0."""
        stop = np.zeros(self._description.num_envs, np.int64)
        stop[0] = count
        return replace(self._description, first=np.zeros_like(stop), stop=stop)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as shard:
                yield from shard.blocks(rows_per_block)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as shard:
                yield from shard.marks()

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as shard:
                yield from shard.measures()

    def close(self) -> None:
        """See `Reader.close`."""


class ShardsWriter(Writer):
    """Writes a folder of parts, one after another; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, shards: Sequence[Shard], overwrite: bool
    ) -> None:
        """Make a folder of parts, at least one."""
        self.nbytes = 0
        self.notes = Notes()
        description.refuse_equal_names()
        self._description = description
        self._shards = shards
        self._count = len(shards)
        self._bytes = description.to_bytes()
        self._done, self._size = 0, 0
        self._map: dict[str, str] = {}
        self._spans: dict[str, list[int]] = {}
        self._shard: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        with undone_by(self.abort):
            self._begin()

    def _begin(self) -> None:
        number = len(self._spans) + 1
        planned = self._shards[number - 1]
        stop = self._done + planned.rows
        shard = _shard_text(number, self._count, self._done, stop, self._bytes)
        arrays = self._description.arrays_of(planned.rows, planned.totals)
        plan = SafetensorsPlan(arrays, {SHARD: shard}, f".{number:05d}")
        name = shard_name(number, self._count)
        self._spans[name] = [self._done, stop]
        self._map |= dict.fromkeys(plan.tensors, name)
        self._size += plan.nbytes
        file = File.create(self._staging.path / name, plan.nbytes)
        varying = self._description.schema.varying
        self._shard = ArrayFile(file, plan, planned.rows, varying)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        assert self._shard is not None
        first = 0
        while first < len(block):
            if not self._shard.rows_left and self._done < self._description.rows:
                self._shard.finish()
                self._begin()
            # After the last row of all, the part refuses more.
            count = self._shard.rows_left or len(block)
            rows = block.rows(first, first + count)
            self._shard.write(rows)
            self._done += len(rows)
            first += len(rows)

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._shard is not None
        self._shard.finish()
        metadata = {"total_size": self._size, KEY: self._bytes.decode(), ROWS: self._spans}
        value = {"metadata": metadata, "weight_map": self._map}
        data = json.dumps(value, indent=1).encode()
        if len(data) > MAX_INDEX_NBYTES:
            raise FormatError(
                f"the index must take at most {MAX_INDEX_NBYTES} bytes, got "
                f"{len(data)}. Pass a larger part_bytes."
            )
        files.replace_bytes(self._staging.path / INDEX, data)
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._shard is not None:
            self._shard.close()
        self._staging.abort()


def shard_name(number: int, count: int) -> str:
    """The file name of a part, numbered from 1."""
    return f"{STEM}-{number:05d}-of-{count:05d}.safetensors"


def shards_of(description: Description, part_bytes: float) -> list[Shard]:
    """Rows of parts of about so many bytes, at least one each.

    Raises:
        SchemaError: It is no number of bytes, or makes too many parts.
    """
    sized = type(part_bytes) in (int, float) and 1 <= part_bytes < 1 << 62
    varying = description.schema.varying
    shards: list[Shard] = []
    if sized and varying and description.values is not None:
        # Of a field that varies a row's bytes are its offset and its values.
        fixed = description.row_nbytes - 8 * len(varying)
        shards = description.values.shards(part_bytes, fixed, MAX_SHARDS)
    elif sized:
        rows = max(1, int(part_bytes // description.row_nbytes))
        count = max(1, -(-description.rows // rows))
        if count <= MAX_SHARDS:
            left = description.rows
            totals = dict.fromkeys(varying, 0)
            shards = [Shard(min(rows, left - rows * number), totals) for number in range(count)]
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise SchemaError(
            "part_bytes must be a number of bytes, such as 5e9, that makes at most "
            f"{MAX_SHARDS} files, got {part_bytes!r}. Pass a larger number."
        )
    return shards


def owns(folder: Path) -> bool:
    """Return whether a folder holds parts and their index, and no other files."""
    names = {each.name for each in folder.iterdir()}
    count = len(names) - 1
    return names == {INDEX, *(shard_name(k + 1, count) for k in range(count))}


def refuse_shard(file: File, metadata: dict[str, Any]) -> None:
    """Refuse a single part: it does not hold all rows.

    Raises:
        FormatError: The file is a part.
    """
    if SHARD in metadata:
        raise FormatError(f"{file.path} is one of several files. Name their folder or {INDEX}.")


def _shard_text(number: int, count: int, first: int, stop: int, described: bytes) -> str:
    """The text that identifies a part, by its rows and its export's description."""
    of = f"{google_crc32c.value(described):08x}"
    value = {"part": number, "parts": count, "rows": [first, stop], "of": of}
    return json.dumps(value, separators=(",", ":"))


def _plain(columns: dict[str, ArrayColumn], number: int) -> dict[str, ArrayColumn]:
    suffix = f".{number:05d}"
    return {name.removesuffix(suffix): column for name, column in columns.items()}


def write_tensors(
    target: Path,
    columns: Columns,
    rows: int,
    read: Callable[[int, int], Arrays],
    texts: Mapping[str, str],
) -> None:
    """Write a file of named tensors; it replaces an existing file at the end.

    Args:
        target: The file.
        columns: Dtype name and row shape by name.
        rows: Of every tensor.
        read: Returns rows ``[first, stop)`` of all tensors, ``[stop - first, *shape]``.
        texts: Entries of the file's metadata.
    """
    arrays = {name: (dtype, (rows, *shape)) for name, (dtype, shape) in columns.items()}
    plan = SafetensorsPlan(arrays, texts)
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
        texts: The file's metadata.
        shapes: Shape of each tensor, rows first.
    """

    def __init__(self, path: Path) -> None:
        """Open it and check its header.

        Raises:
            FormatError: The file is no safetensors file, or is damaged.
        """
        self._file = File.open(path, None)
        with undone_by(self._file.close):
            metadata, columns = parse(self._file)
        self.texts: Mapping[str, Any] = metadata
        self.shapes = {name: column.shape for name, column in columns.items()}
        self._columns: dict[str, ArrayColumn] = columns

    def read(self, name: str, first: int, stop: int) -> NDArray[np.generic]:
        """Rows ``[first, stop)`` of a tensor."""
        column = self._columns[name]
        assert column.offset is not None
        out = np.empty((stop - first, *column.shape[1:]), column.stored)
        if out.nbytes:
            offset = column.offset + first * column.row_nbytes
            self._file.pread_into(out.reshape(-1).view(np.uint8).data, offset)
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
                    f"{self._file.path}: tensor {name!r} must be "
                    f"{_tensor_text(wanted.get(name))}, got "
                    f"{_tensor_text(got.get(name))}. Pass the metadata that was saved "
                    "with the file."
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


def _tensor_text(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]}{list(tensor[1])}"


def block_rows(columns: Columns) -> int:
    """Rows of a block of all columns, at least 1.

    Args:
        columns: Dtype name and row shape by name.
    """
    nbytes = sum(array_nbytes(dtype, shape) for dtype, shape in columns.values())
    return max(1, BLOCK_NBYTES // max(1, nbytes))
