"""Rows stored through a mapping, where that is safe and shorter than a write.

Rows that are packed for `pwrite` are copied twice, and the kernel looks at each page
by itself: 1,024 rows of 168 bytes take 50 us so, and 17 when they are packed into the
mapping (tools/bench/bench_add.py). A store cannot fail: on a full or failing disk it is
a SIGBUS. So its pages are asked for first, with `MADV_POPULATE_WRITE`, which says what
is wrong; what it refuses is left to `pwrite`, and so are pages that would have to be
read from the disk first, and new ones, which a store would take one by one.

Single steps are short, and a call for each is what they cost: two writes take 2 to 5
us, two stores 0.5. So pages are asked for some steps ahead, and stored into for a
second at most: where space stays with what was written once (`KEEPS_SPACE`), they are
in memory, or on a device that was read just now. Only bytes below the highest that
this opening wrote are stored over: a first lap is written.
"""

from __future__ import annotations

import ctypes
import mmap
from time import monotonic

import numpy as np

from mmreplay import files
from mmreplay.disk import Data, Pack
from mmreplay.errors import FailedError
from mmreplay.files import File
from mmreplay.mounts import KEEPS_PAGES, KEEPS_SPACE, file_system
from mmreplay.storage.edges import Edges
from mmreplay.storage.policy import Advise

# Shorter ones take as long either way.
LEAST_NBYTES = 16 << 10
# Stretches stored between two looks whether their pages are in memory, while they were
# found there.
WARM_CALLS = 8
PAGE_MASK = ~(mmap.PAGESIZE - 1)
# Asked for at once, for so many single steps to come, within these bounds, and how long
# they may be stored into.
NEAR_STEPS = 192
NEAR_NBYTES = 64 << 10
FAR_NBYTES = 256 << 10
NEAR_S = 1.0
# Longer steps are copied for most of their time, either way.
SHORT_NBYTES = 4 << 10
# Steps written before the next look, after pages were not to be had, or after so many
# calls in a row were for places far from what was asked for just before: steps of
# environments whose heads are apart, which cost more so than two writes.
RESTS = 64
JUMPS = 4

_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Inlet:
    """A way into one file, beside `File.pwrite`.

    Attributes:
        file: Where it leads.
        mapping: Of the file, once something was to be stored.
        near: The first byte that steps may be stored into without a look.
        far: The byte after the last one.
        until: When that ends, as `monotonic` tells it.
    """

    def __init__(
        self, file: File, edges: Edges | None = None, advise: Advise = "auto"
    ) -> None:
        """Make one, whose stretches go to a file.

        Args:
            file: The file.
            edges: Of its rows; None where pages hold so many that they are read, once
                they were asked for.
            advise: Whether the disk may be asked; see `ReadPolicy`.
        """
        kind = file_system(file.path.parent)
        self.file, self._edges = file, edges
        self._asks = advise in ("auto", "always")
        self._open = file.writable and kind in KEEPS_PAGES and _mincore is not None
        self._stays = self._open and kind in KEEPS_SPACE
        # Above, this opening wrote nothing yet.
        self._reached = 0
        self.mapping: mmap.mmap | None = None
        self._address = 0
        self._warm_calls = 0
        self._seen = bytearray()
        self._vector: ctypes.Array[ctypes.c_char] | None = None
        self.near = self.far = 0
        self.until = 0.0
        self._rests = self._jumps = 0

    def only_write(self) -> None:
        """Store no step, from the first one on: others may give its space back."""
        self._stays = False

    def put(self, data: Data, offset: int, nbytes: int) -> None:
        """Store one step's bytes, or write them.

        Args:
            data: Contiguous bytes.
            offset: Where they belong; steps to come are taken to follow.
            nbytes: How many they are.
        """
        stop = offset + nbytes
        if self.ready(offset, stop) and self.file.fd >= 0:
            files.disk.store(self.file.fd, self.mapping, offset, data)  # type: ignore[arg-type]  # made by then
            return
        if self._edges is not None:
            self._edges.make(offset, stop)
        self.file.pwrite(data, offset)
        self._reached = max(self._reached, stop)

    def ready(self, offset: int, stop: int) -> bool:
        """Have pages ready for one step, and steps to come, if they may be stored."""
        near = self.near <= offset and stop <= self.far and monotonic() < self.until
        return near or self._approach(offset, stop)

    def put_pieces(self, data: memoryview, offset: int) -> None:
        """The same of long rows, whose pages are taken to be new."""
        if len(data) <= SHORT_NBYTES:
            self.put(data, offset, len(data))
            return
        if self._edges is not None:
            self._edges.make(offset, offset + len(data))
        self.file.pwrite_pieces(data, offset)
        self._reached = max(self._reached, offset + len(data))

    def _approach(self, first: int, stop: int) -> bool:
        """Have pages ready from a step on, if they may be stored into."""
        if stop > self._reached or not self._stays or stop - first > SHORT_NBYTES:
            return False
        if self._rests:
            self._rests -= 1
            return False
        nbytes = min(max(NEAR_STEPS * (stop - first), NEAR_NBYTES), FAR_NBYTES)
        far = min(first + nbytes, self._reached)
        row, first = first, first & PAGE_MASK
        now = monotonic()
        jumps = now < self.until and not self.near <= first <= self.far
        self._jumps = self._jumps + 1 if jumps else 0
        if self._jumps > JUMPS:
            self._rests, self._jumps = RESTS, 0
            return False
        if (self.mapping or self._map()) is None:
            return False
        try:
            if not self._there(first, far - first):
                far = self._bring(row, stop, far)
            ready = far >= stop
            if ready:
                files.disk.populate(self._address + first, far - first)
        except OSError:
            # `pwrite` says why, in an error of the file's.
            ready = False
        if not ready:
            self._rests = RESTS
            return False
        self.near, self.far = first, far
        self.until = now + NEAR_S
        return True

    def _bring(self, row: int, stop: int, far: int) -> int:
        """Have missing pages in memory, from a step on; return up to where they are."""
        first, edges = row & PAGE_MASK, self._edges
        if edges is None:
            if self._asks:
                self.file.will_need(first, far - first)
        elif stop - row >= edges.step_nbytes:
            far = min(far, edges.clear(row, -(-row & PAGE_MASK), far))
            if self._there(first, far - first):
                return far
        return first

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
        mapping = self.mapping or self._map()
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
        files.disk.fill(self.file.fd, mapping, offset, nbytes, pack, given)
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
        if self._edges is not None:
            self._edges.make(offset, offset + len(data))
        if offset < self._reached:
            self.file.pwrite(data, offset)
        else:
            self.file.pwrite_pieces(data, offset)
        self._reached = max(self._reached, offset + len(data))

    def _map(self) -> mmap.mmap | None:
        try:
            mapping = self.mapping = self.file.map_to_fill()
        except FailedError:
            # No address space is left for it: the file is written as others are.
            self._open = self._stays = False
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
