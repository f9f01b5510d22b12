"""Where the rows that transforms read lie, in the files and in what is returned.

A plan is made once for a buffer and a list of transforms. Each draw then finds the
rows around its steps, reads their fields and sums rewards by as few calls as can be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.storage.gather import ColumnLayouts
from mmreplay.storage.layout import record_layout
from mmreplay.storage.store import Store
from mmreplay.transforms.base import Asked, Direct, FoundRows, Sums
from mmreplay.transforms.base_steps import Where

Fields = dict[str, Any]
"""An array by path; `Ragged` of a field that varies, once its values are read."""
Ids = NDArray[np.int64]
INT64, BOOL = np.dtype(np.int64), np.dtype(np.bool_)
"""Passed as dtypes, which numpy need not look up."""
Read = Callable[[tuple[str, ...], Ids, Ids, Ids], Fields]
"""Copies stored fields of rows at positions, below the heads given last."""
BATCH = Where((), (), False)
"""In place of rows, where fields go that batches hold as they are."""
_kernel = kernels.load("steps")


@dataclass(slots=True)
class FieldRead:
    """A field that is read of some rows, and where it goes.

    Attributes:
        path: The field.
        where: The rows.
        into: The rows that it is returned as a column of, or `BATCH`.
        key: Its name there.
        width: Rows of each step.
        alone: Whether it has no axis of rows: batches hold it, of one row each.
    """

    path: str
    where: Where
    into: Where
    key: str
    width: int = field(init=False)
    alone: bool = field(init=False)

    def __post_init__(self) -> None:
        """Each draw looks these up: a property would be a call, which counts."""
        self.width = len(self.where.ahead)
        self.alone = self.into is BATCH and self.width == 1


@dataclass(frozen=True, slots=True)
class ReadColumn:
    """One of the rows around each step, as `kernels.steps.fold_steps` takes it.

    Attributes:
        ahead: See `Where`, as the next two.
        back: See `Where`.
        beyond: See `Where`.
        start: Column of the first row that is read with it.
        width: How many are read with it, itself included.
        at: Which of them it is.
    """

    ahead: int
    back: int
    beyond: bool
    start: int
    width: int
    at: int


@dataclass(frozen=True, slots=True)
class ReadMark:
    """A flag that is looked for in the rows of a column, for `fold_steps` too.

    Attributes:
        column: The column.
        flag: The flag.
        start: Mark of the first row that is looked at with it.
        width: How many are looked at with it, itself included.
        at: Which of them it is.
    """

    column: int
    flag: int
    start: int
    width: int
    at: int


@dataclass(frozen=True, slots=True)
class ApartRead:
    """Fields that no record holds, read of the same rows.

    Attributes:
        rows: The rows, of those that `fold_steps` finds.
        paths: Each field once.
        reads: Where they go.
    """

    rows: slice
    paths: tuple[str, ...]
    reads: Sequence[FieldRead]


class ReadTables:
    """What `fold_steps` is asked to find, and where each field is read from.

    Attributes:
        columns: The rows around each step.
        marks: The flags looked for in them.
        num_packed: How many of the columns are of rows whose records are read.
        layout: Fields that records hold, and those that are summed as they are read,
            as `ColumnLayouts` takes them.
        summed: The latter.
        packed: Of each of layout, in order, where it goes.
        marked: Ends that flags tell, each with its rows of what `fold_steps` finds.
        truncated: Truncated ends of agents, to which a flag of the next row adds.
        apart: Fields that no records hold.
    """

    def __init__(
        self, packed: Container[str], served: Mapping[str, int], truncated_path: str | None
    ) -> None:
        """Begin without rows.

        Args:
            packed: Paths of the fields that records hold.
            served: See `ReadPlan`, as for the next one.
            truncated_path: See `ReadPlan`.
        """
        self._in_records, self._served, self._truncated_path = packed, served, truncated_path
        self.columns: list[ReadColumn] = []
        self.marks: list[ReadMark] = []
        self.num_packed = 0
        self.layout: list[tuple[str, int, int | None]] = []
        self.summed: list[tuple[str, int, np.dtype[np.generic]]] = []
        self.packed: list[FieldRead] = []
        self.marked: list[tuple[FieldRead, slice]] = []
        self.truncated: list[FieldRead] = []
        self.apart: list[ApartRead] = []

    def add_all(self, wanted: Mapping[Where, Sequence[FieldRead]], sums: Sums) -> None:
        """Read fields of rows of each step, and sum those of them that records hold."""
        added = [path for path in sums.dtypes if path in self._in_records]
        of_records = {
            where
            for where, reads in wanted.items()
            if (added and where is sums.where) or any(r.path in self._in_records for r in reads)
        }
        # Rows of records first: the disk is asked for all of them at once.
        for where in sorted(wanted, key=lambda w: w not in of_records):
            start = self.add(where, wanted[where])
            if where is sums.where:
                self.summed = [(path, start, sums.dtypes[path]) for path in added]
        self.num_packed = sum(len(where.ahead) for where in of_records)

    def add(self, where: Where, reads: Iterable[FieldRead]) -> int:
        """Read fields of some rows of each step.

        Returns:
            Column of the first of the rows.
        """
        start, apart = self._add_rows(where), []
        for read in reads:
            if read.path == self._truncated_path:
                self.truncated.append(read)
            elif read.path in self._served:
                self._add_served(read, start)
            elif read.path in self._in_records:
                self._add_packed(read, start)
            else:
                apart.append(read)
        if apart:
            self._add_apart(apart, start)
        return start

    def _add_rows(self, where: Where) -> int:
        start, width = len(self.columns), len(where.ahead)
        self.columns += [
            ReadColumn(ahead, back, where.beyond, start, width, at)
            for at, (ahead, back) in enumerate(zip(where.ahead, where.back, strict=True))
        ]
        return start

    def _add_served(self, read: FieldRead, start: int) -> None:
        """Read an end from a flag of the rows that begin at a column."""
        flag, first, width = self._served[read.path], len(self.marks), read.width
        self.marks += [ReadMark(start + at, flag, first, width, at) for at in range(width)]
        # The first array of ends says whether the last step terminated.
        self.marked.append((read, slice(1 + first, 1 + first + width)))

    def _add_packed(self, read: FieldRead, start: int) -> None:
        """Read a field from the records of the rows that begin at a column."""
        self.layout.append((read.path, start, None if read.alone else read.width))
        self.packed.append(read)

    def _add_apart(self, reads: Sequence[FieldRead], start: int) -> None:
        """Read fields that no record holds, of the rows that begin at a column."""
        # The first three arrays of rows are bounds; see `fold_steps`.
        rows = slice(3 + start, 3 + start + reads[0].width)
        self.apart.append(ApartRead(rows, tuple(dict.fromkeys(r.path for r in reads)), reads))

    def numbered(self, made: Iterable[str]) -> dict[Where, list[tuple[str, str]]]:
        """Numbers and names of the columns that the kernel writes, by where they go.

        Args:
            made: Names of the sums and of the discount, which come after the fields.
        """
        targets = [(read.into, read.key) for read in self.packed]
        found: dict[Where, list[tuple[str, str]]] = {}
        for at, (into, key) in enumerate([*targets, *((BATCH, name) for name in made)]):
            found.setdefault(into, []).append((str(at), key))
        return found

    @staticmethod
    def table(lines: Iterable[ReadColumn] | Iterable[ReadMark]) -> Ids:
        """Columns or marks as `fold_steps` takes them, int64 without axes."""
        return np.array([astuple(line) for line in lines], np.int64).reshape(-1)


class ReadPlan:
    """Where fields of rows around steps lie, in the files and in what is returned.

    A plan holds the store and not the reader, which holds the transforms that keep
    the plan.
    """

    def __init__(
        self,
        store: Store,
        served: Mapping[str, int],
        truncated_path: str | None,
        before: int,
        steps: int,
        direct: Direct,
        asked: Asked,
        sums: Sums | None,
    ) -> None:
        """Lay out what each draw reads; see `transforms.base.BufferRows.plan`.

        Args:
            store: The rows.
            served: Path of each end that is read from flags, and its flag.
            truncated_path: Path of the truncated ends of agents, to which a flag of
                the next row adds; None without them.
            before: Rows before a step that may be read.
            steps: Steps folded into one.
            direct: What batches hold as it is stored.
            asked: What is read of each draw.
            sums: What is summed for it.
        """
        self._store = store
        if sums is None:
            sums = Sums(Where((), (), False), np.ones(steps + 1), {}, None)
        self._sums = sums
        records = store.records
        packed = frozenset[str]() if records is None else store.packed
        # Sums of packed fields are made as the fields are read, others afterwards.
        self._added = tuple(path for path in sums.dtypes if path not in packed)

        tables = ReadTables(packed, served, truncated_path)
        tables.add_all(_wanted(direct, asked, sums, self._added), sums)
        self._num_packed = tables.num_packed
        self._fixed = (
            *store.ring.shape,
            before,
            steps,
            tables.table(tables.columns),
            tables.table(tables.marks),
        )
        summed_rows = [sums.where] if self._added else []
        self._targets = tuple(dict.fromkeys((BATCH, *asked, *summed_rows)))
        self._rows, self._ends = 3 + len(tables.columns), 1 + len(tables.marks)
        self._marked, self._truncated, self._apart = tables.marked, tables.truncated, tables.apart

        self._records = records if tables.layout or tables.summed else None
        # The kernel that reads records makes the discount too; else it is made after.
        made = [path for path, _, _ in tables.summed]
        self._discount = sums.discount
        if self._records is not None and sums.discount is not None:
            made.append(sums.discount)
            self._discount = None
        self._packed = tuple(tables.numbered(made).items())
        record = record_layout(store.schema).record
        here = self._discount is not sums.discount
        self._layout = ColumnLayouts(record, tables.layout, tables.summed, here)

    def find(self, env_ids: Ids, positions: Ids, heads: Ids, read: Read) -> FoundRows:
        """Find the boundaries around steps, and read.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, legal starts.
            heads: int64 ``[E]``; rows below are written.
            read: Copies stored fields of rows below heads: of truncated ends of
                agents, which depend on the flags of the next row too.
        """
        store, count = self._store, len(positions)
        rows_found = np.empty((self._rows, count), INT64)
        ends = np.empty((self._ends, count), BOOL)
        env_ids = np.ascontiguousarray(env_ids)
        positions = np.ascontiguousarray(positions)
        found: dict[Where, Fields] = {into: {} for into in self._targets}
        if self._records is None:
            _kernel.fold_steps(
                store.all_flags, env_ids, positions, heads, *self._fixed, rows_found, ends
            )
        else:
            packed = self._records.fold_fields(
                store.all_flags,
                env_ids,
                positions,
                heads,
                self._fixed,
                self._num_packed,
                rows_found,
                ends,
                self._layout,
                self._sums.powers,
            )
            for into, numbered in self._packed:
                target = found[into]
                for number, key in numbered:
                    target[key] = packed[number]
        for part in self._apart:
            rows = rows_found[part.rows].reshape(-1)
            store.prefetch(rows, part.paths, now=True)
            gathered = store.gather(rows, part.paths)
            for want in part.reads:
                array = gathered[want.path]
                if not want.alone:
                    array = array.reshape(count, want.width, *array.shape[1:])
                found[want.into][want.key] = array
        for want, marks in self._marked:
            flags = ends[marks]
            found[want.into][want.key] = (
                flags[0] if want.alone else flags.reshape(count, want.width)
            )
        for want in self._truncated:
            where = want.where
            ahead = positions[:, None] + np.array(where.ahead)
            cap = rows_found[2 if where.beyond else 1]
            rows = np.minimum(ahead, cap[:, None]) - np.array(where.back)
            rows = np.maximum(rows, rows_found[0][:, None]).reshape(-1)
            ids = np.repeat(env_ids, want.width)
            array = read((want.path,), ids, rows, heads)[want.path]
            if not want.alone:
                array = array.reshape(count, want.width, *array.shape[1:])
            found[want.into][want.key] = array
        if self._added or self._discount is not None:
            self._sum(positions, rows_found[1], ends[0], found)
        fields = found[BATCH]
        del found[BATCH]  # by no call, of which small batches make few
        return FoundRows(rows_found, ends[0], fields, found)

    def _sum(
        self,
        positions: Ids,
        last: Ids,
        terminated: NDArray[np.bool_],
        columns: Mapping[Where, Fields],
    ) -> None:
        """Sum fields that no records hold, and make the discount if none did."""
        sums, fields = self._sums, columns[BATCH]
        for path in self._added:
            values = np.ascontiguousarray(columns[sums.where][path])
            shape = (len(positions), *values.shape[2:])
            total = np.empty(shape, sums.dtypes[path])
            _kernel.weighted_sums(
                positions, last, sums.powers[:-1], values, values.itemsize, total, total.itemsize
            )
            fields[path] = total
        if self._discount is not None:
            discount = np.empty(len(positions), np.float32)
            _kernel.discounts(positions, last, sums.powers, terminated, discount)
            fields[self._discount] = discount


def _wanted(
    direct: Direct, asked: Asked, sums: Sums, summed_apart: tuple[str, ...]
) -> dict[Where, list[FieldRead]]:
    """What is read of which rows, those of sums included, which may be read of none."""
    wanted: defaultdict[Where, list[FieldRead]] = defaultdict(list)
    for where, names in direct.items():
        wanted[where] += [FieldRead(path, where, BATCH, name) for path, name in names.items()]
    for where, paths in asked.items():
        wanted[where] += [FieldRead(path, where, where, path) for path in paths]
    if sums.dtypes:
        where = sums.where
        wanted[where] += [FieldRead(path, where, where, path) for path in summed_apart]
    return wanted
