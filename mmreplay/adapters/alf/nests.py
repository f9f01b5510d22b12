"""Nests of tensors as flat fields, and back.

A nest is what alf calls one: named tuples, tuples, lists and dicts, within each other,
of tensors. A spec is a nest of things with a ``shape`` and a ``dtype``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.alf.errors import MissingError, UnfitError
from mmreplay.adapters.values import LOOK_ERRORS, Look
from mmreplay.schema import Field

STEM = "step"
"""What all leaves lie under, so that no name of theirs means something to a schema."""

Columns = dict[str, NDArray[np.generic]]


def children(nest: Any) -> dict[Any, Any] | None:
    """Parts of a nest by key, attribute or number; None of a leaf."""
    if isinstance(nest, dict):
        return nest
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return dict(zip(nest._fields, nest, strict=True))
    if isinstance(nest, tuple | list) and not isinstance(nest, torch.Size):
        return dict(enumerate(nest))
    return None


def leaves(nest: Any, path: str = STEM) -> Iterator[tuple[str, Any]]:
    """Leaves of a nest by path, in order."""
    parts = children(nest)
    if parts is None:
        yield path, nest
    else:
        for key, part in parts.items():
            yield from leaves(part, below(path, key))


def below(path: str, key: object) -> str:
    """Path of a part; a separator in the key is percent-encoded."""
    return f"{path}/{str(key).replace('%', '%25').replace('/', '%2F')}"


def fields_of(spec: Any) -> dict[str, Field]:
    """What each leaf of a spec is stored as, by path.

    Raises:
        UnfitError: There is no leaf, or one has no shape and dtype.
    """
    found = {}
    for path, leaf in leaves(spec):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UnfitError(
                f"data_spec: got {type(leaf).__name__} at {path!r}, expected something "
                "with a shape and a dtype; give a TensorSpec, an array or a tensor"
            )
        dtype = leaf.dtype
        if isinstance(dtype, torch.dtype):
            dtype = str(dtype).removeprefix("torch.")
        if path in found:
            raise UnfitError(
                f"data_spec: got two leaves at {path!r}, whose keys differ in nothing "
                "but their types, expected keys that are written differently; rename "
                "one"
            )
        found[path] = Field(tuple(leaf.shape), dtype)
    if not found:
        raise UnfitError(
            f"data_spec: got {spec!r}, which has no leaf, expected at least one; give "
            "a nest of TensorSpec"
        )
    return found


def flatten(spec: Any, nest: Any, path: str = STEM) -> Columns:
    """Leaves of a nest as arrays, by path.

    Raises:
        UnfitError: It is not of the spec's structure.
    """
    parts = children(spec)
    if parts is None:
        return {path: array(nest, bits=str(spec.dtype).endswith("bfloat16"))}
    theirs = children(nest)
    if theirs is None or theirs.keys() != parts.keys():
        got = type(nest).__name__ if theirs is None else list(theirs)
        raise UnfitError(
            f"nest at {path!r}: got {got}, expected {list(parts)}; give a nest of the "
            "structure of data_spec"
        )
    found: Columns = {}
    for key, part in parts.items():
        found |= flatten(part, theirs[key], below(path, key))
    return found


Outline = tuple[type, tuple[Any, ...], tuple[Any, ...]]
"""Of a nest: its type, the keys of its parts, and of each its outline, or its path."""
Given = dict[str, object]


def outlined(spec: Any, path: str = STEM) -> Outline | str:
    """What `plain` looks for in nests like a spec's."""
    parts = children(spec)
    if parts is None:
        return path
    inner = (outlined(part, below(path, key)) for key, part in parts.items())
    return type(spec), tuple(parts), tuple(inner)


def plain(
    outline: Outline | str, nest: Any, found: Given, looks: Mapping[str, Look]
) -> bool:
    """Put the leaves of a nest into a dict, as it mostly comes, in few calls.

    Args:
        outline: Of the spec.
        nest: Of the very types of the spec, its leaves tensors.
        found: What a ring takes as it is, by path, written.
        looks: Of each path, one of `LOOKS`.

    Returns:
        Whether it is so; where not, see `flatten`.
    """
    if isinstance(outline, str):
        return False  # a lone leaf
    kind, keys, inner = outline
    parts: Any = nest  # of any type until now
    if type(nest) is not kind or len(parts) != len(keys):
        return False
    try:
        values = [parts[key] for key in keys] if kind is dict else parts
        for value, part in zip(values, inner, strict=True):
            if isinstance(part, str):
                if type(value) is not torch.Tensor:
                    return False
                found[part] = looks[part](value)
            elif not plain(part, value, found, looks):
                return False
    except LOOK_ERRORS:
        return False
    return True


def never(leaf: torch.Tensor) -> object:
    """Where a tensor must not go in as it is; see `plain`.

    Raises:
        TypeError: Always.
    """
    raise TypeError(f"got {leaf.dtype}, expected it by way of numpy")


def array(leaf: Any, *, bits: bool = False) -> NDArray[Any]:
    """A tensor, of any device, as an array.

    Args:
        leaf: The tensor, or what numpy makes an array of.
        bits: It goes into a field of bfloat16, which stores the bits of one.
    """
    if isinstance(leaf, torch.Tensor):
        if bits and leaf.dtype == torch.bfloat16:
            leaf = leaf.resolve_neg().view(torch.uint16)
        elif leaf.dtype == torch.bfloat16 or (bits and leaf.dtype == torch.uint16):
            leaf = leaf.float()
        found: NDArray[Any] = leaf.numpy(force=True)
        return found
    return np.asarray(leaf)


def pack(
    spec: Any, found: Mapping[str, NDArray[Any]], device: Any, path: str = STEM
) -> Any:
    """Arrays by path as a nest of tensors of the spec's structure.

    Args:
        spec: The nest, or a part of it.
        found: Arrays of the leaves.
        device: Where the tensors are to be.
        path: Of the part.
    """
    parts = children(spec)
    if parts is None:
        leaf = torch.from_numpy(found[path])
        if spec.dtype == torch.bfloat16:
            leaf = leaf.view(torch.bfloat16)
        return leaf.to(device)
    made = {
        key: pack(part, found, device, below(path, key)) for key, part in parts.items()
    }
    if isinstance(spec, dict):
        return type(spec)(made)
    if hasattr(spec, "_fields"):
        return type(spec)(**made)
    return type(spec)(made.values())


def part_at(spec: Any, name: str | None) -> tuple[Any, str]:
    """A part of a spec by a name such as ``"time_step.observation.1"``, and its path.

    Raises:
        MissingError: There is no such part.
    """
    path = STEM
    for word in name.split(".") if name else ():
        parts = children(spec) or {}
        found = {str(key): key for key in parts}
        if word not in found:
            raise MissingError(
                f"field {name!r}: got {word!r}, expected one of {list(found)}; name it "
                "as the nest does, joined by dots"
            )
        key = found[word]
        spec, path = parts[key], below(path, key)
    return spec, path


def path_of(fields: Mapping[str, Field], name: str) -> str | None:
    """Path of the scalar of a name, the least deep if there are several."""
    found = [
        path
        for path, field in fields.items()
        if path.endswith(f"/{name}") and not field.shape and field.dtype != "bfloat16"
    ]
    return min(found, key=lambda path: path.count("/"), default=None)
