"""Shards of the sharding_indexed codec: written once as a whole, read chunk by chunk.

`ShardMaker` packs the staging rows of one shard range under temporary names.
`ShardReader` reads rows out of shards. `ShardStates` is places.bin: a number for each
range, odd where a shard holds its rows, even where the staging files do, and one more
at every change, so that a reader looks before and after it copies. `ChunkPages` and
`ChunksAhead` ask the disk for the chunks of a draw before one is unpacked: some hundred
bytes each, all over some hundred shards, each would wait for the disk alone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk import files
from mmreplay.disk.files import AHEAD_NBYTES, File, rename
from mmreplay.episodes import TERMINATED, TRUNCATED
from mmreplay.errors import OR_REPAIR, OUT_OF_FILES, CorruptError, FailedError, FormatError
from mmreplay.format.heap import legal, nbytes_of, offsets
from mmreplay.format.metadata import Metadata
from mmreplay.process import run_both
from mmreplay.ring import Ring
from mmreplay.schema.field import REFERENCE
from mmreplay.storage import read_ahead
from mmreplay.storage.gather import ReadRows
from mmreplay.storage.layout import FLAGS, RECORDS, record_layout
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.read_ahead import COLD_CALLS, SAMPLED_ROWS, WARM_CALLS
from mmreplay.storage.store import Advise
from mmreplay.storage.zarr import group, values
from mmreplay.storage.zarr.chunk_cache import ChunkCache
from mmreplay.storage.zarr.group import ShardedArray, shard_name
from mmreplay.storage.zarr.values import ValueChunk

Ids = NDArray[np.int64]
GAP_NBYTES = 1 << 14
"""Chunks that lie closer are asked for as one range of bytes."""

_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ChunkPages:
    """The pages of one mapped shard."""

    def __init__(self, mapping: mmap.mmap, advise: Advise) -> None:
        """Look at a mapping; a miss reads one page, but for the kernel's own way."""
        if advise != "kernel":
            mapping.madvise(mmap.MADV_RANDOM)
        self._mapping = mapping
        self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._vector = ctypes.create_string_buffer(1)

    def cached(self, offset: int) -> bool:
        """Whether the page of a byte is in memory.

        Of a file that this user may not write the system always says so.
        """
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.mincore(self._address + page, 1, self._vector)
        return bool(self._vector.raw[0] & 1)

    def ask(self, starts: Ids, stops: Ids) -> int:
        """Have stretches of bytes read, those that nearly touch as one.

        Args:
            starts: int64 ``[N]``, first bytes, N at least 1.
            stops: int64 ``[N]``, the bytes after the last ones.

        Returns:
            Bytes asked for.
        """
        order = np.argsort(starts)
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        apart = np.flatnonzero(starts[1:] > stops[:-1] + GAP_NBYTES) + 1
        firsts = starts[np.append(0, apart)] // mmap.PAGESIZE * mmap.PAGESIZE
        lasts = stops[np.append(apart - 1, len(stops) - 1)]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for at in range(first, last, AHEAD_NBYTES):
                nbytes = min(AHEAD_NBYTES, last - at)
                self._mapping.madvise(mmap.MADV_WILLNEED, at, nbytes)
        return int((lasts - firsts).sum())


Extents = Callable[[Ids], Iterator[tuple[ChunkPages, Ids, Ids]]]
"""Of some rows: shard by shard its pages, and first and last bytes of their chunks."""


class ChunksAhead:
    """When to ask; see `ReadPolicy`."""

    def __init__(self, advise: Advise) -> None:
        """Ask as the policy says."""
        self._advise = advise
        self._warm_calls = self._cold_calls = 0

    def ask(self, rows: Ids, extents: Extents) -> int:
        """Have the chunks of rows read, if any of a sample is missing.

        Args:
            rows: int64 ``[B]``, whatever `extents` takes.
            extents: Finds where their chunks are.

        Returns:
            Bytes asked for.
        """
        if not self._wanted(rows, extents):
            return 0
        return sum(pages.ask(starts, stops) for pages, starts, stops in extents(rows))

    def _wanted(self, rows: Ids, extents: Extents) -> bool:
        if self._advise != "auto":
            return self._advise == "always"
        if self._warm_calls > 0:
            self._warm_calls -= 1
            return False
        if read_ahead.gathers():
            return read_ahead.lacks(lambda: not self._missing(rows, extents))
        if self._cold_calls > 0:
            self._cold_calls -= 1
            return True
        if self._missing(rows, extents):
            self._cold_calls = COLD_CALLS
            return True
        self._warm_calls = WARM_CALLS
        return False

    @staticmethod
    def _missing(rows: Ids, extents: Extents) -> bool:
        """Whether a chunk of some of the rows is not in memory."""
        some = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        return not all(
            pages.cached(start) for pages, starts, _ in extents(some) for start in starts.tolist()
        )


Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]
_copies = kernels.load("copies")
ChunkKey = tuple[str, int, int, int]
"""Array, range, its number, and the chunk in it."""
MISSING = (1 << 64) - 1
MAX_OPEN = 4096
"""Shards open at a time, of all fields, where the process may open so many
files: Python keeps a descriptor for each mapping, too. See `_most_open`."""
CACHE_NBYTES = 64 << 20
UNREADABLE = (ValueError, RuntimeError, struct.error)
"""What codecs raise of bytes that are no chunk."""
FEW = 8
"""Chunks for which no second thread is started."""


PACKED_NBYTES = 256 << 10
"""Rows that are read at once, to be packed while a cache holds them."""


def encode(array: ShardedArray, read: Callable[[int, int], Array]) -> list[Any]:
    """Pack the rows of a shard; return the chunks of its file, in order, and its index.

    Args:
        array: The array of the shard.
        read: Returns rows ``[first, stop)`` of the shard, ``[N, *shape]``, in the order
            of the ring's rows. It is called from two threads.
    """
    wide, steps = array.shard
    envs, size = array.chunk
    per_env, num_chunks = steps // size, array.num_chunks
    packed: list[Any] = [None] * num_chunks
    at_once = max(1, PACKED_NBYTES // (wide * size * array.row_nbytes)) * size

    def pack(first: int, stop: int) -> None:
        for start in range(first, stop, at_once):
            end = min(start + at_once, stop)
            grid = read(start * wide, end * wide)
            grid = grid.reshape(end - start, wide, *array.shape)
            for step in range(0, end - start, size):
                number = (start + step) // size
                for env in range(0, wide, envs):
                    block = grid[step : step + size, env : env + envs].swapaxes(0, 1)
                    raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                    packed[number] = memoryview(array.codec.pack(raw)).cast("B")
                    number += per_env

    if num_chunks < 2 * FEW or array.chunk_nbytes < array.codec.nbytes_apart:
        pack(0, steps)
    else:
        middle = per_env // 2 * size
        run_both(lambda: pack(middle, steps), lambda: pack(0, middle))
    return [*packed, _index(packed)]


def _index(packed: Sequence[memoryview]) -> bytes:
    """The index of a shard's chunks, which lie one after another."""
    lengths = np.array([chunk.nbytes for chunk in packed], "<u8")
    index = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1).astype("<u8")
    data = index.tobytes()
    return data + struct.pack("<I", google_crc32c.value(data))


def encode_values(array: ShardedArray, read: Callable[[int, int], Bytes]) -> list[Any]:
    """Pack the values of a shard's rows; return as `encode` does.

    Args:
        array: The array of the shard.
        read: Returns rows ``[first, stop)`` of the shard as `values.encode` does.
    """
    size = array.chunk_rows
    packed = [
        memoryview(array.codec.pack(read(first, first + size))).cast("B")
        for first in range(0, array.shard[0] * array.shard[1], size)
    ]
    return [*packed, _index(packed)]


class Shard:
    """One open shard.

    Attributes:
        path: Its file.
        pages: Of its mapping, if there is one.
    """

    def __init__(self, file: File, array: ShardedArray, mapped: bool, advise: Advise) -> None:
        """Read and check the index; the file is the shard's own from here on.

        Raises:
            CorruptError: It is damaged.
        """
        self.path = file.path
        size = 16 * array.num_chunks + 4
        if file.nbytes < size:
            raise self.damaged(f"it has {file.nbytes} bytes, its index alone {size}")
        # A thread that still unpacks refers to the shard, and so to file and mapping.
        self._file, self.pages = file, None
        self._data = memoryview(b"")
        if mapped:
            mapping = file.map_readonly()
            file.close()
            self.pages = ChunkPages(mapping, advise)
            self._data = memoryview(mapping)
        footer = self.packed([file.nbytes - size, size])
        index = bytes(footer[:-4])
        if google_crc32c.value(index) != struct.unpack("<I", footer[-4:])[0]:
            raise self.damaged("its index does not match its checksum")
        table = np.frombuffer(index, "<u8").reshape(-1, 2)
        there = table[:, 0] != MISSING
        data_nbytes = np.uint64(file.nbytes - size)
        # A sum of the two might wrap.
        wrong = (table[there] > data_nbytes).any(1) | (
            table[there, 0] > data_nbytes - table[there, 1]
        )
        if wrong.any():
            raise self.damaged("a chunk ends behind the data")
        self._table = table

    def where(self, chunks: Ids) -> list[list[int]]:
        """First byte and length of chunks, `MISSING` where there is none."""
        extents: list[list[int]] = self._table[chunks].tolist()
        return extents

    def bytes_of(self, chunks: Ids) -> tuple[Ids, Ids]:
        """First bytes and the bytes after the last of those chunks that are there."""
        extents = self._table[chunks]
        extents = extents[extents[:, 0] != MISSING].astype(np.int64)
        return extents[:, 0], extents.sum(1)

    def unpack(self, array: ShardedArray, extent: list[int], out: NDArray[np.uint8]) -> None:
        """Fill out, uint8, with the bytes of a chunk.

        Args:
            array: Whose.
            extent: What `where` said of it.
            out: uint8 ``[N]``.

        Raises:
            CorruptError: The chunk is damaged.
        """
        if extent[0] == MISSING:
            out[:] = 0
            return
        try:
            array.codec.unpack(self.packed(extent), out)
        except UNREADABLE as error:
            raise self.damaged(
                f"the chunk at byte {extent[0]} does not unpack to {len(out)} bytes: {error}"
            ) from error

    def unpack_values(self, array: ShardedArray, extent: list[int]) -> ValueChunk:
        """The values of a chunk.

        Args:
            array: Whose, which holds values that vary.
            extent: What `where` said of the chunk.

        Raises:
            CorruptError: The chunk is damaged.
        """
        field, rows = array.values, array.chunk_rows
        assert field is not None
        if extent[0] == MISSING:
            return ValueChunk(np.empty(0, np.uint8), np.zeros(rows + 1, np.int64))
        try:
            packed = self.packed(extent)
            nbytes = array.codec.nbytes(packed)
            # Before memory is taken: what a chunk says may be anything.
            if not 0 <= nbytes <= values.max_chunk_nbytes(field, rows):
                raise ValueError(f"its header says {nbytes} bytes")
            chunk = np.empty(nbytes, np.uint8)
            array.codec.unpack(packed, chunk)
            return values.decode(chunk, rows, field)
        except UNREADABLE as error:
            raise self.damaged(
                f"the chunk at byte {extent[0]} does not hold {rows} values: {error}"
            ) from error

    def packed(self, extent: list[int]) -> memoryview:
        """Bytes of a chunk that is there, as they are stored.

        Raises:
            CorruptError: The file was cut.
            FailedError: The device refuses.
        """
        offset, nbytes = extent
        if self.pages is not None:
            return self._data[offset : offset + nbytes]
        data = memoryview(bytearray(nbytes))
        self._file.pread_into(data, offset)
        return data

    def damaged(self, problem: str) -> CorruptError:
        """The error for a shard that cannot be read."""
        return CorruptError(
            f"shard {self.path} is damaged: {problem}. Restore it from a copy{OR_REPAIR}."
        )


class ShardReader:
    """Reads rows of sealed ranges, through a bounded number of open shards.

    Threads: any; open shards are a dict, whose single steps are whole.
    """

    def __init__(self, folder: Path, ring: Ring, mapped: bool, advise: Advise) -> None:
        """Read below a group's folder; see `ReadPolicy`."""
        self._folder = folder
        self._ring = ring
        self._mapped, self._advise = mapped, advise
        self._ahead: dict[str, ChunksAhead] = {}
        self._max_open = _most_open()
        self._open: dict[tuple[str, int], tuple[int, Shard]] = {}
        self._chunks = ChunkCache[ChunkKey, Array](CACHE_NBYTES)
        self._values = ChunkCache[ChunkKey, ValueChunk](CACHE_NBYTES)

    def take_values(
        self,
        array: ShardedArray,
        range_ids: Ids,
        entries: Ids,
        within: Ids,
        nbytes: Ids,
        targets: Ids,
        out: Bytes,
    ) -> NDArray[np.bool_]:
        """Copy values that vary out.

        Args:
            array: Whose, which holds such values.
            range_ids: See `take`, as the next two.
            entries: Numbers of the ranges.
            within: Rows within them.
            nbytes: int64 ``[B]``, bytes of each value, as its reference says.
            targets: int64 ``[B]``, where each goes.
            out: uint8, where they go.

        Returns:
            bool ``[B]``: the values whose length is another, which are not copied.
        """
        differs = np.zeros(len(nbytes), np.bool_)
        for some, chunk, inner in self._by_chunk(array, range_ids, entries, within):
            begins = chunk.offsets[inner]
            differs[some] = chunk.offsets[inner + 1] - begins != nbytes[some]
            fits = ~differs[some]
            _copies.copy_spans(
                chunk.data, begins[fits], nbytes[some][fits], out, targets[some][fits], False
            )
        return differs

    def differing(
        self, array: ShardedArray, range_ids: Ids, entries: Ids, within: Ids, nbytes: Ids
    ) -> NDArray[np.bool_]:
        """Compare the lengths of values that vary, without a copy; see `take_values`.

        Returns:
            bool ``[B]``: the values whose length is another.
        """
        differs = np.zeros(len(nbytes), np.bool_)
        for some, chunk, inner in self._by_chunk(array, range_ids, entries, within):
            found = chunk.offsets[inner + 1] - chunk.offsets[inner]
            differs[some] = found != nbytes[some]
        return differs

    def _by_chunk(
        self, array: ShardedArray, range_ids: Ids, entries: Ids, within: Ids
    ) -> Iterator[tuple[Ids, ValueChunk, Ids]]:
        """Items by the chunk of their values: which, the chunk, and rows in it."""
        chunks, inner = self._where(array, within)
        keys = range_ids * array.num_chunks + chunks
        order = np.argsort(keys, kind="stable")
        for some in _groups(order, keys[order]):
            item = some[0]
            chunk = self._value_chunk(
                array, int(range_ids[item]), int(entries[item]), int(chunks[item])
            )
            yield some, chunk, inner[some]

    def take(
        self, array: ShardedArray, range_ids: Ids, entries: Ids, within: Ids, out: Array
    ) -> None:
        """Copy rows out.

        Args:
            array: Whose.
            range_ids: int64 ``[B]``, sealed ranges.
            entries: int64 ``[B]``, what the table said of each.
            within: int64 ``[B]``, rows counted within their ranges.
            out: ``[B, *shape]``.
        """
        chunks, inner = self._where(array, within)
        order = np.argsort(range_ids * array.num_chunks + chunks, kind="stable")
        if array.chunk_rows > 1:
            self._take_blocks(array, order, range_ids, entries, chunks, inner, out)
            return
        flat = out.reshape(len(out), -1).view(np.uint8)
        groups = list(_groups(order, range_ids[order]))
        waiting = [groups]
        while waiting:
            some = waiting.pop()
            packed = self._packed(array, some, range_ids, entries, chunks)
            if packed is None:
                # What is unpacked together stays open until it is.
                half = len(some) // 2
                waiting += [some[half:], some[:half]]
            elif len(some) == len(groups):
                unpack_all(array, packed, flat)
            else:
                items = np.sort(np.concatenate(some))
                unpacked = np.empty((len(items), flat.shape[1]), np.uint8)
                unpack_all(array, packed, unpacked)
                flat[items] = unpacked

    def _packed(
        self, array: ShardedArray, groups: Sequence[Ids], range_ids: Ids, entries: Ids, chunks: Ids
    ) -> list[Packed] | None:
        """The chunks of items, in their order; None for more shards than may be open.

        Each group is of one shard.
        """
        if len(groups) > self._max_open:
            return None
        packed: dict[int, Packed] = {}
        for some in groups:
            try:
                shard = self._shard(array, int(range_ids[some[0]]), int(entries[some[0]]))
            except FailedError as error:
                if error.errno not in OUT_OF_FILES or len(groups) == 1:
                    raise
                self._max_open = len(groups) // 2
                return None
            extents = shard.where(chunks[some])
            for item, extent in zip(some.tolist(), extents, strict=True):
                packed[item] = (shard, extent)
        return [packed[item] for item in sorted(packed)]

    def _take_blocks(
        self,
        array: ShardedArray,
        order: Ids,
        range_ids: Ids,
        entries: Ids,
        chunks: Ids,
        inner: Ids,
        out: Array,
    ) -> None:
        """Copy rows out of chunks of several, each unpacked once and cached."""
        keys = range_ids * array.num_chunks + chunks
        for some in _groups(order, keys[order]):
            item = some[0]
            range_id, entry, chunk = (int(range_ids[item]), int(entries[item]), int(chunks[item]))
            out[some] = self._chunk(array, range_id, entry, chunk)[inner[some]]

    def prefetch(self, array: ShardedArray, range_ids: Ids, entries: Ids, within: Ids) -> int:
        """Ask the disk for the rows' chunks, where some of a sample are missing.

        Args:
            array: Whose.
            range_ids: See `take`, as the next two.
            entries: Numbers of the ranges.
            within: Rows within them.

        Returns:
            Bytes asked for.
        """
        if not self._mapped or not len(range_ids):
            return 0
        chunks, _ = self._where(array, within)

        def extents(some: Ids) -> Iterator[tuple[ChunkPages, Ids, Ids]]:
            for same in _groups(some, range_ids[some]):
                range_id, entry = int(range_ids[same[0]]), int(entries[same[0]])
                shard = self._shard(array, range_id, entry)
                starts, stops = shard.bytes_of(chunks[same])
                if shard.pages is not None and len(starts):
                    yield shard.pages, starts, stops

        ahead = self._ahead.setdefault(array.name, ChunksAhead(self._advise))
        return ahead.ask(np.argsort(range_ids, kind="stable"), extents)

    def _where(self, array: ShardedArray, within: Ids) -> tuple[Ids, Ids]:
        """Chunks of rows, and their rows in them."""
        wide, steps = array.shard
        envs, size = array.chunk
        step, env = within // wide, within % wide
        chunk = env // envs * (steps // size) + step // size
        return chunk, env % envs * size + step % size

    def _chunk(self, array: ShardedArray, range_id: int, entry: int, chunk: int) -> Array:
        """A decoded chunk, ``[rows, *shape]``."""
        key = (array.name, range_id, entry, chunk)
        rows = self._chunks.get(key)
        if rows is None:
            rows = np.empty((array.chunk_rows, *array.shape), array.dtype)
            shard = self._shard(array, range_id, entry)
            (extent,) = shard.where(np.array([chunk]))
            shard.unpack(array, extent, rows.reshape(-1).view(np.uint8))
            self._chunks.put(key, rows)
        return rows

    def _value_chunk(
        self, array: ShardedArray, range_id: int, entry: int, chunk: int
    ) -> ValueChunk:
        """The values of a chunk."""
        key = (array.name, range_id, entry, chunk)
        values_of = self._values.get(key)
        if values_of is None:
            shard = self._shard(array, range_id, entry)
            (extent,) = shard.where(np.array([chunk]))
            values_of = shard.unpack_values(array, extent)
            self._values.put(key, values_of)
        return values_of

    def _shard(self, array: ShardedArray, range_id: int, entry: int) -> Shard:
        key = (array.name, range_id)
        known = self._open.get(key)
        if known is not None and known[0] == entry:
            return known[1]
        # Another thread may empty it meanwhile.
        keys = list(self._open)
        for oldest in keys[: max(0, 1 + len(keys) - self._max_open)]:
            self._open.pop(oldest, None)
        try:
            shard = self._opened(array, range_id)
        except FailedError as error:
            short = {*OUT_OF_FILES, errno.ENOMEM}
            if error.errno not in short or not self._open:
                raise
            # Those that are kept are of no use if the next one cannot be read.
            self._open = {}
            shard = self._opened(array, range_id)
        self._open[key] = (entry, shard)
        return shard

    def _opened(self, array: ShardedArray, range_id: int) -> Shard:
        path = self.path_of(array, range_id)
        try:
            file = File.open(path, None)
        except CorruptError:
            raise
        except FormatError as error:
            # A link, folder, pipe or socket costs its rows, as any damaged shard does.
            raise CorruptError(f"{str(error).rstrip('.')}{OR_REPAIR}.") from error
        try:
            return Shard(file, array, self._mapped, self._advise)
        except BaseException:
            file.close()
            raise

    def path_of(self, array: ShardedArray, range_id: int) -> Path:
        """File of the shard that holds a range's rows of an array."""
        return self._folder / shard_name(array, self._ring, range_id)

    def forget(self) -> None:
        """Let everything go."""
        self._open = {}
        self._chunks = ChunkCache(CACHE_NBYTES)
        self._values = ChunkCache(CACHE_NBYTES)


def _most_open() -> int:
    """Shards that may be open: at most a quarter of the process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft < 0 else max(1, min(MAX_OPEN, soft // 4))


def _groups(order: Ids, keys: Ids) -> Iterator[Ids]:
    """Cut an order into stretches of one key each; keys are in that order."""
    bounds = np.flatnonzero(np.diff(keys, prepend=-1))
    return iter(np.split(order, bounds[1:])) if len(order) else iter(())


Packed = tuple[Shard, list[int]]


def unpack_all(array: ShardedArray, packed: Sequence[Packed], out: NDArray[np.uint8]) -> None:
    """Unpack chunks, on a second thread too where that is sooner.

    Args:
        array: Whose.
        packed: Shard, and what `Shard.where` says of the chunk, of each.
        out: uint8 ``[K, N]``, where they go.
    """
    if len(packed) < 2 * FEW or array.chunk_nbytes < array.codec.nbytes_apart:
        _unpack_some(array, packed, out)
    else:
        half = len(packed) // 2
        run_both(
            lambda: _unpack_some(array, packed[half:], out[half:]),
            lambda: _unpack_some(array, packed[:half], out[:half]),
        )


def _unpack_some(array: ShardedArray, packed: Sequence[Packed], out: NDArray[np.uint8]) -> None:
    if all(extent[0] != MISSING for _, extent in packed):
        # One by one below, to tell which of them is damaged.
        with suppress(*UNREADABLE):
            chunks = [shard.packed(extent) for shard, extent in packed]
            array.codec.unpack_many(chunks, out)
            return
    for (shard, extent), row in zip(packed, out, strict=True):
        shard.unpack(array, extent, row)


FILE_NAME = "places.bin"
DTYPE = np.dtype("<u4")


class ShardStates:
    """The numbers of one generation."""

    def __init__(self, file: File, mapped: bool) -> None:
        """Look through a mapping of the file, or read it at each look."""
        self.file = file
        self._count = file.nbytes // DTYPE.itemsize
        self._numbers: NDArray[np.uint32] | None = None
        if mapped:
            self._numbers = np.frombuffer(file.map_readonly(), DTYPE)

    @classmethod
    def create(cls, folder: Path, count: int) -> ShardStates:
        """Create the file, of which no range is sealed."""
        nbytes = count * DTYPE.itemsize
        file = File.create(folder / FILE_NAME, nbytes)
        try:
            # To look at a hole through a mapping is a SIGBUS where tmpfs is full.
            file.pwrite(bytes(nbytes), 0)
            return cls(file, True)
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, folder: Path, count: int, *, writable: bool, mapped: bool) -> ShardStates:
        """Open the file, after checking its size."""
        nbytes = count * DTYPE.itemsize
        file = File.open(folder / FILE_NAME, nbytes, writable=writable)
        if writable:
            # After a sync that failed the kernel would owe the disk nothing of what
            # is there: the next sync must be one of what is written now.
            try:
                file.pwrite(file.pread(nbytes, 0), 0)
            except BaseException:
                file.close()
                raise
        return cls(file, mapped)

    def take(self, range_ids: Ids) -> Ids:
        """Numbers of ranges, int64 of their shape."""
        return self._all().take(range_ids).astype(np.int64)

    def get(self, range_id: int) -> int:
        """Number of one range."""
        return int(self._all()[range_id])

    def sealed(self) -> Ids:
        """Every sealed range, int64 ``[N]``."""
        return np.flatnonzero(self._all() & 1)

    def unmap(self) -> None:
        """Let the mapping go, once the file is closed."""
        self._numbers = None

    def _all(self) -> NDArray[np.uint32]:
        if self._numbers is not None:
            return self._numbers
        data = self.file.pread(self.file.nbytes, 0)
        return np.frombuffer(data, DTYPE)

    def put(self, range_id: int, number: int) -> None:
        """Change one number; readers see it at their next look."""
        data = np.array([number], DTYPE).tobytes()
        self.file.pwrite(data, range_id * DTYPE.itemsize)


ROLE_BITS = {"terminated": TERMINATED, "truncated": TRUNCATED}
WRITE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a publication says of the rows and of the values that vary.

    Attributes:
        heads: int64 ``[E]``.
        tails: int64 ``[E]``, rows below may have been overwritten, or are removed.
        heap_heads: int64 ``[E]``.
        heap_tails: int64 ``[E]``.
    """

    heads: Ids
    tails: Ids
    heap_heads: Ids
    heap_tails: Ids


class ShardMaker:
    """Writes and removes shard files; memory: one packed shard of one field.

    Attributes:
        bounds: Returns what is published now, by which values that vary are read.
    """

    def __init__(self, root: Path, metadata: Metadata, staging: MemmapStore) -> None:
        self.bounds: Callable[[], Bounds] | None = None
        self._root = root
        self._heap = staging.heap
        self._ring = metadata.ring
        self._arrays = group.arrays_of(metadata)
        self._served = group.served(metadata)
        self._placement = record_layout(metadata.schema)
        self._rows = _rows_of(staging)

    @contextmanager
    def made(self, range_id: int) -> Iterator[list[tuple[Path, Path]]]:
        """Write and sync a range's shards; those not renamed are removed at the end.

        Yields:
            Temporary and final path of each.
        """
        made: list[tuple[Path, Path]] = []
        try:
            for number, array in enumerate(self._arrays.values()):
                temporary = self._root / f"tmp-{number}"
                made.append((temporary, self._path(array, range_id)))
                self._write(temporary, array, range_id)
            yield made
        finally:
            for temporary, _ in made:
                files.remove_tree(temporary)

    def publish(self, made: list[tuple[Path, Path]]) -> None:
        """Put shards under their names, durably."""
        for temporary, target in made:
            rename(temporary, target)

    def remove(self, range_id: int) -> None:
        """Remove a range's shards."""
        for array in self._arrays.values():
            files.remove_tree(self._path(array, range_id))

    def compression(self, range_ids: NDArray[np.int64], rows: int) -> dict[str, tuple[int, int]]:
        """Per path, (bytes of some ranges' shards, bytes of the rows in them)."""
        nbytes_of = {}
        for path, array in self._arrays.items():
            # Of values that vary nothing says how many bytes a shard holds.
            if path == array.path != group.FLAGS_NAME and array.values is None:
                nbytes = 0
                for range_id in range_ids.tolist():
                    # A writer may remove it meanwhile.
                    with suppress(FileNotFoundError):
                        nbytes += self._path(array, range_id).lstat().st_size
                nbytes_of[path] = nbytes, rows * array.row_nbytes
        return nbytes_of

    def _path(self, array: ShardedArray, range_id: int) -> Path:
        return self._root / group.shard_name(array, self._ring, range_id)

    def _write(self, path: Path, array: ShardedArray, range_id: int) -> None:
        base = range_id * array.shard[0] * array.shard[1]

        def read(first: int, stop: int) -> Array:
            return self._values(array, np.arange(base + first, base + stop))

        def read_values(first: int, stop: int) -> Bytes:
            return self._encoded(array, range_id, np.arange(base + first, base + stop))

        if array.values is None:
            chunks = encode(array, read)
        else:
            chunks = encode_values(array, read_values)
        files.remove_tree(path)
        file = File.create(path, sum(len(chunk) for chunk in chunks))
        try:
            offset = 0
            for data in _joined(chunks):
                file.pwrite(data, offset)
                offset += len(data)
            file.sync()
        finally:
            file.close()

    def _encoded(self, array: ShardedArray, range_id: int, rows: Ids) -> Bytes:
        """The chunk of values of rows that are in the staging files.

        Rows that are not alive have none: nothing may be left of their values. One that
        was damaged in the heap goes along as it is, for `verify` to find by the
        checksum in its reference.
        """
        field, heap, ring = array.values, self._heap, self._ring
        assert field is not None
        assert heap is not None
        assert self.bounds is not None
        record = self._placement.record
        assert record is not None
        packed = np.ascontiguousarray(self._read(RECORDS, rows)).view(record)
        references = np.ascontiguousarray(packed[array.path])
        env_id, slot = divmod(int(rows[0]), ring.slots)
        ids = np.full(len(rows), env_id)
        before = self.bounds()
        fits = legal(references, field, heap.nbytes, before.heap_tails[ids], before.heap_heads[ids])
        references[~fits] = np.zeros((), REFERENCE)
        nbytes = nbytes_of(references, field)
        data = np.empty(int(nbytes.sum()), np.uint8)
        heap.take(offsets(references, ids, heap.nbytes), nbytes, data)
        begins = np.cumsum(nbytes) - nbytes
        # The newest rows that lie here, and may since have been removed.
        after = self.bounds()
        head = int(after.heads[env_id])
        positions = head - 1 - (head - 1 - slot) % ring.slots + np.arange(len(rows))
        alive = (positions >= after.tails[env_id]) & (positions < head)
        nbytes = np.where(alive, nbytes, 0)
        if field.kind == "text":
            nbytes = values.text_nbytes(data, begins, nbytes)
        return values.encode(data, begins, nbytes)

    def _values(self, array: ShardedArray, rows: Ids) -> NDArray[np.generic]:
        """What an array says of rows that are in the staging files."""
        path = array.path
        role = self._served.get(path)
        if path == group.FLAGS_NAME or role is not None:
            flags = self._read(FLAGS, rows).view(np.uint8)
            return flags if role is None else (flags & ROLE_BITS[role]) != 0
        name = self._placement.large.get(path)
        if name is not None:
            return self._read(name, rows)
        record = self._placement.record
        assert record is not None
        column = np.ascontiguousarray(self._read(RECORDS, rows).view(record)[path])
        if column.dtype == REFERENCE:
            return column.view(np.uint8).reshape(len(rows), -1)
        return column

    def _read(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.generic]:
        reader = self._rows[name]
        return reader.take(rows, np.empty((len(rows), *reader.shape), reader.dtype))


def _rows_of(staging: MemmapStore) -> dict[str, ReadRows]:
    """The tail's rows by file's name, read and not mapped.

    A range that is sealed before it is full has holes, which are read as zeros; read
    through a mapping they kill the process where tmpfs is full.
    """
    placement = record_layout(staging.schema)
    opened = {file.path.name: file for file in staging.files}
    rows = {FLAGS: ReadRows(opened[FLAGS], np.dtype(np.uint8), (), "never")}
    if placement.record is not None:
        raw = np.dtype((np.void, placement.stride))
        rows[RECORDS] = ReadRows(opened[RECORDS], raw, (), "never")
    for path, name in placement.large.items():
        field = staging.schema.fields[path]
        rows[name] = ReadRows(opened[name], field.numpy, field.shape, "never")
    return rows


def _joined(chunks: list[Any]) -> Iterator[bytes]:
    """Put a shard's parts together, a MiB or so at a time."""
    joined: list[Any] = []
    nbytes = 0
    for chunk in chunks:
        joined.append(chunk)
        nbytes += len(chunk)
        if nbytes >= WRITE_NBYTES:
            yield b"".join(joined)
            joined, nbytes = [], 0
    yield b"".join(joined)
