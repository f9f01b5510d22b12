"""The raw system calls that change or lock files, one method each.

`mmreplay.disk.files` is built on them, and everything else on that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

from mmreplay import kernels

AT_FDCWD = -100
RENAME_EXCHANGE = 2
FICLONE = 0x40049409
PUNCH_HOLE = 3  # keeps the size
AT_EMPTY_PATH = 0x1000
STATX_BTIME = 0x800
# struct statx: its mask, and stx_btime, seconds and nanoseconds.
STATX_NBYTES = 256
STATX_MASK = struct.Struct("<I")
STATX_BIRTH = struct.Struct("<qI")
STATX_BIRTH_OFFSET = 80

Data = bytes | bytearray | memoryview
Pack = Callable[..., None]
"""Writes every byte of its first argument, a memoryview."""

_copies = kernels.load("copies")
_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)
if _statx is not None:
    _statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]


class Disk:
    """The raw calls that change or lock files."""

    closes_all = False  # by itself, as a machine does whose power is cut

    def open(self, path: Path, flags: int) -> int:
        """Open without following a link, blocking on a pipe or leaking to a child."""
        safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(path, flags | safe, 0o666)

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)

    def pwrite(self, fd: int, data: Data, offset: int) -> int:
        """Write at an offset; may write less than asked."""
        return os.pwrite(fd, data, offset)

    def store(self, fd: int, mapping: mmap.mmap, offset: int, data: Data) -> None:
        """Store through the mapping of a file whose space is reserved."""
        mapping[offset : offset + len(data)] = data

    def populate(self, address: int, nbytes: int) -> None:
        """Have pages of a mapping ready to be stored into, their space included.

        What a store would die of (SIGBUS) is an error here: a full disk, a page that
        cannot be read.
        """
        if number := _copies.populate(address, nbytes):
            raise OSError(number, "cannot populate")

    def fill(
        self,
        fd: int,
        mapping: mmap.mmap,
        offset: int,
        nbytes: int,
        pack: Pack,
        arguments: tuple[object, ...],
    ) -> None:
        """Let pack store through a mapping, into pages that are populated."""
        pack(memoryview(mapping)[offset : offset + nbytes], *arguments)

    def birth(self, fd: int) -> tuple[int, int] | None:
        """Return when a file was created, or None where the system does not know.

        Returns:
            Seconds and nanoseconds of Unix time. A file that reuses the inode number of
            a removed file has another time. A rename does not change it.
        """
        if _statx is None:
            return None
        buffer = ctypes.create_string_buffer(STATX_NBYTES)
        if _statx(fd, b"", AT_EMPTY_PATH, STATX_BTIME, buffer):
            number = ctypes.get_errno()
            if number in (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise OSError(number, os.strerror(number))
        if not STATX_MASK.unpack_from(buffer)[0] & STATX_BTIME:
            return None
        seconds, nanoseconds = STATX_BIRTH.unpack_from(buffer, STATX_BIRTH_OFFSET)
        return seconds, nanoseconds

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set the size of a new file; the bytes are zero and take no space."""
        os.ftruncate(fd, nbytes)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve space inside the file."""
        os.posix_fallocate(fd, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give space inside the file back; its bytes are zeros from then on."""
        if _libc.fallocate(fd, PUNCH_HOLE, *map(ctypes.c_long, (offset, nbytes))):
            raise OSError(ctypes.get_errno(), "cannot punch a hole")

    def clone(self, fd: int, source: int) -> None:
        """Share every block of another file as it is now, where that is possible."""
        fcntl.ioctl(fd, FICLONE, source)

    def link(self, source: Path, target: Path) -> None:
        """Give a file that is never written again a second name."""
        os.link(source, target, follow_symlinks=False)

    def datasync(self, fd: int) -> None:
        """Wait until the file's data is on the device."""
        os.fdatasync(fd)

    def sync_folder(self, fd: int) -> None:
        """Wait until the folder's entries are on the device."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename source to target, in one step."""
        os.replace(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Exchange two entries in one step."""
        here, both = ctypes.c_int(AT_FDCWD), ctypes.c_uint(RENAME_EXCHANGE)
        if _libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), both):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a folder."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def lock(self, fd: int) -> None:
        """Take the whole-file lock or raise BlockingIOError; it dies with us."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
