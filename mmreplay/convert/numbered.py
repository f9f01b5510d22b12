"""Columns that number episodes: where such a number changes, one begins."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Columns, Notes
from mmreplay.schema.naming import Plain

NAMES = ("episode_index", "episode_id", "episode")
"""What they are called, the surest name first."""


def find(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """The column of episodes' numbers, or ``""``.

    Args:
        kinds: Dtype name and row shape by column.
    """
    for name in NAMES:
        dtype, shape = kinds.get(name, ("", (0,)))
        if "int" in dtype and shape == ():
            return name
    return ""


def tell(name: str, plain: Plain, notes: Notes) -> None:
    """Say that a column tells where episodes begin.

    Args:
        name: The column's; nothing is said of none.
        plain: What else the columns are.
        notes: Where it is said.
    """
    if not name:
        return
    told = f"episodes begin where column {name!r} changes"
    if not plain.ends:
        # What `Plain` doubts, that all rows are one episode, is not so here.
        notes.doubts[:] = [
            doubt
            for doubt in notes.doubts
            if not doubt.startswith("no column tells where episodes end")
        ]
        told += ", and nothing tells how they ended"
    notes.note(told)


class Begins:
    """Where episodes begin, over blocks that follow each other."""

    def __init__(self, name: str) -> None:
        """Begin at the first row; name is the column's, or ``""``."""
        self._name = name
        self._last: np.generic | None = None

    def of(self, columns: Columns) -> NDArray[np.bool_] | None:
        """Rows whose number is not that of the row before, bool ``[N]``.

        Args:
            columns: Of the next rows, per path ``[N, *shape]``.
        """
        if self._name not in columns or not len(columns[self._name]):
            return None
        numbers = columns[self._name].reshape(-1)
        before = numbers[:1] if self._last is None else np.array([self._last])
        self._last = numbers[-1]
        changed: NDArray[np.bool_] = numbers != np.concatenate([before, numbers[:-1]])
        return changed
