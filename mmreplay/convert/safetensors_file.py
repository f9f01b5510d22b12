"""One safetensors file: a JSON header, checked, and tensors that follow each other."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from mmreplay.convert.array_file import Piece
from mmreplay.convert.arrays import Column, Stored, Stream
from mmreplay.convert.base import Notes
from mmreplay.convert.losses import doubt_sums
from mmreplay.convert.zip_layout import ALIGNMENT
from mmreplay.errors import CorruptError, FormatError
from mmreplay.files import File
from mmreplay.format import strict_json
from mmreplay.schema.dtypes import storage_dtype
from mmreplay.sums import crc32c

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


def parse(file: File) -> tuple[dict[str, Any], dict[str, Column]]:
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
) -> Column:  # fmt: skip
    stream = partial(_stream, file, offset, name, crc)
    return Column(dtype, storage_dtype(dtype), shape, stream, offset)


def _stream(file: File, offset: int, name: str, crc: int | None) -> Stream:
    return Stored(file, offset, f"tensor {name!r}", crc32c, 0, crc)
