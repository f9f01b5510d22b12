"""A whole buffer beside another one, as that was at one moment, while it is written.

Where the file system can share blocks (reflink), every file is cloned; elsewhere the
rows alive are copied, oldest first. Either way the writer's limit is read *after*
rows were taken: what it has passed by then may hold later rows and is given up, as a
reader does. Never a hard link: the files of a ring are written in place.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay import files, recovery
from mmreplay.buffer import lifecycle
from mmreplay.buffer.lifecycle import Parts
from mmreplay.buffer.state import FILE_NAME as STATISTICS
from mmreplay.buffer.state import MAX_NBYTES as STATISTICS_NBYTES
from mmreplay.errors import FailedError, FormatError, VersionError, system_error
from mmreplay.files import File
from mmreplay.format import metadata as metadata_file
from mmreplay.storage.lock import WriterLock, refuse_network
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.pause import Pause
from mmreplay.storage.placement import FLAGS, SUMS

Array = NDArray[np.int64]
Progress = Callable[[int, int], None]
CHUNK_NBYTES = 4 << 20
CANNOT_CLONE = {
    *(errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS),
    errno.EPERM,
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `ReplayBuffer.snapshot` made.

    Attributes:
        path: Its folder, a whole buffer.
        how: ``"reflink"`` (blocks shared with the original) or ``"copy"``.
        firsts: int64 ``[E]``, the oldest position in it.
        heads: int64 ``[E]``, the heads of the buffer when it began.
        cut_rows: Rows alive when it began that the writer gave up before they were
            taken; 0 with a pause.
        nbytes: Bytes copied or shared.
    """

    path: Path
    how: Literal["reflink", "copy"]
    firsts: Array
    heads: Array
    cut_rows: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Rows in it."""
        return int((self.heads - self.firsts).sum())


def snapshot(
    source: Path,
    target: Path,
    *,
    pause: bool = False,
    allow_network: bool = False,
    progress: Progress | None = None,
) -> Snapshot:
    """Make a snapshot of a buffer's folder; see `ReplayBuffer.snapshot`."""
    if target.is_relative_to(source):
        raise FormatError(
            f"{target} is inside the buffer {source}, expected a folder elsewhere; "
            "choose a path beside it"
        )
    with ExitStack() as stack:
        if pause:
            stack.callback(Pause(source).release)
        parts = lifecycle.open_reader(source)
        stack.callback(parts.store.unmap)
        stack.callback(parts.close)
        if parts.metadata.engine != "memmap":
            raise VersionError(
                f"{source} was written with engine {parts.metadata.engine!r}, expected "
                "'memmap', whose files a snapshot takes; close the buffer and copy its "
                "folder"
            )
        metadata = parts.metadata
        if metadata.engine != "memmap":
            raise FailedError(
                f"{source} has engine {metadata.engine!r}, expected 'memmap' for a "
                "snapshot; close it and copy the folder, or use mmreplay.export"
            )
        if metadata.unknown_features:
            raise VersionError(
                f"{source} uses the features {list(metadata.unknown_features)}, which "
                "this mmreplay cannot copy; install a newer mmreplay"
            )
        lifecycle.make_place(target)
        refuse_network(target, allow_network)
        stack.callback(WriterLock(target).release)
        recovery.clear_half(target)
        return _build(parts, source, target, progress)


def _build(
    parts: Parts, source: Path, target: Path, progress: Progress | None
) -> Snapshot:
    """Fill the target's folder; metadata.json is the last file to appear in it."""
    metadata = parts.metadata
    folder = target / metadata.folder
    recovery.mark_half(target)
    files.make_folder(folder)
    store = MemmapStore.create(folder, metadata.ring, metadata.schema)
    try:
        taking = _Taking(parts, store, progress)
        how = taking.run()
        store.sync()
        taking.sum()
        store.sync_sums()
    finally:
        store.close()
        store.unmap()
    recovery.create(folder, metadata, taking.heads, taking.tails)
    files.sync_folder(folder)
    _copy_statistics(source, target)
    encoded = metadata_file.encode(metadata)
    files.replace_bytes(target / metadata_file.FILE_NAME, encoded)
    files.remove_tree(target / recovery.HALF)
    return Snapshot(
        target, how, taking.tails, taking.heads, taking.cut_rows, taking.nbytes
    )


def _copy_statistics(source: Path, target: Path) -> None:
    if (source / STATISTICS).exists():
        data = files.read_bytes(source / STATISTICS, STATISTICS_NBYTES)
        files.replace_bytes(target / STATISTICS, data)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Slots ``[slot, slot + count)`` of environments whose rows lie side by side."""

    ids: Array
    row: int
    slot: int
    count: int


class _Taking:
    """Takes the rows that are alive now out of one generation, into another store.

    Attributes:
        heads: int64 ``[E]``, when it began.
        firsts: int64 ``[E]``, oldest alive when it began.
        lost: int64 ``[E]``, positions below were overwritten before they were taken.
    """

    def __init__(
        self, parts: Parts, store: MemmapStore, progress: Progress | None
    ) -> None:
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
        self._pairs = list(zip(parts.store.files, store.files, strict=True))
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

    def run(self) -> Literal["reflink", "copy"]:
        """Take everything."""
        how: Literal["reflink", "copy"] = "copy"
        if self._cloned():
            self._look(self._begins, self.heads)
            self.nbytes = sum(target.nbytes for _, target in self._pairs)
            how = "reflink"
        else:
            self._copied()
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

    def _pieces(self) -> Iterator[_Piece]:
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

    def _cuts(self, ids: Array, first: int, stop: int, size: int) -> Iterator[_Piece]:
        slots = self._ring.slots
        while first < stop:
            slot = first % slots
            count = min(size, stop - first, slots - slot)
            yield _Piece(ids, self._ring.row(int(ids[0]), first), slot, count)
            first += count

    def _take(self, piece: _Piece) -> None:
        """Copy the rows of a piece, and see which of them the writer passed."""
        slots = np.arange(piece.slot, piece.slot + piece.count)[:, None]
        begins, heads = self._begins[piece.ids], self.heads[piece.ids]
        positions = begins + (slots - begins) % self._ring.slots
        alive = positions < heads
        if not alive.any():
            return
        width = len(piece.ids)
        for source, target in self._pairs:
            if target.path.name != SUMS:
                size = self._row_nbytes(target)
                count = piece.count * width * size
                self._copy(source, target, piece.row * size, count)
        firsts = np.where(alive, positions, np.iinfo(np.int64).max).min(axis=0)
        stops = np.where(alive, positions + 1, 0).max(axis=0)
        self._look(firsts, stops, piece.ids)

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
            self._progress(self.nbytes, max(self.nbytes, total))

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
