"""Takes the rows that are alive now out of a generation that is being written.

The writer's limit is read *after* rows were taken: what it has passed by then may hold
later rows and is given up, as a reader does.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay import files
from mmreplay.buffer.lifecycle import Parts
from mmreplay.errors import called, system_error
from mmreplay.files import File
from mmreplay.storage.base import CheckedStore
from mmreplay.storage.ledger import refuse_cut
from mmreplay.storage.placement import FLAGS, SUMS

Array = NDArray[np.int64]
How = Literal["reflink", "copy", "link"]
Pairs = Sequence[tuple[File, File]]
"""Files and their copies."""
Progress = Callable[[int, int], None]
CHUNK_NBYTES = 4 << 20
CANNOT_CLONE = {
    *(errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS),
    errno.EPERM,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Slots ``[slot, slot + count)`` of environments whose rows lie side by side."""

    ids: Array
    row: int
    slot: int
    count: int


class Taking:
    """Takes the rows that are alive now out of one generation, into another store.

    Attributes:
        heads: int64 ``[E]``, when it began.
        firsts: int64 ``[E]``, oldest alive when it began.
        lost: int64 ``[E]``, positions below were overwritten before they were taken.
    """

    def __init__(
        self,
        parts: Parts,
        store: CheckedStore,
        columns: Pairs,
        progress: Progress | None,
    ) -> None:
        """Look at what is alive.

        Args:
            parts: Of the source, open for reading.
            store: The target's.
            columns: Files with a value a row beside the store's, and their copies.
            progress: Called with (bytes taken, bytes to take).
        """
        self._ledger = parts.ledger
        self._ledger.refresh()
        ring = self._ring = parts.metadata.ring
        self.heads = self._ledger.heads.copy()
        tails = np.maximum(self._ledger.tails, self._ledger.limits - ring.slots)
        self.firsts = np.maximum(tails, self.heads - ring.capacity)
        # Sums cover whole blocks; and an environment that was emptied keeps its
        # newest row, which tells whether a final row is to follow.
        oldest = np.minimum(self.firsts, np.maximum(self.heads - 1, 0))
        self._begins = oldest // ring.block_rows * ring.block_rows
        self.lost = np.zeros(ring.num_envs, np.int64)
        self._summed = np.minimum(parts.recovery.committed, self.heads)
        self._store = store
        self._pairs = [*zip(parts.store.files, store.files, strict=True), *columns]
        self._progress = progress
        self._room = memoryview(bytearray(CHUNK_NBYTES))
        self.nbytes = 0

    @property
    def tails(self) -> Array:
        """int64 ``[E]``, the oldest position that was taken whole."""
        return np.minimum(np.maximum(self.firsts, self.lost), self.heads)

    @property
    def cut_rows(self) -> int:
        """Rows that the writer gave up before they were taken."""
        return int((self.tails - self.firsts).sum())

    def run(self) -> How:
        """Take everything; see `ledger.refuse_cut`."""
        how: How = "copy"
        if self._cloned():
            self._look(self._begins, self.heads)
            self.nbytes = sum(target.nbytes for _, target in self._pairs)
            how = "reflink"
        else:
            self._copied()
        refuse_cut(self._ledger)
        self._forget_lost()
        return how

    def _copied(self) -> None:
        """Copy the rows, and the sums."""
        # The sums first: they may be another lap's by the time the rows are here.
        for source, target in self._pairs:
            if target.path.name == SUMS:
                self._copy(source, target, 0, target.nbytes)
        for piece in self._pieces():
            self._take(piece)

    def _cloned(self) -> bool:
        """Share the blocks of every file, if the file system can."""
        for source, target in self._pairs:
            try:
                files.disk.clone(target.fd, source.fd)
            except OSError as error:
                if error.errno in CANNOT_CLONE:
                    return False
                raise system_error("clone into", target.path, error) from error
        return True

    def _pieces(self) -> Iterator[Piece]:
        """What is to be copied, oldest first, in pieces of bounded size."""
        ring = self._ring
        row_nbytes = sum(self._row_nbytes(t) for _, t in self._pairs)
        if ring.layout == "env_major":
            size = max(1, CHUNK_NBYTES // row_nbytes)
            # In turns: the oldest rows of each environment are the first to go.
            each = [
                self._cuts(np.array([env_id]), first, stop, size)
                for env_id, (first, stop) in enumerate(
                    zip(self._begins.tolist(), self.heads.tolist(), strict=True)
                )
            ]
            for turn in zip_longest(*each):
                yield from (piece for piece in turn if piece is not None)
            return
        size = max(1, CHUNK_NBYTES // (row_nbytes * ring.num_envs))
        first, stop = int(self._begins.min()), int(self.heads.max())
        stop = min(stop, first + ring.slots)
        yield from self._cuts(np.arange(ring.num_envs), first, stop, size)

    def _cuts(self, ids: Array, first: int, stop: int, size: int) -> Iterator[Piece]:
        slots = self._ring.slots
        while first < stop:
            slot = first % slots
            count = min(size, stop - first, slots - slot)
            yield Piece(ids, self._ring.row(int(ids[0]), first), slot, count)
            first += count

    def _take(self, piece: Piece) -> None:
        """Copy the rows of a piece, and see which of them the writer passed."""
        slots = np.arange(piece.slot, piece.slot + piece.count)[:, None]
        begins, heads = self._begins[piece.ids], self.heads[piece.ids]
        positions = begins + (slots - begins) % self._ring.slots
        alive = positions < heads
        if not alive.any():
            return
        self._carry(piece, len(piece.ids))
        firsts = np.where(alive, positions, np.iinfo(np.int64).max).min(axis=0)
        stops = np.where(alive, positions + 1, 0).max(axis=0)
        self._look(firsts, stops, piece.ids)

    def _carry(self, piece: Piece, width: int) -> None:
        """Copy the rows of a piece, of every file that has rows."""
        for source, target in self._pairs:
            if target.path.name != SUMS:
                self._copy_rows(source, target, piece, width)

    def _copy_rows(self, source: File, target: File, piece: Piece, width: int) -> None:
        size = self._row_nbytes(target)
        count = piece.count * width * size
        self._copy(source, target, piece.row * size, count)

    def _look(self, firsts: Array, stops: Array, ids: Array | None = None) -> None:
        """Note which of the positions ``[firsts, stops)`` just taken are lost."""
        self._ledger.refresh()
        envs: Array | slice = slice(None) if ids is None else ids
        edges = (self._ledger.limits - self._ring.slots)[envs]
        lost = np.where(edges > firsts, np.minimum(edges, stops), 0)
        self.lost[envs] = np.maximum(self.lost[envs], lost)

    def _row_nbytes(self, target: File) -> int:
        return target.nbytes // self._ring.num_rows

    def _copy(self, source: File, target: File, offset: int, nbytes: int) -> None:
        for at in range(offset, offset + nbytes, CHUNK_NBYTES):
            data = self._room[: min(CHUNK_NBYTES, offset + nbytes - at)]
            source.pread_into(data, at)
            target.pwrite(data, at)
        self.nbytes += nbytes
        if self._progress is not None:
            rows = int((self.heads - self._begins).sum())
            total = rows * sum(self._row_nbytes(t) for _, t in self._pairs)
            total = max(self.nbytes, total)
            called("progress", self._progress, self.nbytes, total)

    def _forget_lost(self) -> None:
        """Clear the flags of an environment's newest row where that is lost too."""
        flags = next(t for _, t in self._pairs if t.path.name == FLAGS)
        gone = (self.lost >= self.heads) & (self.heads > 0)
        for env_id in np.flatnonzero(gone).tolist():
            flags.pwrite(b"\0", self._ring.row(env_id, int(self.heads[env_id]) - 1))

    def sum(self) -> None:
        """Write the sums of whole blocks that have none, or not of all their rows."""
        size = self._ring.block_rows
        tails = self.tails
        for env_id in range(self._ring.num_envs):
            stop = int(self.heads[env_id]) // size
            first = min(int(tails[env_id]) // size, stop)
            # From here on blocks were taken whole, with sums if they were committed.
            whole = -(-int(self.lost[env_id]) // size)
            summed = max(whole, int(self._summed[env_id]) // size)
            for begin, end in ((first, min(whole, stop)), (max(summed, first), stop)):
                sums = [self._store.checksum(env_id, b) for b in range(begin, end)]
                if sums:
                    self._store.write_sums(env_id, begin, np.array(sums, np.uint32))
