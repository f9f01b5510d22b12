"""The one door to the disk: every write, sync, rename and lock goes through here.

`disk` makes the raw calls (mmreplay/disk/calls.py), so that a test can count, fail,
tear or kill at any of them by putting another `Disk` in its place. Everything else in
this module is built on it, and everything else in mmreplay is built on that.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmreplay.disk.calls import Data as Data
from mmreplay.disk.calls import Disk as Disk
from mmreplay.errors import (
    OR_REPAIR,
    CorruptError,
    FailedError,
    FormatError,
    system_error,
    system_failure,
)

# Space is reserved in pieces of this many bytes, so that it costs one call a MiB.
ALLOCATION_NBYTES = 1 << 20
# New pages are written so many bytes at once: docs/benchmarks.md has other sizes.
NEW_PAGES_NBYTES = 16 << 10
# The same where the pages of rows before them were freed a short time ago.
RECYCLED_PAGES_NBYTES = 256 << 10
# Of a longer range Linux reads what a device takes in one request, and no more.
AHEAD_NBYTES = 128 << 10
# Several hosts may write these: locks and mappings do not meet.
NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "lustre",
    "ceph",
    "glusterfs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "afs",
    "beegfs",
    "gpfs",
}
# A store goes to new blocks, for which no space can be reserved.
COPY_ON_WRITE = {"btrfs", "zfs", "bcachefs"}

# A page that can be stored into stays so, and has its space, until it is synced.
KEEPS_PAGES = {"ext4", "xfs", "tmpfs"}

# And for good: what was written once is nobody else's, and is written over in place.
KEEPS_SPACE = {"ext4", "tmpfs"}

BIRTH = struct.Struct("<qII")
"""A file's creation: seconds and nanoseconds of Unix time, and 1."""
NO_BIRTH = b"\xff" * 16
"""Stands for the creation time where the file system has none."""

Identity = tuple[int, int, bytes]
"""st_dev, st_ino and 16 bytes that tell a file from an earlier one of that number."""

disk = Disk()


@contextmanager
def _system_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the system's error into ours, with the file's name."""
    try:
        yield
    except OSError as error:
        raise system_error(what, path, error) from error


def expanded(path: str | os.PathLike[str]) -> str:
    """A path that a user gave as text, with ``~`` or ``~user`` as a home folder.

    Raises:
        FormatError: It is no path, or no home of that user is known.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise FormatError(
            f"path must be a str or pathlib.Path, got {type(path).__name__}. {path_advice(path)}"
        )
    resolved = os.path.expanduser(text)
    if resolved == text and text.startswith("~"):
        name = text.partition("/")[0]
        raise FormatError(
            f"path {text!r}: no home folder is known for {name!r}. Use ~ or ~USER of "
            "this machine, or the absolute path of a folder with such a name."
        )
    return resolved


def path_advice(path: object) -> str:
    """Return what to do about something that is no path."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if isinstance(path, bytes):
        return "Decode bytes with os.fsdecode."
    if isinstance(path, list | tuple) and len(path) == 1:
        return "Pass its one item."
    return "Pass one path."


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path; symbolic links are not resolved.

    Raises:
        FormatError: It is no path, or depends on an unknown home folder or on a working
            folder that was removed.
    """
    text = expanded(path)
    try:
        return Path(os.path.abspath(text))
    except FileNotFoundError as error:
        raise FormatError(
            f"{text} starts from the working folder, which was removed. Change to "
            "another folder, or pass an absolute path."
        ) from error


class File:
    """One open regular file of known size, read and written at offsets.

    Threads: each call is one system call or a loop of them without shared state,
    so several threads may read and write different ranges at once.

    Attributes:
        unsynced: A sync failed: what the file holds may be in memory alone, for good.
    """

    __slots__ = ("_dropped", "_mapping", "fd", "nbytes", "path", "unsynced", "writable")

    def __init__(self, path: Path, fd: int, nbytes: int, writable: bool) -> None:
        self.path, self.fd = path, fd
        self.nbytes = nbytes
        self.writable = writable
        self.unsynced = False
        self._mapping: mmap.mmap | None = None
        self._dropped = None if disk.closes_all else os.close

    @classmethod
    def create(cls, path: Path, nbytes: int) -> File:
        """Create a sparse file of nbytes zero bytes; it must not exist."""
        file = cls(path, -1, nbytes, writable=True)
        with _system_errors("create", path):
            file.fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                disk.truncate(file.fd, nbytes)
            except BaseException:
                file.close()
                raise
        return file

    @classmethod
    def open(cls, path: Path, nbytes: int | None, *, writable: bool = False) -> File:
        """Open an existing regular file, of exactly nbytes bytes where given.

        Raises:
            FormatError: It is a link, a folder, a pipe or a device.
            CorruptError: It is missing or has another size.
            FailedError: The system refuses.
        """
        file = cls(path, -1, 0, writable)
        try:
            file.fd = disk.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError as error:
            way = "Restore it from a copy" + (OR_REPAIR if nbytes is not None else "")
            raise CorruptError(f"{path} is missing. {way}.") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise irregular(path) from error
            raise system_error("open", path, error) from error
        try:
            status = os.fstat(file.fd)
            if not stat.S_ISREG(status.st_mode):
                raise irregular(path)
            size = file.nbytes = status.st_size
            if nbytes is not None and size != nbytes:
                raise CorruptError(
                    f"{path} has {size} bytes, but metadata.json says {nbytes}: the "
                    "file was truncated or replaced. Restore it from a "
                    f"copy{OR_REPAIR}."
                )
        except BaseException:
            file.close()
            raise
        return file

    def past_cache(self) -> File:
        """Open it once more, to write aligned blocks past the page cache."""
        file = File(self.path, -1, self.nbytes, writable=True)
        with _system_errors("open", self.path):
            file.fd = disk.open(self.path, os.O_RDWR | os.O_DIRECT)
        return file

    def resize(self, nbytes: int) -> None:
        """Set the size of a new file; the bytes are zero and take no space."""
        with _system_errors("resize", self.path):
            disk.truncate(self.fd, nbytes)
        self.nbytes = nbytes

    def pwrite(self, data: Data, offset: int) -> None:
        """Write all of data, C-contiguous bytes, at an offset inside the file.

        Raises:
            FullError: No space is left.
            FailedError: The file was opened for reading, or the device or the system
                refuses.
        """
        try:
            done = disk.pwrite(self.fd, data, offset)
            if done != (data.nbytes if isinstance(data, memoryview) else len(data)):
                self._write_rest(data, offset, done)
        except OSError as error:
            # The system has the same errno for a closed file and for one that was
            # opened for reading.
            if error.errno == errno.EBADF and self.fd >= 0 and not self.writable:
                raise FailedError(
                    f"cannot write {self.path}: it was opened for reading. Open the "
                    "buffer with mode='r+', or the store with writable=True.",
                    errno_=error.errno,
                ) from error
            raise system_error("write", self.path, error) from error

    def pwrite_new_pages(
        self, data: memoryview, offset: int, nbytes: int = NEW_PAGES_NBYTES
    ) -> None:
        """Write all of data where pages are new, so many bytes at a time, aligned.

        The kernel allocates new pages as large as the write. Small ones it has ready;
        large ones may take five times as long, from a virtual machine's host. Of pages
        that were freed a short time ago it has large ones as well, and those take a
        third of the time: 5 us for 28 KB in writes of 256 KiB, 13 in writes of 16.

        Args:
            data: The bytes.
            offset: Where they go.
            nbytes: Bytes of a write.
        """
        first, stop = 0, nbytes - offset % nbytes
        while first < len(data):
            self.pwrite(data[first:stop], offset + first)
            first, stop = stop, stop + nbytes

    def _write_rest(self, data: Data, offset: int, done: int) -> None:
        rest = memoryview(data).cast("B")
        while done < len(rest):
            more = disk.pwrite(self.fd, rest[done:], offset + done)
            if more == 0:
                reason = f"the device took {done} of {len(rest)} bytes"
                raise OSError(errno.EIO, reason)
            done += more

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Read exactly nbytes at offset."""
        data = bytearray(nbytes)
        self.pread_into(memoryview(data), offset)
        return bytes(data)

    def pread_into(self, target: memoryview, offset: int) -> None:
        """Fill target, C-contiguous bytes, from offset.

        Raises:
            CorruptError: The file ends before.
            FailedError: The device refuses.
        """
        view = memoryview(target).cast("B")
        done = 0
        with _system_errors("read", self.path):
            while done < len(view):
                got = os.preadv(self.fd, [view[done:]], offset + done)
                if got == 0:
                    raise CorruptError(
                        f"{self.path} ends at byte {offset + done}, but bytes up to "
                        f"{offset + len(view)} are needed: the file was truncated "
                        "while open. Restore it from a copy."
                    )
                done += got

    def store(self, data: Data, offset: int) -> None:
        """Store through the writing mapping; write where `map_writable` made none."""
        if self._mapping is None:
            self.pwrite(data, offset)
            return
        disk.store(self.fd, self._mapping, offset, data)

    def map_writable(self) -> None:
        """Reserve all of the file's space and map it for `store`.

        The space is reserved first, because a store into a hole of a full disk
        is a SIGBUS, not an error.
        """
        self.allocate(0, self.nbytes)
        with _system_errors("map", self.path):
            self._mapping = mmap.mmap(self.fd, self.nbytes)

    @property
    def mapping(self) -> mmap.mmap | None:
        """What `map_writable` made."""
        return self._mapping

    def map_to_fill(self) -> mmap.mmap:
        """Return a mapping of the whole file for `Disk.fill`; it reserves no space."""
        with _system_errors("map", self.path):
            return mmap.mmap(self.fd, self.nbytes)

    def map_readonly(self) -> mmap.mmap:
        """Return a mapping of the whole file that cannot be written through.

        Raises:
            ValueError: The file is empty.
        """
        with _system_errors("map", self.path):
            return mmap.mmap(self.fd, self.nbytes, prot=mmap.PROT_READ)

    def map_private(self) -> mmap.mmap:
        """Return a mapping of the whole file; what is written there stays in it."""
        with _system_errors("map", self.path):
            return mmap.mmap(self.fd, self.nbytes, access=mmap.ACCESS_COPY)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve space, so that a later write there does not find the disk full.

        File systems that cannot reserve (EOPNOTSUPP) are left to report a full
        disk at the write itself.
        """
        try:
            disk.allocate(self.fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise system_error("reserve space in", self.path, error) from error

    def punch(self, offset: int, nbytes: int) -> None:
        """Give space back; on a file system that cannot, the bytes stay as they are."""
        try:
            disk.punch(self.fd, offset, nbytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise system_error("free space in", self.path, error) from error

    def will_need(self, offset: int, nbytes: int) -> None:
        """Ask the system to read a range ahead, without waiting for it."""
        try:
            for first in range(offset, offset + nbytes, AHEAD_NBYTES):
                size = min(AHEAD_NBYTES, offset + nbytes - first)
                os.posix_fadvise(self.fd, first, size, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            if error.errno != errno.EBADF:  # the read itself raises that one
                raise system_failure("read ahead in", self.path, error) from error

    def sync(self) -> None:
        """Wait until what was written is on the device; never retried on failure.

        Raises:
            FailedError: It is not, also where the cause is a full disk: the pages
                that found no space are lost, and a second sync would not say so. Nor
                would it where the first one ended in any other error, such as for
                want of memory.
        """
        try:
            if self.unsynced:
                raise OSError(errno.EIO, "an earlier sync of it failed")
            disk.datasync(self.fd)
        except Exception as error:
            self.unsynced = True
            cause = OSError(errno.EIO, repr(error))
            if isinstance(error, OSError):
                cause = error
            raise system_failure("sync", self.path, cause) from error

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (apparent, allocated) bytes; a sparse file takes less than it has."""
        return self.nbytes, os.fstat(self.fd).st_blocks * 512

    def identity(self) -> Identity:
        """Return (st_dev, st_ino, birth); a copy of the file has another one.

        A file system gives the number of a removed file to a new one, so the time of
        creation counts too: 16 bytes, `BIRTH` or, where there is none, `NO_BIRTH`.
        """
        with _system_errors("examine", self.path):
            status, born = os.fstat(self.fd), disk.birth(self.fd)
        birth = NO_BIRTH if born is None else BIRTH.pack(*born, 1)
        return status.st_dev, status.st_ino, birth

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last user."""
        if self.fd >= 0:
            # Forgotten first: closing a number twice closes somebody else's file.
            fd, self.fd, self._mapping = self.fd, -1, None
            # Data that must last was synced before, and Linux frees the descriptor
            # whatever close returns: its error leaves nothing to do.
            with suppress(OSError):
                disk.close(fd)

    def __del__(self) -> None:
        """Close what Ctrl-C kept from being closed."""
        # Without globals, which may be gone when the interpreter ends.
        dropped = getattr(self, "_dropped", None)
        if dropped is not None and self.fd >= 0:
            dropped(self.fd)


def irregular(path: Path) -> FormatError:
    """Return the error for a link, folder, pipe or device in place of a file."""
    return FormatError(
        f"{path} is not a regular file, but a link, folder, pipe or device. Put the "
        "file itself there."
    )


def read_bytes(path: Path, max_nbytes: int) -> bytes:
    """Read a small regular file whole.

    Raises:
        FormatError: It is larger than max_nbytes, or no regular file.
        CorruptError: It is missing.
    """
    file = File.open(path, None)
    try:
        if file.nbytes > max_nbytes:
            raise FormatError(
                f"{path} must have at most {max_nbytes} bytes, got {file.nbytes}. "
                "mmreplay did not write this file."
            )
        return file.pread(file.nbytes, 0)
    finally:
        file.close()


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file whole: after a crash it holds the old bytes or the new ones."""
    rename(stage_bytes(path, data), path)


def stage_bytes(path: Path, data: bytes) -> Path:
    """Write, durably, a temporary file beside a file that it will replace.

    Returns:
        Its path.
    """
    temporary = path.with_name(f"tmp-{path.name}")
    remove_tree(temporary)
    file = File.create(temporary, len(data))
    try:
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()
    return temporary


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries (new files, renames) are on the device."""
    with _system_errors("sync", path):
        # A folder may be reached through a link of the user's; `open` follows none.
        folder = File(path, -1, 0, writable=False)
        folder.fd = disk.open(path.resolve(), os.O_RDONLY | os.O_DIRECTORY)
        try:
            disk.sync_folder(folder.fd)
        finally:
            folder.close()


def sync_entry(path: Path) -> None:
    """Make an entry of a folder durable, where that may be opened to be synced.

    Where it may not, it is up to the file system when it reaches the device.
    """
    if os.access(path.parent, os.R_OK):
        sync_folder(path.parent)


def names(folder: Path) -> list[str]:
    """List what is in a folder."""
    with _system_errors("list", folder):
        return sorted(os.listdir(folder))


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make one folder, or let others, and make its entry durable in any case."""
    others = (FileExistsError,) if exist_ok and not os.path.isfile(path) else ()
    with _system_errors("make folder", path), suppress(*others):
        if not (exist_ok and path.is_dir()):
            disk.mkdir(path)
    sync_entry(path)


def make_staged(path: Path, data: bytes | None = None) -> Path:
    """Make the folders of a file in a staged folder, and the file where data is given.

    Nothing is synced: the staged folder is, as a whole.
    """
    for parent in reversed(path.parents):
        if not parent.exists():
            with _system_errors("make folder", parent), suppress(FileExistsError):
                disk.mkdir(parent)
    if data is not None:
        file = File.create(path, 0)
        try:
            file.pwrite(data, 0)
        finally:
            file.close()
    return path


def rename(source: Path, target: Path) -> None:
    """Rename source to target, durably."""
    with _system_errors("rename", source):
        disk.rename(source, target)
    sync_folder(target.parent)


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders of one parent in one step, durably."""
    with _system_errors("exchange", one):
        disk.exchange(one, other)
    for parent in {one.parent, other.parent}:
        sync_folder(parent)


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder of ours with what is in it; absent is fine."""
    # Not by recursion: who made the folder may have made it deep.
    left = [path]
    while left:
        entry = left.pop()
        with _system_errors("remove", entry), suppress(FileNotFoundError):
            if not entry.is_dir() or entry.is_symlink():
                disk.unlink(entry)
            elif inside := names(entry):
                left += [entry, *(entry / name for name in inside)]
            else:
                disk.rmdir(entry)


def file_system(path: Path) -> str:
    """Return the type of the file system that holds path, ``"?"`` where unknown."""
    try:
        table = Path("/proc/self/mountinfo").read_text()
        device = os.stat(path).st_dev
    except OSError:
        return "?"
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [
        line.split(" - ")[1].split()[0]
        for line in table.splitlines()
        if line.split()[2] == number and " - " in line
    ]
    return kinds[-1] if kinds else "?"


def free_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes free to this user on the disk that holds, or would hold, path."""
    return shutil.disk_usage(_standing(path)).free


def total_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the whole disk that holds, or would hold, path; 0 where none says it."""
    return shutil.disk_usage(_standing(path)).total


def _standing(path: str | os.PathLike[str]) -> Path:
    """The folder of path, or its nearest parent that exists."""
    folder = Path(os.path.abspath(expanded(path)))
    while not folder.exists():
        folder = folder.parent
    return folder


def refuse_link(folder: Path) -> None:
    """Refuse a folder of a buffer's own that leads out of the buffer.

    Raises:
        FormatError: It is a link.
    """
    if folder.is_symlink():
        raise FormatError(
            f"{folder} must be a folder, got a link, which leads out of the buffer. "
            "Move the folder itself there, or link to the whole buffer."
        )
