"""Tables that nobody described, as the steps of one environment: csv and parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from mmreplay.convert import numbered, placed
from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import Block, Columns, Notes, Reader, default_rows
from mmreplay.convert.description import TAKEN, Description, plain
from mmreplay.convert.ends import Marks
from mmreplay.errors import FormatError
from mmreplay.schema.naming import Plain

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype name and row shape by column."""
Batches = Callable[[int, tuple[str, ...]], Iterator[Columns]]
"""Gives the columns of some names, at most so many rows at a time."""
HARMLESS_NBYTES = 1 << 30


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
        self._placed = placed.find(kinds)
        fields = placed.others(kinds) if self._placed else kinds
        self._episodes = "" if self._placed else numbered.find(kinds)
        self._plain = Plain(fields, notes, taken=TAKEN, ends_known=self._placed)
        numbered.tell(self._episodes, self._plain, notes)
        self._paths = self._plain.schema.paths
        if self._placed:
            found = placed.Places.of(batches(placed.SURVEYED_ROWS, placed.NAMES))
            self._description = found.describe(self._plain.schema, notes)
        else:
            self._description = plain(self._plain.schema, rows)
        refuse_wide(self._description.row_nbytes, path)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        if self._placed:
            for found in self._batches(rows, (*self._paths, *placed.NAMES)):
                yield placed.block(self._plain.take(found, 0)[0], found)
            return
        marks, begins, done = Marks(1), numbered.Begins(self._episodes), 0
        for found in self._batches(rows, self._paths):
            columns, terminated, truncated = self._plain.take(found, done)
            positions = np.arange(done, done + len(terminated))
            done += len(terminated)
            breaks = begins.of(columns)
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
