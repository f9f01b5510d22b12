"""The memmap engine: rows in files, written with pwrite and read through mappings.

A store through a sparse mapping on a full disk kills the process with SIGBUS on every
file system tried, while pwrite raises. And to advise a mapping for random reads slows
writes through it twentyfold. So the mappings here are read-only, and advised for
reading. Rows are stored through mappings of their own, whose pages are populated first
(`write_path`). `FlagReader` reads the flags of all rows, `BlockSums` keeps the
checksums of blocks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.disk.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Ring, Run, runs
from mmreplay.schema import Schema
from mmreplay.storage.gather import (
    BufferPool,
    ClosedStore,
    MappedRows,
    ReadRows,
    Records,
    RowReader,
    gathered,
    records_of,
)
from mmreplay.storage.heap import FileHeap
from mmreplay.storage.layout import (
    FLAGS,
    HEAP,
    RECORDS,
    SUM_DTYPE,
    SUMS,
    RecordLayout,
    packer,
    record_layout,
)
from mmreplay.storage.read_ahead import Pages
from mmreplay.storage.store import Columns, ReadPolicy, UnsealedStore, flags_between
from mmreplay.storage.write_path import (
    LEAST_NBYTES,
    SHORT_NBYTES,
    MappedWriter,
    PartialPageFiller,
    SpaceReservation,
    StepWriters,
)

Flags = NDArray[np.uint8]


class FlagReader(Protocol):
    """Flags of one store.

    Attributes:
        every: uint8 ``[num_rows]``, valid for rows that `span` returned, or `take` as
            new.
    """

    every: Flags

    def take(self, rows: NDArray[np.int64], new: bool = False) -> Flags:
        """Flags of rows, of the shape of rows."""

    def span(self, ring: Ring, env_id: int, first: int, stop: int) -> Flags:
        """Flags of positions ``[first, stop)`` of one environment."""

    def strided(self, row: int, step: int, count: int) -> bytes:
        """Flags of count rows from one on, every step-th."""


class MappedFlags:
    """Through a mapping; see `FlagReader`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """Look through a mapping of the file."""
        self.every: Flags = np.frombuffer(mapping, np.uint8)

    def take(self, rows: NDArray[np.int64], new: bool = False) -> Flags:
        """See `FlagReader.take`."""
        return self.every.take(rows)

    def span(self, ring: Ring, env_id: int, first: int, stop: int) -> Flags:
        """See `FlagReader.span`."""
        return flags_between(self.every, ring, env_id, first, stop)

    def strided(self, row: int, step: int, count: int) -> bytes:
        """See `FlagReader.strided`."""
        return self.every[row : row + step * count : step].tobytes()


class ReadFlags:
    """Read on demand, and cached; see `FlagReader`.

    Draws look at flags that the episode index has asked for before, as a span or as
    new rows, and published flags never change. Other calls do not fill the cache: they
    may have read old rows before these were overwritten.
    """

    def __init__(self, file: File) -> None:
        """Read an open file."""
        self._file = file
        self._cache: Flags = np.zeros(file.nbytes, np.uint8)
        self.every = self._cache.view()
        # A caller that wrote into it would change flags for every later draw.
        self.every.flags.writeable = False
        self._rows = ReadRows(file, np.dtype(np.uint8), (), "never")

    def take(self, rows: NDArray[np.int64], new: bool = False) -> Flags:
        """See `FlagReader.take`."""
        flags = np.empty(rows.shape, np.uint8)
        self._rows.take(rows.reshape(-1), flags.reshape(-1))
        if new:
            self._cache[rows] = flags
        return flags

    def span(self, ring: Ring, env_id: int, first: int, stop: int) -> Flags:
        """See `FlagReader.span`."""
        for row, step, count in ring.split_at_wrap(env_id, first, stop):
            flags = np.frombuffer(self.strided(row, step, count), np.uint8)
            self._cache[row : row + step * count : step] = flags
        return flags_between(self._cache, ring, env_id, first, stop)

    def strided(self, row: int, step: int, count: int) -> bytes:
        """See `FlagReader.strided`."""
        # Those between belong to other environments: a byte each, and read at once.
        return self._file.pread(step * (count - 1) + 1, row)[::step]


class BlockSums:
    """One file of them, environment by environment."""

    def __init__(self, ring: Ring, file: File) -> None:
        """Store the checksums of a ring in a file."""
        self._ring, self._file = ring, file

    def write(self, env_id: int, first: int, sums: NDArray[np.uint32]) -> None:
        """Store the checksums of blocks from first on, with their laps."""
        blocks = np.arange(first, first + len(sums))
        values = np.empty(len(sums), SUM_DTYPE)
        values["crc"] = sums
        # With the lap: after a power cut a checksum may be of an earlier one, or of a
        # timeline that was dropped, and must not be taken for this block's.
        values["lap"] = (blocks // self._ring.num_blocks) & 0xFFFFFFFF
        entries = env_id * self._ring.num_blocks + blocks % self._ring.num_blocks
        for entry, start, stop in runs(entries):
            data = values[start:stop].view(np.uint8)
            self._file.pwrite(data.data, entry * SUM_DTYPE.itemsize)

    def read(self, env_id: int, block: int) -> tuple[int, int]:
        """Return the stored (checksum, lap) of a block's entry."""
        entry = env_id * self._ring.num_blocks + block % self._ring.num_blocks
        data = self._file.pread(SUM_DTYPE.itemsize, entry * SUM_DTYPE.itemsize)
        crc, lap = struct.unpack("<II", data)
        return crc, lap

    def sync(self) -> None:
        """Make them survive a power cut."""
        self._file.sync()


# Small fields are put together in a piece that the second level of cache holds. Over
# pages that are there it goes to the file in one call: ext4 takes 26 us for 172 KB so,
# and 33 in pieces of 64 KiB that end within pages.
STAGE_NBYTES = 256 << 10
POLICY = ReadPolicy()
Large = tuple[str, MappedWriter, int]
"""Path of a field in a file of its own, the file's writer, bytes of a row."""


class MemmapStore(UnsealedStore):
    """One data folder; see `Store` for what each method owes."""

    def __init__(
        self,
        ring: Ring,
        schema: Schema,
        placement: RecordLayout,
        files: dict[str, File],
        policy: ReadPolicy = POLICY,
        *,
        writable: bool = True,
    ) -> None:
        self.heap: FileHeap | None = None
        self.records: Records | None = None
        self.ring = ring
        self.schema = schema
        record = placement.record
        self.packed = frozenset(() if record is None else record.names or ())
        self.limit_step = 1
        self.placement: RecordLayout = placement
        self._files = files
        self._buffers = BufferPool()
        self._flags_file = files[FLAGS]
        self._sums = BlockSums(ring, files[SUMS])
        self._data_files = [f for name, f in files.items() if name != SUMS]
        self._records_file = files.get(RECORDS)
        self._stride = placement.stride
        self._advise = policy.advise
        self.maps = policy.maps(self._flags_file.path.parent)
        self._open_rows()
        # Whether the ring is known to be in its first lap: see `give_up`.
        self._first_lap = False
        self._fillers: list[PartialPageFiller] = []
        self._writer: MappedWriter | None = None
        self._large: list[Large] = []
        self._writable = writable
        if writable:
            self._open_writers()

    def _open_rows(self) -> None:
        """Make every file readable by rows."""
        ring, placement, stride = self.ring, self.placement, self.placement.stride
        self._mapped: list[MappedRows] = []
        self._pages: dict[str, Pages] = {}
        self._pages_of: dict[tuple[str, ...], list[Pages]] = {}
        self._mapping = self._flags_file.map_readonly() if self.maps else None
        self._flags: FlagReader = (
            ReadFlags(self._flags_file) if self._mapping is None else MappedFlags(self._mapping)
        )
        if self._records_file is not None:
            self._records = self._rows_of(RECORDS, np.dtype((np.void, stride)), ())
            self.records = records_of(ring, self._records, placement)
        self._large_paths: dict[str, RowReader] = {}
        for path, name in placement.large.items():
            field = self.schema.fields[path]
            self._large_paths[path] = self._rows_of(name, field.numpy, field.shape)
        if HEAP in self._files:
            self.heap = FileHeap(
                self._files[HEAP], ring.num_envs, maps=self.maps, advise=self._advise
            )

    def _open_writers(self) -> None:
        """Make every file writable by rows."""
        ring, placement, stride = self.ring, self.placement, self.placement.stride
        self.space = SpaceReservation(
            ring, {n: f for n, f in self._files.items() if n not in (SUMS, HEAP)}
        )
        self.packer = packer(self.schema, placement, ring.num_envs)
        self._step = memoryview(self.packer.rows)
        self.ends: Flags = np.frombuffer(self.packer.ends, np.uint8)
        self._flags_writer = MappedWriter(self._flags_file, advise=self._advise)
        if self._records_file is not None:
            # Padding between fields is never written, and must read as zeros.
            count = max(1, STAGE_NBYTES // stride // ring.wide) * ring.wide
            self._stage = np.zeros((count, stride), np.uint8)
            self._staged = self._stage.reshape(-1).data
            self._writer = self._writer_of(RECORDS, self._records)
        for path, name in placement.large.items():
            nbytes = self.schema.fields[path].nbytes
            writer = self._writer_of(name, self._large_paths[path])
            self._large.append((path, writer, nbytes))
        self.writers: tuple[MappedWriter | None, MappedWriter] = (self._writer, self._flags_writer)
        if ring.num_envs > 1 and ring.layout == "env_major":
            # Steps to come do not follow: other environments' rows lie between.
            for writer in (self._flags_writer, *self._row_writers):
                writer.only_write()

    def _writer_of(self, name: str, reader: RowReader) -> MappedWriter:
        filler = PartialPageFiller(self._files[name], reader.pages, self.ring)
        self._fillers.append(filler)
        return MappedWriter(filler.file, filler)

    def _rows_of(self, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> RowReader:
        file, reader = self._files[name], None
        if self.maps:
            reader = MappedRows(file, dtype, shape, self._advise)
            self._mapped.append(reader)
        rows: RowReader = reader or ReadRows(file, dtype, shape, self._advise)
        self._pages[name] = rows.pages
        return rows

    @classmethod
    def create(cls, folder: Path, metadata: Metadata) -> MemmapStore:
        """Create the files of a new generation; see `DiskStore.create`."""
        heap_nbytes = metadata.heap_nbytes
        return cls.create_rows(folder, metadata.ring, metadata.schema, heap_nbytes)

    @classmethod
    def open(
        cls, folder: Path, metadata: Metadata, *, writable: bool, policy: ReadPolicy = POLICY
    ) -> MemmapStore:
        """Open the files of a generation; see `DiskStore.open`."""
        return cls.open_rows(
            folder,
            metadata.ring,
            metadata.schema,
            metadata.heap_nbytes,
            writable=writable,
            policy=policy,
        )

    @classmethod
    def create_rows(
        cls, folder: Path, ring: Ring, schema: Schema, heap_nbytes: int = 0
    ) -> MemmapStore:
        """Create sparse files for the rows of a ring in an existing folder."""
        return cls._with(folder, ring, schema, heap_nbytes, File.create, POLICY)

    @classmethod
    def open_rows(
        cls,
        folder: Path,
        ring: Ring,
        schema: Schema,
        heap_nbytes: int = 0,
        *,
        writable: bool,
        policy: ReadPolicy = POLICY,
    ) -> MemmapStore:
        """Open files of rows, after checking type and size of each."""
        opened = partial(File.open, writable=writable)
        return cls._with(folder, ring, schema, heap_nbytes, opened, policy, writable=writable)

    @classmethod
    def _with(
        cls,
        folder: Path,
        ring: Ring,
        schema: Schema,
        heap_nbytes: int,
        made: Callable[[Path, int], File],
        policy: ReadPolicy,
        *,
        writable: bool = True,
    ) -> MemmapStore:
        placement = record_layout(schema)
        files: dict[str, File] = {}
        try:
            sizes = placement.file_sizes(ring, schema, heap_nbytes)
            for name, nbytes in sizes.items():
                files[name] = made(folder / name, nbytes)
            return cls(ring, schema, placement, files, policy, writable=writable)
        except BaseException:
            _close(files)
            raise

    def write(self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]) -> None:
        """Write a batch of rows; see `Store.write`."""
        if not self._writable:
            # The file refuses it, in an error that names the file.
            self._flags_file.pwrite(flags.data, runs[0][0])
        # In any order: all of these rows are above the heads, and no process looks at
        # them before the publication.
        if self._large:
            self._write_large(runs, columns, len(flags))
        if self._writer is not None:
            self._write_records(self._writer, runs, columns)
        self._write_flags(runs, flags)

    def _write_large(self, runs: Sequence[Run], columns: Columns, count: int) -> None:
        for path, writer, nbytes in self._large:
            column = columns[path].reshape(count, -1)
            for row, first, stop in runs:
                values = np.ascontiguousarray(column[first:stop]).reshape(-1)
                data = values.view(np.uint8).data
                if count == 1:
                    writer.put(data, row * nbytes, nbytes)
                else:
                    writer.put_long(data, row * nbytes)

    def _write_flags(self, runs: Sequence[Run], flags: NDArray[np.uint8]) -> None:
        for row, first, stop in runs:
            self._flags_writer.put(flags[first:stop].data, row, stop - first)

    def _write_records(self, writer: MappedWriter, runs: Sequence[Run], columns: Columns) -> None:
        """Pack rows into the mapping, or into memory that a cache holds, and write."""
        stride, packer, stage = self._stride, self.packer, self._stage
        staged, max_rows = self._staged, len(stage)
        begin, end = runs[0][1], runs[-1][2]
        # Few rows that follow each other: packed into memory that the cache holds, and
        # put where their pages are ready: 0.5 us instead of a call of the system, which
        # takes 7 us for 1 KiB of a large page.
        nbytes = (end - begin) * stride
        if len(runs) == 1 and (end - begin == 1 or nbytes <= SHORT_NBYTES):
            packer.pack(stage, columns, begin, end)
            writer.put(staged[:nbytes], runs[0][0] * stride, nbytes)
            return
        # Few rows for many environments: packed at once, then a write for each run.
        short = (end - begin) * stride < len(runs) * LEAST_NBYTES
        if short and len(runs) > 1 and end - begin <= max_rows:
            packer.pack(stage, columns, begin, end)
            for row, first, stop in runs:
                packed = slice((first - begin) * stride, (stop - begin) * stride)
                writer.write(staged[packed], row * stride)
            return
        for row, first, stop in runs:
            arguments, nbytes = (columns, first, stop), (stop - first) * stride
            if writer.fill(row * stride, nbytes, packer.stream, arguments, fresh=self._first_lap):
                continue
            for at in range(first, stop, max_rows):
                until = min(at + max_rows, stop)
                packer.pack(stage, columns, at, until)
                packed = slice((until - at) * stride)
                writer.write(staged[packed], (row + at - first) * stride)

    def prepare(self, data: Mapping[str, object]) -> int:
        """Check and pack one step; see `Store.prepare`."""
        return self.packer.prepare(data)

    def write_prepared(self, runs: Sequence[Run], flags: NDArray[np.uint8]) -> None:
        """Write the step prepared last; see `Store.write_prepared`."""
        stride, writer, step = self._stride, self._writer, self._step
        if writer is not None and not len(step):
            # Its records are too long to be packed twice.
            self.write(runs, self.packer.unpacked(), flags)
            return
        if self._large:
            self._write_large(runs, self.packer.unpacked(), len(flags))
        if writer is not None:
            if len(runs) == 1:
                writer.put(step, runs[0][0] * stride, len(step))
            else:
                for row, first, stop in runs:
                    rows = step[first * stride : stop * stride]
                    writer.put(rows, row * stride, len(rows))
        self._write_flags(runs, flags)

    @property
    def _row_writers(self) -> list[MappedWriter]:
        """Writers of all files but those of flags and sums."""
        records = [] if self._writer is None else [self._writer]
        return records + [writer for _, writer, _ in self._large]

    def recycle_pages(self) -> None:
        """Expect that the space of rows is given back; see `MappedWriter`."""
        for writer in self._row_writers:
            writer.recycle_pages()

    @property
    def step_writers(self) -> StepWriters | None:
        """Of small fields in rows side by side; see `DiskStore.step_writers`."""
        ring, placement, (records, flags) = self.ring, self.placement, self.writers
        if records is None or (self.heap is not None and ring.num_envs > 1):
            return None
        if placement.large or not len(self.packer.rows):
            return None
        if ring.num_envs > 1 and ring.layout == "env_major":
            return None
        return StepWriters(self.packer, placement.stride, records, flags)

    def allocate(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        """Reserve space for positions; see `Store.allocate`."""
        self.space.reserve(first, stop)

    def give_up(self, limits: NDArray[np.int64]) -> None:
        """Let rows be overwritten; see `Store.give_up`."""
        # Then rows from the head on hold nothing yet, and `allocate` reserved their
        # space: their pages are stored into without a look.
        # A block of 1,024 then takes 18 us instead of 55 through `pwrite`.
        self._first_lap = bool((limits <= self.ring.slots).all())
        for filler in self._fillers:
            filler.free(limits)

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`."""
        packed = None
        result: dict[str, NDArray[np.generic]] = {}
        for path in paths:
            large = self._large_paths.get(path)
            if large is not None:
                out = self._buffers.empty((len(rows), *large.shape), large.dtype)
                result[path] = large.take(rows, out)
            elif path not in self.placement.served:
                if packed is None:
                    source = (self._records, self.placement, self._buffers)
                    packed = gathered(*source, rows, paths)
                result[path] = packed[path]
        return result

    def map_field(self, path: str) -> NDArray[Any] | None:
        """Map a field of all rows; see `Store.map_field`.

        The mapping is private: a write into one makes a copy of the page.
        """
        ring, field, placement = self.ring, self.schema[path], self.placement
        if path in placement.served:
            return None
        name = placement.file_of(path)
        mapping = self._files[name].map_private()
        if name == RECORDS:
            rows = np.frombuffer(mapping, placement.record)[path]
        else:
            rows = np.frombuffer(mapping, field.numpy).reshape(-1, *field.shape)
        if ring.layout == "time_major":
            return rows.reshape(ring.slots, ring.num_envs, *field.shape)
        return rows.reshape(ring.num_envs, ring.slots, *field.shape).swapaxes(0, 1)

    def prefetch(self, rows: NDArray[np.int64], paths: Sequence[str], now: bool = False) -> int:
        """Ask the disk for missing rows; see `Store.prefetch`."""
        key = tuple(paths)
        if (pages := self._pages_of.get(key)) is None:
            names = {
                self.placement.file_of(path) for path in paths if path not in self.placement.served
            }
            pages = self._pages_of[key] = [self._pages[name] for name in sorted(names)]
        return sum([one.prefetch(rows, now) for one in pages])

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        return self._flags.every

    def flags(self, rows: NDArray[np.int64], new: bool = False) -> NDArray[np.uint8]:
        """Flags of rows; see `Store.flags`."""
        return self._flags.take(rows, new)

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of a span; see `Store.flags_between`."""
        return self._flags.span(self.ring, env_id, first, stop)

    def set(self, path: str, rows: NDArray[np.int64], values: NDArray[np.generic]) -> None:
        """Overwrite a mutable field's values; see `Store.set`."""
        file = self._files[self.placement.large[path]]
        nbytes = self.schema.fields[path].nbytes
        for row, first, stop in runs(rows):
            data = np.ascontiguousarray(values[first:stop])
            file.pwrite(data.data, row * nbytes)

    def checksum(self, env_id: int, block: int) -> int:
        """CRC32C of a block: first position, flags, records, then large fields."""
        size = self.ring.block_rows
        where, *_ = self.ring.split_at_wrap(env_id, block * size, (block + 1) * size)
        crc = crc32c(struct.pack("<Q", block * size) + self._flags.strided(*where))
        fields = self.schema.fields
        readers = [r for p, r in self._large_paths.items() if not fields[p].mutable]
        if self._records_file is not None:
            readers.insert(0, self._records)
        for data in chain.from_iterable(reader.iter_bytes(*where) for reader in readers):
            crc = crc32c(data, crc)
        return crc

    def write_sums(self, env_id: int, first: int, sums: NDArray[np.uint32]) -> None:
        """Store checksums; see `Store.write_sums`."""
        self._sums.write(env_id, first, sums)

    def read_sum(self, env_id: int, block: int) -> tuple[int, int]:
        """Return a block's stored (checksum, lap)."""
        return self._sums.read(env_id, block)

    def sync(self) -> None:
        """Make every row survive a power cut; see `Store.sync`."""
        # File by file: fdatasync covers every earlier write of its file, stores through
        # mappings included, and no order between data files matters, since the record
        # that vouches for them is written after all. The sums are synced later, by
        # themselves: they are written once the rows that they cover are durable.
        for file in self._data_files:
            file.sync()

    def sync_sums(self) -> None:
        """Make the checksums survive a power cut."""
        self._sums.sync()

    @property
    def files(self) -> list[File]:
        """See `Store.files`."""
        return list(self._files.values())

    def file(self, name: str) -> File:
        """One of them, by its name in the folder."""
        return self._files[name]

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (apparent, allocated) bytes."""
        usage = [file.disk_nbytes() for file in self._files.values()]
        return sum(a for a, _ in usage), sum(b for _, b in usage)

    def close(self) -> None:
        """Give files back; mappings stay, so that reading threads end as they were."""
        _close(self._files)

    def unmap(self) -> None:
        """Let the mappings go; see `Store.unmap`."""
        # Names go first: a thread that comes now gets an error that names the folder,
        # never a view of memory that is not mapped any more, which is a SIGSEGV.
        closed: Any = ClosedStore(self._flags_file.path.parent)
        self._flags = self._records = self._large_paths = self._pages_of = closed
        if isinstance(self.records, Records):
            self.records.unmap(closed)
        self.records = closed
        while self._mapped:
            self._mapped.pop().unmap(closed)
        if isinstance(self.heap, FileHeap):
            self.heap.unmap()
            self.heap = closed
        if self._writable:
            for writer in (self._flags_writer, *self._row_writers):
                writer.unmap()
        self._large, self._pages, self._fillers = [], {}, []
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # One that a thread is reading just now goes when it has done.
            with suppress(BufferError):
                mapping.close()


def _close(files: dict[str, File]) -> None:
    for file in files.values():
        file.close()
