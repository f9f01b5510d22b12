"""Steps of mapped records, copied out in one go with what their flags say of them."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.ring import Ring
from mmreplay.storage.placement import Placement
from mmreplay.storage.readers import MappedRows, RowReader
from mmreplay.storage.recycler import Recycler

_steps = kernels.load("steps")

Ids = NDArray[np.int64]
Ends = NDArray[np.bool_]


class Records:
    """The records of every row, where they are mapped."""

    def __init__(self, ring: Ring, rows: MappedRows, record: np.dtype[np.void]) -> None:
        """Copy out of a mapping.

        Args:
            ring: Where rows lie.
            rows: The mapping.
            record: What a row of it holds.
        """
        self._ring = ring.shape
        self._rows = rows
        self._record = record
        self._recycler = Recycler()

    def take(
        self,
        flags: NDArray[np.uint8],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        bits: bytes,
        bare: bool,
        wide: int,
    ) -> tuple[NDArray[np.void], Ends] | None:
        """Copy the records of steps, unless their pages are to be looked at first.

        Args:
            flags: Of every row; see `kernels.steps.take`, as the next five.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            heads: int64 ``[E]``.
            bits: Flags to look for, K of them.
            bare: A terminated step without a final row is its own successor.
            wide: 1, or 2 for the records of the steps after as well.

        Returns:
            Records ``[wide * N]``, each step's one after the other, and bool ``[K,
            N]``, which flags each step has; or None.
        """
        if not self._rows.pages.warm():
            return None
        count = len(positions)
        out = cast(
            "NDArray[np.void]", self._recycler.empty((wide * count,), self._record)
        )
        ends = np.empty((len(bits), count), np.bool_)
        _steps.take(
            self._rows.array, self._record.itemsize, flags, env_ids, positions, heads,
            *self._ring, bits, bare, out, ends,
        )  # fmt: skip
        return out, ends


def records_of(ring: Ring, rows: RowReader, placement: Placement) -> Records | None:
    """Records, or None where rows are read rather than mapped."""
    if placement.record is None or not isinstance(rows, MappedRows):
        return None
    return Records(ring, rows, placement.record)
