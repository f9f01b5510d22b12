"""Columns of a source, read a stretch of rows at a time, wherever they lie."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.schema.dtypes import canonical_name, storage_dtype

Array = NDArray[np.generic]


class Rows(Protocol):
    """One column.

    Attributes:
        dtype: Name of a field's dtype.
        shape: Of one row.
        count: Rows.
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
        """Rows ``[stop - first, *shape]``, little-endian; those of others may stay."""


class ArrayRows:
    """Rows of an array in memory, or mapped.

    Raises:
        SchemaError: It can be no field.
    """

    def __init__(self, array: Array) -> None:
        self.dtype = canonical_name(array.dtype)
        self.shape = array.shape[1:]
        self.count = len(array)
        self._array = array

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        part = self._array[first:stop]
        return np.ascontiguousarray(part, storage_dtype(self.dtype)).reshape(
            len(part), *self.shape
        )


class Later:
    """The rows of another column from some row on.

    Observations of T + 1 rows hold their own next observations one row later.
    """

    def __init__(self, rows: Rows, by: int, count: int) -> None:
        self.dtype, self.shape, self.count = rows.dtype, rows.shape, count
        self._rows, self._by = rows, by

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        return self._rows.read(first + self._by, stop + self._by)


class Flat:
    """Rows of one value each, whether the source gives them an axis of 1 or not."""

    def __init__(self, rows: Rows) -> None:
        self.dtype, self.shape, self.count = rows.dtype, (), rows.count
        self._rows = rows

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        return self._rows.read(first, stop).reshape(stop - first)


def single(shape: tuple[int, ...]) -> bool:
    """Whether rows of a shape hold one value each."""
    return shape in ((), (1,))


def nbytes_of(rows: Rows) -> int:
    """Bytes of one row."""
    return storage_dtype(rows.dtype).itemsize * int(np.prod(rows.shape, dtype=object))
