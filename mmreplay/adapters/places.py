"""Which folder an adapter's buffer gets where nobody named one.

Under ``$MMREPLAY_DIR`` the names are ``<system>-<n>``; a process holds the lock of each
name that it uses, in ``.names`` beside the folders, from before there is a buffer.
Otherwise the folder is a temporary one, whose name holds the process's number, so that
one that a killed process left can be told and removed.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from contextlib import suppress
from itertools import count
from pathlib import Path

from mmreplay.buffer import opening
from mmreplay.disk import files
from mmreplay.disk.lock import WriterLock, held_by
from mmreplay.errors import LockedError, ReplayError
from mmreplay.format.metadata import FILE_NAME

NAMES = ".names"
TEMPORARY = re.compile(r"mmreplay-.+-([0-9]{1,10})-[0-9a-f]{8}")

_numbers: dict[str, int] = {}
"""Of each system, from where the next place is looked for."""
_swept: set[Path] = set()


def numbered(
    folder: Path, system: str, *, resume: bool, fresh: bool
) -> tuple[Path, WriterLock]:
    """The next place of a system under a folder that no process uses, and its lock.

    Args:
        folder: ``$MMREPLAY_DIR``.
        system: Name of the adapter.
        resume: A buffer there is gone on with; otherwise it is refused, and the same
            place is the next one again.
        fresh: Pass over places that hold a buffer.
    """
    for number in count(_numbers.get(system, 0)):
        name = f"{system}-{number}"
        place = folder / NAMES / name
        opening.make_place(place)
        with suppress(LockedError):
            lock = WriterLock(place)
            held = (folder / name / FILE_NAME).exists()
            if fresh and held:
                lock.release()
                continue
            _numbers[system] = number + (resume or not held)
            return folder / name, lock
    raise AssertionError("numbers never end")


def temporary(system: str) -> Path:
    """A new place in ``$TMPDIR``, or /tmp; those that are nobody's any more go."""
    top = Path(os.environ.get("TMPDIR", "/tmp"))
    if top not in _swept:
        _swept.add(top)
        _sweep(top)
    return top / f"mmreplay-{system}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _sweep(top: Path) -> None:
    """Remove temporary buffers of this user whose processes were killed."""
    with suppress(OSError, ReplayError):
        for name in files.names(top):
            found = TEMPORARY.fullmatch(name)
            if found and not _lives(int(found[1])):
                # Another user's, or one that somebody else removes as well, is let be.
                with suppress(OSError, ReplayError):
                    _remove_left(top / name)


def _remove_left(path: Path) -> None:
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        return
    told = held_by(path)
    # A process of another machine, or container, is not seen from here.
    if told is None or told["host"] != socket.gethostname():
        return
    lock = WriterLock(path)
    try:
        files.remove_tree(path)
    finally:
        lock.release()


def _lives(pid: int) -> bool:
    """Whether there is such a process, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
