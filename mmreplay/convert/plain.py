"""Files of plain arrays, that nobody described: what they hold is found by its names.

Everything found or guessed stands in the report. Fields keep the names they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert import numbered, placed
from mmreplay.convert.arrays import Column, Scan, mapped, refuse_wide
from mmreplay.convert.base import Block, Columns, Notes, Reader, default_rows
from mmreplay.convert.description import TAKEN, Description, plain
from mmreplay.convert.ends import Marks
from mmreplay.errors import SourceError
from mmreplay.files import File
from mmreplay.schema.naming import Plain


class PlainReader(Reader):
    """Reads arrays ``[rows, *shape]`` as the steps of one environment."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, Column],
        notes: Notes,
        written: Callable[[int, int], NDArray[np.bool_]] | None = None,
    ) -> None:
        """Find fields, roles and ends among the arrays.

        Args:
            file: Closed with the reader.
            columns: The arrays.
            notes: Where what is found and guessed goes.
            written: Which of rows ``[first, stop)`` somebody wrote, bool
                ``[stop - first]``; the others end nothing. All by default.
        """
        self.report = notes
        self._written = written
        self._file = file
        self._rows = _common_rows(columns, notes, file)
        self._columns = {
            name: column
            for name, column in columns.items()
            if column.shape and column.shape[0] == self._rows
        }
        kinds = {n: (c.dtype, c.shape[1:]) for n, c in self._columns.items()}
        self._placed = written is None and placed.find(kinds)
        fields = placed.others(kinds) if self._placed else kinds
        self._plain = Plain(fields, notes, taken=TAKEN, ends_known=self._placed)
        # Rows of several environments in turns are of as many episodes at once.
        alone = written is None and not self._placed
        self._episodes = numbered.find(kinds) if alone else ""
        numbered.tell(self._episodes, self._plain, notes)
        for column in self._columns.values():
            refuse_wide(column.row_nbytes, file.path)
        if self._placed:
            told = {name: self._columns[name] for name in placed.NAMES}
            found = placed.Places.of(
                Scan(told, placed.SURVEYED_ROWS, self._rows).blocks()
            )
            self._description = found.describe(self._plain.schema, notes)
        else:
            self._description = plain(self._plain.schema, self._rows)
        refuse_wide(self._description.row_nbytes, file.path)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        wanted = (*self._plain.schema.paths, *(placed.NAMES if self._placed else ()))
        used = {path: self._columns[path] for path in wanted}
        if self._placed:
            for found in Scan(used, rows, self._rows).blocks():
                yield placed.block(self._plain.take(found, 0)[0], found)
            return
        marks, begins, done = Marks(1), numbered.Begins(self._episodes), 0
        for found in Scan(used, rows, self._rows).blocks():
            taken = self._plain.take(self._blanked(found, done), done)
            columns, terminated, truncated = taken
            positions = np.arange(done, done + len(terminated))
            done += len(terminated)
            breaks = begins.of(columns)
            flags = marks.mark(0, terminated, truncated, breaks=breaks)
            yield Block(columns, np.zeros_like(positions), positions, flags)

    def _blanked(self, found: Columns, first: int) -> Columns:
        """Rows of which those that nobody wrote end nothing: theirs may be NaN."""
        if self._written is None:
            return found
        made = dict(found)
        for path in self._plain.ends.values():
            ends = found[path].reshape(-1)
            written = self._written(first, first + len(ends))
            made[path] = np.where(written, ends, np.zeros_like(ends))
        return made

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array, mapped read-only; see `ArrayReader.arrays`."""
        return mapped(self._file, self._columns)

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()


def _common_rows(columns: Mapping[str, Column], notes: Notes, file: File) -> int:
    """How many rows most arrays have; others can be no fields, which is noted."""
    lengths = Counter(column.shape[0] for column in columns.values() if column.shape)
    if not lengths:
        told = "; ".join([*notes.doubts, *notes.notes])[:300]
        raise SourceError(
            f"{file.path} holds no array of one row a step{told and f' ({told})'}, "
            "expected at least one; name another file, or its format with format= "
            "(--from)"
        )
    rows, votes = lengths.most_common(1)[0]
    for name, column in columns.items():
        if not column.shape or column.shape[0] != rows:
            told = f"array {name!r} of shape {list(column.shape)} was left out: most "
            notes.note(told + f"have {rows} rows")
    if votes < sum(lengths.values()):
        notes.doubt(f"arrays differ in length; {rows} rows were taken to be the steps")
    return rows
