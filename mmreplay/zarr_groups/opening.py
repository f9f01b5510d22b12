"""Zarr groups opened as read-only buffers: mmreplay's own, and those of others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.open_files import OpenFiles, Origin
from mmreplay.buffer.opening import StrPath
from mmreplay.errors import FormatError, undone_by
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Ring
from mmreplay.schema import Schema
from mmreplay.schema.notes import Notes
from mmreplay.storage.commit_state import MemoryCommitState
from mmreplay.storage.recovery import Recovery
from mmreplay.storage.store import ReadPolicy
from mmreplay.storage.zarr import group as zarr_group
from mmreplay.zarr_groups import hierarchy as zarr_hierarchy
from mmreplay.zarr_groups import store as sealed_group
from mmreplay.zarr_groups.arrays import ChunkedReader
from mmreplay.zarr_groups.blobs import Blobs
from mmreplay.zarr_groups.hierarchy import Hierarchy
from mmreplay.zarr_groups.mapping import GroupMapper, GroupMapping
from mmreplay.zarr_groups.metadata import ForeignArray
from mmreplay.zarr_groups.source import MARKS, ZarrSource, source_of
from mmreplay.zarr_groups.store import GroupStore

Ids = NDArray[np.int64]


def claims(path: Any) -> bool:
    """Whether a path is a group; see `opening.Opener`."""
    return source_of(path) is not None


def open_reader(path: StrPath, policy: ReadPolicy) -> OpenFiles:
    """Open a group for reading; groups are read in one way, whatever the policy."""
    source = source_of(path)
    assert source is not None
    return open_group(source)


def open_group(source: ZarrSource) -> OpenFiles:
    """Open a group for reading.

    Raises:
        FormatError: It is no group, or one that cannot be read.
        CorruptError: The group is damaged.
        SourceError: Its arrays are no rows of steps.
        SchemaError: The source names an array that the group lacks.
        FailedError: A remote store cannot be reached.
    """
    blobs = source.open()
    with undone_by(blobs.close):
        inner = _inside(source, blobs)
    if inner is not source:
        blobs.close()
        blobs = inner.open()
    with undone_by(blobs.close):
        hierarchy = zarr_hierarchy.read(blobs)
        about = hierarchy.attributes.get(zarr_group.MEMBER)
        if isinstance(about, dict) and source.fields is None:
            return _ours(source, blobs, hierarchy, about)
        return _theirs(source, blobs, hierarchy)


def _inside(source: ZarrSource, blobs: Blobs) -> ZarrSource:
    """Return the source of the group inside a remote copy of a buffer's folder."""
    if not source.remote:
        return source
    # One of these names exists: a server that refuses all of them refuses access.
    asked = [metadata_file.FILE_NAME, *MARKS]
    data, *_ = blobs.look(asked, zarr_hierarchy.MAX_JSON_NBYTES)
    if data is None:
        return source
    metadata = metadata_file.decode(data, Path(source.location) / metadata_file.FILE_NAME)
    if metadata.engine != "zarr":
        raise FormatError(
            f"{source}: a remote buffer must have engine 'zarr', got "
            f"{metadata.engine!r}. Upload what mmreplay compact makes of it."
        )
    where = f"{source.location}/{metadata.folder}/{zarr_group.FOLDER}"
    return replace(source, location=where)


def _ours(
    source: ZarrSource, blobs: Blobs, hierarchy: Hierarchy, about: dict[str, object]
) -> OpenFiles:
    notes = Notes()
    group = sealed_group.read(hierarchy, about, notes)
    reader = ChunkedReader(blobs, complete=True)
    flags = sealed_group.read_flags(group, reader)
    metadata = Metadata(
        group.uuid,
        "",
        group.generation,
        "zarr",
        group.autoreset,
        group.ring,
        group.schema,
        group.user_metadata,
    )
    store = GroupStore(group.ring, group.schema, group.arrays, flags, blobs, reader, by_env=True)
    mapping = _mapping(source, hierarchy, group.arrays, notes, reader, ours=True)
    return _opened(source, metadata, store, mapping, group.first, group.stop)


def _theirs(source: ZarrSource, blobs: Blobs, hierarchy: Hierarchy) -> OpenFiles:
    reader = ChunkedReader(blobs)
    mapper = GroupMapper(hierarchy, source, reader)
    steps = mapper.map()
    rows = len(steps.flags)
    ring = Ring(rows, 1, "env_major", 1, 1, rows)
    metadata = Metadata(
        _uuid(steps.schema, steps.flags), "", 1, "zarr", "disabled", ring, steps.schema, {}
    )
    store = GroupStore(ring, steps.schema, steps.arrays, steps.flags, blobs, reader, by_env=False)
    mapping = _mapping(source, hierarchy, steps.arrays, mapper.notes, reader, ours=False)
    zero = np.zeros(1, np.int64)
    return _opened(source, metadata, store, mapping, zero, zero + rows)


def _uuid(schema: Schema, flags: NDArray[np.uint8]) -> bytes:
    """Return the same uuid at each opening of a group; states of samplers need it."""
    fields = json.dumps(schema.to_json()).encode()
    return hashlib.sha256(fields + flags.tobytes()).digest()[:16]


def _mapping(
    source: ZarrSource,
    hierarchy: Hierarchy,
    arrays: Mapping[str, ForeignArray],
    notes: Notes,
    reader: ChunkedReader,
    *,
    ours: bool,
) -> GroupMapping:
    return GroupMapping(
        source.location,
        hierarchy.version,
        ours,
        {path: array.name for path, array in arrays.items()},
        {path: array.summary for path, array in arrays.items()},
        tuple(notes.notes),
        tuple(notes.doubts),
        reader.missing,
    )


def _opened(
    source: ZarrSource,
    metadata: Metadata,
    store: GroupStore,
    mapping: GroupMapping,
    first: Ids,
    stop: Ids,
) -> OpenFiles:
    commit = MemoryCommitState(metadata.ring.num_envs)
    commit.publish(stop, stop, first)
    recovered = Recovery("clean", stop, stop)
    origin = Origin(source, mapping)
    return OpenFiles(None, metadata, store, commit, recovered, origin=origin)
