"""The Zarr v3 group that a data folder holds: its arrays, and their metadata.

It is a few JSON files, written without zarr-python: an array for each field, ``[E,
slots, *shape]``, and one of the rows' flags.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from mmreplay.disk import files
from mmreplay.errors import SchemaError
from mmreplay.format.metadata import Metadata
from mmreplay.format.sharding import Sharding
from mmreplay.ring import Ring
from mmreplay.schema import Field, Schema
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.layout import served_ends
from mmreplay.storage.zarr import codecs, values

FOLDER = "zarr"
FLAGS_NAME = "%flags"
"""No field's name: a percent sign in one is written as %25."""
REFERENCES_NAME = "%references"
"""Likewise; the folder of the references of fields that vary."""
JSON_NAME = "zarr.json"
MEMBER = "mmreplay"
"""Of the attributes of what is ours."""
MAX_NAME_NBYTES = 255


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """One array of the hierarchy.

    Attributes:
        path: The field's; ``"%flags"`` for the flags.
        name: Its folder, below the group's.
        dtype: Of its items.
        shape: Of one row.
        shard: Environments and steps of a shard.
        chunk: Environments and steps of an inner chunk.
        codec: The inner codec.
        values: The field whose values vary, and which the array holds; else None.
    """

    path: str
    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    shard: tuple[int, int]
    chunk: tuple[int, int]
    codec: codecs.ChunkCodec
    values: Field | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows of one inner chunk."""
        return self.chunk[0] * self.chunk[1]

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one inner chunk, unpacked."""
        return self.chunk_rows * self.row_nbytes

    @property
    def num_chunks(self) -> int:
        """Inner chunks of a shard."""
        return self.shard[0] * self.shard[1] // self.chunk_rows


def arrays_of(metadata: Metadata) -> dict[str, ShardedArray]:
    """The arrays of a buffer, by path; mutable and empty fields have none.

    A field that varies has two: its values by its path, and the references that rows
    store by `references_of`.
    """
    assert metadata.sharding is not None
    ring, sharding = metadata.ring, metadata.sharding
    fields = {
        path: field
        for path, field in metadata.schema.fields.items()
        if not field.mutable and field.nbytes
    }
    arrays = {path: _array(path, field, ring, sharding) for path, field in fields.items()}
    for path in metadata.schema.varying:
        name = references_of(path)
        array = _array(path, Field((REFERENCE.itemsize,), "uint8"), ring, sharding)
        arrays[name] = replace(array, name=f"{REFERENCES_NAME}/{folder_name(path)}")
    arrays[FLAGS_NAME] = _array(FLAGS_NAME, Field((), "uint8"), ring, sharding)
    return arrays


def references_of(path: str) -> str:
    """The key under which `arrays_of` has the references of a field that varies.

    No field has such a path: names in one are not empty.
    """
    return f"{REFERENCES_NAME}//{path}"


def served(metadata: Metadata) -> dict[str, str]:
    """Paths whose values are made of the flags, and their roles."""
    return served_ends(metadata.schema)


def _array(path: str, field: Field, ring: Ring, sharding: Sharding) -> ShardedArray:
    shard = ring.wide, sharding.shard_rows
    if field.varies:
        chunk = sharding.value_chunk(values.max_nbytes(field))
        codec = codecs.codec_of(sharding, 1)
        return ShardedArray(
            path, folder_name(path), np.dtype(np.uint8), (), shard, chunk, codec, field
        )
    codec = codecs.codec_of(sharding, field.numpy.itemsize)
    return ShardedArray(
        path,
        path if path == FLAGS_NAME else folder_name(path),
        field.numpy,
        field.shape,
        shard,
        sharding.chunk(field.nbytes, ring),
        codec,
    )


def folder_name(path: str) -> str:
    """A field's folder: each segment percent-encoded, dots and ``__`` too.

    So is ``tmp-`` where the path begins: `sweep` removes what is called so in the
    group's own folder.
    """
    name = "/".join(
        quote(segment, safe="").replace(".", "%2E").replace("__", "%5F%5F")
        for segment in path.split("/")
    )
    return f"tmp%2D{name[4:]}" if name.startswith("tmp-") else name


def check_names(schema: Schema) -> None:
    """Refuse paths that no array can have.

    Raises:
        SchemaError: One is the flags' own, or too long for a folder's name.
    """
    for path, field in schema.fields.items():
        longest = max(len(segment) for segment in folder_name(path).split("/"))
        # No folder is made for a mutable field.
        long = longest > MAX_NAME_NBYTES and not field.mutable
        if path == FLAGS_NAME or long:
            raise SchemaError(
                f"field {path!r} cannot be the name of a Zarr array: it must differ "
                f"from {FLAGS_NAME!r} and have at most {MAX_NAME_NBYTES} bytes a "
                "segment, percent-encoded. Rename the field, or leave out engine=."
            )
        if field.varies and values.max_nbytes(field) > values.MAX_NBYTES:
            raise SchemaError(
                f"field {path!r} must have values of at most {values.MAX_NBYTES} bytes "
                f"with engine='zarr', got {values.max_nbytes(field)}. Lower max_length."
            )


def create(folder: Path, metadata: Metadata) -> None:
    """Write the hierarchy of a new generation into its folder, without a shard."""
    assert metadata.sharding is not None
    check_names(metadata.schema)
    root = folder / FOLDER
    files.make_folder(root)
    for array in arrays_of(metadata).values():
        where = root
        for segment in array.name.split("/"):
            where = where / segment
            if not where.is_dir():
                files.make_folder(where)
                if where != root / array.name:
                    _write(where, group_json({}))
        _write(where, array_json(array, metadata.ring, metadata.sharding))
    write_group(folder, metadata, {})


def sweep(folder: Path) -> None:
    """Remove what a writer that was stopped left half done."""
    for path in sorted((folder / FOLDER).glob("tmp-*")):
        files.remove_tree(path)


def write_group(folder: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Write the group's own metadata, with what is known of its rows."""
    value = group_json({MEMBER: {**about(metadata), **state}})
    _write(folder / FOLDER, value)


def about(metadata: Metadata) -> dict[str, Any]:
    """What the group says of its buffer, whatever it says of its rows."""
    ring, schema = metadata.ring, metadata.schema
    return {
        "uuid": metadata.uuid.hex(),
        "generation": metadata.generation,
        "capacity": ring.capacity,
        "num_envs": ring.num_envs,
        "slots": ring.slots,
        "layout": ring.layout,
        "autoreset": metadata.autoreset,
        "schema": schema.to_json(),
        "roles": dict(schema.roles),
        "user": metadata.user,
    }


def group_json(attributes: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def array_json(array: ShardedArray, ring: Ring, sharding: Sharding) -> dict[str, Any]:
    """The metadata of an array."""
    axes = [f"{array.path.rpartition('/')[2]}_{n}" for n in range(len(array.shape))]
    field = array.values
    kind: str = array.dtype.name
    fill: object = False if array.dtype.kind == "b" else 0
    about: dict[str, Any] = {"path": array.path}
    if field is not None:
        # Other readers see the bytes, and know by these what they are.
        kind, fill = values.DATA_TYPES[field.rules.form], ""
        about |= {"dtype": field.dtype, "inner_shape": [*field.inner]}
    inner = {
        "chunk_shape": [*array.chunk, *array.shape],
        "codecs": codecs.as_json(
            sharding, array.dtype.itemsize, None if field is None else field.kind
        ),
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [ring.num_envs, ring.slots, *array.shape],
        "data_type": kind,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [*array.shard, *array.shape]},
        },
        # Shards lie side by side in the array's folder, and one sync is all theirs.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        "attributes": {MEMBER: about},
        "dimension_names": ["environment", "slot", *axes],
        "storage_transformers": [],
    }


def shard_name(array: ShardedArray, ring: Ring, range_id: int) -> str:
    """File of one range's shard, below the group's folder."""
    per_env = ring.slots // array.shard[1]
    env_id, step = (0, range_id) if array.shard[0] > 1 else divmod(range_id, per_env)
    suffix = ".0" * len(array.shape)
    return f"{array.name}/c.{env_id}.{step}{suffix}"


def shards_in(folder: Path) -> list[Path]:
    """Files of all shards in a group's folder; a writer may be removing some."""
    return [
        Path(within, name)
        for within, _, names in os.walk(folder)
        for name in names
        if name.startswith("c.")
    ]


def _write(folder: Path, value: dict[str, Any]) -> None:
    data = json.dumps(value, indent=1, allow_nan=False).encode()
    files.replace_bytes(folder / JSON_NAME, data)
