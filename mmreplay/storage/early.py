"""Whether this thread gathers what was asked for when it was drawn.

Such rows are in memory by then, or on their way, whatever the rest of the file is: a
look at them tells of themselves alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _State(threading.local):
    """Of this thread; defaults of the class, which are sooner looked up."""

    early = False
    lacks = False


_state = _State()


def gathers() -> bool:
    """Whether this thread gathers what was asked for early."""
    return _state.early


def lacks(resident: Callable[[], bool]) -> bool:
    """Whether to ask for rows, in a gather of what was asked for early.

    Args:
        resident: Looks at a few of them; once some were missing the rest of the gather
            is asked for without a look. Nobody foresaw them when they were drawn: steps
            to the end of an episode, or what is drawn in the place of others.
    """
    _state.lacks = _state.lacks or not resident()
    return _state.lacks


class Gathering:
    """Has looks of this thread tell of nothing else, until the exit.

    A class of its own: Ctrl-C between a generator's two frames would leave it on.
    """

    __slots__ = ("_before", "_early")

    def __init__(self, early: bool) -> None:
        """Begin nothing yet.

        Args:
            early: Whether the disk was asked for what is gathered.
        """
        self._early, self._before = early, (False, False)

    def __enter__(self) -> None:
        """Know what to go back to: a transform may draw from another loader."""
        self._before = _state.early, _state.lacks
        _state.early, _state.lacks = self._early, False

    def __exit__(self, *_: object) -> None:
        """Go back to it."""
        _state.early, _state.lacks = self._before
