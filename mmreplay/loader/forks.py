"""Forking while threads run is refused: a child has their locks, and not them."""

from __future__ import annotations

import os
import weakref
from typing import Any

from mmreplay.errors import ForkedError

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
