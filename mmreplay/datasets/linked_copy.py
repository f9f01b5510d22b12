"""A copy of a LeRobot set by hard links, right while episodes are appended to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mmreplay.convert.staging import Staging
from mmreplay.disk import files
from mmreplay.errors import FailedError, FormatError, StaleError, system_error, undone_by

MAX_TRIES = 100
INFO = "meta/info.json"


def linked_copy(dataset: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Copy a LeRobot set by hard links: in milliseconds, and without taking space.

    Episodes may be appended to the set during the copy and later: the copy stays as the
    set was at one instant. Open the copy, and not the set, where an `AutoExport` or
    ``convert --follow`` writes: they give joined videos new names and remove the old
    ones. Never edit a copy in place, as LeRobot's ``modify_tasks`` does: its files are
    the set's.

    Args:
        dataset: The set's folder.
        folder: The copy, on the same file system; it must not exist.

    Returns:
        The absolute path of the copy.

    Raises:
        FormatError: The set is none, or the copy exists already, or is inside the set.
        FailedError: The file system has no hard links, or is another one.
        StaleError: Appends replaced the set at each try.

    Example:
        >>> report = mr.export("runs/cartpole", "cartpole_set", format="lerobot", fps=9)
        >>> mr.linked_copy("cartpole_set", "cartpole_now").name
        'cartpole_now'
    """
    source, target = files.absolute(dataset), files.absolute(folder)
    if not (source / INFO).is_file():
        raise FormatError(f"{source} is no LeRobot set: it has no {INFO}. Check the path.")
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise FormatError(f"{target} is inside the set {source}. Choose a path outside of it.")
    for _ in range(MAX_TRIES):
        # The folder stays this one when the set's name is given to another.
        root = files.disk.open(source, os.O_RDONLY | os.O_DIRECTORY)
        try:
            staging = Staging(target, folder=True)
            with undone_by(staging.abort):
                there = _link_all(Path(f"/proc/self/fd/{root}"), staging.path)
                # Where it is the set still, nothing was removed from it before.
                if there and os.path.samestat(os.stat(source), os.fstat(root)):
                    staging.publish()
                    return target
            staging.abort()
        finally:
            files.disk.close(root)
    raise StaleError(
        f"{source} was replaced {MAX_TRIES} times while it was copied. Copy it again between two "
        "appends."
    )


def _link_all(source: Path, target: Path) -> bool:
    """Link all files of a folder into another one.

    Returns:
        Whether all were there.
    """
    for name in files.names(source):
        try:
            if (source / name).is_dir():
                files.make_folder(target / name)
                if not _link_all(source / name, target / name):
                    return False
            else:
                entry = source / name
                # Such as a file of Hugging Face's cache, which leads to a blob.
                entry = entry.resolve() if entry.is_symlink() else entry
                files.disk.link(entry, target / name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except FailedError:
            if (source / name).exists():
                raise
            return False
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.ENOTSUP):
                raise FailedError(
                    f"no file of the set can have the second name {target / name} "
                    f"({error.strerror}). Copy to the file system of the set.",
                    errno_=error.errno,
                ) from error
            raise system_error("link", target / name, error) from error
    return True
