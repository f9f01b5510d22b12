"""Shards of the sharding_indexed codec: written whole, read chunk by chunk."""

from __future__ import annotations

import errno
import resource
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import (
    OR_REPAIR,
    OUT_OF_FILES,
    CorruptError,
    FailedError,
    FormatError,
)
from mmreplay.files import File
from mmreplay.ring import Ring
from mmreplay.storage.beside import beside
from mmreplay.storage.kept import Kept
from mmreplay.storage.policy import Advise
from mmreplay.storage.shard_pages import ChunkPages, ChunksAhead
from mmreplay.storage.zarr_group import ShardedArray, shard_name

Array = NDArray[np.generic]
Ids = NDArray[np.int64]
ChunkKey = tuple[str, int, int, int]
"""Array, place, its number, and the chunk in it."""
MISSING = (1 << 64) - 1
MAX_OPEN = 4096
"""Shards kept open at a time, of all fields, where the process may open so many
files: Python keeps a descriptor for each mapping, too. See `_most_open`."""
CACHE_NBYTES = 64 << 20
UNREADABLE = (ValueError, RuntimeError, struct.error)
"""What codecs raise of bytes that are no chunk."""
FEW = 8
"""Chunks for which no second thread is started."""


def encode(array: ShardedArray, rows: Array, ring: Ring) -> list[Any]:
    """Pack a place's rows; return the parts of its file, in order.

    Args:
        array: Whose.
        rows: ``[R, *shape]``, in the order of the ring's rows.
        ring: The ring.
    """
    wide, steps = array.shard
    envs, size = array.chunk
    grid = rows.reshape(steps, wide, *array.shape)
    corners = [(e, s) for e in range(0, wide, envs) for s in range(0, steps, size)]
    parts: list[Any] = [None] * len(corners)

    def pack(first: int, stop: int) -> None:
        for number in range(first, stop):
            env, step = corners[number]
            block = grid[step : step + size, env : env + envs].swapaxes(0, 1)
            raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            parts[number] = memoryview(array.codec.pack(raw)).cast("B")

    half = len(corners) // 2
    if half < FEW or array.chunk_nbytes < array.codec.nbytes_apart:
        pack(0, len(corners))
    else:
        beside(lambda: pack(half, len(corners)), lambda: pack(0, half))
    lengths = np.array([part.nbytes for part in parts], "<u8")
    index = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1).astype("<u8")
    data = index.tobytes()
    return [*parts, data + struct.pack("<I", google_crc32c.value(data))]


class Shard:
    """One open shard.

    Attributes:
        path: Its file.
        pages: Of its mapping, if there is one.
    """

    def __init__(
        self, file: File, array: ShardedArray, mapped: bool, advise: Advise
    ) -> None:
        """Read and check the index; the file is the shard's own from here on.

        Raises:
            CorruptError: It is damaged.
        """
        self.path = file.path
        size = 16 * array.num_chunks + 4
        if file.nbytes < size:
            raise self.damaged(f"{file.nbytes} bytes", f"an index of {size}")
        # Whoever still unpacks holds the shard, and with it the file or its mapping.
        self._file, self.pages = file, None
        self._data = memoryview(b"")
        if mapped:
            mapping = file.map_readonly()
            file.close()
            self.pages = ChunkPages(mapping, advise)
            self._data = memoryview(mapping)
        tail = self.packed([file.nbytes - size, size])
        index = bytes(tail[:-4])
        if google_crc32c.value(index) != struct.unpack("<I", tail[-4:])[0]:
            raise self.damaged("an index that differs", "one of its checksum")
        table = np.frombuffer(index, "<u8").reshape(-1, 2)
        there = table[:, 0] != MISSING
        most = np.uint64(file.nbytes - size)
        # A sum of the two might wrap.
        wrong = (table[there] > most).any(1) | (
            table[there, 0] > most - table[there, 1]
        )
        if wrong.any():
            raise self.damaged("a chunk past the end", "chunks before the index")
        self._table = table

    def where(self, chunks: Ids) -> list[list[int]]:
        """First byte and length of chunks, `MISSING` where there is none."""
        found: list[list[int]] = self._table[chunks].tolist()
        return found

    def bytes_of(self, chunks: Ids) -> tuple[Ids, Ids]:
        """First bytes and the bytes after the last of those chunks that are there."""
        found = self._table[chunks]
        found = found[found[:, 0] != MISSING].astype(np.int64)
        return found[:, 0], found.sum(1)

    def unpack(
        self, array: ShardedArray, extent: list[int], out: NDArray[np.uint8]
    ) -> None:
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
            got = f"a chunk at byte {extent[0]}: {error}"
            raise self.damaged(got, f"{len(out)} bytes") from error

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

    def damaged(self, got: str, expected: str) -> CorruptError:
        """The error for what cannot be read."""
        return CorruptError(
            f"{self.path}: got {got}, expected {expected}; the shard is damaged: "
            f"restore it from a copy{OR_REPAIR}"
        )


class ShardReader:
    """Reads rows of sealed places, through a bounded number of open shards.

    Threads: any; open shards are a dict, whose single steps are whole.
    """

    def __init__(self, folder: Path, ring: Ring, mapped: bool, advise: Advise) -> None:
        """Read below a group's folder; see `ReadPolicy`."""
        self._folder = folder
        self._ring = ring
        self._mapped, self._advise = mapped, advise
        self._ahead: dict[str, ChunksAhead] = {}
        self._most = _most_open()
        self._open: dict[tuple[str, int], tuple[int, Shard]] = {}
        self._chunks = Kept[ChunkKey](CACHE_NBYTES)

    def take(
        self, array: ShardedArray, places: Ids, entries: Ids, within: Ids, out: Array
    ) -> None:
        """Copy rows out.

        Args:
            array: Whose.
            places: int64 ``[B]``, sealed places.
            entries: int64 ``[B]``, what the table said of each.
            within: int64 ``[B]``, rows counted within their places.
            out: ``[B, *shape]``.
        """
        chunks, inner = self._where(array, within)
        order = np.argsort(places * array.num_chunks + chunks, kind="stable")
        if array.chunk_rows > 1:
            self._take_blocks(array, order, places, entries, chunks, inner, out)
            return
        flat = out.reshape(len(out), -1).view(np.uint8)
        groups = list(_groups(order, places[order]))
        waiting = [groups]
        while waiting:
            part = waiting.pop()
            found = self._packed(array, part, places, entries, chunks)
            if found is None:
                # What is unpacked together stays open until it is.
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
            elif len(part) == len(groups):
                unpack_all(array, found, flat)
            else:
                items = np.sort(np.concatenate(part))
                unpacked = np.empty((len(items), flat.shape[1]), np.uint8)
                unpack_all(array, found, unpacked)
                flat[items] = unpacked

    def _packed(
        self,
        array: ShardedArray,
        groups: Sequence[Ids],
        places: Ids,
        entries: Ids,
        chunks: Ids,
    ) -> list[Packed] | None:
        """The chunks of items, in their order; None for more shards than may be open.

        Each group is of one shard.
        """
        if len(groups) > self._most:
            return None
        found: dict[int, Packed] = {}
        for some in groups:
            try:
                shard = self._shard(array, int(places[some[0]]), int(entries[some[0]]))
            except FailedError as error:
                if error.errno not in OUT_OF_FILES or len(groups) == 1:
                    raise
                self._most = len(groups) // 2
                return None
            extents = shard.where(chunks[some])
            for item, extent in zip(some.tolist(), extents, strict=True):
                found[item] = (shard, extent)
        return [found[item] for item in sorted(found)]

    def _take_blocks(
        self,
        array: ShardedArray,
        order: Ids,
        places: Ids,
        entries: Ids,
        chunks: Ids,
        inner: Ids,
        out: Array,
    ) -> None:
        """Copy rows out of chunks of several, each unpacked once and kept."""
        keys = places * array.num_chunks + chunks
        for some in _groups(order, keys[order]):
            item = some[0]
            place, entry, chunk = (
                int(places[item]), int(entries[item]), int(chunks[item]),
            )  # fmt: skip
            out[some] = self._chunk(array, place, entry, chunk)[inner[some]]

    def prefetch(
        self, array: ShardedArray, places: Ids, entries: Ids, within: Ids
    ) -> int:
        """Ask the disk for the rows' chunks, where some of a sample are missing.

        Args:
            array: Whose.
            places: See `take`, as the next two.
            entries: Numbers of the places.
            within: Rows within them.

        Returns:
            Bytes asked for.
        """
        if not self._mapped or not len(places):
            return 0
        chunks, _ = self._where(array, within)

        def extents(some: Ids) -> Iterator[tuple[ChunkPages, Ids, Ids]]:
            for same in _groups(some, places[some]):
                place, entry = int(places[same[0]]), int(entries[same[0]])
                shard = self._shard(array, place, entry)
                starts, stops = shard.bytes_of(chunks[same])
                if shard.pages is not None and len(starts):
                    yield shard.pages, starts, stops

        ahead = self._ahead.setdefault(array.path, ChunksAhead(self._advise))
        return ahead.ask(np.argsort(places, kind="stable"), extents)

    def _where(self, array: ShardedArray, within: Ids) -> tuple[Ids, Ids]:
        """Chunks of rows, and their rows in them."""
        wide, steps = array.shard
        envs, size = array.chunk
        step, env = within // wide, within % wide
        chunk = env // envs * (steps // size) + step // size
        return chunk, env % envs * size + step % size

    def _chunk(self, array: ShardedArray, place: int, entry: int, chunk: int) -> Array:
        """A decoded chunk, ``[rows, *shape]``."""
        key = (array.path, place, entry, chunk)
        found = self._chunks.get(key)
        if found is None:
            found = np.empty((array.chunk_rows, *array.shape), array.dtype)
            shard = self._shard(array, place, entry)
            (extent,) = shard.where(np.array([chunk]))
            shard.unpack(array, extent, found.reshape(-1).view(np.uint8))
            self._chunks.put(key, found)
        return found

    def _shard(self, array: ShardedArray, place: int, entry: int) -> Shard:
        key = (array.path, place)
        known = self._open.get(key)
        if known is not None and known[0] == entry:
            return known[1]
        # Another thread may empty it meanwhile.
        kept = list(self._open)
        for oldest in kept[: max(0, 1 + len(kept) - self._most)]:
            self._open.pop(oldest, None)
        try:
            shard = self._opened(array, place)
        except FailedError as error:
            short = {*OUT_OF_FILES, errno.ENOMEM}
            if error.errno not in short or not self._open:
                raise
            # Those that are kept are of no use if the next one cannot be read.
            self._open = {}
            shard = self._opened(array, place)
        self._open[key] = (entry, shard)
        return shard

    def _opened(self, array: ShardedArray, place: int) -> Shard:
        path = self._folder / shard_name(array, self._ring, place)
        try:
            file = File.open(path, None)
        except CorruptError:
            raise
        except FormatError as error:
            # A link, folder, pipe or socket costs its rows, as any damaged shard does.
            raise CorruptError(f"{error}{OR_REPAIR}") from error
        try:
            return Shard(file, array, self._mapped, self._advise)
        except BaseException:
            file.close()
            raise

    def forget(self) -> None:
        """Let everything go."""
        self._open, self._chunks = {}, Kept(CACHE_NBYTES)


def _most_open() -> int:
    """Shards kept open: a quarter of the files that the process may have, at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft < 0 else max(1, min(MAX_OPEN, soft // 4))


def _groups(order: Ids, keys: Ids) -> Iterator[Ids]:
    """Cut an order into stretches of one key each; keys are in that order."""
    edges = np.flatnonzero(np.diff(keys, prepend=-1))
    return iter(np.split(order, edges[1:])) if len(order) else iter(())


Packed = tuple[Shard, list[int]]


def unpack_all(
    array: ShardedArray, found: Sequence[Packed], out: NDArray[np.uint8]
) -> None:
    """Unpack chunks, on a second thread too where that is sooner.

    Args:
        array: Whose.
        found: Shard, and what `Shard.where` says of the chunk, of each.
        out: uint8 ``[K, N]``, where they go.
    """
    if len(found) < 2 * FEW or array.chunk_nbytes < array.codec.nbytes_apart:
        _unpack_some(array, found, out)
    else:
        half = len(found) // 2
        beside(
            lambda: _unpack_some(array, found[half:], out[half:]),
            lambda: _unpack_some(array, found[:half], out[:half]),
        )


def _unpack_some(
    array: ShardedArray, found: Sequence[Packed], out: NDArray[np.uint8]
) -> None:
    if all(extent[0] != MISSING for _, extent in found):
        # One by one below, to tell which of them is damaged.
        with suppress(*UNREADABLE):
            parts = [shard.packed(extent) for shard, extent in found]
            array.codec.unpack_many(parts, out)
            return
    for (shard, extent), row in zip(found, out, strict=True):
        shard.unpack(array, extent, row)
