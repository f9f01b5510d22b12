"""How fast the disk is read from beginning to end, past what memory holds of it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter, sleep

from mmreplay.errors import system_failure
from mmreplay.files import File
from mmreplay.storage.residency import cached_nbytes, opened

BLOCK_NBYTES = 1 << 20
DROPPED_NBYTES = 64 * BLOCK_NBYTES
"""No more is dropped at once where that does: others may be drawing."""
PATIENCE = 10
"""Times that pages are dropped once more, a little later, in all."""
WAIT_S = 0.02
"""How much later."""
STAYS = 0.1
"""Share that is still in memory from which on nothing was dropped."""


def written_nbytes(paths: Iterable[Path]) -> int:
    """Bytes of files that somebody wrote: neither holes nor space that is reserved."""
    return sum(
        stop - first for file in opened(paths) for first, stop in _stretches(file)
    )


def sequential(paths: Iterable[Path], seconds: float) -> float | None:
    """Read files, the largest first, each from its beginning; what stays is left out.

    Whatever of them is mapped and was looked at stays in memory.

    Args:
        paths: The files; those that are gone count for nothing.
        seconds: For how long, at most.

    Returns:
        Megabytes (10**6) a second; None where pages stay in memory, or may.
    """
    sizes = {path: written_nbytes([path]) for path in paths}
    most = STAYS * sum(sizes.values())
    dropping, done, left, took = _Dropping(), 0, 0, 0.0
    for file in opened(sorted(sizes, key=sizes.__getitem__, reverse=True)):
        for first, stop in _parts(file):
            if took >= seconds or left > most:
                break
            if dropping.gone(file, first, stop):
                nbytes, more = _read(file, first, stop, seconds - took)
                done, took = done + nbytes, took + more
            else:
                left += stop - first
    return done / took / 1e6 if took and left <= most else None


def _stretches(file: File) -> Iterator[tuple[int, int]]:
    """First bytes of what was written, in whole pages, and the bytes after the last."""
    stop = 0
    while stop < file.nbytes:
        try:
            first = os.lseek(file.fd, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise system_failure("look for data in", file.path, error) from error
            return  # nothing but a hole is left
        stop = os.lseek(file.fd, first, os.SEEK_HOLE)
        yield first // mmap.PAGESIZE * mmap.PAGESIZE, stop


def _parts(file: File) -> Iterator[tuple[int, int]]:
    """The same, no part larger than what is dropped at once."""
    for start, end in _stretches(file):
        for first in range(start, end, DROPPED_NBYTES):
            yield first, min(first + DROPPED_NBYTES, end)


class _Dropping:
    """Drops parts of files, and waits a few times in all for what stays."""

    def __init__(self) -> None:
        """Begin with all patience."""
        self._patience = PATIENCE

    def gone(self, file: File, first: int, stop: int) -> bool:
        """Whether bytes ``[first, stop)`` were let go of, by everybody."""
        os.posix_fadvise(file.fd, first, stop - first, os.POSIX_FADV_DONTNEED)
        while not _absent(file, first, stop):
            if not self._patience:
                return False
            self._patience -= 1
            # Pages hang together across the part's ends, or are on their way still.
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not _absent(file, first, stop):
                sleep(WAIT_S)
        return True


def _absent(file: File, first: int, stop: int) -> bool:
    """Whether next to nothing of a part is in memory; not where nobody tells."""
    cached = cached_nbytes(file, first, stop)
    return cached is not None and cached < STAYS * (stop - first)


def _read(file: File, first: int, stop: int, seconds: float) -> tuple[int, float]:
    """Read ``[first, stop)``, or as far as the time goes; bytes, and seconds taken."""
    room = memoryview(bytearray(BLOCK_NBYTES))
    at, took, start = first, 0.0, perf_counter()
    while at < stop and took < seconds:
        piece = room[: min(BLOCK_NBYTES, stop - at)]
        file.pread_into(piece, at)
        at += len(piece)
        took = perf_counter() - start
    return at - first, took
