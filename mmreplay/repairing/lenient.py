"""Files of a damaged buffer, opened as far as they go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import files
from mmreplay.errors import CorruptError
from mmreplay.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.schema import Schema
from mmreplay.storage.memmap import POLICY, MemmapStore
from mmreplay.storage.placement import FLAGS, SUMS, place
from mmreplay.storage.places import DTYPE, Places
from mmreplay.storage.places import FILE_NAME as PLACES
from mmreplay.storage.policy import ReadPolicy
from mmreplay.storage.zarr import ZarrStore
from mmreplay.storage.zarr_group import FOLDER, arrays_of, shard_name

MAX_GUESSED = 1 << 20
"""Places for which shards are looked for; metadata may speak of any number."""
SHORT = ReadPolicy("pread", "never")
"""A read that ends too early is an error, a look beyond a mapping's end a SIGBUS."""


class ShortStore(ZarrStore):
    """Rows of which files of the tail may end before, which then take no memory.

    Attributes:
        held: Rows that every file of the tail holds.
        always: Rows that those files hold whose rows are never in shards.
        summed: The same two numbers of the files under checksums.
    """

    held: int
    always: int
    summed: tuple[int, int]

    def absent(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are nowhere, bool of their shape."""
        return self._beyond(rows, self.held, self.always)

    def _beyond(
        self, rows: NDArray[np.int64], held: int, always: int
    ) -> NDArray[np.bool_]:
        beyond = rows >= held
        if beyond.any():
            beyond &= ~self.sealed(rows)
        return beyond | (rows >= always)

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`."""
        # Metadata that anybody made may speak of rows of any size.
        mutable = any(self.schema[path].mutable for path in paths)
        limits = (self.held, self.always) if mutable else self.summed
        if self._beyond(rows, *limits).any():
            raise CorruptError(
                f"{self.path.parent}: got files that end before row {rows.max()}, "
                "expected it in them, or in a shard; restore them from a copy"
            )
        return super().gather(rows, paths)


def open_files(
    folder: Path, sizes: dict[str, int], restored: list[str] | None = None
) -> dict[str, File]:
    """Open files of a data folder for reading; one that is missing is an empty one.

    Args:
        folder: Where they are.
        sizes: Bytes by name; of a longer file no more is looked at.
        restored: Told of each that is missing or of another size.

    Raises:
        FormatError: There is a link, a folder, a pipe or a device in the place of one.
    """
    opened: dict[str, File] = {}
    try:
        for name, nbytes in sizes.items():
            file, told = _open(folder / name)
            opened[name] = file
            if restored is not None and (told or file.nbytes != nbytes):
                wrong = (
                    f"{name} has {file.nbytes} bytes of {nbytes}: what is there counts"
                )
                restored.append(told or wrong)
            file.nbytes = min(file.nbytes, nbytes)
    except BaseException:
        for file in opened.values():
            file.close()
        raise
    return opened


def _open(path: Path) -> tuple[File, str]:
    """The file, and what is to be told where it is none."""
    try:
        return File.open(path, None), ""
    except CorruptError:
        # Every read of what stands in for it ends before the first byte.
        empty = files.disk.open(Path(os.devnull), os.O_RDONLY)
        return File(
            path, empty, 0, writable=False
        ), f"{path.name} is missing: what other files hold counts"


def open_store(folder: Path, metadata: Metadata) -> ShortStore:
    """Open a compressed buffer's rows; those of a short file are a `CorruptError`.

    Raises:
        CorruptError: What says which rows are in shards is lost, and of too many.
    """
    ring, schema = metadata.ring, metadata.schema
    placement, maps = place(schema), POLICY.maps(folder)
    sizes = placement.file_sizes(ring, schema)
    opened = open_files(folder, sizes)
    held = {
        name: opened[name].nbytes // (sizes[name] // ring.num_rows)
        for name in sizes
        if name != SUMS
    }
    always = min(held[name] for name in never_sealed(schema))
    # No flags are kept: they are asked for by row, and memory is not taken for all.
    opened[FLAGS].nbytes = 0
    try:
        tail = MemmapStore(ring, schema, placement, opened, SHORT)
        # Shards are mapped as ever, rather than read whole.
        tail.maps = maps
        places = _open_places(folder, metadata, maps, held[FLAGS])
        store = ShortStore(folder, metadata, tail, places)
    except BaseException:
        for file in opened.values():
            file.close()
        raise
    store.held, store.always = min(held.values()), always
    free = set(never_sealed(schema)) - {FLAGS}
    store.summed = min(n for name, n in held.items() if name not in free), held[FLAGS]
    return store


def never_sealed(schema: Schema) -> list[str]:
    """Files of a compressed buffer whose rows no shard ever has."""
    large = place(schema).large.items()
    return [FLAGS, *(name for path, name in large if schema[path].mutable)]


def place_nbytes(metadata: Metadata) -> int:
    """Bytes of the file that says which rows of a compressed buffer are in shards."""
    ring, sharding = metadata.ring, metadata.sharding
    assert sharding is not None
    return ring.num_rows // (sharding.shard_rows * ring.wide) * DTYPE.itemsize


def _open_places(folder: Path, metadata: Metadata, mapped: bool, rows: int) -> Places:
    """What that file says; where it ends before, rows are where a shard is for them.

    Args:
        folder: Of the data.
        metadata: What the buffer is.
        mapped: Read it through a mapping.
        rows: No shard is looked for beyond so many.
    """
    nbytes = place_nbytes(metadata)
    [file] = open_files(folder, {PLACES: nbytes}).values()
    if file.nbytes == nbytes:
        return Places(file, mapped)
    try:
        known = np.frombuffer(file.pread(file.nbytes // 4 * 4, 0), DTYPE)
    finally:
        file.close()
    count = nbytes // DTYPE.itemsize
    count = min(count, -(-rows * count // metadata.ring.num_rows))
    if count - len(known) > MAX_GUESSED:
        raise CorruptError(
            f"{file.path} has {file.nbytes} bytes, expected {nbytes}, or at most "
            f"{MAX_GUESSED} places to look for; restore it from a copy"
        )
    guessed = [_sealed(folder, metadata, each) for each in range(len(known), count)]
    numbers = np.concatenate([known, np.array(guessed, DTYPE)])
    made = File(file.path, os.memfd_create(PLACES), 0, writable=True)
    made.resize(nbytes)
    made.pwrite(numbers.tobytes(), 0)
    return Places(made, mapped=True)


def _sealed(folder: Path, metadata: Metadata, number: int) -> bool:
    """Whether there is a shard of every field for a place."""
    names = (
        shard_name(array, metadata.ring, number)
        for array in arrays_of(metadata).values()
    )
    return all((folder / FOLDER / name).is_file() for name in names)
