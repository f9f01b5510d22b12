"""Copying rows out of one file: through a mapping of it, or by reading."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from math import inf
from pathlib import Path
from time import perf_counter
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.errors import system_failure
from mmreplay.files import File
from mmreplay.ring import runs
from mmreplay.storage.pages import SMALL_ROW_NBYTES, Pages
from mmreplay.storage.policy import Advise

Array = NDArray[np.generic]
_copies = kernels.load("copies")

PAST_NBYTES = 1 << 20
"""Batches of large rows from here on are copied past the caches where that is sooner: a
fifth on one processor, and later by as much on another whose caches hold them."""
TRIES = 4
"""Of either way to copy, the best of which counts. Steps and those after are copied in
turns, and the latter are partly in the caches by then: either way is tried on both."""
EVERY = 512
"""Batches after which both are tried again: a virtual machine's host changes, too."""
PIECE_NBYTES = 1 << 20
"""Read at once of rows that lie together. Between two reads who adds or draws has the
lock of Python, for 5 ms each time."""


class RowReader(Protocol):
    """Rows of one file.

    Attributes:
        dtype: Of a row's values.
        shape: Of one row.
        pages: Asks the disk for rows ahead.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    pages: Pages

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """Copy rows into ``out``, ``[B, *shape]`` and contiguous; return it."""

    def pieces(self, row: int, step: int, count: int) -> Iterator[bytes | memoryview]:
        """Bytes of count rows from one on, every step-th, piece by piece.

        Each is good until the next. Large ones are read: of rows that are no longer in
        memory a mapping fetches a page at a time, and who looks has the lock of Python
        meanwhile, which took adds and draws beyond memory to a fifth of their rates.
        """


class Sooner:
    """Whether to copy past the caches, found by trying both.

    Threads: any may ask; a try that gets lost is made again in the next round.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._calls = 0
        self._best = {True: inf, False: inf}

    def past(self) -> bool:
        """Whether the next batch goes past them."""
        call = self._calls
        self._calls = (call + 1) % EVERY
        if call == 0:
            self._best = {True: inf, False: inf}
        if call < 2 * TRIES:
            return call % 4 in (0, 3)
        return self._best[True] <= self._best[False]

    def note(self, past: bool, seconds: float) -> None:
        """Take note of what a byte of a batch took."""
        self._best[past] = min(self._best[past], seconds)


class MappedRows:
    """Rows through a read-only mapping.

    Attributes:
        mapping: The mapping.
        array: All rows, ``[num_rows, *shape]``.
    """

    def __init__(
        self,
        file: File,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        advise: Advise,
    ) -> None:
        """Map the file; see `RowReader`."""
        self.dtype, self.shape = dtype, shape
        self.mapping = file.map_readonly()
        if advise != "kernel":
            # The kernel's own read-ahead reads 128 KiB for every missing row.
            self.mapping.madvise(mmap.MADV_RANDOM)
        self._file = file
        flat: Array = np.frombuffer(self.mapping, dtype)
        self.array = flat.reshape(-1, *shape)
        self._nbytes = _row_nbytes(dtype, shape)
        self.pages = Pages(file, self._nbytes, advise, self.mapping)
        self._sooner = Sooner()

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """See `RowReader.take`."""
        if self.pages.reads(len(rows)):
            if _read_rows(self._file, self._nbytes, rows, out, ask=True):
                return out
            # A mapping outlives its file, which another thread closed; all else is to
            # be told.
            if self._file.fd >= 0:
                return _read_each(self._file, self._nbytes, rows, out)
        if out.nbytes < PAST_NBYTES or self._nbytes < SMALL_ROW_NBYTES:
            return self._taken(rows, out)
        past, began = self._sooner.past(), perf_counter()
        if past:
            wanted = np.ascontiguousarray(rows)
            _copies.copy_rows(self.array, self._nbytes, wanted, out)
        else:
            self._taken(rows, out)
        self._sooner.note(past, (perf_counter() - began) / out.nbytes)
        return out

    def _taken(self, rows: NDArray[np.int64], out: Array) -> Array:
        # Without clip, take goes through a buffer; rows are in range.
        return self.array.take(rows, 0, out, "clip")

    def pieces(self, row: int, step: int, count: int) -> Iterator[bytes | memoryview]:
        """See `RowReader.pieces`."""
        nbytes = self._nbytes
        if step == 1 or nbytes >= mmap.PAGESIZE:
            yield from _read(self._file, nbytes, row, step, count)
        else:
            # Reading those between as well would take as long for each environment as
            # for all.
            rows = range(row, row + step * count, step)
            self.pages.prefetch(np.array(rows, np.int64))
            yield self.array[rows.start : rows.stop : step].tobytes()


class ReadRows:
    """Rows by one read each, those that lie one after another by one for all."""

    def __init__(
        self,
        file: File,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        advise: Advise,
    ) -> None:
        """Read an open file; see `RowReader`."""
        self.dtype, self.shape = dtype, shape
        self._file = file
        self._nbytes = _row_nbytes(dtype, shape)
        self.pages = Pages(file, self._nbytes, advise)

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """See `RowReader.take`."""
        ask = self.pages.reads(len(rows))
        if _read_rows(self._file, self._nbytes, rows, out, ask=ask):
            return out
        return _read_each(self._file, self._nbytes, rows, out)

    def pieces(self, row: int, step: int, count: int) -> Iterator[bytes | memoryview]:
        """See `RowReader.pieces`."""
        return _read(self._file, self._nbytes, row, step, count)


def _read_rows(
    file: File, nbytes: int, rows: NDArray[np.int64], out: Array, *, ask: bool
) -> bool:
    """Read rows in the order of the file, others' Python running meanwhile.

    Returns:
        Whether all were read; `_read_each` tells why not.
    """
    fd = file.fd
    done: bool = _copies.read_rows(fd, nbytes, np.ascontiguousarray(rows), out, ask)
    # A number that another thread gave back may be another file's by now.
    return done and file.fd == fd


def _read_each(file: File, nbytes: int, rows: NDArray[np.int64], out: Array) -> Array:
    """Read rows one run after the other, where they were not all to be had at once.

    Raises:
        CorruptError: The file ends before.
        FailedError: The device refuses, or another thread closed the file.
    """
    room = out.reshape(-1).view(np.uint8).data
    each = runs(rows) if len(rows) else []
    for row, first, stop in each:
        file.will_need(row * nbytes, (stop - first) * nbytes)
    for row, first, stop in each:
        file.pread_into(room[first * nbytes : stop * nbytes], row * nbytes)
    return out


def _read(
    file: File, row_nbytes: int, row: int, step: int, count: int
) -> Iterator[memoryview]:
    """Read every step-th of rows, those that lie together at most a piece at once."""
    whole = row_nbytes * (count if step == 1 else 1)
    room = memoryview(bytearray(min(PIECE_NBYTES, whole)))
    for first in range(row, row + step * count, step if step > 1 else count):
        for at in range(0, whole, PIECE_NBYTES):
            piece = room[: whole - at]
            file.pread_into(piece, first * row_nbytes + at)
            yield piece


def _row_nbytes(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


class Gone:
    """Stands where readers were, and says so to whoever still asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> NoReturn:
        raise system_failure("read", self._folder, OSError(errno.EBADF, name))

    def __getitem__(self, key: object) -> NoReturn:
        self.__getattr__("[]")
