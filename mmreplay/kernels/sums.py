"""Checksums of long stretches of bytes: the twin of ``_sums.c``, by libraries.

Both give the same numbers. Those of zlib take a byte in a nanosecond on many systems,
and google_crc32c takes ``bytes`` only.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import google_crc32c

COPY_NBYTES = 64 << 10


class SumsKernel(Protocol):
    """What both twins offer. C lets go of the interpreter meanwhile."""

    def crc32(self, data: bytes | memoryview, before: int = 0, /) -> int:
        """CRC-32 of contiguous bytes, as zip files have it; see `crc32`."""

    def crc32c(self, data: bytes | memoryview, before: int = 0, /) -> int:
        """CRC-32C (Castagnoli) of contiguous bytes; see `crc32`."""


def crc32(data: bytes | memoryview, before: int = 0, /) -> int:
    """CRC-32 of contiguous bytes.

    Args:
        data: The bytes.
        before: The checksum of those before them, to go on from.
    """
    return zlib.crc32(data, before)


def crc32c(data: bytes | memoryview, before: int = 0, /) -> int:
    """CRC-32C of contiguous bytes; see `crc32`."""
    # Larger copies come fresh from the system each time, and cost eight times what the
    # checksum does.
    view = memoryview(data).cast("B")
    for first in range(0, len(view), COPY_NBYTES):
        before = google_crc32c.extend(before, bytes(view[first : first + COPY_NBYTES]))
    return before
