"""The description of a dataset's rows, as a value and as strict JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.errors import FormatError, SchemaError, VersionError
from mmreplay.format.metadata import (
    AUTORESETS,
    MAX_CAPACITY,
    MAX_HEAPS_NBYTES,
    MAX_NUM_ENVS,
    Autoreset,
    Engine,
)
from mmreplay.nesting import under
from mmreplay.ring import LAYOUTS, Layout
from mmreplay.samplers.priority_file import check_name
from mmreplay.schema import Schema
from mmreplay.strict_json import Json

if TYPE_CHECKING:
    from mmreplay.convert.values import ValueSizes

MAGIC = "mmreplay"
MAJOR, MINOR = 1, 0
VARYING_MINOR = 1
"""The minor version where a field varies."""
MAX_NBYTES = 8 << 20
# Positions must be below this: docs/format.md, section 3.
MAX_POSITION = 1 << 62

ENV_ID, POSITION, FLAGS = "_env_id", "_position", "_flags"
RESERVED = {ENV_ID: "int64", POSITION: "int64", FLAGS: "uint8"}
"""Columns that every file has beside the fields."""
PRIORITY = "_priority"
"""A float32 column of priorities, if there are any; below 0 for rows without one."""
KEY, MEMBER = "mmreplay", "mmreplay.json"
"""Names of the description in files."""
RESERVED_NAMES = (*RESERVED, PRIORITY, KEY, MEMBER)
"""Names that no field of a converted buffer may have."""
VALUES, OFFSETS = ".values", ".offsets"
"""Endings of the names of the two arrays that hold a field that varies."""

T = TypeVar("T", bound=str)
_KEYS = {
    "format",
    "version",
    "schema",
    "roles",
    "num_envs",
    "first",
    "stop",
    "capacity",
    "autoreset",
    "layout",
    "uuid",
    "statistics",
    "user",
}


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a dataset's rows.

    Attributes:
        schema: The fields.
        first: int64 ``[E]``, position of each environment's oldest row.
        stop: int64 ``[E]``, position after its newest row.
        capacity: Rows per environment in the source's ring.
        autoreset: The environments' behaviour at an episode's end.
        layout: Of the source's ring, if it has one.
        uuid: Hex name of the source buffer, or ``""``.
        statistics: Statistics of the data, as free-form JSON.
        user: The user's own JSON.
        priorities: Name of the sampler's column that `PRIORITY` holds, or ``""``.
        heap_nbytes: Bytes of each environment's heap in the source's ring; 0 where no
            field varies, or the source has no heap that holds the values of all rows.
        values: Measures the values of fields that vary, for a writer that needs their
            sizes before the first row; None where none varies, and of a reader's own
            description.
        engine: Of a new buffer of the rows, if the source decides it.

    Raises:
        SchemaError: A value is not legal, or a field has a reserved name.
    """

    schema: Schema
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    capacity: int
    autoreset: Autoreset = "disabled"
    layout: Layout | None = None
    uuid: str = ""
    statistics: Json = field(default_factory=dict)
    user: Json = field(default_factory=dict)
    priorities: str = ""
    heap_nbytes: int = 0
    values: ValueSizes | None = field(default=None, repr=False, compare=False)
    engine: Engine | None = None

    def __post_init__(self) -> None:
        reserved = [path for path in self.schema.paths if path in RESERVED_NAMES]
        if reserved:
            raise SchemaError(
                f"field {reserved[0]!r}: converted files use this name themselves, as "
                f"all of {', '.join(RESERVED_NAMES)}. Leave the field out with "
                "fields=, or rename it."
            )
        if self.priorities:
            check_name(self.priorities)
        if len(self.first) != len(self.stop) or not len(self.first):
            raise SchemaError(
                "description: first and stop must have one position for each "
                f"environment, got {len(self.first)} and {len(self.stop)}."
            )
        if (self.first < 0).any() or (self.stop < self.first).any():
            raise SchemaError(
                "description: first and stop must be 0 <= first <= stop in every environment."
            )

    @property
    def num_envs(self) -> int:
        """Environments."""
        return len(self.first)

    @property
    def rows(self) -> int:
        """Rows of all environments, final rows included."""
        return int((self.stop - self.first).sum())

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype name and row shape of every column of a file, by name.

        The shape of a field that varies begins with None.
        """
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, ()) for name, dtype in RESERVED.items()
        }
        if self.priorities:
            found[PRIORITY] = ("float32", ())
        for path, each in self.schema.fields.items():
            found[path] = (each.dtype, each.shape)
        return found

    @property
    def fixed_columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The columns of fields that do not vary, and those beside the fields."""
        varying = self.schema.varying
        return {n: kind for n, kind in self.columns.items() if n not in varying}

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype name and shape of every array of a file, by name.

        A column is one array ``[rows, *shape]``. A field that varies takes two: its
        offsets int64 ``[rows + 1]`` and its values ``[total, *inner]``, whose
        totals `values` measures.

        Raises:
            SchemaError: Two arrays would have one name.
        """
        self.refuse_equal_names()
        return self.arrays_of(self.rows, self._totals())

    def _totals(self) -> Mapping[str, int]:
        if self.values is not None:
            return self.values.totals
        assert not self.rows or not self.schema.varying, "values were not measured"
        return dict.fromkeys(self.schema.varying, 0)

    def arrays_of(
        self, rows: int, totals: Mapping[str, int]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The arrays of some of the rows; see `arrays`.

        Args:
            rows: How many.
            totals: Items of their values, by path of each field that varies.
        """
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, (dtype, shape) in self.columns.items():
            if name in totals:
                found[name + OFFSETS] = ("int64", (rows + 1,))
                found[name + VALUES] = (dtype, (totals[name], *shape[1:]))
            else:
                found[name] = (dtype, (rows, *shape))
        return found

    def refuse_equal_names(self) -> None:
        """Refuse fields whose arrays would have the name of another's.

        Raises:
            SchemaError: There are some.
        """
        for path in self.schema.varying:
            for name in (path + OFFSETS, path + VALUES):
                if name in self.columns:
                    raise SchemaError(
                        f"field {name!r} has the name of an array in which field "
                        f"{path!r} is stored, as it varies. Leave one of them out with "
                        "fields=, or rename it."
                    )

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row in a block; of values that vary 16 each, as in a ring."""
        fields = self.schema.fields.values()
        reserved = 8 + 8 + 1 + (4 if self.priorities else 0)
        return reserved + sum(each.nbytes for each in fields)

    def select(self, paths: tuple[str, ...]) -> Description:
        """The same rows with some of the fields; see `select_fields`."""
        schema = select_fields(self.schema, paths)
        heap_nbytes = self.heap_nbytes if schema.varying else 0
        return replace(self, schema=schema, heap_nbytes=heap_nbytes, values=None)

    def to_bytes(self) -> bytes:
        """The description as JSON.

        Raises:
            FormatError: It takes more than 8 MiB.
        """
        value: Json = {
            "format": MAGIC,
            "version": [MAJOR, VARYING_MINOR if self.schema.varying else MINOR],
            "schema": self.schema.to_json(),
            "roles": dict(self.schema.roles),
            "num_envs": self.num_envs,
            "first": self.first.tolist(),
            "stop": self.stop.tolist(),
            "capacity": self.capacity,
            "autoreset": self.autoreset,
            "layout": self.layout,
            "uuid": self.uuid,
            "statistics": self.statistics,
            "user": self.user,
        }
        if self.priorities:
            value["priorities"] = self.priorities
        if self.schema.varying:
            value["heap_bytes"] = self.heap_nbytes
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        if len(data) > MAX_NBYTES:
            raise FormatError(
                f"the description must take at most {MAX_NBYTES} bytes, got "
                f"{len(data)}. Store smaller statistics with the buffer."
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Description:
        """Parse and check a description.

        Args:
            data: JSON.
            name: Its name in errors, such as a file and a member.

        Raises:
            FormatError: It is no description.
            VersionError: It needs a newer version.
        """
        if len(data) > MAX_NBYTES:
            raise FormatError(
                f"{name} must have at most {MAX_NBYTES} bytes, got {len(data)}. It is "
                "not a description of mmreplay."
            )
        value = strict_json.parse(data, name)
        _check_version(value, name)
        missing = _KEYS - value.keys()
        if missing:
            raise FormatError(f"{name} lacks {sorted(missing)}. The file is damaged.")
        try:
            return _from_json(value, name)
        except SchemaError as error:
            raise FormatError(f"{name}: {error}") from error


def plain(schema: Schema, rows: int) -> Description:
    """The description of rows of one environment, from position 0 on."""
    first, stop = np.zeros(1, np.int64), np.array([rows])
    return Description(schema, first, stop, max(1, rows))


def select_fields(schema: Schema, paths: tuple[str, ...]) -> Schema:
    """Some fields of a schema; roles without a field are removed.

    Raises:
        SchemaError: A path is no field, or next observations stay without
            observations.
    """
    fields = {path: schema[path] for path in paths}
    roles = {r: top for r, top in schema.roles.items() if under(paths, top)}
    return Schema.from_flat(fields, roles)


def refuse_new_ends(roles: Mapping[str, str], schema: Schema, option: str) -> None:
    """Refuse fields that become ends of episodes, which the flags do not mark.

    Args:
        roles: Of the rows before, by the names that fields have now.
        schema: Of the rows now.
        option: Of the user, for errors.

    Raises:
        SchemaError: A field plays the role of an end that it did not play before.
    """
    for end in ("terminated", "truncated"):
        path = schema.role(end)
        if path is not None and path != roles.get(end):
            raise SchemaError(
                f"{option}: field {path!r} would play the role {end}, and the source does not end "
                "its episodes by it. Give it another name, leave it out, or add the rows to a new "
                "ring, whose episodes it ends."
            )


def _check_version(value: Json, name: str) -> None:
    if value.get("format") != MAGIC:
        raise FormatError(
            f"{name}: format must be {MAGIC!r}, got {value.get('format')!r}. It is not "
            "a description of mmreplay."
        )
    version = value.get("version")
    if (
        not isinstance(version, list)
        or len(version) != 2
        or not all(type(number) is int for number in version)
    ):
        raise FormatError(f"{name}: version must be [major, minor], got {version!r}.")
    if version[0] != MAJOR:
        raise VersionError(
            f"{name} has version {version[0]}.{version[1]}, but this mmreplay reads "
            f"{MAJOR}.x. Install a newer mmreplay."
        )


def _from_json(value: Json, name: str) -> Description:
    num_envs = _number(value["num_envs"], "num_envs", name, 1, MAX_NUM_ENVS)
    uuid = value["uuid"]
    if not isinstance(uuid, str) or not re.fullmatch("([0-9a-f]{32})?", uuid):
        raise FormatError(f"{name}: uuid must be 32 hex digits or '', got {uuid!r}.")
    priorities = value.get("priorities", "")
    if not isinstance(priorities, str):
        raise FormatError(f"{name}: priorities must be a name, got {str(priorities)[:60]!r}.")
    for key in ("roles", "statistics", "user"):
        if not isinstance(value[key], dict):
            raise FormatError(f"{name}: {key} must be an object, got {str(value[key])[:60]!r}.")
    layout = value["layout"]
    schema = Schema.from_json(value["schema"], value["roles"])
    heap_nbytes = value.get("heap_bytes", 0) if schema.varying else 0
    return Description(
        schema=schema,
        first=_positions(value["first"], "first", name, num_envs),
        stop=_positions(value["stop"], "stop", name, num_envs),
        capacity=_number(value["capacity"], "capacity", name, 1, MAX_CAPACITY),
        autoreset=_choice(value["autoreset"], "autoreset", name, AUTORESETS),
        layout=None if layout is None else _choice(layout, "layout", name, LAYOUTS),
        uuid=uuid,
        statistics=value["statistics"],
        user=value["user"],
        priorities=priorities,
        heap_nbytes=_number(heap_nbytes, "heap_bytes", name, 0, MAX_HEAPS_NBYTES - 1),
    )


def _positions(value: object, key: str, name: str, num_envs: int) -> NDArray[np.int64]:
    if not isinstance(value, list) or len(value) != num_envs:
        got = len(value) if isinstance(value, list) else type(value).__name__
        raise FormatError(f"{name}: {key} must be a list of {num_envs} positions, got {got}.")
    numbers = [_number(each, key, name, 0, MAX_POSITION - 1) for each in value]
    return np.array(numbers, np.int64)


def _number(number: object, key: str, name: str, low: int, high: int) -> int:
    if type(number) is not int or not low <= number <= high:
        raise FormatError(
            f"{name}: {key} must be an integer in [{low}, {high}], got {str(number)[:60]}."
        )
    return number


def _choice(value: object, key: str, name: str, legal: tuple[T, ...]) -> T:
    for choice in legal:
        if value == choice:
            return choice
    raise FormatError(f"{name}: {key} must be one of {legal}, got {str(value)[:60]!r}.")
