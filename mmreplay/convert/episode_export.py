"""Appends the finished episodes of a ring to a target, in the background.

The ring is the journal: rows that are not appended are held, over kills too, so that a
process that is killed at any instant loses no step of a finished or unfinished episode.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Appended, Appender, Reader, Report
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.finished import Finished, finished, reader_of
from mmreplay.convert.registry import Format
from mmreplay.errors import DurabilityWarning, FailedError, FormatError, frames_to_caller, undone_by
from mmreplay.process import ProcessGuard, Worker

Array = NDArray[np.int64]
LOOK_S = 1.0
"""Time between two looks for finished episodes."""


class EpisodeExport:
    """Appends episodes of an open buffer; see `AutoExport`.

    Threads: the caller's adds and calls, and one that looks and appends. What both use
    is read and written under `_changed`; the appender is the thread's alone.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        target: Path,
        file_format: Format,
        *,
        fields: Sequence[str] | None,
        every_episodes: int,
        truncates: bool,
        overwrite: bool,
        **options: object,
    ) -> None:
        """Hold the rows of a buffer, and begin to look.

        Args:
            buffer: Open for writing.
            target: Of the episodes.
            file_format: Its format.
            fields: As `AutoExport` has them.
            every_episodes: Finished episodes of an append, at least.
            truncates: Append an unfinished episode that fills the ring, as truncated.
            overwrite: Replace a target that is there, by the first append.
            **options: The format's.
        """
        self.reports: list[tuple[Path, Report]] = []
        self._buffer, self._fields, self._target = buffer, fields, target
        self._every_episodes, self._truncates = every_episodes, truncates
        description = BufferReader(buffer, fields=fields).describe()
        self._appender = registry.open_appender(
            file_format, target, description, overwrite=overwrite, **options
        )
        with undone_by(self._appender.close):
            refuse_older(self._appender, buffer.heads)
            self._owner = ProcessGuard(
                "this AutoExport was made", "Make one in the process that adds"
            )
            self._changed = threading.Condition()
            self._next = self._appender.appended.next
            none = np.zeros(buffer.num_envs, bool)
            # Where unfinished episodes are truncated, or broken off, by the next look.
            self._ends, self._upto = (none, none), buffer.heads
            # Looks that were asked for, and those that ended.
            self._asked = self._ended = 0
            self._failure: BaseException | None = None
            self._stopping = False
            self._looked = np.full(buffer.num_envs, -1)
            buffer.hold_rows(self._before_overwrite)
            with undone_by(buffer.hold_rows, None):
                self._worker: Worker[None] = Worker("mmreplay-append", self._watch)
                self._worker.start()

    def _before_overwrite(self, heads: Array, tails: Array, needed: Array, target: Array) -> Array:
        """Append what is finished before its rows are overwritten; see `hold_rows`."""
        capacity = self._buffer.metadata.ring.capacity
        with self._changed:
            tried = False
            while True:
                allowed = np.maximum(self._next, tails) + capacity
                short = needed > allowed
                if not short.any():
                    limits: Array = np.maximum(needed, np.minimum(target, allowed))
                    return limits
                if tried:
                    break
                self._look_now(short & self._truncates)
                tried = True
        (env_id, *_) = np.flatnonzero(short).tolist()
        raise FailedError(
            f"environment {env_id} has {int(heads[env_id] - self._next[env_id])} steps of an "
            f"episode that is not finished, and they fill the ring, which keeps {capacity} rows "
            f"and the bytes of their values: nothing can be appended to {self._target}. End the "
            "episode with end_episodes, pass on_long='cut', or create the ring with a larger "
            "capacity."
        )

    def _look_now(self, truncate: NDArray[np.bool_]) -> None:
        """Have the thread append all finished episodes, and wait for it.

        Those whose end `end_episodes` declared are finished: no row may follow them.

        Args:
            truncate: bool ``[E]``, where the unfinished episode is to end as well.
        """
        # Here, and not in the thread: a commit that fails waits for the buffer's turn,
        # which an add has that waits for the thread.
        buffer = self._buffer
        buffer.commit()
        heads, truncate, discard = buffer.heads, truncate.copy(), np.zeros_like(truncate)
        declared, discarded = buffer.declared_ends(), buffer.declared_ends(discard=True)
        # If another thread has added, they may be ends of other episodes.
        if (buffer.heads == heads).all():
            truncate[declared] = discard[discarded] = True
        self._ends = truncate & ~discard, discard
        self._upto = heads
        self._asked += 1
        mine = self._asked
        self._changed.notify_all()
        while self._ended < mine and not self._stopping:
            self._changed.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _watch(self, _: Worker[None]) -> None:
        """The thread: look each second, and when it is asked."""
        while True:
            with self._changed:
                if self._asked == self._ended and not self._stopping:
                    self._changed.wait(LOOK_S)
                if self._stopping:
                    return
                asked, ends, heads = self._asked, self._ends, self._upto
                self._ends = np.zeros_like(ends[0]), np.zeros_like(ends[1])
                now = asked > self._ended
            failure = None
            try:
                self._look(now, heads if now else self._buffer.heads, *ends)
            except BaseException as error:  # it is raised by the next call that asks
                failure = error
            with self._changed:
                self._failure = failure if now else None
                self._ended = asked
                self._changed.notify_all()

    def _look(
        self, now: bool, upto: Array, truncate: NDArray[np.bool_], discard: NDArray[np.bool_]
    ) -> None:
        """Append, if enough episodes are finished, or one was asked for."""
        buffer = self._buffer
        if buffer.path is not None:
            # A power cut loses rows above these, and others would have their positions.
            upto = np.minimum(upto, buffer.committed)
        if not now and (upto == self._looked).all():
            return
        self._looked = upto
        reader = BufferReader(buffer, fields=self._fields)
        episodes = finished(
            reader, self._appender.appended, upto, truncate=truncate, discard=discard
        )
        if episodes.episodes >= (1 if now else self._every_episodes):
            report = append(self._appender, reader, episodes)
            self.reports.append((self._target, report))
        elif now and not episodes.episodes:
            # Rows of episodes that were broken off are not waited for.
            self._appender.skip(episodes.appended)
        self._note(self._appender.appended)

    def _note(self, appended: Appended) -> None:
        with self._changed:
            self._next = appended.next

    def flush(self) -> None:
        """Append all finished episodes now."""
        self._owner.check()
        with self._changed:
            self._look_now(np.zeros(self._buffer.num_envs, bool))

    def close(self) -> None:
        """Append all finished episodes, and let go of the rest."""
        # In a forked child all of it is the parent's, and the thread is not there.
        if self._stopping or self._owner.num_forks != process.num_forks:
            return
        try:
            if not self._buffer.closed:
                self.flush()
        finally:
            if not self._buffer.closed:
                self._buffer.hold_rows(None)
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._worker.stop()
            self._appender.close()
        if self._buffer.closed:
            return
        waiting = np.maximum(self._buffer.heads - np.maximum(self._next, self._buffer.tails), 0)
        (env_ids,) = np.nonzero(waiting)
        if len(env_ids):
            warnings.warn(
                f"{self._target}: {int(waiting.sum())} rows of unfinished episodes, of "
                f"environments {env_ids.tolist()[:8]}, were not appended: they are in the ring, "
                "and the next AutoExport appends them once they end.",
                DurabilityWarning,
                stacklevel=frames_to_caller(),
            )


def refuse_older(appender: Appender, heads: Array) -> None:
    """Refuse a target that has rows which the ring does not have yet.

    Raises:
        FormatError: It has.
    """
    beyond = np.flatnonzero(appender.appended.next > heads)
    if len(beyond):
        env_id = int(beyond[0])
        raise FormatError(
            f"{appender.target} has rows up to {int(appender.appended.next[env_id])} of "
            f"environment {env_id}, and the ring ends at {int(heads[env_id])}: it is an older "
            "copy of the ring. Append to another folder, or pass overwrite=True (--overwrite)."
        )


def append(appender: Appender, reader: Reader, episodes: Finished) -> Report:
    """Append finished episodes.

    Args:
        appender: Of the target.
        reader: Of the ring, or of its changed fields.
        episodes: What `finished` said of it.
    """
    begun = time.monotonic()
    nbytes, notes = appender.append(reader_of(reader, episodes), episodes.appended)
    if episodes.truncated:
        notes.note(f"{episodes.truncated:,} episodes were cut: their last step is truncated")
    if episodes.broken:
        notes.note(f"{episodes.broken:,} episodes that were broken off were left out")
    if episodes.refused:
        notes.note(f"{episodes.refused:,} episodes did not meet the condition")
    if episodes.unknown:
        notes.note(f"of {episodes.unknown:,} episodes the condition is not known: left out")
    if episodes.lost.any():
        notes.doubt(
            f"{int(episodes.lost.sum()):,} rows left the ring before they were appended, of "
            f"environments {np.flatnonzero(episodes.lost).tolist()[:8]}"
        )
    return Report(
        rows=episodes.ranges.rows,
        episodes=episodes.episodes,
        nbytes=nbytes,
        seconds=time.monotonic() - begun,
        notes=tuple(notes.notes),
        doubts=tuple(notes.doubts),
    )
