"""The protocols of a limiter: it makes the writer or the learners of a buffer wait.

A limiter may also only count, and leave the wait to its user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Count = Callable[[], tuple[int, int]]
"""Rows ever written, and rows alive, as they are now."""
LeftOut = Callable[[bool], int]
"""Rows alive that the sampler leaves out; with False, those that are no legal starts.

Of a sampler that never drew, priorities and counts are not opened: they may be about to
be another process's.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """What all processes together wrote and drew.

    Attributes:
        inserts: Rows written, of all environments; those that the buffer held when it
            first got a limiter are among them.
        samples: Items drawn: the steps, or windows, of batches.
        size: Rows alive.
    """

    inserts: int
    samples: int
    size: int


class Limit(Protocol):
    """One process's side of a limiter, bound to a buffer.

    Threads: any may call, also while others wait; a wait holds nothing that another
    call needs, and no caller holds a lock that the other side takes.
    """

    def await_insert(self) -> None:
        """Return once a row may be written.

        Raises:
            StarvedError: No learner draws, or none in time.
            FailedError: The limit is closed, or no file can be opened.
        """

    def await_sample(self) -> None:
        """Return once an item may be drawn.

        Raises:
            StarvedError: No writer adds rows, or none in time.
            FailedError: The limit is closed, or no file can be opened.
        """

    def count(self, count: int) -> None:
        """Count items that were drawn."""

    def counts(self) -> Counts:
        """Return what is counted now, of all processes.

        Raises:
            FailedError: The limit is closed, or no file can be opened.
        """

    def allows_insert(self, count: int = 1) -> bool:
        """Whether so many rows may be written now, without a wait.

        Raises:
            FailedError: The limit is closed, or no file can be opened.
        """

    def allows_sample(self, count: int = 1) -> bool:
        """Whether so many items may be drawn now, without a wait.

        Raises:
            FailedError: The limit is closed, or no file can be opened.
        """

    def close(self) -> None:
        """Stop counting as a writer or learner, and release the locks."""


class Limiter(Protocol):
    """Limits how fast a buffer may be written and drawn from."""

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer that the limiter does not fit; see `bind`."""

    def bind(
        self, folder: Path | None, capacity: int, count: Count, left_out: LeftOut | None = None
    ) -> Limit:
        """Apply the limiter to a buffer.

        Args:
            folder: The buffer's folder; None for a buffer in RAM.
            capacity: Rows that the buffer can hold, of all environments.
            count: Returns the rows ever written and the rows alive.
            left_out: Returns how many of them the sampler leaves out, for messages.
        """
