"""Read-ahead of compressed chunks: ask the disk for a draw's before unpacking one.

A draw's chunks are some hundred bytes each, all over some hundred shards: faulted in
one after the other, each waits for the disk alone. Whether any is missing is looked up
for a few of them, as `pages` does for rows.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import AHEAD_NBYTES
from mmreplay.storage import early
from mmreplay.storage.pages import COLD_CALLS, SAMPLED_ROWS, WARM_CALLS
from mmreplay.storage.policy import Advise

Ids = NDArray[np.int64]
GAP_NBYTES = 1 << 14
"""Chunks that lie closer are asked for as one stretch."""

_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ChunkPages:
    """The pages of one mapped shard."""

    def __init__(self, mapping: mmap.mmap, advise: Advise) -> None:
        """Look at a mapping; a miss reads one page, but for the kernel's own way."""
        if advise != "kernel":
            mapping.madvise(mmap.MADV_RANDOM)
        self._mapping = mapping
        self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._vector = ctypes.create_string_buffer(1)

    def cached(self, offset: int) -> bool:
        """Whether the page of a byte is in memory.

        Of a file that this user may not write the system always says so.
        """
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.mincore(self._address + page, 1, self._vector)
        return bool(self._vector.raw[0] & 1)

    def ask(self, starts: Ids, stops: Ids) -> int:
        """Have stretches of bytes read, those that nearly touch as one.

        Args:
            starts: int64 ``[N]``, first bytes, N at least 1.
            stops: int64 ``[N]``, the bytes after the last ones.

        Returns:
            Bytes asked for.
        """
        order = np.argsort(starts)
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        apart = np.flatnonzero(starts[1:] > stops[:-1] + GAP_NBYTES) + 1
        firsts = starts[np.append(0, apart)] // mmap.PAGESIZE * mmap.PAGESIZE
        lasts = stops[np.append(apart - 1, len(stops) - 1)]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for at in range(first, last, AHEAD_NBYTES):
                nbytes = min(AHEAD_NBYTES, last - at)
                self._mapping.madvise(mmap.MADV_WILLNEED, at, nbytes)
        return int((lasts - firsts).sum())


Extents = Callable[[Ids], Iterator[tuple[ChunkPages, Ids, Ids]]]
"""Of some rows: shard by shard its pages, and first and last bytes of their chunks."""


class ChunksAhead:
    """When to ask; see `ReadPolicy`."""

    def __init__(self, advise: Advise) -> None:
        """Ask as the policy says."""
        self._advise = advise
        self._warm_calls = self._cold_calls = 0

    def ask(self, rows: Ids, extents: Extents) -> int:
        """Have the chunks of rows read, if any of a sample is missing.

        Args:
            rows: int64 ``[B]``, whatever `extents` takes.
            extents: Finds where their chunks are.

        Returns:
            Bytes asked for.
        """
        if not self._wanted(rows, extents):
            return 0
        return sum(pages.ask(starts, stops) for pages, starts, stops in extents(rows))

    def _wanted(self, rows: Ids, extents: Extents) -> bool:
        if self._advise != "auto":
            return self._advise == "always"
        if self._warm_calls > 0:
            self._warm_calls -= 1
            return False
        if early.gathers():
            return early.lacks(lambda: not self._missing(rows, extents))
        if self._cold_calls > 0:
            self._cold_calls -= 1
            return True
        if self._missing(rows, extents):
            self._cold_calls = COLD_CALLS
            return True
        self._warm_calls = WARM_CALLS
        return False

    @staticmethod
    def _missing(rows: Ids, extents: Extents) -> bool:
        """Whether a chunk of some of the rows is not in memory."""
        some = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        return not all(
            pages.cached(start)
            for pages, starts, _ in extents(some)
            for start in starts.tolist()
        )
