"""Make pages cold, to be read from the disk again, or warm, to be written to."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


CHUNK_NBYTES = 8 << 20


def touch_memory(folder: Path, nbytes: int) -> None:
    """Have the machine's memory behind so many bytes of page cache.

    A virtual machine gets a page from its host when it first touches it, and gives
    it back some time after it is free. That takes five times as long as writing it,
    so the pages are touched just before they are needed.
    """
    path = folder / "touched"
    piece = bytes(CHUNK_NBYTES)
    with path.open("wb") as file:
        for _ in range(-(-nbytes // CHUNK_NBYTES)):
            file.write(piece)
    path.unlink()


def drop(path: Path) -> None:
    """Sync a file and drop its pages, also those that this process maps.

    The kernel keeps pages that are mapped: the mappings let go of theirs first (the
    data stays in the file). What a host below a virtual disk caches stays there.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        for address, nbytes in mappings(path):
            _libc.madvise(address, nbytes, mmap.MADV_DONTNEED)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def mappings(path: Path) -> Iterator[tuple[int, int]]:
    """Address and bytes of this process's shared mappings of a file."""
    wanted = str(path.resolve())
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == wanted and parts[1].endswith("s"):
            first, stop = (int(part, 16) for part in parts[0].split("-"))
            yield first, stop - first


def resident(path: Path) -> float:
    """The part of a file that is in the page cache, from 0 to 1."""
    nbytes = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE) as mapping:
            pages = -(-nbytes // mmap.PAGESIZE)
            vector = ctypes.create_string_buffer(pages)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            _libc.mincore(address, nbytes, vector)
            return sum(byte & 1 for byte in vector.raw) / pages
    finally:
        os.close(fd)
