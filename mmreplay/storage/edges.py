"""Pages of rows to come, made before they are written in part.

A row whose size is no whole number of pages ends within one. To write that part of a
page the kernel reads the page first, unless it is in memory; in a ring larger than
memory it seldom is, and each such write waits for the disk. But the rest of the page
belongs to rows that are written next, over others that the ring has given up: nobody
reads those again, nor would they be there after a power cut. So pages are written
whole, as zeros, right before rows are put there, and nothing is read at all.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import File
from mmreplay.ring import Ring
from mmreplay.storage.pages import Pages

PAGE = mmap.PAGESIZE
STRETCH_NBYTES = 1 << 21
"""Between two looks whether pages are in memory."""
LOOKS = 4
"""Pages of a stretch that are looked at: whoever draws leaves some of them there."""
CLEARED_NBYTES = 256 << 10
"""Cleared at once, at most."""
ZEROS = memoryview(bytes(CLEARED_NBYTES))


class Edges:
    """The pages of one file that a row shares with those after it.

    Attributes:
        file: The file.
    """

    def __init__(self, file: File, pages: Pages, ring: Ring) -> None:
        """Make one.

        Args:
            file: What is written, in whole rows.
            pages: Of the same file.
            ring: What its rows are.
        """
        self.file, self._pages = file, pages
        self._row_nbytes, self._slots = file.nbytes // ring.num_rows, ring.slots
        # Step by step the next row is another environment's, whose head may be apart.
        alone = ring.layout == "env_major" or ring.num_envs == 1
        self._apart = alone and self._row_nbytes % PAGE != 0
        self._limits: list[int] = []
        self._missing: bool | None = None

    def free(self, limits: NDArray[np.int64]) -> None:
        """Note which rows may be written: nothing that they held is asked for again.

        Args:
            limits: int64 ``[E]``, those of positions below; in a first lap they held
                nothing, of which nothing is read.
        """
        if self._apart and (limits > self._slots).any():
            self._limits = limits.tolist()

    def make(self, offset: int, stop: int) -> None:
        """Make the page that a write is to end in, if it may be missing.

        Args:
            offset: First byte that is written next, of a row.
            stop: The one after the last, likewise.
        """
        if not self._limits:
            return
        ahead = offset // STRETCH_NBYTES != stop // STRETCH_NBYTES
        if ahead or self._missing is None:
            self._missing = self._misses(stop)
        page = stop // PAGE * PAGE
        if self._missing and offset <= page < stop:
            self.clear(stop, page, page + PAGE)

    def clear(self, row: int, first: int, stop: int) -> int:
        """Write pages as zeros whose rows are all to come.

        Args:
            row: First byte of the row that is written next, or of the one after it
                where that one is written at once.
            first: Of the first page; the rest of it is about to be written.
            stop: After the last page that is wanted.

        Returns:
            Where those end that were written; `first`, if none were.
        """
        ahead = row // self._row_nbytes
        env_id = (ahead - 1) // self._slots
        if not self._limits or ahead == (env_id + 1) * self._slots:
            return first
        left = (self._limits[env_id] - ahead % self._slots) % self._slots
        last = min(ahead + left, (env_id + 1) * self._slots) * self._row_nbytes
        stop = min(stop, last // PAGE * PAGE, first + CLEARED_NBYTES)
        if stop <= first:
            return first
        self.file.pwrite(ZEROS[: stop - first], first)
        return stop

    def _misses(self, offset: int) -> bool:
        """Whether some page is missing of a stretch that writing comes to."""
        step, last = STRETCH_NBYTES // LOOKS, self.file.nbytes - 1
        ahead = range(offset + step, offset + STRETCH_NBYTES + 1, step)
        return not all(self._pages.holds(min(each, last)) for each in ahead)
