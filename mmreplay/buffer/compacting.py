"""A buffer's rows in another engine or codec: from files to shards, and back."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import files, recovery
from mmreplay.buffer import lifecycle, rebuild
from mmreplay.buffer.filling import filled
from mmreplay.buffer.reading import Reading
from mmreplay.buffer.state import left_behind, read_statistics, write_statistics
from mmreplay.errors import SchemaError, StaleError
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Engine, Metadata
from mmreplay.format.sharding import Codec, Sharding
from mmreplay.ring import Ring
from mmreplay.storage import zarr_group
from mmreplay.storage.engines import create_store
from mmreplay.storage.ledger import refuse_cut
from mmreplay.storage.zarr import ZarrStore

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Compacted:
    """What `compact` made.

    Attributes:
        path: The new buffer's folder.
        rows: Rows copied.
        nbytes_before: Bytes that the rows' buffer takes on the disk.
        nbytes: Bytes that the new one takes.
        notes: What does not come along, in sentences.

    Example:
        >>> made = mr.compact("runs/cartpole", "runs/compact")
        >>> made.nbytes < made.nbytes_before
        True
    """

    path: Path
    rows: int
    nbytes_before: int
    nbytes: int
    notes: tuple[str, ...] = ()


def compact(
    source: lifecycle.StrPath,
    target: lifecycle.StrPath,
    *,
    codec: Codec | None = "blosc-lz4",
    level: int | None = None,
    chunk_crc32c: bool = False,
    allow_network: bool = False,
    progress: Progress | None = None,
) -> Compacted:
    """Copy a buffer into a new one of another engine or codec, row for row.

    Positions, boundaries, mutable fields, statistics and the user's own JSON come
    along; the uuid and samplers' priorities do not. Memory: a few thousand rows, and
    what sealing takes.

    Args:
        source: The buffer, which nobody should be writing: a row that is given up
            meanwhile is an error.
        target: A new or empty folder, which is a buffer only once it is whole.
        codec: Of the Zarr engine; None for the memmap engine's files.
        level: The codec's; None for its own.
        chunk_crc32c: Whether each chunk carries a checksum.
        allow_network: Write to a network file system all the same.
        progress: Called with (rows copied, rows in all).

    Raises:
        FormatError: The path holds something already, or the source is no buffer.
        SchemaError: The codec is unknown, or has no such level; a level or checksums
            are asked for without a codec; or a field can have no array.
        StaleError: The source's writer gave up rows that were not copied yet.
        FailedError: Another one cut rows, after a sync that failed.
        FullError: No space is left.

    Example:
        >>> made = mr.compact("runs/cartpole", "runs/compact", codec="zstd")
        >>> len(mr.ReplayBuffer.open("runs/compact")) > 0
        True
    """
    where, place = lifecycle.absolute(source), lifecycle.absolute(target)
    with ExitStack() as stack:
        parts = lifecycle.open_reader(where)
        stack.callback(parts.store.unmap)
        stack.callback(parts.close)
        lifecycle.refuse_inside(place, where)
        metadata = _described(parts.metadata, codec, level, chunk_crc32c)
        stack.enter_context(filled(place, allow_network))
        rows = _fill(parts, place, metadata, progress)
        if (where / "statistics.json").exists():
            write_statistics(place, read_statistics(where))
        encoded = metadata_file.encode(metadata)
        files.replace_bytes(place / metadata_file.FILE_NAME, encoded)
        files.remove_tree(place / recovery.HALF)
        _, before = parts.store.disk_nbytes()
    fresh = lifecycle.open_reader(place)
    try:
        nbytes, left = fresh.store.disk_nbytes()[1], left_behind(where)
        return Compacted(place, rows, before, nbytes, tuple(left))
    finally:
        fresh.close()


def _described(
    metadata: Metadata, codec: Codec | None, level: int | None, chunk_crc32c: bool
) -> Metadata:
    """The metadata of the same buffer in another engine."""
    old, row_nbytes = metadata.ring, metadata.schema.row_nbytes
    ring = Ring.sized(old.capacity, old.num_envs, old.layout, row_nbytes)
    engine: Engine = "memmap"
    sharding = None
    if codec is None and (level is not None or chunk_crc32c):
        raise SchemaError(
            f"level, chunk_crc32c: got {level!r} and {chunk_crc32c!r} with codec=None, "
            "expected them with a codec only; leave them out, or name a codec"
        )
    if codec is not None:
        zarr_group.check_names(metadata.schema)
        engine = "zarr"
        sharding = Sharding.sized(codec, ring, row_nbytes, level, chunk_crc32c)
        ring = sharding.fit(ring)
    return replace(
        metadata, uuid=secrets.token_bytes(16), generation=1, engine=engine,
        ring=ring, sharding=sharding,
    )  # fmt: skip


def _fill(
    parts: lifecycle.Parts, target: Path, metadata: Metadata, progress: Progress | None
) -> int:
    """Fill the target's folder, synced, with COMMIT; return the rows copied."""
    folder = target / metadata.folder
    files.make_folder(folder)
    reading = Reading(parts)
    span = reading.span
    store = create_store(folder, metadata)
    try:
        firsts = rebuild.copy(reading, store, None, progress)
        refuse_cut(parts.ledger)
        rebuild.sum_blocks(store, firsts, span.stop)
        store.sync_sums()
        # Last: what this gives back nothing asks space for again.
        if isinstance(store, ZarrStore):
            store.settle(firsts, span.stop)
        store.sync()
    finally:
        store.close()
        store.unmap()
    reading.view.refresh()
    given_up = reading.span.first > firsts
    if (given_up & (firsts < span.stop)).any():
        raise StaleError(
            f"environment {int(np.flatnonzero(given_up)[0])}: rows were given up while "
            "they were copied, expected a buffer that nobody writes; stop its writer, "
            "or take a snapshot first"
        )
    recovery.create(folder, metadata, span.stop, firsts)
    files.sync_folder(folder)
    return _count(span.stop - firsts)


def _count(lengths: NDArray[np.int64]) -> int:
    return int(lengths.sum())
