"""A target that appears complete by a rename, or not at all.

Everything is written under ``tmp-mmreplay-new-<name>`` next to the target. A run that
is killed leaves only that; the next run for the same target recognizes the name and
replaces it. The writing process holds a lock on it, so that two runs for one target do
not mix.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.convert.base import Writer
from mmreplay.disk import files
from mmreplay.disk.files import File, rename
from mmreplay.disk.lock import Owner
from mmreplay.errors import FailedError, FormatError, LockedError, undone_by
from mmreplay.verify import is_buffer

STAGED = "tmp-mmreplay-"
"""Prefix of the names of targets that are not finished, or were replaced."""
UNFINISHED = "tmp-unfinished"
"""An empty file in each staged folder: folders without it are never removed."""
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Of file systems that exchange no folders."""
MAX_NAME_NBYTES = 255
"""Of Linux's file systems."""


class Staging:
    """A file, or a folder, that becomes a target.

    Attributes:
        target: Path of the target.
        path: Path until then.

    Raises:
        FormatError: The target exists and may not be overwritten.
        LockedError: Another run is writing the same target.
    """

    def __init__(
        self,
        target: StrPath,
        *,
        overwrite: bool = False,
        folder: bool = False,
        owns: Callable[[Path], bool] | None = None,
    ) -> None:
        """Make the file or folder, locked.

        Args:
            target: Path of the target.
            overwrite: Replace an existing target.
            folder: Make a folder.
            owns: Whether a folder may be replaced, besides buffers: it holds only what
                this format writes.
        """
        self.target = absolute(target)
        self.path, self._old, self._complete = (
            self.target.with_name(f"{STAGED}{what}-{self.target.name}")
            for what in ("new", "old", "whole")
        )
        self._overwrite = overwrite
        self._folder = folder
        self._owns = owns or (lambda _: False)
        self._fd = -1
        self._check_name()
        make_parents(self.target)
        self._restore()
        self._refuse_target()
        self._sweep()
        with undone_by(self.abort):
            self._create()

    def _check_name(self) -> None:
        limit = MAX_NAME_NBYTES - len(f"{STAGED}whole-")
        nbytes = len(os.fsencode(self.target.name))
        if nbytes > limit:
            raise FormatError(
                f"{self.target}: the name must have at most {limit} bytes, got "
                f"{nbytes}, as {STAGED}whole-<name> is made of it. Choose a shorter "
                "name."
            )

    def _restore(self) -> None:
        """Put back a target that a killed run had moved away."""
        if os.path.lexists(self._old):
            if os.path.lexists(self.target):
                files.remove_tree(self._old)
            else:
                rename(self._old, self.target)

    def _refuse_target(self) -> None:
        if os.path.lexists(self.target) and not self._overwrite:
            raise FormatError(
                f"{self.target} already exists. Choose another path, or pass overwrite=True "
                "(--overwrite) to replace it."
            )
        self._refuse_other(self.target)
        outer = self.target.parent
        if outer.name.startswith(f"{STAGED}new-") and (outer / UNFINISHED).exists():
            # One of several targets in a staged folder (a split): it takes the place of
            # what the folder's target holds under its name.
            final = outer.with_name(outer.name.removeprefix(f"{STAGED}new-"))
            self._refuse_other(final / self.target.name)

    def _refuse_other(self, target: Path) -> None:
        """Refuse to replace other than a file, a buffer, or a folder of this format."""
        if not os.path.lexists(target):
            return
        is_folder = target.is_dir() and not target.is_symlink()
        if self._folder and not is_folder:
            raise FormatError(
                f"{target} is a file or a link, which a folder does not replace. "
                "Remove it yourself, or choose another path."
            )
        known = is_folder and (is_buffer(target) or self._owns(target))
        if is_folder and not known and any(target.iterdir()):
            raise FormatError(
                f"{target} is a folder that holds no buffer or other files too, which "
                "is not replaced. Remove it yourself, or choose another path."
            )
        refuse_open(target, True)

    def _sweep(self) -> None:
        """Remove what a killed run left.

        Raises:
            LockedError: Another run is still writing it.
        """
        for path in (self._complete, self.path):
            if os.path.lexists(path):
                self._lock(path)
                self._unlock()
        files.remove_tree(self._complete)
        if not os.path.lexists(self.path):
            return
        ours = not self.path.is_dir() or (self.path / UNFINISHED).exists()
        if not ours and any(self.path.iterdir()):
            raise FormatError(
                f"{self.path} exists and is not a temporary folder of mmreplay. Move "
                "it away, or choose another target."
            )
        self._remove()

    def _remove(self) -> None:
        """Remove what is staged, a folder under a name that only mmreplay uses.

        If the run is killed here, the folder may have lost its marker already, and
        the next run removes it all the same.
        """
        if self.path.is_dir() and not self.path.is_symlink() and self.path != self._complete:
            with suppress(OSError):
                rename(self.path, self._complete)
            files.remove_tree(self._complete)
        files.remove_tree(self.path)

    def _create(self) -> None:
        if self._folder:
            files.make_folder(self.path)
            File.create(self.path / UNFINISHED, 0).close()
        else:
            File.create(self.path, 0).close()
        self._lock(self.path)
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)

    def _lock(self, path: Path) -> None:
        try:
            self._fd = files.disk.open(path, os.O_RDONLY)
            files.disk.lock(self._fd)
        except BlockingIOError as error:
            self._unlock()
            raise LockedError(
                f"{path} is being written by another run for {self.target}. Wait for "
                "that run, or choose another target."
            ) from error
        except OSError as error:
            self._unlock()
            raise FailedError(
                f"cannot lock {path}: {error.strerror}. Use a regular file or folder "
                "on a file system with flock, or choose another target.",
                errno_=error.errno,
            ) from error

    def _unlock(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            files.disk.close(fd)

    def open(self, nbytes: int) -> File:
        """Open the staged file for writing, nbytes long and sparse."""
        file = File.open(self.path, None, writable=True)
        with undone_by(file.close):
            file.resize(nbytes)
        return file

    def publish(self, durable: Collection[Path] = ()) -> int:
        """Make everything durable, and rename it to the target.

        Args:
            durable: Files of the staged folder that need no sync.

        Returns:
            Bytes of the target.
        """
        status = os.stat(self.path, follow_symlinks=False)
        if (status.st_dev, status.st_ino) != self._identity:
            raise FailedError(
                f"{self.path} was replaced by another process while it was written. Run again."
            )
        self._refuse_target()
        nbytes = _sync(self.path, durable)
        if self._folder:
            # The marker is removed under a name that only mmreplay uses: if the run is
            # killed here, the next one may still remove the folder.
            rename(self.path, self._complete)
            self.path = self._complete
            files.remove_tree(self.path / UNFINISHED)
            files.sync_folder(self.path)
        if self.target.is_dir() and not self.target.is_symlink():
            self._replace_folder()
        else:
            rename(self.path, self.target)
        self._unlock()
        return nbytes

    def _replace_folder(self) -> None:
        """Exchange the folders: none can be renamed over another."""
        try:
            files.exchange(self.path, self.target)
        except FailedError as error:
            if error.errno not in CANNOT_EXCHANGE:
                raise
            rename(self.target, self._old)
            with undone_by(self._restore):
                rename(self.path, self.target)
        files.remove_tree(self._old)
        files.remove_tree(self.path)

    def abort(self) -> None:
        """Remove everything written so far; after `publish` it does nothing."""
        if self._fd >= 0:
            self._remove()
            self._unlock()


def make_parents(target: Path) -> None:
    """Make the folders that a target will be in.

    Raises:
        FormatError: One of them is a file.
    """
    for parent in reversed(target.parents):
        if os.path.lexists(parent) and not parent.is_dir():
            raise FormatError(
                f"{parent} is not a folder, so {target} cannot be made in it. Choose another path."
            )
        if not os.path.lexists(parent):
            files.make_folder(parent, exist_ok=True)


class Closeable(Protocol):
    """An open file of any library."""

    def close(self) -> None:
        """Close it."""


class StagedWriter(Writer):
    """A writer with one file of a staged target open at a time."""

    _staging: Staging
    _file: Closeable | None

    def _close(self) -> None:
        """Close the file, if one is open."""
        if self._file is not None:
            # Forgotten first: a close that failed is not tried again.
            file, self._file = self._file, None
            file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


def refuse_open(target: Path, overwrite: bool) -> None:
    """Refuse to overwrite a buffer that is open for writing.

    Raises:
        LockedError: It is.
    """
    if overwrite and target.is_dir() and not target.is_symlink() and Owner(target).alive:
        raise LockedError(
            f"{target} is open for writing, so it cannot be replaced. Close it first, "
            "or choose another path."
        )


def leftover(target: Path) -> Path | None:
    """The unfinished file or folder that a killed run for a target left."""
    path = target.with_name(f"{STAGED}new-{target.name}")
    return path if os.path.lexists(path) else None


def holds_more(target: Path) -> bool:
    """Return whether a path is a folder with other files than a buffer's."""
    is_folder = target.is_dir() and not target.is_symlink()
    return is_folder and not is_buffer(target) and any(target.iterdir())


def _sync(path: Path, durable: Collection[Path]) -> int:
    """Sync a file, or a folder and all in it, and return its bytes without holes."""
    if path in durable:
        return path.stat().st_size
    if not path.is_dir():
        file = File.open(path, None)
        try:
            file.sync()
            return min(file.disk_nbytes())
        finally:
            file.close()
    nbytes = sum(_sync(child, durable) for child in sorted(path.iterdir()))
    files.sync_folder(path)
    return nbytes
