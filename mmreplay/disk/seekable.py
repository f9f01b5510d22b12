"""A file object with a position, for other libraries, over bytes read at offsets."""

from __future__ import annotations

import io
from typing import Any, Protocol


class Bytes(Protocol):
    """So many bytes, each of which can be read, such as a `files.File`."""

    nbytes: int

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Read exactly nbytes at offset."""

    def pread_into(self, target: memoryview, offset: int) -> None:
        """Fill target from offset."""


class SeekableFile(io.RawIOBase):
    """Reads as Python's own files do; a cut is noticed, and no SIGBUS.

    Closing it closes nothing below. Threads: one at a time, for the position.
    """

    def __init__(self, source: Bytes, at: int = 0) -> None:
        """Read source from a byte on."""
        self._source, self._at = source, at

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, maybe beyond the end.

        Raises:
            ValueError: It would be before the first.
        """
        at = offset + (0, self._at, self._source.nbytes)[whence]
        if at < 0:
            raise ValueError(f"seek must not go before byte 0, got {at}")
        self._at = at
        return at

    def tell(self) -> int:
        """The byte that is read next."""
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, fewer only at the end."""
        left = self._left()
        size = left if size is None or size < 0 else min(size, left)
        data = self._source.pread(size, self._at)
        self._at += size
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, fewer only at the end."""
        view = memoryview(buffer).cast("B")
        size = min(len(view), self._left())
        self._source.pread_into(view[:size], self._at)
        self._at += size
        return size

    def _left(self) -> int:
        return max(0, self._source.nbytes - self._at)
