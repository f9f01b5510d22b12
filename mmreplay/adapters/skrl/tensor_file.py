"""Tensors of skrl's and rofunc's memories in npz and pt files.

Each tensor is ``[memory_size, num_envs, *size]``. Steps that were not written yet are
NaN in floats. Files written here are chronological: each environment starts at row 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.array_file import ArrayColumn, FilePlan, Kinds, Scan, bytes_of
from mmreplay.convert.base import Block, Notes, Reader, doubt_priorities, refuse_empty
from mmreplay.convert.description import RESERVED_NAMES, Description
from mmreplay.convert.episode_ends import Marks
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.convert.undescribed import PlainReader
from mmreplay.convert.zip_file import move_bytes
from mmreplay.disk.files import COPY_ON_WRITE, File, file_system
from mmreplay.episodes import FINAL, TERMINATED, TRUNCATED
from mmreplay.errors import SchemaError, SourceError, undone_by
from mmreplay.schema.dtypes import storage_dtype
from mmreplay.schema.naming import ROLE_NAMES
from mmreplay.schema.source_names import OwnNames

LAYOUT = "skrl's layout"
# More than the most that a header, padded, may be longer before than after.
SLACK_NBYTES = 128
SCAN_NBYTES = 1 << 20
Ids = NDArray[np.int64]
MakePlan = Callable[[Kinds], FilePlan]
"""Plans a file of steps ``[num_envs, *size]``."""


class SkrlReader(Reader):
    """Reads such a file; see `Reader`."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, ArrayColumn],
        notes: Notes,
        size: int | None = None,
        cursor: int | None = None,
        own_names: OwnNames | None = None,
    ) -> None:
        """Read tensors ``[memory_size, num_envs, *size]``.

        Args:
            file: Closed with the reader.
            columns: They.
            notes: What was found so far.
            size: Steps that were written; found by the NaNs after them by default.
            cursor: The step that would have been written next: in a memory that is
                full the oldest one, otherwise behind the newest.
            own_names: See `Reader.own_names`.
        """
        self._own_names = own_names or {}
        self.report = notes
        self._length, self._num_envs = _common(columns, file)
        self._columns = {
            name: _flat(name, column)
            for name, column in columns.items()
            if name not in RESERVED_NAMES
        }
        start = self._checked("cursor", cursor, self._length - 1) or 0
        size = self._checked("size", size, self._length)
        if size is None:
            stop = self._written(full=cursor is not None)
        else:
            stop = np.full(self._num_envs, size)
        self._stop = stop
        if cursor is not None and (stop < self._length).any():
            start = self._begin(cursor)
        plain = PlainReader(file, self._columns, notes, self._is_written)
        self._interleaved = InterleavedReader(plain, stop, start)
        self._add_notes(size, cursor)

    def _checked(self, what: str, number: int | None, maximum: int) -> int | None:
        if number is not None and (type(number) is not int or not 0 <= number <= maximum):
            raise SchemaError(
                f"{what} must be an integer in [0, {maximum}], since the memory has "
                f"{self._length} steps, got {number!r}. Leave it out if you do not "
                "know it."
            )
        return number

    def _begin(self, cursor: int) -> int:
        """The oldest step of a memory that was never filled.

        Raises:
            SchemaError: Its cursor is not where the steps stop.
        """
        if cursor != int(self._stop.max()):
            raise SchemaError(
                f"cursor must be {int(self._stop.min())} in a memory with that many of "
                f"{self._length} steps, got {cursor}. Leave it out."
            )
        return 0

    def _is_written(self, first: int, stop: int) -> NDArray[np.bool_]:
        """Return whether rows of all environments in turns are steps, bool ``[N]``."""
        steps, env_ids = np.divmod(np.arange(first, stop), self._num_envs)
        written: NDArray[np.bool_] = steps < self._stop[env_ids]
        return written

    def _written(self, *, full: bool) -> Ids:
        """Steps of each environment before those that are NaN all over.

        Args:
            full: The memory is full where no float tells otherwise.
        """
        floats = {n: c for n, c in self._columns.items() if is_float(c.dtype)}
        if not floats:
            if not full:
                self.report.doubt(
                    "no float tensor marks steps that were never written: all were "
                    "read; pass size= with their number"
                )
            return np.full(self._num_envs, self._length)
        stop = np.zeros(self._num_envs, np.int64)
        nbytes = sum(column.row_nbytes for column in floats.values())
        count, done = self._length * self._num_envs, 0
        for found in Scan(floats, max(1, SCAN_NBYTES // nbytes), count).blocks():
            empty = np.logical_and.reduce(
                [is_nan(found[name], floats[name].dtype) for name in floats]
            )
            number = np.flatnonzero(~empty) + done
            np.maximum.at(stop, number % self._num_envs, number // self._num_envs + 1)
            done += len(empty)
        return stop

    def _add_notes(self, size: int | None, cursor: int | None) -> None:
        report, steps = self.report, self._interleaved.describe().stop
        report.note(f"skrl's layout: {self._num_envs} environments of {self._length:,} steps")
        left = int((self._length - steps).sum())
        if left:
            why = "size= says so" if size is not None else "all their floats are NaN"
            report.note(f"{left:,} steps that were never written were left out: {why}")
        elif size is None and cursor is None:
            report.doubt(
                "the memory is full, and the file does not say which step is the "
                "oldest: the first was taken; pass cursor="
            )

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._interleaved.describe()

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._own_names

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        return self._interleaved.blocks(rows_per_block)

    def close(self) -> None:
        """See `Reader.close`."""
        self._interleaved.close()


class SkrlWriter(StagedWriter):
    """Writes such a file; see `Writer`.

    The number of steps is known when all rows are in, final rows being none. Until
    then every tensor has room for more; then tensors are moved together.
    """

    def __init__(
        self, target: Path, description: Description, make_plan: MakePlan, overwrite: bool
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._make_plan = make_plan
        self._description = description
        doubt_priorities(self.notes, description, LAYOUT)
        fields = description.schema.fields
        self._dtypes = {path: fields[path].dtype for path in sorted(fields)}
        self._sizes = {path: fields[path].shape or (1,) for path in self._dtypes}
        self._counts = np.zeros(description.num_envs, np.int64)
        most = int((description.stop - description.first).max())
        plan = make_plan(self._kinds(most))
        self._offsets = {
            path: plan.spans[path].offset + SLACK_NBYTES * (number + 1)
            for number, path in enumerate(self._dtypes)
        }
        self._finals = 0
        self._file: File | None = None
        self._staging = Staging(target, overwrite=overwrite)
        with undone_by(self.abort):
            self._file = self._staging.open(plan.nbytes + SLACK_NBYTES * (len(self._dtypes) + 1))
            scattered = description.num_envs > 1
            if scattered and file_system(self._staging.path) not in COPY_ON_WRITE:
                self._file.map_writable()

    @property
    def steps(self) -> int:
        """Steps of the environment that has most."""
        return int(self._counts.max())

    @property
    def cells(self) -> int:
        """Number of cells of those steps, without the empty cells of the last step.

        As skrl counts them: the empty cells are those of the last environments.
        """
        left_out = np.flatnonzero(self._counts[::-1] == self.steps)
        return self.steps * len(self._counts) - int(left_out[0])

    def _kinds(self, count: int) -> Kinds:
        lead = (count, self._description.num_envs)
        return {path: (dtype, (*lead, *self._sizes[path])) for path, dtype in self._dtypes.items()}

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        steps = (block.flags & FINAL) == 0
        self._finals += len(block) - int(steps.sum())
        for env_id in np.unique(block.env_ids).tolist():
            part = block.select(steps & (block.env_ids == env_id))
            for path in self._dtypes:
                column = part.columns[path].reshape(len(part), *self._sizes[path])
                self._put(path, int(self._counts[env_id]), env_id, column)
            self._counts[env_id] += len(part)

    def _put(self, path: str, first: int, env_id: int, column: NDArray[np.generic]) -> None:
        """Write steps of one environment from a step on."""
        assert self._file is not None
        num_envs = len(self._counts)
        nbytes = column.itemsize * int(np.prod(column.shape[1:]))
        offset = self._offsets[path] + (first * num_envs + env_id) * nbytes
        if num_envs == 1:
            self._file.pwrite(bytes_of(column), offset)
            return
        if self._file.mapping is None:
            for number, row in enumerate(column):
                self._file.pwrite(bytes_of(row), offset + number * num_envs * nbytes)
            return
        start = self._offsets[path] + first * num_envs * nbytes
        count = len(column) * num_envs * nbytes
        view = np.frombuffer(self._file.mapping, np.uint8, count, start)
        try:
            cells = view.reshape(len(column), num_envs, nbytes)
            given = np.frombuffer(bytes_of(column), np.uint8)
            cells[:, env_id] = given.reshape(len(column), nbytes)
        finally:
            # A mapping is not closed while an array looks at it.
            del view, cells

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        steps = self.steps
        refuse_empty(steps, LAYOUT)
        for path, dtype in self._dtypes.items():
            self._fill(path, dtype, steps)
        plan = self._make_plan(self._kinds(steps))
        sums = {}
        for path in self._dtypes:
            span = plan.spans[path]
            nbytes = steps * span.row_nbytes
            sums[path] = move_bytes(
                self._file, self._offsets[path], span.offset, nbytes, span.start
            )
        for offset, data in plan.around(sums):
            self._file.pwrite(data, offset)
        self._file.resize(plan.nbytes)
        self._file.close()
        self._add_notes(steps)
        self.nbytes = self._staging.publish()

    def _fill(self, path: str, dtype: str, steps: int) -> None:
        """Fill what no step came for as skrl does: floats by NaN, others by 0."""
        value = nan_of(dtype) if is_float(dtype) else storage_dtype(dtype).type(0)
        for env_id, count in enumerate(self._counts.tolist()):
            for first in range(count, steps, 1024):
                size = (min(1024, steps - first), *self._sizes[path])
                self._put(path, first, env_id, np.full(size, value))

    def _add_notes(self, steps: int) -> None:
        if self._finals:
            self.notes.note(
                f"{self._finals:,} final observations were left out: skrl's layout has "
                "steps only; store next observations as a field to keep them"
            )
        if (self._counts < steps).any():
            self.notes.note(
                "environments hold different numbers of steps: cells without one are "
                "NaN in floats, 0 in other tensors"
            )
        self.notes.note("positions, flags, schema and statistics were left out")


class InterleavedReader(Reader):
    """Deals the rows of a reader of one environment out to several; see `Reader`.

    Episode ends are those of the reader; starts are derived again.
    """

    def __init__(self, reader: Reader, stop: Ids, start: int = 0) -> None:
        """Wrap a reader, which is closed with this one.

        Args:
            reader: Of one environment, ``rows`` step by step.
            stop: int64 ``[E]``, steps of each environment; later ones are left out.
            start: The oldest step, of a ring that is full.
        """
        self.report = reader.report
        self._reader = reader
        self._start, self._stop = start, stop
        described = reader.describe()
        self._length = -(-described.rows // len(stop))
        self._description = replace(
            described, first=np.zeros_like(stop), stop=stop, capacity=max(1, self._length)
        )

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        marks = Marks(len(self._stop))
        # From the oldest step on, and then those before it.
        yield from self._pass(marks, rows_per_block, self._start, self._length)
        if self._start:
            yield from self._pass(marks, rows_per_block, 0, self._start)

    def _pass(self, marks: Marks, rows: int | None, first: int, stop: int) -> Iterator[Block]:
        for block in self._reader.blocks(rows):
            steps, env_ids = np.divmod(block.positions, len(self._stop))
            kept = (steps >= first) & (steps < stop) & (steps < self._stop[env_ids])
            if kept.any():
                part, ids = block.select(kept), env_ids[kept]
                positions = (steps[kept] - self._start) % self._length
                yield Block(part.columns, ids, positions, _flags(part, ids, marks))

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


def rows_per_environment(rows: int, num_envs: int) -> Ids:
    """Steps that each environment has of so many rows, int64 ``[E]``."""
    return (rows + num_envs - 1 - np.arange(num_envs)) // num_envs


def is_float(dtype: str) -> bool:
    """Return whether a dtype has NaNs, which stand where nothing was written."""
    return dtype == "bfloat16" or dtype.startswith("float")


def is_nan(column: NDArray[np.generic], dtype: str) -> NDArray[np.bool_]:
    """Rows that are NaN all over, bool ``[N]``, of a column ``[N, *size]``."""
    flat = column.reshape(len(column), -1)
    if dtype == "bfloat16":
        nan: NDArray[np.bool_] = (flat.view(np.uint16) & np.uint16(0x7FFF)) > 0x7F80
    else:
        nan = np.isnan(flat)
    whole: NDArray[np.bool_] = np.logical_and.reduce(nan, 1)
    return whole


def nan_of(dtype: str) -> np.generic:
    """A NaN as a file stores it."""
    if dtype == "bfloat16":
        return np.uint16(0x7FC0)
    return storage_dtype(dtype).type(np.nan)


def refuse_dtypes(description: Description, what: str, *dtypes: str) -> None:
    """Refuse fields of dtypes that a file without a description cannot name.

    Raises:
        SchemaError: There is one.
    """
    for path, field in description.schema.fields.items():
        if field.dtype in dtypes:
            raise SchemaError(
                f"field {path!r}: skrl's layout cannot store {field.dtype} in {what}. "
                "Leave it out with fields=, or write pt."
            )


def _common(columns: Mapping[str, ArrayColumn], file: File) -> tuple[int, int]:
    """memory_size and num_envs of all tensors.

    Raises:
        SourceError: They differ, or there is none.
    """
    leads = {column.shape[:2] for column in columns.values() if len(column.shape) > 1}
    flat = [name for name, column in columns.items() if len(column.shape) < 2]
    if len(leads) != 1 or flat or 0 in next(iter(leads)):
        shapes = {name: list(column.shape) for name, column in columns.items()}
        raise SourceError(
            f"{file.path}: all arrays must have shape [memory_size, num_envs, ...] as "
            f"skrl saves them, got {str(shapes)[:300]}. Leave layout out."
        )
    length, num_envs = leads.pop()
    return length, num_envs


def _flat(name: str, column: ArrayColumn) -> ArrayColumn:
    """One row a step and environment; rewards and the like are single values."""
    length, num_envs, *size = column.shape
    single = any(name in ROLE_NAMES[r] for r in ("reward", "terminated", "truncated"))
    if size == [1] and single:
        size = []
    return replace(column, shape=(length * num_envs, *size))


def _flags(block: Block, env_ids: Ids, marks: Marks) -> NDArray[np.uint8]:
    terminated = (block.flags & TERMINATED) != 0
    truncated = (block.flags & TRUNCATED) != 0
    flags = np.zeros(len(block), np.uint8)
    for env_id in np.unique(env_ids).tolist():
        rows = env_ids == env_id
        flags[rows] = marks.mark(env_id, terminated[rows], truncated[rows])
    return flags
