"""TFRecord files and the tf.train.Example messages in them, without TensorFlow.

A record is a length, its checksum, the bytes, and theirs: CRC32C, masked. An Example is
a map of names to lists of bytes, floats or integers, read off protobuf's wire.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.foreign.columns import Array
from mmreplay.errors import CorruptError, FormatError
from mmreplay.files import File
from mmreplay.sums import crc32c

HEAD = struct.Struct("<QI")
SUM = struct.Struct("<I")
MASK = 0xA282EAD8
MAX_RECORD_NBYTES = 1 << 30
MAX_FEATURES = 10_000
VARINT, FIXED64, SIZED, FIXED32 = 0, 1, 2, 5
BYTES, FLOATS, INTEGERS = 1, 2, 3

Values = list[bytes] | Array
"""Bytes, or float32 or int64 ``[N]``."""


def masked(data: bytes) -> int:
    """The checksum of bytes as TFRecord keeps it."""
    checksum = crc32c(memoryview(data))
    return ((checksum >> 15 | checksum << 17) + MASK) & 0xFFFFFFFF


def records(file: File) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each record, checked.

    Raises:
        CorruptError: One is cut, or does not match its checksum.
        FormatError: One is longer than 1 GiB.
    """
    at = 0
    while at < file.nbytes:
        if at + HEAD.size > file.nbytes:
            raise _corrupt(file, at, f"{file.nbytes - at} bytes", "a record's head")
        head = file.pread(HEAD.size, at)
        size, checksum = HEAD.unpack(head)
        if masked(head[:8]) != checksum:
            raise _corrupt(file, at, f"checksum {checksum:08x}", "that of its length")
        begin = at + HEAD.size
        if begin + size + SUM.size > file.nbytes:
            raise _corrupt(file, at, f"a record of {size} bytes", "it within the file")
        if size > MAX_RECORD_NBYTES:
            raise FormatError(
                f"{file.path}: the record at byte {at} has {size} bytes, expected at "
                f"most {MAX_RECORD_NBYTES}: episodes are held whole; split them"
            )
        data = file.pread(size, begin)
        (checksum,) = SUM.unpack(file.pread(SUM.size, begin + size))
        if masked(data) != checksum:
            raise _corrupt(file, begin, f"checksum {checksum:08x}", "that of its bytes")
        yield at, data
        at = begin + size + SUM.size


def _corrupt(file: File, offset: int, got: str, expected: str) -> CorruptError:
    return CorruptError(
        f"{file.path}: got {got} at byte {offset}, expected {expected}; the file was "
        "cut or damaged: restore it from a copy"
    )


class Malformed(ValueError):
    """Bytes that are no protobuf message; says where."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a message: its number, wire type, and number or bytes."""

    number: int
    kind: int
    value: int
    data: memoryview


def _fields(data: memoryview) -> Iterator[_Field]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        value, size = 0, {FIXED64: 8, FIXED32: 4}.get(kind, 0)
        if kind == VARINT:
            value, at = _varint(data, at)
        elif kind == SIZED:
            size, at = _varint(data, at)
        elif not size:
            raise Malformed(f"wire type {kind} at byte {at}")
        if at + size > len(data):
            raise Malformed(f"a field of {size} bytes at byte {at}, past its message")
        yield _Field(number, kind, value, data[at : at + size])
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise Malformed(f"a number that does not end at byte {at}")


def example(data: bytes, name: str) -> dict[str, Values]:
    """The features of a tf.train.Example by name.

    Args:
        data: The message.
        name: What to call it in errors.

    Raises:
        CorruptError: It is none.
    """
    found: dict[str, Values] = {}
    try:
        for features in _sized(memoryview(data), 1):
            for entry in _sized(features, 1):
                key = b"".join(bytes(each) for each in _sized(entry, 1))
                values = list(_sized(entry, 2))
                found[key.decode()] = _values(values[-1] if values else entry[:0])
                if len(found) > MAX_FEATURES:
                    raise Malformed(f"more than {MAX_FEATURES} features")
    except (Malformed, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{name} holds {error}, expected a tf.train.Example; the file was damaged, "
            "or is of another kind"
        ) from error
    return found


def _sized(data: memoryview, number: int) -> Iterator[memoryview]:
    for each in _fields(data):
        if each.number == number and each.kind == SIZED:
            yield each.data


def _values(feature: memoryview) -> Values:
    """The list of a feature, of whichever kind it is."""
    for each in _fields(feature):
        if each.number == BYTES:
            return [bytes(item) for item in _sized(each.data, 1)]
        if each.number == FLOATS:
            return _floats(each.data)
        if each.number == INTEGERS:
            return _integers(each.data)
    return []


def _floats(data: memoryview) -> Array:
    parts = [each.data for each in _fields(data) if each.number == 1]
    if any(len(part) % 4 for part in parts):
        raise Malformed("floats of no whole number of bytes")
    return np.frombuffer(b"".join(parts), "<f4")


def _integers(data: memoryview) -> Array:
    parts = [
        _unpacked(each.data)
        if each.kind == SIZED
        else np.array([each.value], np.uint64).view(np.int64)
        for each in _fields(data)
        if each.number == 1
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _unpacked(data: memoryview) -> NDArray[np.int64]:
    """Varints one after another, all at once."""
    raw = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(raw < 128)
    if len(raw) and (not len(stops) or stops[-1] != len(raw) - 1):
        raise Malformed("a number that does not end")
    starts = np.concatenate([[0], stops[:-1] + 1])
    sizes = stops - starts[: len(stops)] + 1
    if len(sizes) and sizes.max() > 10:
        raise Malformed("a number of more than 10 bytes")
    values = np.zeros(len(stops), np.uint64)
    for place in range(int(sizes.max()) if len(sizes) else 0):
        here = sizes > place
        digits = (raw[starts[: len(stops)][here] + place] & 127).astype(np.uint64)
        values[here] |= digits << np.uint64(7 * place)
    return values.view(np.int64)
