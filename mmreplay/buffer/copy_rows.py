"""Copies of a buffer's rows: resize, add_field, and compact.

A resize or a new field copies the newest rows into another generation of the same
buffer. Its folder is whole and synced before metadata.json is renamed: the rename is
the one switch, and a kill on either side of it leaves one whole buffer.

`compact` copies rows into a new buffer of another engine or codec.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import format_size, integer
from mmreplay.buffer import opening
from mmreplay.buffer.heap_values import ValueCopier, first_fitting
from mmreplay.buffer.new_generation import NewGeneration, new_folder
from mmreplay.buffer.open_files import OpenFiles
from mmreplay.buffer.opening import ROWS_EACH
from mmreplay.buffer.reader import SCAN_ROWS, GenerationReader
from mmreplay.buffer.statistics import FILE_NAME as STATISTICS
from mmreplay.buffer.statistics import left_behind, read_statistics, write_statistics
from mmreplay.disk import files
from mmreplay.disk.files import free_nbytes, rename
from mmreplay.errors import FullError, SchemaError, StaleError, called, shown
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Engine, Metadata
from mmreplay.format.sharding import Codec, Sharding
from mmreplay.ragged import Ragged
from mmreplay.ring import Ring, runs
from mmreplay.schema import Field, Schema
from mmreplay.schema.convert import shape_of
from mmreplay.storage import disk_space
from mmreplay.storage.commit_state import refuse_discarded
from mmreplay.storage.store import Columns, Store
from mmreplay.storage.zarr import group

SCAN_NBYTES = 64 << 20
"""Rows copied at a time take no more than this, nor more than SCAN_ROWS."""
Fill = dict[str, NDArray[np.generic]] | None
FILLS = {"text": "", "bytes": b"", "array": [], "image": b""}
"""Per kind of field that varies, what rows before it hold."""
Ids = NDArray[np.int64]
Progress = Callable[[int, int], None]


def resized(ring: Ring, capacity: int, row_nbytes: int) -> Ring:
    """The same ring with another capacity.

    Raises:
        SchemaError: The capacity is not legal.
    """
    integer("capacity", capacity, 1, ROWS_EACH, maximum=metadata_file.MAX_CAPACITY)
    return Ring.sized(int(capacity), ring.num_envs, ring.layout, row_nbytes)


def filling(path: str, field: Field, fill: object) -> NDArray[np.generic]:
    """Check what rows before a new field read as; a field that varies has no items."""
    if field.varies:
        # A row may be without an image, which `add` takes of no row.
        stored = field if field.encoding is None else Field.bytes(field.max_length or 1)
        items = stored.rules.convert(stored, fill, path, ()).values
        if len(items):
            raise SchemaError(
                f"the fill of field {path!r}, which varies, must be empty, got "
                f"{shown(fill)}. Pass {FILLS[field.kind]!r}."
            )
        empty: NDArray[np.generic] = items
        return empty
    scalar = not shape_of(fill, f"field {path!r}")
    single = Field((), field.dtype) if scalar else field
    value = single.convert(fill, path, ())
    return np.broadcast_to(value, field.shape)


def refuse_role(before: Schema, after: Schema, value: NDArray[np.generic]) -> None:
    """Refuse a new field that would tell of old rows what they never said.

    Raises:
        SchemaError: It is the next observation, or an end whose fill is not False.
    """
    for role in ("next_observation", "terminated", "truncated"):
        if before.role(role) == after.role(role):
            continue
        if role == "next_observation":
            raise SchemaError(
                f"add_field: a field cannot get the role {role!r}, because old rows "
                "already have a next observation. Create a new buffer with it."
            )
        if value.any():
            raise SchemaError(
                f"add_field: the fill of the role {role!r} must be False, got True. "
                "Boundaries of published rows never change: create a new buffer."
            )


def replace_generation(
    reader: GenerationReader,
    ring: Ring,
    schema: Schema,
    fill: Fill,
    commit_every: float | None,
    heap_nbytes: int = 0,
) -> OpenFiles:
    """Replace a buffer's generation by another one, and return it open for writing.

    Adding waits meanwhile. All that may fail comes before the switch, and leaves the
    buffer as it was; a failure of the switch itself ends this writer, as it is unknown
    which generation a later opening finds. The former one stays open to read, for
    threads that draw; `OpenFiles.retire` it.

    Args:
        reader: Of the current generation.
        ring: The new one's.
        schema: The new one's.
        fill: By path, what rows of a new field read as.
        commit_every: Seconds between commits by a thread; None for none.
        heap_nbytes: Bytes of each environment's heap in the new one.
    """
    former = reader.files
    metadata = former.metadata.next_generation(ring, schema, heap_nbytes)
    if former.path is None:
        return _replace_in_memory(reader, metadata, fill)
    assert former.committer is not None
    former.committer.commit()
    former.refuse_elsewhere()
    fresh = None
    try:
        try:
            with NewGeneration(former.path, metadata) as new:
                tails, *heap = copy_rows(reader, new.store, fill)
                new.sum_blocks(tails, reader.span.stop)
                # The group is for the writer that goes on with this generation.
                new.finish(reader.span.stop, tails, *heap, seal=None)
            fresh = opening.open_next(former, metadata, commit_every)
            target = former.path / metadata_file.FILE_NAME
            staged = files.stage_bytes(target, new.encoded)
        except BaseException as error:
            _take_back(former.path / metadata.folder, fresh)
            if isinstance(error, FullError) and error.errno != errno.EFBIG:
                raise _no_space(former.path, metadata, reader, error) from error
            raise
        try:
            rename(staged, target)
        except FullError as error:
            # Without space for the new entry, the folder keeps the old one.
            if metadata_file.load(former.path).generation != former.metadata.generation:
                raise
            _take_back(new.folder, fresh)
            raise _no_space(former.path, metadata, reader, error) from error
        former.committer.stop()
        # Without the record, readers follow when they next look up the path.
        with suppress(OSError):
            former.commit.mark_moved()
    except BaseException as error:
        if fresh is not None and not fresh.closed:
            # Nothing more may be added to a generation that may not be current.
            why = str(error) or type(error).__name__
            former.committer.poison(f"the switch to {metadata.folder} failed: {why}")
            fresh.discard()
        raise
    # What is cut short from here on must not add to a generation that is not current.
    former.committer.poison(f"the switch to {metadata.folder} was cut short")
    # The lock is handed over last: while either generation may still be the current
    # one, no other process may write.
    fresh.lock, former.lock = former.lock, None
    return fresh


def _replace_in_memory(reader: GenerationReader, metadata: Metadata, fill: Fill) -> OpenFiles:
    fresh = opening.create_memory(metadata)
    tails, heap_heads, _ = copy_rows(reader, fresh.store, fill)
    assert fresh.appender is not None
    assert reader.files.appender is not None
    fresh.appender.start_from(reader.span.stop, tails, heap_heads)
    fresh.appender.continue_from(reader.files.appender)
    return fresh


def _take_back(folder: Path, fresh: OpenFiles | None) -> None:
    """Remove a generation that did not come into force.

    What cannot be removed is left to the next opening: the error to raise is why the
    generation is half made.
    """
    if fresh is not None:
        fresh.discard()
    with suppress(OSError):
        files.remove_tree(folder)


def _no_space(
    path: Path, metadata: Metadata, reader: GenerationReader, error: FullError
) -> FullError:
    """Say what was missing: both rings are on the disk until one of them is whole."""
    lengths = np.minimum(reader.span.lengths, metadata.ring.capacity)
    needed, free = disk_space.ring_nbytes(metadata, lengths), free_nbytes(path)
    # The size of shards is unknown until they are written.
    minimum = format_size(needed) if needed else "disk space"
    return FullError(
        f"{path}: no space left to copy the remaining rows before the others are "
        f"removed: {minimum} is needed, {format_size(free)} is free. Nothing was "
        "changed: free some space, or select fewer rows.",
        errno_=error.errno,
    )


def copy_rows(
    reader: GenerationReader, store: Store, fill: Fill = None, progress: Progress | None = None
) -> tuple[Ids, Ids | None, Ids | None]:
    """Copy the newest rows that fit into the ring and, with their values, the heap.

    The newest row of each environment comes along also where it was given up: if an
    episode ends there, its final row is still to come, and an opening that goes on
    knows so by the flags of the row before. Environments go side by side, so that
    what is sealed step by step can be.

    Args:
        reader: The source.
        store: The target.
        fill: By path, what rows of a field that the source lacks read as.
        progress: Called with (rows copied, rows in all).

    Returns:
        int64 ``[E]``, the first position of each environment, and int64 ``[E]``, the
        heap heads and the heap tails; None where no field varies.

    Raises:
        CorruptError: A value that varies is damaged; the copy would give it a checksum
            that fits.
    """
    span = reader.span
    ring = store.ring
    firsts = np.maximum(span.first, span.stop - ring.capacity)
    values = None
    if store.heap is not None:
        values = ValueCopier(store)
        # Shards take the values from the heap, which so bounds no row's life.
        if store.sealing is None:
            nbytes = store.heap.nbytes
            firsts = first_fitting(reader, store.schema, nbytes, firsts, span.stop)
    oldest = np.maximum(0, np.minimum(firsts, span.stop - 1))
    row_nbytes, most = store.schema.row_nbytes, SCAN_ROWS
    if values is not None and store.sealing is not None:
        # Values of a shard's rows fit into the heap beside those that wait for theirs.
        row_nbytes += store.schema.max_heap_nbytes
        most = min(most, store.sealing.steps)
        values.begin(oldest)
    size = max(1, min(most, SCAN_NBYTES // max(1, row_nbytes)))
    done, rows = 0, int((span.stop - oldest).sum())
    first = 0
    # One environment may be any number of steps ahead of another: stretches that hold
    # no row of any are left out.
    while (left := span.stop > np.maximum(first, oldest)).any():
        first = max(first, int(oldest[left].min()))
        for env_id in range(ring.num_envs):
            begin = max(first, int(oldest[env_id]))
            positions = np.arange(begin, min(first + size, int(span.stop[env_id])))
            if not len(positions):
                continue
            ids = np.full(len(positions), env_id)
            rows_read = reader.gather_rows(ids, positions, reader.limits_before, copied=True)
            columns: Columns = rows_read.fields
            for path, value in (fill or {}).items():
                rows_read.fields[path] = (
                    Ragged(value, np.zeros(len(ids) + 1, np.int64))
                    if store.schema.fields[path].varies
                    else np.broadcast_to(value, (len(ids), *value.shape))
                )
            if values is not None:
                fits = positions >= firsts[env_id]
                columns = values.store(columns, ids, positions, fits)
            flags = reader.flags(ids, positions)
            store.write(runs(ring.rows(ids, positions)), columns, flags)
            done += len(positions)
            if progress is not None:
                called("progress", progress, done, rows)
        first += size
    if values is None:
        return firsts, None, None
    values.end(span.stop)
    return firsts, values.heap_heads, values.heap_tails


@dataclass(frozen=True, slots=True)
class CompactReport:
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
    source: opening.StrPath,
    target: opening.StrPath,
    *,
    codec: Codec | None = "blosc-lz4",
    level: int | None = None,
    chunk_crc32c: bool = False,
    allow_network: bool = False,
    progress: Progress | None = None,
) -> CompactReport:
    """Copy a buffer into a new one of another engine or codec, row for row.

    Positions, boundaries, mutable fields, statistics and the user's own JSON come
    along; the uuid, samplers' priorities and counts of uses do not. Memory: a few
    thousand rows, and what sealing takes.

    Args:
        source: The buffer, without a writer: a row that is dropped during the copy is
            an error.
        target: A new or empty folder, which is a buffer only once it is whole.
        codec: Of the Zarr engine; None for the memmap engine's files.
        level: The codec's; None for its own.
        chunk_crc32c: Whether each chunk carries a checksum.
        allow_network: Write to a network file system all the same.
        progress: Called with (rows copied, rows in all).

    Raises:
        FormatError: The path holds something already, or the source is no buffer.
        CorruptError: A value that varies differs from its checksum.
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
    source_path, target_path = opening.absolute(source), opening.absolute(target)
    with ExitStack() as stack:
        opened = opening.open_reader(source_path)
        stack.callback(opened.store.unmap)
        stack.callback(opened.close)
        opening.refuse_inside(target_path, source_path)
        metadata = _described(opened.metadata, codec, level, chunk_crc32c)
        stack.enter_context(new_folder(target_path, allow_network))
        reader = GenerationReader(opened)
        # All rows that are to be copied are alive here, or the copy is refused below.
        span = reader.span
        with NewGeneration(target_path, metadata) as new:
            tails, *heap = copy_rows(reader, new.store, progress=progress)
            refuse_discarded(opened.commit)
            reader.refresh()
            overwritten = (reader.span.first > tails) & (tails < span.stop)
            if overwritten.any():
                raise StaleError(
                    f"environment {int(np.flatnonzero(overwritten)[0])}: rows were "
                    "overwritten while they were copied. Stop the writer, or take a "
                    "snapshot first."
                )
            new.sum_blocks(tails, span.stop)
            new.finish(span.stop, tails, *heap)
        if (source_path / STATISTICS).exists():
            write_statistics(target_path, read_statistics(source_path))
        new.publish()
        _, before = opened.store.disk_nbytes()
    fresh = opening.open_reader(target_path)
    try:
        nbytes, left = fresh.store.disk_nbytes()[1], left_behind(source_path)
        rows = int((span.stop - tails).sum())
        return CompactReport(target_path, rows, before, nbytes, tuple(left))
    finally:
        fresh.close()


def _described(
    metadata: Metadata, codec: Codec | None, level: int | None, chunk_crc32c: bool
) -> Metadata:
    """The metadata of the same buffer in another engine."""
    old, row_nbytes = metadata.ring, metadata.schema.row_nbytes
    layout = old.layout
    if codec is not None and metadata.schema.varying:
        layout = "env_major"
    ring = Ring.sized(old.capacity, old.num_envs, layout, row_nbytes)
    engine: Engine = "memmap"
    sharding = None
    if codec is None and (level is not None or chunk_crc32c):
        raise SchemaError(
            f"level and chunk_crc32c need a codec, got {level!r} and {chunk_crc32c!r} "
            "with codec=None. Leave them out, or pass a codec."
        )
    if codec is not None:
        group.check_names(metadata.schema)
        engine = "zarr"
        heap_rows = metadata_file.rows_of_heap(metadata.heap_nbytes, metadata.schema)
        sharding = Sharding.sized(codec, ring, row_nbytes, level, chunk_crc32c, heap_rows)
        ring = sharding.fit(ring)
    return replace(
        metadata,
        uuid=secrets.token_bytes(16),
        generation=1,
        engine=engine,
        ring=ring,
        sharding=sharding,
    )
