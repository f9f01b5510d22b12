"""Tables that nobody described, as the steps of one environment: csv and parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import Block, Columns, Notes, Reader, default_rows
from mmreplay.convert.description import TAKEN, Description
from mmreplay.convert.ends import Marks
from mmreplay.convert.losses import doubt_description
from mmreplay.errors import FormatError
from mmreplay.schema.naming import Plain

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype name and row shape by column."""
Batches = Callable[[int, tuple[str, ...]], Iterator[Columns]]
"""Gives the columns of some names, at most so many rows at a time."""
HARMLESS_NBYTES = 1 << 30
EPISODES = ("episode_index", "episode_id", "episode")
"""Columns whose changes begin an episode, the surest name first."""


class TableReader(Reader):
    """Reads columns that are known by name and kind; see `Reader`.

    Rows where an episode's number changes begin one, also where no end is told.
    """

    def __init__(
        self, path: Path, kinds: Kinds, rows: int, batches: Batches, notes: Notes
    ) -> None:
        """Find fields, roles and ends among the columns.

        Args:
            path: Of the source, for errors.
            kinds: Of the columns that can be fields.
            rows: In all.
            batches: Gives the columns.
            notes: Where what is found and guessed goes.
        """
        self.report = notes
        self._rows, self._batches = rows, batches
        self._episodes = _episodes(kinds)
        doubt_description(notes, kinds)
        self._plain = Plain(kinds, notes, taken=TAKEN)
        if self._episodes:
            self._tell_episodes()
        self._paths = self._plain.schema.paths
        self._description = Description(
            schema=self._plain.schema,
            first=np.zeros(1, np.int64),
            stop=np.array([rows]),
            capacity=max(1, rows),
        )
        refuse_wide(self._description.row_nbytes, path)

    def _tell_episodes(self) -> None:
        told = f"episodes begin where column {self._episodes!r} changes"
        if not self._plain.ends:
            # What `Plain` doubts, that all rows are one episode, is not so here.
            self.report.doubts[:] = [
                doubt
                for doubt in self.report.doubts
                if not doubt.startswith("no column tells where episodes end")
            ]
            told += ", and nothing tells how they ended"
        self.report.note(told)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        marks, done, last = Marks(1), 0, None
        for found in self._batches(rows, self._paths):
            columns, terminated, truncated = self._plain.take(found, done)
            positions = np.arange(done, done + len(terminated))
            done += len(terminated)
            breaks = None
            if self._episodes in columns and len(positions):
                numbers = columns[self._episodes].reshape(-1)
                breaks = _changes(numbers, last)
                last = numbers[-1]
            flags = marks.mark(0, terminated, truncated, breaks=breaks)
            yield Block(columns, np.zeros_like(positions), positions, flags)

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`: what tells of episodes is read all the same."""
        kept = {*paths, *self._plain.ends.values(), self._episodes}
        self._paths = tuple(path for path in self._plain.schema.paths if path in kept)

    def close(self) -> None:
        """See `Reader.close`: files are open while they are read only."""


def refuse_expansion(path: Path, nbytes: int, taken: int, allowed: bool) -> None:
    """Refuse files that stand for far more rows than their size tells of.

    Raises:
        FormatError: They do, and the user did not allow it.
    """
    if nbytes > max(HARMLESS_NBYTES, 1000 * taken) and not allowed:
        raise FormatError(
            f"{path} says that {taken} bytes hold {nbytes}, expected at most 1,000 "
            "times as many; pass allow_expansion=True if you trust it"
        )


def _episodes(kinds: Kinds) -> str:
    """The column of episodes' numbers, or ``""``."""
    for name in EPISODES:
        dtype, shape = kinds.get(name, ("", (0,)))
        if "int" in dtype and shape == ():
            return name
    return ""


def _changes(
    numbers: NDArray[np.generic], last: np.generic | None
) -> NDArray[np.bool_]:
    before = numbers[:-1]
    first = numbers[:1] if last is None else np.array([last])
    changed: NDArray[np.bool_] = numbers != np.concatenate([first, before])
    return changed
