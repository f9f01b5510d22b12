"""The schema of a source's columns, and the columns that mark episode ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from mmreplay.convert.base import Notes, refuse_wide
from mmreplay.convert.episode_ends import Bools
from mmreplay.datasets.common.fragments import ENDS
from mmreplay.datasets.common.rows import ColumnRows, field_of, is_scalar
from mmreplay.errors import FormatError, SchemaError, SourceError
from mmreplay.schema import Field, Schema
from mmreplay.schema.naming import refuse_nan
from mmreplay.strict_json import Json

FLAG = Field((), "bool")
MAX_METADATA_NBYTES = 64 << 10
"""Limit of one metadata value: the spaces of large images alone would fill a buffer's
metadata."""
Ends = Callable[[int, int], tuple[Bools, Bools]]
"""Returns terminated and truncated of steps ``[first, stop)``."""


def make_schema(
    columns: Mapping[str, ColumnRows], notes: Notes, path: Path, *, observed: bool = True
) -> Schema:
    """Return the schema of columns and both ends.

    Columns that no field can hold are left out, with a doubt.

    Args:
        columns: Columns by path, in order.
        notes: The report.
        path: Path of the source, for errors.
        observed: There must be an observation.

    Raises:
        SourceError: There is no observation, or names clash.
        FormatError: A row is too large to load.
    """
    fields: dict[str, Field] = {}
    for name, rows in columns.items():
        try:
            fields[name] = Schema.from_flat({name: field_of(rows)}, {})[name]
        except SchemaError as error:
            notes.doubt(f"{name!r} was left out: {error}")
    try:
        schema = Schema.from_flat({**fields, "terminated": FLAG, "truncated": FLAG})
    except SchemaError as error:
        raise SourceError(f"{path}: its columns make no schema: {error}") from error
    if observed and not schema.role("observation"):
        raise SourceError(
            f"{path} has no observations among its columns {list(columns)[:20]}. Name "
            "its format with format= (--from)."
        )
    refuse_wide(schema.row_nbytes, path)
    return schema


def rename_top(path: str, names: Mapping[str, str]) -> str:
    """Return a path with another name for its first key.

    Args:
        path: Keys with slashes between them.
        names: The new name of each key; other keys keep theirs.
    """
    top, slash, rest = path.partition("/")
    return names.get(top, top) + slash + rest


def select_metadata(metadata: Json, keys: Iterable[str], notes: Notes) -> Json:
    """Return the metadata values to store with a buffer, at most 64 KiB each."""
    found = {}
    for key in keys:
        if key in metadata:
            size = len(json.dumps(metadata[key]))
            if size <= MAX_METADATA_NBYTES:
                found[key] = metadata[key]
            else:
                notes.note(f"metadata {key!r} of {size:,} bytes was left out")
    return found


class Flags:
    """A column that marks episode ends by any value but 0; see `rows.ColumnRows`.

    Raises:
        FormatError: It does not have one flag a step.
    """

    dtype, shape = "bool", ()

    def __init__(self, what: str, rows: ColumnRows, steps: int) -> None:
        """Wrap a column.

        Args:
            what: Name for errors.
            rows: The column.
            steps: Number of steps.
        """
        if rows.count != steps or not is_scalar(rows.shape) or rows.dtype == "bfloat16":
            raise FormatError(
                f"{what} must hold one flag for each of {steps} steps, got "
                f"{rows.count} rows of {rows.dtype}{list(rows.shape)}. The file is "
                "damaged."
            )
        self.count = steps
        self._what, self._rows = what, rows

    def read(self, first: int, stop: int) -> Bools:
        """See `Rows.read`.

        Raises:
            SourceError: A value is NaN, which does not say whether a step ends.
        """
        values = self._rows.read(first, stop).reshape(stop - first)
        refuse_nan(self._what, values, first)
        flags: Bools = values.astype(bool)
        return flags


def ends_of(terminated: Flags | None, truncated: Flags | None) -> Ends:
    """Return the ends of steps; without a column no step ends so."""

    def ends(first: int, stop: int) -> tuple[Bools, Bools]:
        return _read(terminated, first, stop), _read(truncated, first, stop)

    return ends


def check_done(done: str | None) -> None:
    """Check the meaning of a flag that may mark both ends.

    Raises:
        SchemaError: It is neither ``"terminated"`` nor ``"truncated"``.
    """
    if done not in (None, *ENDS):
        raise SchemaError(
            f"done must be one of {', '.join(ENDS)}, got {done!r}. Leave it out if you do not know."
        )


def ambiguous_end_note(name: str) -> str:
    """Return the doubt about a flag that may mark both ends."""
    return (
        f"{name!r} may mix time limits with terminations, and the source does not "
        "distinguish them: all are read as terminations, unless done='truncated' says "
        "otherwise"
    )


def _read(flags: Flags | None, first: int, stop: int) -> Bools:
    return np.zeros(stop - first, bool) if flags is None else flags.read(first, stop)
