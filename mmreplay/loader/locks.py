"""Locks that a thread may ask for again while it holds them."""

from __future__ import annotations

import threading


def held(lock: threading.RLock) -> bool:
    """Whether this thread holds a lock.

    A signal's handler, or a destructor, runs in the middle of whatever its thread did:
    there it must not wait for threads that wait for that lock.
    """
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # as Condition asks
