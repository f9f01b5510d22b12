"""The open files of one generation of a buffer, and the order in which they close."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mmreplay.buffer.append import Appender
from mmreplay.disk.lock import WriterLock
from mmreplay.errors import FailedError, RemovedError, ReplayError
from mmreplay.format import commit as records
from mmreplay.format.metadata import Metadata
from mmreplay.storage.commit_state import CommitReader, CommitWriter, MemoryCommitState
from mmreplay.storage.committer import Committer
from mmreplay.storage.memmap import POLICY
from mmreplay.storage.recovery import FolderWatch, Recovery
from mmreplay.storage.store import ReadPolicy, Store


@dataclass(frozen=True, slots=True)
class Origin:
    """What an opener of others' data opened.

    Attributes:
        source: What it was opened by, for `open` again.
        mapping: How it is read as a buffer, with notes.
    """

    source: Any
    mapping: Any

    def __str__(self) -> str:
        return str(self.source)


@dataclass(slots=True)
class OpenFiles:
    """One generation of a buffer, open: in a folder, in RAM, or a foreign Zarr group.

    The buffer's finaliser holds this object. So it refers neither to the buffer nor to
    its readers, and a buffer without references is collected.

    Attributes:
        path: The buffer's folder, or None in RAM and of a Zarr group.
        metadata: Of this generation.
        store: The rows.
        commit: Heads, limits and tails: which rows are alive.
        recovery: The state in which opening found the files.
        appender: Adds rows; None where they are only read.
        committer: Makes rows durable; None in RAM and where they are only read.
        lock: The writer's lock; a resize hands it to the next generation.
        policy: How rows are read.
        closed: They were closed.
        pid: The process that opened them.
        seal: Closing puts shards that are not full into the Zarr group.
        refuse_removed: Of a reader; see `recovery.FolderWatch.look`.
        refuse_elsewhere: See `recovery.FolderWatch.refuse_elsewhere`.
        watch: Of the folder; None in RAM and of a Zarr group.
        origin: Of what is no buffer's folder; None of buffers.
    """

    path: Path | None
    metadata: Metadata
    store: Store
    commit: CommitReader | CommitWriter | MemoryCommitState
    recovery: Recovery
    appender: Appender | None = None
    committer: Committer | None = None
    lock: WriterLock | None = None
    policy: ReadPolicy = POLICY
    closed: bool = False
    pid: int = field(default_factory=os.getpid)
    seal: bool = True
    refuse_removed: Callable[[], bool] | None = None
    refuse_elsewhere: Callable[[], None] = lambda: None
    watch: FolderWatch | None = None
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """The buffer's name in messages."""
        return str(self.path or self.origin or "this buffer")

    def check_writable(self) -> Appender:
        """Return the appender.

        Raises:
            FailedError: The buffer is closed, or not open for writing.
        """
        if self.origin is not None:
            refuse_writing(self.origin)
        if self.appender is None or self.closed:
            state = "closed" if self.closed else "open with mode='r'"
            raise FailedError(
                f"{self.name} is {state}. Use ReplayBuffer.open(path, 'r+') to write."
            )
        return self.appender

    def mark_changed(self) -> None:
        """Make the next commit due although no row was added or dropped."""
        if self.committer is not None:
            self.committer.rows_modified = True

    def close(self) -> None:
        """Commit what is open for writing, and close all files.

        The lock goes last: before, another writer would find files that still change.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self._commit_last()
        finally:
            try:
                self.commit.close()
            finally:
                try:
                    self.store.close()
                finally:
                    if self.lock is not None:
                        self.lock.release()

    def retire(self) -> None:
        """Close the files of a generation that was replaced.

        The next generation has taken over the lock.
        """
        self.closed = True
        self.commit.close()
        self.store.close()

    def discard(self) -> None:
        """Close the files of a generation that was never published."""
        self.closed = True
        try:
            if self.committer is not None:
                self.committer.stop()
        finally:
            self.commit.close()
            self.store.close()
            self.store.unmap()

    def _commit_last(self) -> None:
        """Stop the committer and commit. No thread writes then, even on Ctrl-C."""
        if self.committer is None:
            return
        try:
            self.committer.stop()
            heads, tails = self.commit.heads, self.commit.tails
            self.store.settle_last(tails, heads, seal=self.seal)
            self.committer.commit(records.CLEAN)
        except ReplayError:
            self.committer.refuse_removed()
            raise
        finally:
            # A thread that outlived the files would write into files that get their
            # numbers next.
            self.committer.stop()

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, ending: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        """Close files that an interrupted call opened and returned to no caller."""
        # Bound above, as globals may be gone when the interpreter ends. A close needs
        # them too: then the system closes the files, and the next opening finds every
        # published row.
        closed, pid = getattr(self, "closed", True), getattr(self, "pid", None)
        if not closed and pid == getpid() and not ending():
            with suppress(RemovedError):
                self.close()


def refuse_writing(name: object) -> NoReturn:
    """Refuse to write to a Zarr group.

    Raises:
        FailedError: Always.
    """
    raise FailedError(
        f"{name} is a Zarr group, which cannot be written. Make a buffer of it with "
        "mmreplay convert or mmreplay.load."
    )


def close_in_owner(opened: OpenFiles, pid: int) -> None:
    """Close files in the process that opened them; a finaliser's call.

    A forked child has the same file numbers, but its parent closes those files.
    """
    if os.getpid() == pid:
        # A buffer that is collected has no caller to raise to.
        with suppress(RemovedError):
            opened.close()
