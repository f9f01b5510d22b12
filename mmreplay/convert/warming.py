"""Rows of a buffer that was loaded past the page cache, asked for where they fit.

Who loads a buffer often draws from it next. Found on the disk, its first batches take
ten times as long as in memory; so a thread asks for the files, while the caller goes
on. Nobody waits for it, and what goes wrong with it goes wrong with nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mmreplay.errors import ReplayError
from mmreplay.files import File
from mmreplay.ram import available_nbytes

SHARE = 4
"""Of the memory that is available files take one part of so many, or are left alone."""


def warm(paths: Sequence[Path]) -> threading.Thread | None:
    """Begin to read files into memory, if there is plenty for them.

    Returns:
        The thread that asks; it does not keep the interpreter from ending.
    """
    if not paths:
        return None
    with suppress(OSError, RuntimeError):
        if sum(path.stat().st_size for path in paths) <= available_nbytes() // SHARE:
            thread = threading.Thread(
                target=_ask, args=(list(paths),), name="mmreplay-warm", daemon=True
            )
            thread.start()
            return thread
    return None


def _ask(paths: list[Path]) -> None:
    for path in paths:
        # Removed meanwhile, or on a device that fails: who draws is told.
        with suppress(ReplayError):
            file = File.open(path, None)
            try:
                file.will_need(0, file.nbytes)
            finally:
                file.close()
