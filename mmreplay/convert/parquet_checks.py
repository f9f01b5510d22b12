"""Checks a parquet file's claims before pyarrow allocates memory for them.

pyarrow allocates what headers say. `check` reads the footer and the header of every
page first: nothing lies outside the file or overlaps, no page unpacks to more than fits
in memory, and no short file claims endless rows.

Both are structs in thrift's compact protocol. `Thrift` keeps the fields of a pattern
and steps over all others. A list costs what its elements take in the file, so that a
short file cannot claim a long list.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmreplay.convert.base import MAX_ROW_NBYTES
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError

MAGIC = b"PAR1"
MAX_FOOTER_NBYTES = 32 << 20
MAX_STRUCTS = 500_000
MAX_CHUNKS = 100_000
MAX_HEADER_NBYTES = 1 << 20
HEADER_NBYTES = 1 << 12
"""Read at first of a page's header, which seldom takes more."""
MAX_PAGES_NBYTES = 2 * MAX_ROW_NBYTES
"""Of one page of every column together, unpacked."""
WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a decoded value by physical type; values of other types lie in the page."""

# Patterns of the fields that are kept, by their numbers in parquet.thrift.
NUM_ROWS, GROUPS = 3, 4
COLUMNS, GROUP_ROWS = 1, 3
FILE_PATH, META = 1, 3
TYPE, NAMES, NUM_VALUES, PACKED, DATA, DICTIONARY = 1, 3, 5, 7, 9, 11
CHUNK = {TYPE: int, NAMES: [bytes], NUM_VALUES: int, PACKED: int, DATA: int, DICTIONARY: int}
FOOTER = {NUM_ROWS: int, GROUPS: [{COLUMNS: [{FILE_PATH: bytes, META: CHUNK}], GROUP_ROWS: int}]}
UNPACKED_SIZE, PACKED_SIZE = 2, 3
DICTIONARY_PAGE = 7
PAGE_KINDS = (5, DICTIONARY_PAGE, 8)
VALUES = 1
ENCODING = {5: 2, 8: 4}
"""Number of the encoding in the header of a data page of either version."""
DELTA_BYTE_ARRAY = 7
"""An encoding in which a value repeats the one before: a few bytes for any length."""
PAGE = {
    UNPACKED_SIZE: int,
    PACKED_SIZE: int,
    **{
        kind: {VALUES: int} | ({ENCODING[kind]: int} if kind in ENCODING else {})
        for kind in PAGE_KINDS
    },
}


@dataclass(frozen=True, slots=True)
class Footer:
    """Contents of a checked footer.

    Attributes:
        rows: Rows in all.
        leaves: What is known of each leaf, by its path.
    """

    rows: int
    leaves: dict[str, Leaf]


@dataclass(slots=True)
class Leaf:
    """One column of values, in all row groups.

    Attributes:
        values: The highest number of values in a row group.
        total: Values of all row groups.
        group_nbytes: The most bytes of a row group, unpacked.
        row_nbytes: The most bytes of the average row of a row group, unpacked.
        dictionaries: Some values are numbers of entries of a dictionary.
        repeats: Some values repeat those before them, so that few bytes make many.
    """

    values: int = 0
    total: int = 0
    group_nbytes: int = 0
    row_nbytes: float = 0
    dictionaries: bool = False
    repeats: bool = False

    def add(self, pages: Pages, num_values: int, rows: int) -> None:
        """Count the pages of another row group, and the values in them."""
        self.values = max(self.values, num_values)
        self.total += num_values
        self.group_nbytes = max(self.group_nbytes, pages.nbytes)
        self.row_nbytes = max(self.row_nbytes, pages.nbytes / max(1, rows))
        self.dictionaries |= pages.dictionary
        self.repeats |= pages.repeats


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a column chunk.

    Attributes:
        largest: Bytes that its largest page and its dictionary take unpacked.
        nbytes: Bytes of all of them unpacked.
        dictionary: There is a dictionary.
        repeats: See `Leaf`.
    """

    largest: int
    nbytes: int
    dictionary: bool
    repeats: bool


def check(file: File) -> Footer:
    """Check the footer and every page header.

    Raises:
        CorruptError: Something lies where it cannot be.
        FormatError: It is no parquet file, or takes too much memory.
    """
    end, footer = _read_footer(file)
    rows, groups = footer.get(NUM_ROWS), footer.get(GROUPS, [])
    counts = [group.get(GROUP_ROWS) for group in groups]
    if not all(map(_is_count, (rows, *counts))) or sum(counts) != rows:
        raise CorruptError(
            f"{file.path}: the footer at byte {end} must count the rows of its "
            f"{len(groups)} row groups, got {rows}. The file is damaged."
        )
    num_chunks = sum(len(group.get(COLUMNS, [])) for group in groups)
    if num_chunks > MAX_CHUNKS:
        raise FormatError(
            f"{file.path} must have at most {MAX_CHUNKS} column chunks, got "
            f"{num_chunks}. Write it with larger row groups."
        )
    _check_chunks(file, end, groups)
    leaves: dict[str, Leaf] = {}
    for group in groups:
        unpacked = 0
        for column in group.get(COLUMNS, []):
            chunk = column[META]
            if not group[GROUP_ROWS] and not chunk[NUM_VALUES]:
                # A table without rows: writers name no place, and nothing is read.
                pages = Pages(0, 0, dictionary=False, repeats=False)
            else:
                pages = _check_pages(file, chunk, end)
            unpacked += pages.largest
            path = b".".join(chunk[NAMES]).decode("utf-8", "replace")
            leaves.setdefault(path, Leaf()).add(pages, chunk[NUM_VALUES], group[GROUP_ROWS])
        if unpacked > MAX_PAGES_NBYTES:
            raise FormatError(
                f"{file.path}: a page of every column must take at most "
                f"{MAX_PAGES_NBYTES} bytes unpacked, got {unpacked}. Write it with "
                "smaller pages."
            )
    return Footer(footer[NUM_ROWS], leaves)


def _check_chunks(file: File, end: int, groups: list[dict[int, Any]]) -> None:
    """Check what the footer says of each column, before any page is read.

    Columns over each other would be read over and over.

    Raises:
        CorruptError: One lies where it cannot be, or they take more than the file.
    """
    packed = 0
    for group in groups:
        for column in group.get(COLUMNS, []):
            chunk = column.get(META, {})
            numbers = [chunk.get(key) for key in (TYPE, NUM_VALUES, PACKED, DATA)]
            numbers.append(chunk.get(DICTIONARY, 0))
            if FILE_PATH in column or NAMES not in chunk or not all(map(_is_count, numbers)):
                got = "a column that is outside this file"
                raise _malformed(file, f"the footer at byte {end}", got)
            packed += chunk[PACKED]
    if packed > end:
        raise CorruptError(
            f"{file.path}: columns take more than the {end} bytes before the footer. "
            "The file is damaged."
        )


def _read_footer(file: File) -> tuple[int, dict[int, Any]]:
    """Offset of the footer, and its fields."""
    if file.nbytes < 12 or file.pread(4, 0) != MAGIC:
        raise FormatError(
            f"{file.path} is not a parquet file: it has {file.nbytes} bytes and does "
            f"not begin with {MAGIC!r}. Name its format with format= (--from)."
        )
    size, magic = struct.unpack("<I4s", file.pread(8, file.nbytes - 8))
    if magic != MAGIC:
        raise CorruptError(
            f"{file.path} must end with {MAGIC!r} at byte {file.nbytes - 4}, got "
            f"{magic!r}. The file is truncated or encrypted."
        )
    end = file.nbytes - 8 - size
    if end < 4:
        raise CorruptError(
            f"{file.path}: the footer must have at most {file.nbytes - 12} bytes, got "
            f"{size} at byte {file.nbytes - 8}. The file is damaged."
        )
    if size > MAX_FOOTER_NBYTES:
        raise FormatError(
            f"{file.path}: the footer must have at most {MAX_FOOTER_NBYTES} bytes, got "
            f"{size}. Write it with larger row groups."
        )
    try:
        return end, Thrift(file.pread(size, end), MAX_STRUCTS).struct(FOOTER)
    except MalformedThrift as error:
        raise _malformed(file, f"the footer at byte {end}", error) from None


def _check_pages(file: File, chunk: Mapping[int, Any], end: int) -> Pages:
    """Check the pages of a column chunk."""
    at = chunk[DATA]
    if 0 < chunk.get(DICTIONARY, 0) < at:
        at = chunk[DICTIONARY]
    stop = at + chunk[PACKED]
    if at < 4 or stop > end:
        raise CorruptError(
            f"{file.path}: columns must lie between byte 4 and the footer at {end}, "
            f"got one at bytes [{at}, {stop}). The file is damaged."
        )
    width = WIDTHS.get(chunk[TYPE], 0)
    data = dictionary = total = 0
    repeats = False
    while at < stop:
        page, nbytes = _read_page_header(file, at, stop)
        counts = [page[kind].get(VALUES, 0) for kind in PAGE_KINDS if kind in page]
        sizes = (page.get(UNPACKED_SIZE), page.get(PACKED_SIZE))
        if not all(map(_is_count, (*sizes, *counts))):
            raise _malformed(file, f"the page at byte {at}", f"sizes {sizes}")
        packed = page[PACKED_SIZE]
        if at + nbytes + packed > stop:
            got = f"{packed} bytes, past its column"
            raise _malformed(file, f"the page at byte {at}", got)
        at += nbytes + packed
        unpacked = max(page[UNPACKED_SIZE], width * sum(counts))
        total += unpacked
        for kind, number in ENCODING.items():
            repeats |= page.get(kind, {}).get(number) == DELTA_BYTE_ARRAY
        if DICTIONARY_PAGE in page:
            dictionary = max(dictionary, unpacked)
        else:
            data = max(data, unpacked)
    return Pages(data + dictionary, total, dictionary > 0, repeats)


def _read_page_header(file: File, at: int, stop: int) -> tuple[dict[int, Any], int]:
    """Fields of a page's header, and its own bytes."""
    size = min(HEADER_NBYTES, stop - at)
    while True:
        thrift = Thrift(file.pread(size, at), 64)
        try:
            return thrift.struct(PAGE), thrift.at
        except MalformedThrift as error:
            # Statistics of wide values make long headers: read more of it.
            if size < min(MAX_HEADER_NBYTES, stop - at):
                size = min(16 * size, MAX_HEADER_NBYTES, stop - at)
                continue
            raise _malformed(file, f"the page at byte {at}", error) from None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _malformed(file: File, where: str, got: object) -> CorruptError:
    return CorruptError(
        f"{file.path}: {where} holds {got}. The file is damaged: restore it from a copy."
    )


MAX_DEPTH = 24
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
KINDS = {int: (I16, I32, I64), bytes: (BINARY,), list: (LIST, SET), dict: (STRUCT,)}
"""Kinds of a value by the pattern that keeps it."""
NBYTES = {TRUE: 0, FALSE: 0, BYTE: 1, DOUBLE: 8}
"""Of the kinds that no pattern keeps; the head of a field of a struct says a bool."""


class MalformedThrift(ValueError):
    """The bytes are not the expected struct, or hold too much."""


class Thrift:
    """Parses bytes that begin with a struct in thrift's compact protocol.

    A pattern says which values are kept: ``int`` and ``bytes`` keep a value of that
    type, ``[pattern]`` a list, and a dict the fields of a struct by number. A value of
    another type than its pattern's is an error; a value without one is stepped over.

    Attributes:
        at: Bytes parsed so far.
    """

    def __init__(self, data: bytes, max_structs: int) -> None:
        self.at = 0
        self._data = data
        self._structs = 0
        self._max_structs = max_structs

    def struct(self, pattern: Mapping[int, Any] | None, depth: int = 0) -> dict[int, Any]:
        """Fields of the pattern that the struct has, by number.

        Raises:
            MalformedThrift: The bytes end too soon, nest or hold too much, or a field
                is of another type than its pattern's.
        """
        self._structs += 1
        if self._structs > self._max_structs:
            raise MalformedThrift(f"more than {self._max_structs} structs")
        pattern = pattern or {}
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            step = head >> 4
            number = number + step if step else self._integer()
            kept = pattern.get(number)
            value = self._value(head & 15, kept, depth)
            if kept is not None:
                found[number] = value
        return found

    def _value(self, kind: int, pattern: Any, depth: int) -> Any:
        """A value, or None if there is no pattern."""
        if pattern is not None:
            wanted = pattern if isinstance(pattern, type) else type(pattern)
            if kind not in KINDS[wanted]:
                raise MalformedThrift(
                    f"a value of kind {kind} at byte {self.at} instead of a {wanted.__name__}"
                )
        if depth > MAX_DEPTH:
            raise MalformedThrift(f"more than {MAX_DEPTH} values inside each other")
        if I16 <= kind <= I64:
            return self._integer()
        if kind == BINARY:
            begin = self._skip(self._varint())
            return None if pattern is None else self._data[begin : self.at]
        if kind == STRUCT:
            return self.struct(pattern, depth + 1)
        if kind in (LIST, SET):
            return self._list(pattern, depth)
        if kind == MAP:
            size = self._fitting(self._varint())
            kinds = self._byte() if size else 0
            for _ in range(size):
                self._value(kinds >> 4, None, depth + 1)
                self._value(kinds & 15, None, depth + 1)
            return None
        if kind in NBYTES:
            self._skip(NBYTES[kind])
            return None
        raise MalformedThrift(f"a value of kind {kind} at byte {self.at}")

    def _list(self, pattern: Any, depth: int) -> list[Any] | None:
        """The values of a list or set, or None if there is no pattern."""
        head = self._byte()
        kind, size = head & 15, head >> 4
        size = self._fitting(size if size < 15 else self._varint())
        if pattern is not None:
            inner = pattern[0]
            return [self._value(kind, inner, depth + 1) for _ in range(size)]
        if kind in (TRUE, FALSE):
            # A bool in a list takes a byte, unlike one in a struct.
            self._skip(size)
            return None
        for _ in range(size):
            self._value(kind, None, depth + 1)
        return None

    def _fitting(self, size: int) -> int:
        """Return the number of a list's elements; each takes at least a byte."""
        if size > len(self._data) - self.at:
            raise MalformedThrift(f"a list of {size} at byte {self.at}, past the end")
        return size

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise MalformedThrift(f"its end at byte {self.at}")
        self.at += 1
        return self._data[self.at - 1]

    def _skip(self, nbytes: int) -> int:
        """Step over bytes; returns where they begin."""
        begin = self.at
        if nbytes > len(self._data) - begin:
            raise MalformedThrift(f"{nbytes} bytes at byte {begin}, past the end")
        self.at += nbytes
        return begin

    def _varint(self) -> int:
        byte = self._byte()
        value, shift = byte & 127, 7
        while byte > 127:
            if shift > 63:
                raise MalformedThrift(f"a number of more than 64 bits at byte {self.at}")
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
        return value

    def _integer(self) -> int:
        """A signed number, zigzag-encoded."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
