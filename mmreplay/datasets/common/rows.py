"""Columns of a source, read a range of rows at a time, wherever they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.values import check_values
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.dtypes import canonical_name, storage_dtype

Array = NDArray[np.generic]


class ColumnRows(Protocol):
    """One column.

    Attributes:
        dtype: Name of a field's dtype.
        shape: Shape of one row.
        count: Number of rows.
    """

    @property
    def dtype(self) -> str:
        """See the class."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See the class."""

    @property
    def count(self) -> int:
        """See the class."""

    def read(self, first: int, stop: int) -> Array:
        """Return rows ``[stop - first, *shape]``, little-endian.

        The array may share the memory of the source.
        """


class ArrayRows:
    """Rows of an array, in memory or mapped.

    Raises:
        SchemaError: No field has its dtype.
    """

    def __init__(self, array: Array) -> None:
        self.dtype = canonical_name(array.dtype)
        self.shape = array.shape[1:]
        self.count = len(array)
        self._array = array

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        part = self._array[first:stop]
        return np.ascontiguousarray(part, storage_dtype(self.dtype)).reshape(len(part), *self.shape)


class TextRows:
    """A column of text, whose rows differ in length."""

    def __init__(
        self, texts: Callable[[int, int], Ragged], count: int, field: Field, name: str
    ) -> None:
        """Read a column of text.

        Args:
            texts: Returns the texts of rows ``[first, stop)``.
            count: Number of rows.
            field: The field that holds them.
            name: Name for errors.
        """
        self.dtype, self.shape, self.count = field.dtype, field.shape, count
        self.field = field
        self._texts, self._name = texts, name

    def read(self, first: int, stop: int) -> Any:
        """Return `Ragged` of shape ``(stop - first,)``; see `Rows.read`.

        Raises:
            CorruptError: One is too long, or no UTF-8.
        """
        texts = self._texts(first, stop)
        check_values(texts, self.field, self._name, first)
        return texts


class ShiftedRows:
    """The rows of another column from some row on.

    Of T + 1 observations, the next observation of each step is one row later.
    """

    def __init__(self, rows: ColumnRows, shift: int, count: int) -> None:
        self.dtype, self.shape, self.count = rows.dtype, rows.shape, count
        self.field = field_of(rows)
        self._rows, self._shift = rows, shift

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        return self._rows.read(first + self._shift, stop + self._shift)

    def as_files(self, codec: str) -> ShiftedRows | None:
        """The same of images as files; None if the column has none."""
        files = files_of(self._rows, codec)
        return None if files is None else ShiftedRows(files, self._shift, self.count)


class ScalarRows:
    """Rows of one value each; the source may have an axis of length 1."""

    def __init__(self, rows: ColumnRows) -> None:
        self.dtype, self.shape, self.count = rows.dtype, (), rows.count
        self._rows = rows

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        return self._rows.read(first, stop).reshape(stop - first)


class RotatedRows:
    """Rows of a circular column, oldest first."""

    def __init__(self, rows: ColumnRows, first: int, count: int) -> None:
        """Read a circular column.

        Args:
            rows: The column, in the order of its slots.
            first: Slot of the oldest row.
            count: Number of rows, at most the slots.
        """
        self.dtype, self.shape, self.count = rows.dtype, rows.shape, count
        self._rows, self._first = rows, first

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        slots = self._rows.count
        first, stop = first + self._first, stop + self._first
        if first >= slots:
            return self._rows.read(first - slots, stop - slots)
        if stop <= slots:
            return self._rows.read(first, stop)
        parts = [self._rows.read(first, slots), self._rows.read(0, stop - slots)]
        return np.concatenate(parts)


def ring_rows(
    arrays: Mapping[str, Array], env_id: int, axis: int, first: int, count: int
) -> dict[str, ColumnRows]:
    """Return the rows of one environment by path, oldest first.

    Args:
        arrays: By path; the first two axes are slots and environments, in either
            order.
        env_id: The environment.
        axis: The axis of environments, 0 or 1.
        first: Slot of the oldest row.
        count: Number of rows, at most the slots.

    Raises:
        SchemaError: No field has the dtype of an array.
    """
    return {
        path: RotatedRows(ArrayRows(np.moveaxis(array, axis, 0)[env_id]), first, count)
        for path, array in arrays.items()
    }


def is_scalar(shape: tuple[int, ...]) -> bool:
    """Return whether rows of a shape hold one value each."""
    return shape in ((), (1,))


def scalar(rows: ColumnRows) -> ColumnRows:
    """Return rows of shape ``[1]``, such as rewards, as rows of shape ``[]``."""
    return ScalarRows(rows) if rows.shape == (1,) else rows


def files_of(rows: object, codec: str) -> ColumnRows | None:
    """A column of images as the files that they are; None if it has none of a codec."""
    as_files = getattr(rows, "as_files", None)
    found: ColumnRows | None = None if as_files is None else as_files(codec)
    return found


def field_of(rows: ColumnRows) -> Field:
    """Return the field that holds the rows of a column.

    Raises:
        SchemaError: None does.
    """
    own = getattr(rows, "field", None)
    return own if isinstance(own, Field) else Field(rows.shape, rows.dtype)


def nbytes_of(rows: ColumnRows) -> int:
    """Return the bytes of one row, without those of a text."""
    return field_of(rows).nbytes
