"""Thrift's compact protocol, read with bounds: parquet's footer and page headers.

Only what is asked for is kept; everything else is stepped over. Lists cost what their
elements take in the file, so a short file cannot claim a long list.

What a parquet file claims, checked before pyarrow is shown it.

The library allocates what headers say. Here the footer and the header of every page
are read first, with bounds: nothing lies outside the file or in each other, no page
unpacks to more than is held, and no short file stands for endless rows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError

Wanted = Mapping[int, "Wanted"]
"""Fields of a struct by number; of those that are structs, or lists of them, theirs."""
LEAF: Wanted = {}
"""What is wanted of a field that is no struct: its value."""

MAX_DEPTH = 24
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class Malformed(ValueError):
    """The bytes are no thrift, or more of it than is taken."""


class Compact:
    """Steps through bytes that hold one struct.

    Attributes:
        at: Bytes read so far.
        structs: Structs met so far.
    """

    def __init__(self, data: bytes, max_structs: int) -> None:
        self.at = 0
        self.structs = 0
        self._data = data
        self._max_structs = max_structs

    def struct(self, wanted: Wanted, depth: int = 0) -> dict[int, Any]:
        """Fields that are wanted and there, by number.

        Raises:
            Malformed: The bytes end too soon, or nest or hold too much.
        """
        self.structs += 1
        if depth > MAX_DEPTH or self.structs > self._max_structs:
            raise Malformed(
                f"more than {self._max_structs} structs, or {MAX_DEPTH} in each other"
            )
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._zigzag()
            value = self._value(kind, wanted.get(number), depth)
            if number in wanted:
                found[number] = value
        return found

    def _value(self, kind: int, wanted: Wanted | None, depth: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind in (I16, I32, I64):
            return self._zigzag()
        if kind == STRUCT:
            return self.struct(wanted or {}, depth + 1)
        if kind in (LIST, SET):
            return self._list(wanted, depth)
        if kind == MAP:
            return self._map(depth)
        sizes = {BYTE: 1, DOUBLE: 8}
        if kind in sizes:
            return self._step(sizes[kind])
        if kind == BINARY:
            begin = self._step(self._varint())
            return self._data[begin : self.at] if wanted is not None else b""
        raise Malformed(f"a value of kind {kind} at byte {self.at}")

    def _list(self, wanted: Wanted | None, depth: int) -> list[Any]:
        head = self._byte()
        kind, size = head & 15, head >> 4
        if size == 15:
            size = self._varint()
        self._refuse_long(size)
        found = []
        for _ in range(size):
            # Within a list a bool takes a byte of its own.
            value = (
                self._step(1)
                if kind in (TRUE, FALSE)
                else self._value(kind, wanted, depth + 1)
            )
            if wanted is not None:
                found.append(value)
        return found

    def _map(self, depth: int) -> None:
        size = self._varint()
        self._refuse_long(size)
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._value(kinds >> 4, None, depth + 1)
            self._value(kinds & 15, None, depth + 1)

    def _refuse_long(self, size: int) -> None:
        if size > len(self._data) - self.at:
            raise Malformed(f"a list of {size} at byte {self.at}, past the end")

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise Malformed(f"its end at byte {self.at}")
        self.at += 1
        return self._data[self.at - 1]

    def _step(self, nbytes: int) -> int:
        """Step over bytes, and return where they begin."""
        begin = self.at
        if nbytes > len(self._data) - begin:
            raise Malformed(f"{nbytes} bytes at byte {begin}, past the end")
        self.at += nbytes
        return begin

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise Malformed(f"a number of more than 64 bits at byte {self.at}")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


MAGIC = b"PAR1"
MAX_FOOTER_NBYTES = 32 << 20
MAX_STRUCTS = 500_000
MAX_CHUNKS = 100_000
MAX_HEADER_NBYTES = 1 << 20
HEADER_NBYTES = 1 << 12
MAX_PAGES_NBYTES = 2 * MAX_ROW_NBYTES
"""All that one page of every column may unpack to."""
WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a decoded value by physical type; others bring their own bytes along."""

# Numbers of fields in parquet.thrift.
NUM_ROWS, GROUPS = 3, 4
COLUMNS, GROUP_ROWS = 1, 3
FILE_PATH, META = 1, 3
TYPE, NAMES, NUM_VALUES, PACKED, DATA, DICTIONARY = 1, 3, 5, 7, 9, 11
FOOTER = {
    NUM_ROWS: LEAF,
    GROUPS: {
        COLUMNS: {
            FILE_PATH: LEAF,
            META: dict.fromkeys(
                (TYPE, NAMES, NUM_VALUES, PACKED, DATA, DICTIONARY), LEAF
            ),
        },
        GROUP_ROWS: LEAF,
    },
}
UNPACKED_SIZE, PACKED_SIZE = 2, 3
PAGES = (5, 7, 8)
PAGE = {UNPACKED_SIZE: LEAF, PACKED_SIZE: LEAF, **{key: {1: LEAF} for key in PAGES}}


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file's footer says, checked.

    Attributes:
        rows: Rows in all.
        values: Most values of a row group, by the path of a leaf.
    """

    rows: int
    values: dict[str, int]


def check(file: File) -> Footer:
    """Read the footer and every page header.

    Raises:
        CorruptError: Something lies where it cannot be.
        FormatError: It is no parquet file, or one that takes too much memory.
    """
    end, data = _footer_bytes(file)
    value = _parse(file, end, data)
    rows, groups = value.get(NUM_ROWS), value.get(GROUPS, [])
    counts = [group.get(GROUP_ROWS) for group in groups]
    if not all(_count(each) for each in (rows, *counts)) or sum(counts) != rows:
        raise CorruptError(
            f"{file.path}: the footer at byte {end} says {rows} rows, expected as many "
            f"as its {len(groups)} row groups hold; the file was damaged"
        )
    chunks = [_metadata(file, c) for group in groups for c in group.get(COLUMNS, [])]
    if len(chunks) > MAX_CHUNKS:
        raise FormatError(
            f"{file.path} has {len(chunks)} column chunks, expected at most "
            f"{MAX_CHUNKS}; write it with larger row groups"
        )
    if sum(chunk[PACKED] for chunk in chunks) > end:
        raise CorruptError(
            f"{file.path}: columns take more than the {end} bytes before the footer, "
            "expected them beside each other; the file was damaged"
        )
    for group in groups:
        held = sum(
            _check_chunk(file, chunk[META], end) for chunk in group.get(COLUMNS, [])
        )
        if held > MAX_PAGES_NBYTES:
            raise FormatError(
                f"{file.path}: a page of every column takes {held} bytes unpacked, "
                f"expected at most {MAX_PAGES_NBYTES}; write it with smaller pages"
            )
    return Footer(int(value[NUM_ROWS]), _most_values(chunks))


def _most_values(chunks: list[dict[int, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in chunks:
        path = b".".join(chunk[NAMES]).decode("utf-8", "replace")
        found[path] = max(found.get(path, 0), chunk[NUM_VALUES])
    return found


def _footer_bytes(file: File) -> tuple[int, bytes]:
    """Where the footer begins, and its bytes."""
    if file.nbytes < 12 or file.pread(4, 0) != MAGIC:
        raise FormatError(
            f"{file.path} has {file.nbytes} bytes and does not begin with {MAGIC!r}, "
            "expected a parquet file; name its format with format= (--from)"
        )
    size, magic = struct.unpack("<I4s", file.pread(8, file.nbytes - 8))
    if magic != MAGIC:
        raise CorruptError(
            f"{file.path} ends with {magic!r} at byte {file.nbytes - 4}, expected "
            f"{MAGIC!r}; it was cut, or is encrypted"
        )
    end = file.nbytes - 8 - size
    if end < 4:
        raise CorruptError(
            f"{file.path} says a footer of {size} bytes at byte {file.nbytes - 8}, "
            f"expected at most {file.nbytes - 12}; the file was damaged"
        )
    if size > MAX_FOOTER_NBYTES:
        raise FormatError(
            f"{file.path} says a footer of {size} bytes, expected at most "
            f"{MAX_FOOTER_NBYTES}; write it with larger row groups"
        )
    return end, file.pread(size, end)


def _parse(file: File, end: int, data: bytes) -> dict[int, Any]:
    try:
        value = Compact(data, MAX_STRUCTS).struct(FOOTER)
    except Malformed as error:
        raise _malformed(file, f"the footer at byte {end}", error) from None
    groups = value.get(GROUPS, [])
    if not isinstance(groups, list) or not all(_is_group(each) for each in groups):
        raise _malformed(file, f"the footer at byte {end}", "row groups of no columns")
    return value


def _is_group(group: object) -> bool:
    """Whether a row group is a struct whose columns, if any, are structs."""
    if not isinstance(group, dict):
        return False
    columns = group.get(COLUMNS, [])
    return isinstance(columns, list) and all(isinstance(c, dict) for c in columns)


def _malformed(file: File, where: str, got: object) -> CorruptError:
    return CorruptError(
        f"{file.path}: {where} holds {got}, expected what parquet writes; the file was "
        "damaged: restore it from a copy"
    )


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, bytes) for each in value)


def _metadata(file: File, chunk: dict[int, Any]) -> dict[int, Any]:
    """Type, values and place of a column chunk, each checked to be a number."""
    found = chunk.get(META)
    needed = (TYPE, NUM_VALUES, PACKED, DATA)
    if (
        FILE_PATH in chunk
        or not isinstance(found, dict)
        or not all(_count(found.get(key)) for key in needed)
        or not _count(found.get(DICTIONARY, 0))
        or not _texts(found.get(NAMES))
    ):
        raise _malformed(file, "the footer", "a column without a place in this file")
    return found


def _check_chunk(file: File, chunk: dict[int, int], end: int) -> int:
    """Step through a column's pages; return what the largest two take unpacked."""
    at = chunk[DATA]
    if 0 < chunk.get(DICTIONARY, 0) < at:
        at = chunk[DICTIONARY]
    stop = at + chunk[PACKED]
    if at < 4 or stop > end:
        raise CorruptError(
            f"{file.path}: a column lies at bytes [{at}, {stop}), expected it between "
            f"byte 4 and the footer at {end}; the file was damaged"
        )
    width = WIDTHS.get(chunk[TYPE], 0)
    data, dictionary = 0, 0
    while at < stop:
        header, size = _page(file, at, stop)
        at += size + header[PACKED_SIZE]
        taken = max(header[UNPACKED_SIZE], width * _values(header))
        if 7 in header:
            dictionary = max(dictionary, taken)
        else:
            data = max(data, taken)
    return data + dictionary


def _values(header: dict[int, Any]) -> int:
    return sum(int(header[kind].get(1, 0)) for kind in PAGES if kind in header)


def _page(file: File, at: int, stop: int) -> tuple[dict[int, Any], int]:
    """A page's header, and the bytes that it takes itself."""
    where = f"the page at byte {at}"
    room = min(HEADER_NBYTES, stop - at)
    while True:
        compact = Compact(file.pread(room, at), 64)
        try:
            header = compact.struct(PAGE)
            break
        except Malformed as error:
            # Statistics of wide values make long headers: look again, further.
            if room < min(MAX_HEADER_NBYTES, stop - at):
                room = min(16 * room, MAX_HEADER_NBYTES, stop - at)
                continue
            raise _malformed(file, where, error) from None
    sizes = (header.get(UNPACKED_SIZE), header.get(PACKED_SIZE))
    counts = [header[kind] for kind in PAGES if kind in header]
    if not all(_count(size) for size in sizes) or not all(
        isinstance(each, dict) and _count(each.get(1, 0)) for each in counts
    ):
        raise _malformed(file, where, f"sizes {sizes}")
    if at + compact.at + header[PACKED_SIZE] > stop:
        raise _malformed(file, where, f"{header[PACKED_SIZE]} bytes, past its column")
    return header, compact.at
