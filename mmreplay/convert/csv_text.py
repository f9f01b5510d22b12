"""Reads the text of csv files, plain or gzipped, as Arrow record batches.

`Text` gives the bytes of a file, `read_header` the names of its columns, and
`parse_rows` the rows, parsed by pyarrow in several threads. If pyarrow cannot read a
row, `explain` finds its line and column for the error.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow

from mmreplay.checksums import crc32c
from mmreplay.convert import csv_values
from mmreplay.convert.base import MAX_THREADS, in_order, refuse_expansion
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, ReplayError
from mmreplay.schema import Field

READ_NBYTES = 1 << 20
MAX_FORCED_COLUMNS = 200_000
CELL_NBYTES = 26
"""Of the longest number, ``-2.2250738585072014e-308``, with quotes and comma."""
MAX_HEADER_NBYTES = 16 << 20
BLOCK_NBYTES = 2 << 20
"""Text that pyarrow parses at a time; longer lines are refused."""
MAX_BLOCK_NBYTES = 128 << 20
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
Check = Callable[[str], bool]
"""Whether a cell is legal."""
Converted = TypeVar("Converted")
TRUE = ["true", "True", "TRUE", "1"]
FALSE = ["false", "False", "FALSE", "0"]
AHEAD_NBYTES = 32 << 20
"""Text that is parsed ahead in threads. Rows of this size are parsed one chunk at a
time."""


class Text:
    """The bytes of a file from its first on, unpacked if it is gzipped.

    Attributes:
        crc: CRC32C of the file's own bytes read so far.
        quotes: Number of quotes read so far.
    """

    def __init__(self, file: File, allow_expansion: bool) -> None:
        self.crc = self.quotes = 0
        self._file, self._allowed = file, allow_expansion
        self._at = self._unpacked = 0
        self._rest = b""
        gzipped = file.nbytes >= 2 and file.pread(2, 0) == GZIP
        self._inflate = zlib.decompressobj(31) if gzipped else None

    def unread(self, data: bytes) -> None:
        """Put bytes back, to be read again."""
        self._rest = data + self._rest

    def read(self, size: int = -1) -> bytes:
        """The next bytes: size of them, fewer only at the end."""
        size = READ_NBYTES if size < 0 else size
        found, left = [], size
        if self._rest:
            data, self._rest = self._rest[:size], self._rest[size:]
            found, left = [data], size - len(data)
        while left:
            read = self._read_raw if self._inflate is None else self._read_unpacked
            data = read(min(left, READ_NBYTES))
            if not data:
                break
            # Most files have no quotes: `in` is far faster than `count`.
            self.quotes += data.count(b'"') if b'"' in data else 0
            found.append(data)
            left -= len(data)
        return b"".join(found)

    def _read_raw(self, size: int) -> bytes:
        data = self._file.pread(min(size, self._file.nbytes - self._at), self._at)
        self._at += len(data)
        self.crc = crc32c(memoryview(data), self.crc)
        return data

    def _read_unpacked(self, size: int) -> bytes:
        assert self._inflate is not None
        while True:
            packed = self._inflate.unconsumed_tail or self._read_raw(READ_NBYTES // 4)
            if self._inflate.eof:
                # Another member may follow, as gzip allows.
                packed = self._inflate.unused_data + packed
                if not packed:
                    return b""
                self._inflate = zlib.decompressobj(31)
            elif not packed:
                raise self._damaged("ends before its gzipped data is complete")
            try:
                data = self._inflate.decompress(packed, size)
            except zlib.error as error:
                raise self._damaged(f"cannot be unpacked ({error})") from error
            if data:
                self._unpacked += len(data)
                refuse_expansion(self._file.path, self._unpacked, self._at, self._allowed)
                return data

    def _damaged(self, problem: str) -> CorruptError:
        return CorruptError(
            f"{self._file.path} {problem} at byte {self._at}. The file is truncated or "
            "damaged: restore it from a copy."
        )

    def lines(self, size: int, longest: int | None = None) -> Iterator[bytes]:
        """Complete lines, about size bytes of them at a time.

        Args:
            size: Bytes, of more than one line.
            longest: Bytes of a line; twice as many by default.

        Raises:
            ValueError: A line does not end within so many bytes.
        """
        rest = b""
        longest = 2 * size if longest is None else longest
        while data := self.read(size):
            if b'"' in data or b'"' in rest:
                data, rest = rest + data, b""
                stop = _complete_lines(data)
            else:
                stop = data.rfind(b"\n") + 1
            if stop:
                # Text is copied once on its way to the parser.
                yield b"".join((rest, memoryview(data)[:stop]))
                rest = b""
            rest += data[stop:]
            if not stop and len(rest) >= longest:
                raise ValueError("a line that does not end")
        if rest:
            yield rest

    def drain(self) -> None:
        """Read the rest, so that the checksum covers all bytes."""
        while self.read(READ_NBYTES):
            pass


def _complete_lines(data: bytes) -> int:
    """The number of bytes up to the last line end that is not within quotes."""
    stop = data.rfind(b"\n") + 1
    within = data.count(b'"', 0, stop) % 2
    while within and stop:
        quote = data.rfind(b'"', 0, stop)
        before = data.rfind(b"\n", 0, quote) + 1
        within = (within + data.count(b'"', before, stop)) % 2
        stop = before
    return stop


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """The header of a csv file: its first line that is not empty.

    Attributes:
        names: Of the columns.
        lines: Number of lines before the first row.
    """

    names: list[str]
    lines: int


def read_header(text: Text, file: File) -> CsvHeader:
    """Read the header, and leave the text where the first row begins.

    Raises:
        FormatError: There is none, or its names are not legal.
    """
    data, lines = text.read(READ_NBYTES // 16).removeprefix(BOM), 0
    while True:
        line, end, rest = data.partition(b"\n")
        more = b"" if end else text.read(READ_NBYTES)
        if more and len(data) > MAX_HEADER_NBYTES:
            raise _no_header(file, f"a line of more than {MAX_HEADER_NBYTES} bytes")
        if more:
            data += more
            continue
        data, lines = rest, lines + 1
        if line.strip():
            text.unread(data)
            return CsvHeader(_header_names(line.removesuffix(b"\r"), file), lines)
        if not end:
            raise _no_header(file, "no text")


def _no_header(file: File, got: str) -> FormatError:
    return FormatError(
        f"{file.path}, line 1 must be column names separated by commas, got {got}. Add "
        "a header, or name the format with format= (--from)."
    )


def _header_names(line: bytes, file: File) -> list[str]:
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError:
        raise _no_header(file, "bytes that are no UTF-8 text") from None
    if not decoded.strip() or "\0" in decoded:
        raise _no_header(file, "no text")
    if decoded.count(",") >= MAX_FORCED_COLUMNS:
        raise _no_header(file, f"more than {MAX_FORCED_COLUMNS} columns")
    try:
        (names,) = csv.reader([decoded], strict=True)
    except (csv.Error, ValueError) as error:
        raise _no_header(file, f"{decoded[:60]!r} ({error})") from None
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _no_header(file, f"the column {twice!r} twice")
    return names


def parse_rows(
    file: File,
    text: Text,
    types: dict[str, Any],
    wanted: Sequence[str],
    allow_expansion: bool,
    convert: Callable[[Any], Converted],
    *,
    ours: bool,
    varying: Mapping[str, Field] | None = None,
) -> Iterator[tuple[int, Converted]]:
    """Parse the rows that follow the header, chunk by chunk.

    Args:
        file: The file of the text.
        text: Where the header ended.
        types: Arrow type by column, of all columns in order.
        wanted: Columns to convert.
        allow_expansion: As the text was opened.
        convert: Called with each record batch, in the thread that parsed it.
        ours: Every cell has a value and, but for text, takes one line.
        varying: Fields that vary, by column, whose lines may be long.

    Returns:
        The number of rows of each chunk, and the result of convert.

    Raises:
        CorruptError: A row cannot be read; the message has its line and column.
    """
    # Not `open_csv`, which reads ahead in a thread of its own: that ended the process
    # when it was abandoned, over a Python file. And one chunk a thread: pyarrow's own
    # threads wait for each other at the end of each chunk.
    varying = varying or {}
    size = block_nbytes(len(types))
    longest = MAX_BLOCK_NBYTES if varying else size
    texts = any(field.kind == "text" for field in varying.values())
    options = {
        "parse_options": arrow.ParseOptions(newlines_in_values=texts or not ours),
        "convert_options": arrow.ConvertOptions(
            column_types=types,
            include_columns=list(wanted),
            null_values=[] if ours else [""],
            true_values=TRUE,
            false_values=FALSE,
        ),
    }

    def parse(lines: bytes) -> list[tuple[int, Converted]]:
        # A block holds a whole line, however long it is.
        reading = arrow.ReadOptions(
            column_names=list(types), block_size=max(2 * size, len(lines) + 1), use_threads=False
        )
        table = arrow.read_csv(pa.BufferReader(lines), read_options=reading, **options)
        return [(batch.num_rows, convert(batch)) for batch in table.to_batches()]

    chunks = (lines for lines in text.lines(size // 2, longest) if not lines.isspace())
    ahead = 2 if varying else min(MAX_THREADS, AHEAD_NBYTES // size)
    parsed = in_order(parse, chunks, ahead)
    done = 0
    while True:
        try:
            batches = next(parsed, None)
        except ReplayError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            checks = {name: check_of(kind) for name, kind in types.items()}
            checks |= {name: check_value(field) for name, field in varying.items()}
            again = Text(file, allow_expansion)
            found = explain(again, file, done, checks, longest)
            if found is None:
                reason = " ".join(str(error).split())[:200]
                found = f"{file.path} cannot be read after {done} rows ({reason})"
            raise CorruptError(f"{found}. The file was edited or damaged: correct it.") from error
        if batches is None:
            return
        for count, converted in batches:
            done += count
            yield count, converted


def block_nbytes(columns: int) -> int:
    """Bytes of text to parse at a time, so that a row of so many columns fits."""
    return min(max(BLOCK_NBYTES, 16 * CELL_NBYTES * columns), MAX_BLOCK_NBYTES)


def explain(
    text: Text,
    file: File,
    skip: int,
    checks: dict[str, tuple[str, Check]],
    max_nbytes: int | None = None,
) -> str | None:
    """The beginning of an error message about the first row that cannot be read.

    Args:
        text: From the file's first byte on.
        file: The file of the text.
        skip: Number of rows that were read without error.
        checks: By column, in order: a description of a legal cell, and its check.
        max_nbytes: Of a line; those of a block by default.

    Returns:
        Line, column, the cell and its description; None if no row is wrong.
    """
    header = read_header(text, file)
    max_nbytes = max_nbytes or block_nbytes(len(checks))
    for number, line in islice(_rows(text, header.lines, max_nbytes), skip, None):
        where = f"{file.path}, line {number}"
        if len(line) > max_nbytes:
            return (
                f"{where} must be a row of at most {max_nbytes} bytes, got more, or "
                "quotes that are never closed"
            )
        try:
            cells = _cells(line.decode("utf-8"))
        except (csv.Error, ValueError) as error:
            return f"{where} must be a row of cells, got {line[:40]!r} ({error})"
        if len(cells) != len(checks):
            return f"{where} must have {len(checks)} cells, got {len(cells)}"
        for cell, (name, (legal, check)) in zip(cells, checks.items(), strict=True):
            if not check(cell):
                return f"{where}, column {name!r} must be {legal}, got {cell[:40]!r}"
    return None


def _cells(line: str) -> list[str]:
    """The cells of a row.

    Raises:
        ValueError: A quote is never closed, or in the middle of a cell.
    """
    if len(line) < csv.field_size_limit():
        (cells,) = csv.reader([line], strict=True)
        return cells
    # The module refuses such long cells.
    cells, at = [], 0
    while True:
        if line.startswith('"', at):
            parts, end = [], at
            while line.startswith('"', end):
                stop = line.find('"', end + 1)
                if stop < 0:
                    raise ValueError("a quote that is never closed")
                parts.append(line[end + 1 : stop])
                end = stop + 1
            cells.append('"'.join(parts))
        else:
            end = line.find(",", at)
            end = len(line) if end < 0 else end
            cells.append(line[at:end])
        if end >= len(line):
            return cells
        if line[end] != ",":
            raise ValueError("a quote within a cell")
        at = end + 1


def _rows(text: Text, lines: int, max_nbytes: int) -> Iterator[tuple[int, bytes]]:
    """The number of the first line of each row that is not empty, and its text.

    A row that is too long ends after more than max_nbytes.
    """
    data, number, row = b"", lines, b""
    while True:
        more = text.read(READ_NBYTES)
        *complete, data = (data + more).split(b"\n")
        if not more:
            complete, data = [data], b""
        for line in complete:
            number += 1
            row += line
            if row.count(b'"') % 2 and more and len(row) <= max_nbytes:
                row += b"\n"
                continue
            row = row.removesuffix(b"\r")
            if row.strip():
                yield number - row.count(b"\n"), row
            row = b""
        if not more:
            return
        if len(data) > max_nbytes:
            yield number + 1, data


def check_of(kind: Any) -> tuple[str, Check]:
    """Return a description of the legal cells of an Arrow type, and their check."""
    if pa.types.is_boolean(kind):
        return "true or false", lambda cell: cell in TRUE or cell in FALSE
    if pa.types.is_integer(kind):
        info = np.iinfo(str(kind))
        low, high = int(info.min), int(info.max)
        legal = f"an integer in [{low}, {high}]"
        return legal, lambda cell: _is_integer(cell, low, high)
    if pa.types.is_floating(kind):
        return "a number", is_number
    return "text", lambda cell: True


def check_value(field: Field) -> tuple[str, Check]:
    """Return legal cells of a field that varies, and their check; see `check_of`."""
    return csv_values.legal_cell(field), lambda cell: csv_values.fits(cell, field)


def _is_integer(cell: str, low: int, high: int) -> bool:
    try:
        return "_" not in cell and low <= int(cell) <= high
    except ValueError:
        return False


def is_number(cell: str) -> bool:
    """Return whether a cell is the text of a float, NaN and infinities included."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
