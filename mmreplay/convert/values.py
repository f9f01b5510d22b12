"""Values of fields that vary, as files hold them: how many there are, and checks.

A writer that must know the size of its file before the first row asks `ValueSizes`,
which goes once over the lengths of a source's values, and not over the values where the
source can help it. Memory is that of a block, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import CorruptError, FormatError
from mmreplay.format.heap import aligned
from mmreplay.ragged import Ragged
from mmreplay.schema import Field, Schema

if TYPE_CHECKING:
    from mmreplay.convert.base import Block

MAX_ROW_NBYTES = 256 << 20
"""Of the largest row that is read: one row is in memory, whatever a file claims."""
VALUES_NBYTES = 8 << 20
"""Of the values of a block, unless one row takes more."""
Array = NDArray[np.int64]
Measure = Callable[[], "Iterator[Block]"]
"""Reads all rows in their order, with the lengths of values in place of the values."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows that follow each other in the order of the source.

    Attributes:
        rows: How many.
        totals: Items of their values, by path of each field that varies.
    """

    rows: int
    totals: dict[str, int]


class ValueSizes:
    """Sizes of the values of a source, measured when they are first asked for.

    Attributes:
        at_most: Upper bounds of these, where to measure them takes as long as to make
            the values; None elsewhere.
    """

    def __init__(
        self, measure: Measure, schema: Schema, num_envs: int, at_most: ValueSizes | None = None
    ) -> None:
        self.at_most = at_most
        self._measure, self._schema = measure, schema
        self._num_envs = num_envs
        self._totals: dict[str, int] | None = None
        self._heap_nbytes = np.zeros(num_envs, np.int64)
        self._longest: dict[str, int] = {}
        self._rows = 0

    def _measured(self) -> dict[str, int]:
        if self._totals is None:
            totals = dict.fromkeys(self._schema.varying, 0)
            longest = dict.fromkeys(self._schema.varying, 0)
            for block in self._measure():
                for path in totals:
                    lengths = lengths_of(block, path)
                    totals[path] += int(lengths.sum())
                    longest[path] = max(longest[path], int(lengths.max(initial=0)))
                nbytes = heap_nbytes(block, self._schema)
                np.add.at(self._heap_nbytes, block.env_ids, nbytes)
                self._rows += len(block)
            self._totals, self._longest = totals, longest
        return self._totals

    @property
    def totals(self) -> dict[str, int]:
        """Items of all values, by path."""
        return dict(self._measured())

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        fields = self._schema.fields
        return sum(n * fields[path].inner_nbytes for path, n in self.totals.items())

    @property
    def mean_lengths(self) -> dict[str, float]:
        """Items of the average value, by path."""
        totals = self._measured()
        return {path: total / max(1, self._rows) for path, total in totals.items()}

    @property
    def heap_nbytes(self) -> Array:
        """int64 ``[E]``, bytes that the values of each environment take in a heap."""
        self._measured()
        return self._heap_nbytes

    def heap_nbytes_from(self, first: Array) -> Array:
        """Bytes in a heap as `heap_nbytes`, of rows from some on, int64 ``[E]``."""
        found = np.zeros(self._num_envs, np.int64)
        for block in self._measure():
            rows = block.select(block.positions >= first[block.env_ids])
            np.add.at(found, rows.env_ids, heap_nbytes(rows, self._schema))
        return found

    def fitting(self, first: Array, heap_nbytes_: int) -> Array:
        """The oldest rows whose values, and those of all after them, fit into a heap.

        Args:
            first: int64 ``[E]``, rows below are left out in any case.
            heap_nbytes_: Bytes of the heap of each environment.

        Returns:
            int64 ``[E]``, at least first.
        """
        fitting = first.copy()
        over = self.heap_nbytes - heap_nbytes_
        if (over <= 0).all():
            return fitting
        gone = np.zeros(self._num_envs, np.int64)
        for block in self._measure():
            nbytes = heap_nbytes(block, self._schema)
            for env_id in np.unique(block.env_ids).tolist():
                mine = block.env_ids == env_id
                if gone[env_id] >= over[env_id] or not mine.any():
                    continue
                passed = gone[env_id] + np.cumsum(nbytes[mine])
                stop = int(np.searchsorted(passed, over[env_id])) + 1
                stop = min(stop, len(passed))
                gone[env_id] = passed[stop - 1]
                last = int(block.positions[mine][stop - 1])
                fitting[env_id] = max(fitting[env_id], last + 1)
        return fitting

    def shards(self, shard_nbytes: float, fixed_nbytes: int, maximum: int) -> list[Shard]:
        """Cut the rows into shards of about so many bytes, of one row at least.

        Args:
            shard_nbytes: Bytes of a shard.
            fixed_nbytes: Bytes of a row beside its values.
            maximum: Of more shards only one more is returned.
        """
        varying = self._schema.varying
        made: list[Shard] = []
        rows, nbytes, totals = 0, 0, dict.fromkeys(varying, 0)
        for block in self._measure():
            each = fixed_nbytes + value_nbytes(block, self._schema)
            lengths = {path: lengths_of(block, path) for path in varying}
            first = 0
            while first < len(block):
                ends = nbytes + np.cumsum(each[first:])
                count = int(np.searchsorted(ends, shard_nbytes, "right"))
                if not count and rows:
                    made.append(Shard(rows, totals))
                    rows, nbytes, totals = 0, 0, dict.fromkeys(varying, 0)
                    continue
                count = max(1, count)
                rows, nbytes = rows + count, int(ends[count - 1])
                for path in varying:
                    totals[path] += int(lengths[path][first : first + count].sum())
                first += count
                if len(made) > maximum:
                    return made
        return [*made, Shard(rows, totals)] if rows or not made else made


def lengths_of(block: Block, path: str) -> Array:
    """Items of each row's value in a block of lengths, int64 ``[N]``."""
    return cast("Array", block.columns[path])


def value_nbytes(block: Block, schema: Schema) -> Array:
    """Bytes of each row's values in a block of lengths, int64 ``[N]``."""
    nbytes = np.zeros(len(block), np.int64)
    for path in schema.varying:
        nbytes += lengths_of(block, path) * schema.fields[path].inner_nbytes
    return nbytes


def heap_nbytes(block: Block, schema: Schema) -> Array:
    """Bytes of each row's values in a heap, int64 ``[N]``; see `value_nbytes`."""
    nbytes = np.zeros(len(block), np.int64)
    for path in schema.varying:
        inner = schema.fields[path].inner_nbytes
        nbytes += aligned(lengths_of(block, path) * inner)
    return nbytes


def split_by_bytes(nbytes: Array, maximum: int = VALUES_NBYTES) -> Iterator[tuple[int, int]]:
    """Ranges ``[first, stop)`` of rows whose values take at most so many bytes each.

    Args:
        nbytes: int64 ``[N]``, of each row's values.
        maximum: Bytes of a range, unless one row takes more.
    """
    ends = np.cumsum(nbytes)
    first, before = 0, 0
    while first < len(ends):
        stop = int(np.searchsorted(ends, before + maximum, "right"))
        stop = max(first + 1, stop)
        yield first, stop
        first, before = stop, int(ends[stop - 1])


def refuse_large(nbytes: int, where: str) -> None:
    """Refuse values of one row that would not fit in memory.

    Args:
        nbytes: Bytes of a row's values.
        where: File and row.

    Raises:
        FormatError: They take more than 256 MiB.
    """
    if nbytes > MAX_ROW_NBYTES:
        raise FormatError(
            f"{where} must have values of at most {MAX_ROW_NBYTES} bytes together, got "
            f"{nbytes}. Split the field, since a row is read at once."
        )


def check_values(values: Ragged, field: Field, what: str, first: int) -> None:
    """Check values that were read from a file.

    Args:
        values: One for each row, whose offsets rise from 0.
        field: What they are of.
        what: File and field, for errors.
        first: Number of the first row.

    Raises:
        CorruptError: One is too long, text that is no UTF-8, or no image of the field.
    """
    check_lengths(np.diff(values.offsets), field, what, first)
    if (encoding := field.encoding) is not None:
        for number, file in enumerate(values):
            # Rows of final observations have none.
            problem = encoding.problem(file) if len(file) else None
            if problem is not None:
                raise CorruptError(
                    f"{what}, row {first + number} must be {field.description}, but {problem}. "
                    "The file was edited or damaged: restore it from a copy."
                )
    if field.kind == "text":
        found = no_text(values)
        if found is not None:
            raise CorruptError(
                f"{what}, row {first + found} must be UTF-8, got text that is not. The "
                "file was edited or damaged: restore it from a copy."
            )


def check_lengths(lengths: Array, field: Field, what: str, first: int) -> None:
    """Check lengths that were read from a file; see `check_values`.

    Raises:
        CorruptError: One is longer than the field allows, or negative.
    """
    assert field.max_length is not None
    wrong = np.flatnonzero((lengths < 0) | (lengths > field.max_length))
    if len(wrong):
        row = int(wrong[0])
        raise CorruptError(
            f"{what}, row {first + row} must have 0 to {field.max_length} items, got "
            f"{lengths[row]}. The file was edited or damaged: restore it from a copy."
        )


def no_text(values: Ragged) -> int | None:
    """Return the number of the first value that is no UTF-8, if any."""
    data = values.values.reshape(-1).view(np.uint8)
    starts = values.offsets[:-1][np.diff(values.offsets) > 0]
    try:
        data.tobytes().decode()
        # A value that begins within a character of the one before is none either.
        if ((data[starts] & 0xC0) != 0x80).all():
            return None
    except UnicodeDecodeError:
        pass
    for number, value in enumerate(values):
        try:
            value.tobytes().decode()
        except UnicodeDecodeError:
            return number
    return None
