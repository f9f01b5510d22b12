"""Csv files without a description: what their columns are is found by reading them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from mmreplay.convert.base import Columns, Notes
from mmreplay.convert.csv_columns import Cells
from mmreplay.convert.csv_reader import check_of, is_number, told
from mmreplay.convert.csv_text import Check, Text, explain, read_header
from mmreplay.convert.tables import TableReader
from mmreplay.errors import FormatError, SchemaError
from mmreplay.files import File
from mmreplay.schema.dtypes import DTYPES, canonical_name
from mmreplay.schema.naming import left_out

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
