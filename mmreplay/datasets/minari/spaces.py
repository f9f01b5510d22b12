"""Gymnasium's spaces as the JSON of Minari, read and made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmreplay.schema import Field
from mmreplay.schema.dtypes import DTYPES
from mmreplay.schema.field import MAX_LENGTH
from mmreplay.schema.spaces import CHARACTER_NBYTES

LEAST_SIDE = 32
"""Minari takes smaller boxes of bytes for no images."""


def leaf_of(space: Any, path: str) -> Any:
    """Return the subspace at a path, or None."""
    for name in path.split("/") if path else ():
        below = space.get("subspaces") if isinstance(space, dict) else None
        if isinstance(below, list) and name.isdecimal() and int(name) < len(below):
            space = below[int(name)]
        elif isinstance(below, dict):
            space = below.get(name)
        else:
            return None
    return space


def is_image(space: Any) -> bool:
    """Return whether Minari stores values of a space as JPEG images."""
    if not isinstance(space, dict) or space.get("type") != "Box":
        return False
    shape = space.get("shape")
    return (
        space.get("dtype") == "uint8"
        and isinstance(shape, list)
        and len(shape) in (2, 3)
        and all(isinstance(side, int) and side >= LEAST_SIDE for side in shape[:2])
    )


def drawn_field(field: Field) -> Field:
    """The field whose arrays Minari hands out: of images of one channel without it."""
    drawn = field.drawn
    if drawn is not field and drawn.shape[-1] == 1:
        return Field(drawn.shape[:-1], "uint8")
    return drawn


def stores_files(leaf: Any) -> bool:
    """Return whether Minari stores values of a space as files where it does at all.

    That is so of images whose bounds are 0 and 255.
    """
    return is_image(leaf) and all(
        leaf.get(key) in (bound, _filled(tuple(leaf["shape"]), bound))
        for key, bound in (("low", 0), ("high", 255))
    )


def text_field(space: Any) -> Field | None:
    """Return the field of a Text space, or None of another one."""
    longest = space.get("max_length") if isinstance(space, dict) else None
    if type(longest) is not int or space.get("type") != "Text" or longest < 0:
        return None
    return Field.text(min(max(1, CHARACTER_NBYTES * longest), MAX_LENGTH))


def box(field: Field) -> dict[str, Any]:
    """The widest space of a field's values."""
    kind = np.dtype(field.dtype).kind
    low, high = -np.inf, np.inf
    if kind in "iu":
        bounds = np.iinfo(field.dtype)
        low, high = bounds.min, bounds.max
    elif kind == "b":
        low, high = 0, 1
    space = bounded(field, low, high)
    shape = tuple(space["shape"])
    return {**space, "low": _filled(shape, low), "high": _filled(shape, high)}


def bounded(field: Field, low: float, high: float) -> dict[str, Any]:
    """A space of a field's values with the same bounds for each."""
    drawn = drawn_field(field)
    shape = list(drawn.shape)
    return {"type": "Box", "dtype": drawn.dtype, "shape": shape, "low": low, "high": high}


def limits_of(leaf: Any) -> tuple[Any, Any] | None:
    """The lowest and highest values of a leaf; None where it does not say them."""
    if not isinstance(leaf, dict):
        return None
    start = leaf.get("start", 0)
    if leaf.get("type") == "Discrete" and type(start) is type(leaf.get("n")) is int:
        return start, start + leaf["n"] - 1
    try:
        low, high = (
            np.broadcast_to(np.asarray(leaf[key]), leaf["shape"]) for key in ("low", "high")
        )
    except (KeyError, TypeError, ValueError):
        return None
    return (low, high) if low.dtype.kind in "biuf" and high.dtype.kind in "biuf" else None


def widen(leaf: dict[str, Any], low: Any, high: Any) -> None:
    """Give a leaf other limits, of the kind that it has; see `limits_of`."""
    if leaf["type"] == "Discrete":
        leaf |= {"start": int(low), "n": int(high) - int(low) + 1}
    else:
        leaf |= {"low": np.asarray(low).tolist(), "high": np.asarray(high).tolist()}


def discrete(minimum: int, maximum: int) -> dict[str, Any]:
    """Return the space of integers up to a maximum, from 0 or a minimum below it."""
    start = min(0, minimum)
    return {"type": "Discrete", "dtype": "int64", "start": start, "n": maximum - start + 1}


def nested(leaves: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The space of leaves by path below a role, one leaf of path ``""`` itself."""
    if "" in leaves:
        return leaves[""]
    tops: dict[str, dict[str, dict[str, Any]]] = {}
    for path, space in leaves.items():
        top, _, rest = path.partition("/")
        tops.setdefault(top, {})[rest] = space
    return {"type": "Dict", "subspaces": {top: nested(below) for top, below in tops.items()}}


def names_of(text: object, path: str) -> list[str]:
    """Names of a leaf's groups in Minari's HDF5, where items of a tuple have others."""
    names, space = [], parse(text)
    for name in path.split("/") if path else ():
        is_tuple = isinstance(space, dict) and space.get("type") == "Tuple"
        names.append(f"_index_{name}" if is_tuple else name)
        space = leaf_of(space, name)
    return names


def fits(text: object, fields: Mapping[str, Field]) -> bool:
    """Return whether the leaves of a space's JSON have the shapes and dtypes of fields.

    A leaf that Minari stores as files fits uint8 alone, and image fields fit no other.

    Args:
        text: The JSON.
        fields: By path below the role.
    """
    space = parse(text)
    if space is None or _count(space) != len(fields):
        return False
    for path, field in fields.items():
        leaf = leaf_of(space, path)
        kind = leaf.get("type") if isinstance(leaf, dict) else None
        shape = list(drawn_field(field).shape)
        if kind not in ("Box", "Discrete") or list(leaf.get("shape", [])) != shape:
            return False
        if not _holds(leaf, drawn_field(field)):
            return False
        as_files = stores_files(leaf)
        if (field.varies and not as_files) or (as_files and drawn_field(field).dtype != "uint8"):
            return False
    return True


def _holds(leaf: dict[str, Any], field: Field) -> bool:
    """Return whether values of a field's dtype can be in a leaf, as Gymnasium casts."""
    numpy = {name: np.dtype(name) for name in DTYPES if name != "bfloat16"}
    if field.dtype not in numpy:
        return False
    if leaf["type"] == "Discrete":
        return numpy[field.dtype].kind in "iu"
    dtype = leaf.get("dtype")
    found = numpy.get(dtype) if isinstance(dtype, str) else None
    return found is not None and np.can_cast(numpy[field.dtype], found)


def parse(text: object) -> Any:
    """Return a space from its JSON, which may hold infinities; None if invalid."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def dump(space: dict[str, Any]) -> str:
    """A space as Minari writes it, infinities as Python's json has them."""
    return json.dumps(space)


def _filled(shape: tuple[int, ...], value: float) -> Any:
    return np.full(shape, value, object).tolist() if shape else value


def _count(space: Any) -> int:
    """Leaves of a space."""
    below = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(below, dict):
        return sum(map(_count, below.values()))
    return sum(map(_count, below)) if isinstance(below, list) else 1
