"""The description of a csv file, in a JSON file beside it.

The two are renamed into place one after the other, and a run may be killed in between.
The sidecar therefore comes first, says which bytes it is of by their number and CRC32C,
and keeps what stood there before it until the csv file has followed.

Fields as columns of text: one a value, ``field.i`` for those of vectors.

The text of a csv file, plain or gzipped, piece by piece.

Csv files of ours, described by their sidecar, and how pyarrow is asked for rows.

Csv files without a description: what their columns are is found by reading them.

Rows into a csv file and its sidecar.

csv: numbers as text that reads back to the same bits, with the description beside.

One column a value, ``field.i`` for vectors; exact but for what NaNs carry. The sidecar
``<file>.mmreplay.json`` makes the same buffer again; without it the file is a table.
Names that end in ``.gz`` are gzipped.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as arrow
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.checksums import crc32c
from mmreplay.convert import registry
from mmreplay.convert.ahead import THREADS, in_order
from mmreplay.convert.array_file import refuse_wide
from mmreplay.convert.base import (
    Block,
    Columns,
    Notes,
    Reader,
    Writer,
    default_rows,
)
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    MAGIC,
    MAX_NBYTES,
    POSITION,
    RESERVED,
    Description,
)
from mmreplay.convert.staging import Staging
from mmreplay.convert.undescribed import Kinds, TableReader, refuse_expansion
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, ReplayError, SchemaError
from mmreplay.schema.dtypes import DTYPES, canonical_name, storage_dtype
from mmreplay.schema.naming import left_out

ENDING = ".mmreplay.json"
MAX_SIDECAR_NBYTES = 5 * MAX_NBYTES
OF, BEFORE = "csv", "before"
NONE = ""
"""What stands for no sidecar before this one."""
READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What a sidecar says.

    Attributes:
        description: Of the rows.
        nbytes: Of the csv file.
        crc: CRC32C of its bytes.
    """

    description: Description
    nbytes: int
    crc: int

    def to_json(self, before: str | None = None) -> bytes:
        """As text, with the sidecar that it replaces, if any."""
        described = self.description.to_bytes()
        value = json.loads(described)
        value[OF] = {
            "nbytes": self.nbytes,
            "crc32c": f"{self.crc:08x}",
            "description_crc32c": f"{crc32c(memoryview(described)):08x}",
        }
        if before is not None:
            value[BEFORE] = before
        return json.dumps(value, separators=(",", ":")).encode()

    def fits(self, file: File) -> bool:
        """Whether a csv file has its bytes; all of them are read."""
        return file.nbytes == self.nbytes and checksum(file) == self.crc


def beside(path: Path) -> Path:
    """Where the sidecar of a csv file lies."""
    return path.with_name(path.name + ENDING)


def checksum(file: File) -> int:
    """CRC32C of a whole file."""
    crc = 0
    for first in range(0, file.nbytes, READ_NBYTES):
        data = file.pread(min(READ_NBYTES, file.nbytes - first), first)
        crc = crc32c(memoryview(data), crc)
    return crc


def find(file: File) -> Sidecar | None:
    """The sidecar of a csv file, or None where it has none.

    Raises:
        FormatError: There is one that mmreplay did not write.
        CorruptError: It is of other bytes.
    """
    path = beside(file.path)
    if not os.path.lexists(path):
        return None
    value = strict_json.parse(files.read_bytes(path, MAX_SIDECAR_NBYTES), str(path))
    before = value.pop(BEFORE, None)
    found = _parse(value, path)
    if before is None:
        if found.nbytes != file.nbytes:
            raise differs(file, f"{file.nbytes} bytes", f"{found.nbytes}")
        return found
    # A run was killed between two renames: whichever the csv file fits is its own.
    if found.fits(file):
        return found
    if before == NONE:
        return None
    older = strict_json.parse(str(before).encode("utf-8", "replace"), str(path))
    older.pop(BEFORE, None)
    found = _parse(older, path)
    if not found.fits(file):
        raise differs(file, f"{file.nbytes} bytes", "those of one of its two entries")
    return found


def refuse_foreign(target: Path, overwrite: bool) -> None:
    """Refuse to write over what stands in the sidecar's place, and is none of ours.

    Args:
        target: The csv file that is to be written.
        overwrite: The user lets go of what is there.

    Raises:
        FormatError: Something does.
    """
    if not overwrite and os.path.lexists(beside(target)) and not _ours(target):
        raise FormatError(
            f"{beside(target)} is no sidecar that mmreplay wrote, expected one, or "
            f"nothing, beside {target.name}; move it away, or pass overwrite=True "
            "(--overwrite) to replace it"
        )


def remove_stale(target: Path) -> None:
    """Remove a sidecar of ours from beside a csv file that has none any more."""
    if os.path.lexists(beside(target)) and _ours(target):
        files.remove_tree(beside(target))


def _ours(target: Path) -> bool:
    """Whether what stands in a sidecar's place is one, be it damaged."""
    path = beside(target)
    try:
        value = strict_json.parse(files.read_bytes(path, MAX_SIDECAR_NBYTES), str(path))
    except ReplayError:
        return False
    return value.get("format") == MAGIC and OF in value


def differs(file: File, got: str, expected: str) -> CorruptError:
    """The error of a csv file that is not the one its sidecar is of."""
    return CorruptError(
        f"{file.path} has {got}, expected {expected} as {beside(file.path).name} says; "
        "it was changed, cut or damaged since: restore it, or read it without its "
        "description by sidecar=False"
    )


def _parse(value: strict_json.Json, path: Path) -> Sidecar:
    told = value.pop(OF, None)
    described = json.dumps(value, separators=(",", ":")).encode()
    try:
        nbytes, crc = told["nbytes"], int(told["crc32c"], 16)
        expected = int(told["description_crc32c"], 16)
    except (TypeError, KeyError, ValueError):
        nbytes, crc, expected = None, 0, 0
    if type(nbytes) is not int:
        raise FormatError(
            f"{path} does not say which csv file it is of, expected its size and "
            "checksums; move it away to read the file without its description"
        )
    found = Sidecar(Description.from_bytes(described, str(path)), nbytes, crc)
    got = crc32c(memoryview(found.description.to_bytes()))
    if got != expected:
        raise CorruptError(
            f"{path} describes with checksum {got:08x}, expected {expected:08x}; it "
            "was edited or damaged: restore it, or pass sidecar=False"
        )
    return found


class Publication:
    """Puts a sidecar in place before its csv file, and tidies up after it."""

    def __init__(self, target: Path) -> None:
        self._path = beside(target)
        self._target = target
        self._older: bytes | None = None
        self._open = False

    def announce(self, sidecar: Sidecar) -> None:
        """Write the sidecar of the file that is about to appear."""
        self._older = self._read()
        before = self._before()
        self._open = True
        files.replace_bytes(self._path, sidecar.to_json(before))
        self._sidecar = sidecar if before is not None else None

    def _before(self) -> str | None:
        """What describes the csv file that is about to be replaced, if one is."""
        if not os.path.lexists(self._target):
            return None
        try:
            with closing(File.open(self._target, None)) as file:
                found = find(file)
        except FormatError:
            # The two disagree already, and go on doing so until the new file is there.
            return None
        return NONE if found is None else found.to_json().decode()

    def _read(self) -> bytes | None:
        if not os.path.lexists(self._path):
            return None
        return files.read_bytes(self._path, MAX_SIDECAR_NBYTES // 2)

    def settle(self) -> None:
        """The file has appeared: forget what stood there before."""
        self._open = False
        if self._sidecar is not None:
            files.replace_bytes(self._path, self._sidecar.to_json())

    def take_back(self) -> None:
        """The file will not appear: put back what stood there before."""
        if not self._open:
            return
        self._open = False
        files.remove_tree(self._path.with_name(f"tmp-{self._path.name}"))
        if self._older is None:
            files.remove_tree(self._path)
        else:
            files.replace_bytes(self._path, self._older)


MAX_COLUMNS = 4096
"""More are hardly a table any more, and are refused unless the user insists."""
MOST_COLUMNS = 200_000
CELL_NBYTES = 26
"""Of the longest number, ``-2.2250738585072014e-308``, and what stands around it."""
NAN_BITS = {
    dtype: np.array([np.nan], dtype).view(f"u{np.dtype(dtype).itemsize}")[0]
    for dtype in ("float16", "float32", "float64")
}


class Cells:
    """Which columns of text hold which fields.

    Attributes:
        kinds: Dtype name and row shape by field.
        names: Every column, in order.
    """

    def __init__(self, kinds: Kinds) -> None:
        """Name the columns.

        Raises:
            SchemaError: Two of them have one name, or a name has several lines.
        """
        self.kinds = dict(kinds)
        self._of = {field: _names(field, shape) for field, (_, shape) in kinds.items()}
        self.names = [name for names in self._of.values() for name in names]
        for name in self.names:
            if "\n" in name or "\r" in name:
                raise SchemaError(
                    f"column {name!r}: got a name of several lines, expected a header "
                    "of one; leave the field out with fields=, or choose another format"
                )
        if len(set(self.names)) != len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise SchemaError(
                f"column {twice!r}: two fields need it, expected one column a value; "
                "leave one of them out with fields=, or rename it"
            )

    def types(self) -> dict[str, Any]:
        """Arrow type by column; float16 passes through float32, without loss."""
        return {
            name: _type(dtype)
            for field, (dtype, _) in self.kinds.items()
            for name in self._of[field]
        }

    def header(self) -> bytes:
        """The first line."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(self.names)
        return text.getvalue().encode()

    def encode(self, columns: Mapping[str, NDArray[np.generic]], rows: slice) -> Any:
        """A record batch of some rows of all fields."""
        arrays = []
        for field, (dtype, _) in self.kinds.items():
            part = columns[field][rows]
            # A column's values lie beside each other for Arrow: the transpose, copied.
            flat = part.reshape(len(part), -1).T
            kind = _type(dtype)
            if dtype == "float16":
                flat = flat.astype(np.float32)
            whole = np.ascontiguousarray(flat)
            arrays += [pa.array(column, kind) for column in whole]
        return pa.RecordBatch.from_arrays(arrays, self.names)

    def decode(
        self, batch: Any, fields: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Some fields of a record batch, ``[N, *shape]`` each; missing is NaN."""
        found = {}
        for field in fields:
            dtype, shape = self.kinds[field]
            names = self._of[field]
            made = np.empty((batch.num_rows, len(names)), storage_dtype(dtype))
            for number, name in enumerate(names):
                array = batch.column(name)
                if array.null_count:
                    array = array.fill_null(pa.scalar(float("nan"), array.type))
                made[:, number] = array.to_numpy(zero_copy_only=False)
            found[field] = made.reshape(batch.num_rows, *shape)
        return found

    def columns_of(self, fields: Sequence[str]) -> list[str]:
        """Columns of some fields."""
        return [name for field in fields for name in self._of[field]]


def cells_of(kinds: Kinds, force: bool) -> Cells:
    """The columns of a file that is to be written.

    Raises:
        SchemaError: A field is bfloat16, there are very many columns, or a name is none
            of a column.
    """
    _refuse_unfit(kinds, force)
    return Cells(kinds)


def _refuse_unfit(kinds: Kinds, force: bool) -> None:
    columns = 0
    for field, (dtype, shape) in kinds.items():
        if dtype == "bfloat16":
            raise SchemaError(
                f"field {field!r}: got bfloat16, expected a dtype that has a text of "
                "its own in csv; leave it out with fields=, or choose parquet or npz"
            )
        columns += int(np.prod(shape, dtype=object))
    most = MOST_COLUMNS if force else MAX_COLUMNS
    if columns > most:
        way_out = "" if force else ", or insist by force=True (--option force=true)"
        raise SchemaError(
            f"csv: got rows of {columns} values, expected at most {most} columns; "
            f"leave images out with fields=, choose parquet or npz{way_out}"
        )


def lost_nans(column: NDArray[np.generic]) -> int:
    """How many NaNs of a column are not the one that text can say."""
    if column.dtype.kind != "f":
        return 0
    nan = np.isnan(column)
    if not nan.any():
        return 0
    bits = column[nan].view(f"u{column.dtype.itemsize}")
    return int((bits != NAN_BITS[column.dtype.name]).sum())


def _names(field: str, shape: tuple[int, ...]) -> list[str]:
    if not shape:
        return [field]
    return [f"{field}.{i}" for i in range(int(np.prod(shape, dtype=object)))]


def _type(dtype: str) -> Any:
    if dtype == "float16":
        return pa.float32()
    return pa.from_numpy_dtype(storage_dtype(dtype))


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
            return Header(_header_names(line.removesuffix(b"\r"), file), lines)
        if not end:
            raise _no_header(file, "no text")


def _no_header(file: File, got: str) -> FormatError:
    return FormatError(
        f"{file.path}, line 1: got {got}, expected a header of column names separated "
        "by commas; name the format with format= (--from), or put one there"
    )


def _header_names(line: bytes, file: File) -> list[str]:
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


TRUE = ["true", "True", "TRUE", "1"]
FALSE = ["false", "False", "FALSE", "0"]
AHEAD_NBYTES = 32 << 20
"""Text that waits to be parsed, or was; of rows so long one piece at a time."""


def parsed(
    text: Text, types: dict[str, Any], wanted: Sequence[str], ours: bool,
    take: Callable[[Any], Any],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """The rows that follow the header, piece by piece: how many, and what they became.

    Args:
        text: Where the header ended.
        types: Arrow type by column, of all columns in order.
        wanted: Columns to convert.
        ours: Whether every cell has a value and stands in one line.
        take: Makes something of a record batch, in the thread that parsed it.
    """
    # Not `open_csv`, which reads ahead in a thread of its own: that ended the process
    # when it was given up, over a file of Python's. And a piece to a thread: pyarrow's
    # own threads wait for each other at the end of each piece.
    size = block_nbytes(len(types))
    options = {
        "read_options": arrow.ReadOptions(
            column_names=list(types), block_size=2 * size, use_threads=False
        ),
        "parse_options": arrow.ParseOptions(newlines_in_values=not ours),
        "convert_options": arrow.ConvertOptions(
            column_types=types,
            include_columns=list(wanted),
            null_values=[] if ours else [""],
            true_values=TRUE,
            false_values=FALSE,
        ),
    }

    def parse(lines: bytes) -> list[tuple[int, Any]]:
        table = arrow.read_csv(pa.BufferReader(lines), **options)
        return [(batch.num_rows, take(batch)) for batch in table.to_batches()]

    pieces = (lines for lines in text.lines(size // 2) if not lines.isspace())
    for found in in_order(parse, pieces, min(THREADS, AHEAD_NBYTES // size)):
        yield from found


def check_of(kind: Any) -> tuple[str, Check]:
    """What a cell of an Arrow type should be, and whether it is."""
    if pa.types.is_boolean(kind):
        return "true or false", lambda cell: cell in TRUE or cell in FALSE
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        least, most = int(info.min), int(info.max)
        what = f"an integer in [{least}, {most}]"
        return what, lambda cell: _whole(cell, least, most)
    if pa.types.is_floating(kind):
        return "a number", is_number
    return "text", lambda cell: True


def _whole(cell: str, least: int, most: int) -> bool:
    try:
        return "_" not in cell and least <= int(cell) <= most
    except ValueError:
        return False


def is_number(cell: str) -> bool:
    """Whether a cell is text of a float, NaN and infinities included."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


class CsvReader(Reader):
    """Reads a file of ours; see `Reader`. Without a sidecar: `csv_plain`."""

    def __init__(self, path: Path, sidecar: Sidecar, allow_expansion: bool) -> None:
        self.report = Notes()
        self._path, self._sidecar = path, sidecar
        self._allowed = allow_expansion
        self._description = sidecar.description
        self._cells = Cells(self._description.columns)
        refuse_wide(self._description.row_nbytes, path)
        with closing(File.open(path, None)) as file:
            self._begin(file)

    def _begin(self, file: File) -> Text:
        """The text of the rows, after a header that is as it should be."""
        text = Text(file, self._allowed)
        names = read_header(text, file).names
        expected = self._cells.names
        for number in range(max(len(names), len(expected))):
            got = names[number] if number < len(names) else "nothing"
            want = expected[number] if number < len(expected) else "nothing"
            if got != want:
                raise FormatError(
                    f"{file.path}, line 1, column {number + 1}: got {got!r}, expected "
                    f"{want!r} as the sidecar says; read it without by sidecar=False"
                )
        return text

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        return self._read(tuple(self._description.columns), rows)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: all text is read, and three columns converted."""
        return self._read(tuple(RESERVED), default_rows(self._description))

    def _read(self, fields: tuple[str, ...], rows: int) -> Iterator[Block]:
        done = 0
        with closing(File.open(self._path, self._sidecar.nbytes)) as file:
            text = self._begin(file)
            for count, found in self._parsed(file, text, fields):
                done += count
                for first in range(0, count, rows):
                    part = slice(first, first + rows)
                    yield _block({name: found[name][part] for name in fields})
            text.drain()
            if text.crc != self._sidecar.crc:
                raise differs(
                    file, f"checksum {text.crc:08x}", f"{self._sidecar.crc:08x}"
                )
        if done != self._description.rows:
            raise CorruptError(
                f"{self._path} has {done} rows, expected the {self._description.rows} "
                "that its sidecar names; the two are not of one run"
            )

    def _parsed(
        self, file: File, text: Text, fields: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        if self._description.rows == 0:
            return
        cells = self._cells
        yield from told(
            file, text, cells.types(), cells.columns_of(fields), self._allowed,
            lambda batch: cells.decode(batch, fields), ours=True,
        )  # fmt: skip

    def close(self) -> None:
        """See `Reader.close`: the file is open while it is read only."""
        return


def told(
    file: File, text: Text, types: dict[str, Any], wanted: Sequence[str],
    allowed: bool, take: Callable[[Any], Any], *, ours: bool,
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """`parsed`, with an error that tells of the first row that cannot be read."""
    done = 0
    found = parsed(text, types, wanted, ours, take)
    while True:
        try:
            piece = next(found, None)
        except ReplayError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise unreadable(file, types, done, error, allowed) from error
        if piece is None:
            return
        done += piece[0]
        yield piece


def unreadable(
    file: File, types: dict[str, Any], done: int, error: Exception, allowed: bool
) -> CorruptError:
    """The error of a row that pyarrow cannot read, with its line and column."""
    checks = {name: check_of(kind) for name, kind in types.items()}
    found = explain(Text(file, allowed), file, done, checks)
    if found is None:
        told = " ".join(str(error).split())[:200]
        found = f"{file.path}, after {done} rows: got {told}, expected more rows"
    return CorruptError(f"{found}; the file was edited or damaged: correct it there")


def _block(found: dict[str, NDArray[np.generic]]) -> Block:
    env_ids = found.pop(ENV_ID).view(np.int64)
    positions = found.pop(POSITION).view(np.int64)
    return Block(found, env_ids, positions, found.pop(FLAGS).view(np.uint8))


BOOLS = pa.array(["true", "false", "True", "False", "TRUE", "FALSE"])
WIDER = {"bool": "int64", "int64": "uint64", "uint64": "float64", "float64": "text"}
"""What a column is taken for next, once a cell says that it is not the first."""
PART = re.compile(r"\.\d+$")
PARTED = re.compile(r"(.+)\.(0|[1-9][0-9]{0,5})")
FITTING = tuple(name for name in DTYPES if "16" not in name or "int" in name)


def open_plain(
    path: Path, dtypes: Mapping[str, str], allow_expansion: bool
) -> TableReader:
    """Read a file once to find its columns, and open it to be read again.

    Args:
        path: The file.
        dtypes: Dtype name by field, where the user knows better.
        allow_expansion: Unpack a gzipped file whatever it holds.

    Raises:
        FormatError: It is no table of numbers.
    """
    notes = Notes()
    dtypes = {name: canonical_name(dtype) for name, dtype in dtypes.items()}
    with closing(File.open(path, None)) as file:
        survey = _Survey(file, allow_expansion, dtypes)
    guessed = survey.dtypes(notes)
    if not guessed:
        parted = len(survey.names) == 1 and re.search(r"[;\t|]", survey.names[0])
        way_out = "separate them by commas" if parted else "name the format by --from"
        raise FormatError(
            f"{path} has no column of numbers among {survey.names[:20]}, expected at "
            f"least one and a row; {way_out}"
        )
    if all(_is_number(name) for name in survey.names):
        notes.doubt(
            f"all columns have numbers as names ({', '.join(survey.names[:5])}): the "
            "first line may be a row, and was taken for the header"
        )
    fields = group(survey.names, guessed, notes)
    kinds = {name: (_chosen(name, found, dtypes), shape) for name, (found, shape)
             in fields.items()}  # fmt: skip
    unknown = sorted(set(dtypes) - set(kinds))
    if unknown:
        raise SchemaError(
            f"dtypes: got {unknown[0]!r}, expected fields of {path}: "
            f"{', '.join(list(kinds)[:20])}; check the spelling"
        )
    cells = Cells(kinds)
    guesses = [name for name in kinds if name not in dtypes]
    _doubt_rounded(cells, guesses, survey.inexact, notes)
    types = {name: pa.string() for name in survey.names} | cells.types()

    def give(rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        wanted = cells.columns_of(names)
        with closing(File.open(path, file.nbytes)) as again:
            for count, found in _taken(
                again, types, wanted, allow_expansion,
                lambda batch: cells.decode(batch, names),
            ):  # fmt: skip
                for first in range(0, count, rows):
                    part = slice(first, first + rows)
                    yield {name: found[name][part] for name in names}

    return TableReader(path, kinds, survey.rows, give, notes)


def _doubt_rounded(
    cells: Cells, fields: list[str], inexact: set[str], notes: Notes
) -> None:
    """Doubt fields that became float64 although an integer of theirs is none."""
    for field in fields:
        rounded = inexact.intersection(cells.columns_of([field]))
        if cells.kinds[field][0] == "float64" and rounded:
            notes.doubt(
                f"column {min(rounded)!r} has integers that float64 cannot hold, and "
                "they were rounded"
            )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _chosen(name: str, guessed: str, dtypes: Mapping[str, str]) -> str:
    chosen = dtypes.get(name, guessed)
    if chosen not in FITTING:
        raise SchemaError(
            f"dtypes: got {chosen} for {name!r}, expected one of {', '.join(FITTING)}; "
            "choose a wider one"
        )
    return chosen


def _taken(
    file: File, types: dict[str, Any], wanted: list[str], allowed: bool,
    take: Callable[[Any], Any],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Rows of a file; see `csv_reader.parsed`."""
    text = Text(file, allowed)
    read_header(text, file)
    yield from told(file, text, types, wanted, allowed, take, ours=False)
    if text.quotes % 2:
        # Arrow takes all that follows such a quote for one cell.
        raise FormatError(
            f"{file.path}: got {text.quotes} quotes, of which one is never closed, "
            "expected pairs of them; correct it there"
        )


class _Survey:
    """One pass over a file: how many rows there are, and what each column is.

    Attributes:
        names: Columns, in order.
        rows: In all.
        inexact: Columns with an integer that is no float64.
    """

    def __init__(self, file: File, allowed: bool, dtypes: Mapping[str, str]) -> None:
        self._told = dtypes
        self.names = read_header(Text(file, allowed), file).names
        self.rows = 0
        self._file, self._allowed = file, allowed
        self._guessed = dict.fromkeys(self.names, "bool")
        self.inexact: set[str] = set()
        self._empty: set[str] = set()
        self._filled: set[str] = set()
        types = {name: pa.string() for name in self.names}
        if not any(len(piece.strip()) for piece in _rest(file, allowed)):
            return
        for count, batch in _taken(file, types, self.names, allowed, lambda each: each):
            for name in self.names:
                self._look(name, batch.column(name))
            self.rows += count

    def _look(self, name: str, column: Any) -> None:
        if self._guessed[name] == "text":
            return
        before = name in self._filled
        filled = column.filter(compute.not_equal(column, ""))
        if len(filled) < len(column):
            self._empty.add(name)
        if len(filled):
            self._filled.add(name)
        while (guess := self._guessed[name]) != "text":
            if self._is(name, filled, guess):
                return
            self._guessed[name] = WIDER[guess]
        if self.rows and before:
            # A column that was numbers so far: one bad cell, not another kind.
            raise self._bad("a number as in the rows before", name, is_number)

    def _is(self, name: str, column: Any, guess: str) -> bool:
        if guess == "bool":
            return bool(compute.all(compute.is_in(column, BOOLS)).as_py() is not False)
        column = compute.utf8_trim_whitespace(column)
        try:
            found = column.cast(guess if guess != "float64" else pa.float64())
        except pa.ArrowInvalid:
            return False
        chosen = self._told.get(name) or self._told.get(PART.sub("", name))
        if chosen == "float32":
            self._refuse_overflow(name, column, column.cast(pa.float32()), chosen)
        elif guess == "float64":
            self._refuse_overflow(name, column, found, guess)
        if name not in self.inexact and _inexact(column, found):
            self.inexact.add(name)
        return True

    def _refuse_overflow(self, name: str, texts: Any, values: Any, dtype: str) -> None:
        """Refuse finite numbers that a dtype makes infinite."""
        infinite = np.isinf(values.to_numpy(zero_copy_only=False))
        if not infinite.any():
            return
        most = float(np.finfo(dtype).max)
        if not all(map(_says_so, texts.filter(pa.array(infinite)).to_pylist())):
            raise self._bad(
                f"one that {dtype} holds", name,
                lambda cell: _says_so(cell) or abs(float(cell or 0)) <= most,
            )  # fmt: skip

    def _bad(self, what: str, name: str, check: Check) -> FormatError:
        """The error of the first cell of a column that does not pass."""
        checks = {each: check_of(pa.string()) for each in self.names}
        checks[name] = (what, lambda cell: not cell or check(cell))
        text = Text(self._file, self._allowed)
        found = explain(text, self._file, self.rows, checks)
        if found is None:
            found = f"{self._file.path}, column {name!r}: got words among numbers"
        return FormatError(f"{found}; correct it there")

    def dtypes(self, notes: Notes) -> dict[str, str]:
        """Dtype name by column, of those that can be fields."""
        found = {}
        for name, guess in self._guessed.items():
            if guess == "text" or not name or not self.rows:
                lacks = "holds no numbers" if name else "has no name"
                told = f"column {name!r} {lacks}, and was left out"
                left_out(notes, PART.sub("", name), told)
                continue
            # A bool has no NaN: such a cell is refused when it is read.
            if name not in self._filled:
                notes.doubt(f"column {name!r} is empty, and became NaN")
                guess = "float64"
            elif name in self._empty and guess != "bool":
                notes.note(f"empty cells of column {name!r} became NaN")
                if guess != "float64":
                    notes.doubt(
                        f"column {name!r} of {guess} has empty cells, and became "
                        "float64"
                    )
                guess = "float64"
            found[name] = guess
        return found


def _inexact(texts: Any, values: Any) -> bool:
    """Whether an integer among the cells is no float64."""
    found = values.to_numpy(zero_copy_only=False)
    large = np.abs(found.astype(np.float64)) >= 2**53
    if not large.any():
        return False
    cells = texts.filter(pa.array(large)).to_pylist()
    return any(re.fullmatch(r"[+-]?\d+", c) and int(float(c)) != int(c) for c in cells)


def _says_so(cell: str) -> bool:
    return "inf" in cell.lower()


def _rest(file: File, allowed: bool) -> Iterator[bytes]:
    text = Text(file, allowed)
    read_header(text, file)
    while piece := text.read():
        yield piece


Kind = tuple[str, tuple[int, ...]]


def group(names: list[str], dtypes: Mapping[str, str], notes: Notes) -> dict[str, Kind]:
    """Fields of columns: those named ``field.0`` to ``field.k``, in any order, are one.

    Args:
        names: Of all columns, in order.
        dtypes: Of those that can be fields.
        notes: Told of fields that lack a column.
    """
    parts: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if (match := PARTED.fullmatch(name)) and match[1] not in names:
            parts[match[1]].add(int(match[2]))
    whole: dict[str, list[str]] = {}
    for field, numbers in parts.items():
        columns = [f"{field}.{number}" for number in range(len(numbers))]
        if max(numbers) == len(numbers) - 1 and all(each in dtypes for each in columns):
            whole[field] = columns
        elif len(numbers) > 1 and max(numbers) >= len(numbers):
            lacks = min(set(range(len(numbers))) - numbers)
            notes.doubt(
                f"columns {field}.{min(numbers)} to {field}.{max(numbers)} are fields "
                f"of their own: {field}.{lacks} is missing"
            )
    found: dict[str, Kind] = {}
    for name in names:
        match = PARTED.fullmatch(name)
        field = match[1] if match else name
        if columns := whole.get(field, []):
            kind = _widest([dtypes[column] for column in columns])
            found.setdefault(field, (kind, (len(columns),)))
        elif name in dtypes:
            found[name] = (dtypes[name], ())
    return found


def _widest(dtypes: list[str]) -> str:
    """The narrowest dtype that holds all; int64 beside uint64 makes float64."""
    kinds = set(dtypes)
    if kinds == {"int64", "uint64"} or "float64" in kinds:
        return "float64"
    return max(kinds, key=list(WIDER).index)


PIECE_NBYTES = 1 << 20
"""Rows that one thread makes text of at a time; they become about three times that."""
GZ = ".gz"
LEVEL = 1
"""Of gzip, where none is given."""


class CsvWriter(Writer):
    """Writes rows as text; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, overwrite: bool, force: bool,
        level: int,
    ) -> None:  # fmt: skip
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._cells = cells_of(description.columns, force)
        # Made now, so that what takes too much room is refused before it is written.
        Sidecar(description, 0, 0).to_json()
        self._done = self._end = self._crc = self._lost = 0
        gzipped = target.name.lower().endswith(GZ)
        # Without a time in its header, equal buffers give equal files.
        self._deflate = zlib.compressobj(level, wbits=31) if gzipped else None
        refuse_foreign(target, overwrite)
        self._publication = Publication(target)
        self._staging = Staging(target, overwrite=overwrite)
        self._file: File | None = None
        try:
            self._file = self._staging.open(0)
            self._put(memoryview(self._cells.header()))
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        self._done += len(block)
        if self._done > self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source changed meanwhile"
            )
        columns = {name: block.column(name) for name in self._cells.kinds}
        self._count_nans(columns)
        for text in self._texts(columns, len(block)):
            self._put(text)

    def _count_nans(self, columns: dict[str, NDArray[np.generic]]) -> None:
        self._lost += sum(lost_nans(column) for column in columns.values())
        if self._lost:
            self.notes.doubts[:] = [
                f"{self._lost} NaNs lose their sign or payload: text has one NaN only"
            ]

    def _texts(
        self, columns: dict[str, NDArray[np.generic]], count: int
    ) -> Iterator[memoryview]:
        """Text of all rows, in order; a few pieces are made at a time."""
        rows = max(1, PIECE_NBYTES // self._description.row_nbytes)
        parts = (slice(at, min(at + rows, count)) for at in range(0, count, rows))
        return in_order(partial(self._text, columns), parts)

    def _text(self, columns: dict[str, NDArray[np.generic]], rows: slice) -> memoryview:
        sink = pa.BufferOutputStream()
        batch = self._cells.encode(columns, rows)
        arrow.write_csv(batch, sink, arrow.WriteOptions(include_header=False))
        return memoryview(sink.getvalue())

    def _put(self, text: memoryview) -> None:
        data = text if self._deflate is None else self._deflate.compress(text)
        self._append(memoryview(data))

    def _append(self, data: memoryview) -> None:
        assert self._file is not None
        if len(data):
            self._crc = crc32c(data, self._crc)
            self._file.pwrite(data, self._end)
            self._end += len(data)

    def finish(self) -> None:
        """See `Writer.finish`."""
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source was cut"
            )
        if self._deflate is not None:
            self._append(memoryview(self._deflate.flush()))
        self._close()
        sidecar = Sidecar(self._description, self._end, self._crc)
        self._publication.announce(sidecar)
        nbytes = self._staging.publish()
        self._publication.settle()
        self.nbytes = nbytes + len(sidecar.to_json())

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._publication.take_back()
        self._staging.abort()


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    force: bool = False,
    compression_level: int | None = None,
    layout: str | None = None,
) -> Writer:
    """Make a csv file and its sidecar as a target.

    Args:
        target: The file; gzipped if its name ends in ``.gz``.
        description: What will come.
        overwrite: Replace a file that is there.
        force: Write rows of more than 4,096 columns, as images make.
        compression_level: Of gzip, 0 to 9; 1 by default.
        layout: ``"skrl"`` for a memory of skrl or rofunc, without a sidecar.

    Raises:
        SchemaError: A field is bfloat16, or there are too many columns.
    """
    other = registry.find_layout("csv", layout)
    _check(target, compression_level)
    if other is not None:
        return other.open_writer(
            "csv", target, description, overwrite=overwrite, force=force
        )
    level = LEVEL if compression_level is None else compression_level
    return CsvWriter(target, description, overwrite, force, level)


def planned(
    description: Description,
    *,
    target: Path | None = None,
    force: bool = False,
    compression_level: int | None = None,
    layout: str | None = None,
) -> None:
    """Refuse what cannot be written; see `registry.planned`."""
    other = registry.find_layout("csv", layout)
    _check(target, compression_level)
    if other is None:
        cells_of(description.columns, force)
    else:
        other.planned("csv", description, target=target, force=force)


def _check(target: Path | None, level: int | None) -> None:
    if level is None:
        return
    if type(level) is not int or level not in range(10):
        raise SchemaError(
            f"compression_level: got {level!r}, expected 0 to 9; leave it out for "
            f"{LEVEL}"
        )
    if target is not None and not target.name.lower().endswith(GZ):
        raise SchemaError(
            f"compression_level: got {level!r} for {target}, which is not gzipped, "
            f"expected it for a name that ends in {GZ} only; call the file so, or "
            "leave it out"
        )


def open_reader(
    path: Path,
    *,
    sidecar: bool = True,
    dtypes: Mapping[str, str] | None = None,
    allow_expansion: bool = False,
    layout: str | None = None,
    num_envs: int = 1,
    cursor: int | None = None,
) -> Reader:
    """Open a csv file as a source, with its sidecar if it has one.

    Args:
        path: The file.
        sidecar: False reads the file as a table, whatever lies beside it.
        dtypes: Dtype name by field, of tables: otherwise numbers with a point are
            float64, and others int64.
        allow_expansion: Unpack a gzipped file of more than 1,000 times its size.
        layout: ``"skrl"`` for a memory of skrl or rofunc; those named as they name
            them are known.
        num_envs: Environments of such a memory, whose rows stand in turns.
        cursor: The oldest step of such a memory that is full.
    """
    if not isinstance(dtypes, Mapping | None):
        raise SchemaError(
            f"dtypes: got {dtypes!r}, expected a dtype by field, such as "
            """{"obs": "float32"}; leave it out to have them found"""
        )
    other = registry.find_layout("csv", layout, path)
    if other is not None:
        return other.open_reader(
            "csv", path, num_envs=num_envs, cursor=cursor, dtypes=dtypes,
            allow_expansion=allow_expansion,
        )  # fmt: skip
    envs = None if num_envs == 1 else num_envs
    registry.refuse_layout_options("csv", num_envs=envs, cursor=cursor)
    with closing(File.open(path, None)) as file:
        found = find(file) if sidecar else None
    if found is None:
        return open_plain(path, dtypes or {}, allow_expansion)
    if dtypes:
        raise SchemaError(
            f"dtypes: got {dtypes!r} for {path}, which has a sidecar that says them, "
            "expected none; leave it out, or pass sidecar=False"
        )
    return CsvReader(path, found, allow_expansion)
