"""Readers of files without a description: fields, roles and ends are found by name.

`PlainReader` reads arrays (npz, pt, safetensors), `TableReader` tables (csv, parquet),
both as the steps of one environment. The report says everything that was found or
guessed. Fields keep their names.

A column that names episodes (`episode_numbers`) begins one where it changes. If the
file still has the three columns of a buffer whose description is lost, rows go where
those say (`RowPositions`), and `in_place` closes the holes that others' filters left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import one_of
from mmreplay.convert.array_file import ArrayColumn, Scan, VaryingColumn, mapped
from mmreplay.convert.base import Block, Columns, Kinds, Notes, Reader, default_rows, refuse_wide
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    MAX_POSITION,
    OFFSETS,
    POSITION,
    RESERVED,
    RESERVED_NAMES,
    VALUES,
    Description,
    plain,
)
from mmreplay.convert.episode_ends import Marks
from mmreplay.convert.ranges import RangesReader, RowRanges
from mmreplay.disk.files import File
from mmreplay.episodes import ALL_FLAGS, BREAK, END, FINAL
from mmreplay.errors import CorruptError, SchemaError, SourceError
from mmreplay.format.metadata import AUTORESETS, MAX_NUM_ENVS, Autoreset
from mmreplay.schema import Field, Schema
from mmreplay.schema.episode_numbers import EpisodeChanges, are_numbers, episode_column
from mmreplay.schema.field import MAX_LENGTH
from mmreplay.schema.naming import InferredColumns
from mmreplay.schema.source_names import OwnNames, join_nested, note_joined

Ints = NDArray[np.int64]
POSITION_COLUMNS = tuple(RESERVED)
SURVEYED_ROWS = 1 << 16
T = TypeVar("T")
Batches = Callable[[int, tuple[str, ...]], Iterator[Columns]]
"""Returns the columns of some names, in batches of at most so many rows."""


class UndescribedReader(Reader):
    """Reads columns, found by their names, as the steps of one environment.

    Attributes:
        placed: Where the rows go, if the file has the columns that say so; they may
            have holes, which `in_place` closes.
    """

    placed: RowPositions | None = None
    _description: Description
    _episodes: str
    _own_names: OwnNames
    _paths: tuple[str, ...]
    _placed: bool
    _plain: InferredColumns

    def _batches(self, rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        """Columns by the paths of their fields; see `Batches`."""
        raise NotImplementedError

    def _episode_column(self, kinds: Kinds, varying: Mapping[str, Field], notes: Notes) -> str:
        """The column that numbers episodes, or ``""``."""
        name = episode_column(kinds, varying)
        if name in kinds and kinds[name][0].startswith("float"):
            found = (block[name] for block in self._batches(SURVEYED_ROWS, (name,)))
            return name if are_numbers(name, found, notes) else ""
        return name

    def _describe_rows(
        self, path: Path, rows: int, notes: Notes, autoreset: Autoreset | None
    ) -> None:
        """Find where the rows go, and describe them.

        Raises:
            SchemaError: An autoreset is given, which the rows need not or refute.
        """
        schema = self._plain.schema
        if self._placed:
            self.placed = RowPositions.of(self._batches(SURVEYED_ROWS, POSITION_COLUMNS))
            self._description = self.placed.describe(schema, notes, autoreset)
        else:
            if autoreset is not None:
                raise needless_autoreset(path, autoreset)
            self._description = plain(schema, rows)
        refuse_wide(self._description.row_nbytes, path)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._own_names

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        if self._placed:
            found = self._batches(rows, (*self._paths, *POSITION_COLUMNS))
            yield from placed_blocks(self._plain, found)
            return
        marks, begins, done = Marks(1), EpisodeChanges(self._episodes), 0
        for batch in self._batches(rows, self._paths):
            columns, terminated, truncated = self._plain.take(self._blanked(batch, done), done)
            positions = np.arange(done, done + len(terminated))
            done += len(terminated)
            breaks = begins.of(columns)
            flags = marks.mark(0, terminated, truncated, breaks=breaks)
            yield Block(columns, np.zeros_like(positions), positions, flags)
        begins.add_doubts(self.report)

    def _blanked(self, columns: Columns, first: int) -> Columns:
        """Columns whose ends are 0 in rows that were never written."""
        return columns

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: only three columns are read where rows have positions."""
        if not self._placed:
            return super().marks()
        return marks_of(self._batches(SURVEYED_ROWS, POSITION_COLUMNS))


class PlainReader(UndescribedReader):
    """Reads arrays ``[rows, *shape]`` as the steps of one environment."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, ArrayColumn],
        notes: Notes,
        written: Callable[[int, int], NDArray[np.bool_]] | None = None,
        own_names: OwnNames | None = None,
        autoreset: Autoreset | None = None,
    ) -> None:
        """Find fields, roles and ends among the arrays.

        Args:
            file: Closed with the reader.
            columns: The arrays.
            notes: Receives what is found and guessed.
            written: Returns which of rows ``[first, stop)`` were ever written, bool
                ``[stop - first]``; ends in others are ignored. All by default.
            own_names: See `Reader.own_names`.
            autoreset: Of rows with positions; None to find it by the rows.
        """
        self._own_names = own_names or {}
        self.report = notes
        self._written = written
        self._file = file
        varying = {} if written is not None else _varying(columns, file)
        self._rows, self._columns, self._varying = _with_rows(columns, varying, notes, file)
        joined = join_nested((*self._columns, *self._varying))
        self._columns = _renamed(self._columns, joined)
        self._varying = _renamed(self._varying, joined)
        self._own_names = {**self._own_names, **_noted(joined, notes)}
        self._varying_fields = {p: each.field for p, each in self._varying.items()}
        kinds = {n: (c.dtype, c.shape[1:]) for n, c in self._columns.items()}
        types = {n: f"{c.dtype} of shape {list(c.shape)}" for n, c in columns.items()}
        types |= dict.fromkeys(self._varying, "of varying length")
        self._placed = written is None and has_position_columns(kinds, types)
        fields = other_columns(kinds) if self._placed else kinds
        self._plain = InferredColumns(
            fields,
            notes,
            reserved=RESERVED_NAMES,
            ends_known=self._placed,
            varying=self._varying_fields,
        )
        for path, each in self._varying.items():
            notes.note(f"{path!r} varies from row to row: {each.field.description}")
        # Interleaved environments have several episodes at the same time.
        one_env = written is None and not self._placed
        self._episodes = self._episode_column(kinds, self._varying_fields, notes) if one_env else ""
        note_episodes(self._episodes, self._plain, notes)
        self._paths = self._plain.schema.paths
        for column in self._columns.values():
            refuse_wide(column.row_nbytes, file.path)
        self._describe_rows(file.path, self._rows, notes, autoreset)

    def _batches(self, rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        """See `UndescribedReader._batches`; valid until the next one."""
        used = {path: self._columns[path] for path in names if path in self._columns}
        varying = {path: self._varying[path] for path in names if path in self._varying}
        return Scan(used, rows, self._rows, varying).blocks()

    def _blanked(self, columns: Columns, first: int) -> Columns:
        """See `UndescribedReader._blanked`: there they may be NaN."""
        if self._written is None:
            return columns
        made = dict(columns)
        for path in self._plain.ends.values():
            ends = columns[path].reshape(-1)
            written = self._written(first, first + len(ends))
            made[path] = np.where(written, ends, np.zeros_like(ends))
        return made

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Every stored array, mapped read-only; see `ArrayReader.arrays`."""
        return mapped(self._file, self._columns)

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()


def _varying(columns: Mapping[str, ArrayColumn], file: File) -> dict[str, VaryingColumn]:
    """Pairs of arrays that hold values of any length, and where each begins.

    Those are offsets that rise from 0 to the number of items.
    """
    pairs = {}
    for name, offsets in columns.items():
        path = name.removesuffix(OFFSETS)
        values = columns.get(path + VALUES)
        if not name.endswith(OFFSETS) or values is None or not values.shape:
            continue
        if offsets.dtype != "int64" or len(offsets.shape) != 1 or not offsets.shape[0]:
            continue
        if 0 in values.shape[1:]:
            continue
        what, longest = f"{file.path}: field {path!r}", 1
        any_length = Field((None, *values.shape[1:]), values.dtype, max_length=MAX_LENGTH)
        column = VaryingColumn(any_length, offsets, values, what)
        count = offsets.shape[0] - 1
        scan = Scan({}, SURVEYED_ROWS, count, {path: column}, lengths_only=True)
        try:
            for block in scan.blocks():
                longest = max(longest, int(block[path].max(initial=0)))
        except CorruptError:
            # Two arrays of these names that mean something else.
            continue
        # The next values may be a little longer.
        limit = 1 << (longest - 1).bit_length()
        field = Field(any_length.shape, values.dtype, max_length=limit)
        pairs[path] = VaryingColumn(field, offsets, values, what)
    return pairs


def _with_rows(
    columns: Mapping[str, ArrayColumn],
    varying: Mapping[str, VaryingColumn],
    notes: Notes,
    file: File,
) -> tuple[int, dict[str, ArrayColumn], dict[str, VaryingColumn]]:
    """The number of steps, and the columns that have a row for each.

    Args:
        columns: All arrays.
        varying: By path, the pairs of them that hold values of any length.
        notes: Receives what was left out.
        file: For errors.
    """
    pairs = {path + end for path in varying for end in (OFFSETS, VALUES)}
    single = {name: column for name, column in columns.items() if name not in pairs}
    rows = _common_rows(single, notes, file, varying)
    long = {
        path: each
        for path, each in varying.items()
        if path not in single and each.offsets.shape == (rows + 1,)
    }
    for path in varying.keys() - long.keys():
        for name in (path + OFFSETS, path + VALUES):
            single[name] = columns[name]
    return rows, {n: c for n, c in single.items() if c.shape and c.shape[0] == rows}, long


def _common_rows(
    columns: Mapping[str, ArrayColumn],
    notes: Notes,
    file: File,
    varying: Mapping[str, VaryingColumn],
) -> int:
    """The number of rows of most arrays; others can be no fields, which is noted."""
    lengths = Counter(column.shape[0] for column in columns.values() if column.shape)
    lengths.update(each.offsets.shape[0] - 1 for each in varying.values())
    if not lengths:
        reasons = "; ".join([*notes.doubts, *notes.notes])[:300]
        raise SourceError(
            f"{file.path} holds no array with one row per "
            f"step{reasons and f' ({reasons})'}. Name another file, or its format with "
            "format= (--from)."
        )
    rows, votes = lengths.most_common(1)[0]
    for name, column in columns.items():
        if not column.shape or column.shape[0] != rows:
            shape = list(column.shape)
            notes.note(f"array {name!r} of shape {shape} was left out: most have {rows} rows")
    if votes < sum(lengths.values()):
        notes.doubt(f"arrays differ in length; {rows} rows were taken as the steps")
    return rows


class TableReader(UndescribedReader):
    """Reads the columns of a table as the steps of one environment; see `Reader`."""

    def __init__(
        self,
        path: Path,
        kinds: Kinds,
        rows: int,
        batches: Batches,
        notes: Notes,
        types: Mapping[str, str],
        varying: Mapping[str, Field] | None = None,
        autoreset: Autoreset | None = None,
    ) -> None:
        """Find fields, roles and ends among the columns.

        Args:
            path: Of the source, for errors.
            kinds: Dtype name and row shape, of columns that can be fields.
            rows: Number of rows.
            batches: Reads the columns.
            notes: Receives what is found and guessed.
            types: What messages call the type of each column, those that can be no
                fields included.
            varying: By name, columns whose values vary from row to row.
            autoreset: Of rows with positions; None to find it by the rows.
        """
        self.report = notes
        joined = join_nested((*kinds, *(varying or {})))
        kinds = _renamed(kinds, joined)
        varying = _renamed(varying or {}, joined)
        self._own_names = _noted(joined, notes)
        self._inner_names = {path: own for own, path in joined.items()}
        self._read = batches
        self._placed = has_position_columns(kinds, types)
        fields = other_columns(kinds) if self._placed else kinds
        self._episodes = "" if self._placed else self._episode_column(kinds, varying, notes)
        self._plain = InferredColumns(
            fields, notes, reserved=RESERVED_NAMES, ends_known=self._placed, varying=varying
        )
        note_episodes(self._episodes, self._plain, notes)
        self._paths = self._plain.schema.paths
        self._describe_rows(path, rows, notes, autoreset)

    def _batches(self, rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        """Columns by the paths of their fields; see `Batches`."""
        stored = tuple(self._inner_names.get(name, name) for name in names)
        for batch in self._read(rows, stored):
            yield {n: batch[own] for n, own in zip(names, stored, strict=True)}

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`; columns of ends and episodes are read as well."""
        read = {*paths, *self._plain.ends.values(), self._episodes}
        self._paths = tuple(path for path in self._plain.schema.paths if path in read)

    def close(self) -> None:
        """See `Reader.close`: files are open only while blocks are read."""


def _renamed(columns: Mapping[str, T], joined: Mapping[str, str]) -> dict[str, T]:
    """The same by the paths that columns have now."""
    return {joined.get(name, name): each for name, each in columns.items()}


def _noted(joined: Mapping[str, str], notes: Notes) -> OwnNames:
    """The columns whose names were joined, which is noted, by those names."""
    for own, path in joined.items():
        note_joined(notes, own, own, path)
    return {own: (path,) for own, path in joined.items()}


def note_episodes(name: str, plain: InferredColumns, notes: Notes) -> None:
    """Note the column that numbers episodes.

    Args:
        name: Of the column, or ``""``.
        plain: The fields of the file.
        notes: Receives the note.
    """
    if not name:
        return
    note = f"episodes begin where column {name!r} changes"
    if not plain.ends:
        # `InferredColumns` doubts that all rows are one episode, which is not so here.
        notes.doubts[:] = [
            doubt
            for doubt in notes.doubts
            if not doubt.startswith("no column says where episodes end")
        ]
        note += ", and nothing says how they ended"
    notes.note(note)


def has_position_columns(kinds: Kinds, types: Mapping[str, str]) -> bool:
    """Return whether a file has the columns of environments, positions and flags.

    Args:
        kinds: Dtype name and row shape, of columns that can be fields.
        types: What messages call the type of each column of the file.

    Raises:
        SourceError: It has them, but not as integers; or some of them only.
    """
    there = [name for name in POSITION_COLUMNS if name in types]
    if not there:
        return False
    if len(there) < len(POSITION_COLUMNS):
        lost = [name for name in POSITION_COLUMNS if name not in there]
        raise SourceError(
            f"the file has {' and '.join(map(repr, there))} of a buffer's rows without "
            f"{' and '.join(map(repr, lost))}, so that final rows and ends of episodes "
            "would be read as other steps. Keep all of "
            f"{', '.join(POSITION_COLUMNS)}, or leave out all of them to read every "
            "row as a step of one environment."
        )
    for name in POSITION_COLUMNS:
        dtype, shape = kinds.get(name, ("", ()))
        if "int" not in dtype or shape != ():
            raise no_integers(name, types[name])
    return True


def no_integers(name: str, kind: str) -> SourceError:
    """Return the error for a column of `POSITION_COLUMNS` without one integer a row.

    Args:
        name: The column.
        kind: What it is.
    """
    return _refused(f"{name} is {kind}", "Store the three as integers in each row")


def no_position(name: str, row: int) -> SourceError:
    """Return the error for a row without a value of a column of `POSITION_COLUMNS`."""
    return _refused(
        f"row {row} has no {name}",
        "Remove rows without it, or leave out the three columns to read every row as a step",
    )


def other_columns(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The other columns, which may be fields."""
    return {name: kind for name, kind in kinds.items() if name not in POSITION_COLUMNS}


@dataclass(slots=True)
class RowPositions:
    """The result of a pass over the columns of environments, positions and flags.

    Attributes:
        first: Position of the oldest row, by environment.
        stop: Position after the newest row, by environment.
        last: Flags of the newest row, by environment.
        runs: Positions at which runs of rows without a hole begin, and those after
            their ends, by environment; the last run ends with ``stop``.
        holes: Number of runs that begin behind a hole.
        orphans: Number of final rows behind a hole, which no run has.
        finals: Some row is a final row.
        bare: Some end is not followed by its final row.
        sure: Some end is followed by the first step of an episode, which it never is
            with autoreset ``"next_step"``.
    """

    first: dict[int, int] = field(default_factory=dict)
    stop: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    runs: dict[int, tuple[list[Ints], list[Ints]]] = field(default_factory=dict)
    holes: int = 0
    orphans: int = 0
    finals: bool = False
    bare: bool = False
    sure: bool = False

    @classmethod
    def of(cls, blocks: Iterator[Columns]) -> RowPositions:
        """Read the columns of all rows.

        Args:
            blocks: The three columns, in the order of the file.

        Raises:
            SourceError: They contradict themselves, or are not in order.
        """
        found, rows = cls(), 0
        for columns in blocks:
            env_ids, positions, flags = row_positions(columns)
            for env_id in np.unique(env_ids).tolist():
                here = np.flatnonzero(env_ids == env_id)
                found._look(env_id, positions[here], flags[here], rows + here)
            rows += len(env_ids)
        if max(found.first, default=0) >= MAX_NUM_ENVS:
            raise _refused(f"a row has environment {max(found.first)}")
        return found

    def _look(self, env_id: int, positions: Ints, flags: NDArray[np.uint8], rows: Ints) -> None:
        odd = (positions < 0) | (positions >= MAX_POSITION)
        if env_id < 0 or odd.any():
            at = int(np.argmax(odd))
            raise _refused(f"row {rows[at]} has environment {env_id}, position {positions[at]}")
        oldest = env_id not in self.first
        before = np.concatenate([[self.stop.get(env_id, 0) - 1], positions[:-1]])
        bad = positions <= before
        if bad.any():
            at = int(np.argmax(bad))
            row = f"row {rows[at]} has position {positions[at]} of environment {env_id}"
            if positions[at] == before[at]:
                raise _refused(f"{row} again", "Remove rows that are there twice")
            raise _refused(
                f"{row} behind position {before[at]}", f"Sort the rows by {ENV_ID} and {POSITION}"
            )
        begins = positions > before + 1
        final = (flags & FINAL) != 0
        ended = np.concatenate([[self.last.get(env_id, 0)], flags[:-1]]) & END != 0
        self.finals |= bool(final.any())
        self.bare |= bool((ended & (begins | ~final)).any())
        self.sure |= bool((ended & ~begins & (flags & (FINAL | BREAK) == 0)).any())
        # An environment's oldest row may be a final row, as in a ring.
        begins[0] &= not oldest
        # What a hole parts from its step is the next observation of no step.
        orphans = begins & final
        firsts, stops = self.runs.setdefault(env_id, ([], []))
        firsts.append((positions + orphans)[begins])
        stops.append(before[begins] + 1)
        if oldest:
            self.first[env_id] = int(positions[0])
            firsts.insert(0, positions[:1])
        self.holes += int(begins.sum())
        self.orphans += int(orphans.sum())
        self.stop[env_id], self.last[env_id] = int(positions[-1]) + 1, int(flags[-1])

    @property
    def ranges(self) -> RowRanges:
        """The runs, without final rows that begin one behind a hole."""
        found: list[tuple[Ints, Ints, Ints]] = []
        for env_id in sorted(self.runs):
            firsts, stops = self.runs[env_id]
            first = np.concatenate(firsts)
            stop = np.concatenate([*stops, [self.stop[env_id]]])
            some = first < stop
            found.append((np.full(some.sum(), env_id), first[some], stop[some]))
        none = np.zeros(0, np.int64)
        env_ids, first, stop = (
            np.concatenate([none, *(each[n] for each in found)]) for n in range(3)
        )
        return RowRanges(env_ids, first, stop)

    def describe(
        self, schema: Schema, notes: Notes, autoreset: Autoreset | None = None
    ) -> Description:
        """The description, as far as it can be recovered.

        Args:
            schema: The fields.
            notes: Receives what is known of the rest, and what is not.
            autoreset: Where the user says it.

        Raises:
            SchemaError: That is none, or the rows say another one.
        """
        if autoreset is not None:
            one_of("autoreset", autoreset, AUTORESETS)
            if autoreset == "next_step" and self.sure:
                raise SchemaError(
                    "autoreset must not be 'next_step' for these rows: an episode's "
                    "end is followed by the first step of the next one, and not by a "
                    "final row. Leave it out, or pass 'same_step' or 'disabled'."
                )
        count = max(self.first, default=0) + 1
        first = np.array([self.first.get(env_id, 0) for env_id in range(count)])
        stop = np.array([self.stop.get(env_id, 0) for env_id in range(count)])
        ranges = self.ranges
        rows = np.zeros(count, np.int64)
        np.add.at(rows, ranges.env_ids, ranges.stop - ranges.first)
        chosen: Autoreset = autoreset or (
            "next_step" if self.finals and not self.bare else "disabled"
        )
        notes.note(
            f"columns {', '.join(POSITION_COLUMNS)} are of a buffer whose description "
            "is lost: rows go to these positions, its capacity is the number of rows, "
            f"and its autoreset {chosen!r}"
        )
        if autoreset is None and self.finals and not self.sure:
            # Without final rows the autoreset makes no difference to any row.
            notes.doubt(
                f"the buffer's autoreset was taken as {chosen!r}: its rows do not "
                "say whether final rows are the environment's own, as with "
                "'next_step'; pass autoreset= (--autoreset) to say it"
            )
        if self.holes:
            notes.note(
                f"{POSITION} has {self.holes:,} holes: the rows behind one follow at "
                "the next positions, and rows that were no neighbours are of different "
                "episodes"
            )
        if self.orphans:
            notes.note(f"{self.orphans:,} final rows were left out, whose step is not there")
        return Description(schema, first, stop, max(1, int(rows.max())), chosen)


def needless_autoreset(path: Path, autoreset: Autoreset) -> SchemaError:
    """The error for an autoreset of rows that need none said."""
    return SchemaError(
        f"autoreset is for files with the columns {', '.join(POSITION_COLUMNS)} "
        f"and without a description, got {autoreset!r} for {path}. Leave it out."
    )


def in_place(reader: PlainReader | TableReader) -> Reader:
    """The reader, without the holes that its positions may have.

    Rows that were no neighbours stay so, as with any selection of ranges.
    """
    if reader.placed is None or not reader.placed.first:
        return reader
    return RangesReader(reader, reader.placed.ranges)


def placed_blocks(plain: InferredColumns, batches: Iterator[Columns]) -> Iterator[Block]:
    """Blocks of rows whose environments, positions and flags are columns."""
    done = 0
    for found in batches:
        columns, _, _ = plain.take(found, done)
        yield Block(columns, *row_positions(found))
        done += len(found[FLAGS])


def marks_of(batches: Iterator[Columns]) -> Iterator[Block]:
    """Blocks of the columns of environments, positions and flags alone."""
    for found in batches:
        yield Block({}, *row_positions(found))


def row_positions(columns: Columns) -> tuple[Ints, Ints, NDArray[np.uint8]]:
    """Environments, positions and flags, ``[N]`` each.

    Raises:
        SourceError: A row has flags that do not exist.
    """
    arrays: list[NDArray[Any]] = [columns[name].reshape(-1) for name in POSITION_COLUMNS]
    env_ids, positions, flags = arrays
    if ((flags < 0) | (flags > ALL_FLAGS)).any():
        raise _refused(f"a row has flags {int(flags.max())}")
    return (env_ids.astype(np.int64), positions.astype(np.int64), flags.astype(np.uint8))


def _refused(
    problem: str,
    way_out: str = "Add the lost description (csv: <file>.mmreplay.json), or leave out "
    "the three columns to read every row as a step",
) -> SourceError:
    return SourceError(
        f"columns {ENV_ID}, {POSITION} and {FLAGS} must hold rows of a buffer in "
        f"order, but {problem}. {way_out}."
    )
