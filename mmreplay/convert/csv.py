"""csv: numbers as text that reads back to the same bits, with a description beside it.

One column a value, ``field.i`` for vectors, and one cell for a value that varies
(`csv_values`); exact except for the payloads of NaNs. The
sidecar ``<file>.mmreplay.json`` makes the same buffer again; without it the file is a
table (`open_plain`), whose columns are found by reading it once. Files whose names end
in ``.gz`` are gzipped.

A csv file and its sidecar are renamed into place one after the other, and a run may be
killed in between. The sidecar therefore comes first, names its csv file by size and
CRC32C, and holds the sidecar it replaces until the csv file has followed.
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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as arrow
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.checksums import crc32c
from mmreplay.convert import csv_values, registry
from mmreplay.convert.base import (
    Block,
    Columns,
    Kinds,
    Notes,
    Reader,
    Writer,
    default_rows,
    in_order,
    refuse_wide,
)
from mmreplay.convert.csv_text import (
    MAX_FORCED_COLUMNS,
    READ_NBYTES,
    Check,
    Text,
    check_of,
    explain,
    is_number,
    parse_rows,
    read_header,
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
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.convert.undescribed import TableReader, in_place, needless_autoreset
from mmreplay.convert.values import check_values, split_by_bytes
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, ReplayError, SchemaError, undone_by
from mmreplay.format.metadata import Autoreset
from mmreplay.nesting import meant
from mmreplay.schema import Field
from mmreplay.schema.dtypes import DTYPES, canonical_name, storage_dtype
from mmreplay.schema.naming import KNOWN

ENDING = ".mmreplay.json"
MAX_SIDECAR_NBYTES = 5 * MAX_NBYTES
CSV_KEY, BEFORE_KEY = "csv", "before"
NO_SIDECAR = ""
"""Value of ``before`` if the replaced csv file had no sidecar."""
MAX_COLUMNS = 4096
"""More columns are refused unless the user passes ``force=True``."""
NAN_BITS = {
    dtype: np.array([np.nan], dtype).view(f"u{np.dtype(dtype).itemsize}")[0]
    for dtype in ("float16", "float32", "float64")
}
BOOLS = pa.array(["true", "false", "True", "False", "TRUE", "FALSE"])
TEXT = "text"
"""In place of a dtype, of columns that are read as text."""
WIDER = {"bool": "int64", "int64": "uint64", "uint64": "float64", "float64": TEXT}
"""The next guess for a column's dtype, once a cell contradicts one."""
COMPONENT = re.compile(r"\.\d+$")
PARTED = re.compile(r"(.+)\.(0|[1-9][0-9]{0,5})")
FITTING = tuple(name for name in DTYPES if "16" not in name or "int" in name)
Kind = tuple[str, tuple[int, ...]]
CHUNK_NBYTES = 1 << 20
"""Of the rows that one thread formats at a time; their text takes about three times
that."""
GZ = ".gz"
LEVEL = 1
"""Of gzip by default."""


def open_reader(
    path: Path,
    *,
    sidecar: bool = True,
    dtypes: Mapping[str, str] | None = None,
    allow_expansion: bool = False,
    layout: str | None = None,
    num_envs: int = 1,
    cursor: int | None = None,
    autoreset: Autoreset | None = None,
) -> Reader:
    """Open a csv file as a source, with its sidecar if it has one.

    Args:
        path: The file.
        sidecar: False reads the file as a table, even if it has a sidecar.
        dtypes: Dtype name by field, of tables, or ``"text"``: by default numbers with
            a point are float64, other numbers int64, and all else is text.
        allow_expansion: Unpack a gzipped file of more than 1,000 times its size.
        layout: ``"skrl"`` for a memory of skrl or rofunc; the default if the file
            has a name of theirs.
        num_envs: Environments of such a memory, whose rows are interleaved.
        cursor: The oldest step of such a memory, if it is full.
        autoreset: Of rows with positions and without a description, which may not say
            it: ``"next_step"``, ``"same_step"`` or ``"disabled"``.

    Raises:
        FormatError: It is no such file, or its sidecar is of another.
        SchemaError: An option is not legal for the file.
    """
    if not isinstance(dtypes, Mapping | None):
        raise SchemaError(
            f"dtypes must map fields to dtypes, got {dtypes!r}. Pass, for example, "
            'dtypes={"reward": "float32"}.'
        )
    other = registry.find_layout("csv", layout, path)
    if other is not None:
        if autoreset is not None:
            raise needless_autoreset(path, autoreset)
        return other.open_reader(
            "csv",
            path,
            num_envs=num_envs,
            cursor=cursor,
            dtypes=dtypes,
            allow_expansion=allow_expansion,
        )
    envs = None if num_envs == 1 else num_envs
    registry.refuse_layout_options("csv", num_envs=envs, cursor=cursor)
    with closing(File.open(path, None)) as file:
        found = find_sidecar(file) if sidecar else None
    if found is None:
        return open_plain(path, dtypes or {}, allow_expansion, autoreset)
    if autoreset is not None:
        raise needless_autoreset(path, autoreset)
    if dtypes:
        raise SchemaError(
            f"dtypes must be None for {path}, whose sidecar has the dtypes, got "
            f"{dtypes!r}. Leave it out, or pass sidecar=False."
        )
    return CsvReader(path, found, allow_expansion)


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
        description: Of the rows.
        overwrite: Replace an existing file.
        force: Write rows of more than 4,096 columns, as of images.
        compression_level: Of gzip, 0 to 9; 1 by default.
        layout: ``"skrl"`` for a memory of skrl or rofunc, without a sidecar.

    Raises:
        SchemaError: A field is bfloat16, or there are too many columns.
    """
    other = registry.find_layout("csv", layout)
    _check(target, compression_level)
    if other is not None:
        return other.open_writer("csv", target, description, overwrite=overwrite, force=force)
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
    """Refuse rows that cannot be written; see `registry.planned`."""
    other = registry.find_layout("csv", layout)
    _check(target, compression_level)
    if other is None:
        cells_of(description.columns, force, varying_of(description))
    else:
        other.planned("csv", description, target=target, force=force)


def _check(target: Path | None, level: int | None) -> None:
    if level is None:
        return
    if type(level) is not int or level not in range(10):
        raise SchemaError(
            f"compression_level must be in [0, 9], got {level!r}. Leave it out for {LEVEL}."
        )
    if target is not None and not target.name.lower().endswith(GZ):
        raise SchemaError(
            f"compression_level must be None for {target}, which is not gzipped, got "
            f"{level!r}. Leave it out, or use a name that ends in {GZ}."
        )


class CsvReader(Reader):
    """Reads a file that has a sidecar; see `Reader`. Without one: `open_plain`."""

    def __init__(self, path: Path, sidecar: Sidecar, allow_expansion: bool) -> None:
        self.report = Notes()
        self._path, self._sidecar = path, sidecar
        self._allowed = allow_expansion
        self._description = sidecar.description
        self._varying = varying_of(self._description)
        self._cells = Cells(self._description.columns, self._varying)
        refuse_wide(self._description.row_nbytes, path)
        with closing(File.open(path, None)) as file:
            self._begin(file)

    def _begin(self, file: File) -> Text:
        """The text of the rows, after the check of the header.

        Raises:
            FormatError: The header differs from the sidecar.
        """
        text = Text(file, self._allowed)
        names = read_header(text, file).names
        expected = self._cells.names
        for number in range(max(len(names), len(expected))):
            got = names[number] if number < len(names) else "nothing"
            want = expected[number] if number < len(expected) else "nothing"
            if got != want:
                raise FormatError(
                    f"{file.path}, line 1, column {number + 1} must be {want!r} as the "
                    f"sidecar says, got {got!r}. Pass sidecar=False to ignore the "
                    "sidecar."
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

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`: all text is read, and values are converted."""
        names = (*RESERVED, *self._varying)
        for block in self._read(names, default_rows(self._description)):
            lengths = {path: block.values(path).lengths for path in self._varying}
            yield Block(lengths, block.env_ids, block.positions, block.flags)

    def _read(self, fields: tuple[str, ...], rows: int) -> Iterator[Block]:
        done = 0
        with closing(File.open(self._path, self._sidecar.nbytes)) as file:
            text = self._begin(file)
            cells = self._cells
            parsed = parse_rows(
                file,
                text,
                cells.types(),
                cells.columns_of(fields),
                self._allowed,
                lambda batch: cells.decode(batch, fields),
                ours=True,
                varying=self._varying,
            )
            for count, found in parsed if self._description.rows else ():
                for path in fields:
                    if path in self._varying:
                        values: Any = found[path]
                        what = f"{self._path}: column {path!r}"
                        check_values(values, self._varying[path], what, done)
                done += count
                for first in range(0, count, rows):
                    within = slice(first, first + rows)
                    block = {name: found[name][within] for name in fields}
                    env_ids = block.pop(ENV_ID).view(np.int64)
                    positions = block.pop(POSITION).view(np.int64)
                    flags = block.pop(FLAGS).view(np.uint8)
                    yield Block(block, env_ids, positions, flags)
            text.drain()
            if text.crc != self._sidecar.crc:
                raise differs(file, f"checksum {text.crc:08x}", f"{self._sidecar.crc:08x}")
        if done != self._description.rows:
            raise CorruptError(
                f"{self._path} has {done} rows, but its sidecar says "
                f"{self._description.rows}. The two files are not of the same export."
            )

    def close(self) -> None:
        """See `Reader.close`: the file is open only while blocks are read."""
        return


class CsvWriter(StagedWriter):
    """Writes rows as text; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, overwrite: bool, force: bool, level: int
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._varying = varying_of(description)
        self._cells = cells_of(description.columns, force, self._varying)
        # Encoded now, so that a description that is too large is refused at once.
        Sidecar(description, 0, 0).to_json()
        self._done = self._end = self._crc = self._lost = 0
        gzipped = target.name.lower().endswith(GZ)
        # Without a time in its header, equal buffers give equal files.
        self._deflate = zlib.compressobj(level, wbits=31) if gzipped else None
        refuse_foreign(target, overwrite)
        self._publication = Publication(target)
        self._staging = Staging(target, overwrite=overwrite)
        self._file: File | None = None
        with undone_by(self.abort):
            self._file = self._staging.open(0)
            self._put(memoryview(self._cells.header()))

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        self._done += len(block)
        if self._done > self._description.rows:
            raise FormatError(
                f"got {self._done} rows, but the source describes "
                f"{self._description.rows}. The source changed during the conversion."
            )
        columns = {name: block.column(name) for name in self._cells.kinds}
        values = {path: block.values(path) for path in self._varying}
        csv_values.refuse_long(values, self._varying)
        self._lost += sum(
            lost_nans(values[name].values if name in values else column)
            for name, column in columns.items()
        )
        if self._lost:
            self.notes.doubts[:] = [
                f"{self._lost} NaNs lose their sign or payload, because text has only one NaN"
            ]
        row_nbytes = np.full(len(block), self._description.row_nbytes)
        for path, field in self._varying.items():
            row_nbytes += values[path].lengths * field.inner_nbytes
        chunks = (slice(*chunk) for chunk in split_by_bytes(row_nbytes, CHUNK_NBYTES))
        for text in in_order(partial(self._text, columns), chunks):
            self._put(text)

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
                f"got {self._done} rows, but the source describes "
                f"{self._description.rows}. The source is truncated."
            )
        if self._deflate is not None:
            self._append(memoryview(self._deflate.flush()))
        self._close()
        sidecar = Sidecar(self._description, self._end, self._crc)
        self._publication.announce(sidecar)
        nbytes = self._staging.publish()
        self._publication.settle()
        self.nbytes = nbytes + len(sidecar.to_json())

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._publication.take_back()
        self._staging.abort()


def lost_nans(column: NDArray[np.generic]) -> int:
    """The number of NaNs of a column whose bits text cannot express."""
    if column.dtype.kind != "f":
        return 0
    nan = np.isnan(column)
    if not nan.any():
        return 0
    bits = column[nan].view(f"u{column.dtype.itemsize}")
    return int((bits != NAN_BITS[column.dtype.name]).sum())


def open_plain(
    path: Path, dtypes: Mapping[str, str], allow_expansion: bool, autoreset: Autoreset | None = None
) -> Reader:
    """Open a table, after one pass that finds its columns.

    Args:
        path: The file.
        dtypes: Dtype name by field; others are guessed.
        allow_expansion: Unpack a gzipped file to any size.
        autoreset: Of rows with positions.

    Raises:
        FormatError: It is no table.
    """
    notes = Notes()
    dtypes = {
        name: TEXT if dtype == TEXT else canonical_name(dtype) for name, dtype in dtypes.items()
    }
    with closing(File.open(path, None)) as file:
        survey = _TableSurvey(file, allow_expansion, dtypes)
    guessed = survey.dtypes(notes)
    varying = survey.texts(notes)
    if not guessed and not varying.keys() & dtypes.keys():
        raise _no_table(path, survey.names, varying)
    if all(_is_number(name) for name in survey.names):
        notes.doubt(
            f"all columns have numbers as names ({', '.join(survey.names[:5])}): the "
            "first line may be a row, and was taken for the header"
        )
    fields = group(survey.names, guessed, notes)
    kinds = {name: (_chosen(name, found, dtypes), shape) for name, (found, shape) in fields.items()}
    _check_names(path, dtypes, kinds, varying)
    cells = Cells(kinds | dict.fromkeys(varying, ("uint8", ())), varying)
    _doubt_rounded(cells, dtypes, survey.inexact, notes)
    types = {name: pa.string() for name in survey.names} | cells.types()

    def batches(rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        wanted, done = cells.columns_of(names), 0
        with closing(File.open(path, file.nbytes)) as again:
            for count, found in _table_rows(
                again, types, wanted, allow_expansion, lambda batch: cells.decode(batch, names)
            ):
                for name in names:
                    if name in varying:
                        values: Any = found[name]
                        what = f"{path}: column {name!r}"
                        check_values(values, varying[name], what, done)
                done += count
                for first in range(0, count, rows):
                    within = slice(first, first + rows)
                    yield {name: found[name][within] for name in names}

    columns = {name: dtype for name, (dtype, _) in kinds.items()}
    columns |= dict.fromkeys(varying, TEXT)
    return in_place(
        TableReader(path, kinds, survey.rows, batches, notes, columns, varying, autoreset)
    )


def _no_table(path: Path, names: list[str], varying: Mapping[str, Field]) -> FormatError:
    """The error for a file of words, which any such file is a table of."""
    way_out = "Name the format by --from"
    if len(names) == 1 and re.search(r"[;\t|]", names[0]):
        way_out = "Separate columns by commas"
    elif varying:
        way_out = f"Pass dtypes={{{next(iter(varying))!r}: {TEXT!r}}} to read text"
    return FormatError(f"{path} has no row or no column of numbers among {names[:20]}. {way_out}.")


def _check_names(
    path: Path, dtypes: Mapping[str, str], kinds: Kinds, varying: Mapping[str, Field]
) -> None:
    """Refuse dtypes of columns of text, and of columns that are not there."""
    for name in varying.keys() & dtypes.keys():
        if dtypes[name] != TEXT:
            raise SchemaError(
                f"dtypes must be {TEXT!r} for column {name!r} of {path}, which holds "
                f"text, got {dtypes[name]!r}. Leave it out, or correct the file."
            )
    names = [*kinds, *varying]
    unknown = sorted(set(dtypes) - set(names))
    if unknown:
        raise SchemaError(
            f"dtypes must name fields of {path} ({', '.join(names[:20])}), got "
            f"{unknown[0]!r}. {meant(unknown[0], names, 'Check the spelling.')}"
        )


def _doubt_rounded(
    cells: Cells, dtypes: Mapping[str, str], inexact: set[str], notes: Notes
) -> None:
    """Doubt the guess of float64 for fields with integers that it cannot hold."""
    for field, (dtype, _) in cells.kinds.items():
        rounded = inexact.intersection(cells.columns_of([field]))
        if field not in dtypes and dtype == "float64" and rounded:
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
            f"dtypes must be one of {', '.join(FITTING)}, got {chosen} for {name!r}. "
            "Choose a wider dtype."
        )
    return chosen


def _table_rows(
    file: File,
    types: dict[str, Any],
    wanted: list[str],
    allowed: bool,
    convert: Callable[[Any], Any],
) -> Iterator[tuple[int, Any]]:
    """The rows of a table; see `csv_text.parse_rows`."""
    text = Text(file, allowed)
    read_header(text, file)
    yield from parse_rows(file, text, types, wanted, allowed, convert, ours=False)
    if text.quotes % 2:
        # Arrow reads everything after such a quote as one cell.
        raise FormatError(
            f"{file.path} has {text.quotes} quotes, so that one is never closed. Correct the file."
        )


class _TableSurvey:
    """One pass over a table, which counts rows and guesses dtypes.

    Attributes:
        names: Columns, in order.
        rows: Number of rows.
        inexact: Columns with an integer that float64 cannot hold.
    """

    def __init__(self, file: File, allowed: bool, dtypes: Mapping[str, str]) -> None:
        self._wanted = dtypes
        self.names = read_header(Text(file, allowed), file).names
        self.rows = 0
        self._file, self._allowed = file, allowed
        self._guessed = {name: TEXT if dtypes.get(name) == TEXT else "bool" for name in self.names}
        self._longest = dict.fromkeys(self.names, 0)
        self.inexact: set[str] = set()
        self._empty: set[str] = set()
        self._filled: set[str] = set()
        types = {name: pa.string() for name in self.names}
        text = Text(file, allowed)
        read_header(text, file)
        if not any(data.strip() for data in iter(text.read, b"")):
            return
        batches = _table_rows(file, types, self.names, allowed, lambda batch: batch)
        for count, batch in batches:
            for name in self.names:
                self._guess(name, batch.column(name))
            self.rows += count

    def _guess(self, name: str, column: Any) -> None:
        """Widen the guess for a column until its next cells fit."""
        if self._guessed[name] == TEXT:
            self._note_longest(name, column)
            return
        before = name in self._filled
        filled = column.filter(compute.not_equal(column, ""))
        if len(filled) < len(column):
            self._empty.add(name)
        if len(filled):
            self._filled.add(name)
        while (guess := self._guessed[name]) != TEXT:
            if self._fits(name, filled, guess):
                return
            self._guessed[name] = WIDER[guess]
        if self.rows and before:
            # A column of numbers so far: one bad cell, not a column of text.
            way_out = f"pass dtypes={{{name!r}: {TEXT!r}}} to read it as text"
            raise self._bad("a number like the rows before", name, is_number, way_out)
        self._note_longest(name, column)

    def _note_longest(self, name: str, column: Any) -> None:
        longest = compute.max(compute.binary_length(column)).as_py() or 0
        self._longest[name] = max(self._longest[name], longest)

    def _fits(self, name: str, column: Any, guess: str) -> bool:
        if guess == "bool":
            return bool(compute.all(compute.is_in(column, BOOLS)).as_py() is not False)
        column = compute.utf8_trim_whitespace(column)
        try:
            found = column.cast(guess if guess != "float64" else pa.float64())
        except pa.ArrowInvalid:
            return False
        chosen = self._wanted.get(name) or self._wanted.get(COMPONENT.sub("", name))
        if chosen == "float32":
            self._refuse_overflow(name, column, column.cast(pa.float32()), chosen)
        elif guess == "float64":
            self._refuse_overflow(name, column, found, guess)
        if name not in self.inexact and _inexact(column, found):
            self.inexact.add(name)
        return True

    def _refuse_overflow(self, name: str, texts: Any, values: Any, dtype: str) -> None:
        """Refuse finite numbers that become infinite in a dtype."""
        infinite = np.isinf(values.to_numpy(zero_copy_only=False))
        if not infinite.any():
            return
        highest = float(np.finfo(dtype).max)
        if not all(map(_is_infinity, texts.filter(pa.array(infinite)).to_pylist())):
            raise self._bad(
                f"within the range of {dtype}",
                name,
                lambda cell: _is_infinity(cell) or abs(float(cell or 0)) <= highest,
            )

    def _bad(self, legal: str, name: str, check: Check, way_out: str = "") -> FormatError:
        """Return the error for the first cell of a column that fails a check."""
        checks = {column: check_of(pa.string()) for column in self.names}
        checks[name] = (legal, lambda cell: not cell or check(cell))
        text = Text(self._file, self._allowed)
        found = explain(text, self._file, self.rows, checks)
        if found is None:
            found = f"{self._file.path}: column {name!r} mixes words and numbers"
        other = f", or {way_out}" if way_out else ""
        return FormatError(f"{found}. Correct the file{other}.")

    def dtypes(self, notes: Notes) -> dict[str, str]:
        """Dtype name by column, for columns of numbers that can be fields."""
        found = {}
        for name, guess in self._guessed.items():
            if not name:
                # Most often the numbers of the rows, as pandas writes them.
                note = f"column {name!r} has no name, and was left out"
                (notes.doubt if guess == TEXT else notes.note)(note)
                continue
            if guess == TEXT or not self.rows:
                continue
            # A bool has no NaN: an empty cell is refused when it is read.
            if name not in self._filled:
                notes.doubt(f"column {name!r} is empty, and became NaN")
                guess = "float64"
            elif name in self._empty and guess != "bool":
                notes.note(f"empty cells of column {name!r} became NaN")
                if guess != "float64":
                    notes.doubt(f"column {name!r} of {guess} has empty cells, and became float64")
                guess = "float64"
            found[name] = guess
        return found

    def texts(self, notes: Notes) -> dict[str, Field]:
        """Fields of the columns of text, by name."""
        found = {}
        for name, guess in self._guessed.items():
            if guess != TEXT or not name or not self.rows:
                continue
            # The next cells may be a little longer.
            limit = 1 << max(0, self._longest[name] - 1).bit_length()
            found[name] = Field.text(limit)
            top = COMPONENT.sub("", name).split("/")[0]
            guessed = top in KNOWN and name not in self._wanted
            (notes.doubt if guessed else notes.note)(
                f"column {name!r} varies from row to row: {found[name].description}"
            )
        return found


def _inexact(texts: Any, values: Any) -> bool:
    """Return whether the cells have an integer that float64 cannot hold."""
    found = values.to_numpy(zero_copy_only=False)
    large = np.abs(found.astype(np.float64)) >= 2**53
    if not large.any():
        return False
    cells = texts.filter(pa.array(large)).to_pylist()
    return any(re.fullmatch(r"[+-]?\d+", c) and int(float(c)) != int(c) for c in cells)


def _is_infinity(cell: str) -> bool:
    return "inf" in cell.lower()


def group(names: list[str], dtypes: Mapping[str, str], notes: Notes) -> dict[str, Kind]:
    """Fields of columns; ``field.0`` to ``field.k``, in any order, make one vector.

    Args:
        names: Of all columns, in order.
        dtypes: By column, for columns that can be fields.
        notes: Receives doubts about vectors that lack a column.
    """
    vectors = _vectors(names, dtypes, notes)
    found: dict[str, Kind] = {}
    for name in names:
        match = PARTED.fullmatch(name)
        field = match[1] if match else name
        if columns := vectors.get(field, []):
            kind = _widest([dtypes[column] for column in columns])
            found.setdefault(field, (kind, (len(columns),)))
        elif name in dtypes:
            found[name] = (dtypes[name], ())
    return found


def _vectors(names: list[str], dtypes: Mapping[str, str], notes: Notes) -> dict[str, list[str]]:
    """The columns of each vector, in order, if none of them is missing."""
    elements: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if (match := PARTED.fullmatch(name)) and match[1] not in names:
            elements[match[1]].add(int(match[2]))
    vectors: dict[str, list[str]] = {}
    for field, numbers in elements.items():
        columns = [f"{field}.{number}" for number in range(len(numbers))]
        if max(numbers) == len(numbers) - 1 and all(each in dtypes for each in columns):
            vectors[field] = columns
        elif len(numbers) > 1 and max(numbers) >= len(numbers):
            missing = min(set(range(len(numbers))) - numbers)
            notes.doubt(
                f"columns {field}.{min(numbers)} to {field}.{max(numbers)} are fields "
                f"of their own: {field}.{missing} is missing"
            )
    return vectors


def _widest(dtypes: list[str]) -> str:
    """The narrowest dtype that holds all; int64 and uint64 together make float64."""
    kinds = set(dtypes)
    if kinds == {"int64", "uint64"} or "float64" in kinds:
        return "float64"
    return max(kinds, key=list(WIDER).index)


class Cells:
    """The columns of text that hold the values of fields.

    Attributes:
        kinds: Dtype name and row shape by field.
        names: All columns, in order.
        varying: The fields that vary.
    """

    def __init__(self, kinds: Kinds, varying: Mapping[str, Field] | None = None) -> None:
        """Name the columns.

        Args:
            kinds: Dtype name and row shape by field.
            varying: Those that vary, which are one column each.

        Raises:
            SchemaError: Two of them have one name, or a name has several lines.
        """
        self.kinds = dict(kinds)
        self.varying = dict(varying or {})
        self._of = {
            field: [field] if field in self.varying else _names(field, shape)
            for field, (_, shape) in kinds.items()
        }
        self.names = [name for names in self._of.values() for name in names]
        for name in self.names:
            if "\n" in name or "\r" in name:
                raise SchemaError(
                    f"column {name!r}: the name has line breaks, which a header cannot "
                    "hold. Leave the field out with fields=, or choose another format."
                )
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise SchemaError(
                f"column {twice!r} is the name of two columns. Leave one of the fields "
                "out with fields=, or rename it."
            )

    def types(self) -> dict[str, Any]:
        """Arrow type by column; float16 passes through float32, without loss."""
        return {
            name: pa.string() if field in self.varying else _type(dtype)
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
        long: dict[str, Any] = {}
        for field, (dtype, _) in self.kinds.items():
            if field in self.varying:
                cut: Any = columns[field][rows]
                long[field] = csv_values.encode(cut, self.varying[field])
                arrays.append(long[field])
                continue
            values = columns[field][rows]
            # Arrow's columns are contiguous: the transpose, copied.
            flat = values.reshape(len(values), -1).T
            kind = _type(dtype)
            if dtype == "float16":
                flat = flat.astype(np.float32)
            arrays += [pa.array(column, kind) for column in np.ascontiguousarray(flat)]
        if long:
            csv_values.refuse_wide(long)
        return pa.RecordBatch.from_arrays(arrays, self.names)

    def decode(self, batch: Any, fields: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Some fields of a record batch, ``[N, *shape]`` each; NaN where missing."""
        found = {}
        for field in fields:
            dtype, shape = self.kinds[field]
            names = self._of[field]
            if field in self.varying:
                values: Any = csv_values.decode(batch.column(field), self.varying[field])
                found[field] = values
                continue
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


def varying_of(description: Description) -> dict[str, Field]:
    """The fields of a description that vary, by path."""
    schema = description.schema
    return {path: schema.fields[path] for path in schema.varying}


def cells_of(kinds: Kinds, force: bool, varying: Mapping[str, Field] | None = None) -> Cells:
    """The columns of a new file.

    Args:
        kinds: Dtype name and row shape by field.
        force: Allow more than 4,096 columns.
        varying: The fields that vary.

    Raises:
        SchemaError: A field is bfloat16, there are too many columns, or a name cannot
            be that of a column.
    """
    columns, varying = 0, varying or {}
    for field, (dtype, shape) in kinds.items():
        if dtype == "bfloat16":
            raise SchemaError(
                f"field {field!r}: csv cannot store bfloat16. Leave it out with "
                "fields=, or choose parquet or npz."
            )
        columns += 1 if field in varying else int(np.prod(shape, dtype=object))
    max_columns = MAX_FORCED_COLUMNS if force else MAX_COLUMNS
    if columns > max_columns:
        way_out = "" if force else ", or pass force=True (--option force=true)"
        raise SchemaError(
            f"csv: rows must have at most {max_columns} columns, got {columns}. Leave "
            f"images out with fields=, choose parquet or npz{way_out}."
        )
    return Cells(kinds, varying)


def _names(field: str, shape: tuple[int, ...]) -> list[str]:
    if not shape:
        return [field]
    return [f"{field}.{i}" for i in range(int(np.prod(shape, dtype=object)))]


def _type(dtype: str) -> Any:
    if dtype == "float16":
        return pa.float32()
    return pa.from_numpy_dtype(storage_dtype(dtype))


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The contents of a sidecar.

    Attributes:
        description: Of the rows.
        nbytes: Of the csv file.
        crc: CRC32C of the csv file.
    """

    description: Description
    nbytes: int
    crc: int

    def to_json(self, before: str | None = None) -> bytes:
        """As JSON, with that of the sidecar it replaces, if any."""
        described = self.description.to_bytes()
        value = json.loads(described)
        value[CSV_KEY] = {
            "nbytes": self.nbytes,
            "crc32c": f"{self.crc:08x}",
            "description_crc32c": f"{crc32c(memoryview(described)):08x}",
        }
        if before is not None:
            value[BEFORE_KEY] = before
        return json.dumps(value, separators=(",", ":")).encode()

    def fits(self, file: File) -> bool:
        """Return whether a csv file has this size and checksum; reads all of it."""
        return file.nbytes == self.nbytes and checksum(file) == self.crc


def sidecar_path(path: Path) -> Path:
    """The path of a csv file's sidecar."""
    return path.with_name(path.name + ENDING)


def find_sidecar(file: File) -> Sidecar | None:
    """The sidecar of a csv file, or None where it has none.

    Raises:
        FormatError: A sidecar exists that mmreplay did not write.
        CorruptError: It describes another csv file.
    """
    path = sidecar_path(file.path)
    if not os.path.lexists(path):
        return None
    value = strict_json.parse(files.read_bytes(path, MAX_SIDECAR_NBYTES), str(path))
    before = value.pop(BEFORE_KEY, None)
    found = _parse(value, path)
    if before is None:
        if found.nbytes != file.nbytes:
            raise differs(file, f"{file.nbytes} bytes", f"{found.nbytes}")
        return found
    # A run was killed between two renames: the entry that fits the file describes it.
    if found.fits(file):
        return found
    if before == NO_SIDECAR:
        return None
    older = strict_json.parse(str(before).encode("utf-8", "replace"), str(path))
    older.pop(BEFORE_KEY, None)
    found = _parse(older, path)
    if not found.fits(file):
        raise differs(file, f"{file.nbytes} bytes", "those of one of its two entries")
    return found


def _parse(value: strict_json.Json, path: Path) -> Sidecar:
    about = value.pop(CSV_KEY, None)
    described = json.dumps(value, separators=(",", ":")).encode()
    try:
        nbytes, crc = about["nbytes"], int(about["crc32c"], 16)
        expected = int(about["description_crc32c"], 16)
    except (TypeError, KeyError, ValueError):
        nbytes, crc, expected = None, 0, 0
    if type(nbytes) is not int:
        raise FormatError(
            f"{path} does not say to which csv file it belongs. Move it away to read "
            "the file without its description."
        )
    found = Sidecar(Description.from_bytes(described, str(path)), nbytes, crc)
    got = crc32c(memoryview(found.description.to_bytes()))
    if got != expected:
        raise CorruptError(
            f"{path}: the description must have checksum {expected:08x}, got "
            f"{got:08x}. Restore the sidecar, or pass sidecar=False to ignore it."
        )
    return found


def checksum(file: File) -> int:
    """CRC32C of a file."""
    crc = 0
    for first in range(0, file.nbytes, READ_NBYTES):
        data = file.pread(min(READ_NBYTES, file.nbytes - first), first)
        crc = crc32c(memoryview(data), crc)
    return crc


def differs(file: File, got: str, expected: str) -> CorruptError:
    """Return the error for a csv file that differs from its sidecar."""
    return CorruptError(
        f"{file.path} has {got}, but {sidecar_path(file.path).name} says {expected}. "
        "The file was changed: restore it, or pass sidecar=False to read it without "
        "its description."
    )


def refuse_foreign(target: Path, overwrite: bool) -> None:
    """Refuse to replace a file at the sidecar's path that is no sidecar of mmreplay.

    Args:
        target: The csv file to write.
        overwrite: The user allows it.

    Raises:
        FormatError: There is such a file.
    """
    if not overwrite and os.path.lexists(sidecar_path(target)) and not _ours(target):
        raise FormatError(
            f"{sidecar_path(target)} exists and is not a sidecar of mmreplay. Move it "
            "away, or pass overwrite=True (--overwrite) to replace it."
        )


def remove_stale(target: Path) -> None:
    """Remove the old sidecar of a csv file that was written without one."""
    if os.path.lexists(sidecar_path(target)) and _ours(target):
        files.remove_tree(sidecar_path(target))


def _ours(target: Path) -> bool:
    """Return whether the file at a sidecar's path is mmreplay's, damaged or not."""
    path = sidecar_path(target)
    try:
        value = strict_json.parse(files.read_bytes(path, MAX_SIDECAR_NBYTES), str(path))
    except ReplayError:
        return False
    return value.get("format") == MAGIC and CSV_KEY in value


class Publication:
    """Renames a sidecar into place before its csv file, and cleans up afterwards."""

    def __init__(self, target: Path) -> None:
        self._path = sidecar_path(target)
        self._target = target
        self._older: bytes | None = None
        self._open = False

    def announce(self, sidecar: Sidecar) -> None:
        """Write the sidecar of a csv file that appears next."""
        self._older = self._read()
        before = self._before()
        self._open = True
        files.replace_bytes(self._path, sidecar.to_json(before))
        self._sidecar = sidecar if before is not None else None

    def _before(self) -> str | None:
        """The sidecar of the csv file to be replaced, as JSON, if there is a file."""
        if not os.path.lexists(self._target):
            return None
        try:
            with closing(File.open(self._target, None)) as file:
                found = find_sidecar(file)
        except FormatError:
            # The two disagree already, and continue to until the new file appears.
            return None
        return NO_SIDECAR if found is None else found.to_json().decode()

    def _read(self) -> bytes | None:
        if not os.path.lexists(self._path):
            return None
        return files.read_bytes(self._path, MAX_SIDECAR_NBYTES // 2)

    def settle(self) -> None:
        """The csv file has appeared: drop the old sidecar."""
        self._open = False
        if self._sidecar is not None:
            files.replace_bytes(self._path, self._sidecar.to_json())

    def take_back(self) -> None:
        """The csv file will not appear: put the old sidecar back."""
        if not self._open:
            return
        self._open = False
        files.remove_tree(self._path.with_name(f"tmp-{self._path.name}"))
        if self._older is None:
            files.remove_tree(self._path)
        else:
            files.replace_bytes(self._path, self._older)
