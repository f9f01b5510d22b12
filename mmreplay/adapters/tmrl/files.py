"""tmrl's data.pkl: a pickled list of columns, in which actions precede observations.

Row i holds the observation, and the action, reward and ends that led to it; the first
row of an episode holds a default action, the last one what was seen at its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.base import Notes
from mmreplay.convert.episode_ends import Bools
from mmreplay.datasets import pickles
from mmreplay.datasets.common.fields import make_schema
from mmreplay.datasets.common.fragments import NOTE, FragmentReader, episodes
from mmreplay.datasets.common.rows import Array, ArrayRows, ColumnRows
from mmreplay.errors import FormatError, SchemaError, SourceError
from mmreplay.nesting import flatten
from mmreplay.schema.naming import refuse_nan

GENERIC = ("action", "observation", "reward", "terminated", "truncated", "info", "done")
"""Columns of GenericTorchMemory."""
TAIL = ("done", "reward", "info", "terminated", "truncated")
"""Last columns of the memories for TrackMania, behind indexes, actions and parts."""
COMPONENTS = {
    2: ("speed", "lidar"),
    3: ("speed", "progress", "lidar"),
    4: ("speed", "gear", "rpm", "images"),
}
"""Parts of their observations, by how many there are."""


class TmrlReader(FragmentReader):
    """Reads the list as one environment; it is held whole."""

    def __init__(self, path: Path, data: list[list[Any]]) -> None:
        notes = Notes()
        named = _named(path, data)
        terminated, truncated = (
            _flags(path, name, named[name]) for name in ("terminated", "truncated")
        )
        arrays = {
            leaf: array
            for name in ("observation", "action", "reward")
            for leaf, array in _leaves(path, name, named[name]).items()
        }
        columns: dict[str, ColumnRows] = {}
        for name, array in arrays.items():
            try:
                columns[name] = ArrayRows(array)
            except SchemaError as error:
                notes.doubt(f"{name!r} was left out: {error}")
        schema = make_schema(columns, notes, path)
        notes.note(f"actions, {NOTE}; infos were left out")
        led = [p for p in columns if p.split("/")[0] in ("action", "reward")]
        super().__init__(
            lambda: episodes(str(path), columns, led, terminated, truncated),
            schema,
            notes,
            lambda: None,
        )


def _named(path: Path, data: object) -> dict[str, list[Any]]:
    """Return the columns of either layout of tmrl by name."""
    if not isinstance(data, list) or not all(isinstance(each, list) for each in data):
        raise FormatError(
            f"{path} must hold a list of columns as tmrl's memories pickle, got a "
            f"{type(data).__name__}. Name its format with format= (--from)."
        )
    lengths = {len(each) for each in data}
    parts = COMPONENTS.get(len(data) - 2 - len(TAIL))
    if len(lengths) != 1 or 0 in lengths or (len(data) != len(GENERIC) and parts is None):
        raise FormatError(
            f"{path} must hold 7 columns of GenericTorchMemory, or 9 to 11 of a memory "
            f"for TrackMania, of the same length, got {len(data)} of "
            f"{sorted(lengths)[:5]} rows. The file is damaged."
        )
    if parts is None:
        return dict(zip(GENERIC, data, strict=True))
    found = dict(zip(TAIL, data[-len(TAIL) :], strict=True))
    seen = zip(*data[2 : 2 + len(parts)], strict=True)
    named = [dict(zip(parts, row, strict=True)) for row in seen]
    return {"observation": named, "action": data[1], **found}


def _leaves(path: Path, name: str, values: list[Any]) -> dict[str, Array]:
    """The leaves of a column of nested values, each as one array."""
    try:
        # Rows that begin an episode may have no action.
        alike = next(each for each in values if each is not None)
        first = flatten({name: alike})
        if list(first) == [name]:
            return {name: _array(path, name, values, alike)}
        flat = [first if each is None else flatten({name: each}) for each in values]
        return {leaf: _array(path, leaf, [row[leaf] for row in flat]) for leaf in first}
    except (KeyError, SchemaError, StopIteration) as error:
        raise SourceError(
            f"{path}: the rows of column {name!r} must be of one kind, got {error}. "
            "The file is damaged."
        ) from error


def _flags(path: Path, name: str, values: list[Any]) -> Bools:
    array = _array(path, name, values)
    if array.size != len(values):
        raise SourceError(
            f"{path}: column {name!r} must hold one flag per row, got rows of shape "
            f"{list(array.shape[1:])}. The file is damaged."
        )
    refuse_nan(f"{path}: column {name!r}", array.reshape(len(values)), 0)
    return array.astype(bool).reshape(len(values))


def _array(path: Path, name: str, values: list[Any], alike: Any = None) -> Array:
    """Values of rows as one array; those that are missing are zero."""
    if alike is not None:
        values = [np.zeros_like(alike) if each is None else each for each in values]
    try:
        found: Array = np.stack([np.asarray(each) for each in values])
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"{path}: the rows of column {name!r} must have one shape, got {error}. "
            "The file is damaged."
        ) from error
    return found


def recognizes(path: Path) -> bool:
    """Return whether a file has the name that tmrl gives, and begins as a pickle."""
    return path.name == "data.pkl" and bool(pickles.head(path))


def open_reader(path: Path, *, allow_pickle: bool = False) -> TmrlReader:
    """Open a data.pkl as a source; it is held whole.

    Args:
        path: The file.
        allow_pickle: Run it. A pickle is a program: allow only what you trust.
    """
    return TmrlReader(path, pickles.load(path, allow_pickle))
