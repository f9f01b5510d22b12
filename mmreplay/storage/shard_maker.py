"""Makes the shards of one place out of the tail's rows, under temporary names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import files
from mmreplay.episodes import TERMINATED, TRUNCATED
from mmreplay.files import File, rename
from mmreplay.format.metadata import Metadata
from mmreplay.storage import shards, zarr_group
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.placement import FLAGS, RECORDS, place
from mmreplay.storage.readers import ReadRows
from mmreplay.storage.zarr_group import ShardedArray

ROLE_BITS = {"terminated": TERMINATED, "truncated": TRUNCATED}
PIECE_NBYTES = 1 << 20


class ShardMaker:
    """Writes and removes shard files; memory: one shard of one field."""

    def __init__(self, root: Path, metadata: Metadata, tail: MemmapStore) -> None:
        self._root = root
        self._ring = metadata.ring
        self._arrays = zarr_group.arrays_of(metadata)
        self._served = zarr_group.served(metadata)
        self._placement = place(metadata.schema)
        self._rows = _rows_of(tail)

    @contextmanager
    def made(self, place: int) -> Iterator[list[tuple[Path, Path]]]:
        """Write and sync a place's shards; those not renamed go at the end.

        Yields:
            Temporary and final path of each.
        """
        made: list[tuple[Path, Path]] = []
        try:
            for number, array in enumerate(self._arrays.values()):
                temporary = self._root / f"tmp-{number}"
                made.append((temporary, self._path(array, place)))
                self._write(temporary, array, place)
            yield made
        finally:
            for temporary, _ in made:
                files.remove_tree(temporary)

    def publish(self, made: list[tuple[Path, Path]]) -> None:
        """Put shards under their names, durably."""
        for temporary, target in made:
            rename(temporary, target)

    def remove(self, place: int) -> None:
        """Remove a place's shards."""
        for array in self._arrays.values():
            files.remove_tree(self._path(array, place))

    def compression(
        self, places: NDArray[np.int64], rows: int
    ) -> dict[str, tuple[int, int]]:
        """Per path, (bytes of some places' shards, bytes of the rows in them)."""
        found = {}
        for path, array in self._arrays.items():
            if path != zarr_group.FLAGS_NAME:
                nbytes = 0
                for place in places.tolist():
                    # A writer may remove it meanwhile.
                    with suppress(FileNotFoundError):
                        nbytes += self._path(array, place).lstat().st_size
                found[path] = nbytes, rows * array.row_nbytes
        return found

    def _path(self, array: ShardedArray, place: int) -> Path:
        return self._root / zarr_group.shard_name(array, self._ring, place)

    def _write(self, path: Path, array: ShardedArray, place: int) -> None:
        size = array.shard[0] * array.shard[1]
        rows = np.arange(size) + place * size
        parts = shards.encode(array, self._values(array.path, rows), self._ring)
        files.remove_tree(path)
        file = File.create(path, sum(len(part) for part in parts))
        try:
            offset = 0
            for data in _pieces(parts):
                file.pwrite(data, offset)
                offset += len(data)
            file.sync()
        finally:
            file.close()

    def _values(self, path: str, rows: NDArray[np.int64]) -> NDArray[np.generic]:
        """What an array says of rows that are in the tail."""
        role = self._served.get(path)
        if path == zarr_group.FLAGS_NAME or role is not None:
            flags = self._read(FLAGS, rows).view(np.uint8)
            return flags if role is None else (flags & ROLE_BITS[role]) != 0
        name = self._placement.large.get(path)
        if name is not None:
            return self._read(name, rows)
        record = self._placement.record
        assert record is not None
        return np.ascontiguousarray(self._read(RECORDS, rows).view(record)[path])

    def _read(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.generic]:
        reader = self._rows[name]
        return reader.take(rows, np.empty((len(rows), *reader.shape), reader.dtype))


def _rows_of(tail: MemmapStore) -> dict[str, ReadRows]:
    """The tail's rows by file's name, read and not mapped.

    A place that is sealed before it is full has holes, which are read as zeros; read
    through a mapping they kill the process where tmpfs is full.
    """
    placement = place(tail.schema)
    opened = {each.path.name: each for each in tail.files}
    found = {FLAGS: ReadRows(opened[FLAGS], np.dtype(np.uint8), (), "never")}
    if placement.record is not None:
        raw = np.dtype((np.void, placement.stride))
        found[RECORDS] = ReadRows(opened[RECORDS], raw, (), "never")
    for path, name in placement.large.items():
        field = tail.schema.fields[path]
        found[name] = ReadRows(opened[name], field.numpy, field.shape, "never")
    return found


def _pieces(parts: list[Any]) -> Iterator[bytes]:
    """Put a shard's parts together, a MiB or so at a time."""
    held: list[Any] = []
    nbytes = 0
    for part in parts:
        held.append(part)
        nbytes += len(part)
        if nbytes >= PIECE_NBYTES:
            yield b"".join(held)
            held, nbytes = [], 0
    yield b"".join(held)
