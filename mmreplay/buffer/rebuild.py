"""Another generation of a buffer: its newest rows under another ring or schema.

The new folder is complete and synced before metadata.json is renamed: the rename
is the one switch, and a kill on either side of it leaves one whole buffer.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import files, recovery
from mmreplay.buffer import lifecycle, room
from mmreplay.buffer.arguments import ROWS_EACH, check_count
from mmreplay.buffer.lifecycle import Parts
from mmreplay.buffer.reading import SCAN_ROWS, Reading
from mmreplay.errors import FullError, SchemaError, called
from mmreplay.files import rename
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Ring, runs
from mmreplay.schema import Field, Schema
from mmreplay.schema.convert import shape_of
from mmreplay.sizes import size
from mmreplay.storage.base import CheckedStore, Store
from mmreplay.storage.engines import create_store
from mmreplay.storage.ledger import CommitWriter

SCAN_NBYTES = 64 << 20
"""Rows copied at a time take no more than this, nor more than SCAN_ROWS."""
Fill = dict[str, NDArray[np.generic]] | None
Progress = Callable[[int, int], None]


def resized(ring: Ring, capacity: int, row_nbytes: int) -> Ring:
    """The same ring with another capacity.

    Raises:
        SchemaError: The capacity is not legal.
    """
    check_count("capacity", capacity, metadata_file.MAX_CAPACITY, ROWS_EACH)
    return Ring.sized(int(capacity), ring.num_envs, ring.layout, row_nbytes)


def filling(path: str, field: Field, fill: object) -> NDArray[np.generic]:
    """Check what rows before a new field read as."""
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
            told = f"a field of the role {role!r}, expected one without: old rows have"
            raise SchemaError(
                f"add_field: got {told} another one each; make a new buffer with it"
            )
        if value.any():
            raise SchemaError(
                f"add_field: got fill True for the role {role!r}, expected False: ends "
                "are kept as boundaries, which published rows never change; make a new "
                "buffer"
            )


def swap(
    parts: Parts,
    reading: Reading,
    ring: Ring,
    schema: Schema,
    fill: Fill,
    commit_every: float | None,
) -> Parts:
    """Put another generation of a buffer in force and return it open for writing.

    Adding waits meanwhile. All that may fail comes before the switch, and leaves the
    buffer as it was; a failure of the switch itself ends this writer, as it is unknown
    which generation a later opening finds. The former one stays open to read, for
    threads that draw; `Parts.retire` it.
    """
    if parts.path is None:
        return in_memory(parts, reading, ring, schema, fill)
    assert parts.committer is not None
    assert isinstance(parts.ledger, CommitWriter)
    parts.committer.commit()
    parts.refuse_elsewhere()
    metadata = parts.metadata.next_generation(ring, schema)
    encoded = metadata_file.encode(metadata)
    target, folder = parts.path / metadata_file.FILE_NAME, parts.path / metadata.folder
    files.remove_tree(folder)
    fresh = None
    try:
        try:
            files.make_folder(folder)
            _fill(reading, folder, metadata, fill)
            fresh = lifecycle.succeed(parts, metadata, commit_every)
            staged = files.stage_bytes(target, encoded)
        except BaseException as error:
            _take_back(folder, fresh)
            if isinstance(error, FullError) and error.errno != errno.EFBIG:
                raise _no_room(parts.path, metadata, reading, error) from error
            raise
        try:
            rename(staged, target)
        except FullError as error:
            # Without room for the new entry, the folder keeps the old one.
            if metadata_file.load(parts.path).generation != parts.metadata.generation:
                raise
            _take_back(folder, fresh)
            raise _no_room(parts.path, metadata, reading, error) from error
        parts.committer.stop()
        # Without the record, readers follow when they next look up the path.
        with suppress(OSError):
            parts.ledger.mark_moved()
    except BaseException as error:
        if fresh is not None and not fresh.closed:
            # Nothing more may be added to a generation that may not be in force.
            why = str(error) or type(error).__name__
            parts.committer.poison(f"the switch to {metadata.folder} failed: {why}")
            fresh.discard()
        raise
    # What is cut short from here on must not add to what is not in force.
    parts.committer.poison(f"the switch to {metadata.folder} was cut short")
    fresh.lock, parts.lock = parts.lock, None
    return fresh


def _take_back(folder: Path, fresh: Parts | None) -> None:
    """Remove a generation that did not come into force.

    What cannot be removed is left to the next opening; why it was half made is what is
    told.
    """
    if fresh is not None:
        fresh.discard()
    with suppress(OSError):
        files.remove_tree(folder)


def _no_room(
    path: Path, metadata: Metadata, reading: Reading, error: FullError
) -> FullError:
    """Say what was missing: both rings are on the disk until one of them is whole."""
    lengths = np.minimum(reading.span.lengths, metadata.ring.capacity)
    needed, free = room.ring_nbytes(metadata, lengths), room.free_nbytes(path)
    # Of shards nobody knows it before they are made.
    least = f"{size(needed)} free" if needed else "room"
    return FullError(
        f"{path}: no space left to copy the rows that stay before the others go, got "
        f"{size(free)}, expected {least} on its disk; nothing was changed: free some "
        "space, or keep fewer rows",
        errno_=error.errno,
    )


def _fill(reading: Reading, folder: Path, metadata: Metadata, fill: Fill) -> None:
    """Make the files of a generation, with the rows alive now, durable as a whole."""
    store = create_store(folder, metadata)
    try:
        firsts = copy(reading, store, fill)
        heads = reading.span.stop
        store.sync()
        sum_blocks(store, firsts, heads)
        store.sync_sums()
        recovery.create(folder, metadata, heads, firsts)
        files.sync_folder(folder)
    finally:
        store.close()


def in_memory(
    parts: Parts, reading: Reading, ring: Ring, schema: Schema, fill: Fill
) -> Parts:
    """The same in RAM."""
    metadata = parts.metadata.next_generation(ring, schema)
    fresh = lifecycle.create_memory(metadata)
    firsts = copy(reading, fresh.store, fill)
    assert fresh.writer is not None
    assert parts.writer is not None
    fresh.writer.adopt(reading.span.stop, firsts)
    fresh.writer.follow(parts.writer)
    return fresh


def copy(
    reading: Reading, store: Store, fill: Fill, progress: Progress | None = None
) -> NDArray[np.int64]:
    """Copy the newest rows that fit, and return the first position of each env.

    The newest row of each environment comes along also where it was given up: if an
    episode ends there, its final row is still to come, and an opening that goes on
    tells so by the flags of the row before. Environments go side by side, so that what
    is sealed step by step can be.
    """
    span = reading.span
    ring = store.ring
    firsts = np.maximum(span.first, span.stop - ring.capacity)
    oldest = np.maximum(0, np.minimum(firsts, span.stop - 1))
    size = max(1, min(SCAN_ROWS, SCAN_NBYTES // max(1, store.schema.row_nbytes)))
    done, rows = 0, int((span.stop - oldest).sum())
    for first in _pieces(oldest, span.stop, size):
        for env_id in range(ring.num_envs):
            begin = max(first, int(oldest[env_id]))
            positions = np.arange(begin, min(first + size, int(span.stop[env_id])))
            if not len(positions):
                continue
            ids = np.full(len(positions), env_id)
            columns = reading.rows(ids, positions, reading.view.moment).fields
            for path, value in (fill or {}).items():
                columns[path] = np.broadcast_to(value, (len(ids), *value.shape))
            flags = reading.view.flags(ids, positions)
            store.write(runs(ring.rows(ids, positions)), columns, flags)
            done += len(positions)
            if progress is not None:
                called("progress", progress, done, rows)
    return firsts


def _pieces(
    firsts: NDArray[np.int64], stops: NDArray[np.int64], size: int
) -> Iterator[int]:
    """Where pieces begin that hold all rows; stretches that hold none are left out.

    One environment may be any number of steps ahead of another.
    """
    first = 0
    while (left := stops > np.maximum(first, firsts)).any():
        first = max(first, int(firsts[left].min()))
        yield first
        first += size


def sum_blocks(
    store: CheckedStore, firsts: NDArray[np.int64], heads: NDArray[np.int64]
) -> None:
    """Write the checksums of every whole block that holds a row."""
    size = store.ring.block_rows
    # The first block may begin with rows that were never written, and a hole that is
    # read through a mapping is a SIGBUS where tmpfs is full.
    store.allocate(firsts // size * size, firsts)
    for env_id in range(store.ring.num_envs):
        first = int(firsts[env_id]) // size
        blocks = range(first, int(heads[env_id]) // size)
        sums = [store.checksum(env_id, block) for block in blocks]
        if sums:
            store.write_sums(env_id, first, np.array(sums, np.uint32))
