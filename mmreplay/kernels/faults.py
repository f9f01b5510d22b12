"""Survives reads of mapped pages that their file has no more: twin of ``_faults.c``.

Such a read ends the process (SIGBUS). C puts a page of zeros in the place of the
missing one and counts it: what was read is worth nothing, and its reader refuses it
where the count changed. Python cannot handle this signal, so that here such a read ends
the process as ever, and the count stays 0.
"""

from __future__ import annotations


def begin() -> int:
    """Survive the faults of this thread from now on; calls may be nested.

    Returns:
        Faults of all threads so far.
    """
    return 0


def end() -> int:
    """End what `begin` began in this thread.

    Returns:
        Faults of all threads so far.
    """
    return 0


def count() -> int:
    """Return the faults of all threads so far."""
    return 0
