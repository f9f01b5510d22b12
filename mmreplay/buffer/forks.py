"""Whether this process is the one that opened a buffer, or a fork of it."""

from __future__ import annotations

import os

from mmreplay.errors import ForkedError

count = 0
"""Forks between the first process and this one: to ask for the pid is a system call."""


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)


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
