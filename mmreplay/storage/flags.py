"""The flags of all rows, a byte each: mapped, or read and kept."""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import File
from mmreplay.ring import Ring
from mmreplay.storage.base import flags_between
from mmreplay.storage.readers import ReadRows

Flags = NDArray[np.uint8]


class FlagReader(Protocol):
    """Flags of one store.

    Attributes:
        every: uint8 ``[num_rows]``, of those rows whose stretch was asked for, or that
            were taken as new.
    """

    every: Flags

    def take(self, rows: NDArray[np.int64], new: bool = False) -> Flags:
        """Flags of rows, of the shape of rows."""

    def between(self, ring: Ring, env_id: int, first: int, stop: int) -> Flags:
        """Flags of positions ``[first, stop)`` of one environment."""

    def stretch(self, row: int, step: int, count: int) -> bytes:
        """Flags of count rows from one on, every step-th."""


class MappedFlags:
    """Through a mapping; see `FlagReader`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """Look through a mapping of the file."""
        self.every: Flags = np.frombuffer(mapping, np.uint8)

    def take(self, rows: NDArray[np.int64], new: bool = False) -> Flags:
        """See `FlagReader.take`."""
        return self.every.take(rows)

    def between(self, ring: Ring, env_id: int, first: int, stop: int) -> Flags:
        """See `FlagReader.between`."""
        return flags_between(self.every, ring, env_id, first, stop)

    def stretch(self, row: int, step: int, count: int) -> bytes:
        """See `FlagReader.stretch`."""
        return self.every[row : row + step * count : step].tobytes()


class ReadFlags:
    """Read when they are asked for, and kept; see `FlagReader`.

    What draws look at are those of the episode index, which asks for a stretch, or for
    new rows, before it knows of them; and published flags never change. Nobody else
    has them kept: who looks at old rows may have read them before they were replaced.
    """

    def __init__(self, file: File) -> None:
        """Read an open file."""
        self._file = file
        self._kept: Flags = np.zeros(file.nbytes, np.uint8)
        self.every = self._kept.view()
        self.every.flags.writeable = False
        self._rows = ReadRows(file, np.dtype(np.uint8), (), "never")

    def take(self, rows: NDArray[np.int64], new: bool = False) -> Flags:
        """See `FlagReader.take`."""
        found = np.empty(rows.shape, np.uint8)
        self._rows.take(rows.reshape(-1), found.reshape(-1))
        if new:
            self._kept[rows] = found
        return found

    def between(self, ring: Ring, env_id: int, first: int, stop: int) -> Flags:
        """See `FlagReader.between`."""
        for row, step, count in ring.stretch(env_id, first, stop):
            flags = np.frombuffer(self.stretch(row, step, count), np.uint8)
            self._kept[row : row + step * count : step] = flags
        return flags_between(self._kept, ring, env_id, first, stop)

    def stretch(self, row: int, step: int, count: int) -> bytes:
        """See `FlagReader.stretch`."""
        # Those between belong to other environments: a byte each, and read at once.
        return self._file.pread(step * (count - 1) + 1, row)[::step]
