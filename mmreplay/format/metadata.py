"""metadata.json as a value: what a buffer is, written once and replaced whole.

The file is JSON whose last member is the CRC32C of all bytes before that member.
Whatever can be computed from the rest (offsets, strides, slots) is stored too, so
that a reader in another language need not repeat the arithmetic, and is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal, TypeVar, get_args

import google_crc32c

from mmreplay import strict_json
from mmreplay.disk.files import read_bytes, refuse_link
from mmreplay.errors import OR_REPAIR, CorruptError, FormatError, SchemaError, VersionError
from mmreplay.format.sharding import HEAP_SHARDS, Sharding
from mmreplay.ring import LAYOUTS, Ring
from mmreplay.schema import Schema
from mmreplay.schema.field import HEAP_ALIGNMENT
from mmreplay.schema.spaces import AUTORESETS as AUTORESETS
from mmreplay.schema.spaces import Autoreset as Autoreset
from mmreplay.strict_json import Json

Engine = Literal["memmap", "zarr", "memory"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
ON_DISK = tuple(engine for engine in ENGINES if engine != "memory")
"""Engines whose buffers lie in a folder; `storage.engines` has their stores."""

FILE_NAME = "metadata.json"
SIDECARS = {"samplers", "limiter", "ray"}
"""Folders beside the data that a buffer may have; a copy of it leaves them out."""
MAGIC = "mmreplay"
MAJOR, MINOR, HEAP_MINOR = 1, 0, 1
"""The minor version is that of the heap where a field varies."""
MAX_NBYTES = 1 << 20
MAX_CAPACITY = 1 << 48
MAX_NUM_ENVS = 1 << 20
MAX_FILES_NBYTES = 1 << 63
MAX_HEAPS_NBYTES = 1 << 62
HEAP_STEP_NBYTES = 4096
"""The heap of an environment is a multiple of it."""
HEAP_ROWS = 4
"""Longest rows that a heap must hold: 2 let the writer go on, 3 leave the newest row
alive, and 4 do so with a reserve."""
# Features this version knows; a buffer that needs another is refused.
AGENT_ENDS, EMPTY_FIELDS, HEAP, IMAGE = "agent_ends", "empty_fields", "heap", "image"
INCOMPAT: frozenset[str] = frozenset({AGENT_ENDS, EMPTY_FIELDS, HEAP, IMAGE})
RO_COMPAT: frozenset[str] = frozenset()

T = TypeVar("T", bound=str)
_TAIL = re.compile(rb'"crc32c": "([0-9a-f]{8})"\n\}\n\Z')
_TAIL_NBYTES = len(b'"crc32c": "00000000"\n}\n')
_KEYS = {
    "format",
    "version",
    "features",
    "uuid",
    "created",
    "generation",
    "engine",
    "layout",
    "autoreset",
    "capacity",
    "num_envs",
    "slots",
    "reserve",
    "block_rows",
    "schema",
    "roles",
    "user",
}


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a buffer is.

    Attributes:
        uuid: 16 bytes that name the buffer for ever.
        created: UTC time, ISO 8601.
        generation: Number of the current data folder, from 1.
        engine: ``"memmap"``, ``"zarr"`` or ``"memory"``.
        autoreset: What follows an episode's end in one environment.
        ring: Capacity, environments, layout and slots.
        schema: The fields.
        user: The user's own JSON.
        ro_compat: Features that a reader may ignore and a writer must know.
        sharding: Of the Zarr engine; None with another.
        heap_nbytes: Bytes of each environment's heap; 0 where no field varies.

    Raises:
        SchemaError: A field varies, and the shards or the layout do not suit it.
    """

    uuid: bytes
    created: str
    generation: int
    engine: Engine
    autoreset: Autoreset
    ring: Ring
    schema: Schema
    user: Json
    ro_compat: tuple[str, ...] = ()
    sharding: Sharding | None = None
    heap_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.sharding is not None and self.schema.varying:
            _check_shards(self.sharding, self.ring, self.schema, self.heap_nbytes)

    @property
    def folder(self) -> str:
        """Name of the current data folder."""
        return f"data-{self.generation:06d}"

    @property
    def unknown_features(self) -> tuple[str, ...]:
        """Features that allow reading and forbid writing."""
        return tuple(sorted(set(self.ro_compat) - RO_COMPAT))

    def next_generation(
        self, ring: Ring, schema: Schema, heap_nbytes: int | None = None
    ) -> Metadata:
        """Return the metadata of the folder that replaces this one.

        Args:
            ring: Of the new one.
            schema: Of the new one.
            heap_nbytes: Bytes of each environment's heap; those of this one by default.
        """
        sharding = self.sharding
        nbytes = self.heap_nbytes if heap_nbytes is None else heap_nbytes
        if sharding is not None:
            heap_rows = rows_of_heap(nbytes, schema)
            sharding = sharding.resized(ring, schema.row_nbytes, heap_rows)
            ring = sharding.fit(ring)
        return replace(
            self,
            generation=self.generation + 1,
            ring=ring,
            schema=schema,
            sharding=sharding,
            heap_nbytes=nbytes,
        )


def encode(metadata: Metadata) -> bytes:
    """Return the bytes of metadata.json."""
    ring = metadata.ring
    _check_size(ring, metadata.schema)
    check_heap_nbytes(metadata.heap_nbytes, metadata.ring, metadata.schema)
    value: Json = {
        "format": MAGIC,
        "version": [MAJOR, HEAP_MINOR if metadata.schema.varying else MINOR],
        "features": {
            "incompat": _needed(metadata.schema),
            "ro_compat": list(metadata.ro_compat),
            "compat": [],
        },
        "uuid": metadata.uuid.hex(),
        "created": metadata.created,
        "generation": metadata.generation,
        "engine": metadata.engine,
        "layout": ring.layout,
        "autoreset": metadata.autoreset,
        "capacity": ring.capacity,
        "num_envs": ring.num_envs,
        "slots": ring.slots,
        "reserve": ring.reserve,
        "block_rows": ring.block_rows,
        "schema": metadata.schema.to_json(),
        "roles": dict(metadata.schema.roles),
        "user": metadata.user,
    }
    if metadata.heap_nbytes:
        value["heap_bytes"] = metadata.heap_nbytes
    if metadata.sharding is not None:
        value["zarr"] = metadata.sharding.to_json()
    body = strict_json.dump(value, "metadata")[: -len("\n}")] + b",\n "
    checksum = google_crc32c.value(body)
    data = body + b'"crc32c": "%08x"\n}\n' % checksum
    if len(data) > MAX_NBYTES:
        raise SchemaError(
            f"metadata must take at most {MAX_NBYTES} bytes, got {len(data)}. Store "
            "large values of user_metadata= in a field or a file of their own."
        )
    return data


def decode(data: bytes, path: Path) -> Metadata:
    """Return the metadata that the bytes say, all of it checked.

    Raises:
        FormatError: They are not a buffer's metadata.
        VersionError: They need a newer version.
        CorruptError: Their checksum does not match.
    """
    name = str(path)
    try:
        value = strict_json.parse(data, name)
    except CorruptError as error:
        raise CorruptError(f"{str(error).rstrip('.')}{OR_REPAIR}.") from error
    if value.get("format") != MAGIC:
        raise FormatError(
            f"{name}: format must be {MAGIC!r}, got {value.get('format')!r}. The "
            "folder is not a replay buffer."
        )
    _check_version(value, name)
    _check_checksum(data, name)
    missing = _KEYS - value.keys()
    if missing:
        raise FormatError(f"{name} is damaged: it has no {', '.join(sorted(missing))}")
    try:
        return _from_json(value, name)
    except SchemaError as error:
        raise FormatError(f"{name}: {error}") from error


def load(folder: Path) -> Metadata:
    """Read and check the metadata of the buffer in a folder."""
    path = folder / FILE_NAME
    if not folder.exists():
        raise FormatError(
            f"{folder} does not exist. Check the path, or create a buffer with "
            "ReplayBuffer.create or mmreplay record."
        )
    if not folder.is_dir():
        raise FormatError(
            f"{folder} must be a buffer's folder, got a file. Pass the folder that "
            "holds metadata.json."
        )
    if not path.exists():
        left = any(folder.glob("data-*/COMMIT"))
        way = OR_REPAIR if left else ""
        raise FormatError(
            f"{folder} is not a replay buffer: it has no {FILE_NAME}. Pass the folder "
            f"that ReplayBuffer.create made{way}."
        )
    metadata = decode(read_bytes(path, MAX_NBYTES), path)
    refuse_link(folder / metadata.folder)
    return metadata


def _check_version(value: Json, name: str) -> None:
    version = value.get("version")
    if (
        not isinstance(version, list)
        or len(version) != 2
        or not all(type(number) is int for number in version)
    ):
        raise FormatError(f"{name}: version must be [major, minor], got {version!r}")
    if version[0] != MAJOR:
        raise VersionError(
            f"{name} has format version {version[0]}.{version[1]}, but this mmreplay "
            f"reads {MAJOR}.x. Install a newer mmreplay."
        )
    features = value.get("features")
    if not isinstance(features, Mapping):
        raise FormatError(f"{name}: features must be an object, got {features!r}")
    unknown = set(_names(features, "incompat", name)) - INCOMPAT
    if unknown:
        raise VersionError(
            f"{name} needs the features {sorted(unknown)}, which this mmreplay does "
            "not know. Install a newer mmreplay."
        )


def _check_checksum(data: bytes, name: str) -> None:
    match = _TAIL.search(data)
    if match is None:
        raise CorruptError(
            f"{name} does not end with its checksum: it was truncated or edited. "
            f"Restore it from a copy{OR_REPAIR}."
        )
    stored = int(match[1], 16)
    computed = google_crc32c.value(data[:-_TAIL_NBYTES])
    if stored != computed:
        raise CorruptError(
            f"{name} has checksum {computed:08x}, but says {stored:08x}: it was "
            f"damaged or edited by hand. Restore it from a copy{OR_REPAIR}."
        )


def _from_json(value: Json, name: str) -> Metadata:
    ring = Ring(
        _number(value, "capacity", name, 1, MAX_CAPACITY),
        _number(value, "num_envs", name, 1, MAX_NUM_ENVS),
        _choice(value, "layout", name, LAYOUTS),
        _number(value, "reserve", name, 2, MAX_CAPACITY),
        _number(value, "block_rows", name, 1, MAX_CAPACITY),
        _number(value, "slots", name, 1, 2 * MAX_CAPACITY),
    )
    if ring.block_rows & (ring.block_rows - 1):
        raise FormatError(f"{name}: block_rows must be a power of two, got {ring.block_rows}")
    needed = ring.capacity + ring.reserve + ring.block_rows
    if ring.slots < needed or ring.slots % ring.block_rows:
        raise FormatError(
            f"{name}: slots must be at least {needed} (capacity + reserve + "
            f"block_rows) and a multiple of {ring.block_rows}, got {ring.slots}"
        )
    created, uuid = value["created"], value["uuid"]
    if not isinstance(created, str) or len(created) > 64:
        raise FormatError(f"{name}: created must be a UTC time, got {created!r}")
    if not isinstance(uuid, str) or not re.fullmatch("[0-9a-f]{32}", uuid):
        raise FormatError(f"{name}: uuid must be 32 hex digits, got {uuid!r}")
    user, roles = value["user"], value["roles"]
    if not isinstance(user, dict) or not isinstance(roles, dict):
        raise FormatError(f"{name}: 'user' and 'roles' must be objects")
    schema = Schema.from_json(value["schema"], roles)
    _check_size(ring, schema)
    features = _names(value["features"], "incompat", name)
    varies = bool(schema.varying)
    heap_nbytes = 0
    if varies or HEAP in features or IMAGE in features:
        heap_nbytes = _heap_nbytes(value, features, ring, schema, name)
    engine = _choice(value, "engine", name, ENGINES)
    zarr = engine == "zarr"
    sharding = Sharding.from_json(value.get("zarr"), ring) if zarr else None
    return Metadata(
        uuid=bytes.fromhex(uuid),
        created=created,
        generation=_number(value, "generation", name, 1, 999_999),
        engine=engine,
        autoreset=_choice(value, "autoreset", name, AUTORESETS),
        ring=ring,
        schema=schema,
        user=user,
        ro_compat=tuple(_names(value["features"], "ro_compat", name)),
        sharding=sharding,
        heap_nbytes=heap_nbytes,
    )


def _heap_nbytes(value: Json, features: list[str], ring: Ring, schema: Schema, name: str) -> int:
    """The bytes of each heap, where a field varies.

    Raises:
        FormatError: The features are not those that the schema needs.
    """
    needed = _needed(schema)
    if (HEAP in needed) != (HEAP in features) or "heap_bytes" not in value:
        raise FormatError(
            f"{name} is damaged: it must have the feature 'heap' exactly where a field "
            "varies, and then heap_bytes"
        )
    if (IMAGE in needed) != (IMAGE in features):
        raise FormatError(
            f"{name} is damaged: it must have the feature 'image' exactly where a field is of "
            "images"
        )
    heap_nbytes = _number(value, "heap_bytes", name, HEAP_STEP_NBYTES, MAX_HEAPS_NBYTES)
    check_heap_nbytes(heap_nbytes, ring, schema)
    return heap_nbytes


def _needed(schema: Schema) -> list[str]:
    """Features that a reader of this schema needs, by name."""
    empty = any(not field.nbytes for field in schema.fields.values())
    needed = {
        AGENT_ENDS: schema.num_agents is not None,
        EMPTY_FIELDS: empty,
        HEAP: bool(schema.varying),
        IMAGE: any(field.encoding is not None for field in schema.fields.values()),
    }
    return [name for name, used in needed.items() if used]


def _check_size(ring: Ring, schema: Schema) -> None:
    """Refuse sizes that no system call takes."""
    row_nbytes = 8 + sum(field.nbytes for field in schema.fields.values())
    nbytes = ring.num_rows * row_nbytes
    if nbytes >= MAX_FILES_NBYTES:
        raise SchemaError(
            f"capacity: {ring.capacity} rows of {ring.num_envs} environments take "
            f"{nbytes} bytes, but must take fewer than {MAX_FILES_NBYTES}. Choose a "
            "smaller capacity."
        )


def check_heap_nbytes(
    heap_nbytes: int, ring: Ring, schema: Schema, unrounded: int | None = None
) -> None:
    """Refuse a heap that cannot hold the rows of a schema.

    Args:
        heap_nbytes: Bytes of each environment's; 0 where no field varies.
        ring: Of the rows.
        schema: The fields.
        unrounded: What was rounded up to them, for messages.

    Raises:
        SchemaError: It is too small or too large, or no field varies.
    """
    unrounded = heap_nbytes if unrounded is None else unrounded
    if not schema.varying:
        if heap_nbytes:
            raise SchemaError(
                "heap_bytes must be None without a field that varies, got "
                f"{unrounded}. Leave it out."
            )
        return
    least = smallest_heap_nbytes(schema)
    if heap_nbytes < least:
        raise SchemaError(
            f"heap_bytes must be at least {least} for this schema, {HEAP_ROWS} times "
            f"the longest values of one row, got {unrounded}. Pass more, or lower "
            "max_length."
        )
    if heap_nbytes % HEAP_STEP_NBYTES:
        raise SchemaError(
            f"heap_bytes must be a multiple of {HEAP_STEP_NBYTES}, got {heap_nbytes}. Round it up."
        )
    if heap_nbytes * ring.num_envs >= MAX_HEAPS_NBYTES:
        raise SchemaError(
            f"heap_bytes: {ring.num_envs} heaps of {heap_nbytes} bytes must take fewer "
            f"than {MAX_HEAPS_NBYTES} together. Pass less."
        )


def rows_of_heap(heap_nbytes: int, schema: Schema) -> int | None:
    """Rows whose longest values a heap holds; None where no field varies."""
    return heap_nbytes // schema.max_heap_nbytes if schema.varying else None


def _check_shards(sharding: Sharding, ring: Ring, schema: Schema, heap_nbytes: int) -> None:
    """Refuse shards that values could not wait for, as the heap is needed.

    Raises:
        SchemaError: The layout, the heap or the slots do not suit them.
    """
    if ring.layout != "env_major":
        raise SchemaError(
            f"layout must be 'env_major' with engine='zarr', as field "
            f"{schema.varying[0]!r} varies, got {ring.layout!r}. Leave it out."
        )
    least = HEAP_SHARDS * sharding.shard_rows * schema.max_heap_nbytes
    if heap_nbytes < least:
        raise SchemaError(
            f"heap_bytes must be at least {least} for shards of {sharding.shard_rows} "
            f"rows, got {heap_nbytes}. Pass more, or lower max_length."
        )
    needed = ring.capacity + ring.reserve + ring.block_rows + sharding.shard_rows
    if ring.slots < needed:
        raise SchemaError(
            f"slots must be at least {needed} where a field varies, got {ring.slots}. "
            "The file is damaged: restore it from a copy."
        )


def smallest_heap_nbytes(schema: Schema) -> int:
    """Bytes that the heap of an environment has at least; 0 where no field varies."""
    needed = HEAP_ROWS * schema.max_heap_nbytes
    return -(-needed // HEAP_STEP_NBYTES) * HEAP_STEP_NBYTES


def heap_reserve_nbytes(schema: Schema, heap_nbytes: int) -> int:
    """Bytes of an environment's heap whose rows may be discarded ahead of new ones.

    Of a longest row at least: then a raise of tails lets the next row in, whatever it
    is.
    """
    return max(heap_nbytes // 16, schema.max_heap_nbytes)


def planned_lengths(schema: Schema) -> dict[str, float]:
    """Items of an average value, by path of each field whose declaration says it."""
    encodings = {path: schema.fields[path].encoding for path in schema.varying}
    return {p: float(e.planned_nbytes) for p, e in encodings.items() if e is not None}


def planned_heap_nbytes(schema: Schema, capacity: int, lengths: Mapping[str, float]) -> int:
    """Bytes of a heap in which a whole capacity of rows lives.

    Args:
        schema: The fields.
        capacity: Rows of the environment.
        lengths: Items of the average value, by path of each field that varies.

    Returns:
        A legal ``heap_bytes``: for the rows, the reserve that may be given up ahead,
        and what is passed by at the ring's end.
    """
    row = longest = 0
    for path in schema.varying:
        field = schema.fields[path]
        nbytes = ceil(lengths[path] * field.inner_nbytes)
        row += -(-nbytes // HEAP_ALIGNMENT) * HEAP_ALIGNMENT
        longest = max(longest, field.max_heap_nbytes)
    return heap_nbytes_for(schema, capacity * row + longest)


def heap_nbytes_for(schema: Schema, rows: int) -> int:
    """A legal ``heap_bytes`` for values of rows that take so many bytes in all."""
    # The reserve is a sixteenth of the heap, or the longest row.
    nbytes = max(-(-16 * rows // 15) + HEAP_ALIGNMENT, rows + schema.max_heap_nbytes)
    nbytes = max(nbytes, smallest_heap_nbytes(schema))
    return -(-nbytes // HEAP_STEP_NBYTES) * HEAP_STEP_NBYTES


def _number(value: Json, key: str, name: str, minimum: int, maximum: int) -> int:
    number = value[key]
    if type(number) is not int or not minimum <= number <= maximum:
        raise FormatError(
            f"{name}: {key} must be an integer in [{minimum}, {maximum}], got {number!r}"
        )
    return number


def _choice(value: Json, key: str, name: str, legal: tuple[T, ...]) -> T:
    for choice in legal:
        if value[key] == choice:
            return choice
    raise FormatError(f"{name}: {key} must be one of {legal}, got {value[key]!r}")


def _names(features: Mapping[str, object], key: str, name: str) -> list[str]:
    names = features.get(key, [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise FormatError(f"{name}: {key} must be a list of names, got {names!r}")
    return names
