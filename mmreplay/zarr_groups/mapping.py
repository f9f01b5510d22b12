"""Maps the arrays of a Zarr group to fields, episode ends and roles of a buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import START, TERMINATED, TRUNCATED
from mmreplay.errors import FormatError, SchemaError, SourceError
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import canonical_name
from mmreplay.schema.episode_numbers import EpisodeChanges, are_numbers, episode_column
from mmreplay.schema.naming import ENDS, InferredColumns, left_out
from mmreplay.schema.notes import Notes
from mmreplay.schema.source_names import join_nested, note_joined
from mmreplay.zarr_groups import hierarchy
from mmreplay.zarr_groups.arrays import ChunkedReader
from mmreplay.zarr_groups.hierarchy import Hierarchy, storable
from mmreplay.zarr_groups.metadata import MAX_CHUNK_NBYTES, ForeignArray
from mmreplay.zarr_groups.source import ZarrSource

Array = NDArray[np.generic]
Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]
EPISODE_ENDS = "episode_ends"
DATA = "data/"
MAX_ROWS = 1 << 30
"""A byte of flags a row is held in memory."""
MAX_CHUNKS = 1 << 22
BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class GroupMapping:
    """How a group was taken as a buffer.

    Attributes:
        location: The group's folder, zip file or URL.
        version: Of Zarr's format, 2 or 3.
        ours: Whether mmreplay wrote it, so that nothing had to be found.
        arrays: Path of each field's array in the group, by the field's; ends that
            flags tell have none.
        packed: What the chunks of each are, in a few words.
        notes: How fields and ends were found, what was left out and why.
        doubts: What was guessed and may be wrong.
        missing: Chunks that were read so far, were not there, and hold the fill value,
            by array: writers leave them out, and copies may lose some.
    """

    location: str
    version: int
    ours: bool
    arrays: Mapping[str, str]
    packed: Mapping[str, str]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]
    missing: Mapping[str, int]


@dataclass(slots=True)
class Mapped:
    """Fields and flags of a group.

    Attributes:
        schema: The fields.
        arrays: Of each field that flags do not hold, by path.
        flags: uint8 ``[rows]``.
    """

    schema: Schema
    arrays: dict[str, ForeignArray]
    flags: NDArray[np.uint8]


@dataclass(slots=True)
class GroupMapper:
    """Finds what a group's arrays are that mmreplay did not write."""

    hierarchy: Hierarchy
    source: ZarrSource
    reader: ChunkedReader
    notes: Notes = field(default_factory=Notes)
    rows: int = 0

    def map(self) -> Mapped:
        """Find it.

        Raises:
            SourceError: No array has a row a step, or ends contradict the rows.
            FormatError: An array is damaged, or of a kind that is not read.
        """
        ends_name = self._ends_name()
        columns = self._columns(ends_name)
        ends = None if ends_name is None else self._ends(ends_name)
        kinds = {
            path: (canonical_name(array.dtype), array.shape[1:]) for path, array in columns.items()
        }
        numbers = episode_column(kinds) if ends is None else ""
        if numbers and kinds[numbers][0].startswith("float"):
            blocks = self._blocks(columns[numbers])
            numbers = numbers if are_numbers(numbers, blocks, self.notes) else ""
        known = ends is not None or bool(numbers)
        try:
            plain = InferredColumns(kinds, self.notes, ends_known=known)
        except SourceError as error:
            raise SourceError(f"{self.source.location}: {error}") from error
        if numbers:
            ends = self._changes(numbers, columns[numbers])
            self.notes.note(f"episodes begin where {numbers!r} changes")
        flags = self._flags(plain, columns, ends)
        schema = self._with_ends(plain.schema)
        if schema.row_nbytes > MAX_CHUNK_NBYTES:
            raise FormatError(
                f"{self.source.location}: rows must have at most {MAX_CHUNK_NBYTES} "
                f"bytes, got {schema.row_nbytes}. Leave arrays out with fields=."
            )
        served = set(plain.ends.values()) | set(ENDS) - columns.keys()
        arrays = {path: columns[path] for path in schema.paths if path not in served}
        self._note_names(schema)
        return Mapped(schema, arrays, flags)

    def paths(self) -> dict[str, str]:
        """Return the paths that fields would have, by the names of their arrays."""
        return {
            name: path
            for name, path in self._wanted(self._ends_name()).items()
            if storable(self.hierarchy, name)[0] is not None
        }

    def _ends_name(self) -> str | None:
        """The array that counts the rows before each episode's end."""
        arrays, ends_name = self.hierarchy.arrays, self.source.episode_ends
        if ends_name is not None:
            if ends_name not in arrays:
                raise SchemaError(
                    f"episode_ends: {self.source.location} has no array {ends_name!r}. "
                    f"Name one of {', '.join(list(arrays)[:20])}, or leave it out to "
                    "find it by name."
                )
            return ends_name
        named = [n for n in arrays if n.rpartition("/")[2] == EPISODE_ENDS]
        if not named:
            return None
        usual = f"meta/{EPISODE_ENDS}"
        chosen = usual if usual in named else named[0]
        if len(named) > 1:
            self.notes.doubt(
                f"{len(named)} arrays are called {EPISODE_ENDS!r}, and {chosen!r} was "
                "taken; name one with episode_ends="
            )
        return chosen

    def _columns(self, ends_name: str | None) -> dict[str, ForeignArray]:
        """Arrays of one row a step, by the paths of their fields."""
        columns: dict[str, tuple[str, ForeignArray]] = {}
        for name, path in self._wanted(ends_name).items():
            array, why = storable(self.hierarchy, name)
            if array is None:
                self.notes.doubt(f"array {name!r} was left out: {why}")
            elif not array.shape:
                left_out(self.notes, path, f"array {name!r} was left out: of no axis")
            elif path in columns:
                raise SourceError(
                    f"{self.source.location}: arrays {columns[path][0]!r} and {name!r} "
                    f"both become field {path!r}. Give them different names with "
                    "fields= of ZarrSource."
                )
            else:
                columns[path] = (name, array)
        counted = [array.shape[0] for _, array in columns.values()]
        lengths = Counter(length for length in counted if length)
        if not lengths:
            raise SourceError(
                f"{self.source.location} has no array with one row a step, only "
                f"{list(self.hierarchy.arrays)[:20]}. Pass the group that has the "
                "arrays."
            )
        self.rows = lengths.most_common(1)[0][0]
        if self.rows > MAX_ROWS:
            raise FormatError(
                f"{self.source.location} must have at most {MAX_ROWS} rows, got "
                f"{self.rows}. Split the group."
            )
        of_length = self._of_length(columns)
        if self.source.fields is not None:
            return of_length
        joined = join_nested(of_length)
        for nested, path in joined.items():
            note_joined(self.notes, columns[nested][0], nested, path)
        return {joined.get(path, path): array for path, array in of_length.items()}

    def _of_length(
        self, columns: Mapping[str, tuple[str, ForeignArray]]
    ) -> dict[str, ForeignArray]:
        """Those of the arrays that have a row a step; others are noted."""
        found = {}
        for path, (name, array) in columns.items():
            if array.shape[0] == self.rows:
                found[path] = array
                continue
            self.notes.note(
                f"array {name!r} of shape {list(array.shape)} was left out: most have "
                f"{self.rows} rows"
            )
            if "/" not in name or name.startswith(DATA):
                self.notes.doubt(
                    f"arrays differ in length; {self.rows} rows were taken to be the steps"
                )
        return found

    def _wanted(self, ends_name: str | None) -> dict[str, str]:
        """Paths of fields by arrays' names."""
        arrays = self.hierarchy.arrays
        if self.source.fields is None:
            return {n: n.removeprefix(DATA) for n in arrays if n != ends_name}
        missing = [name for name in self.source.fields if name not in arrays]
        if missing:
            raise SchemaError(
                f"fields: {self.source.location} has no array {missing[0]!r}. Name one "
                f"of {', '.join(list(arrays)[:20])}."
            )
        return dict(self.source.fields)

    def _counts(self, array: ForeignArray | None) -> bool:
        return array is not None and array.dtype.kind in "iu" and len(array.shape) == 1

    def _read(self, array: ForeignArray, first: int, stop: int) -> Array:
        if array.shape[0] > MAX_CHUNKS * array.chunk[0]:
            raise FormatError(
                f"{self.source.location}: array {array.name!r} must have at most "
                f"{MAX_CHUNKS} chunks to find episodes in, got {array.shape[0]} rows "
                f"in chunks of {array.chunk[0]}. Leave it out with fields=, or copy it "
                "with larger chunks."
            )
        out: Array = np.empty((stop - first, *array.shape[1:]), array.dtype.newbyteorder("="))
        self.reader.take(array, [np.arange(first, stop)], out)
        return out.reshape(stop - first)

    def _ends(self, name: str) -> Ids:
        """Where episodes end, counts of rows, int64 ``[N]``, each once."""
        array, why = storable(self.hierarchy, name)
        if array is None or not self._counts(array) or array.shape[0] > self.rows + 1:
            got = why if array is None else f"{array.dtype}{list(array.shape)}"
            raise SourceError(
                f"{self.source.location}: {name!r} must have at most {self.rows} "
                f"integers, one an episode, got {got}. Name another array with "
                "episode_ends=."
            )
        stored_ends: NDArray[np.integer[Any]] = self._read(array, 0, array.shape[0])  # type: ignore[assignment]  # as just looked at
        ends = stored_ends.astype(np.int64)
        # The stored numbers are checked too: one past 2**63 is another one as int64.
        outside = (stored_ends < 0) | (stored_ends > self.rows)
        wrong = np.flatnonzero(outside | (np.diff(ends, prepend=0) < 0))
        if len(wrong):
            at = int(wrong[0])
            raise SourceError(
                f"{self.source.location}: {name!r} must rise up to at most {self.rows} "
                f"rows, got {int(stored_ends[at])} at index {at}. The group is damaged "
                "or truncated: restore it from a copy."
            )
        last_rows = np.unique(ends[ends > 0])
        self.notes.note(
            f"{len(last_rows):,} episodes end where {name!r} says, their last step "
            f"{self.source.ends} where no array tells it"
        )
        if len(last_rows) < len(ends):
            self.notes.note(f"{len(ends) - len(last_rows):,} episodes without a row")
        return last_rows

    def _changes(self, name: str, array: ForeignArray) -> Ids:
        """Ends before rows whose number differs from the one before, and the last."""
        changes, found = EpisodeChanges(name), []
        for number, block in enumerate(self._blocks(array)):
            changed = changes.of({name: block})
            assert changed is not None
            found.append(np.flatnonzero(changed) + number * BLOCK_ROWS)
        changes.add_doubts(self.notes)
        return np.concatenate([*found, [self.rows]])

    def _blocks(self, array: ForeignArray) -> Iterator[Array]:
        """Yield the values of a column of one value a row."""
        for first in range(0, self.rows, BLOCK_ROWS):
            yield self._read(array, first, min(first + BLOCK_ROWS, self.rows))

    def _flags(
        self, plain: InferredColumns, columns: Mapping[str, ForeignArray], ends: Ids | None
    ) -> NDArray[np.uint8]:
        """Flags of every row."""
        flags = np.zeros(self.rows, np.uint8)
        inner = 0
        for first in range(0, self.rows, BLOCK_ROWS) if plain.ends else ():
            stop = min(first + BLOCK_ROWS, self.rows)
            step_ends = plain.ends_of(
                {p: self._read(columns[p], first, stop) for p in plain.ends.values()},
                stop - first,
                first,
            )
            block_flags = flags[first:stop]
            block_flags[step_ends["terminated"]] |= TERMINATED
            block_flags[step_ends["truncated"]] |= TRUNCATED
        if ends is not None:
            last = np.zeros(self.rows, bool)
            last[ends - 1] = True
            inner = int(((flags != 0) & ~last).sum())
            flags[~last] = 0
            untold = last & (flags == 0)
            flags[untold] = TERMINATED if self.source.ends == "terminated" else TRUNCATED
        if inner:
            self.notes.doubt(
                f"{inner:,} steps end within what the group calls one episode, and "
                "were not taken as ends"
            )
        over = np.flatnonzero(flags[:-1]) + 1
        flags[over] |= START
        flags[0] |= START
        if ends is not None and (not len(ends) or ends[-1] < self.rows):
            left = self.rows - (int(ends[-1]) if len(ends) else 0)
            self.notes.doubt(
                f"{left:,} rows stand behind the last end: an episode that was cut off"
            )
        return flags

    def _with_ends(self, schema: Schema) -> Schema:
        """The schema with fields of both ends, where their names are free."""
        for role in ENDS:
            if schema.role(role) is None and role not in schema:
                schema = schema.with_field(role, Field((), "bool"))
        return schema

    def _note_names(self, schema: Schema) -> None:
        if self.source.fields is None and any(
            name.startswith(DATA) for name in self.hierarchy.arrays
        ):
            self.notes.note(f"names of fields are those of arrays without {DATA!r}")
        if schema.role("observation") and not schema.role("next_observation"):
            self.notes.note(
                "there are as many observations as actions: what was seen after the "
                "last step of an episode is not known, and a truncated one "
                "is not drawn where it is needed"
            )


def array_paths(source: ZarrSource) -> dict[str, str]:
    """Return the paths that a group's fields would have, by the names of arrays."""
    blobs = source.open()
    try:
        mapper = GroupMapper(hierarchy.read(blobs), source, ChunkedReader(blobs))
        return mapper.paths()
    finally:
        blobs.close()
