"""Read-ahead by hand: ask the disk for all rows of a batch before touching one.

A batch of random rows read by page fault waits for the disk once per row; asked
for at once, the requests queue together. On data four times the memory that is
the difference between 3 and 700 MB/s (tools/bench/bench_pixels.py). Where the
pages are there it would cost 0.4 ms per 256 rows, so a few of the batch's pages
are looked at first.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import File

SAMPLED_ROWS = 4
WARM_CALLS = 16
"""Batches of small rows between two looks while the pages were found there."""
SMALL_ROW_NBYTES = 4096

_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Pages:
    """The pages of one mapped file, by row."""

    def __init__(self, mapping: mmap.mmap, file: File, row_nbytes: int) -> None:
        self._file = file
        self._row_nbytes = row_nbytes
        self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._vector = ctypes.create_string_buffer(1)
        self._vector_address = ctypes.addressof(self._vector)
        self._warm_calls = 0

    def prefetch(self, rows: NDArray[np.int64]) -> int:
        """Start reading the rows' pages, if any of a sample is missing.

        Returns:
            Bytes asked for.
        """
        if self._warm_calls > 0:
            self._warm_calls -= 1
            return 0
        if self._resident(rows):
            # A look costs a microsecond a row: nothing beside large rows, as much
            # as the gather itself beside small ones.
            if self._row_nbytes < SMALL_ROW_NBYTES:
                self._warm_calls = WARM_CALLS
            return 0
        ranges = self._ranges(rows)
        for offset, nbytes in ranges:
            self._file.will_need(offset, nbytes)
        return sum([nbytes for _, nbytes in ranges])

    def _resident(self, rows: NDArray[np.int64]) -> bool:
        """Tell whether the pages of a few rows are all in memory."""
        if _mincore is None:
            return False
        step = max(1, len(rows) // SAMPLED_ROWS)
        for row in rows[::step].tolist():
            page = row * self._row_nbytes // mmap.PAGESIZE * mmap.PAGESIZE
            _mincore(self._address + page, 1, self._vector_address)
            if not self._vector.raw[0] & 1:
                return False
        return True

    def _ranges(self, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Byte ranges that hold the rows, sorted, those that touch put together."""
        ordered = np.unique(rows)
        first = ordered * self._row_nbytes // mmap.PAGESIZE
        last = -(-(ordered + 1) * self._row_nbytes // mmap.PAGESIZE)
        apart = np.flatnonzero(first[1:] > last[:-1]) + 1
        starts = first[np.concatenate([[0], apart])]
        stops = last[np.concatenate([apart - 1, [len(last) - 1]])]
        pages = np.stack([starts, stops - starts], axis=1) * mmap.PAGESIZE
        return [(offset, nbytes) for offset, nbytes in pages.tolist()]
