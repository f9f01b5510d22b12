"""Copying rows out of one file: through a mapping of it, or by reading."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import system_failure
from mmreplay.files import File
from mmreplay.ring import runs
from mmreplay.storage.pages import Pages
from mmreplay.storage.policy import Advise

Array = NDArray[np.generic]


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

    def stretch(self, row: int, step: int, count: int) -> bytes | memoryview:
        """Bytes of count rows from one on, every step-th; not copied if need not be."""


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
        flat: Array = np.frombuffer(self.mapping, dtype)
        self.array = flat.reshape(-1, *shape)
        self.pages = Pages(file, _row_nbytes(dtype, shape), advise, self.mapping)

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """See `RowReader.take`."""
        # Without clip, take goes through a buffer; rows are in range.
        return self.array.take(rows, 0, out, "clip")

    def stretch(self, row: int, step: int, count: int) -> bytes | memoryview:
        """See `RowReader.stretch`."""
        found = self.array[row : row + step * count : step]
        if step > 1:
            return found.tobytes()
        return found.reshape(-1).view(np.uint8).data


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
        if len(rows):
            room = out.reshape(-1).view(np.uint8).data
            nbytes = self._nbytes
            for row, first, stop in runs(rows):
                self._file.pread_into(
                    room[first * nbytes : stop * nbytes], row * nbytes
                )
        return out

    def stretch(self, row: int, step: int, count: int) -> bytes:
        """See `RowReader.stretch`."""
        nbytes = self._nbytes
        if step == 1:
            return self._file.pread(count * nbytes, row * nbytes)
        every = range(row, row + step * count, step)
        return b"".join([self._file.pread(nbytes, each * nbytes) for each in every])


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
