"""Doubles of the disk that count calls, and fail, tear or die at a chosen one.

Both stand in for `mmreplay.disk.files.disk`; what they do not break goes through to the
real files.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mmreplay.disk import files
from mmreplay.disk.calls import Pack
from mmreplay.disk.files import Data, Disk

# Every raw call that changes, syncs or locks; `close` is left out, because it does
# nothing to the disk.
PRIMITIVES = (
    "open",
    "pwrite",
    "store",
    "truncate",
    "allocate",
    "clone",
    "link",
    "datasync",
    "sync_folder",
    "rename",
    "exchange",
    "unlink",
    "mkdir",
    "rmdir",
    "lock",
)


@contextmanager
def using(disk: Disk) -> Iterator[Disk]:
    """Put a disk in the place of the real one for a while."""
    before = files.disk
    files.disk = disk
    try:
        yield disk
    finally:
        files.disk = before


class QuickDisk(Disk):
    """A disk that syncs nothing, where no power is cut."""

    def datasync(self, fd: int) -> None:
        """Do nothing."""

    def sync_folder(self, fd: int) -> None:
        """Do nothing."""


class WatchedDisk(Disk):
    """A disk that tells `watch` of each call, by name, before making it.

    Attributes:
        calls: How often each primitive was called.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def watch(self, name: str) -> None:
        """Take note of a call that is about to be made; may raise instead."""
        self.calls[name] += 1

    def open(self, path: Path, flags: int) -> int:
        """Watch, then open."""
        self.watch("open")
        return super().open(path, flags)

    def pwrite(self, fd: int, data: Data, offset: int) -> int:
        """Watch, then write."""
        self.watch("pwrite")
        return super().pwrite(fd, data, offset)

    def store(self, fd: int, mapping: mmap.mmap, offset: int, data: Data) -> None:
        """Watch, then store."""
        self.watch("store")
        super().store(fd, mapping, offset, data)

    def fill(
        self,
        fd: int,
        mapping: mmap.mmap,
        offset: int,
        nbytes: int,
        pack: Pack,
        arguments: tuple[object, ...],
    ) -> None:
        """Store what is packed, so that whoever watches stores sees it."""
        data = bytearray(nbytes)
        pack(memoryview(data), *arguments)
        self.store(fd, mapping, offset, data)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Watch, then set the size."""
        self.watch("truncate")
        super().truncate(fd, nbytes)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Watch, then reserve."""
        self.watch("allocate")
        super().allocate(fd, offset, nbytes)

    def clone(self, fd: int, source: int) -> None:
        """Watch, then share blocks."""
        self.watch("clone")
        super().clone(fd, source)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Watch, then give space back."""
        self.watch("punch")
        super().punch(fd, offset, nbytes)

    def link(self, source: Path, target: Path) -> None:
        """Watch, then give a second name."""
        self.watch("link")
        super().link(source, target)

    def datasync(self, fd: int) -> None:
        """Watch, then sync."""
        self.watch("datasync")
        super().datasync(fd)

    def sync_folder(self, fd: int) -> None:
        """Watch, then sync."""
        self.watch("sync_folder")
        super().sync_folder(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Watch, then rename."""
        self.watch("rename")
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Watch, then let both change places."""
        self.watch("exchange")
        super().exchange(one, other)

    def unlink(self, path: Path) -> None:
        """Watch, then remove."""
        self.watch("unlink")
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        """Watch, then make."""
        self.watch("mkdir")
        super().mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Watch, then remove."""
        self.watch("rmdir")
        super().rmdir(path)

    def lock(self, fd: int) -> None:
        """Watch, then lock."""
        self.watch("lock")
        super().lock(fd)


def die() -> NoReturn:
    """End this process as ``kill -9`` does: nothing more runs."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


class FaultyDisk(WatchedDisk):
    """A disk on which the n-th call of chosen primitives goes wrong.

    Args:
        fault: What happens instead of the call: an exception is raised, ``"kill"``
            ends the process, ``"short"`` lets a write store half of its bytes and
            say so. An exception at a write with two bytes or more comes after half
            of them were stored, because that is what a device does.
        at: The call that goes wrong, counted from 0 over the chosen primitives.
        count: How many calls in a row go wrong.
        names: The chosen primitives.
    """

    def __init__(
        self,
        fault: BaseException | str,
        at: int = 0,
        count: int = 1,
        names: tuple[str, ...] = PRIMITIVES,
    ) -> None:
        super().__init__()
        self.fault = fault
        self.stop = at + count
        self.first = at
        self.names = names
        self.seen = 0
        self.struck = 0
        self._lock = threading.Lock()

    def watch(self, name: str) -> None:
        """Count, and fail where it is this call's turn."""
        if self._turn(name):
            self._strike()

    def pwrite(self, fd: int, data: Data, offset: int) -> int:
        """Write all, or half and fail."""
        if not self._turn("pwrite"):
            return Disk.pwrite(self, fd, data, offset)
        view = memoryview(data).cast("B")
        done = Disk.pwrite(self, fd, view[: len(view) // 2], offset)
        if self.fault == "short":
            return done
        return self._strike()

    def _turn(self, name: str) -> bool:
        with self._lock:
            self.calls[name] += 1
            if name not in self.names:
                return False
            self.seen += 1
            turn = self.first < self.seen <= self.stop
            self.struck += turn
            return turn

    def _strike(self) -> NoReturn:
        if isinstance(self.fault, BaseException):
            raise self.fault.with_traceback(None)
        if self.fault == "kill":
            die()
        raise ValueError(f"fault {self.fault!r} is for writes only")
