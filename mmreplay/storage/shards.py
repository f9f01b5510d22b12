"""Shards of the sharding_indexed codec: written whole, read chunk by chunk."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import CorruptError
from mmreplay.files import File
from mmreplay.ring import Ring
from mmreplay.storage.zarr_group import ShardedArray, shard_name

Array = NDArray[np.generic]
Ids = NDArray[np.int64]
MISSING = (1 << 64) - 1
MAX_OPEN = 4096
"""Shards kept mapped at a time, of all fields."""
MAX_READ = 64
"""Shards kept where they are read whole instead."""
CACHE_NBYTES = 64 << 20


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
    parts: list[Any] = []
    index = np.empty((array.num_chunks, 2), "<u8")
    offset = number = 0
    for env in range(0, wide, envs):
        for step in range(0, steps, size):
            block = grid[step : step + size, env : env + envs].swapaxes(0, 1)
            raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            part = memoryview(array.codec.pack(raw)).cast("B")
            parts.append(part)
            index[number] = offset, part.nbytes
            offset, number = offset + part.nbytes, number + 1
    data = index.tobytes()
    return [*parts, data + struct.pack("<I", google_crc32c.value(data))]


class Shard:
    """One open shard.

    Attributes:
        offsets: Per chunk, first byte and length.
    """

    def __init__(self, file: File, array: ShardedArray, mapped: bool) -> None:
        """Read and check the index.

        Raises:
            CorruptError: It is damaged.
        """
        self.path = file.path
        size = 16 * array.num_chunks + 4
        if file.nbytes < size:
            raise self.damaged(f"{file.nbytes} bytes", f"an index of {size}")
        data: Any = file.map_readonly() if mapped else file.pread(file.nbytes, 0)
        self._data = memoryview(data)
        index = bytes(self._data[-size:-4])
        if google_crc32c.value(index) != struct.unpack("<I", self._data[-4:])[0]:
            raise self.damaged("an index that differs", "one of its checksum")
        table = np.frombuffer(index, "<u8").reshape(-1, 2)
        there = table[:, 0] != MISSING
        ends = table[there].astype(object).sum(axis=1)
        if len(ends) and ends.max() > file.nbytes - size:
            raise self.damaged("a chunk past the end", "chunks before the index")
        self._offsets: list[list[int]] = table.tolist()

    def unpack(self, array: ShardedArray, chunk: int, out: NDArray[np.uint8]) -> None:
        """Fill out, uint8, with a chunk's bytes.

        Raises:
            CorruptError: The chunk is damaged.
        """
        offset, nbytes = self._offsets[chunk]
        if offset == MISSING:
            out[:] = 0
            return
        try:
            array.codec.unpack(self._data[offset : offset + nbytes], out)
        except (ValueError, RuntimeError, struct.error) as error:
            got = f"chunk {chunk} at byte {offset}: {error}"
            raise self.damaged(got, f"{len(out)} bytes") from error

    def damaged(self, got: str, expected: str) -> CorruptError:
        """The error for what cannot be read."""
        return CorruptError(
            f"{self.path}: got {got}, expected {expected}; the shard is damaged: "
            "restore it from a copy"
        )


class ShardReader:
    """Reads rows of sealed places, through a bounded number of open shards.

    Threads: any; the two caches are dicts, whose single steps are whole.
    """

    def __init__(self, folder: Path, ring: Ring, mapped: bool) -> None:
        """Read below a group's folder."""
        self._folder = folder
        self._ring = ring
        self._mapped = mapped
        self._open: dict[tuple[str, int], tuple[int, Shard]] = {}
        self._chunks: dict[tuple[str, int, int, int], Array] = {}
        self._cached_nbytes = 0

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
        keys = places * array.num_chunks + chunks
        order = np.argsort(keys, kind="stable")
        if array.chunk_rows == 1:
            flat = out.reshape(len(out), -1).view(np.uint8)
            listed = zip(
                order.tolist(), places[order].tolist(), entries[order].tolist(),
                chunks[order].tolist(), strict=True,
            )  # fmt: skip
            for item, place, entry, chunk in listed:
                self._shard(array, place, entry).unpack(array, chunk, flat[item])
            return
        ordered = keys[order]
        edges = np.flatnonzero(np.diff(ordered, prepend=-1))
        for at, stop in zip(edges, [*edges[1:], len(order)], strict=True):
            some = order[at:stop]
            item = some[0]
            place, entry, chunk = (
                int(places[item]),
                int(entries[item]),
                int(chunks[item]),
            )
            out[some] = self._chunk(array, place, entry, chunk)[inner[some]]

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
            shard.unpack(array, chunk, found.reshape(-1).view(np.uint8))
            self._cached_nbytes += found.nbytes
            while self._cached_nbytes > CACHE_NBYTES and self._chunks:
                oldest = self._chunks.pop(next(iter(list(self._chunks))), None)
                self._cached_nbytes -= 0 if oldest is None else oldest.nbytes
            self._chunks[key] = found
        return found

    def _shard(self, array: ShardedArray, place: int, entry: int) -> Shard:
        key = (array.path, place)
        known = self._open.get(key)
        if known is not None and known[0] == entry:
            return known[1]
        path = self._folder / shard_name(array, self._ring, place)
        file = File.open(path, None)
        try:
            shard = Shard(file, array, self._mapped)
        finally:
            file.close()
        most = MAX_OPEN if self._mapped else MAX_READ
        while len(self._open) >= most:
            self._open.pop(next(iter(list(self._open))), None)
        self._open[key] = (entry, shard)
        return shard

    def forget(self) -> None:
        """Let everything go."""
        self._open, self._chunks = {}, {}
        self._cached_nbytes = 0
