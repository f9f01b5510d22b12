"""Which places of a ring are sealed: one number each, in a file of their own.

A *place* is a stretch of rows as long as a shard. Its number is odd where a shard
holds it and even where the tail does, and one more at every change: who reads looks
before and after, and reads again where it changed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import File

FILE_NAME = "places.bin"
DTYPE = np.dtype("<u4")

Ids = NDArray[np.int64]


class Places:
    """The numbers of one generation."""

    def __init__(self, file: File, mapped: bool) -> None:
        """Look through a mapping of the file, or read it at each look."""
        self.file = file
        self._count = file.nbytes // DTYPE.itemsize
        self._numbers: NDArray[np.uint32] | None = None
        if mapped:
            self._numbers = np.frombuffer(file.map_readonly(), DTYPE)

    @classmethod
    def create(cls, folder: Path, count: int) -> Places:
        """Create the file, of which no place is sealed."""
        nbytes = count * DTYPE.itemsize
        file = File.create(folder / FILE_NAME, nbytes)
        try:
            # To look at a hole through a mapping is a SIGBUS where tmpfs is full.
            file.pwrite(bytes(nbytes), 0)
            return cls(file, True)
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, folder: Path, count: int, *, writable: bool, mapped: bool) -> Places:
        """Open the file, after checking its size."""
        nbytes = count * DTYPE.itemsize
        file = File.open(folder / FILE_NAME, nbytes, writable=writable)
        if writable:
            # After a sync that failed the kernel would owe the disk nothing of what
            # is there: the next sync must be one of what is written now.
            try:
                file.pwrite(file.pread(nbytes, 0), 0)
            except BaseException:
                file.close()
                raise
        return cls(file, mapped)

    def take(self, places: Ids) -> Ids:
        """Numbers of places, int64 of their shape."""
        return self._all().take(places).astype(np.int64)

    def get(self, place: int) -> int:
        """Number of one place."""
        return int(self._all()[place])

    def sealed(self) -> Ids:
        """Every sealed place, int64 ``[N]``."""
        return np.flatnonzero(self._all() & 1)

    def _all(self) -> NDArray[np.uint32]:
        if self._numbers is not None:
            return self._numbers
        data = self.file.pread(self.file.nbytes, 0)
        return np.frombuffer(data, DTYPE)

    def put(self, place: int, number: int) -> None:
        """Change one number, for whoever looks next."""
        data = np.array([number], DTYPE).tobytes()
        self.file.pwrite(data, place * DTYPE.itemsize)
