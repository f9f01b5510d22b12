"""Rows of others' rings: arrays whose oldest row is in the middle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.foreign.columns import Array, Rows
from mmreplay.schema.dtypes import canonical_name, storage_dtype


class RingRows:
    """Rows of an array ``[slots, *shape]``, oldest first; see `columns.Rows`.

    Raises:
        SchemaError: It can be no field.
    """

    def __init__(self, array: Array, first: int, count: int) -> None:
        """Read a ring.

        Args:
            array: ``[slots, *shape]``, in memory or mapped, of any strides.
            first: Slot of the oldest row.
            count: Rows, at most the slots.
        """
        self.dtype = canonical_name(array.dtype)
        self.shape: tuple[int, ...] = array.shape[1:]
        self.count = count
        self._array, self._first = array, first

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        slots: NDArray[np.int64] = np.arange(first, stop) + self._first
        part = self._array[slots % len(self._array)]
        return np.ascontiguousarray(part, storage_dtype(self.dtype)).reshape(
            stop - first, *self.shape
        )


class Turned:
    """Rows of a column that is a ring, oldest first, read in long runs."""

    def __init__(self, rows: Rows, first: int, count: int) -> None:
        """Read a ring, of which the oldest row is at slot first."""
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
) -> dict[str, RingRows]:
    """Rows of one environment by path.

    Args:
        arrays: By path, with axes of slots and environments first, in either order.
        env_id: The environment.
        axis: Which of the two is that of environments.
        first: Slot of the oldest row.
        count: Rows.
    """
    return {
        path: RingRows(np.moveaxis(array, axis, 0)[env_id], first, count)
        for path, array in arrays.items()
    }
