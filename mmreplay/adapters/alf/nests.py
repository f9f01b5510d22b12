"""Nests of tensors as flat fields, and back.

A nest is what alf calls one: named tuples, tuples, lists and dicts, within each other,
of tensors. A spec is a nest of things with a ``shape`` and a ``dtype``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.alf.errors import MissingError, UnfitError, refusing
from mmreplay.adapters.common.values import LOOK_ERRORS, PAD, Look, array_of, refuse_varying
from mmreplay.schema import Field

STEM = "step"
"""The top of all paths, so that no leaf has a name with a role."""

Columns = dict[str, NDArray[np.generic]]


def children(nest: Any) -> dict[Any, Any] | None:
    """Return the children of a nest by key, attribute or number; None for a leaf."""
    if isinstance(nest, dict):
        return nest
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return dict(zip(nest._fields, nest, strict=True))
    if isinstance(nest, tuple | list) and not isinstance(nest, torch.Size):
        return dict(enumerate(nest))
    return None


def leaves(nest: Any, path: str = STEM) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest by path, in order."""
    parts = children(nest)
    if parts is None:
        yield path, nest
    else:
        for key, part in parts.items():
            yield from leaves(part, below(path, key))


def below(path: str, key: object) -> str:
    """Return the path of a child; a separator in the key is percent-encoded."""
    return f"{path}/{str(key).replace('%', '%25').replace('/', '%2F')}"


def fields_of(spec: Any) -> dict[str, Field]:
    """Return the field of each leaf of a spec, by path.

    Raises:
        UnfitError: There is no leaf, or one has no shape and dtype.
    """
    columns = {}
    for path, leaf in leaves(spec):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UnfitError(
                f"data_spec: {path!r} must have a shape and a dtype, got "
                f"{type(leaf).__name__}. Pass a TensorSpec, an array or a tensor."
            )
        dtype = leaf.dtype
        if isinstance(dtype, torch.dtype):
            dtype = str(dtype).removeprefix("torch.")
        if path in columns:
            raise UnfitError(
                f"data_spec: two leaves are named {path!r}, because their keys differ "
                "only in type. Rename one."
            )
        # The shape of a Text space is None.
        varies = leaf.shape is None or None in tuple(leaf.shape)
        if varies or _is_text(dtype):
            raise UnfitError(
                f"data_spec: {path!r} must be numbers of one shape, got {leaf!r:.80}. {PAD}"
            )
        columns[path] = Field(tuple(leaf.shape), dtype)
    if not columns:
        raise UnfitError(f"data_spec has no leaf, got {spec!r}. Pass a nest of TensorSpec.")
    return columns


def _is_text(dtype: Any) -> bool:
    """Whether it is numpy's dtype of text, of bytes or of objects."""
    try:
        return np.dtype(dtype).kind in "OSU"
    except TypeError:
        return False


def flatten(spec: Any, nest: Any, path: str = STEM) -> Columns:
    """Return the leaves of a nest as arrays, by path.

    Raises:
        UnfitError: It is not of the spec's structure.
    """
    parts = children(spec)
    if parts is None:
        bits = str(spec.dtype).endswith("bfloat16")
        with refusing():
            return {path: array(nest, bits=bits, name=path)}
    theirs = children(nest)
    if theirs is None or theirs.keys() != parts.keys():
        got = type(nest).__name__ if theirs is None else list(theirs)
        raise UnfitError(
            f"nest at {path!r} must have {list(parts)}, got {got}. Pass a nest of the "
            "structure of data_spec."
        )
    columns: Columns = {}
    for key, part in parts.items():
        columns |= flatten(part, theirs[key], below(path, key))
    return columns


Outline = tuple[type, tuple[Any, ...], tuple[Any, ...]]
"""A nest's type, its keys, and the outline or path of each child."""
LeafValues = dict[str, object]


def outlined(spec: Any, path: str = STEM) -> Outline | str:
    """Return the outline of nests like a spec, for `plain`."""
    parts = children(spec)
    if parts is None:
        return path
    inner = (outlined(part, below(path, key)) for key, part in parts.items())
    return type(spec), tuple(parts), tuple(inner)


def plain(
    outline: Outline | str, nest: Any, columns: LeafValues, looks: Mapping[str, Look]
) -> bool:
    """Put the leaves of a nest into a dict, the fast way.

    Args:
        outline: Of the spec.
        nest: Of the very types of the spec, its leaves tensors.
        columns: What a ring takes as it is, by path, written.
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
                columns[part] = looks[part](value)
            elif not plain(part, value, columns, looks):
                return False
    except LOOK_ERRORS:
        return False
    return True


def never(leaf: torch.Tensor) -> object:
    """Refuse a tensor that needs a conversion; see `plain`.

    Raises:
        TypeError: Always.
    """
    raise TypeError(f"got {leaf.dtype}, which has no dtype of numpy.")


def array(leaf: Any, *, bits: bool = False, name: str = "value") -> NDArray[Any]:
    """Return a tensor of any device as an array.

    Args:
        leaf: The tensor, or what numpy makes an array of.
        bits: It goes into a field of bfloat16, which stores the bits of one.
        name: What messages call it.

    Raises:
        SchemaError: It is text, or has no one shape.
    """
    refuse_varying(leaf, name)
    if isinstance(leaf, torch.Tensor):
        if bits and leaf.dtype == torch.bfloat16:
            leaf = leaf.resolve_neg().view(torch.uint16)
        elif leaf.dtype == torch.bfloat16 or (bits and leaf.dtype == torch.uint16):
            leaf = leaf.float()
        columns: NDArray[Any] = leaf.numpy(force=True)
        return columns
    return array_of(leaf, name)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for one leaf of a spec in a nest of the spec's structure.

    Attributes:
        path: Path of the leaf's field.
        dtype: Dtype of the leaf in the spec.
    """

    path: str
    dtype: Any


def leaf_nest(spec: Any, path: str = STEM) -> Any:
    """Return a nest of the spec's types with a `Leaf` in place of each leaf.

    Named tuples keep their classes, so their properties lead to leaves as they do in
    the spec. Constructors of named tuples are not called: they may expect tensors.
    """
    parts = children(spec)
    if parts is None:
        return Leaf(path, spec.dtype)
    inner = [leaf_nest(part, below(path, key)) for key, part in parts.items()]
    if isinstance(spec, dict):
        return type(spec)(zip(parts, inner, strict=True))
    if hasattr(spec, "_fields"):
        return tuple.__new__(type(spec), inner)
    return type(spec)(inner)


def pack(nest: Any, columns: Mapping[str, NDArray[Any]], device: Any) -> Any:
    """Return arrays by path as a nest of tensors.

    Args:
        nest: `leaf_nest` of a spec, or a nest inside it.
        columns: Array of each leaf, by path.
        device: Device of the tensors.
    """
    inner_nests = children(nest)
    if inner_nests is None:
        leaf = torch.from_numpy(columns[nest.path])
        if nest.dtype == torch.bfloat16:
            leaf = leaf.view(torch.bfloat16)
        return leaf.to(device)
    made = {key: pack(inner, columns, device) for key, inner in inner_nests.items()}
    if isinstance(nest, dict):
        return type(nest)(made)
    if hasattr(nest, "_fields"):
        return type(nest)(**made)
    return type(nest)(made.values())


def subnest(nest: Any, name: Any) -> Any:
    """Return a child by attribute, key or number, joined by dots as in alf.

    Args:
        nest: `leaf_nest` of a spec.
        name: Such as ``"time_step.observation.1"``, or ``"reward"`` where a property
            of a named tuple forwards it. None and ``""`` are the whole nest.

    Returns:
        A nest of `Leaf`.

    Raises:
        MissingError: No part has this name, or its property returns something else.
    """
    if not name:
        return nest
    part = nest
    for word in name.split(".") if isinstance(name, str) else [name]:
        try:
            part = _child(part, word)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            known = [str(key) for key in children(part) or ()]
            if hasattr(part, "_fields"):
                of_class = ((n, getattr(type(part), n)) for n in dir(type(part)))
                known += [n for n, value in of_class if isinstance(value, property)]
            raise MissingError(
                f"field {name!r}: {word!r} must be one of {known}. Use the names of "
                "the nest, joined by dots."
            ) from error
    for _, leaf in leaves(part):
        if not isinstance(leaf, Leaf):
            raise MissingError(
                f"field {name!r} must be a leaf of the nest, got "
                f"{type(leaf).__name__}. Name the fields that it is computed from."
            )
    return part


def _child(nest: Any, word: Any) -> Any:
    """Return a child by attribute, key or number, or raise the error of that."""
    if children(nest) is None:
        raise LookupError(word)
    if hasattr(nest, "_fields"):
        return getattr(nest, word)
    if isinstance(nest, dict):
        keys = {str(key): key for key in nest}
        return nest[word] if word in nest else nest[keys[word]]
    return nest[int(word)]


def is_scalar(field: Field) -> bool:
    """Return whether a leaf is one number per step that numpy has a dtype for."""
    return not field.shape and field.dtype != "bfloat16"


def path_of(fields: Mapping[str, Field], name: str) -> str | None:
    """Return the path of the scalar of a name, the shallowest if there are several."""
    columns = [
        path for path, field in fields.items() if path.endswith(f"/{name}") and is_scalar(field)
    ]
    return min(columns, key=lambda path: path.count("/"), default=None)
