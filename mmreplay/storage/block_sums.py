"""Checksums of blocks, kept beside the rows with the lap that each is of."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from mmreplay.files import File
from mmreplay.ring import Ring, runs
from mmreplay.storage.placement import SUM_DTYPE


class BlockSums:
    """One file of them, environment by environment."""

    def __init__(self, ring: Ring, file: File) -> None:
        """Keep those of a ring in a file."""
        self._ring, self._file = ring, file

    def write(self, env_id: int, first: int, sums: NDArray[np.uint32]) -> None:
        """Keep the checksums of blocks from first on, with their laps."""
        blocks = np.arange(first, first + len(sums))
        entries = np.empty(len(sums), SUM_DTYPE)
        entries["crc"] = sums
        entries["lap"] = (blocks // self._ring.num_blocks) & 0xFFFFFFFF
        places = env_id * self._ring.num_blocks + blocks % self._ring.num_blocks
        for entry, start, stop in runs(places):
            data = entries[start:stop].view(np.uint8)
            self._file.pwrite(data.data, entry * SUM_DTYPE.itemsize)

    def read(self, env_id: int, block: int) -> tuple[int, int]:
        """Return the (checksum, lap) kept in a block's place."""
        place = env_id * self._ring.num_blocks + block % self._ring.num_blocks
        data = self._file.pread(SUM_DTYPE.itemsize, place * SUM_DTYPE.itemsize)
        crc, lap = struct.unpack("<II", data)
        return crc, lap

    def sync(self) -> None:
        """Make them survive a power cut."""
        self._file.sync()
