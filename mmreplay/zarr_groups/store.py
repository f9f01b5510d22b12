"""The read-only store of a Zarr group: of other writers, or a buffer's group alone.

`GroupStore` reads rows of any group. `read` checks what the attributes of a group that
mmreplay wrote say: what its rows are, and which of them are in shards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, FormatError, SchemaError
from mmreplay.format.metadata import AUTORESETS, MAX_NUM_ENVS, Autoreset
from mmreplay.ring import LAYOUTS, Ring, Run
from mmreplay.schema import Schema
from mmreplay.schema.notes import Notes
from mmreplay.storage.layout import served_ends
from mmreplay.storage.store import Columns, UnsealedStore
from mmreplay.storage.zarr.group import FLAGS_NAME, folder_name
from mmreplay.strict_json import Json
from mmreplay.zarr_groups.arrays import ChunkedReader
from mmreplay.zarr_groups.blobs import Blobs
from mmreplay.zarr_groups.hierarchy import Hierarchy
from mmreplay.zarr_groups.mapping import MAX_ROWS
from mmreplay.zarr_groups.metadata import ForeignArray

Ids = NDArray[np.int64]


class GroupStore(UnsealedStore):
    """Rows of a group; see `Store` for what each method owes."""

    def __init__(
        self,
        ring: Ring,
        schema: Schema,
        arrays: Mapping[str, ForeignArray],
        flags: NDArray[np.uint8],
        blobs: Blobs,
        reader: ChunkedReader,
        *,
        by_env: bool,
    ) -> None:
        """Make one.

        Args:
            ring: Where rows lie.
            schema: The fields.
            arrays: Of each field that flags do not hold.
            flags: uint8 ``[num_rows]``.
            blobs: The group, closed with the store.
            reader: Reads it.
            by_env: Arrays are ``[E, slots, *shape]``; else ``[rows, *shape]``.
        """
        self.ring, self.schema = ring, schema
        self.packed = frozenset[str]()
        self.heap = self.records = None
        self.limit_step = 1
        self._arrays, self._flags = arrays, flags
        self._blobs, self._reader = blobs, reader
        self._by_env = by_env

    def gather(self, rows: Ids, paths: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`.

        Raises:
            CorruptError: A chunk is damaged, or of rows that are alive and missing.
            FailedError: A remote store cannot be reached.
        """
        at = self._at(rows)
        columns: dict[str, NDArray[np.generic]] = {}
        for path in paths:
            array, field = self._arrays.get(path), self.schema[path]
            if array is not None:
                columns[path] = np.empty((len(rows), *field.shape), field.numpy)
                self._reader.take(array, at, columns[path])
            elif not field.nbytes:
                columns[path] = np.empty((len(rows), *field.shape), field.numpy)
        return columns

    def _at(self, rows: Ids) -> list[Ids]:
        """Coordinates of rows in the arrays."""
        if not self._by_env:
            return [rows]
        if self.ring.layout == "env_major":
            return list(np.divmod(rows, self.ring.slots))
        slots, env_ids = np.divmod(rows, self.ring.num_envs)
        return [env_ids, slots]

    def prefetch(self, rows: Ids, paths: Sequence[str], now: bool = False) -> int:
        """Ask for nothing: chunks are fetched side by side when they are read."""
        return 0

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        return self._flags

    def flags(self, rows: Ids, new: bool = False) -> NDArray[np.uint8]:
        """Flags of rows; see `Store.flags`."""
        return self._flags.take(rows)

    @property
    def files(self) -> list[File]:
        """None: files are opened while they are read."""
        return []

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (bytes of the rows unpacked, 0): the files are not counted."""
        return self.ring.num_rows * self.schema.row_nbytes, 0

    def unmap(self) -> None:
        """Do nothing: nothing is mapped."""

    def close(self) -> None:
        """Give the group back."""
        self._blobs.close()

    def _refuse(self) -> NoReturn:
        raise FailedError(
            f"{self._blobs.where} is a Zarr group, which is read-only. Make a buffer "
            "of it with mmreplay convert."
        )

    def write(self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]) -> None:
        """Refuse; likewise all that follows."""
        self._refuse()

    @property
    def ends(self) -> NDArray[np.uint8]:
        """Refuse."""
        self._refuse()

    def prepare(self, data: Mapping[str, object]) -> int:
        """Refuse."""
        self._refuse()

    def write_prepared(self, runs: Sequence[Run], flags: NDArray[np.uint8]) -> None:
        """Refuse."""
        self._refuse()

    def allocate(self, first: Ids, stop: Ids) -> None:
        """Refuse."""
        self._refuse()

    def give_up(self, limits: Ids) -> None:
        """Refuse."""
        self._refuse()

    def set(self, path: str, rows: Ids, values: NDArray[np.generic]) -> None:
        """Refuse."""
        self._refuse()

    def sync(self) -> None:
        """Refuse."""
        self._refuse()


MAX_POSITION = 1 << 62
BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class SealedGroup:
    """What the attributes say.

    Attributes:
        ring: Capacity, environments, slots and layout.
        schema: Fields that have an array, or that flags hold.
        autoreset: What follows an episode's end.
        first: int64 ``[E]``, oldest positions.
        stop: int64 ``[E]``; rows below are in shards.
        uuid: 16 bytes, the buffer's.
        generation: Of its data.
        user_metadata: The user's own JSON.
        arrays: By path of the field, of those that flags do not hold.
        flags: The array of the rows' flags.
    """

    ring: Ring
    schema: Schema
    autoreset: Autoreset
    first: Ids
    stop: Ids
    uuid: bytes
    generation: int
    user_metadata: Json
    arrays: Mapping[str, ForeignArray]
    flags: ForeignArray


class _About:
    """Reads the attributes' member; what is wrong names the group."""

    def __init__(self, about: Json, where: str) -> None:
        self._about, self._where = about, where

    def refuse(self, key: str, expected: str) -> FormatError:
        return FormatError(
            f"{self._where}: attribute {key} must be {expected}, got "
            f"{self._about.get(key)!r:.80}. The group is damaged: copy it again from "
            "the buffer."
        )

    def number(self, key: str, maximum: int) -> int:
        value = self._about.get(key)
        if type(value) is not int or not 1 <= value <= maximum:
            raise self.refuse(key, f"an integer in [1, {maximum}]")
        return value

    def positions(self, key: str, num_envs: int) -> Ids:
        value = self._about.get(key)
        if (
            not isinstance(value, list)
            or len(value) != num_envs
            or not all(type(n) is int and 0 <= n <= MAX_POSITION for n in value)
        ):
            raise self.refuse(key, f"{num_envs} positions")
        return np.array(value, np.int64)


def read(hierarchy: Hierarchy, about: Json, notes: Notes) -> SealedGroup:
    """Check what a group of ours says of itself.

    Raises:
        FormatError: It is damaged, or its buffer was never closed.
    """
    where, checked = hierarchy.where, _About(about, hierarchy.where)
    if "stop" not in about:
        raise FormatError(
            f"{where} does not say which of its rows are sealed. Close its buffer "
            "before you copy the group."
        )
    capacity = checked.number("capacity", MAX_ROWS)
    num_envs = checked.number("num_envs", MAX_NUM_ENVS)
    slots = checked.number("slots", MAX_ROWS)
    layout, autoreset = about.get("layout"), about.get("autoreset")
    if layout not in LAYOUTS:
        raise checked.refuse("layout", f"one of {LAYOUTS}")
    if autoreset not in AUTORESETS:
        raise checked.refuse("autoreset", f"one of {AUTORESETS}")
    if slots < capacity or slots * num_envs > MAX_ROWS:
        raise checked.refuse("slots", f"at least {capacity}, and {MAX_ROWS} in all at most")
    uuid = about.get("uuid")
    if not isinstance(uuid, str) or not re.fullmatch("[0-9a-f]{32}", uuid):
        raise checked.refuse("uuid", "32 hex digits")
    first = checked.positions("first", num_envs)
    stop = checked.positions("sealed" if "sealed" in about else "stop", num_envs)
    if (first > stop).any() or (stop - first > capacity).any():
        raise checked.refuse("stop", f"at most {capacity} rows above first")
    schema = _schema(about, checked, notes)
    for path in schema.varying:
        raise SchemaError(
            f"{where}: field {path!r} varies from step to step, and a group without "
            "its buffer has no values of it for mmreplay. Open the buffer's folder, or "
            "read the group with zarr-python."
        )
    ring = Ring(capacity, num_envs, layout, 1, 1, slots)
    served = served_ends(schema)
    arrays = {
        path: _array(hierarchy, folder_name(path), field.numpy, field.shape, ring)
        for path, field in schema.fields.items()
        if path not in served and field.nbytes
    }
    flags = _array(hierarchy, FLAGS_NAME, np.dtype(np.uint8), (), ring)
    user_metadata = about.get("user")
    return SealedGroup(
        ring,
        schema,
        autoreset,
        first,
        stop,
        bytes.fromhex(uuid),
        checked.number("generation", 999_999),
        user_metadata if isinstance(user_metadata, dict) else {},
        arrays,
        flags,
    )


def _schema(about: Json, checked: _About, notes: Notes) -> Schema:
    """The fields that the group holds."""
    try:
        stored_schema = Schema.from_json(about.get("schema"), about.get("roles"))
        mutable = [path for path, field in stored_schema.fields.items() if field.mutable]
        for path in mutable:
            notes.note(f"field {path!r} is mutable, and no group holds it: left out")
        fields = {p: field for p, field in stored_schema.fields.items() if p not in mutable}
        roles = {
            role: top
            for role, top in stored_schema.roles.items()
            if any(f"{path}/".startswith(f"{top}/") for path in fields)
        }
        return Schema.from_flat(fields, roles)
    except SchemaError as error:
        raise checked.refuse("schema", f"one of a buffer ({error})") from error


def _array(
    hierarchy: Hierarchy, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], ring: Ring
) -> ForeignArray:
    wanted = (ring.num_envs, ring.slots, *shape)
    try:
        if name not in hierarchy.arrays:
            raise SchemaError("no such array")
        array = hierarchy.array(name)
        if (array.shape, array.dtype) != (wanted, dtype):
            raise SchemaError(f"{array.dtype}{list(array.shape)}")
    except SchemaError as error:
        raise CorruptError(
            f"{hierarchy.where}: array {name!r} must be {dtype}{list(wanted)} by the "
            f"group's attributes, got {error}. It is damaged: copy it again from the "
            "buffer."
        ) from error
    return array


def read_flags(group: SealedGroup, reader: ChunkedReader) -> NDArray[np.uint8]:
    """Flags of every row of the ring, uint8 ``[num_rows]``; 0 where none is alive."""
    ring = group.ring
    flags = np.zeros(ring.num_rows, np.uint8)
    for env_id in range(ring.num_envs):
        first, stop = int(group.first[env_id]), int(group.stop[env_id])
        for low in range(first, stop, BLOCK_ROWS):
            positions = np.arange(low, min(low + BLOCK_ROWS, stop))
            env_ids = np.full(len(positions), env_id)
            out = np.empty(len(positions), np.uint8)
            reader.take(group.flags, [env_ids, positions % ring.slots], out)
            flags[ring.rows(env_ids, positions)] = out
    return flags
