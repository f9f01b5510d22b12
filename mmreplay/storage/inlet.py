"""Long stretches of rows, stored through a mapping where that is safe and shorter.

Rows that are packed for `pwrite` are copied twice, and the kernel looks at each page
by itself: 1,024 rows of 168 bytes take 50 us so, and 17 when they are packed into the
mapping (tools/bench/bench_add.py). A store cannot fail: on a full or failing disk it is
a SIGBUS. So its pages are asked for first, with `MADV_POPULATE_WRITE`, which says what
is wrong; what it refuses is left to `pwrite`, and so are pages that would have to be
read from the disk first, and new ones, which a store would take one by one.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from mmreplay import files
from mmreplay.disk import Pack
from mmreplay.errors import FailedError
from mmreplay.files import File
from mmreplay.mounts import KEEPS_PAGES, file_system

# Shorter ones take as long either way.
LEAST_NBYTES = 16 << 10
# Stretches stored between two looks whether their pages are in memory, while they were
# found there.
WARM_CALLS = 8
PAGE_MASK = ~(mmap.PAGESIZE - 1)

_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Inlet:
    """A way into one file, beside `File.pwrite`."""

    def __init__(self, file: File) -> None:
        """Make one, whose stretches go to a file."""
        kind = file_system(file.path.parent)
        self._file = file
        self._open = file.writable and kind in KEEPS_PAGES and _mincore is not None
        # Above, this opening wrote nothing yet.
        self._reached = 0
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self._warm_calls = 0
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
        if nbytes < LEAST_NBYTES or offset >= self._reached or not self._open:
            return False
        mapping = self._mapping or self._map()
        if mapping is None:
            return False
        first = offset & PAGE_MASK
        if not self._ready(first, offset + nbytes - first):
            return False
        try:
            files.disk.populate(self._address + first, offset + nbytes - first)
        except OSError:
            # `write` says why, in an error of the file's.
            return False
        files.disk.fill(self._file.fd, mapping, offset, nbytes, pack, given)
        self._reached = max(self._reached, offset + nbytes)
        return True

    def _ready(self, first: int, nbytes: int) -> bool:
        """Whether pages are in memory, those of a stretch or after others."""
        if self._warm_calls > 0:
            self._warm_calls -= 1
        elif self._there(first, nbytes):
            self._warm_calls = WARM_CALLS
        else:
            return False
        return True

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes, whose pages may be new."""
        if offset < self._reached:
            self._file.pwrite(data, offset)
        else:
            self._file.pwrite_pieces(data, offset)
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
