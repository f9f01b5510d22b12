"""Columns of sources that name the episode of each row, and where they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.ragged import Ragged
from mmreplay.schema.field import Field
from mmreplay.schema.notes import Notes

EPISODE_COLUMNS = ("episode_index", "episode_id", "episode")
"""Names of columns that name episodes, the surest first."""
Bools = NDArray[np.bool_]


def episode_column(
    columns: Mapping[str, tuple[str, tuple[int, ...]]], varying: Mapping[str, Field] | None = None
) -> str:
    """The column of one value a row that names episodes, or ``""``.

    Integers are taken before floats, bools and texts.

    Args:
        columns: Dtype name and row shape by column.
        varying: By name, columns whose values vary.
    """
    integers, others = [], []
    for name in EPISODE_COLUMNS:
        dtype, shape = columns.get(name, ("", (0,)))
        field = (varying or {}).get(name)
        if shape in ((), (1,)) and "int" in dtype:
            integers.append(name)
        elif (shape in ((), (1,)) and (dtype == "bool" or dtype.startswith("float"))) or (
            field is not None and field.kind == "text"
        ):
            others.append(name)
    return next(iter(integers + others), "")


def are_numbers(name: str, blocks: Iterable[NDArray[Any]], notes: Notes) -> bool:
    """Return whether floats number episodes: all of them are whole.

    Others may be a share of the episode's length, or miss in some rows, which is a
    doubt.

    Args:
        name: Of the column.
        blocks: Its values.
        notes: Receives the doubt.
    """
    for values in blocks:
        odd = values[~(np.isfinite(values) & (np.trunc(values) == values))]
        if odd.size:
            notes.doubt(
                f"column {name!r} does not say where episodes begin, as {odd[0]} is no "
                "number of an episode"
            )
            return False
    return True


class EpisodeChanges:
    """Finds the beginnings of episodes by what names them, over blocks in order."""

    def __init__(self, name: str) -> None:
        """Begin at the first row; name is that of the column, or ``""``."""
        self._name = name
        self._last: Any = None
        self._ids: list[NDArray[np.int64]] = []
        self._num_empty = 0

    def of(self, columns: Mapping[str, Any]) -> Bools | None:
        """Rows whose episode is not that of the row before, bool ``[N]``.

        Args:
            columns: Of the next rows, per path ``[N, *shape]``.
        """
        if self._name not in columns or not len(columns[self._name]):
            return None
        values = columns[self._name]
        if isinstance(values, Ragged):
            last = values[:1] if self._last is None else self._last
            changed = _texts_differ(Ragged.concatenate([last, values]))
            self._num_empty += int(np.count_nonzero(values.lengths == 0))
            # A copy: the next block may lie in the same memory.
            self._last = values[len(values) - 1 :].copy()
        else:
            values = values.reshape(-1)
            last = values[:1] if self._last is None else self._last
            changed = values != np.concatenate([last, values[:-1]])
            self._last = values[-1:].copy()
        begins = np.flatnonzero(changed)
        if not self._ids:
            begins = np.concatenate([[0], begins[begins > 0]])
        self._ids.append(_ids_of(values, begins))
        return changed

    def add_doubts(self, notes: Notes) -> None:
        """Doubt episodes whose rows lie apart or have no name, after the last block."""
        if self._num_empty:
            notes.doubt(
                f"column {self._name!r} is empty in {self._num_empty:,} rows: those "
                "that follow each other were read as one episode"
            )
        ids = np.concatenate([np.zeros(0, np.int64), *self._ids])
        count = len(np.unique(ids))
        if count < len(ids):
            notes.doubt(
                f"the rows of an episode lie in {len(ids):,} places for {count:,} "
                f"values of {self._name!r}: each was read as an episode"
            )


def _texts_differ(texts: Ragged) -> Bools:
    """Whether each text but the first differs from the one before, bool ``[N]``."""
    lengths = texts.lengths
    differ: Bools = np.diff(lengths) != 0
    # Of texts as long as the one before, each byte stands so far behind its like.
    rows = np.repeat(np.arange(len(texts)), lengths)
    same = np.concatenate([[False], ~differ])[rows]
    at, rows = np.flatnonzero(same), rows[same]
    values = texts.values
    unlike = values[at] != values[at - lengths[rows]]
    differ[rows[unlike] - 1] = True
    return differ


def _ids_of(values: Any, begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """The value of some rows, or of texts a digest, int64 ``[N]``."""
    if isinstance(values, Ragged):
        digests = b"".join(
            blake2b(values[row].tobytes(), digest_size=8).digest() for row in begins.tolist()
        )
        return np.frombuffer(digests, np.int64)
    some = values[begins]
    if some.dtype.kind == "f":
        # Of -0 and 0 one.
        return np.asarray(some + 0.0, np.float64).view(np.int64)
    return np.asarray(some.astype(np.int64))
