"""Which boot of the machine this is.

Whether this process is the one that opened a buffer, or a fork of it.

Forking while threads run is refused: a child has their locks, and not them.

Locks that a thread may ask for again while it holds them.

Two things at once, one of them on a thread that ends with it.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mmreplay.errors import ForkedError, system_error


def boot_id() -> bytes:
    """Return 16 bytes that change at each boot; live slots of another are void.

    Where the system has none (not Linux), 16 zero bytes: never trusted. To take a
    passing lack of descriptors for that would cut what was published.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        text = path.read_text("ascii")
    except (FileNotFoundError, PermissionError):
        return bytes(16)
    except OSError as error:
        raise system_error("read", path, error) from error
    return bytes.fromhex(text.strip().replace("-", ""))


count = 0
"""Forks between the first process and this one: to ask for the pid is a system call."""


def _count_fork() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_count_fork)


class Owner:
    """The process that it was made in.

    Attributes:
        forks: `count` there; as long as it is the same, so is the process.
    """

    __slots__ = ("_pid", "forks")

    def __init__(self) -> None:
        """Take this process."""
        self._pid, self.forks = os.getpid(), count

    def check(self) -> None:
        """Refuse any other.

        Raises:
            ForkedError: This process is not the one that opened the buffer.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this buffer was opened for writing by pid {self._pid}, this is a "
                f"forked child (pid {os.getpid()}), expected the parent; open the "
                "path with mode='r' here"
            )


_running: weakref.WeakSet[Any] = weakref.WeakSet()
_forked = [False]


def started(owner: object) -> None:
    """Say that an object's threads run."""
    _running.add(owner)


def stopped(owner: object) -> None:
    """Say that they run no more."""
    _running.discard(owner)


def check(what: str) -> None:
    """Refuse to go on in a process that was forked while a loader ran.

    Raises:
        ForkedError: It was.
    """
    if _forked[0]:
        raise ForkedError(
            f"{what}: got a process that was forked while a ReplayLoader ran its "
            "threads, expected one that was spawned, or forked before; pass "
            "multiprocessing_context='spawn' to the DataLoader, or close the loader "
            "first"
        )


def _in_child() -> None:
    _forked[0] = _forked[0] or len(_running) > 0
    _running.clear()


os.register_at_fork(after_in_child=_in_child)


def held(lock: threading.RLock) -> bool:
    """Whether this thread holds a lock.

    A signal's handler, or a destructor, runs in the middle of whatever its thread did:
    there it must not wait for threads that wait for that lock.
    """
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # as Condition asks


def beside(one: Callable[[], None], other: Callable[[], None]) -> None:
    """Do two things at once, the first on a thread of its own.

    One that waited for work would be gone after a fork. Where the system has none left
    they are done one after the other.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def begun() -> None:
        try:
            one()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    try:
        _thread.start_new_thread(begun, ())
    except RuntimeError:
        begun()
    try:
        other()
    finally:
        # It fills memory of the caller's.
        failure = ended.get()
    if failure is not None:
        raise failure
