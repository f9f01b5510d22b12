"""Checksums of blocks of rows, taken of the bytes while they pass by.

What `MemmapStore.checksum` reads out of the files is summed here before it is written:
nothing is looked at twice, nor is it needed in the page cache. Parts of a block (its
flags, records and large fields) come side by side; each is summed by itself, and the
sums are put together as if the parts had followed each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmreplay.ring import Ring, Span
from mmreplay.sums import crc32c

Sums = NDArray[np.uint32]
POLYNOMIAL = 0x82F63B78
ZEROS = bytes(64 << 10)


class Passing:
    """Sums the blocks of a new generation, whose rows come once, oldest first."""

    def __init__(self, ring: Ring, span: Span, row_nbytes: Sequence[int]) -> None:
        """Begin with nothing.

        Args:
            ring: Env-major, or of one environment.
            span: What will come. Rows before it in its first block are zeros.
            row_nbytes: Bytes of a row in each part, in the order of the format.
        """
        self._ring = ring
        size = ring.block_rows
        self._begins = span.first // size
        self._nbytes = [size * each for each in row_nbytes]
        self._over = [over(each) for each in self._nbytes]
        # Of blocks that are not whole yet: bytes still to come, and sums of the parts.
        self._left: dict[int, int] = {}
        self._crcs: dict[int, list[int]] = {}
        self._whole: list[int] = []
        begun = (span.first % size > 0) & ((self._begins + 1) * size <= span.stop)
        for env_id in np.flatnonzero(begun).tolist():
            self._skip(ring.row(env_id, int(span.first[env_id])))

    def _skip(self, row: int) -> None:
        """Sum the zeros before a row that is the first of its block to come."""
        place, rows = divmod(row, self._ring.block_rows)
        crcs, total = self._open(place), 0
        for part, nbytes in enumerate(self._nbytes):
            count = nbytes // self._ring.block_rows * rows
            total += count
            for first in range(0, count, len(ZEROS)):
                crcs[part] = crc32c(ZEROS[: count - first], crcs[part])
        self._left[place] -= total

    def _open(self, place: int) -> list[int]:
        self._left[place] = sum(self._nbytes)
        return self._crcs.setdefault(place, [0] * len(self._nbytes))

    def add(self, part: int, offset: int, data: memoryview) -> None:
        """Sum bytes that go to an offset in the file of a part."""
        nbytes, first = self._nbytes[part], 0
        while first < len(data):
            place, at = divmod(offset + first, nbytes)
            piece = data[first : first + nbytes - at]
            first += len(piece)
            crcs = self._crcs.get(place)
            if crcs is None:
                crcs = self._open(place)
            crcs[part] = crc32c(piece, crcs[part])
            self._left[place] -= len(piece)
            if not self._left[place]:
                del self._left[place]
                self._whole.append(place)

    def taken(self) -> list[tuple[int, int, Sums]]:
        """Sums of blocks that are whole now, each told once.

        Returns:
            (environment, block, sums of blocks from that one on), blocks numbered over
            all laps.
        """
        places, self._whole = self._whole, []
        if not places:
            return []
        parts = np.array([self._crcs.pop(place) for place in places], np.uint32)
        ids, slots = np.divmod(np.array(places), self._ring.num_blocks)
        begins = self._begins[ids]
        blocks = begins + (slots - begins) % self._ring.num_blocks
        size = self._ring.block_rows
        told = [crc32c(struct.pack("<Q", each * size)) for each in blocks.tolist()]
        sums = np.array(told, np.uint32)
        for part, table in enumerate(self._over):
            sums = gone_over(sums, table) ^ parts[:, part]
        found = []
        for env_id in np.unique(ids).tolist():
            # Rows of one environment come in order, and so do its blocks.
            own = ids == env_id
            found.append((env_id, int(blocks[own][0]), sums[own]))
        return found


def over(nbytes: int) -> Sums:
    """What zeros after summed bytes do to the sum, as a table for `gone_over`.

    The sum of bytes and others after them is that of the first, gone over as many
    zeros as there are others, xor that of the others (as in zlib's crc32_combine).

    Args:
        nbytes: How many zeros, at least one.

    Returns:
        uint32 ``[4, 256]``.
    """
    columns: Sums = np.array([1 << bit for bit in range(32)], np.uint32)
    each: Sums = columns >> np.uint32(1)
    each[0] = POLYNOMIAL
    # Of one bit; doubled, it is that of two, four and so on.
    left = 8 * nbytes
    while left:
        if left & 1:
            columns = _through(each, columns)
        each = _through(each, each)
        left >>= 1
    values = np.arange(256, dtype=np.uint32)
    shifts = np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    return _through(columns, values << shifts)


def _through(columns: Sums, values: Sums) -> Sums:
    """Values under a linear law, given by what becomes of each bit."""
    found = np.zeros_like(values)
    for bit, column in enumerate(columns):
        found ^= np.where(values >> np.uint32(bit) & np.uint32(1), column, np.uint32(0))
    return found


def gone_over(sums: Sums, table: Sums) -> Sums:
    """Sums after as many zeros as a table is for, uint32 ``[N]``."""
    found: Sums = np.zeros_like(sums)
    for k in range(4):
        found ^= table[k, sums >> np.uint32(8 * k) & np.uint32(255)]
    return found
