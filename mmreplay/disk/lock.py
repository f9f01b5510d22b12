"""The lock of a buffer's one writer: it dies with its owner, however that dies.

flock rather than POSIX locks, which a second open in the same process passes and
any close of the file drops. A forked child closes its copy at once, or the lock
would live on in a DataLoader worker after the writer was killed.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import weakref
from pathlib import Path

from mmreplay import strict_json
from mmreplay.disk import files
from mmreplay.disk.files import NO_BIRTH, File, Identity
from mmreplay.disk.filesystem import NETWORK, file_system
from mmreplay.errors import FailedError, LockedError

FILE_NAME = "LOCK"
TEXT_NBYTES = 512
MAX_HOST_LENGTH = 253

_held: weakref.WeakValueDictionary[Identity, WriterLock] = weakref.WeakValueDictionary()


class WriterLock:
    """The held lock of one folder, given back by `release`, or when it is dropped.

    Ctrl-C may come between taking it and giving it to somebody who would release it:
    a dropped lock drops its file, whose descriptor is then closed.

    Attributes:
        told_apart: The file system tells a file from a later one of its number.

    Raises:
        LockedError: Somebody, here or in another process, holds it.
    """

    told_apart = True

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
        self.told_apart = key[2] != NO_BIRTH
        if key in _held:
            raise LockedError(
                f"{folder} is already open for writing in this process (pid "
                f"{os.getpid()}), expected one writer; close that buffer first, or "
                "open this one with mode='r'"
            )
        try:
            files.disk.lock(self._file.fd)
        except BlockingIOError as error:
            raise LockedError(
                f"{folder} is being written by {holder(folder)}, expected no writer; "
                "wait until it closes, or open with mode='r'"
            ) from error
        except OSError as error:
            raise FailedError(
                f"cannot lock {self._file.path}: {error.strerror}, expected a file "
                "system with flock; put the buffer on another one",
                errno_=error.errno,
            ) from error
        text = json.dumps(
            {"pid": self.pid, "host": socket.gethostname(), "start": time.time()}
        )
        data = text.encode().ljust(TEXT_NBYTES)
        self._file.pwrite(data, 0)
        # Held only once nothing can fail: closing the file is what gives it back.
        self._key = key
        _held[key] = self

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        if _held.get(self._key) is self:
            del _held[self._key]
        self._file.close()

    def forget(self) -> None:
        """Close our copy in a forked child; never unlock, that is the parent's."""
        self._file.close()


def _create(path: Path) -> None:
    try:
        File.create(path, TEXT_NBYTES).close()
    except FailedError as error:
        # Another writer made it at the same moment; one of both gets the lock.
        if error.errno != errno.EEXIST:
            raise


def holder(folder: Path) -> str:
    """Say who wrote the lock's text last, such as ``"pid 12 on host"``."""
    text = held_by(folder)
    if text is None:
        return "another process"
    return f"pid {text['pid']} on {text['host']}"


def held_by(folder: Path) -> dict[str, object] | None:
    """Return the lock's text, which only informs, or None where it says nothing.

    Anybody may have written it: a pid that is none, or a host that is no short name,
    says nothing.

    Returns:
        ``pid``, ``host``, and ``start`` (Unix time in seconds) where that is a number.
    """
    try:
        path = folder / FILE_NAME
        # Strictly: nesting deep enough would end Python's own parser.
        text = strict_json.parse(files.read_bytes(path, 1 << 16), str(path))
    except (OSError, ValueError):
        return None
    pid, host, start = (text.get(key) for key in ("pid", "host", "start"))
    if type(pid) is not int or not 0 < pid < 1 << 31 or not _names_host(host):
        return None
    informs = {"pid": pid, "host": host}
    return {**informs, "start": start} if type(start) in (int, float) else informs


def _names_host(host: object) -> bool:
    """Whether it is a name that says no more to a terminal than what is seen."""
    return (
        isinstance(host, str)
        and 1 <= len(host) <= MAX_HOST_LENGTH
        and host.isprintable()
    )


def locked(folder: Path) -> bool:
    """Tell whether somebody holds the lock now; asking never takes it.

    To try the lock would, for a moment, turn a writer away. Where the system does
    not list its locks, or hides other containers', the answer is False.
    """
    path = folder / FILE_NAME
    try:
        status = os.stat(path)
        table = Path("/proc/locks").read_text("ascii")
    except OSError:
        return False
    held = [line.split()[5] for line in table.splitlines() if " FLOCK " in line]
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    if file_system(path) == "?":
        # Subvolumes and overlays have a number of their own, the table their disk's.
        return any(each.rpartition(":")[2] == str(status.st_ino) for each in held)
    return f"{device}:{status.st_ino}" in held


def _forget_in_child() -> None:
    for lock in list(_held.values()):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def refuse_network(path: Path, allowed: bool) -> None:
    """Refuse to write where locks and mappings of several hosts do not meet.

    Raises:
        FailedError: It is a network file system and none was allowed.
    """
    kind = file_system(path)
    if kind in NETWORK and not allowed:
        raise FailedError(
            f"{path} is on a network file system ({kind}), expected a local one for "
            "writing, as locks and mappings are not reliable there; write to a local "
            "disk, or pass allow_network=True if only this host ever writes"
        )
