"""A new folder that is filled with files, and is a buffer once it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmreplay.buffer import opening
from mmreplay.disk import files
from mmreplay.disk.lock import FILE_NAME as LOCK
from mmreplay.disk.lock import WriterLock, refuse_network
from mmreplay.errors import LockedError
from mmreplay.format import metadata as metadata_file
from mmreplay.storage import recovery


@contextmanager
def filled(target: Path, allow_network: bool) -> Iterator[None]:
    """Hold a new or empty folder, marked as half made until it is whole.

    What fails gives its space back: a disk that was too small would stay full. Whoever
    is killed, or gets Ctrl-C, leaves what there is, and the next attempt begins anew.

    Args:
        target: The folder. Who fills it has metadata.json appear last, and then
            removes the mark.
        allow_network: Write to a network file system all the same.

    Raises:
        FormatError: It holds something.
        LockedError: Somebody else fills it.
    """
    there = os.path.exists(target)
    opening.make_place(target)
    try:
        refuse_network(target, allow_network)
        lock = WriterLock(target)
    except LockedError:
        raise
    except Exception:
        # Without the lock nothing in it is ours, however it came there.
        with suppress(OSError):
            if not there:
                files.disk.rmdir(target)
        raise
    try:
        recovery.clear_half(target)
        others = set(files.names(target))
        which = os.stat(target).st_ino
        try:
            recovery.mark_half(target)
            yield
        except Exception:
            # Why it failed is what is told, not what could not be removed. A repair in
            # place that fails at its exchange has a whole buffer here, or already the
            # damaged one.
            with suppress(OSError):
                if os.stat(target).st_ino == which and not _whole(target):
                    _give_back(target, others, there)
            raise
    finally:
        lock.release()


def _whole(target: Path) -> bool:
    names = files.names(target)
    return metadata_file.FILE_NAME in names and recovery.HALF not in names


def _give_back(target: Path, others: set[str], there: bool) -> None:
    """Remove what was made in a folder since, and it unless it was there before."""
    for name in set(files.names(target)) - others - {recovery.HALF}:
        files.remove_tree(target / name)
    # Last: without it what is left would be taken for somebody else's.
    files.remove_tree(target / recovery.HALF)
    if not there and others <= {LOCK}:
        files.remove_tree(target)
