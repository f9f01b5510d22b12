"""The lock of a buffer's one writer, which ends with its process in any case.

It is a flock: a POSIX lock lets a second open in the same process through, and any
close of the file drops it. A forked child closes its copy at once, or the lock would
live on in a DataLoader worker after the writer was killed.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import weakref
from functools import cached_property
from pathlib import Path
from typing import cast

from mmreplay import strict_json
from mmreplay.disk import files
from mmreplay.disk.files import NETWORK, NO_BIRTH, File, Identity, file_system
from mmreplay.errors import FailedError, LockedError

FILE_NAME = "LOCK"
TEXT_NBYTES = 512
MAX_HOST_LENGTH = 253

_open_locks: weakref.WeakValueDictionary[Identity, WriterLock] = weakref.WeakValueDictionary()


class WriterLock:
    """The lock of one folder, released by `release`, or when the object is dropped.

    Ctrl-C may come between taking the lock and storing it: a dropped lock drops its
    file, whose descriptor is then closed.

    Attributes:
        identifiable: The file system tells a file from a later one of its number.

    Raises:
        LockedError: This or another process holds it.
    """

    identifiable = True

    def __init__(self, folder: Path) -> None:
        path = folder / FILE_NAME
        if not path.exists():
            _create(path)
        self._file = File.open(path, None, writable=True)
        self.pid = os.getpid()
        try:
            self._take(folder)
        except BaseException:
            self._file.close()
            raise

    def _take(self, folder: Path) -> None:
        key = self._file.identity()
        self.identifiable = key[2] != NO_BIRTH
        if key in _open_locks:
            raise LockedError(
                f"{folder} is already open for writing in this process (pid "
                f"{os.getpid()}). Close that buffer first, or open this one with "
                "mode='r'.",
                pid=os.getpid(),
                host=socket.gethostname(),
            )
        try:
            files.disk.lock(self._file.fd)
        except BlockingIOError as error:
            owner = Owner(folder)
            raise LockedError(
                f"{folder} is being written by {owner}. Wait until it "
                "closes, or open with mode='r'.",
                pid=owner.pid,
                host=owner.host,
            ) from error
        except OSError as error:
            raise FailedError(
                f"cannot lock {self._file.path}: {error.strerror}. Put the buffer on a "
                "file system with flock.",
                errno_=error.errno,
            ) from error
        if not _has_name(self._file):
            # The lock of a file without a name would not turn others away.
            raise LockedError(f"{folder} was removed by another process just now. Try again.")
        text = json.dumps({"pid": self.pid, "host": socket.gethostname(), "start": time.time()})
        data = text.encode().ljust(TEXT_NBYTES)
        self._file.pwrite(data, 0)
        # Held only once nothing can fail: closing the file is what gives it back.
        self._key = key
        _open_locks[key] = self

    @property
    def in_place(self) -> bool:
        """Whether its name leads to its file; else it turns no others away."""
        return _has_name(self._file)

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        if _open_locks.get(self._key) is self:
            del _open_locks[self._key]
        self._file.close()

    def forget(self) -> None:
        """Close our copy in a forked child; never unlock, that is the parent's."""
        self._file.close()


def _has_name(file: File) -> bool:
    """Return whether a path still leads to the file that was opened by it."""
    try:
        return os.path.samestat(os.stat(file.path), os.fstat(file.fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _create(path: Path) -> None:
    try:
        File.create(path, TEXT_NBYTES).close()
    except FailedError as error:
        # Another writer made it at the same moment; one of both gets the lock.
        if error.errno != errno.EEXIST:
            raise


class Owner:
    """The process that has a folder's lock, or had it last.

    What the lock's text says informs: any process may have written it. Each attribute
    is looked up when it is asked for.

    Example:
        >>> Owner(Path("runs/cartpole")).alive
        False

    Args:
        folder: Of the buffer.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    @property
    def process(self) -> int | None:
        """The process that holds the lock now, as `lock_pid` says; never takes it.

        To try the lock would, for a moment, turn a writer away. Where the system does
        not list its locks, or hides other containers', it is None.
        """
        return lock_pid(self._path)

    @property
    def alive(self) -> bool:
        """Whether a process holds the lock now, as the system lists it."""
        return self.process is not None

    @cached_property
    def text(self) -> dict[str, object]:
        """The lock's ``pid``, ``host`` and, if it is a number, ``start``, a Unix time.

        Empty where it is not valid: the pid must be one, and the host a short name.
        """
        try:
            # Strictly: nesting deep enough would end Python's own parser.
            text = strict_json.parse(files.read_bytes(self._path, 1 << 16), str(self._path))
        except (OSError, ValueError):
            return {}
        pid, host, start = (text.get(key) for key in ("pid", "host", "start"))
        if type(pid) is not int or not 0 < pid < 1 << 31 or not _names_host(host):
            return {}
        informs = {"pid": pid, "host": host}
        return {**informs, "start": start} if type(start) in (int, float) else informs

    @property
    def pid(self) -> int | None:
        """The process that the text names."""
        return cast("int | None", self.text.get("pid"))

    @property
    def host(self) -> str | None:
        """The host of that process."""
        return cast("str | None", self.text.get("host"))

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}" if self.text else "another process"


def _names_host(host: object) -> bool:
    """Return whether it is a host's name that is safe to print."""
    return isinstance(host, str) and 1 <= len(host) <= MAX_HOST_LENGTH and host.isprintable()


def lock_pid(path: Path, *, exclusive: bool = False) -> int | None:
    """Return the process that holds a flock on a file, as the system lists it.

    Args:
        path: Of the file.
        exclusive: Leave out those who share the lock with others.

    Returns:
        None where no process holds it, or where the system does not say; 0 for a
        process of another container.
    """
    try:
        status = os.stat(path)
        table = Path("/proc/locks").read_text("ascii")
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    # Subvolumes and overlays have a number of their own, the table their disk's.
    any_device = file_system(path) == "?"
    for line in table.splitlines():
        # Such as "1: FLOCK  ADVISORY  WRITE 1234 fe:00:2293766 0 EOF"; a process that
        # waits for a lock has a line with "->".
        if " FLOCK " not in line or "->" in line:
            continue
        _, _, _, kind, pid, inode, *_ = line.split()
        if exclusive and kind != "WRITE":
            continue
        on_device, _, number = inode.rpartition(":")
        if number == str(status.st_ino) and (any_device or on_device == device):
            return max(0, int(pid))
    return None


def _forget_in_child() -> None:
    for lock in list(_open_locks.values()):
        lock.forget()
    _open_locks.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def refuse_network(path: Path, allowed: bool) -> None:
    """Refuse to write to a network file system, unless it is allowed.

    Raises:
        FailedError: It is a network file system and none was allowed.
    """
    kind = file_system(path)
    if kind in NETWORK and not allowed:
        raise FailedError(
            f"{path} is on a network file system ({kind}), where locks and mappings "
            "are not reliable. Write to a local disk, or pass allow_network=True if "
            "only this host ever writes."
        )
