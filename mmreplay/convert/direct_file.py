"""How bytes of large files get to the device while more of them are made.

Through the page cache a byte is copied, its page is found, and both are paid again when
the device takes it: on a virtual machine half of a conversion's time. A file that is
too large to be wanted in memory next is therefore written past it, by `Direct`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.ahead import Threads
from mmreplay.disk.files import File
from mmreplay.disk.filesystem import KEEPS_PAGES, file_system
from mmreplay.errors import FailedError

# The device is given what was written so far after so many bytes, so that the sync at
# the end finds little left.
SYNC_NBYTES = 64 << 20
DIRECT_NBYTES = 256 << 20
"""Files from here on are written past the page cache."""
ALIGNMENT = 4096
"""Of memory, offset and length of what goes past it."""
SLAB_NBYTES = 4 << 20
"""Written at a time: of 1 MiB the device took a tenth less a second, of 256 KiB a
third."""
SLABS_NBYTES = 24 << 20
"""Memory for all of them."""
LEAST_SLAB_NBYTES = 64 << 10
WRITERS = 2
"""Threads that write slabs: while one has to wait for the interpreter, the device has
another's. Of one, loads of pixels took a third longer."""
MAX_STREAMS = 512


class Syncs:
    """Gives what is being written to the device, in a thread."""

    def __init__(self, sync: Callable[[], None], pool: Threads) -> None:
        self._sync, self._pool = sync, pool
        self._written = 0
        self._job: Future[None] | None = None

    def count(self, nbytes: int) -> None:
        """Tell how much was written since.

        Raises:
            FailedError: The device refused what was written before.
        """
        self._written += nbytes
        if self._written < SYNC_NBYTES:
            return
        if self._job is not None:
            if not self._job.done():
                return
            self._job.result()
        self._written = 0
        self._job = self._pool.submit(self._sync)

    def wait(self) -> None:
        """Wait for the device; raises as `count` does."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()


class Way(Protocol):
    """Takes the bytes of a file, in streams of which each goes on where it was."""

    def write(self, data: memoryview, offset: int) -> None:
        """Take bytes, which are not looked at after this call.

        Raises:
            FullError: No space is left, for these or for earlier ones.
            FailedError: The device refuses, likewise.
        """

    def finish(self) -> None:
        """Write what is left; raises as `write` does."""

    def close(self) -> None:
        """Give everything back but the file; a second call does nothing."""


def way_to(file: File, streams: int) -> Way:
    """The way for a file, whose size it has already.

    Args:
        file: Open for writing.
        streams: Places in it that are written to in turns.

    Raises:
        FullError: No space is left for so large a file.
    """
    if file.nbytes >= DIRECT_NBYTES and file_system(file.path.parent) in KEEPS_PAGES:
        # A full disk is told before the first byte, and threads that write where there
        # is space need not wait for each other: a fifth faster.
        file.allocate(0, file.nbytes)
    return past(file, file.nbytes, streams) or Cached(file)


def past(file: File, nbytes: int, streams: int, files: int = 1) -> Direct | None:
    """The way past the page cache, for a file that is large enough.

    Args:
        file: Open for writing.
        nbytes: To be written.
        streams: As in `way_to`.
        files: How many are written so side by side, and share the memory.
    """
    if nbytes >= DIRECT_NBYTES and 0 < streams * files <= MAX_STREAMS:
        try:
            return Direct(file, file.past_cache(), streams, files)
        except FailedError:
            # A file system that has no such way.
            pass
    return None


class Cached:
    """Through the page cache; see `Way`."""

    def __init__(self, file: File) -> None:
        """Write into an open file."""
        self._file = file
        self._pool = Threads(1, "mmreplay-sync")
        self._syncs = Syncs(file.sync, self._pool)

    def write(self, data: memoryview, offset: int) -> None:
        """See `Way.write`."""
        self._file.pwrite_pieces(data, offset)
        self._syncs.count(len(data))

    def finish(self) -> None:
        """See `Way.finish`."""
        self._syncs.wait()

    def close(self) -> None:
        """See `Way.close`."""
        # The file must not be closed under a thread that syncs it.
        self._pool.shutdown()


@dataclass(slots=True)
class _Slab:
    """Aligned memory, and what is in it.

    Attributes:
        memory: uint8 ``[N]``.
        offset: Where its first byte goes, aligned.
        filled: Bytes in it.
    """

    memory: NDArray[np.uint8]
    offset: int = 0
    filled: int = 0


class Direct:
    """Past the page cache, in threads; see `Way`.

    Only whole blocks of the device can go so. What lies before the first one of a
    stream and after its last goes through the cache, in pages that hold no others.
    """

    def __init__(self, file: File, direct: File, streams: int, files: int) -> None:
        """Write into a file.

        Args:
            file: Open for writing.
            direct: The same, past the cache; closed with this.
            streams: How many are written to in turns, at most.
            files: See `past`.
        """
        self._file, self._direct = file, direct
        self._works = True
        # Two more are written, and one waits for them.
        self._spare = streams + WRITERS + 1
        each = SLABS_NBYTES // files // self._spare // ALIGNMENT * ALIGNMENT
        self._slab_nbytes = min(SLAB_NBYTES, max(LEAST_SLAB_NBYTES, each))
        self._free: SimpleQueue[_Slab] = SimpleQueue()
        self._streams: dict[int, _Slab] = {}
        self._jobs: deque[Future[None]] = deque()
        self._pool = Threads(WRITERS, "mmreplay-direct")

    def write(self, data: memoryview, offset: int) -> None:
        """See `Way.write`."""
        slab = self._streams.pop(offset, None)
        done = 0
        if slab is None:
            done = min(len(data), -offset % ALIGNMENT)
            if done:
                self._file.pwrite(data[:done], offset)
        # numpy's copies let go of the interpreter.
        source = np.frombuffer(data, np.uint8)
        while done < len(source):
            if slab is None:
                slab = self._empty(offset + done)
            room = self._slab_nbytes - slab.filled
            part = source[done : done + room]
            slab.memory[slab.filled : slab.filled + len(part)] = part
            slab.filled += len(part)
            done += len(part)
            if len(part) == room:
                self._send(slab)
                slab = None
        if slab is not None:
            self._streams[offset + done] = slab

    def _empty(self, offset: int) -> _Slab:
        """A slab that nobody writes, for what begins at an aligned offset."""
        if self._spare:
            self._spare -= 1
            memory = np.empty(self._slab_nbytes + ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % ALIGNMENT
            slab = _Slab(memory[first : first + self._slab_nbytes])
        else:
            slab = self._free.get()
        slab.offset, slab.filled = offset, 0
        return slab

    def _send(self, slab: _Slab) -> None:
        """Have a slab written."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        self._jobs.append(self._pool.submit(self._write, slab))

    def _write(self, slab: _Slab) -> None:
        """Write a slab, whole blocks past the cache, and give it back."""
        try:
            whole = slab.filled // ALIGNMENT * ALIGNMENT
            if whole and not self._past(slab.memory[:whole].data, slab.offset):
                whole = 0
            rest = slab.memory[whole : slab.filled]
            if len(rest):
                self._file.pwrite_pieces(rest.data, slab.offset + whole)
        finally:
            self._free.put(slab)

    def _past(self, data: memoryview, offset: int) -> bool:
        """Write past the cache; False where that does not work, now or ever."""
        if self._works:
            try:
                self._direct.pwrite(data, offset)
            except FailedError:
                # A device of larger blocks, or one that fails: the other way will
                # work, or raise what is to be told.
                self._works = False
        return self._works

    def finish(self) -> None:
        """See `Way.finish`."""
        streams, self._streams = self._streams, {}
        for slab in streams.values():
            self._send(slab)
        while self._jobs:
            self._jobs.popleft().result()

    def close(self) -> None:
        """See `Way.close`."""
        self._pool.shutdown()
        self._direct.close()
