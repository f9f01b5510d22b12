"""Asks the disk for all rows of a batch before one of them is read.

A batch of random rows read one after the other waits for the disk once per row. Asked
for at once, the requests queue together: on data four times the memory that is the
difference between 3 and 700 MB/s (tools/bench/bench_pixels.py). Where the pages are in
memory it would cost 0.4 ms per 256 rows, so a few of a batch's pages are looked at
first (`Pages`). A loader asks for a batch when it is drawn. Its gather, later, finds
all of it in memory, which says nothing about the rest of the file (`Gathering`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import File

if TYPE_CHECKING:
    from mmreplay.storage.store import Advise


class _State(threading.local):
    """Of this thread; defaults of the class, which are sooner looked up."""

    prefetched = False
    lacks = False


_state = _State()


def gathers() -> bool:
    """Whether this thread gathers what was asked for early."""
    return _state.prefetched


def lacks(resident: Callable[[], bool]) -> bool:
    """Whether to ask for rows, in a gather of what was asked for early.

    Args:
        resident: Looks at a few of them; once some were missing the rest of the gather
            is asked for without a look. Such rows were not known when the batch was
            drawn: steps to the end of an episode, or draws that replace others.
    """
    # Once is enough: rows of one gather lie all over the file, and where one that was
    # not asked for is missing the others are likely to be. A look at each costs 1 us.
    _state.lacks = _state.lacks or not resident()
    return _state.lacks


class Gathering:
    """Makes looks of this thread count for this gather alone, until the exit.

    A class of its own: Ctrl-C between a generator's two frames would leave it on.
    """

    __slots__ = ("_before", "_prefetched")

    def __init__(self, prefetched: bool) -> None:
        """Begin nothing yet.

        Args:
            prefetched: Whether the disk was asked for what is gathered.
        """
        self._prefetched, self._before = prefetched, (False, False)

    def __enter__(self) -> None:
        """Know what to go back to: a transform may draw from another loader."""
        self._before = _state.prefetched, _state.lacks
        _state.prefetched, _state.lacks = self._prefetched, False

    def __exit__(self, *_: object) -> None:
        """Go back to it."""
        _state.prefetched, _state.lacks = self._before


SAMPLED_ROWS = 4
COLD_CALLS = 32
"""Batches asked for without a look after a page was missing: a few missing ones among
many are seldom among those looked at, and each is waited for alone."""
WARM_CALLS = 16
"""Batches of small rows between two looks while the pages were found there."""
SMALL_ROW_NBYTES = 4096
LONG_NBYTES = 1 << 20
"""Batches of large rows from here on are read where pages are missing."""
LOOK_NBYTES = 1 << 19
"""Of small rows that are copied at once: each part is looked at, every time."""

_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Pages:
    """The pages of one file, by row."""

    def __init__(
        self, file: File, row_nbytes: int, advise: Advise = "auto", mapping: mmap.mmap | None = None
    ) -> None:
        """Make one.

        Args:
            file: Whose pages.
            row_nbytes: Bytes a row.
            advise: When to ask for them; see `ReadPolicy`.
            mapping: Of the file, where there is one.
        """
        self._file = file
        self._row_nbytes = row_nbytes
        self._advise = advise
        # One byte, without waiting: it costs 1 us, and starts the read of a page that
        # is missing. A read that does not wait tells of any file. mincore says of those
        # that this user cannot write that all of it is there; it is for file systems
        # without.
        self._reads = hasattr(os, "RWF_NOWAIT")
        self._byte = bytearray(1)
        self._address = None
        if mapping is not None:
            self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._vector = ctypes.create_string_buffer(1)
        self._warm_calls = self._cold_calls = 0
        self._cold = False

    def prefetch(self, rows: NDArray[np.int64], now: bool = False) -> int:
        """Start reading the rows' pages, if any of a sample is missing.

        Args:
            rows: int64 ``[N]``.
            now: They are taken next: what `reads` them asks the disk itself.

        Returns:
            Bytes asked for.
        """
        # What is read at once asks for its own rows, in a thread beside the reads:
        # asked here as well, each row would cost two calls.
        if not self.wanted(rows) or (now and self.reads(len(rows))):
            return 0
        return self.request(rows)

    def request(self, rows: NDArray[np.int64]) -> int:
        """Start reading the rows' pages; return the bytes asked for."""
        # All of a batch before any row is touched: on data four times the memory the
        # disk then gives 700 MB/s instead of 3.
        ranges = self._ranges(rows)
        for offset, nbytes in ranges:
            self._file.will_need(offset, nbytes)
        return sum([nbytes for _, nbytes in ranges])

    def reads(self, count: int) -> bool:
        """Whether a batch of count rows is read, pages having been missing lately.

        To look at a page through a mapping that was just read from the disk takes
        longer than to copy it; and who reads asks for pages meanwhile.
        """
        # Copied out of the mapping 32 runs of 350 KB took 9 ms of faults after 2.6 ms
        # to ask for them. Read they take 2, once the disk has them. Small rows share
        # pages, and a call for each would cost more than its copy.
        long = self._row_nbytes >= SMALL_ROW_NBYTES
        return self._cold and long and count * self._row_nbytes >= LONG_NBYTES

    def warm(self) -> bool:
        """Whether a batch may go without `prefetch` this time."""
        if self._advise != "auto":
            return self._advise != "always"
        if self._warm_calls > 0:
            self._warm_calls -= 1
            return True
        return False

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Let the kernel drop the rows' pages that are neither mapped nor changed."""
        for offset, nbytes in self._ranges(rows):
            os.posix_fadvise(self._file.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def cached(self, rows: NDArray[np.int64]) -> list[bool]:
        """Whether the first page of each row is in memory."""
        return [self.holds(row * self._row_nbytes) for row in rows.tolist()]

    def wanted(self, rows: NDArray[np.int64]) -> bool:
        """Whether to request a batch, of which a few rows are looked at."""
        small = self._row_nbytes < SMALL_ROW_NBYTES
        # Beside a copy of very many a look at every part of them costs nothing.
        looks = len(rows) * self._row_nbytes // LOOK_NBYTES if small else 0
        if not len(rows) or ((self._advise != "auto" or looks < 2) and self.warm()):
            return False
        if self._advise == "always":
            return True
        # A gather of what was asked for at its draw speaks of itself alone. When it
        # spoke for the next sixteen draws, eight batches of twenty-five were not asked
        # for, and a loader drew 0.43 times as fast as `sample`; now 1.1 times.
        if gathers():
            return lacks(lambda: self._resident(rows, max(SAMPLED_ROWS, looks)))
        # Pages were missing lately: ask without a look. To ask for pages that are there
        # costs 0.4 ms per 256 rows, to wait for one that is not 0.1 ms or more.
        if self._cold_calls > 0:
            self._cold_calls -= 1
            return True
        if not self._resident(rows, max(SAMPLED_ROWS, looks)):
            self._cold_calls, self._cold = COLD_CALLS, True
            return True
        self._cold = False
        # A look costs a microsecond a row: nothing beside large rows, as much as the
        # gather itself beside small ones.
        if small:
            self._warm_calls = WARM_CALLS
        return False

    def _resident(self, rows: NDArray[np.int64], count: int) -> bool:
        """Tell whether the pages of about count rows are all in memory."""
        # Spread over the batch as it was drawn: random rows are a random sample.
        step = max(1, len(rows) // count)
        some = rows[::step].tolist()
        return all(self.holds(row * self._row_nbytes) for row in some)

    def holds(self, offset: int) -> bool:
        """Whether the page of a byte is in memory."""
        if self._reads:
            try:
                os.preadv(self._file.fd, [self._byte], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                # EOPNOTSUPP is of file systems without such reads: ask mincore from now
                # on.
                if error.errno == errno.EBADF:
                    # Closed by another thread: what reads it is to say so, or to end.
                    return True
                self._reads = False
            else:
                return True
        return bool(self._mapped(offset))

    def lacks(self, offset: int) -> bool:
        """Whether the page of a byte is known to be missing, for a writer of the file.

        Unlike `holds`, this begins no read where there is a mapping; and a file system
        that cannot tell has no disk, or none that is asked a page at a time.
        """
        mapped = self._mapped(offset)
        if mapped is not None:
            return not mapped
        return not self.holds(offset) and self._reads

    def _mapped(self, offset: int) -> bool | None:
        """What mincore says of the page of a byte; None where it says nothing."""
        if _mincore is None or self._address is None:
            return None
        # mincore tells of what is there without a read of it: a writer that asks must
        # not start the read that it is about to make needless.
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        _mincore(self._address + page, 1, self._vector)
        return bool(self._vector.raw[0] & 1)

    def _ranges(self, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Byte ranges that hold the rows, sorted, those that touch put together."""
        # In the order of the file, and put together where they touch: rows of one page
        # are asked for once, and a run of frames by few calls.
        ordered = rows if (rows[1:] >= rows[:-1]).all() else np.sort(rows)
        first = ordered * self._row_nbytes // mmap.PAGESIZE
        last = -(-(ordered + 1) * self._row_nbytes // mmap.PAGESIZE)
        apart = np.flatnonzero(first[1:] > last[:-1]) + 1
        starts = first[np.concatenate([[0], apart])]
        stops = last[np.concatenate([apart - 1, [len(last) - 1]])]
        pages = np.stack([starts, stops - starts], axis=1) * mmap.PAGESIZE
        return [(offset, nbytes) for offset, nbytes in pages.tolist()]
