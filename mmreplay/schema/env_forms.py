"""Gymnasium spaces of fields, and batches as vector environments give their values.

The way back of `spaces`. Gymnasium is imported only when a space or a graph is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.nesting import unflatten
from mmreplay.ragged import Ragged
from mmreplay.schema.dtypes import from_bfloat16_bits
from mmreplay.schema.field import Field

if TYPE_CHECKING:
    from gymnasium.spaces import Space

NODES, EDGES, EDGE_LINKS = "nodes", "edges", "edge_links"
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n\t"
"""Characters of text spaces: Gymnasium lists them, and cannot say that all may come."""


def space_of(fields: Mapping[str, Field], root: str) -> Space[Any]:
    """Return the space of the values below a path.

    Args:
        fields: By path, of `root` itself or below it.
        root: ``"observation"``, for example.

    Raises:
        ModuleNotFoundError: Gymnasium is not installed.
    """
    if root in fields:
        return _space(fields[root])
    below = {path.removeprefix(f"{root}/"): field for path, field in fields.items()}
    return _branch(unflatten(below))


def values_of(fields: Mapping[str, Field], columns: Mapping[str, Any], root: str) -> Any:
    """Return values of steps as a vector environment gives them.

    Args:
        fields: By path, of `root` itself or below it.
        columns: Arrays ``[B, *shape]`` or `Ragged` by the same paths.
        root: ``"observation"``, for example.

    Returns:
        As `gymnasium.vector` puts the values of B environments together: an array, a
        tuple of `str`, of arrays or of ``GraphInstance``, and a dict or tuple of these.
    """
    values = {path: _values(field, columns[path]) for path, field in fields.items()}
    if root in values:
        return values[root].batched
    below = {path.removeprefix(f"{root}/"): value for path, value in values.items()}
    return _nested_values(unflatten(below))


def _space(field: Field) -> Space[Any]:
    from gymnasium import spaces

    if field.kind == "text":
        return spaces.Text(field.max_length or 1, min_length=0, charset=PRINTABLE)
    if field.varies:
        return spaces.Sequence(_box(field), stack=True)
    return _box(field)


def _box(field: Field) -> Space[Any]:
    """Return the space of a value, or of an item where the field varies."""
    from gymnasium import spaces

    if field.dtype == "bool":
        return spaces.Box(0, 1, field.inner, np.int8)
    dtype = np.dtype("float32" if field.dtype == "bfloat16" else field.numpy)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, field.inner, dtype)
    info = np.iinfo(dtype.name)
    return spaces.Box(info.min, info.max, field.inner, dtype)


def _branch(tree: Mapping[str, Any]) -> Space[Any]:
    from gymnasium import spaces

    if is_graph(tree):
        edges = tree.get(EDGES)
        return spaces.Graph(_box(tree[NODES]), None if edges is None else _box(edges))
    inner = {
        name: _space(each) if isinstance(each, Field) else _branch(each)
        for name, each in tree.items()
    }
    if _is_numbered(inner):
        return spaces.Tuple(list(inner.values()))
    return spaces.Dict(inner)


def is_graph(tree: Mapping[str, Any]) -> bool:
    """Whether a branch holds the fields that `spaces.space_fields` makes of a Graph."""
    nodes, edges, links = (tree.get(name) for name in (NODES, EDGES, EDGE_LINKS))
    if not tree.keys() <= {NODES, EDGES, EDGE_LINKS}:
        return False
    if not isinstance(nodes, Field) or not nodes.varies or nodes.kind != "array":
        return False
    if edges is None and links is None:
        return True
    if not isinstance(edges, Field) or not isinstance(links, Field):
        return False
    return edges.varies and links.varies and links.inner == (2,)


def _is_numbered(tree: Mapping[str, Any]) -> bool:
    """Whether names count from 0, as those of a Tuple do."""
    return list(tree) == list(map(str, range(len(tree))))


class _Values:
    """Values of one field: what a vector environment gives, and a value a step."""

    def __init__(self, field: Field, batched: Any, steps: list[Any]) -> None:
        self.field, self.batched, self.steps = field, batched, steps


def _values(field: Field, column: Any) -> _Values:
    """Return the values of one field."""
    if isinstance(column, Ragged):
        column = column.numpy()
        if field.kind == "text":
            texts = column.text()
            return _Values(field, tuple(texts), texts)
        items = _floats(field, column.values)
        each = list(Ragged(items, column.offsets))
        return _Values(field, tuple(each), each)
    array = _floats(field, np.asarray(column))
    return _Values(field, array, list(array))


def _floats(field: Field, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as environments have it: bfloat16 as float32."""
    bits = field.dtype == "bfloat16" and array.dtype == np.uint16
    return from_bfloat16_bits(array) if bits else array


def _nested_values(tree: Mapping[str, Any]) -> Any:
    flat = {n: v.field for n, v in tree.items() if isinstance(v, _Values)}
    if len(flat) == len(tree) and is_graph(flat):
        return _graphs(tree)
    inner = {
        name: each.batched if isinstance(each, _Values) else _nested_values(each)
        for name, each in tree.items()
    }
    return tuple(inner.values()) if _is_numbered(inner) else inner


def _graphs(tree: Mapping[str, _Values]) -> tuple[Any, ...]:
    from gymnasium.spaces import GraphInstance

    nodes = tree[NODES].steps
    none = [None] * len(nodes)
    # Gymnasium has None for no edges.
    edges, links = (
        [each if len(each) else None for each in tree[name].steps] if name in tree else none
        for name in (EDGES, EDGE_LINKS)
    )
    return tuple(map(GraphInstance, nodes, edges, links))
