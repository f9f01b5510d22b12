"""Finds the arrays of a Zarr group, version 2 or 3, within bounds.

The listing is ours, because zarr-python's fails for the whole group where one array
has a codec that it does not know, and has no bound on the number of nodes. zarr-python
reads the metadata of each array that is used (`metadata`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mmreplay.errors import FormatError, SchemaError
from mmreplay.storage.zarr.group_json import parse
from mmreplay.strict_json import Json
from mmreplay.zarr_groups.blobs import Blobs
from mmreplay.zarr_groups.metadata import ForeignArray, read_array

MAX_JSON_NBYTES = 16 << 20
MAX_NODES = 10_000
MAX_DEPTH = 16
V3, GROUP, ARRAY, ALL = "zarr.json", ".zgroup", ".zarray", ".zmetadata"
NAMES = (V3, GROUP, ARRAY)


@dataclass(slots=True)
class Hierarchy:
    """What a group holds.

    Attributes:
        version: 2 or 3.
        attributes: Of the group, where it is of version 3.
        arrays: By path below the group, in order; metadata as it stands.
        checked: Those that `array` was asked for.
    """

    version: int
    attributes: Json
    arrays: dict[str, Json]
    where: str
    checked: dict[str, ForeignArray] = field(default_factory=dict)

    def array(self, name: str) -> ForeignArray:
        """One array, checked.

        Raises:
            SchemaError: Its items can be no field's.
            FormatError: It is damaged, or of a kind that is not read.
        """
        if name not in self.checked:
            what = f"{self.where}: array {name!r}"
            self.checked[name] = read_array(self.arrays[name], self.version, name, what)
        return self.checked[name]


def read_json(blobs: Blobs, names: Iterable[str]) -> list[Json | None]:
    """JSON objects by name, None for those that are not there."""
    named = list(names)
    return [
        None if data is None else parse(data, f"{blobs.where}/{name}")
        for name, data in zip(named, blobs.look(named, MAX_JSON_NBYTES), strict=True)
    ]


def read(blobs: Blobs) -> Hierarchy:
    """Find a group's arrays.

    Raises:
        FormatError: It is no group, or of another version of Zarr.
        CorruptError: Its metadata is no JSON.
    """
    v3, v2, array, consolidated = read_json(blobs, (V3, GROUP, ARRAY, ALL))
    version = 3 if v3 is not None else 2
    root = v3 or v2 or consolidated
    if array is not None or (v3 or {}).get("node_type") == "array":
        raise FormatError(
            f"{blobs.where} must be a Zarr group, got an array. Pass the group that holds it."
        )
    version_key = {3: "zarr_format", 2: "zarr_format" if v2 else "zarr_consolidated_format"}
    if root is None or root.get(version_key[version]) not in (1, version):
        got = "nothing" if root is None else f"zarr_format {root.get('zarr_format')!r}"
        raise FormatError(
            f"{blobs.where} must be a Zarr group of version 2 or 3 ({V3} or {GROUP}), "
            f"got {got}. Check the path."
        )
    attributes = root.get("attributes") if version == 3 else None
    nodes = _consolidated(v3, consolidated)
    arrays = dict(_walk(blobs, version) if nodes is None else nodes)
    for name in arrays:
        _check(name, blobs.where)
    return Hierarchy(
        version, attributes if isinstance(attributes, dict) else {}, arrays, blobs.where
    )


def _consolidated(v3: Json | None, v2: Json | None) -> list[tuple[str, Json]] | None:
    """Arrays that the group's own metadata lists, if it lists any."""
    listed = (v3 or {}).get("consolidated_metadata") if v3 is not None else v2
    nodes = listed.get("metadata") if isinstance(listed, dict) else None
    if not isinstance(nodes, dict):
        return None
    if v3 is not None:
        return [
            (name, node)
            for name, node in nodes.items()
            if isinstance(node, dict) and node.get("node_type") == "array"
        ]
    return [
        (name.removesuffix(f"/{ARRAY}"), node)
        for name, node in nodes.items()
        if name.endswith(f"/{ARRAY}") and isinstance(node, dict)
    ]


def _walk(blobs: Blobs, version: int) -> Iterator[tuple[str, Json]]:
    """Arrays below the root, level by level of each branch."""
    waiting, seen = [("", 0)], 0
    while waiting:
        group, depth = waiting.pop(0)
        names = [
            f"{group}/{node}" if group else node
            for node in blobs.children(group)
            if not node.startswith(".") and node not in NAMES
        ]
        seen += len(names)
        if seen > MAX_NODES or depth > MAX_DEPTH:
            raise FormatError(
                f"{blobs.where} has {seen} arrays and groups, {depth} deep, but must "
                f"have at most {MAX_NODES}, {MAX_DEPTH} deep. Pass the group that has "
                "the arrays."
            )
        nodes = _nodes_v3 if version == 3 else _nodes_v2
        for name, array, is_group in nodes(blobs, names):
            if array is not None:
                yield name, array
            elif is_group:
                waiting.append((name, depth + 1))


def _nodes_v2(blobs: Blobs, names: list[str]) -> Iterator[tuple[str, Json | None, bool]]:
    """Of each name what says that it is an array, and whether it is a group."""
    found = read_json(blobs, [f"{name}/{mark}" for name in names for mark in (ARRAY, GROUP)])
    for name, array, group in zip(names, found[::2], found[1::2], strict=True):
        yield name, array, group is not None


def _nodes_v3(blobs: Blobs, names: list[str]) -> Iterator[tuple[str, Json | None, bool]]:
    """The same of version 3, where one file says either."""
    found = read_json(blobs, [f"{name}/{V3}" for name in names])
    for name, node in zip(names, found, strict=True):
        is_array = node is not None and node.get("node_type") == "array"
        yield name, node if is_array else None, node is not None


def _check(name: str, where: str) -> None:
    """Refuse a name that could lead out of the group."""
    if any(segment in ("", ".", "..") or "\0" in segment for segment in name.split("/")):
        raise FormatError(
            f"{where}: names of arrays must not have empty segments, '.' or '..', got "
            f"{name!r}. The group is damaged or malicious."
        )


def storable(hierarchy: Hierarchy, name: str) -> tuple[ForeignArray | None, str]:
    """An array, or why it can be no field."""
    try:
        return hierarchy.array(name), ""
    except SchemaError as error:
        return None, str(error)
