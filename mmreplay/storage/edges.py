"""Reading ahead of writes: pages that a row shares with the one after it.

A row whose size is no whole number of pages ends within one. To write that part of a
page is to read the page first, unless it is in memory; in a ring larger than memory it
never is, and each add waits for the disk. Asked for in time it does not; asked for one
by one such pages still take a request of the disk a row, which costs more than the rows
of 28 KB themselves. So rows that are small are asked for whole, many at once: their
other pages are those that the write would have to make.
"""

from __future__ import annotations

import mmap

from mmreplay.files import File
from mmreplay.storage.pages import Pages

ASKED_NBYTES = 1 << 21
"""Of rows asked for at once, after the last that were; at least one row."""
SMALL_ROW_NBYTES = 1 << 16
"""Of larger rows just the page is asked for that two of them share."""


class Edges:
    """The pages of one file that rows share."""

    def __init__(self, file: File, row_nbytes: int, pages: Pages) -> None:
        """Make one.

        Args:
            file: What is written.
            row_nbytes: Bytes a row.
            pages: Of the same file.
        """
        self._overwriting = False
        self._file = file
        self._row_nbytes = row_nbytes
        self._pages = pages
        self._rows = max(1, ASKED_NBYTES // row_nbytes)

    def begin(self) -> None:
        """Rows are written over others from now on; there was nothing to read."""
        self._overwriting = self._row_nbytes % mmap.PAGESIZE != 0

    def written(self, row: int, count: int) -> None:
        """Ask for pages that writes to come need, if they may be missing.

        Nothing is kept between two writes: many environments write in turn, each at a
        place of its own.

        Args:
            row: First row that was written just now.
            count: Rows written; those to come are taken to be as many.
        """
        if not self._overwriting:
            return
        rows, stop = self._rows, row + count
        if count >= rows:
            # Whole pages but for its ends, the first of which was just written.
            self._ask(stop + count, stop + count)
        elif row // rows != stop // rows:
            first = (stop // rows + 1) * rows
            if self._row_nbytes <= SMALL_ROW_NBYTES:
                self._ask(first, first + rows)
            else:
                for edge in range(first, first + rows):
                    self._ask(edge, edge)

    def _ask(self, first: int, stop: int) -> None:
        """Ask for the pages from the one that a row begins in to that of another."""
        offset = first * self._row_nbytes
        offset -= offset % mmap.PAGESIZE
        last = min(stop * self._row_nbytes, self._file.nbytes - 1)
        last -= last % mmap.PAGESIZE
        # The first page was asked for with the rows before.
        if last >= offset and not self._pages.holds(last):
            self._file.will_need(offset, last + mmap.PAGESIZE - offset)
