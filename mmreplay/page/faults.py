"""Refuses what was read of a file that was cut, or that its disk cannot read.

A mapped page that its file has no more would end the process (SIGBUS). While the page
reads, zeros are read in its place and counted. Which buffer they are of is not known:
every buffer that was open is opened again, and what was being read is refused.
"""

from __future__ import annotations

from mmreplay import kernels

_faults = kernels.load("faults")

TEXT = (
    "A file was cut, or its disk could not read it, while it was read. Check the "
    "disk, and restore the buffer from a copy if it stays so."
)


class Watch:
    """Survives faults of this thread within a ``with`` block; blocks may be nested.

    Attributes:
        faulted: A thread of the process had a fault since the block began.
    """

    faulted = False

    def __enter__(self) -> Watch:
        """Begin to watch."""
        self._before: int = _faults.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End to watch."""
        self.faulted = _faults.end() != self._before


def count() -> int:
    """Return the faults of all threads so far; buffers opened before one are stale."""
    number: int = _faults.count()
    return number
