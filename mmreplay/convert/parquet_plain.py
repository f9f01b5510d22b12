"""Parquet files that mmreplay did not write: numbers, lists of one length, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert import parquet_columns
from mmreplay.convert.base import Columns, Notes
from mmreplay.convert.parquet_columns import holds_numbers, is_variable, no_rows
from mmreplay.convert.parquet_file import Part
from mmreplay.convert.tables import Kinds, TableReader, refuse_expansion
from mmreplay.errors import FormatError, SourceError
from mmreplay.schema.dtypes import storage_dtype
from mmreplay.schema.naming import left_out


def open_plain(path: Path, paths: list[Path], allow_expansion: bool) -> TableReader:
    """Open files of the same columns as one table, one after the other.

    Args:
        path: What the user named.
        paths: The files, in order.
        allow_expansion: Read rows that take far more than the files do.

    Raises:
        FormatError: Columns differ between files, or take too much memory.
    """
    notes = Notes()
    with closing(Part(paths[0])) as part:
        names, kinds = _find(part, notes)
        schema = part.schema
    rows = taken = 0
    for each in paths:
        with closing(Part(each)) as part:
            _check_alike(part, schema, paths[0])
            for name in names:
                part.refuse_long(name)
            rows, taken = rows + part.rows, taken + part.nbytes
    if len(paths) > 1:
        notes.note(f"{len(paths)} files were read, in the order of their names")
    _refuse_bombs(path, kinds, rows, taken, allow_expansion)

    def batches(rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        done = 0
        for each in paths:
            with closing(Part(each)) as part:
                _check_alike(part, schema, paths[0])
                for batch in part.batches(rows, names):
                    yield _columns(part, batch, kinds, done, notes)
                    done += len(next(iter(batch.values())))

    return TableReader(path, kinds, rows, batches, notes)


def _refuse_bombs(
    path: Path, kinds: Kinds, rows: int, taken: int, allowed: bool
) -> None:
    row_nbytes = sum(
        storage_dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
        for dtype, shape in kinds.values()
    )
    refuse_expansion(path, rows * row_nbytes, taken, allowed)


def _find(part: Part, notes: Notes) -> tuple[list[str], Kinds]:
    """Columns that can be fields, by what their types and first rows say."""
    names = []
    for name in part.schema.names:
        if part.schema.names.count(name) > 1:
            raise FormatError(
                f"{part.path} has column {name!r} twice, expected names that differ; "
                "rename one"
            )
        part.refuse_long(name)
        names.append(name)
    numeric = [n for n in names if holds_numbers(part.schema.field(n).type)]
    first = next(part.batches(1, numeric), {}) if numeric else {}
    kinds = {}
    for name in names:
        kind = part.schema.field(name).type
        found = None
        if name in first:
            found = parquet_columns.kind_of(first[name])
        elif name in numeric and not is_variable(kind):
            found = parquet_columns.kind_of(no_rows(kind))
        if found is None:
            told = f"column {name!r} of {kind} can be no field, and was left out"
            left_out(notes, name, told)
        else:
            kinds[name] = found
    return list(kinds), kinds


def _check_alike(part: Part, schema: Any, first: Path) -> None:
    if not part.schema.equals(schema):
        raise FormatError(
            f"{part.path} has other columns than {first}, expected files of one "
            "table; load them one by one"
        )


def _columns(
    part: Part, batch: dict[str, Any], kinds: Kinds, done: int, notes: Notes
) -> Columns:
    """Arrays as fields hold them.

    Raises:
        SourceError: A value is missing, or a row is longer than the first.
    """
    found = {}
    for name, array in batch.items():
        whole = parquet_columns.filled(array)
        if whole is not array:
            notes.note(f"missing values of column {name!r} became NaN")
        dtype, shape = kinds[name]
        where = f"{part.path}: column {name!r}"
        if parquet_columns.has_nulls(whole):
            raise SourceError(
                f"{where} lacks a value in rows [{done}, {done + len(whole)}), "
                "expected one a row; fill them in, or leave the column out"
            )
        row = parquet_columns.lengths_differ(whole, shape)
        if row is not None:
            raise SourceError(
                f"{where} has a list of another length in row {done + row}, expected "
                f"{list(shape)} as in the first; pad them, or leave the column out"
            )
        found[name] = parquet_columns.decode(whole, dtype, shape)
    return found
