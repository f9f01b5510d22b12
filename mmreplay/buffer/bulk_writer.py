"""Makes a new buffer of rows that come in bulk: a load, or what survived damage.

The caller gives every row once, in the order of its environment. `BulkWriter` puts
values that vary into the heap, brings rows into the files with their checksums, seals
what is sealed, and makes the folder a buffer once all of it is durable. What the rows
may be is the caller's to check.

No process reads the files before the buffer is complete. `FileWriter` therefore writes
memory-mapped engines' files itself: it sums each block while its bytes are in a CPU
cache, and writes large files past the page cache (`DirectOutput`). `StoreWriter` serves
all other stores.

Through the page cache a byte is copied, its page is looked up, and both are paid again
when the device takes it: on a virtual machine half of a conversion's time. Exports
write their files through the same outputs.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.heap_values import ValueCopier
from mmreplay.buffer.new_generation import NewGeneration
from mmreplay.buffer.statistics import write_statistics
from mmreplay.checksums import crc32c
from mmreplay.disk.files import KEEPS_PAGES, File, file_system
from mmreplay.errors import FailedError, ReplayError, undone_by
from mmreplay.format.metadata import Metadata, heap_nbytes_for
from mmreplay.process import Worker, thread_pool
from mmreplay.ring import Ring, Run, Span, one_env, runs
from mmreplay.schema import Schema
from mmreplay.storage.layout import FLAGS, HEAP, RECORDS, SUMS, RecordLayout, packer, record_layout
from mmreplay.storage.memmap import STAGE_NBYTES
from mmreplay.storage.memory_usage import available_nbytes
from mmreplay.storage.store import CheckedStore, Columns

MEMORY_SHARE = 4
"""Files are read into memory if they take at most one in so many available bytes."""
SYNC_NBYTES = 64 << 20
"""Bytes after which what was written so far is synced, so that the sync at the end
finds little left."""
DIRECT_NBYTES = 256 << 20
"""Files of this size and more are written past the page cache."""
ALIGNMENT = 4096
"""Of the memory, offset and length of a write past the page cache."""
SLAB_NBYTES = 4 << 20
"""Bytes of one write. With 1 MiB the device took a tenth less a second, with 256 KiB a
third less."""
SLABS_NBYTES = 24 << 20
"""Memory of all slabs together."""
MIN_SLAB_NBYTES = 64 << 10
WRITERS = 2
"""Threads that write slabs: while one waits for the interpreter, the device has the
slab of the other. With one thread, loads of pixels took a third longer."""
MAX_STREAMS = 512
"""Streams of all files together that may go past the page cache."""
Sums = NDArray[np.uint32]
POLYNOMIAL = 0x82F63B78
"""Of CRC32C, bits reversed."""
ZEROS = bytes(64 << 10)
Ids = NDArray[np.int64]
Flags = NDArray[np.uint8]
Rows = tuple[Columns, Ids, Ids, Flags]
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class BulkWriter:
    """Makes a buffer of rows that are given to it, in a folder that exists.

    `write` all rows, then `finish` and `publish`; `close` it in any case. A folder that
    is not published is no buffer, and the caller's to remove.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        oldest: Ids,
        heads: Ids,
        *,
        max_sums_nbytes: int | None = None,
    ) -> None:
        """Make the files.

        Args:
            path: The folder.
            metadata: What the buffer will be.
            oldest: int64 ``[E]``, the first row of each environment to be given.
            heads: int64 ``[E]``, the row after its last one; at most a ring's capacity
                after the first.
            max_sums_nbytes: Reserve no space for checksums that take more.
        """
        self._path, self._metadata = path, metadata
        self._oldest, self._heads = oldest, heads
        self._writer: DirectWriter | None = None
        self._values: ValueCopier | None = None
        self._new = NewGeneration(path, metadata, max_sums_nbytes=max_sums_nbytes)
        with undone_by(self.close):
            store = self._new.store
            self._sealing = store.sealing
            self._reserve_holes()
            self._writer = open_direct_writer(store, Span(oldest, heads))
            if store.heap is not None:
                self._values = ValueCopier(store)
                if self._sealing is not None:
                    self._values.begin(oldest)

    def _reserve_holes(self) -> None:
        """Reserve disk space for the unwritten rows of the oldest row's block.

        They are summed with it, and reading a hole through a mapping is a SIGBUS where
        tmpfs is full.
        """
        ring, oldest = self._metadata.ring, self._oldest
        begins = oldest // ring.block_rows * ring.block_rows
        summed = begins + ring.block_rows <= self._heads
        for env_id in np.flatnonzero((begins < oldest) & summed).tolist():
            where = ring.split_at_wrap(env_id, int(begins[env_id]), int(oldest[env_id]))
            for row, step, count in where:
                for file in self._new.store.files:
                    if file.path.name not in (SUMS, HEAP):
                        nbytes = file.nbytes // ring.num_rows
                        span = step * (count - 1) + 1
                        file.allocate(row * nbytes, span * nbytes)

    def write(self, columns: Columns, env_ids: Ids, positions: Ids, flags: Flags) -> None:
        """Write rows; those of one environment continue where the last ones stopped.

        Args:
            columns: Per path ``[N, *shape]``, `Ragged` of fields that vary. What is no
                stored field is left out.
            env_ids: int64 ``[N]``, at least one.
            positions: int64 ``[N]``.
            flags: uint8 ``[N]``.

        Raises:
            FullError: No space is left, for these or for earlier ones.
            FailedError: The device refuses, likewise.
        """
        assert self._writer is not None
        if self._values is None:
            self._writer.write(columns, env_ids, positions, flags)
            return
        if not one_env(env_ids):
            order = np.argsort(env_ids, kind="stable")
            columns = {path: column[order] for path, column in columns.items()}
            env_ids, positions, flags = env_ids[order], positions[order], flags[order]
        if self._sealing is None:
            columns = self._values.store_rows(columns, env_ids, flags)
            self._writer.write(columns, env_ids, positions, flags)
            return
        rows = columns, env_ids, positions, flags
        for some in self._through_heap(rows, self._values, self._sealing.steps):
            self._writer.write(*some)

    def _through_heap(self, rows: Rows, values: ValueCopier, steps: int) -> Iterator[Rows]:
        """Store the values of rows that shards of so many steps take from the heap.

        So many at a time as a shard has: the heap holds their values beside those that
        wait for their shard. Each part is written before the next one is asked for.
        """
        columns, env_ids, positions, flags = rows
        begins = [0, *(np.flatnonzero(np.diff(env_ids)) + 1).tolist(), len(env_ids)]
        for first, stop in pairwise(begins):
            for at in range(first, stop, steps):
                here = slice(at, min(at + steps, stop))
                some = {path: column[here] for path, column in columns.items()}
                fits = np.ones(len(flags[here]), np.bool_)
                where = env_ids[here], positions[here]
                yield values.store(some, *where, fits, flags[here]), *where, flags[here]

    def overfull(self) -> Ids:
        """Environments whose values the heap does not hold: some rows lack theirs."""
        if self._values is None or self._sealing is not None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._values.heap_heads > self._metadata.heap_nbytes)

    def fit_heap(self) -> int | None:
        """Cut the heap to what as many such values take as the ring has rows.

        Call it before `finish`, where values were measured by the most that they may
        take. Nothing is cut where shards hold the values, or the heaps of several
        environments lie in one file: it is sparse, and the rest takes no space.

        Returns:
            Bytes of the heap now; None where it stays.
        """
        heap, metadata = self._new.store.heap, self._metadata
        if self._values is None or heap is None or self._sealing is not None:
            return None
        if metadata.ring.num_envs > 1:
            return None
        stored = int(self._values.heap_heads[0])
        rows, capacity = int(self._heads[0] - self._oldest[0]), metadata.ring.capacity
        full = max(stored, -(-stored * capacity // max(1, rows)))
        nbytes = heap_nbytes_for(metadata.schema, full)
        if nbytes >= metadata.heap_nbytes:
            return metadata.heap_nbytes
        self._metadata = replace(metadata, heap_nbytes=nbytes)
        self._new.shrink_heap(self._metadata)
        return nbytes

    def finish(self) -> None:
        """Make the rows durable; all of them were given.

        Raises:
            FullError: As `write` does.
            FailedError: As `write` does.
        """
        assert self._writer is not None
        # Blocks are summed as they are written.
        self._writer.finish()
        heap_heads = heap_tails = None
        if self._values is not None:
            heap_heads = self._values.heap_heads
            if self._sealing is not None:
                self._values.end(self._heads)
                heap_tails = self._values.heap_tails
        self._new.finish(self._heads, self._oldest, heap_heads, heap_tails)

    def publish(self, statistics: dict[str, Any]) -> None:
        """Make the folder a buffer, with its statistics; `finish` comes before."""
        if statistics:
            write_statistics(self._path, statistics)
        self._new.publish()

    def close(self) -> None:
        """Stop the threads, and close the files."""
        if self._writer is not None:
            self._writer.close()
        self._new.close()

    def warm(self, path: Path) -> None:
        """Begin to read what is not in memory yet, from where the buffer is now."""
        assert self._writer is not None
        folder = path / self._metadata.folder
        warm([folder / name for name in self._writer.uncached])


class DirectWriter(Protocol):
    """Writes checked rows into an empty store."""

    @property
    def uncached(self) -> list[str]:
        """Names of the files that went past the page cache."""

    def write(self, columns: Columns, env_ids: Ids, positions: Ids, flags: Flags) -> None:
        """Write rows; those of one environment continue where the last ones stopped.

        Args:
            columns: Per path ``[N, *shape]``, and more than is stored.
            env_ids: int64 ``[N]``, at least one.
            positions: int64 ``[N]``.
            flags: uint8 ``[N]``.

        Raises:
            FullError: No space is left, for these or for earlier ones.
            FailedError: The device refuses, likewise.
        """

    def finish(self) -> None:
        """Bring everything into the files, checksums too; not yet synced.

        Raises:
            FullError: As `write` does.
            FailedError: As `write` does.
        """

    def close(self) -> None:
        """Stop the threads, before the store is closed; a second call does nothing."""


def open_direct_writer(store: CheckedStore, span: Span) -> DirectWriter:
    """The fastest writer for a new store.

    Args:
        store: Empty.
        span: Rows that will be written.
    """
    ring = store.ring
    contiguous = ring.layout == "env_major" or ring.num_envs == 1
    if store.placement is not None and contiguous:
        return FileWriter(store, store.placement, span)
    return StoreWriter(store, span)


class FileWriter:
    """Writes into the files of a memory-mapped store, large ones past the page cache.

    Bytes are summed before they are written, and not read again. The ring is env-major
    or of one environment: rows that follow each other lie next to each other.
    """

    def __init__(self, store: CheckedStore, layout: RecordLayout, span: Span) -> None:
        """Write into a store whose files have this layout; see `open_direct_writer`."""
        ring, schema = store.ring, store.schema
        self._store, self._ring, self._paths = store, ring, stored_paths(schema)
        self._large = layout.large
        self._files = {file.path.name: file for file in store.files}
        self._row_nbytes = {
            name: file.nbytes // ring.num_rows
            for name, file in self._files.items()
            if name not in (SUMS, HEAP)
        }
        self._packer = packer(schema, layout, ring.num_envs)
        stage_rows = max(1, STAGE_NBYTES // max(1, layout.stride))
        # Padding between fields is never packed, and must be zeros.
        self._stage = np.zeros((stage_rows, layout.stride), np.uint8)
        summed = [FLAGS, *([RECORDS] if layout.stride else [])]
        for path, name in layout.large.items():
            if not schema.fields[path].mutable:
                summed.append(name)
        # The number of each summed file in `BlockChecksums`.
        self._summed = {name: number for number, name in enumerate(summed)}
        row_nbytes = [self._row_nbytes[name] for name in summed]
        self._checksums = BlockChecksums(ring, span, row_nbytes)
        self._pool = thread_pool(1, "mmreplay-load")
        self._syncs = Syncs(store.sync, self._pool)
        self._outputs: dict[str, DirectOutput] = {}
        with undone_by(self.close):
            self._open_outputs(span)

    def _open_outputs(self, span: Span) -> None:
        """Open the large files past the page cache; they share the memory of slabs."""
        ring, rows = self._ring, int(span.lengths.sum())
        streams = sum(
            len(ring.split_at_wrap(env_id, first, stop))
            for env_id, (first, stop) in enumerate(
                zip(span.first.tolist(), span.stop.tolist(), strict=True)
            )
        )
        nbytes = {name: rows * each for name, each in self._row_nbytes.items()}
        large = [name for name, each in nbytes.items() if each >= DIRECT_NBYTES]
        for name in large:
            file = self._files[name]
            output = direct_output(file, nbytes[name], streams, len(large))
            if output is not None:
                self._outputs[name] = output

    @property
    def uncached(self) -> list[str]:
        """See `DirectWriter.uncached`."""
        return list(self._outputs)

    def write(self, columns: Columns, env_ids: Ids, positions: Ids, flags: Flags) -> None:
        """See `DirectWriter.write`."""
        columns = {path: columns[path] for path in self._paths}
        if not one_env(env_ids):
            # Rows of each environment lie in a region of their own.
            order = np.argsort(env_ids, kind="stable")
            env_ids, positions, flags = env_ids[order], positions[order], flags[order]
            columns = {path: column[order] for path, column in columns.items()}
        for row, first, stop in env_runs(self._ring, env_ids, positions):
            self._put(FLAGS, row, flags[first:stop])
            if RECORDS in self._summed:
                stage_rows = len(self._stage)
                for at in range(first, stop, stage_rows):
                    until = min(at + stage_rows, stop)
                    self._packer.pack(self._stage, columns, at, until)
                    self._put(RECORDS, row + at - first, self._stage[: until - at])
            for path, name in self._large.items():
                self._put(name, row, columns[path][first:stop])
        for env_id, first, sums in self._checksums.pop_complete():
            self._store.write_sums(env_id, first, sums)

    def _put(self, name: str, row: int, rows: NDArray[np.generic]) -> None:
        """Sum and write the bytes of rows, as much at a time as a CPU cache holds."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        begin, file = row * self._row_nbytes[name], self._files[name]
        number, output = self._summed.get(name), self._outputs.get(name)
        for first in range(0, len(data), STAGE_NBYTES):
            chunk, offset = data[first : first + STAGE_NBYTES], begin + first
            if number is not None:
                self._checksums.add(number, offset, chunk)
            if output is not None:
                output.write(chunk, offset)
            else:
                file.pwrite_new_pages(chunk, offset)
                self._syncs.count(len(chunk))

    def finish(self) -> None:
        """See `DirectWriter.finish`."""
        for output in self._outputs.values():
            output.finish()
        self._syncs.wait()

    def close(self) -> None:
        """See `DirectWriter.close`."""
        for output in self._outputs.values():
            output.close()
        self._pool.shutdown()


class StoreWriter:
    """Writes through any store, and asks it for the checksums of complete blocks."""

    uncached: list[str] = []  # noqa: RUF012  never changed

    def __init__(self, store: CheckedStore, span: Span) -> None:
        """Write into a store; see `open_direct_writer`."""
        self._store, self._paths = store, stored_paths(store.schema)
        self._ring = store.ring
        self._row_nbytes = store.schema.row_nbytes
        self._summed = span.first // store.ring.block_rows
        self._next = span.first.copy()
        # One thread waits for the device, the other sums the rows of the last block.
        self._pool = thread_pool(2, "mmreplay-load")
        self._syncs = Syncs(store.sync, self._pool)
        self._summing: Future[None] | None = None

    def write(self, columns: Columns, env_ids: Ids, positions: Ids, flags: Flags) -> None:
        """See `DirectWriter.write`."""
        ring = self._ring
        columns = {path: columns[path] for path in self._paths}
        if ring.num_envs > 1 and ring.layout == "time_major":
            where = runs(ring.rows(env_ids, positions))
        else:
            where = env_runs(ring, env_ids, positions)
        self._store.write(where, columns, flags)
        if self._store.sealing is None:  # which syncs what it seals
            self._syncs.count(len(flags) * self._row_nbytes)
        # An assignment with repeated indices keeps the last value, of the newest row.
        self._next[env_ids] = positions + 1
        # A copy: the caller's arrays may change later.
        written = env_ids[:1].copy() if one_env(env_ids) else np.unique(env_ids)
        self._wait_for_sums()
        self._summing = self._pool.submit(self._sum, written, self._next.copy())

    def _wait_for_sums(self) -> None:
        if self._summing is not None:
            job, self._summing = self._summing, None
            job.result()

    def _sum(self, env_ids: NDArray[np.int64], heads: NDArray[np.int64]) -> None:
        """Write the checksums of blocks that are complete, while they are cached."""
        size = self._ring.block_rows
        for env_id in env_ids.tolist():
            first, stop = int(self._summed[env_id]), int(heads[env_id]) // size
            if stop > first:
                sums = [self._store.checksum(env_id, b) for b in range(first, stop)]
                self._store.write_sums(env_id, first, np.array(sums, np.uint32))
                self._summed[env_id] = stop

    def finish(self) -> None:
        """See `DirectWriter.finish`."""
        self._wait_for_sums()
        self._syncs.wait()

    def close(self) -> None:
        """See `DirectWriter.close`."""
        # Files must not be closed under a thread that syncs them.
        self._pool.shutdown()


def stored_paths(schema: Schema) -> list[str]:
    """Paths of the fields that are stored, rather than served from flags."""
    served = record_layout(schema).served
    return [path for path in schema.paths if path not in served]


def env_runs(ring: Ring, env_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Run]:
    """Runs of rows in the files of an env-major ring, or one of one environment.

    Args:
        ring: The ring.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``; those of one environment follow each other.
    """
    if not one_env(env_ids):
        return runs(ring.rows(env_ids, positions))
    found, item = [], 0
    first, stop = int(positions[0]), int(positions[-1]) + 1
    for row, _, count in ring.split_at_wrap(int(env_ids[0]), first, stop):
        found.append((row, item, item + count))
        item += count
    return found


class BlockChecksums:
    """Sums the blocks of a new buffer while their bytes are written.

    The result is what `MemmapStore.checksum` computes from the files. A block's flags,
    records and large fields come interleaved with those of other blocks; each file's
    share is summed by itself, and the sums are combined as if the shares followed each
    other.
    """

    def __init__(self, ring: Ring, span: Span, row_nbytes: Sequence[int]) -> None:
        """Begin with nothing.

        Args:
            ring: Env-major, or of one environment.
            span: Rows that will be written. Rows before them in their first block are
                zeros.
            row_nbytes: Bytes of a row in each file, in the order of the format.
        """
        self._ring = ring
        size = ring.block_rows
        self._first_blocks = span.first // size
        self._nbytes = [size * each for each in row_nbytes]
        self._tables = [zeros_table(each) for each in self._nbytes]
        # Of incomplete blocks, by their number in the files: bytes still to come, and
        # the checksum of each file's share.
        self._left: dict[int, int] = {}
        self._crcs: dict[int, list[int]] = {}
        self._complete: list[int] = []
        begun = (span.first % size > 0) & ((self._first_blocks + 1) * size <= span.stop)
        for env_id in np.flatnonzero(begun).tolist():
            row = ring.row(env_id, int(span.first[env_id]))
            block, zero_rows = divmod(row, size)
            crcs = self._start(block)
            for number, nbytes in enumerate(self._nbytes):
                count = nbytes // size * zero_rows
                self._left[block] -= count
                for first in range(0, count, len(ZEROS)):
                    crcs[number] = crc32c(ZEROS[: count - first], crcs[number])

    def _start(self, block: int) -> list[int]:
        self._left[block] = sum(self._nbytes)
        return self._crcs.setdefault(block, [0] * len(self._nbytes))

    def add(self, number: int, offset: int, data: memoryview) -> None:
        """Sum bytes that go to an offset of a file, given by its number."""
        nbytes, first = self._nbytes[number], 0
        while first < len(data):
            block, at = divmod(offset + first, nbytes)
            share = data[first : first + nbytes - at]
            first += len(share)
            crcs = self._crcs.get(block)
            if crcs is None:
                crcs = self._start(block)
            crcs[number] = crc32c(share, crcs[number])
            self._left[block] -= len(share)
            if not self._left[block]:
                del self._left[block]
                self._complete.append(block)

    def pop_complete(self) -> list[tuple[int, int, Sums]]:
        """Checksums of blocks completed since the last call.

        Returns:
            (environment, block, checksums of the blocks from that one on), blocks
            numbered over all laps of the ring.
        """
        complete, self._complete = self._complete, []
        if not complete:
            return []
        crcs = np.array([self._crcs.pop(block) for block in complete], np.uint32)
        env_ids, slots = np.divmod(np.array(complete), self._ring.num_blocks)
        firsts = self._first_blocks[env_ids]
        blocks = firsts + (slots - firsts) % self._ring.num_blocks
        size = self._ring.block_rows
        # A block's checksum begins with its first position.
        heads = [crc32c(struct.pack("<Q", each * size)) for each in blocks.tolist()]
        sums = np.array(heads, np.uint32)
        for number, table in enumerate(self._tables):
            sums = append_zeros(sums, table) ^ crcs[:, number]
        found = []
        for env_id in np.unique(env_ids).tolist():
            # Rows of one environment come in order, and so do its blocks.
            own = env_ids == env_id
            found.append((env_id, int(blocks[own][0]), sums[own]))
        return found


@lru_cache(256)
def zeros_table(nbytes: int) -> Sums:
    """A table for `append_zeros`: how zeros after summed bytes change the checksum.

    The checksum of a followed by b is that of a and as many zeros as b has bytes, xor
    that of b (as in zlib's crc32_combine).

    Args:
        nbytes: Number of zeros, at least one.

    Returns:
        uint32 ``[4, 256]``, read-only.
    """
    columns: Sums = np.array([1 << bit for bit in range(32)], np.uint32)
    matrix: Sums = columns >> np.uint32(1)
    matrix[0] = POLYNOMIAL
    # The matrix is that of one zero bit; squared, of two, four and so on.
    bits = 8 * nbytes
    while bits:
        if bits & 1:
            columns = _multiply(matrix, columns)
        matrix = _multiply(matrix, matrix)
        bits >>= 1
    values = np.arange(256, dtype=np.uint32)
    shifts = np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    table = _multiply(columns, values << shifts)
    table.setflags(write=False)  # callers share it
    return table


def append_zeros(sums: Sums, table: Sums) -> Sums:
    """Checksums after the zeros that a table stands for, uint32 ``[N]``."""
    found: Sums = np.zeros_like(sums)
    for k in range(4):
        found ^= table[k, sums >> np.uint32(8 * k) & np.uint32(255)]
    return found


def _multiply(columns: Sums, values: Sums) -> Sums:
    """Values times a matrix over GF(2), given by its 32 columns."""
    found = np.zeros_like(values)
    for bit, column in enumerate(columns):
        found ^= np.where(values >> np.uint32(bit) & np.uint32(1), column, np.uint32(0))
    return found


class Output(Protocol):
    """Writes the bytes of a file, in streams that each continue where they stopped."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes, which may change after this call.

        Raises:
            FullError: No space is left, for these or for earlier ones.
            FailedError: The device refuses, likewise.
        """

    def finish(self) -> None:
        """Write what is left; raises as `write` does."""

    def close(self) -> None:
        """Release everything but the file; a second call does nothing."""


def open_output(file: File, streams: int) -> Output:
    """The fastest output for a file that has its final size already.

    Args:
        file: Open for writing.
        streams: Places in it that are written to in turns.

    Raises:
        FullError: No space is left for so large a file.
    """
    if file.nbytes >= DIRECT_NBYTES and file_system(file.path.parent) in KEEPS_PAGES:
        # A full disk is reported before the first byte, and threads that write where
        # there is space need not wait for each other: a fifth faster.
        file.allocate(0, file.nbytes)
    return direct_output(file, file.nbytes, streams) or CachedOutput(file)


def direct_output(file: File, nbytes: int, streams: int, files: int = 1) -> DirectOutput | None:
    """An output past the page cache, or None for a file that is too small for one.

    Args:
        file: Open for writing.
        nbytes: Bytes that will be written.
        streams: As in `open_output`.
        files: Number of files written so at the same time, which share the memory.
    """
    if nbytes >= DIRECT_NBYTES and 0 < streams * files <= MAX_STREAMS:
        try:
            return DirectOutput(file, file.past_cache(), streams, files)
        except FailedError:
            # The file system has no direct writes.
            pass
    return None


class DirectOutput:
    """Writes past the page cache, in threads; see `Output`.

    Only whole blocks of the device can go past the cache. The bytes before the first
    block of a stream and after its last go through it, in pages that hold no others.
    """

    def __init__(self, file: File, direct: File, streams: int, files: int) -> None:
        """Write into a file.

        Args:
            file: Open for writing.
            direct: The same file opened past the cache; closed with this output.
            streams: Number of streams written in turns, at most.
            files: See `direct_output`.
        """
        self._file, self._direct = file, direct
        self._direct_works = True
        # Each writer has one, and one waits for a writer.
        self._unmade = streams + WRITERS + 1
        share = SLABS_NBYTES // files // self._unmade // ALIGNMENT * ALIGNMENT
        self._slab_nbytes = min(SLAB_NBYTES, max(MIN_SLAB_NBYTES, share))
        self._free: SimpleQueue[_Slab] = SimpleQueue()
        self._streams: dict[int, _Slab] = {}
        self._jobs: deque[Future[None]] = deque()
        self._pool = thread_pool(WRITERS, "mmreplay-direct")

    def write(self, data: memoryview, offset: int) -> None:
        """See `Output.write`."""
        slab = self._streams.pop(offset, None)
        done = 0
        if slab is None:
            done = min(len(data), -offset % ALIGNMENT)
            if done:
                self._file.pwrite(data[:done], offset)
        # numpy's copies release the interpreter's lock.
        source = np.frombuffer(data, np.uint8)
        while done < len(source):
            if slab is None:
                slab = self._take_slab(offset + done)
            space = self._slab_nbytes - slab.filled
            chunk = source[done : done + space]
            slab.memory[slab.filled : slab.filled + len(chunk)] = chunk
            slab.filled += len(chunk)
            done += len(chunk)
            if len(chunk) == space:
                self._submit(slab)
                slab = None
        if slab is not None:
            self._streams[offset + done] = slab

    def _take_slab(self, offset: int) -> _Slab:
        """A free slab, for bytes from an aligned offset on."""
        if self._unmade:
            self._unmade -= 1
            memory = np.empty(self._slab_nbytes + ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % ALIGNMENT
            slab = _Slab(memory[first : first + self._slab_nbytes])
        else:
            slab = self._free.get()
        slab.offset, slab.filled = offset, 0
        return slab

    def _submit(self, slab: _Slab) -> None:
        """Have a thread write a slab; raises what earlier slabs raised."""
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        self._jobs.append(self._pool.submit(self._write_slab, slab))

    def _write_slab(self, slab: _Slab) -> None:
        try:
            direct = slab.filled // ALIGNMENT * ALIGNMENT
            if direct and not self._write_direct(slab.memory[:direct].data, slab.offset):
                direct = 0
            rest = slab.memory[direct : slab.filled]
            if len(rest):
                self._file.pwrite_new_pages(rest.data, slab.offset + direct)
        finally:
            self._free.put(slab)

    def _write_direct(self, data: memoryview, offset: int) -> bool:
        """Write past the cache; False where that does not work, now or ever."""
        if self._direct_works:
            try:
                self._direct.pwrite(data, offset)
            except FailedError:
                # The device has larger blocks, or fails: a write through the cache
                # works, or raises the error for the caller.
                self._direct_works = False
        return self._direct_works

    def finish(self) -> None:
        """See `Output.finish`."""
        streams, self._streams = self._streams, {}
        for slab in streams.values():
            self._submit(slab)
        while self._jobs:
            self._jobs.popleft().result()

    def close(self) -> None:
        """See `Output.close`."""
        self._pool.shutdown()
        self._direct.close()


@dataclass(slots=True)
class _Slab:
    """Aligned memory, and the bytes in it.

    Attributes:
        memory: uint8 ``[N]``.
        offset: Of its first byte in the file, aligned.
        filled: Number of bytes in it.
    """

    memory: NDArray[np.uint8]
    offset: int = 0
    filled: int = 0


class CachedOutput:
    """Writes through the page cache, and syncs now and then; see `Output`."""

    def __init__(self, file: File) -> None:
        """Write into an open file."""
        self._file = file
        self._pool = thread_pool(1, "mmreplay-sync")
        self._syncs = Syncs(file.sync, self._pool)

    def write(self, data: memoryview, offset: int) -> None:
        """See `Output.write`."""
        self._file.pwrite_new_pages(data, offset)
        self._syncs.count(len(data))

    def finish(self) -> None:
        """See `Output.finish`."""
        self._syncs.wait()

    def close(self) -> None:
        """See `Output.close`."""
        # The file must not be closed under a thread that syncs it.
        self._pool.shutdown()


class Syncs:
    """Syncs files in a thread while more is written."""

    def __init__(self, sync: Callable[[], None], pool: ThreadPoolExecutor) -> None:
        self._sync, self._pool = sync, pool
        self._written = 0
        self._job: Future[None] | None = None

    def count(self, nbytes: int) -> None:
        """Count written bytes, and start a sync after `SYNC_NBYTES` of them.

        Raises:
            FailedError: The device refused earlier bytes.
        """
        self._written += nbytes
        if self._written < SYNC_NBYTES:
            return
        if self._job is not None:
            if not self._job.done():
                return
            self._job.result()
        self._written = 0
        self._job = self._pool.submit(self._sync)

    def wait(self) -> None:
        """Wait for the device; raises as `count` does."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()


def warm(paths: Sequence[Path]) -> Worker[None] | None:
    """Begin to read files into memory, if plenty is available.

    A loaded buffer is often sampled next, and files written past the page cache would
    make its first batches ten times slower. No caller waits for the worker, and its
    errors do not matter.

    Returns:
        The worker; it does not keep the interpreter from ending.
    """
    if not paths:
        return None
    with suppress(OSError, RuntimeError):
        nbytes = sum(path.stat().st_size for path in paths)
        if nbytes <= available_nbytes() // MEMORY_SHARE:
            worker: Worker[None] = Worker("mmreplay-warm", partial(_read, list(paths)))
            worker.start()
            return worker
    return None


def _read(paths: list[Path], _: Worker[None]) -> None:
    for path in paths:
        # A removed file or a failing device: sampling raises the error.
        with suppress(ReplayError):
            file = File.open(path, None)
            try:
                file.will_need(0, file.nbytes)
            finally:
                file.close()
