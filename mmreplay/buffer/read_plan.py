"""Where the rows that transforms read lie, in the files and in what is returned.

A plan is made once for a buffer and a list of transforms. Each draw then finds the
rows around its steps, reads their fields and sums rewards by as few calls as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_Read = tuple[Where, str, str | None]
"""Where a field is read, its path, and its name if batches hold it as it is."""
Read = Callable[[tuple[str, ...], Ids, Ids, Ids], Fields]
"""Copies stored fields of rows at positions, below the heads given last."""
_kernel = kernels.load("steps")


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
        records = store.records
        packed = frozenset[str]() if records is None else store.packed
        self._wheres = tuple(asked)
        # Sums of packed fields are made as the fields are read, others afterwards.
        self._sums = sums
        dtypes = {} if sums is None else sums.dtypes
        added = tuple(path for path in dtypes if path in packed)
        self._added = tuple(path for path in dtypes if path not in packed)
        # What is read where, and its name, if it goes into the batch as it is.
        wanted: dict[Where, list[tuple[str, str | None]]] = {}
        for where, names in direct.items():
            wanted.setdefault(where, []).extend(names.items())
        for where, paths in asked.items():
            wanted.setdefault(where, []).extend((path, None) for path in paths)
        if sums is not None and dtypes:
            wanted.setdefault(sums.where, []).extend((path, None) for path in self._added)
            if self._added and sums.where not in asked:
                self._wheres += (sums.where,)
        read_here = {
            where
            for where, wants in wanted.items()
            if not packed.isdisjoint(path for path, _ in wants)
            or (sums is not None and added and where is sums.where)
        }
        columns: list[tuple[int, ...]] = []
        marks: list[tuple[int, ...]] = []
        layout: list[tuple[str, int, int | None]] = []
        summed: list[tuple[str, int, np.dtype[np.generic]]] = []
        self._fields: list[tuple[str, Where, str, str | None]] = []
        self._marked: list[tuple[_Read, int, int]] = []
        self._truncated: list[_Read] = []
        self._apart: list[tuple[int, int, tuple[str, ...], list[_Read]]] = []
        self._num_packed = 0
        # Rows of records first: the disk is asked for all of them at once.
        for where in sorted(wanted, key=lambda w: w not in read_here):
            start, width = len(columns), len(where.ahead)
            columns += [
                (ahead, back, where.beyond, start, width, at)
                for at, (ahead, back) in enumerate(zip(where.ahead, where.back, strict=True))
            ]
            if sums is not None and where is sums.where:
                summed = [(path, start, dtypes[path]) for path in added]
            if where in read_here:
                self._num_packed = len(columns)
            apart = []
            for path, name in wanted[where]:
                read = (where, path, name)
                if path == truncated_path:
                    self._truncated.append(read)
                elif path in served:
                    first = len(marks)
                    self._marked.append((read, first, width))
                    marks += [(start + at, served[path], first, width, at) for at in range(width)]
                elif path in packed:
                    self._fields.append((str(len(layout)), *read))
                    alone = name is not None and width == 1
                    layout.append((path, start, None if alone else width))
                else:
                    apart.append(read)
            if apart:
                paths = tuple(dict.fromkeys(path for _, path, _ in apart))
                self._apart.append((start, width, paths, apart))
        self._fixed = (
            *store.ring.shape,
            before,
            steps,
            np.array(columns, np.int64).reshape(-1),
            np.array(marks, np.int64).reshape(-1),
        )
        self._rows, self._ends = 3 + len(columns), 1 + len(marks)
        self._records = records if layout or summed else None
        # The kernel that reads records makes the discount too; else it is made after.
        discount = None if sums is None else sums.discount
        here = self._records is not None and discount is not None
        self._discount = None if here else discount
        made = [*added, str(discount)] if here else [*added]
        self._made = [(str(at), name) for at, name in enumerate(made, len(layout))]
        self._powers = np.ones(steps + 1) if sums is None else sums.powers
        record = record_layout(store.schema).record
        self._layout = ColumnLayouts(record, layout, summed, here)

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
        fields: Fields = {}
        around: dict[Where, Fields] = {where: {} for where in self._wheres}
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
                self._powers,
            )
            for number, where, path, name in self._fields:
                if name is None:
                    around[where][path] = packed[number]
                else:
                    fields[name] = packed[number]
            for number, name in self._made:
                fields[name] = packed[number]
        for start, width, paths, apart in self._apart:
            rows = rows_found[3 + start : 3 + start + width].reshape(-1)
            store.prefetch(rows, paths, now=True)
            gathered = store.gather(rows, paths)
            for where, path, name in apart:
                array = gathered[path]
                if name is None or width > 1:
                    array = array.reshape(count, width, *array.shape[1:])
                if name is None:
                    around[where][path] = array
                else:
                    fields[name] = array
        for (where, path, name), mark, width in self._marked:
            if name is None:
                flags = ends[1 + mark : 1 + mark + width]
                around[where][path] = flags.reshape(count, width)
            else:
                fields[name] = ends[1 + mark]
        for where, path, name in self._truncated:
            ahead = positions[:, None] + np.array(where.ahead)
            cap = rows_found[2 if where.beyond else 1]
            rows = np.minimum(ahead, cap[:, None]) - np.array(where.back)
            rows = np.maximum(rows, rows_found[0][:, None]).reshape(-1)
            ids = np.repeat(env_ids, len(where.ahead))
            array = read((path,), ids, rows, heads)[path]
            if name is None:
                around[where][path] = array.reshape(count, -1, *array.shape[1:])
            else:
                fields[name] = array
        if self._sums is not None and (self._added or self._discount is not None):
            self._sum(positions, rows_found[1], ends[0], around, fields)
        return FoundRows(rows_found, ends[0], fields, around)

    def _sum(
        self,
        positions: Ids,
        last: Ids,
        terminated: NDArray[np.bool_],
        around: Mapping[Where, Fields],
        fields: Fields,
    ) -> None:
        """Sum fields that no records hold, and make the discount if none did."""
        sums = self._sums
        assert sums is not None
        for path in self._added:
            values = np.ascontiguousarray(around[sums.where][path])
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
