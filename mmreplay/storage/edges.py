"""Reading ahead of writes: pages that a row shares with the one after it.

A row whose size is no whole number of pages ends within one. To write that part of a
page is to read the page first, unless it is in memory; in a ring larger than memory it
never is, and each add waits for the disk: 137 us a row of 28 KB, where it takes 24 with
the pages asked for in time (a mapping is read ahead by the kernel, and took 43).
"""

from __future__ import annotations

import mmap

from mmreplay.files import File
from mmreplay.storage.pages import Pages

AHEAD = 64
"""Writes between asking for a page and the write that needs it."""
COLD_WRITES = 32
"""Writes that ask without a look after a page was missing."""
MAX_RESTS = 16
"""Writes without a look after pages were found there."""


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
        self._cold = self._rests = self._rest = 0

    def begin(self) -> None:
        """Rows are written over others from now on; there was nothing to read."""
        self._overwriting = self._row_nbytes % mmap.PAGESIZE != 0

    def written(self, row: int, count: int) -> None:
        """Ask for the page that a write to come ends in, if it may be missing.

        Args:
            row: First row that was written just now.
            count: Rows written; those to come are taken to be as many.
        """
        if not self._overwriting:
            return
        if self._rests:
            self._rests -= 1
            return
        offset = (row + count * (AHEAD + 1)) * self._row_nbytes
        offset -= offset % mmap.PAGESIZE
        if offset >= self._file.nbytes:
            return
        if self._cold:
            self._cold -= 1
        elif self._pages.holds(offset):
            self._rests = self._rest = min(MAX_RESTS, 2 * self._rest + 1)
            return
        else:
            self._cold, self._rest = COLD_WRITES, 0
        self._file.will_need(offset, mmap.PAGESIZE)
