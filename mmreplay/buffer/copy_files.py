"""Snapshots: copies of a buffer's files while its writer goes on.

Where the file system can share blocks (reflink), every file is cloned; elsewhere the
rows alive are copied, oldest first. Sealed shards never change, so they are linked. A
file of the ring is never linked, since rows are overwritten in it. Priorities that
samplers store beside the rows are copied too.

The bytes are copied under a foreign writer, without a lock. So the writer's limit is
read *after* rows were copied: rows below it by then may be half overwritten, and the
snapshot leaves them out, as a reader would.
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
from mmreplay.buffer.reader import identity_of
from mmreplay.buffer.statistics import FILE_NAME as STATISTICS
from mmreplay.buffer.statistics import MAX_NBYTES as STATISTICS_NBYTES
from mmreplay.disk import files
from mmreplay.disk.files import File
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
from mmreplay.format.heap import References, legal, nbytes_of
from mmreplay.samplers import priority_file
from mmreplay.samplers.priority_file import KINDS, NAME, PRIORITIES, STATE, StateRecord
from mmreplay.storage.commit_state import heap_bounds, refuse_discarded
from mmreplay.storage.layout import FLAGS, HEAP, SUMS, record_layout
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
class CopyChunk:
    """Rows that are copied at once: ``[slot, slot + count)`` of some environments.

    Attributes:
        ids: int64 ``[N]``, the environments; their rows lie side by side.
        row: The first row.
        slot: The first slot.
        count: Slots.
    """

    ids: Array
    row: int
    slot: int
    count: int


class FileCopy:
    """Copies the rows that are alive now out of the files of one generation.

    Attributes:
        heads: int64 ``[E]``, the heads when the copy began.
        firsts: int64 ``[E]``, the oldest positions alive when it began.
        heap_heads: int64 ``[E]``, the heap heads then; None where no field varies.
        heap_tails: int64 ``[E]``, the heap tails after the heap was copied; likewise.
        lost: int64 ``[E]``, rows below were overwritten before they were copied.
        nbytes: Bytes copied or shared.
        how: Whether blocks were shared, shards linked, or all was copied.
    """

    how: How = "copy"

    def __init__(
        self, opened: OpenFiles, store: CheckedStore, columns: Pairs, progress: Progress | None
    ) -> None:
        """Read which rows are alive.

        Args:
            opened: The source's files, open for reading.
            store: The target's rows.
            columns: More files with one value per row, and their copies.
            progress: Called with (bytes copied, bytes to copy).
        """
        self._commit = opened.commit
        self._commit.refresh()
        ring = self._ring = opened.metadata.ring
        self.heads = self._commit.heads.copy()
        tails = np.maximum(self._commit.tails, self._commit.limits - ring.slots)
        self.firsts = np.maximum(tails, self.heads - ring.capacity)
        # Checksums cover whole blocks. An environment without rows alive keeps its
        # newest row, whose flags say whether a final row follows.
        oldest = np.minimum(self.firsts, np.maximum(self.heads - 1, 0))
        self._begins = oldest // ring.block_rows * ring.block_rows
        self.lost = np.zeros(ring.num_envs, np.int64)
        self.heap_heads = self._commit.heap_heads
        self.heap_tails: Array | None = None
        self._heap_nbytes = opened.metadata.heap_nbytes
        self._summed = np.minimum(opened.recovery.committed, self.heads)
        if self._heap_nbytes:
            # Committed heads may be tails that were raised past them, up to which no
            # sum was written.
            self._summed = np.zeros(ring.num_envs, np.int64)
        self._store = store
        self._pairs = [*zip(opened.store.files, store.files, strict=True), *columns]
        self._row_pairs = [p for p in self._pairs if p[1].path.name not in (SUMS, HEAP)]
        self._progress = progress
        self._scratch = memoryview(bytearray(CHUNK_NBYTES))
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
            self._recheck_values()
            self.nbytes = sum(target.nbytes for _, target in self._pairs)
            self.how = "reflink"
        else:
            self._copy_all()
        refuse_discarded(self._commit)
        self._forget_lost()

    def _copy_all(self) -> None:
        """Copy the rows and the checksums."""
        # Checksums first: after the rows, they may be those of the next lap.
        for source, target in self._pairs:
            if target.path.name == SUMS:
                self._copy(source, target, 0, target.nbytes)
        for chunk in self._chunks():
            self._copy_and_recheck(chunk)
        for source, target in self._pairs:
            if target.path.name == HEAP:
                self._copy_heap(source, target)
                self._recheck_values()

    def _copy_heap(self, source: File, target: File) -> None:
        """Copy what the heap of each environment held when the copy began."""
        size, commit = self._heap_nbytes, self._commit
        assert self.heap_heads is not None
        # Tails of now: what lies below them is overwritten, or may soon be.
        tails = np.minimum(heap_bounds(commit)[1], self.heap_heads)
        for env_id, (first, stop) in enumerate(
            zip(tails.tolist(), self.heap_heads.tolist(), strict=True)
        ):
            while first < stop:
                count = min(stop - first, size - first % size)
                self._copy(source, target, env_id * size + first % size, count)
                first += count

    def _recheck_values(self) -> None:
        """Note the rows whose values may have been overwritten before this."""
        if self.heap_heads is None:
            return
        self._commit.refresh()
        self.heap_tails = np.minimum(heap_bounds(self._commit)[1], self.heap_heads)
        self._recheck_tails()

    def _recheck_tails(self) -> None:
        """Note the rows below the tails of now: their values may be overwritten."""
        tails = np.minimum(self._commit.tails, self.heads)
        self.lost = np.maximum(self.lost, np.where(tails > self.firsts, tails, 0))

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

    def _chunks(self) -> Iterator[CopyChunk]:
        """The rows to copy, oldest first, in chunks of bounded size."""
        ring = self._ring
        row_nbytes = sum(self._row_nbytes(t) for _, t in self._pairs)
        if ring.layout == "env_major":
            size = max(1, CHUNK_NBYTES // row_nbytes)
            # In turns: the writer overwrites the oldest rows of each environment first.
            by_env = [
                self._split(np.array([env_id]), first, stop, size)
                for env_id, (first, stop) in enumerate(
                    zip(self._begins.tolist(), self.heads.tolist(), strict=True)
                )
            ]
            for turn in zip_longest(*by_env):
                yield from (chunk for chunk in turn if chunk is not None)
            return
        size = max(1, CHUNK_NBYTES // (row_nbytes * ring.num_envs))
        first, stop = int(self._begins.min()), int(self.heads.max())
        stop = min(stop, first + ring.slots)
        yield from self._split(np.arange(ring.num_envs), first, stop, size)

    def _split(self, ids: Array, first: int, stop: int, size: int) -> Iterator[CopyChunk]:
        """Split a range of positions into chunks of at most size slots."""
        slots = self._ring.slots
        while first < stop:
            slot = first % slots
            count = min(size, stop - first, slots - slot)
            yield CopyChunk(ids, self._ring.row(int(ids[0]), first), slot, count)
            first += count

    def _copy_and_recheck(self, chunk: CopyChunk) -> None:
        """Copy the rows of a chunk, and note which were overwritten during the copy."""
        slots = np.arange(chunk.slot, chunk.slot + chunk.count)[:, None]
        begins, heads = self._begins[chunk.ids], self.heads[chunk.ids]
        positions = begins + (slots - begins) % self._ring.slots
        alive = positions < heads
        if not alive.any():
            return
        self._copy_chunk(chunk)
        firsts = np.where(alive, positions, np.iinfo(np.int64).max).min(axis=0)
        stops = np.where(alive, positions + 1, 0).max(axis=0)
        self._recheck(firsts, stops, chunk.ids)

    def _copy_chunk(self, chunk: CopyChunk) -> None:
        """Copy a chunk of every file that has rows."""
        self._copy_rows(self._row_pairs, chunk)

    def _copy_rows(self, pairs: Pairs, chunk: CopyChunk) -> None:
        for source, target in pairs:
            size = self._row_nbytes(target)
            count = chunk.count * len(chunk.ids) * size
            self._copy(source, target, chunk.row * size, count)

    def _recheck(self, firsts: Array, stops: Array, ids: Array | None = None) -> None:
        """Note which of the positions ``[firsts, stops)`` just copied are lost."""
        self._commit.refresh()
        envs: Array | slice = slice(None) if ids is None else ids
        edges = (self._commit.limits - self._ring.slots)[envs]
        lost = np.where(edges > firsts, np.minimum(edges, stops), 0)
        self.lost[envs] = np.maximum(self.lost[envs], lost)

    def _row_nbytes(self, target: File) -> int:
        return target.nbytes // self._ring.num_rows

    def _copy(self, source: File, target: File, offset: int, nbytes: int) -> None:
        for at in range(offset, offset + nbytes, CHUNK_NBYTES):
            data = self._scratch[: min(CHUNK_NBYTES, offset + nbytes - at)]
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
        newest_lost = (self.lost >= self.heads) & (self.heads > 0)
        for env_id in np.flatnonzero(newest_lost).tolist():
            flags.pwrite(b"\0", self._ring.row(env_id, int(self.heads[env_id]) - 1))

    def sum(self) -> None:
        """Write the checksums that whole blocks lack, or that cover only some rows."""
        size = self._ring.block_rows
        tails = self.tails
        for env_id in range(self._ring.num_envs):
            stop = int(self.heads[env_id]) // size
            first = min(int(tails[env_id]) // size, stop)
            # From here on blocks were copied whole, with checksums if committed.
            complete = -(-int(self.lost[env_id]) // size)
            summed = max(complete, int(self._summed[env_id]) // size)
            for begin, end in ((first, min(complete, stop)), (max(summed, first), stop)):
                sums = [self._store.checksum(env_id, b) for b in range(begin, end)]
                if sums:
                    self._store.write_sums(env_id, begin, np.array(sums, np.uint32))


FOLDER = "samplers"


class PriorityCopies:
    """Copies of the stored priorities that fit a buffer's ring.

    Damaged priorities, and those of another ring, are left out: their samplers start
    with none. The rows that a sampler has seen are read before the heads, and its
    priorities before the limits are read again, so that the priority of a row in the
    snapshot belongs to that row.

    Attributes:
        pairs: The file of priorities of each sampler, and its copy.
    """

    def __init__(self, opened: OpenFiles, source: Path, target: Path) -> None:
        self._metadata = opened.metadata
        self._home = identity_of(opened)
        self._target = target / FOLDER
        self._seen: list[Array] = []
        self.pairs: list[tuple[File, File]] = []
        try:
            for folder in _folders(source / FOLDER):
                self._add(folder)
        except BaseException:
            self.close()
            raise

    def _add(self, folder: Path) -> None:
        metadata, num_envs = self._metadata, self._metadata.ring.num_envs
        nbytes = priority_file.NUM_SLOTS * priority_file.slot_nbytes(num_envs)
        with suppress(CorruptError, FormatError):
            state = File.open(folder / STATE, nbytes)
            try:
                data, identity = state.pread(nbytes, 0), state.identity()
            finally:
                state.close()
            record = priority_file.read_record(folder, self._home, data, identity)
            if record is None:
                return
            kind = next((each for each in KINDS if (folder / each.file).exists()), PRIORITIES)
            nbytes = kind.itemsize * metadata.ring.num_rows
            numbers = File.open(folder / kind.file, nbytes)
            try:
                copy = self._create_copy(folder.name, kind.file, nbytes)
            except BaseException:
                numbers.close()
                raise
            self._seen.append(priority_file.known(record, self._home))
            self.pairs.append((numbers, copy))

    def _create_copy(self, name: str, file: str, nbytes: int) -> File:
        files.make_folder(self._target, exist_ok=True)
        files.make_folder(self._target / name)
        return File.create(self._target / name / file, nbytes)

    def finish(self, heads: Array) -> None:
        """Write the state of the copies, durably.

        Args:
            heads: int64 ``[E]``, the heads of the snapshot.
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
                    1,
                    metadata.generation,
                    priority_file.CLEAN,
                    process.boot_id(),
                    metadata.uuid,
                    device,
                    inode,
                    np.minimum(seen, heads),
                    birth=birth,
                )
                state.pwrite(record.encode(), 0)
                state.sync()
            finally:
                state.close()
            files.sync_folder(folder)

    def close(self) -> None:
        """Close the files."""
        for pair in self.pairs:
            for file in pair:
                file.close()


def _folders(root: Path) -> list[Path]:
    if not root.is_dir() or root.is_symlink():
        return []
    return [
        root / name
        for name in files.names(root)
        if NAME.fullmatch(name) and (root / name).is_dir() and not (root / name).is_symlink()
    ]


TRIES = 1000
CANNOT_LINK = {*CANNOT_CLONE, errno.EMLINK}


class ShardCopy(FileCopy):
    """Copies a Zarr buffer: sealed shards are linked, staging rows are copied.

    A published shard never changes, so a link to it stays valid when the writer moves
    its rows back to the staging files and removes it. The shard index, which says
    whether shards or staging files hold the rows of a span, is read before and after
    each copy, and the copy is repeated if it changed. The target has its own index.
    """

    def __init__(
        self, opened: OpenFiles, store: CheckedStore, columns: Pairs, progress: Progress | None
    ) -> None:
        """Read which rows are alive; see `FileCopy`."""
        super().__init__(opened, store, columns, progress)
        metadata = opened.metadata
        assert metadata.sharding is not None
        assert opened.path is not None
        ring = metadata.ring
        wide = ring.wide
        self._steps = metadata.sharding.shard_rows
        self._shard_rows = self._steps * wide
        self._count = ring.num_rows // self._shard_rows
        self._arrays = group.arrays_of(metadata)
        self._rows = opened.store
        self._source = opened.path / metadata.folder
        self._target = store.files[0].path.parent
        self._staged: set[int] = set()
        self._sealed: set[int] = set()
        staging = _staging_names(store)
        rows = self._row_pairs
        self._staging_pairs = [p for p in rows if p[1].path.name in staging]
        self._other_pairs = [p for p in rows if p[1].path.name not in staging]

    def run(self) -> None:
        """Copy everything; see `FileCopy.run`."""
        self._shard_states = ShardStates.open(
            self._source, self._count, writable=False, mapped=True
        )
        try:
            self._copy_all()
        finally:
            self._shard_states.file.close()
        refuse_discarded(self._commit)
        self._forget_lost()
        self._publish()

    def _split(self, ids: Array, first: int, stop: int, size: int) -> Iterator[CopyChunk]:
        """Split a range of positions into chunks of one shard each."""
        while first < stop:
            end = min(stop, (first // self._steps + 1) * self._steps)
            yield from super()._split(ids, first, end, size)
            first = end

    def _copy_chunk(self, chunk: CopyChunk) -> None:
        """Link the shards of a chunk, or copy its rows out of the staging files."""
        number = chunk.row // self._shard_rows
        if number not in self._sealed:
            self._link_or_copy(number, chunk)
        self._copy_rows(self._other_pairs, chunk)

    def _link_or_copy(self, number: int, chunk: CopyChunk) -> None:
        for _ in range(TRIES):
            before = self._shard_states.get(number)
            sealed = bool(before & 1)
            try:
                if sealed:
                    self._link(number)
                else:
                    self._copy_rows(self._staging_pairs, chunk)
            except CorruptError:
                # The writer removed the shard, or it is damaged.
                if self._shard_states.get(number) == before:
                    raise
            if self._shard_states.get(number) == before:
                break
            if sealed:
                self._unlink(number)
        else:
            raise StarvedError(
                f"{self._source}: the writer sealed or reopened a shard {TRIES} times "
                "while it was copied. Take the snapshot again."
            )
        if sealed and number in self._staged:
            # The shard may hold newer rows than those copied before.
            self._recheck(self._begins, self.heads)
        (self._sealed if sealed else self._staged).add(number)

    def _copy_heap(self, source: File, target: File) -> None:
        """Write the values of rows that the copy may be written on from.

        Those are the rows that no linked shard holds, and the newest ones of a shard
        that is not full. The writer may have sealed them since: they are read wherever
        they are, and written where their references lead.
        """
        assert self.heap_heads is not None
        heap_tails = self.heap_heads.copy()
        for env_id, head in enumerate(self.heads.tolist()):
            first = int(self.tails[env_id]) // self._steps
            while first < head // self._steps and self._is_linked(env_id, first):
                first += 1
            for at in range(first * self._steps, head, self._steps):
                stop = min(at + self._steps, head)
                begin = self._copy_values(env_id, at, stop)
                heap_tails[env_id] = min(heap_tails[env_id], begin)
        self.heap_tails = heap_tails

    def _is_linked(self, env_id: int, number: int) -> bool:
        """Whether linked shards hold the rows of an environment's n-th range."""
        per_env = self._ring.slots // self._steps
        return env_id * per_env + number % per_env in self._sealed

    def _copy_values(self, env_id: int, first: int, stop: int) -> int:
        """Write the values of some rows; return where the first one begins."""
        source, target, commit = self._rows, self._store.heap, self._commit
        assert target is not None
        assert self.heap_heads is not None
        head = int(self.heap_heads[env_id])
        ids = np.full(stop - first, env_id)
        rows = self._ring.rows(ids, np.arange(first, stop))
        begin = head
        for path in source.schema.varying:
            commit.refresh()
            heap_heads, heap_tails = heap_bounds(commit)
            named: References = source.gather(rows, [path])[path]  # type: ignore[assignment]  # of a field that varies
            references, data, _, illegal = source.take_values(
                path, named, ids, heap_tails, heap_heads, lambda nbytes: np.empty(nbytes, np.uint8)
            )
            # Only those that were not overwritten before now are this lap's.
            env = np.array([env_id])
            self._recheck(np.array([first]), np.array([stop]), env)
            # Rows that were cleared need no shard before their values are overwritten.
            self._recheck_tails()
            oldest = max(0, int(self.tails[env_id]) - first)
            field, zeros = source.schema.fields[path], np.zeros(len(ids), np.int64)
            heads = np.full(len(ids), head)
            bad = ~legal(references, field, target.nbytes, zeros, heads)
            if illegal is not None:
                bad |= illegal
            damaged = oldest + np.flatnonzero(bad[oldest:])
            if len(damaged):
                raise CorruptError(
                    f"field {path!r} is damaged in position {first + damaged[0]} of "
                    f"environment {env_id}. Run mmreplay verify."
                )
            nbytes = nbytes_of(references, field)
            ends = np.cumsum(nbytes)
            for row in (oldest + np.flatnonzero(nbytes[oldest:])).tolist():
                position = int(references["position"][row])
                value = data[ends[row] - nbytes[row] : ends[row]]
                target.write(env_id, position, value.data)
                begin = min(begin, position)
                self.nbytes += len(value)
        return begin

    def _recheck_values(self) -> None:
        """Note nothing: the values of rows were checked as they were read."""

    def _link(self, number: int) -> None:
        """Link the shards of this number, one of each array, into the target."""
        for array in self._arrays.values():
            name = group.shard_name(array, self._ring, number)
            root, other = self._source / group.FOLDER, self._target / group.FOLDER
            self.nbytes += self._link_shard(root / name, other / name)

    def _link_shard(self, source: Path, target: Path) -> int:
        """Link one shard, or share its blocks, or copy it; return its bytes."""
        try:
            files.disk.link(source, target)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise CorruptError(
                    f"the shard {source} is missing. Run mmreplay verify."
                ) from error
            if error.errno not in CANNOT_LINK:
                raise system_error("link", target, error) from error
            return self._copy_shard(source, target)
        # A symbolic link, pipe or socket under the name of a shard was linked as such.
        status = os.lstat(target)
        if not stat.S_ISREG(status.st_mode):
            files.remove_tree(target)
            raise files.irregular(source)
        self.how = "link"
        return status.st_size

    def _copy_shard(self, source: Path, target: Path) -> int:
        old = File.open(source, None)
        try:
            new = File.create(target, old.nbytes)
            try:
                try:
                    files.disk.clone(new.fd, old.fd)
                except OSError as error:
                    if error.errno not in CANNOT_CLONE:
                        raise system_error("clone into", new.path, error) from error
                    for at in range(0, old.nbytes, CHUNK_NBYTES):
                        size = min(CHUNK_NBYTES, old.nbytes - at)
                        new.pwrite(old.pread(size, at), at)
                new.sync()
            finally:
                new.close()
            return old.nbytes
        finally:
            old.close()

    def _unlink(self, number: int) -> None:
        """Remove shards that were linked while the writer moved their rows."""
        for array in self._arrays.values():
            name = group.shard_name(array, self._ring, number)
            files.remove_tree(self._target / group.FOLDER / name)

    def _publish(self) -> None:
        """Make the links durable, and write the shard index."""
        for array in self._arrays.values():
            files.sync_folder(self._target / group.FOLDER / array.name)
        file = File.open(self._target / FILE_NAME, self._count * DTYPE.itemsize, writable=True)
        states = ShardStates(file, mapped=False)
        try:
            for number in sorted(self._sealed):
                states.put(number, 1)
            file.sync()
        finally:
            file.close()


def _staging_names(store: CheckedStore) -> set[str]:
    """Names of the staging files whose rows shards hold once they are sealed."""
    large = record_layout(store.schema).large
    mutable = {name for path, name in large.items() if store.schema.fields[path].mutable}
    return {file.path.name for file in store.files} - {FLAGS, SUMS} - mutable


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `ReplayBuffer.snapshot` made.

    Attributes:
        path: The snapshot's folder, a whole buffer.
        how: ``"reflink"`` (blocks shared with the original), ``"link"`` (sealed shards
            are; the rest is copied) or ``"copy"``.
        firsts: int64 ``[E]``, the oldest position in the snapshot.
        heads: int64 ``[E]``, the heads of the buffer when the copy began.
        cut_rows: Rows that the writer overwrote before they were copied; 0 with a
            pause.
        nbytes: Bytes copied or shared.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> copy = buffer.snapshot("runs/copy")
        >>> copy.cut_rows
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
        """Rows in the snapshot."""
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
                "this mmreplay cannot copy. Install a newer mmreplay."
            )
        stack.enter_context(new_folder(target, allow_network))
        with NewGeneration(target, metadata) as new:
            priorities = PriorityCopies(opened, source, target)
            stack.callback(priorities.close)
            copied = copy_files(opened, new, priorities.pairs, progress)
            new.finish(copied.heads, copied.tails, copied.heap_heads, copied.heap_tails, seal=False)
            priorities.finish(copied.heads)
        _copy_statistics(source, target)
        new.publish()
        return Snapshot(
            target, copied.how, copied.tails, copied.heads, copied.cut_rows, copied.nbytes
        )


def copy_files(
    opened: OpenFiles, target: NewGeneration, columns: Pairs = (), progress: Progress | None = None
) -> FileCopy:
    """Copy the files of a generation that is being written into a new one.

    Args:
        opened: The source, open for reading.
        target: The new generation, of the same metadata; gets checksums of all blocks.
        columns: More files with one value per row, and their copies.
        progress: Called with (bytes copied, bytes to copy).

    Returns:
        What was copied.

    Raises:
        FailedError: Another writer cut rows, after a failed sync.
    """
    kind = FileCopy if target.store.sealing is None else ShardCopy
    copy = kind(opened, target.store, columns, progress)
    copy.run()
    copy.sum()
    return copy


def _copy_statistics(source: Path, target: Path) -> None:
    if (source / STATISTICS).exists():
        data = files.read_bytes(source / STATISTICS, STATISTICS_NBYTES)
        files.replace_bytes(target / STATISTICS, data)
