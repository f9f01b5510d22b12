"""Reads rows of Zarr arrays of other writers: fetches, unpacks and caches chunks."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import CorruptError
from mmreplay.storage.zarr.chunk_cache import ChunkCache
from mmreplay.storage.zarr.shards import MISSING
from mmreplay.zarr_groups.blobs import Blobs, Extent
from mmreplay.zarr_groups.codecs import max_packed_nbytes
from mmreplay.zarr_groups.metadata import ForeignArray

Array = NDArray[np.generic]
Ids = NDArray[np.int64]
Coordinates = tuple[int, ...]
Key = tuple[str, Coordinates]
CACHE_NBYTES = 64 << 20
"""Bytes of unpacked chunks that are cached."""
INDEX_CACHE_NBYTES = 32 << 20
FETCH_NBYTES = 32 << 20
FETCH_CHUNKS = 256
"""Chunks that are fetched at once, and their bytes unpacked; one in any case."""


class ChunkedReader:
    """Reads items of a group's arrays by their first coordinates.

    Attributes:
        missing: Chunks that were not there when they were read, by array.
    """

    def __init__(self, blobs: Blobs, *, complete: bool = False) -> None:
        """Make one.

        Args:
            blobs: The group.
            complete: Blobs that are not there are damage, not fill values.
        """
        self._blobs, self._complete = blobs, complete
        self.missing: dict[str, int] = {}
        self._missing: set[Key] = set()
        self._chunks = ChunkCache[Key, Array](CACHE_NBYTES)
        self._indices = ChunkCache[Key, Array](INDEX_CACHE_NBYTES)

    def take(self, array: ForeignArray, at: Sequence[Ids], out: Array) -> None:
        """Copy items out.

        Args:
            array: Whose.
            at: int64 ``[B]`` each, coordinates along the first axes, within its shape.
            out: ``[B, *rest]``, the shape along the other axes.

        Raises:
            CorruptError: A chunk is damaged.
            FormatError: A blob is larger than it can be.
        """
        lead = len(at)
        sizes = array.chunk[:lead]
        chunks = np.stack([n // size for n, size in zip(at, sizes, strict=True)])
        within = [n % size for n, size in zip(at, sizes, strict=True)]
        spread = [-(-n // size) for n, size in zip(array.shape, sizes, strict=False)]
        keys = np.ravel_multi_index(tuple(chunks), tuple(spread))
        order = np.argsort(keys, kind="stable")
        bounds = np.flatnonzero(np.diff(keys[order], prepend=-1))
        groups = np.split(order, bounds[1:])
        rest = [
            range(-(-n // size))
            for n, size in zip(array.shape[lead:], array.chunk[lead:], strict=True)
        ]
        wanted = [
            ((*chunks[:, some[0]].tolist(), *behind), some)
            for some in groups
            if len(some)
            for behind in product(*rest)
        ]
        for first, stop in _batches(len(wanted), array.chunk_nbytes):
            batch = wanted[first:stop]
            unpacked = self._take_chunks(array, [coordinates for coordinates, _ in batch])
            for coordinates, some in batch:
                self._copy(array, unpacked[coordinates], coordinates[lead:], within, some, out)

    @staticmethod
    def _copy(
        array: ForeignArray,
        chunk: Array,
        behind: Coordinates,
        within: list[Ids],
        some: Ids,
        out: Array,
    ) -> None:
        """Copy what one chunk has of some items into the result."""
        lead = len(within)
        into: list[Any] = [some]
        source: list[Any] = [within_axis[some] for within_axis in within]
        for at, size, length in zip(behind, array.chunk[lead:], array.shape[lead:], strict=True):
            first, stop = at * size, min(length, (at + 1) * size)
            into.append(slice(first, stop))
            source.append(slice(0, stop - first))
        out[tuple(into)] = chunk[tuple(source)]

    def _take_chunks(
        self, array: ForeignArray, wanted: list[Coordinates]
    ) -> dict[Coordinates, Array]:
        """Unpacked chunks; those that are not cached are fetched at once."""
        unpacked: dict[Coordinates, Array] = {}
        missing: list[Coordinates] = []
        for coordinates in wanted:
            cached = self._chunks.get((array.name, coordinates))
            if cached is None:
                missing.append(coordinates)
            else:
                unpacked[coordinates] = cached
        if not missing:
            return unpacked
        extents = self._extents(array, missing)
        there = [extent for extent in extents if extent is not None]
        data = iter(self._blobs.fetch(there, max_packed_nbytes(array.chunk_nbytes)))
        for coordinates, extent in zip(missing, extents, strict=True):
            packed = None if extent is None else next(data)
            if packed is None and self._complete:
                raise self._damaged(array, coordinates, "it is missing")
            if packed is None and (array.name, coordinates) not in self._missing:
                self._missing.add((array.name, coordinates))
                self.missing[array.name] = self.missing.get(array.name, 0) + 1
            unpacked[coordinates] = self._unpacked(array, coordinates, packed)
            self._chunks.put((array.name, coordinates), unpacked[coordinates])
        return unpacked

    def _unpacked(
        self, array: ForeignArray, coordinates: Coordinates, packed: bytes | None
    ) -> Array:
        if packed is None:
            return np.full(array.chunk, array.fill)
        try:
            data = array.codecs.unpack(packed, array.chunk_nbytes)
        except ValueError as error:
            problem = f"it does not unpack to {array.chunk_nbytes} bytes: {error}"
            raise self._damaged(array, coordinates, problem) from error
        flat: Array = np.frombuffer(data, array.dtype)
        lying = flat.reshape([array.chunk[axis] for axis in array.order])
        plain = lying.transpose(np.argsort(array.order))
        return np.ascontiguousarray(plain, array.dtype.newbyteorder("="))

    def _extents(self, array: ForeignArray, wanted: list[Coordinates]) -> list[Extent | None]:
        """Where packed chunks lie; None where there is none."""
        if not array.sharded:
            return [Extent(array.blob(coordinates)) for coordinates in wanted]
        inner = array.inner
        shards = [tuple(n // size for n, size in zip(p, inner, strict=True)) for p in wanted]
        indices = self._take_indices(array, list(dict.fromkeys(shards)))
        extents: list[Extent | None] = []
        for coordinates, shard in zip(wanted, shards, strict=True):
            index = indices[shard]
            at = tuple(n % size for n, size in zip(coordinates, inner, strict=True))
            first, nbytes = index[at].tolist() if len(index) else (MISSING, MISSING)
            if first == MISSING:
                extents.append(None)
                continue
            if first + nbytes >= 1 << 62:
                problem = f"its {nbytes} bytes at byte {first} are outside of the shard"
                raise self._damaged(array, coordinates, problem)
            extents.append(Extent(array.blob(shard), first, nbytes))
        return extents

    def _take_indices(
        self, array: ForeignArray, shards: list[Coordinates]
    ) -> dict[Coordinates, NDArray[np.uint64]]:
        """Indices of shards, uint64 ``[*inner, 2]``; empty where there is none."""
        indices: dict[Coordinates, NDArray[np.uint64]] = {}
        missing = []
        for shard in shards:
            cached = self._indices.get((array.name, shard))
            if cached is None:
                missing.append(shard)
            else:
                indices[shard] = cached  # type: ignore[assignment]  # only these are put there
        size = 16 * math.prod(array.inner) + 4 * array.index_checked
        first = 0 if array.index_first else -size
        for at, stop in _batches(len(missing), size):
            batch = missing[at:stop]
            wanted = [Extent(array.blob(shard), first, size) for shard in batch]
            for shard, data in zip(batch, self._blobs.fetch(wanted, size), strict=True):
                indices[shard] = self._index(array, shard, data)
                self._indices.put((array.name, shard), indices[shard])
        return indices

    def _index(
        self, array: ForeignArray, shard: Coordinates, data: bytes | None
    ) -> NDArray[np.uint64]:
        if data is None:
            return np.empty((0, 2), np.uint64)
        if array.index_checked:
            data, stored = data[:-4], struct.unpack("<I", data[-4:])[0]
            if google_crc32c.value(data) != stored:
                raise self._damaged(array, shard, "its index does not match its checksum")
        return np.frombuffer(data, "<u8").reshape(*array.inner, 2)

    def _damaged(self, array: ForeignArray, coordinates: Coordinates, problem: str) -> CorruptError:
        return CorruptError(
            f"{self._blobs.where}: chunk {list(coordinates)} of array {array.name!r} "
            f"is damaged: {problem}. Restore the group from a copy."
        )


def _batches(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Stretches of so many items that are fetched at once, each of some bytes."""
    size = max(1, min(FETCH_CHUNKS, FETCH_NBYTES // max(1, nbytes)))
    for first in range(0, count, size):
        yield first, min(first + size, count)
