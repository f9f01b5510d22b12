"""How rows get into files: space reserved, pages filled, bytes stored or written.

`SpaceReservation` reserves the disk space of rows to come before they are written.

`PartialPageFiller` makes pages that a row fills in part. To write part of a page the
kernel reads the page first, unless it is in memory; in a ring larger than memory it
seldom is, and each such write waits for the disk. The rest of the page belongs to rows
that are written next, over rows that no reader asks for again and no power cut brings
back. So the page is written as a whole, as zeros, right before the row. Left to the
kernel are pages where a limit or the ring ends, and those of environments side by side
once their heads differ.

`MappedWriter` stores rows through a mapping where that is safe and faster. Rows packed
for `pwrite` are copied twice, and the kernel looks at each page: 1,024 rows of 168
bytes take 50 us so, and 17 when they are packed into the mapping
(tools/bench/bench_add.py). A store cannot fail: on a full or failing disk it is a
SIGBUS. So its pages are populated first, with `MADV_POPULATE_WRITE`, which returns an
error instead. What it refuses is left to `pwrite`, and so are pages that would have to
be read from the disk first, and new ones, which a store would take one by one.

Single steps are short, and a call for each is what they cost: two writes take 2 to 5
us, two stores 0.5. So pages are populated some steps ahead, and stored into for a
second at most: where a written block keeps its space (`KEEPS_SPACE`) they are in
memory, or on a device that was read just now. Only bytes below the highest that this
opening wrote are stored over: a first lap is written.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk import files
from mmreplay.disk.calls import Data, Pack
from mmreplay.disk.files import ALLOCATION_NBYTES, KEEPS_PAGES, KEEPS_SPACE, File, file_system
from mmreplay.errors import FailedError
from mmreplay.ring import Ring
from mmreplay.storage.memory_usage import available_nbytes
from mmreplay.storage.read_ahead import Pages

if TYPE_CHECKING:
    from mmreplay.kernels.rows import PackerKernel
    from mmreplay.storage.store import Advise


Ids = NDArray[np.int64]


class SpaceReservation:
    """The space that is reserved in a ring's files, each MiB once an opening."""

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
            for row, _, count in ring.split_at_wrap(0 if wide > 1 else env_id, *here):
                for name, file in self._files.items():
                    self._reserve(name, file, row, row + count * wide)

    def _reserve(self, name: str, file: File, row: int, last: int) -> None:
        """Reserve the space that holds rows ``[row, last)``."""
        size, row_nbytes = ALLOCATION_NBYTES, file.nbytes // self._ring.num_rows
        if name not in self._reserved:
            self._reserved[name] = np.zeros(-(-file.nbytes // size), bool)
        first, stop = row * row_nbytes // size, -(-last * row_nbytes // size)
        # Once an opening: a call for each MiB (`ALLOCATION_NBYTES`), and a look into an
        # array of bools for each of the raises between.
        left = np.flatnonzero(~self._reserved[name][first:stop])
        if len(left):
            offset = (first + int(left[0])) * size
            until = min(file.nbytes, (first + int(left[-1]) + 1) * size)
            # Noted after it: a disk that was full is asked again by the next add.
            file.allocate(offset, until - offset)
            self._reserved[name][first:stop] = True

    def free(self, name: str, row: int, count: int) -> None:
        """Give the space of rows in one file back, until it is reserved again."""
        file = self._files[name]
        nbytes = file.nbytes // self._ring.num_rows
        file.punch(row * nbytes, count * nbytes)
        reserved = self._reserved.get(name)
        if reserved is not None:
            first = row * nbytes // ALLOCATION_NBYTES
            stop = -(-(row + count) * nbytes // ALLOCATION_NBYTES)
            reserved[first:stop] = False


PAGE = mmap.PAGESIZE
LOOK_NBYTES = 1 << 21
"""Written between two looks whether pages are in memory."""
LOOKS = 4
"""Pages that are looked at in the next bytes: draws leave some of them in memory."""
CLEARED_NBYTES = 256 << 10
"""Cleared at once, at most."""
ZEROS = memoryview(bytes(CLEARED_NBYTES))


class PartialPageFiller:
    """The pages of one file that a row shares with those after it.

    Every write begins at the head of an environment.

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
        # Part of a step alone leaves the page to the kernel: rows of other environments
        # lie behind it, and may be alive.
        nbytes = stop - offset
        if not self._limits or nbytes < self.step_nbytes:
            return
        env_id = (stop // self.step_nbytes - 1) // self._slots
        # Four looks in 2 MiB: where memory holds the ring they are all that this costs,
        # and beyond memory an add of 28 KB takes 75 to 100 us instead of 115 to 175.
        self._unlooked[env_id] -= nbytes
        if self._unlooked[env_id] < 0:
            self._unlooked[env_id] = LOOK_NBYTES
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
        # Up to the limit and not a byte further: what lies behind is alive, and the
        # mutant ClearsMore of tools/torture shows one row too many.
        left = (self._limits[env_id] - ahead % self._slots) % self._slots
        last = min(ahead + left, (env_id + 1) * self._slots) * self.step_nbytes
        last_page = -(-stop // PAGE) * PAGE
        # At most 256 KiB at once: the rows after are stored as if all were in memory.
        stop = min(last_page, last // PAGE * PAGE, first + CLEARED_NBYTES)
        if stop <= first:
            return first
        self.file.pwrite(ZEROS[: stop - first], first)
        return stop

    def _misses(self, env_id: int, offset: int) -> bool:
        """Whether some page is missing of what an environment is to write next."""
        ring_nbytes = self._slots * self.step_nbytes
        begin, step = env_id * ring_nbytes, min(LOOK_NBYTES, ring_nbytes) // LOOKS
        ahead = (begin + (offset - begin + n * step) % ring_nbytes for n in range(1, LOOKS + 1))
        return any(self._pages.lacks(at) for at in ahead)


LEAST_NBYTES = 16 << 10
"""Shorter blocks take as long through a write."""
WARM_CALLS = 8
"""Blocks stored between two looks whether pages are in memory, while they were."""
PAGE_MASK = ~(mmap.PAGESIZE - 1)
# Pages for so many single steps are made ready at once, within these bounds. They may
# be stored into for a second: by then the kernel may have written them back, and a
# store would wait for the device, or die with it.
NEAR_STEPS = 192
NEAR_NBYTES = 64 << 10
FAR_NBYTES = 256 << 10
NEAR_S = 1.0
SHORT_NBYTES = 4 << 10
"""Longer steps are copied for most of their time, either way."""
RESTS = 64
"""Steps written before the next try, after pages could not be made ready."""
JUMPS = 4
"""As many tries in a row far from the pages that were ready, and steps are written:
heads of environments that are apart cost more so than two writes."""

_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class MappedWriter:
    """Writes the rows of one file: through a mapping where that is safe and shorter.

    Attributes:
        file: The file.
        mapping: Of the file, from the first store on.
        near: The first byte that steps may be stored into at once.
        far: The byte after the last one.
        until: When that ends, in seconds of `monotonic`.
    """

    def __init__(
        self,
        file: File,
        filler: PartialPageFiller | None = None,
        advise: Advise = "auto",
        new_pages_nbytes: int = files.NEW_PAGES_NBYTES,
    ) -> None:
        """Begin with no page ready.

        Args:
            file: The file.
            filler: Of its rows; None where a page holds so many that missing pages are
                read instead.
            advise: Whether the disk may be asked; see `ReadPolicy`.
            new_pages_nbytes: Bytes of a write where pages are new.
        """
        kind = file_system(file.path.parent)
        self.file, self._filler = file, filler
        self._asks = advise in ("auto", "always")
        self._open = file.writable and kind in KEEPS_PAGES and _mincore is not None
        self._stays = self._open and kind in KEEPS_SPACE
        # This opening wrote nothing at or above this byte yet.
        self._reached = 0
        self.mapping: mmap.mmap | None = None
        self._address = 0
        self._warm_calls = 0
        # Bytes of blocks that may still be stored where nothing is yet.
        self._fresh_nbytes: int | None = None
        self._seen = bytearray()
        self._vector: ctypes.Array[ctypes.c_char] | None = None
        self.near = self.far = 0
        self.until = 0.0
        self._rests = self._jumps = 0
        self._new_pages_nbytes = new_pages_nbytes

    def unmap(self) -> None:
        """Let the mapping go, once the file is closed: no more is written."""
        mapping, self.mapping = self.mapping, None
        self._open = self._stays = False
        self.near = self.far = 0
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()

    def only_write(self) -> None:
        """Store no step from now on: another thread may give the space of rows back."""
        self._stays = False

    def recycle_pages(self) -> None:
        """The same, where new pages are those that a short time ago were given back."""
        self.only_write()
        self._new_pages_nbytes = files.RECYCLED_PAGES_NBYTES

    def put(self, data: Data, offset: int, nbytes: int) -> None:
        """Store one step's bytes, or write them.

        Args:
            data: Contiguous bytes.
            offset: Of the step's first byte; the next steps are taken to follow.
            nbytes: How many they are.
        """
        stop = offset + nbytes
        # As `ready` does, whose call a step would notice.
        near = self.near <= offset and stop <= self.far and monotonic() < self.until
        if (near or self._approach(offset, stop, 0)) and self.file.fd >= 0:
            files.disk.store(self.file.fd, self.mapping, offset, data)  # type: ignore[arg-type]  # made by then
            return
        if self._filler is not None:
            self._filler.make(offset, stop)
        self.file.pwrite(data, offset)
        if stop > self._reached:
            self._reached = stop

    def put_long(self, data: memoryview, offset: int) -> None:
        """Write long rows, whose pages are taken to be new; `put` short ones."""
        if len(data) <= SHORT_NBYTES:
            self.put(data, offset, len(data))
            return
        if self._filler is not None:
            self._filler.make(offset, offset + len(data))
        self.file.pwrite_new_pages(data, offset, self._new_pages_nbytes)
        self._reached = max(self._reached, offset + len(data))

    def ready(self, offset: int, stop: int, fresh_stop: int = 0) -> bool:
        """Make the pages of one step ready to be stored into, and some after them.

        Args:
            offset: The step's first byte.
            stop: The byte after its last one.
            fresh_stop: Bytes from `offset` up to here hold nothing yet, and their space
                is reserved, as in the first lap of a ring.

        Returns:
            Whether they are; if not, the step is to be written.
        """
        # A clock, not only a range: the kernel may write a page back and evict it, and
        # a store into it would wait for the disk, or be a SIGBUS where it cannot be
        # read.
        near = self.near <= offset and stop <= self.far and monotonic() < self.until
        return near or self._approach(offset, stop, fresh_stop)

    def _approach(self, offset: int, stop: int, fresh_stop: int) -> bool:
        # A page not written in this opening is on the disk only, and slow to store
        # into, unless it is fresh: then there is nothing to read.
        known = self._reached if self._reached > fresh_stop else fresh_stop
        # Steps above 4 KiB are copied for most of their time, by either way.
        if stop > known or not self._stays or stop - offset > SHORT_NBYTES:
            return False
        if self._rests:
            self._rests -= 1
            return False
        # Some steps ahead: two writes take 2 to 5 us a step and two stores 0.5, but the
        # call that makes pages ready costs as much as a write.
        nbytes = min(max(NEAR_STEPS * (stop - offset), NEAR_NBYTES), FAR_NBYTES)
        far = min(offset + nbytes, known)
        first = offset & PAGE_MASK
        now = monotonic()
        # Heads far apart, as of environments after a clear: each step would make pages
        # ready that the next one does not use.
        jumps = now < self.until and not self.near <= first <= self.far
        self._jumps = self._jumps + 1 if jumps else 0
        if self._jumps > JUMPS:
            self._rests, self._jumps = RESTS, 0
            return False
        if (self.mapping or self._map()) is None:
            return False
        try:
            if stop <= self._reached:
                far = min(far, self._reached)
                if not self._in_memory(first, far - first):
                    far = self._bring(offset, stop, far)
            ready = far >= stop
            # An error of this call is what a store would die of: a full disk, a page
            # that cannot be read. It must come before any byte is stored.
            if ready:
                files.disk.populate(self._address + first, far - first)
        except OSError:
            # `pwrite` says why, in an error that names the file.
            ready = False
        if not ready:
            self._rests = RESTS
            return False
        self.near, self.far = first, far
        self.until = now + NEAR_S
        # In the next lap fresh pages are as good as those that were written.
        self._reached = max(self._reached, far)
        return True

    def _bring(self, offset: int, stop: int, far: int) -> int:
        """Bring missing pages into memory, from a step on; return where they end."""
        first, filler = offset & PAGE_MASK, self._filler
        if filler is None:
            if self._asks:
                self.file.will_need(first, far - first)
        elif stop - offset >= filler.step_nbytes:
            far = min(far, filler.clear(offset, -(-offset & PAGE_MASK), far))
            if self._in_memory(first, far - first):
                return far
        return first

    def fill(
        self,
        offset: int,
        nbytes: int,
        pack: Pack,
        arguments: tuple[object, ...],
        *,
        fresh: bool = False,
    ) -> bool:
        """Pack a block straight into the mapping, instead of a write.

        Args:
            offset: The block's first byte.
            nbytes: How many.
            pack: Stores them all, into a memoryview of them.
            arguments: Its other arguments.
            fresh: Its rows hold nothing yet, and their space is reserved.

        Returns:
            False, and nothing was stored, where `write` is to be called.
        """
        if not self.ready_to_fill(offset, nbytes, fresh=fresh):
            return False
        mapping = self.mapping
        assert mapping is not None
        files.disk.fill(self.file.fd, mapping, offset, nbytes, pack, arguments)
        return True

    def ready_to_fill(self, offset: int, nbytes: int, *, fresh: bool) -> bool:
        """Make the pages of a block ready to be stored into.

        Args:
            offset: The block's first byte.
            nbytes: How many.
            fresh: Its rows hold nothing yet, and their space is reserved.

        Returns:
            Whether they are; if not, the block is to be written.
        """
        if nbytes < LEAST_NBYTES or not self._open:
            return False
        if offset >= self._reached and not fresh:
            return False
        if (self.mapping or self._map()) is None:
            return False
        first = offset & PAGE_MASK
        # Pages that are not in memory would be read first, 43 of them for 1,024 rows of
        # 168 bytes; `pwrite` of whole pages reads none.
        if not fresh and not self._warm(first, offset + nbytes - first):
            return False
        if fresh and not self._memory_holds(nbytes):
            return False
        try:
            files.disk.populate(self._address + first, offset + nbytes - first)
        except OSError:
            # `write` says why, in an error that names the file.
            return False
        self._reached = max(self._reached, offset + nbytes)
        return True

    def _warm(self, first: int, nbytes: int) -> bool:
        """Whether a block's pages are in memory, or pages of blocks before it were."""
        if self._warm_calls > 0:
            self._warm_calls -= 1
        elif self._in_memory(first, nbytes):
            self._warm_calls = WARM_CALLS
        else:
            return False
        return True

    def _memory_holds(self, nbytes: int) -> bool:
        """Whether blocks stored where nothing is yet fit a sixteenth of free memory.

        Stores make pages dirty that the kernel writes back late, and mapped pages are
        the last that it evicts. Once they fill memory, each fresh page waits for the
        disk: under a limit of a quarter of the ring, a first lap of blocks took 1.6
        times as long as when it was written, and its first eighth still 1.7 times with
        a quarter of memory stored. A sixteenth stored and the rest written takes no
        longer.
        """
        if self._fresh_nbytes is None:
            self._fresh_nbytes = available_nbytes() // 16
        self._fresh_nbytes -= nbytes
        return self._fresh_nbytes >= 0

    def write(self, data: memoryview, offset: int) -> None:
        """Write packed rows, whose pages may be new."""
        if self._filler is not None:
            self._filler.make(offset, offset + len(data))
        if offset < self._reached:
            self.file.pwrite(data, offset)
        else:
            self.file.pwrite_new_pages(data, offset, self._new_pages_nbytes)
        self._reached = max(self._reached, offset + len(data))

    def _map(self) -> mmap.mmap | None:
        try:
            mapping = self.mapping = self.file.map_to_fill()
        except FailedError:
            # No address space is left for it: the file is written as others are.
            self._open = self._stays = False
            return None
        self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        # A commit writes pages back, and each takes a fault when it is stored into
        # again: 43 for 1,024 rows of 168 bytes, or one for 2 MiB in a large page. Not
        # for environments with rows apart, which would take one each, nor for flags,
        # whose commits would get longer. A kernel without them refuses.
        if self._stays and self._filler is not None:
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def _in_memory(self, first: int, nbytes: int) -> bool:
        """Whether all pages of a range that begins with a page are in memory."""
        count = -(-nbytes // mmap.PAGESIZE)
        if len(self._seen) < count:
            self._seen = bytearray(count)
            self._vector = (ctypes.c_char * count).from_buffer(self._seen)
        if _mincore is None or _mincore(self._address + first, nbytes, self._vector):
            return False
        return self._seen.count(1, 0, count) == count


class StepWriters(NamedTuple):
    """What stores plain steps, each of which is one record for each environment.

    Attributes:
        packer: Packs a step into its records.
        stride: Bytes of a record.
        records: Writes records, in rows side by side.
        flags: Writes their flags.
    """

    packer: PackerKernel
    stride: int
    records: MappedWriter
    flags: MappedWriter
