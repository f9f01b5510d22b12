"""Pages of rows to come, made before they are written in part.

A row whose size is no whole number of pages ends within one. To write that part of a
page the kernel reads the page first, unless it is in memory; in a ring larger than
memory it seldom is, and each such write waits for the disk. But the rest of the page
belongs to rows that are written next, over others that the ring has given up: nobody
reads those again, nor would they be there after a power cut. So the page is written
whole, as zeros, right before the row. Left to the kernel are the pages where a limit or
the ring ends, and all of environments side by side once their heads are apart.
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
"""Written between two looks whether pages are in memory."""
LOOKS = 4
"""Pages of the next stretch that are looked at: whoever draws leaves some there."""
CLEARED_NBYTES = 256 << 10
"""Cleared at once, at most."""
ZEROS = memoryview(bytes(CLEARED_NBYTES))


class Edges:
    """The pages of one file that a row shares with those after it.

    Every write that it is told of begins at the head of an environment.

    Attributes:
        file: The file.
        step_nbytes: Bytes of a row, or of a step's rows that lie side by side: who
            writes one of those alone may be behind the others, which come next.
    """

    def __init__(self, file: File, pages: Pages, ring: Ring) -> None:
        """Make one.

        Args:
            file: What is written, in whole rows.
            pages: Of the same file.
            ring: What its rows are.
        """
        self.file, self._pages, self._slots = file, pages, ring.slots
        self.step_nbytes = file.nbytes // ring.num_rows * ring.wide
        self._apart = ring.wide == 1
        self._limits: list[int] = []
        # By environment: whether pages are missing, and bytes to write before a look.
        self._missing = [False] * (ring.num_envs // ring.wide)
        self._unlooked = [0] * len(self._missing)

    def free(self, limits: NDArray[np.int64]) -> None:
        """Note which rows may be written: nothing that they held is asked for again.

        Args:
            limits: int64 ``[E]``, those of positions below; in a first lap they held
                nothing, of which nothing is read.
        """
        self._limits = []
        if self.step_nbytes % PAGE and (limits > self._slots).any():
            every = limits.tolist()
            if self._apart:
                self._limits = every
            elif min(every) == max(every):
                self._limits = every[:1]

    def make(self, offset: int, stop: int) -> None:
        """Make the page that a write is to end in, if it may be missing.

        Args:
            offset: First byte that is written next, of a row.
            stop: The one after the last, likewise.
        """
        nbytes = stop - offset
        if not self._limits or nbytes < self.step_nbytes:
            return
        env_id = (stop // self.step_nbytes - 1) // self._slots
        self._unlooked[env_id] -= nbytes
        if self._unlooked[env_id] < 0:
            self._unlooked[env_id] = STRETCH_NBYTES
            self._missing[env_id] = self._misses(env_id, stop)
        page = stop // PAGE * PAGE
        if self._missing[env_id] and offset <= page < stop:
            self.clear(stop, page, page + PAGE)

    def clear(self, row: int, first: int, stop: int) -> int:
        """Write pages as zeros whose rows are all to come.

        Args:
            row: First byte of the step that is written next, whole, or of the one
                after it where that one is written at once.
            first: Of the first page; the rest of it is about to be written.
            stop: What is wanted, up to the end of the last page.

        Returns:
            Where those end that were written, after stop or before; `first`, if none
            were.
        """
        ahead, inside = divmod(row, self.step_nbytes)
        env_id = (ahead - 1) // self._slots
        if not self._limits or inside or ahead == (env_id + 1) * self._slots:
            return first
        left = (self._limits[env_id] - ahead % self._slots) % self._slots
        last = min(ahead + left, (env_id + 1) * self._slots) * self.step_nbytes
        whole = -(-stop // PAGE) * PAGE
        stop = min(whole, last // PAGE * PAGE, first + CLEARED_NBYTES)
        if stop <= first:
            return first
        self.file.pwrite(ZEROS[: stop - first], first)
        return stop

    def _misses(self, env_id: int, offset: int) -> bool:
        """Whether some page is missing of what an environment is to write next."""
        room = self._slots * self.step_nbytes
        begin, step = env_id * room, min(STRETCH_NBYTES, room) // LOOKS
        ahead = (
            begin + (offset - begin + n * step) % room for n in range(1, LOOKS + 1)
        )
        return any(self._pages.lacks(each) for each in ahead)
