"""Memories of skrl and rofunc, read: tensors ``[memory_size, num_envs, size]``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.array_file import ArrayColumn, Scan
from mmreplay.convert.base import Block, Notes, Reader
from mmreplay.convert.description import TAKEN, Description
from mmreplay.convert.interleaved import InterleavedReader
from mmreplay.convert.skrl import is_float
from mmreplay.convert.undescribed import PlainReader
from mmreplay.disk.files import File
from mmreplay.errors import SchemaError, SourceError
from mmreplay.schema.naming import ROLE_NAMES

THEIRS = re.compile(r"\d\d-\d\d-\d\d_\d\d-\d\d-\d\d-\d+_memory_0x[0-9a-f]+\.\w+")
SCAN_NBYTES = 1 << 20

Ids = NDArray[np.int64]


def recognizes(path: Path) -> bool:
    """Whether skrl or rofunc named a file."""
    return THEIRS.fullmatch(path.name) is not None


def is_nan(column: NDArray[np.generic], dtype: str) -> NDArray[np.bool_]:
    """Rows that are NaN all over, bool ``[N]``, of a column ``[N, *size]``."""
    flat = column.reshape(len(column), -1)
    if dtype == "bfloat16":
        nan: NDArray[np.bool_] = (flat.view(np.uint16) & np.uint16(0x7FFF)) > 0x7F80
    else:
        nan = np.isnan(flat)
    whole: NDArray[np.bool_] = np.logical_and.reduce(nan, 1)
    return whole


class SkrlReader(Reader):
    """Reads such a file; see `Reader`."""

    def __init__(
        self,
        file: File,
        columns: Mapping[str, ArrayColumn],
        notes: Notes,
        size: int | None = None,
        cursor: int | None = None,
    ) -> None:
        """Read tensors ``[memory_size, num_envs, *size]``.

        Args:
            file: Closed with the reader.
            columns: They.
            notes: What was found so far.
            size: Steps that were written; found by the NaNs after them by default.
            cursor: The step that would have been written next: in a memory that is
                full the oldest one, otherwise behind the newest.
        """
        self.report = notes
        self._length, self._num_envs = _common(columns, file)
        self._columns = {
            name: _flat(name, column)
            for name, column in columns.items()
            if name not in TAKEN
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
        self._dealt = InterleavedReader(plain, stop, start)
        self._tell(size, cursor)

    def _checked(self, what: str, number: int | None, most: int) -> int | None:
        if number is not None and (type(number) is not int or not 0 <= number <= most):
            raise SchemaError(
                f"{what}: got {number!r}, expected an integer in [0, {most}] as the "
                f"memory has {self._length} steps; leave it out if you do not know it"
            )
        return number

    def _begin(self, cursor: int) -> int:
        """The oldest step of a memory that was never filled.

        Raises:
            SchemaError: Its cursor is not where the steps stop.
        """
        if cursor != int(self._stop.max()):
            raise SchemaError(
                f"cursor: got {cursor} for a memory with {int(self._stop.min())} of "
                f"{self._length} steps, expected a full one, or their number; leave "
                "it out"
            )
        return 0

    def _is_written(self, first: int, stop: int) -> NDArray[np.bool_]:
        """Whether rows of all environments in turns are steps, bool ``[N]``."""
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
                    "no float tensor tells which steps were never written: all were "
                    "taken; tell how many by size="
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

    def _tell(self, size: int | None, cursor: int | None) -> None:
        report, steps = self.report, self._dealt.describe().stop
        report.note(
            f"skrl's layout: {self._num_envs} environments of {self._length:,} steps"
        )
        left = int((self._length - steps).sum())
        if left:
            why = "size= says so" if size is not None else "all their floats are NaN"
            report.note(f"{left:,} steps that were never written were left out: {why}")
        elif size is None and cursor is None:
            report.doubt(
                "the memory is full, and no cursor tells its oldest step: it was taken "
                "to be the first; tell it by cursor="
            )

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._dealt.describe()

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        return self._dealt.blocks(rows_per_block)

    def close(self) -> None:
        """See `Reader.close`."""
        self._dealt.close()


def _common(columns: Mapping[str, ArrayColumn], file: File) -> tuple[int, int]:
    """memory_size and num_envs of all tensors.

    Raises:
        SourceError: They differ, or there is none.
    """
    leads = {column.shape[:2] for column in columns.values() if len(column.shape) > 1}
    flat = [name for name, column in columns.items() if len(column.shape) < 2]
    if len(leads) != 1 or flat or 0 in next(iter(leads)):
        told = {name: list(column.shape) for name, column in columns.items()}
        raise SourceError(
            f"{file.path} holds arrays of shapes {str(told)[:300]}, expected all "
            "[memory_size, num_envs, ...] alike as skrl saves them; leave layout out"
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
