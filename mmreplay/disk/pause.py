"""A pause of the ring: while a process holds it, the writer overwrites no row.

A process that copies rows takes it. The writer looks for it before it lets rows be
overwritten, and adds within its reserve until it is released. It is a flock, which ends
with its process: a copy that was killed stops no writer.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from pathlib import Path

from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import FailedError, LockedError

FILE_NAME = "PAUSE"
# A writer that asks has it for some microseconds itself.
PATIENCE_S = 2.0
ASK_EVERY_S = 0.005

_open_pauses: weakref.WeakSet[Pause] = weakref.WeakSet()


class Pause:
    """The pause of one folder, until `release`.

    Raises:
        LockedError: Another snapshot holds it.
        FailedError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE_NAME
        if not path.exists():
            _create(path)
        self._file = File.open(path, None)
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not try_lock(self._file):
                if time.monotonic() > deadline:
                    raise LockedError(
                        f"{folder} is already paused by another snapshot. Wait until "
                        "it is done, or take this one without pause."
                    )
                time.sleep(0.001)
        except BaseException:
            self._file.close()
            raise
        _open_pauses.add(self)

    def release(self) -> None:
        """Let the writer go on; a second call does nothing."""
        self._file.close()


def await_release(folder: Path) -> None:
    """Return once the ring of a folder is not paused; at once if it never was."""
    path = folder / FILE_NAME
    if not path.exists():
        return
    file = File.open(path, None)
    try:
        while not try_lock(file):
            time.sleep(ASK_EVERY_S)
    finally:
        file.close()


def try_lock(file: File) -> bool:
    """Take the lock of a file until it is closed; False where another has it."""
    try:
        files.disk.lock(file.fd)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FailedError(
            f"cannot lock {file.path}: {error.strerror}. Put the buffer on a file "
            "system with flock.",
            errno_=error.errno,
        ) from error
    return True


def _create(path: Path) -> None:
    try:
        File.create(path, 0).close()
    except FailedError as error:
        if error.errno != errno.EEXIST:
            raise


def _forget_in_child() -> None:
    for pause in list(_open_pauses):
        pause.release()


os.register_at_fork(after_in_child=_forget_in_child)
