"""Space of rows to come, reserved in the files before they are written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import ALLOCATION_NBYTES, File
from mmreplay.ring import Ring

Ids = NDArray[np.int64]


class Space:
    """What is reserved of a ring's files, each piece once an opening."""

    def __init__(self, ring: Ring, files: Mapping[str, File]) -> None:
        """Begin with nothing.

        Args:
            ring: Of the rows.
            files: Each holds a part of every row, by name.
        """
        self._ring, self._files = ring, files
        self._reserved: dict[str, NDArray[np.bool_]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files."""
        return tuple(self._files)

    def reserve(self, first: Ids, stop: Ids) -> None:
        """Reserve space for positions; see `Store.allocate`."""
        ring, some = self._ring, np.flatnonzero(stop > first)
        wide = ring.wide
        if wide > 1:
            # One step's rows of all environments are one stretch of a file.
            some = some[np.unique(stop[some], return_index=True)[1]]
            first = stop - (stop - first).max()
        for env_id in some.tolist():
            here = max(0, int(first[env_id])), int(stop[env_id])
            for row, _, count in ring.stretch(0 if wide > 1 else env_id, *here):
                for name, file in self._files.items():
                    self._reserve(name, file, row, row + count * wide)

    def _reserve(self, name: str, file: File, row: int, last: int) -> None:
        """Reserve the pieces that hold rows ``[row, last)``."""
        size, row_nbytes = ALLOCATION_NBYTES, file.nbytes // self._ring.num_rows
        if name not in self._reserved:
            self._reserved[name] = np.zeros(-(-file.nbytes // size), bool)
        first, stop = row * row_nbytes // size, -(-last * row_nbytes // size)
        left = np.flatnonzero(~self._reserved[name][first:stop])
        if len(left):
            offset = (first + int(left[0])) * size
            until = min(file.nbytes, (first + int(left[-1]) + 1) * size)
            file.allocate(offset, until - offset)
            self._reserved[name][first:stop] = True

    def free(self, name: str, row: int, count: int) -> None:
        """Give the space of rows in one file back, until it is reserved again."""
        file = self._files[name]
        nbytes = file.nbytes // self._ring.num_rows
        file.punch(row * nbytes, count * nbytes)
        pieces = self._reserved.get(name)
        if pieces is not None:
            first = row * nbytes // ALLOCATION_NBYTES
            stop = -(-(row + count) * nbytes // ALLOCATION_NBYTES)
            pieces[first:stop] = False
