"""Snapshots: copies of a buffer's files while its writer goes on.

Where the file system can share blocks (reflink), every file is cloned; elsewhere the
rows alive are copied, oldest first. Sealed shards, which nobody writes again, are
linked; never a file of the ring, which is written in place. Priorities that samplers
store beside the rows come along.

The bytes are copied under a foreign writer, without a lock. So the writer's limit is
read *after* rows were copied: rows that it has passed by then may be torn, and are
lost to the snapshot, as they would be to a reader.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay import process
from mmreplay.buffer import opening
from mmreplay.buffer.new_generation import NewGeneration, new_folder
from mmreplay.buffer.open_files import OpenFiles
from mmreplay.buffer.statistics import (
    FILE_NAME as STATISTICS,
)
from mmreplay.buffer.statistics import (
    MAX_NBYTES as STATISTICS_NBYTES,
)
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.disk.lock import locked
from mmreplay.disk.pause import Pause
from mmreplay.errors import (
    CorruptError,
    FormatError,
    StarvedError,
    VersionError,
    called,
    system_error,
)
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Metadata
from mmreplay.samplers import priority_file
from mmreplay.samplers.priority_file import COLUMN, NAME, STATE, StateRecord
from mmreplay.storage.commit_state import refuse_discarded
from mmreplay.storage.layout import FLAGS, SUMS, record_layout
from mmreplay.storage.store import CheckedStore
from mmreplay.storage.zarr import group
from mmreplay.storage.zarr.shards import DTYPE, FILE_NAME, ShardStates

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
class Block:
    """Slots ``[slot, slot + count)`` of environments whose rows lie side by side."""

    ids: Array
    row: int
    slot: int
    count: int


class FileCopy:
    """Copies the rows that are alive now out of the files of one generation.

    Attributes:
        heads: int64 ``[E]``, when it began.
        firsts: int64 ``[E]``, oldest alive when it began.
        lost: int64 ``[E]``, positions below were overwritten before they were copied.
        nbytes: Bytes copied or shared.
        how: Whether blocks were shared, shards linked, or all was copied.
    """

    how: How = "copy"

    def __init__(
        self,
        opened: OpenFiles,
        store: CheckedStore,
        columns: Pairs,
        progress: Progress | None,
    ) -> None:
        """Look at what is alive.

        Args:
            opened: Of the source, open for reading.
            store: The target's.
            columns: Files with a value a row beside the store's, and their copies.
            progress: Called with (bytes copied, bytes to copy).
        """
        self._commit = opened.commit
        self._commit.refresh()
        ring = self._ring = opened.metadata.ring
        self.heads = self._commit.heads.copy()
        tails = np.maximum(self._commit.tails, self._commit.limits - ring.slots)
        self.firsts = np.maximum(tails, self.heads - ring.capacity)
        # Sums cover whole blocks; and an environment that was emptied keeps its
        # newest row, which tells whether a final row is to follow.
        oldest = np.minimum(self.firsts, np.maximum(self.heads - 1, 0))
        self._begins = oldest // ring.block_rows * ring.block_rows
        self.lost = np.zeros(ring.num_envs, np.int64)
        self._summed = np.minimum(opened.recovery.committed, self.heads)
        self._store = store
        self._pairs = [*zip(opened.store.files, store.files, strict=True), *columns]
        self._progress = progress
        self._room = memoryview(bytearray(CHUNK_NBYTES))
        self.nbytes = 0

    @property
    def tails(self) -> Array:
        """int64 ``[E]``, the oldest position that was copied whole."""
        return np.minimum(np.maximum(self.firsts, self.lost), self.heads)

    @property
    def cut_rows(self) -> int:
        """Rows that the writer overwrote before they were copied."""
        return int((self.tails - self.firsts).sum())

    def run(self) -> None:
        """Copy everything.

        Raises:
            FailedError: Another writer cut rows, after a failed sync.
        """
        if self._clone():
            self._recheck(self._begins, self.heads)
            self.nbytes = sum(target.nbytes for _, target in self._pairs)
            self.how = "reflink"
        else:
            self._copy_all()
        refuse_discarded(self._commit)
        self._forget_lost()

    def _copy_all(self) -> None:
        """Copy the rows, and the sums."""
        # The sums first: they may be another lap's by the time the rows are here.
        for source, target in self._pairs:
            if target.path.name == SUMS:
                self._copy(source, target, 0, target.nbytes)
        for piece in self._pieces():
            self._copy_and_recheck(piece)

    def _clone(self) -> bool:
        """Share the blocks of every file, if the file system can."""
        for source, target in self._pairs:
            try:
                files.disk.clone(target.fd, source.fd)
            except OSError as error:
                if error.errno in CANNOT_CLONE:
                    return False
                raise system_error("clone into", target.path, error) from error
        return True

    def _pieces(self) -> Iterator[Block]:
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

    def _cuts(self, ids: Array, first: int, stop: int, size: int) -> Iterator[Block]:
        slots = self._ring.slots
        while first < stop:
            slot = first % slots
            count = min(size, stop - first, slots - slot)
            yield Block(ids, self._ring.row(int(ids[0]), first), slot, count)
            first += count

    def _copy_and_recheck(self, piece: Block) -> None:
        """Copy the rows of a block, and see which of them the writer passed."""
        slots = np.arange(piece.slot, piece.slot + piece.count)[:, None]
        begins, heads = self._begins[piece.ids], self.heads[piece.ids]
        positions = begins + (slots - begins) % self._ring.slots
        alive = positions < heads
        if not alive.any():
            return
        self._carry(piece, len(piece.ids))
        firsts = np.where(alive, positions, np.iinfo(np.int64).max).min(axis=0)
        stops = np.where(alive, positions + 1, 0).max(axis=0)
        self._recheck(firsts, stops, piece.ids)

    def _carry(self, piece: Block, width: int) -> None:
        """Copy the rows of a piece, of every file that has rows."""
        for source, target in self._pairs:
            if target.path.name != SUMS:
                self._copy_rows(source, target, piece, width)

    def _copy_rows(self, source: File, target: File, piece: Block, width: int) -> None:
        size = self._row_nbytes(target)
        count = piece.count * width * size
        self._copy(source, target, piece.row * size, count)

    def _recheck(self, firsts: Array, stops: Array, ids: Array | None = None) -> None:
        """Note which of the positions ``[firsts, stops)`` just taken are lost."""
        self._commit.refresh()
        envs: Array | slice = slice(None) if ids is None else ids
        edges = (self._commit.limits - self._ring.slots)[envs]
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


FOLDER = "samplers"


class PriorityCopies:
    """Copies of the stored priorities that fit a buffer's ring.

    Those that are damaged, or of another ring, are left out: their samplers begin anew.
    What a sampler has seen is read before the heads are, and its priorities before the
    limits are looked at again: so the priority of a row in the snapshot is its own.

    Attributes:
        pairs: The file of numbers of each, and its copy.
    """

    def __init__(self, source: Path, target: Path, metadata: Metadata) -> None:
        self._metadata = metadata
        self._target = target / FOLDER
        self._seen: list[Array] = []
        self.pairs: list[tuple[File, File]] = []
        try:
            for place in _folders(source / FOLDER):
                self._add(place)
        except BaseException:
            self.close()
            raise

    def _add(self, place: Path) -> None:
        metadata = self._metadata
        uuid, num_envs = metadata.uuid, metadata.ring.num_envs
        nbytes = priority_file.NUM_SLOTS * priority_file.slot_nbytes(num_envs)
        with suppress(CorruptError, FormatError):
            state = File.open(place / STATE, nbytes)
            try:
                data, known = state.pread(nbytes, 0), state.identity()
            finally:
                state.close()
            record = priority_file.trusted(
                data, uuid, num_envs, process.boot_id(), known, lambda: locked(place)
            )
            if record is None:
                return
            numbers = File.open(place / COLUMN, 4 * metadata.ring.num_rows)
            try:
                copy = self._made(place.name, numbers.nbytes)
            except BaseException:
                numbers.close()
                raise
            self._seen.append(record.seen)
            self.pairs.append((numbers, copy))

    def _made(self, name: str, nbytes: int) -> File:
        files.make_folder(self._target, exist_ok=True)
        files.make_folder(self._target / name)
        return File.create(self._target / name / COLUMN, nbytes)

    def finish(self, heads: Array) -> None:
        """Say what the copies have seen, durably.

        Args:
            heads: int64 ``[E]``, those of the copied buffer.
        """
        metadata = self._metadata
        size = priority_file.slot_nbytes(metadata.ring.num_envs)
        for (_, copy), seen in zip(self.pairs, self._seen, strict=True):
            copy.sync()
            folder = copy.path.parent
            state = File.create(folder / STATE, priority_file.NUM_SLOTS * size)
            try:
                device, inode, birth = state.identity()
                record = StateRecord(
                    1, metadata.generation, priority_file.CLEAN, process.boot_id(),
                    metadata.uuid, device, inode, np.minimum(seen, heads), birth=birth,
                )  # fmt: skip
                state.pwrite(record.encode(), 0)
                state.sync()
            finally:
                state.close()
            files.sync_folder(folder)

    def close(self) -> None:
        """Give the files back."""
        for pair in self.pairs:
            for file in pair:
                file.close()


def _folders(root: Path) -> list[Path]:
    if not root.is_dir() or root.is_symlink():
        return []
    return [
        root / name
        for name in files.names(root)
        if NAME.fullmatch(name)
        and (root / name).is_dir()
        and not (root / name).is_symlink()
    ]


TRIES = 1000
CANNOT_LINK = {*CANNOT_CLONE, errno.EMLINK}


class ShardCopy(FileCopy):
    """Copies a Zarr buffer: sealed shards are linked, staging rows are copied.

    Nobody writes a published shard again, so a link to it stays what it is when the
    writer puts its rows back and removes it. Whether shards or staging files hold the
    rows of a shard's span is looked at before and after the copy, which is made again
    where that changed. The shard index is the target's own.
    """

    def __init__(
        self,
        opened: OpenFiles,
        store: CheckedStore,
        columns: Pairs,
        progress: Progress | None,
    ) -> None:
        """Look at what is alive; see `FileCopy`."""
        super().__init__(opened, store, columns, progress)
        metadata = opened.metadata
        assert metadata.sharding is not None
        assert opened.path is not None
        ring = metadata.ring
        wide = ring.wide
        self._steps = metadata.sharding.shard_rows
        self._place_rows = self._steps * wide
        self._count = ring.num_rows // self._place_rows
        self._arrays = group.arrays_of(metadata)
        self._source = opened.path / metadata.folder
        self._target = store.files[0].path.parent
        self._raw: set[int] = set()
        self._sealed: set[int] = set()
        self._names = _tail_names(store)

    def run(self) -> None:
        """Copy everything; see `FileCopy.run`."""
        self._places = ShardStates.open(
            self._source, self._count, writable=False, mapped=True
        )
        try:
            self._copy_all()
        finally:
            self._places.file.close()
        refuse_discarded(self._commit)
        self._forget_lost()
        self._publish()

    def _cuts(self, ids: Array, first: int, stop: int, size: int) -> Iterator[Block]:
        """Pieces of one place each."""
        while first < stop:
            end = min(stop, (first // self._steps + 1) * self._steps)
            yield from super()._cuts(ids, first, end, size)
            first = end

    def _carry(self, piece: Block, width: int) -> None:
        """Link the shards of a piece's place, or copy its rows out of the tail."""
        number = piece.row // self._place_rows
        if number not in self._sealed:
            self._settle(number, piece, width)
        self._copy_tail(piece, width, kept=True)

    def _settle(self, number: int, piece: Block, width: int) -> None:
        for _ in range(TRIES):
            before = self._places.get(number)
            sealed = bool(before & 1)
            try:
                if sealed:
                    self._link(number)
                else:
                    self._copy_tail(piece, width, kept=False)
            except CorruptError:
                # Removed meanwhile, or damaged.
                if self._places.get(number) == before:
                    raise
            if self._places.get(number) == before:
                break
            if sealed:
                self._unlink(number)
        else:
            raise StarvedError(
                f"{self._source}: got a place that was sealed or put back {TRIES} "
                "times while it was copied, expected it to last; take the snapshot "
                "again"
            )
        if sealed and number in self._raw:
            # Rows copied before may be others' in the shards.
            self._recheck(self._begins, self.heads)
        (self._sealed if sealed else self._raw).add(number)

    def _copy_tail(self, piece: Block, width: int, *, kept: bool) -> None:
        """Copy a piece of the files whose rows shards have, or of the others."""
        for source, target in self._pairs:
            name = target.path.name
            if name != SUMS and (name not in self._names) == kept:
                self._copy_rows(source, target, piece, width)

    def _link(self, number: int) -> None:
        """Have a place's shards in the target too."""
        for array in self._arrays.values():
            name = group.shard_name(array, self._ring, number)
            root, other = (each / group.FOLDER for each in (self._source, self._target))
            self.nbytes += self._one(root / name, other / name)

    def _one(self, source: Path, target: Path) -> int:
        """Link one shard, or share its blocks, or copy it; its bytes."""
        try:
            files.disk.link(source, target)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise CorruptError(
                    f"{source} is missing, expected a shard; run mmreplay verify"
                ) from error
            if error.errno not in CANNOT_LINK:
                raise system_error("link", target, error) from error
            return self._doubled(source, target)
        # A link, a pipe or a socket in the place of a shard is linked as what it is.
        status = os.lstat(target)
        if not stat.S_ISREG(status.st_mode):
            files.remove_tree(target)
            raise files.irregular(source)
        self.how = "link"
        return status.st_size

    def _doubled(self, source: Path, target: Path) -> int:
        old = File.open(source, None)
        try:
            new = File.create(target, old.nbytes)
            try:
                self._fill(old, new)
                new.sync()
            finally:
                new.close()
            return old.nbytes
        finally:
            old.close()

    def _fill(self, old: File, new: File) -> None:
        try:
            files.disk.clone(new.fd, old.fd)
        except OSError as error:
            if error.errno not in CANNOT_CLONE:
                raise system_error("clone into", new.path, error) from error
            for at in range(0, old.nbytes, CHUNK_NBYTES):
                new.pwrite(old.pread(min(CHUNK_NBYTES, old.nbytes - at), at), at)

    def _unlink(self, number: int) -> None:
        """Let go of shards that were linked while the place changed hands."""
        for array in self._arrays.values():
            name = group.shard_name(array, self._ring, number)
            files.remove_tree(self._target / group.FOLDER / name)

    def _publish(self) -> None:
        """Make the links durable, and say which places they hold."""
        for array in self._arrays.values():
            files.sync_folder(self._target / group.FOLDER / array.name)
        file = File.open(
            self._target / FILE_NAME, self._count * DTYPE.itemsize, writable=True
        )
        places = ShardStates(file, mapped=False)
        try:
            for number in sorted(self._sealed):
                places.put(number, 1)
            file.sync()
        finally:
            file.close()


def _tail_names(store: CheckedStore) -> set[str]:
    """Files of the tail whose rows shards have too; sums are a matter of their own."""
    large = record_layout(store.schema).large
    mutable = {
        name for path, name in large.items() if store.schema.fields[path].mutable
    }
    return {file.path.name for file in store.files} - {FLAGS, SUMS} - mutable


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `ReplayBuffer.snapshot` made.

    Attributes:
        path: Its folder, a whole buffer.
        how: ``"reflink"`` (blocks shared with the original), ``"link"`` (sealed shards
            are; the rest is copied) or ``"copy"``.
        firsts: int64 ``[E]``, the oldest position in it.
        heads: int64 ``[E]``, the heads of the buffer when it began.
        cut_rows: Rows alive when it began that the writer gave up before they were
            taken; 0 with a pause.
        nbytes: Bytes copied or shared.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> taken = buffer.snapshot("runs/copy")
        >>> taken.cut_rows
        0
    """

    path: Path
    how: How
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
    # A folder that is no buffer is refused before a pause leaves a file in it.
    metadata_file.load(source)
    opening.refuse_inside(target, source)
    with ExitStack() as stack:
        if pause:
            stack.callback(Pause(source).release)
        opened = opening.open_reader(source)
        stack.callback(opened.store.unmap)
        stack.callback(opened.close)
        metadata = opened.metadata
        if metadata.unknown_features:
            raise VersionError(
                f"{source} uses the features {list(metadata.unknown_features)}, which "
                "this mmreplay cannot copy; install a newer mmreplay"
            )
        stack.enter_context(new_folder(target, allow_network))
        with NewGeneration(target, metadata) as new:
            priorities = PriorityCopies(source, target, metadata)
            stack.callback(priorities.close)
            copied = copy_files(opened, new, priorities.pairs, progress)
            new.finish(copied.heads, copied.tails, seal=False)
            priorities.finish(copied.heads)
        _copy_statistics(source, target)
        new.publish()
        return Snapshot(
            target, copied.how, copied.tails, copied.heads, copied.cut_rows,
            copied.nbytes,
        )  # fmt: skip


def copy_files(
    opened: OpenFiles,
    target: NewGeneration,
    columns: Pairs = (),
    progress: Progress | None = None,
) -> FileCopy:
    """Copy the files of a generation that is being written into a new one.

    Args:
        opened: The source, open for reading.
        target: The new generation, of the same metadata; its blocks are summed.
        columns: Files with a value a row beside the store's, and their copies.
        progress: Called with (bytes copied, bytes to copy).

    Returns:
        What was copied.

    Raises:
        FailedError: Another writer cut rows, after a failed sync.
    """
    kind = ShardCopy if target.metadata.engine == "zarr" else FileCopy
    copy = kind(opened, target.store, columns, progress)
    copy.run()
    copy.sum()
    return copy


def _copy_statistics(source: Path, target: Path) -> None:
    if (source / STATISTICS).exists():
        data = files.read_bytes(source / STATISTICS, STATISTICS_NBYTES)
        files.replace_bytes(target / STATISTICS, data)
