"""Checksums of bytes, CRC-32C: the numpy twin of ``_rows_sum.h``."""

from __future__ import annotations

import google_crc32c

COPY_NBYTES = 64 << 10

Buffer = bytes | bytearray | memoryview


def crc32c(data: Buffer, before: int = 0, /) -> int:
    """CRC-32C (Castagnoli) of C-contiguous bytes, going on from that of those before.

    C lets other threads run.
    """
    # The library takes bytes only. Larger copies come fresh from the system each time,
    # and cost eight times what the checksum does.
    view = memoryview(data).cast("B")
    for first in range(0, len(view), COPY_NBYTES):
        before = google_crc32c.extend(before, bytes(view[first : first + COPY_NBYTES]))
    return before
