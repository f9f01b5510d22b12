"""A schema from the columns of a source, and ends from those that tell them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import Notes
from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Flat, Rows
from mmreplay.errors import SchemaError, SourceError
from mmreplay.schema import Field, Schema

FLAG = Field((), "bool")
Ends = Callable[[int, int], tuple[Bools, Bools]]


def make_schema(columns: Mapping[str, Rows], notes: Notes, path: Path) -> Schema:
    """The fields that columns make, and both ends; what can be none is left out.

    Args:
        columns: By path, in order.
        notes: Where what is left out is told.
        path: Of the source.

    Raises:
        SourceError: There is no observation, or names clash.
        FormatError: A row is too large to hold.
    """
    fields: dict[str, Field] = {}
    for name, rows in columns.items():
        try:
            Schema.from_flat({name: Field(rows.shape, rows.dtype)}, {})
            fields[name] = Field(rows.shape, rows.dtype)
        except SchemaError as error:
            notes.note(f"{name!r} was left out: {error}")
    try:
        schema = Schema.from_flat({**fields, "terminated": FLAG, "truncated": FLAG})
    except SchemaError as error:
        raise SourceError(f"{path}: its columns make no schema: {error}") from error
    if not schema.role("observation"):
        raise SourceError(
            f"{path}: got columns {list(columns)[:20]}, expected observations among "
            "them; name its format with format= (--from)"
        )
    refuse_wide(schema.row_nbytes, path)
    return schema


def scalar(rows: Rows) -> Rows:
    """Rewards and the like as one value a row, where they are."""
    return Flat(rows) if rows.shape == (1,) else rows


def ends_of(terminated: Rows | None, truncated: Rows | None) -> Ends:
    """Both ends of steps, from columns in which any value but 0 is one."""

    def ends(first: int, stop: int) -> tuple[Bools, Bools]:
        return _flags(terminated, first, stop), _flags(truncated, first, stop)

    return ends


def _flags(rows: Rows | None, first: int, stop: int) -> Bools:
    if rows is None:
        return np.zeros(stop - first, bool)
    flags: Bools = Flat(rows).read(first, stop).astype(bool)
    return flags
