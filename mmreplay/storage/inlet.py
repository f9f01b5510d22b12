"""Long stretches of rows, stored through a mapping where that is safe and shorter.

Rows that are packed for `pwrite` are copied twice, and the kernel looks at each page
by itself: 1,024 rows of 168 bytes take 50 us so, and 17 when they are packed into the
mapping (28 in place of 57 in pages that are new; tools/bench/bench_add.py). A store
cannot fail: on a full or failing disk it is a SIGBUS. So its pages are asked for first,
with `MADV_POPULATE_WRITE`, which says what is wrong; what it refuses is left to
`pwrite`, and so are pages that would have to be read from the disk first.
"""

from __future__ import annotations

import ctypes
import mmap
from time import perf_counter

import numpy as np

from mmreplay import files
from mmreplay.disk import Pack
from mmreplay.errors import FailedError
from mmreplay.files import File
from mmreplay.mounts import KEEPS_PAGES, file_system

# The kernel takes page cache in pieces as large as the write. A virtual machine gives
# free pages back to its host in pieces, and to get one anew takes 11 us: 20 ms where 7
# MB take 2. Up to 32 KiB the kernel keeps a stock of its own, which may run dry; single
# pages it nearly always has, and 7 MB of them take 4 ms. (Medians of pwrite into new
# pages, tools/bench/bench_pixels.py filling; 64 KiB: 20 ms, whole: 4 to 8.)
PIECE_NBYTES = 32 << 10
# A page that took longer came from the host; one at hand takes 0.3 us.
SLOW_PAGE_S = 5e-6
# Bytes written page by page, and stretches written rather than stored, until the next
# look whether larger pieces are at hand again.
CAREFUL_NBYTES = 1 << 20
CAREFUL_CALLS = 16
# Shorter ones take as long either way.
LEAST_NBYTES = 16 << 10
# Stretches stored between two looks whether their pages are in memory, while they were
# found there.
WARM_CALLS = 8
# Taken page by page: a write takes new ones sooner.
PAGE_BY_PAGE = {"tmpfs"}

PAGE_MASK = ~(mmap.PAGESIZE - 1)

_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Inlet:
    """A way into one file, beside `File.pwrite`."""

    def __init__(self, file: File, *, created: bool) -> None:
        """Make one.

        Args:
            file: Where to.
            created: Its space was never written, whatever is reserved of it.
        """
        kind = file_system(file.path.parent)
        self._file = file
        self._open = file.writable and kind in KEEPS_PAGES and _mincore is not None
        # Above, this opening wrote nothing yet.
        self._reached = 0
        self._created = created and kind not in PAGE_BY_PAGE
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self._warm_calls = self._careful_calls = 0
        self._seen = bytearray()
        self._vector: ctypes.Array[ctypes.c_char] | None = None

    def fill(
        self, offset: int, nbytes: int, pack: Pack, given: tuple[object, ...]
    ) -> bool:
        """Let pack store a stretch; False, and nothing stored, where `write` is to.

        Args:
            offset: First byte.
            nbytes: How many.
            pack: What writes them all, given a memoryview of them.
            given: Its other arguments.
        """
        if nbytes < LEAST_NBYTES or not self._open:
            return False
        mapping = self._mapping or self._map()
        if mapping is None:
            return False
        new = offset >= self._reached
        first = offset & PAGE_MASK
        if not self._ready(first, offset + nbytes - first, new):
            return False
        began = perf_counter()
        try:
            files.disk.populate(self._address + first, offset + nbytes - first)
        except OSError:
            # `write` says why, in an error of the file's.
            return False
        if new:
            self._reached = offset + nbytes
            if perf_counter() - began > nbytes / mmap.PAGESIZE * SLOW_PAGE_S:
                self._careful_calls = CAREFUL_CALLS
        files.disk.fill(self._file.fd, mapping, offset, nbytes, pack, given)
        return True

    def _ready(self, first: int, nbytes: int, new: bool) -> bool:
        """Whether pages are to be stored into, those of a stretch or after others."""
        if new and self._created:
            careful = self._careful_calls > 0
            self._careful_calls -= careful
            return not careful
        if new:
            self._warm_calls = 0
        if self._warm_calls > 0:
            self._warm_calls -= 1
        elif self._there(first, nbytes):
            self._warm_calls = WARM_CALLS
        else:
            return False
        return True

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes, in pieces where their pages are new."""
        if offset < self._reached:
            self._file.pwrite(data, offset)
        else:
            write_pieces(self._file, data, offset)
        self._reached = max(self._reached, offset + len(data))

    def _map(self) -> mmap.mmap | None:
        try:
            mapping = self._mapping = self._file.map_to_fill()
        except FailedError:
            # No address space is left for it: the file is written as others are.
            self._open = False
            return None
        self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        return mapping

    def _there(self, first: int, nbytes: int) -> bool:
        """Whether all pages from a page's begin on are in memory."""
        count = -(-nbytes // mmap.PAGESIZE)
        if len(self._seen) < count:
            self._seen = bytearray(count)
            self._vector = (ctypes.c_char * count).from_buffer(self._seen)
        if _mincore is None or _mincore(self._address + first, nbytes, self._vector):
            return False
        return self._seen.count(1, 0, count) == count


def write_pieces(file: File, data: memoryview, offset: int) -> None:
    """Write bytes at an offset, a piece at a time, or a page where those are slow.

    Pieces end where pieces of the file do: the kernel takes page cache for them in
    one go, and no page twice.
    """
    if len(data) <= PIECE_NBYTES:
        file.pwrite(data, offset)
        return
    first, slow_s = 0, PIECE_NBYTES / mmap.PAGESIZE * SLOW_PAGE_S
    while first < len(data):
        stop = first + PIECE_NBYTES - (offset + first) % PIECE_NBYTES
        began = perf_counter()
        file.pwrite(data[first:stop], offset + first)
        first = stop
        if perf_counter() - began > slow_s:
            stop = first + CAREFUL_NBYTES
            file.pwrite_pages(data[first:stop], offset + first)
            first = stop
