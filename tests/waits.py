"""Waits for what takes seconds, or minutes where many share a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 240.0
"""How long a test waits before it fails."""


def until(done: Callable[[], Any], *errors: type[BaseException]) -> Any:
    """Call again until it returns something true, and return that.

    Args:
        done: What is called, every 50 milliseconds.
        *errors: Errors of it that count as no.
    """
    stop = time.monotonic() + WAIT_S
    while True:
        try:
            if result := done():
                return result
        except errors:
            if time.monotonic() > stop:
                raise
        if time.monotonic() > stop:
            raise AssertionError(f"nothing after {WAIT_S} seconds")
        time.sleep(0.05)
