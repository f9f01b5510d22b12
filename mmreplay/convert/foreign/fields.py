"""A schema from the columns of a source, and ends from those that tell them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import Notes
from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Flat, Rows, single
from mmreplay.convert.foreign.stretches import ENDS
from mmreplay.errors import FormatError, SchemaError, SourceError
from mmreplay.format.strict_json import Json
from mmreplay.schema import Field, Schema
from mmreplay.schema.naming import left_out, refuse_nan

FLAG = Field((), "bool")
MAX_KEPT_NBYTES = 64 << 10
Ends = Callable[[int, int], tuple[Bools, Bools]]


def kept_of(metadata: Json, keys: Iterable[str], notes: Notes) -> Json:
    """What of a source's metadata goes along with a buffer: values of at most 64 KiB.

    The spaces of large images alone would fill a buffer's metadata.
    """
    found = {}
    for key in keys:
        if key in metadata:
            size = len(json.dumps(metadata[key]))
            if size <= MAX_KEPT_NBYTES:
                found[key] = metadata[key]
            else:
                notes.note(f"metadata {key!r} of {size:,} bytes was left out")
    return found


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
            left_out(notes, name, f"{name!r} was left out: {error}")
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


def check_meaning(done: str | None) -> None:
    """Refuse what a flag of both ends cannot mean.

    Raises:
        SchemaError: It is neither end.
    """
    if done not in (None, *ENDS):
        raise SchemaError(
            f"done: got {done!r}, expected one of {', '.join(ENDS)}; leave it out if "
            "you do not know"
        )


def mixed(name: str) -> str:
    """The doubt about a flag of both ends."""
    return (
        f"{name!r} may mix time limits with terminations, and nothing tells them "
        "apart: all are taken as terminations, unless done='truncated' says otherwise"
    )


def scalar(rows: Rows) -> Rows:
    """Rewards and the like as one value a row, where they are."""
    return Flat(rows) if rows.shape == (1,) else rows


class Flags:
    """A column that tells ends, any value but 0 being one; see `columns.Rows`.

    Raises:
        FormatError: It has not one flag a step.
    """

    dtype, shape = "bool", ()

    def __init__(self, what: str, rows: Rows, steps: int) -> None:
        """Take a column.

        Args:
            what: To call it by in errors.
            rows: It.
            steps: Of which it tells.
        """
        if rows.count != steps or not single(rows.shape) or rows.dtype == "bfloat16":
            raise FormatError(
                f"{what} has {rows.count} rows of {rows.dtype}{list(rows.shape)}, "
                f"expected one flag for each of {steps} steps; the file is damaged"
            )
        self.count = steps
        self._what, self._rows = what, rows

    def read(self, first: int, stop: int) -> Bools:
        """See `Rows.read`.

        Raises:
            SourceError: A value is NaN: nobody knows whether something ended.
        """
        values = self._rows.read(first, stop).reshape(stop - first)
        refuse_nan(self._what, values, first)
        flags: Bools = values.astype(bool)
        return flags


def ends_of(terminated: Flags | None, truncated: Flags | None) -> Ends:
    """Both ends of steps, from the columns that tell them."""

    def ends(first: int, stop: int) -> tuple[Bools, Bools]:
        return _read(terminated, first, stop), _read(truncated, first, stop)

    return ends


def _read(flags: Flags | None, first: int, stop: int) -> Bools:
    return np.zeros(stop - first, bool) if flags is None else flags.read(first, stop)
