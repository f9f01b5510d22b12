"""What a buffer asks of a limiter between its writer and those who draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Count = Callable[[], tuple[int, int]]
"""Rows ever written, and rows alive, as they are now."""


class Limit(Protocol):
    """One process's side of a limiter, bound to a buffer.

    Threads: any may call, also while others wait; a wait holds nothing that another
    call needs, and no caller holds a lock that the other side takes.
    """

    def await_insert(self) -> None:
        """Return once a row may be written.

        Raises:
            StarvedError: Nobody draws, or not in time.
            FailedError: It was closed, or no file can be opened.
        """

    def await_sample(self) -> None:
        """Return once an item may be drawn.

        Raises:
            StarvedError: Nobody writes, or not in time.
            FailedError: It was closed, or no file can be opened.
        """

    def count(self, count: int) -> None:
        """Count items that were drawn."""

    def close(self) -> None:
        """Give up the place among those who write or draw."""


class Limiter(Protocol):
    """A law for how fast a buffer may be written and drawn from."""

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer that it does not fit; see `bind`."""

    def bind(self, folder: Path | None, capacity: int, count: Count) -> Limit:
        """Apply it to a buffer.

        Args:
            folder: The buffer's.
            capacity: Rows that it can hold, of all environments.
            count: Looks at the heads.
        """
