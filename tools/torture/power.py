"""A disk that loses its power: what was not synced survives in any part and order.

`SimulatedDisk` passes every call on to real files in a working folder, and keeps
beside them what the device owes us: file contents as of the last datasync, folder
entries as of the last sync of the folder, and everything that was done since.
`crash` turns that into one of the states that a power cut could leave.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmreplay.disk.files import Data
from mmreplay.testing.disks import WatchedDisk
from tools.torture.nodes import Bytes, Change, FileNode, FolderNode, Node, scanned


class PowerCut(BaseException):
    """The power is gone; no handler of ordinary exceptions may go on.

    Attributes:
        in_flight: It went during this very call, which may be half done.
    """

    def __init__(self, in_flight: bool) -> None:
        super().__init__()
        self.in_flight = in_flight


class SimulatedDisk(WatchedDisk):
    """A disk whose power can be cut.

    Order: nothing is ordered but by `datasync` (one file, its size too) and
    `sync_folder` (the entries of one folder). A file's sync does not make its entry
    durable, which some file systems do and none promises.

    Threads: one call at a time, under a lock.

    Args:
        root: The working folder; what is in it is durable.
        calls_left: The power goes at the call after this many; None for never.
        on_call: Called with each primitive's name before it is made.

    Attributes:
        share: How much of a write in flight is made when the power goes, in [0, 1].
        shares: Files can share blocks.
    """

    closes_all = True

    def __init__(
        self,
        root: Path,
        calls_left: int | None = None,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self.root = root.resolve()
        self.calls_left = calls_left
        self.dead = False
        self.share = 0.5
        self.shares = False
        self.on_call = on_call
        self._fds: dict[int, Node] = {}
        self._lock = threading.RLock()
        self._tree = scanned(self.root)

    def watch(self, name: str) -> None:
        """Count, and cut the power when it is time."""
        if self.on_call is not None:
            self.on_call(name)
        before = self.dead
        if self.calls_left is not None:
            self.calls_left -= 1
            self.dead |= self.calls_left < 0
        if self.dead:
            raise PowerCut(not before)
        super().watch(name)

    def revive(self) -> None:
        """Go on after what was a killed process, not a power cut."""
        with self._lock:
            for fd in list(self._fds):
                self.close(fd)
            self.calls_left = None
            self.dead = False

    def open(self, path: Path, flags: int) -> int:
        """Open, and remember which file the descriptor stands for."""
        with self._lock:
            fd = super().open(path, flags)
            if flags & os.O_CREAT:
                folder, name = self._entry(path)
                if name not in folder.live:
                    self._change([(folder, name, FileNode())])
            node = self._node(path)
            if flags & os.O_TRUNC and isinstance(node, FileNode):
                node.ops.append((0, None))
            self._fds[fd] = node
            return fd

    def close(self, fd: int) -> None:
        """Close, which syncs nothing; closed by the power cut already is fine."""
        with self._lock:
            if self._fds.pop(fd, None) is not None:
                super().close(fd)

    def pwrite(self, fd: int, data: Data, offset: int) -> int:
        """Write, and owe it; a cut in the middle leaves the first part."""
        whole = bytes(memoryview(data).cast("B"))
        with self._lock:
            try:
                done = super().pwrite(fd, data, offset)
            except PowerCut as lose_power:
                if lose_power.in_flight:
                    half = whole[: int(len(whole) * self.share)]
                    os.pwrite(fd, half, offset)
                    self._file(fd).ops.append((offset, half))
                raise
            self._file(fd).ops.append((offset, whole[:done]))
            return done

    def store(self, fd: int, mapping: mmap.mmap, offset: int, data: Data) -> None:
        """Store, and owe it: a dirty page is no more durable than a write."""
        with self._lock:
            try:
                super().store(fd, mapping, offset, data)
            except PowerCut as lose_power:
                if lose_power.in_flight:
                    data = data[: int(len(data) * self.share)]
                    mapping[offset : offset + len(data)] = data
                    self._file(fd).ops.append((offset, bytes(data)))
                raise
            self._file(fd).ops.append((offset, bytes(data)))

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set the size, and owe it."""
        with self._lock:
            super().truncate(fd, nbytes)
            self._file(fd).ops.append((nbytes, None))

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve space; beyond the end that is a new size, to be synced."""
        with self._lock:
            before = os.fstat(fd).st_size
            super().allocate(fd, offset, nbytes)
            if offset + nbytes > before:
                self._file(fd).ops.append((offset + nbytes, None))

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give space back; no more durable than a write of zeros."""
        with self._lock:
            super().punch(fd, offset, nbytes)
            self._file(fd).ops.append((offset, bytes(nbytes)))

    def clone(self, fd: int, source: int) -> None:
        """Share blocks, which takes what the page cache holds, and owe it."""
        with self._lock:
            self.watch("clone")
            if not self.shares:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            whole = os.pread(source, os.fstat(source).st_size, 0)
            os.pwrite(fd, whole, 0)
            self._file(fd).ops.append((0, whole))

    def datasync(self, fd: int) -> None:
        """Make one file's content and size durable."""
        # Not under the lock: who watches may add, and wait for another thread's call.
        self.watch("datasync")
        with self._lock:
            self._file(fd).settle()

    def sync_folder(self, fd: int) -> None:
        """Make one folder's entries durable."""
        with self._lock:
            self.watch("sync_folder")
            folder = self._fds[fd]
            assert isinstance(folder, FolderNode)
            while folder.changes:
                folder.changes[0].settle()

    def rename(self, source: Path, target: Path) -> None:
        """Rename, and owe it."""
        with self._lock:
            super().rename(source, target)
            old, old_name = self._entry(source)
            new, new_name = self._entry(target)
            node = old.live[old_name]
            self._change([(new, new_name, node), (old, old_name, None)])

    def exchange(self, one: Path, other: Path) -> None:
        """Let two entries change places, and owe it."""
        with self._lock:
            super().exchange(one, other)
            a, b = self._entry(one), self._entry(other)
            self._change([(*a, b[0].live[b[1]]), (*b, a[0].live[a[1]])])

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, and owe it."""
        with self._lock:
            super().link(source, target)
            self._change([(*self._entry(target), self._node(source))])

    def unlink(self, path: Path) -> None:
        """Remove, and owe it."""
        with self._lock:
            super().unlink(path)
            self._change([(*self._entry(path), None)])

    def mkdir(self, path: Path) -> None:
        """Make a folder, and owe it."""
        with self._lock:
            super().mkdir(path)
            self._change([(*self._entry(path), FolderNode())])

    def rmdir(self, path: Path) -> None:
        """Remove a folder, and owe it."""
        with self._lock:
            super().rmdir(path)
            self._change([(*self._entry(path), None)])

    def lose_power(self) -> None:
        """Cut the power now: descriptors are gone, every later call raises."""
        with self._lock:
            self.dead = True
            for fd in list(self._fds):
                self.close(fd)

    def crash(self, target: Path, rng: np.random.Generator) -> None:
        """Cut the power, and build in target what the disk could hold after it.

        Files that are in target keep their inodes, so that the working folder
        itself can be crashed as a disk is.
        """
        self.lose_power()
        target.mkdir(exist_ok=True)
        self._build(self._tree, target, rng, {})

    def _build(
        self, folder: FolderNode, target: Path, rng: np.random.Generator, happened: dict[int, bool]
    ) -> None:
        entries = dict(folder.durable)
        chance = float(rng.choice([0.0, 0.5, 1.0]))
        for change in folder.changes:
            # A rename between two folders happened in both or in neither.
            if happened.setdefault(id(change), bool(rng.random() < chance)):
                change.apply(folder, entries)
        for path in sorted(target.iterdir()):
            if path.name not in entries:
                _removed(path)
        for name, node in entries.items():
            path = target / name
            if isinstance(node, FolderNode):
                path.mkdir(exist_ok=True)
                self._build(node, path, rng, happened)
            else:
                _overwritten(path, node.after_power_cut(rng))

    def _entry(self, path: Path) -> tuple[FolderNode, str]:
        """The folder that holds a path, and the path's name in it."""
        folder = self._node(path.parent)
        assert isinstance(folder, FolderNode)
        return folder, path.name

    def _node(self, path: Path) -> Node:
        path = path.resolve()
        if path == self.root.parent:
            # Beyond the disk: a creation in an empty disk syncs it.
            return FolderNode()
        node: Node = self._tree
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, FolderNode)
            node = node.live[name]
        return node

    def _file(self, fd: int) -> FileNode:
        node = self._fds[fd]
        assert isinstance(node, FileNode)
        return node

    def _change(self, entries: list[tuple[FolderNode, str, Node | None]]) -> None:
        change = Change(entries)
        for folder in {id(at): at for at, _, _ in entries}.values():
            change.apply(folder, folder.live)
            folder.changes.append(change)


def _removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _overwritten(path: Path, content: Bytes) -> None:
    """Write a file whole into the inode that is there, or into a new one."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, content.tobytes(), 0)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)
