"""What a buffer is and holds beyond its metadata, for people who look at it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import NO_BIRTH
from mmreplay.disk.lock import Owner
from mmreplay.episodes.column_index import BYTES_A_ROW
from mmreplay.errors import FailedError
from mmreplay.format import commit
from mmreplay.format.metadata import heap_reserve_nbytes
from mmreplay.storage.commit_state import open_commit

if TYPE_CHECKING:
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.episodes import EpisodeIndex
    from mmreplay.ring import Span

SETTLING_TRIES = 10
Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Rows, steps and episodes alive.

    Attributes:
        rows: Rows of all environments.
        steps: Rows less final rows.
        legal_starts: Steps that can be drawn with their next observations.
        never_drawn_steps: Steps whose next observation is unknown, and stays so.
        tails: int64 ``[E]``, the oldest position alive.
        heads: int64 ``[E]``, the next position to be written.
        sizes: int64 ``[E]``, steps alive.
        episodes: Episodes with a step alive.
        unfinished: Those of them that have no end yet.
        missing_start: Those of them that lost their first steps.
    """

    rows: int
    steps: int
    legal_starts: int
    never_drawn_steps: int
    tails: Array
    heads: Array
    sizes: Array
    episodes: int
    unfinished: int
    missing_start: int

    @property
    def index_nbytes(self) -> int:
        """Bytes of memory that a look-up of rows by a column takes, at most."""
        return BYTES_A_ROW * self.rows


@dataclass(frozen=True, slots=True)
class HeapFacts:
    """How full the heaps of values that vary are.

    Attributes:
        nbytes: Bytes of each environment's heap.
        used: int64 ``[E]``, bytes of values.
        rows: int64 ``[E]``, rows alive.
        rows_that_fit: Rows of an environment, as long as those alive; None where that
            is not known, or shards take the values.
    """

    nbytes: int
    used: Array
    rows: Array
    rows_that_fit: int | None


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """The last commit: what a power cut would leave.

    Attributes:
        time_ns: When it was made, in ns since 1970; 0 where there is none.
        exact: False where it was made then or before.
        heads: int64 ``[E]``, its heads.
        clean: The writer closed the buffer.
        survives_kill: A killed writer loses no published row; False where the file
            system does not say when a file was created.
    """

    time_ns: int
    exact: bool
    heads: Array
    clean: bool
    survives_kill: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What a buffer is and holds; each part is looked up when it is asked for.

    A look at all rows, or at the disk, takes time: a caller asks for what it needs.
    What metadata.json says is in `ReplayBuffer.metadata`.

    Attributes:
        buffer: The buffer, open in any mode.
    """

    buffer: ReplayBuffer

    def rows(self) -> RowFacts:
        """Count rows, steps and episodes, of one moment unless a writer is too fast."""
        for _ in range(SETTLING_TRIES):
            span = self.buffer.span
            counts = _count_rows(self.buffer.episodes, span)
            if self.buffer.span is span:
                break
        return counts

    def heap(self) -> HeapFacts | None:
        """Say how full the heaps are, and what fits; None where no field varies."""
        metadata, used = self.buffer.metadata, self.buffer.view.heap_used
        if used is None:
            return None
        rows, nbytes = self.buffer.span.lengths, metadata.heap_nbytes
        # The reserve of the heap is not for rows: see `HeapSpace`.
        free = nbytes - heap_reserve_nbytes(metadata.schema, nbytes)
        held = (rows > 0) & (used > 0)
        fit = None
        # In a compressed buffer shards take the values, and no row ends with them.
        if held.any() and metadata.sharding is None:
            fit = int((free * rows[held] // used[held]).min())
        return HeapFacts(nbytes, used, rows, fit)

    def disk(self) -> tuple[int, int]:
        """Measure everything in the folder: (apparent bytes, bytes allocated on disk).

        Raises:
            FailedError: The buffer has no folder, likewise the next ones.
        """
        apparent = allocated = 0
        for where, _, names in os.walk(self._folder()):
            for name in names:
                try:
                    status = os.lstat(os.path.join(where, name))
                except FileNotFoundError:
                    continue  # A writer has just removed it.
                apparent += status.st_size
                allocated += status.st_blocks * 512
        return apparent, allocated

    def commit(self) -> CommitFacts:
        """Read the newest durable record.

        Raises:
            CorruptError: It cannot be read, or the file is damaged.
        """
        metadata = self.buffer.metadata
        num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
        data_folder = self._folder() / metadata.folder
        file, data = open_commit(data_folder, num_envs, heap_nbytes, writable=False)
        try:
            birth = file.identity()[2]
        finally:
            file.close()
        slots = commit.split(data, metadata.uuid, metadata.generation, num_envs, heap_nbytes)
        record = commit.newest_durable(slots)
        heads = self.buffer.recovery.committed if record is None else record.heads
        # A commit that raises the limits alone repeats the heads of the last commit.
        older = [
            each.time_ns
            for each in (slots[slot] for slot in commit.DURABLE_SLOTS)
            if each is not None
            and record is not None
            and (each.heads == heads).all()
            and (each.limits != record.limits).any()
        ]
        return CommitFacts(
            min([0 if record is None else record.time_ns, *older]),
            not older,
            heads,
            bool(record is not None and record.flags & commit.CLEAN),
            birth != NO_BIRTH,
        )

    def writer(self) -> dict[str, Any] | None:
        """Return what the lock says of the process that writes now, if one does."""
        owner = Owner(self._folder())
        return owner.text if owner.alive else None

    def _folder(self) -> Path:
        folder = self.buffer.folder_now()
        if folder is None:
            raise FailedError(
                f"{self.buffer.source or 'a buffer that is in RAM'} has no folder, which "
                "facts of the disk need. Ask for its rows alone."
            )
        return folder


def _count_rows(index: EpisodeIndex, span: Span) -> RowFacts:
    tables = [index.episodes(env_id) for env_id in range(len(span.stop))]
    return RowFacts(
        int(span.lengths.sum()),
        index.num_steps,
        index.num_legal,
        index.num_unknown_next,
        span.first,
        span.stop,
        index.sizes(),
        sum(len(e.begin) for e in tables),
        sum(int(e.running.sum()) for e in tables),
        sum(int(e.headless.sum()) for e in tables),
    )
