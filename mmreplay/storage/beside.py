"""Two things at once, one of them on a thread that ends with it."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from queue import SimpleQueue


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
