"""The text of a csv file, plain or gzipped, piece by piece."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from mmreplay.convert.csv_columns import CELL_NBYTES, MOST_COLUMNS
from mmreplay.convert.tables import refuse_expansion
from mmreplay.errors import CorruptError, FormatError
from mmreplay.files import File
from mmreplay.sums import crc32c

READ_NBYTES = 1 << 20
MAX_HEADER_NBYTES = 16 << 20
BLOCK_NBYTES = 2 << 20
"""Text that pyarrow takes at a time; longer lines are refused."""
MAX_BLOCK_NBYTES = 128 << 20
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"


class Text:
    """The bytes of a file from its first on, unpacked if it is gzipped.

    Attributes:
        crc: CRC32C of the file's own bytes that were read.
        quotes: How many were read.
    """

    def __init__(self, file: File, allow_expansion: bool) -> None:
        self.crc = self.quotes = 0
        self._file, self._allowed = file, allow_expansion
        self._at = self._given = 0
        self._rest = b""
        gzipped = file.nbytes >= 2 and file.pread(2, 0) == GZIP
        self._inflate = zlib.decompressobj(31) if gzipped else None

    def unread(self, data: bytes) -> None:
        """Give bytes back, to be read again."""
        self._rest = data + self._rest

    def read(self, size: int = -1) -> bytes:
        """The next bytes: size of them, fewer only at the end."""
        size = READ_NBYTES if size < 0 else size
        found, room = [], size
        if self._rest:
            data, self._rest = self._rest[:size], self._rest[size:]
            found, room = [data], size - len(data)
        while room:
            give = self._raw if self._inflate is None else self._unpacked
            data = give(min(room, READ_NBYTES))
            if not data:
                break
            # Far faster where there are none, as in most files.
            self.quotes += data.count(b'"') if b'"' in data else 0
            found.append(data)
            room -= len(data)
        return b"".join(found)

    def _raw(self, size: int) -> bytes:
        data = self._file.pread(min(size, self._file.nbytes - self._at), self._at)
        self._at += len(data)
        self.crc = crc32c(memoryview(data), self.crc)
        return data

    def _unpacked(self, size: int) -> bytes:
        assert self._inflate is not None
        while True:
            packed = self._inflate.unconsumed_tail or self._raw(READ_NBYTES // 4)
            if self._inflate.eof:
                # Another member may follow, as gzip allows.
                packed = self._inflate.unused_data + packed
                if not packed:
                    return b""
                self._inflate = zlib.decompressobj(31)
            elif not packed:
                raise self._damaged("its end")
            try:
                data = self._inflate.decompress(packed, size)
            except zlib.error as error:
                raise self._damaged(str(error)) from error
            if data:
                self._given += len(data)
                refuse_expansion(self._file.path, self._given, self._at, self._allowed)
                return data

    def _damaged(self, got: str) -> CorruptError:
        return CorruptError(
            f"{self._file.path}: got {got} at byte {self._at}, expected more of a "
            "gzipped file; it was cut or damaged: restore it from a copy"
        )

    def lines(self, size: int) -> Iterator[bytes]:
        """Whole lines, about size bytes of them at a time.

        Raises:
            ValueError: One does not end within twice as many.
        """
        rest = b""
        while data := self.read(size):
            if b'"' in data or b'"' in rest:
                data, rest = rest + data, b""
                stop = _ended(data)
            else:
                stop = data.rfind(b"\n") + 1
            if stop:
                # Text is copied once on its way to the parser.
                yield b"".join((rest, memoryview(data)[:stop]))
                rest = b""
            rest += data[stop:]
            if not stop and len(rest) >= 2 * size:
                raise ValueError("a line that does not end")
        if rest:
            yield rest

    def drain(self) -> None:
        """Read what is left, so that the checksum is of all bytes."""
        while self.read(READ_NBYTES):
            pass


def _ended(data: bytes) -> int:
    """Bytes up to the last end of a line that is not within quotes."""
    stop = data.rfind(b"\n") + 1
    within = data.count(b'"', 0, stop) % 2
    while within and stop:
        quote = data.rfind(b'"', 0, stop)
        before = data.rfind(b"\n", 0, quote) + 1
        within = (within + data.count(b'"', before, stop)) % 2
        stop = before
    return stop


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a csv file that is not empty.

    Attributes:
        names: Of the columns.
        lines: Lines before the first row.
    """

    names: list[str]
    lines: int


def read_header(text: Text, file: File) -> Header:
    """Read the header, and leave the text where the first row begins.

    Raises:
        FormatError: There is none, or none of legal names.
    """
    data, lines = text.read(READ_NBYTES // 16).removeprefix(BOM), 0
    while True:
        line, end, rest = data.partition(b"\n")
        piece = b"" if end else text.read(READ_NBYTES)
        if piece and len(data) > MAX_HEADER_NBYTES:
            raise _no_header(file, f"a line of more than {MAX_HEADER_NBYTES} bytes")
        if piece:
            data += piece
            continue
        data, lines = rest, lines + 1
        if line.strip():
            text.unread(data)
            return Header(_names(line.removesuffix(b"\r"), file), lines)
        if not end:
            raise _no_header(file, "no text")


def _no_header(file: File, got: str) -> FormatError:
    return FormatError(
        f"{file.path}, line 1: got {got}, expected a header of column names separated "
        "by commas; name the format with format= (--from), or put one there"
    )


def _names(line: bytes, file: File) -> list[str]:
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError:
        raise _no_header(file, "bytes that are no UTF-8 text") from None
    if not decoded.strip() or "\0" in decoded:
        raise _no_header(file, "no text")
    if decoded.count(",") >= MOST_COLUMNS:
        raise _no_header(file, f"more than {MOST_COLUMNS} columns")
    try:
        (names,) = csv.reader([decoded], strict=True)
    except (csv.Error, ValueError) as error:
        raise _no_header(file, f"{decoded[:60]!r} ({error})") from None
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _no_header(file, f"the column {twice!r} twice")
    return names


def block_nbytes(columns: int) -> int:
    """Text to take at a time, so that a line of that many numbers fits in it."""
    return min(max(BLOCK_NBYTES, 16 * CELL_NBYTES * columns), MAX_BLOCK_NBYTES)


Check = Callable[[str], bool]


def explain(
    text: Text, file: File, skip: int, checks: dict[str, tuple[str, Check]]
) -> str | None:
    """What is wrong with the first row that cannot be read, with its line.

    Args:
        text: From the file's first byte on.
        file: That it is of.
        skip: Rows that were read well.
        checks: What a cell should be, and whether it is, by column, in order.

    Returns:
        A message up to what was got and expected, or None where nothing is found.
    """
    header = read_header(text, file)
    most = block_nbytes(len(checks))
    for number, line in islice(_rows(text, header.lines, most), skip, None):
        where = f"{file.path}, line {number}"
        if len(line) > most:
            return (
                f"{where}: got more than {most} bytes, or quotes that are never "
                "closed, expected a row"
            )
        try:
            (cells,) = csv.reader([line.decode("utf-8")], strict=True)
        except (csv.Error, ValueError) as error:
            return f"{where}: got {line[:40]!r} ({error}), expected a row"
        if len(cells) != len(checks):
            return f"{where}: got {len(cells)} cells, expected {len(checks)}"
        for cell, (name, (what, check)) in zip(cells, checks.items(), strict=True):
            if not check(cell):
                return f"{where}, column {name!r}: got {cell[:40]!r}, expected {what}"
    return None


def _rows(text: Text, lines: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Rows that are not empty, cut where they are too long, and their first lines."""
    data, number, row = b"", lines, b""
    while True:
        piece = text.read(READ_NBYTES)
        *whole, data = (data + piece).split(b"\n")
        if not piece:
            whole, data = [data], b""
        for line in whole:
            number += 1
            row += line
            if row.count(b'"') % 2 and piece and len(row) <= most:
                row += b"\n"
                continue
            row = row.removesuffix(b"\r")
            if row.strip():
                yield number - row.count(b"\n"), row
            row = b""
        if not piece:
            return
        if len(data) > most:
            yield number + 1, data
