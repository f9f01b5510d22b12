"""Columns that number episodes: where such a number changes, one begins.

Rows of a buffer whose description is lost: three columns still say where they go.

Files of plain arrays, that nobody described: what they hold is found by its names.

Everything found or guessed stands in the report. Fields keep the names they have.

Tables that nobody described, as the steps of one environment: csv and parquet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.array_file import ArrayColumn, Scan, mapped, refuse_wide
from mmreplay.convert.base import Block, Columns, Notes, Reader, default_rows
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    POSITION,
    RESERVED,
    TAKEN,
    Description,
    plain,
)
from mmreplay.convert.episode_ends import Marks
from mmreplay.disk.files import File
from mmreplay.episodes import ALL_FLAGS, END, FINAL
from mmreplay.errors import FormatError, SourceError
from mmreplay.format.metadata import MAX_NUM_ENVS
from mmreplay.schema import Schema
from mmreplay.schema.naming import Plain

EPISODE_COLUMNS = ("episode_index", "episode_id", "episode")
"""What they are called, the surest name first."""


def episode_column(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """The column of episodes' numbers, or ``""``.

    Args:
        kinds: Dtype name and row shape by column.
    """
    for name in EPISODE_COLUMNS:
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


Ints = NDArray[np.int64]
POSITION_COLUMNS = tuple(RESERVED)
SURVEYED_ROWS = 1 << 16


def has_position_columns(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Whether columns of these dtypes and row shapes say where rows go.

    Raises:
        SourceError: They should, and are no whole numbers.
    """
    if not kinds.keys() >= RESERVED.keys():
        return False
    for name in POSITION_COLUMNS:
        dtype, shape = kinds[name]
        if "int" not in dtype or shape != ():
            raise _refused(f"{name} of {dtype}{list(shape)}")
    return True


def others(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The other columns, which may be fields."""
    return {name: kind for name, kind in kinds.items() if name not in POSITION_COLUMNS}


@dataclass(slots=True)
class RowPositions:
    """What a pass over those columns says.

    Attributes:
        first: Position of the oldest row, by environment.
        stop: The position after the newest, likewise.
        last: Flags of the newest row, likewise.
        finals: Whether there is a final row.
        bare: Whether an end is not followed by one.
    """

    first: dict[int, int] = field(default_factory=dict)
    stop: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    finals: bool = False
    bare: bool = False

    @classmethod
    def of(cls, blocks: Iterator[Columns]) -> RowPositions:
        """Look at all rows.

        Args:
            blocks: The three columns, in the order of the file.

        Raises:
            SourceError: They contradict themselves, or rows are missing.
        """
        found, rows = cls(), 0
        for columns in blocks:
            env_ids, positions, flags = taken(columns)
            for env_id in np.unique(env_ids).tolist():
                here = np.flatnonzero(env_ids == env_id)
                found._look(env_id, positions[here], flags[here], rows + here)
            rows += len(env_ids)
        if max(found.first, default=0) >= MAX_NUM_ENVS:
            raise _refused(f"environment {max(found.first)}")
        return found

    def _look(
        self, env_id: int, positions: Ints, flags: NDArray[np.uint8], rows: Ints
    ) -> None:
        if env_id < 0 or positions[0] < 0:
            raise _refused(f"environment {env_id}, position {positions[0]}")
        self.first.setdefault(env_id, int(positions[0]))
        due = self.stop.get(env_id, int(positions[0]))
        wanted = np.arange(due, due + len(positions))
        bad = positions != wanted
        if bad.any():
            at = int(np.argmax(bad))
            raise _refused(
                f"position {positions[at]} of environment {env_id} in row {rows[at]} "
                f"where {wanted[at]} should be"
            )
        final = (flags & FINAL) != 0
        before = np.concatenate([[self.last.get(env_id, 0)], flags[:-1]])
        self.finals |= bool(final.any())
        self.bare |= bool((((before & END) != 0) & ~final).any())
        self.stop[env_id], self.last[env_id] = int(wanted[-1]) + 1, int(flags[-1])

    def describe(self, schema: Schema, notes: Notes) -> Description:
        """The description, as far as it can be known.

        Args:
            schema: The fields.
            notes: Where it is told that the rest is lost.
        """
        count = max(self.first, default=0) + 1
        first = np.array([self.first.get(env_id, 0) for env_id in range(count)])
        stop = np.array([self.stop.get(env_id, 0) for env_id in range(count)])
        known = self.finals and not self.bare
        notes.doubt(
            f"columns {', '.join(POSITION_COLUMNS)} tell of a buffer whose "
            "description is lost: "
            f"rows go where they say; its autoreset was taken to be "
            f"{'next_step' if known else 'disabled'!r}, its capacity the rows there are"
        )
        return Description(
            schema, first, stop, max(1, int((stop - first).max())),
            "next_step" if known else "disabled",
        )  # fmt: skip


def block(columns: Columns, told: Columns) -> Block:
    """Rows where the three columns, ``told``, say that they go."""
    return Block(columns, *taken(told))


def taken(columns: Columns) -> tuple[Ints, Ints, NDArray[np.uint8]]:
    """Environments, positions and flags, ``[N]`` each.

    Raises:
        SourceError: There are no such flags.
    """
    told: list[NDArray[Any]] = [columns[name].reshape(-1) for name in POSITION_COLUMNS]
    env_ids, positions, flags = told
    if ((flags < 0) | (flags > ALL_FLAGS)).any():
        raise _refused(f"flags {int(flags.max())}")
    return (
        env_ids.astype(np.int64), positions.astype(np.int64), flags.astype(np.uint8)
    )  # fmt: skip


def _refused(got: str) -> SourceError:
    return SourceError(
        f"columns {ENV_ID}, {POSITION} and {FLAGS} tell of a buffer whose description "
        f"is lost: got {got}, expected all of its rows in their order; bring the "
        f"description along (csv: <file>.mmreplay.json), or remove column {FLAGS!r} "
        "from the file to take every row for a step"
    )


class PlainReader(Reader):
    """Reads arrays ``[rows, *shape]`` as the steps of one environment."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, ArrayColumn],
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
        self._placed = written is None and has_position_columns(kinds)
        fields = others(kinds) if self._placed else kinds
        self._plain = Plain(fields, notes, taken=TAKEN, ends_known=self._placed)
        # Rows of several environments in turns are of as many episodes at once.
        alone = written is None and not self._placed
        self._episodes = episode_column(kinds) if alone else ""
        tell(self._episodes, self._plain, notes)
        for column in self._columns.values():
            refuse_wide(column.row_nbytes, file.path)
        if self._placed:
            told = {name: self._columns[name] for name in POSITION_COLUMNS}
            found = RowPositions.of(Scan(told, SURVEYED_ROWS, self._rows).blocks())
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
        wanted = (
            *self._plain.schema.paths,
            *(POSITION_COLUMNS if self._placed else ()),
        )
        used = {path: self._columns[path] for path in wanted}
        if self._placed:
            for found in Scan(used, rows, self._rows).blocks():
                yield block(self._plain.take(found, 0)[0], found)
            return
        marks, begins, done = Marks(1), Begins(self._episodes), 0
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


def _common_rows(columns: Mapping[str, ArrayColumn], notes: Notes, file: File) -> int:
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
        self._placed = has_position_columns(kinds)
        fields = others(kinds) if self._placed else kinds
        self._episodes = "" if self._placed else episode_column(kinds)
        self._plain = Plain(fields, notes, taken=TAKEN, ends_known=self._placed)
        tell(self._episodes, self._plain, notes)
        self._paths = self._plain.schema.paths
        if self._placed:
            found = RowPositions.of(batches(SURVEYED_ROWS, POSITION_COLUMNS))
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
            for found in self._batches(rows, (*self._paths, *POSITION_COLUMNS)):
                yield block(self._plain.take(found, 0)[0], found)
            return
        marks, begins, done = Marks(1), Begins(self._episodes), 0
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
