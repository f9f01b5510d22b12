"""Nested data as paths, and back.

A *path* names one leaf: the keys that lead to it, joined by ``/``, such as
``observation/pixels``. Tuples are branches whose items are named ``0``, ``1``,
and so on, because Gymnasium's Tuple spaces give tuples. Everything else,
lists and arrays included, is a leaf.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from numpy import ndarray

from mmreplay.errors import SchemaError, shown

SEPARATOR = "/"
MAX_PATH_LENGTH = 256
GRAPH = ("nodes", "edges", "edge_links")
"""Members of Gymnasium's GraphInstance."""
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")
"""Unicode's control characters, of which terminals make more than text."""


def flatten(nested: Mapping[str, object], leaves: Collection[str] = ()) -> dict[str, object]:
    """Leaves by path, in the order they stand.

    Args:
        nested: Mappings and tuples of leaves, nested at will.
        leaves: Paths that are leaves whatever is there, such as a tuple of values that
            vary. Where they name the members of a graph, Gymnasium's GraphInstance, or
            a list or tuple of them, is a branch.

    Returns:
        Path to leaf. An empty mapping or tuple leaves no trace.

    Raises:
        SchemaError: A name is no string, is empty, or holds ``/`` or NUL, or a
            path is longer than 256 characters (as in a mapping within itself).
    """
    flat: dict[str, object] = {}
    for name, value in nested.items():
        if type(name) is not str or not name or SEPARATOR in name or "\0" in name:
            check_name(name)
        if leaves and name in leaves:
            flat[name] = value
        elif leaves and (graph := _graph(value, name, leaves)):
            flat.update(graph)
        # Asking for Mapping goes through the ABC, a quarter of a microsecond.
        elif type(value) is not ndarray and isinstance(value, (Mapping, tuple)):
            flat.update(_leaves(value, name, leaves))
        else:
            flat[name] = value
    return flat


def unflatten(flat: Mapping[str, object]) -> dict[str, object]:
    """Nested dicts of the leaves, in the order they stand.

    Tuples come back as dicts with the keys ``"0"``, ``"1"``, and so on.

    Args:
        flat: Path to leaf.

    Raises:
        SchemaError: A path is no string, has an empty name or NUL in it, or is
            both a leaf and a branch.
    """
    nested: dict[str, object] = {}
    for path, value in flat.items():
        if type(path) is str and path and SEPARATOR not in path and "\0" not in path:
            _put(nested, path, path, value)
        else:
            _insert(nested, path, value)
    return nested


def check_name(name: object, under: str = "") -> None:
    """Refuse a name that could not be one part of a path.

    Args:
        name: The key found.
        under: Path of the mapping it was found in.

    Raises:
        SchemaError: It is no string, is empty, or holds ``/`` or NUL.
    """
    where = f" under {under!r}" if under else ""
    if not isinstance(name, str):
        raise SchemaError(
            f"field name{where} must be a string, got {name!r} "
            f"({type(name).__name__}). Rename the key."
        )
    if not name:
        raise SchemaError(f"field name{where} must not be empty. Rename the key.")
    if SEPARATOR in name or "\0" in name:
        raise SchemaError(
            f"field name{where} must not contain '/' or NUL, got {name!r}. Nest "
            "mappings to make a path."
        )


def split(path: object) -> list[str]:
    """Names that a path is made of.

    Raises:
        SchemaError: It is no path.
    """
    if not isinstance(path, str):
        raise SchemaError(
            "field path must be a string such as 'observation/pixels', got "
            f"{shown(path)} ({type(path).__name__})."
        )
    names = path.split(SEPARATOR)
    if not all(names) or "\0" in path:
        raise SchemaError(
            "field path must be non-empty names joined by '/', without NUL, got "
            f"{path!r}. Rename the field."
        )
    return names


def under(paths: Iterable[str], prefix: str) -> tuple[str, ...]:
    """Those of the paths that are the prefix itself or lie below it."""
    below = prefix + SEPARATOR
    return tuple(path for path in paths if path == prefix or path.startswith(below))


def _leaves(
    branch: Mapping[str, object] | tuple[object, ...], path: str, leaves: Collection[str]
) -> Iterator[tuple[str, object]]:
    items: Iterable[tuple[object, object]]
    if isinstance(branch, tuple):
        items = ((str(index), value) for index, value in enumerate(branch))
    else:
        items = branch.items()
    for name, value in items:
        check_name(name, path)
        below = f"{path}{SEPARATOR}{name}"
        if len(below) > MAX_PATH_LENGTH:
            raise SchemaError(
                f"field path {below[:60]!r}... must have at most {MAX_PATH_LENGTH} "
                f"characters, got {len(below)}. Nest less deeply."
            )
        if leaves and below in leaves:
            yield below, value
        elif leaves and (graph := _graph(value, below, leaves)):
            yield from graph.items()
        elif isinstance(value, (Mapping, tuple)):
            yield from _leaves(value, below, leaves)
        else:
            yield below, value


def _graph(value: object, path: str, leaves: Collection[str]) -> dict[str, object]:
    """Leaves by path of graphs, nested in lists and tuples; none of anything else."""
    names = [name for name in GRAPH if f"{path}{SEPARATOR}{name}" in leaves]
    first = value
    while isinstance(first, list | tuple) and not hasattr(first, "edge_links"):
        first = first[0] if first else None
    if not names or not hasattr(first, "edge_links"):
        return {}
    return {f"{path}{SEPARATOR}{name}": _member(value, name) for name in names}


def _member(graphs: object, name: str) -> object:
    """One member of a graph, or of each of them; empty where it has none."""
    if isinstance(graphs, list | tuple) and not hasattr(graphs, name):
        return [_member(graph, name) for graph in graphs]
    member = getattr(graphs, name)
    return [] if member is None else member


def _insert(nested: dict[str, object], path: str, value: object) -> None:
    *branches, last = split(path)
    here = nested
    for depth, name in enumerate(branches, 1):
        child = here.setdefault(name, {})
        if type(child) is not dict:
            raise _both(SEPARATOR.join(branches[:depth]))
        here = child
    _put(here, last, path, value)


def _put(branch: dict[str, object], name: str, path: str, value: object) -> None:
    if name in branch:
        raise _both(path)
    if type(value) is dict:
        # Kept as it is, it would be filled by a later path below it.
        raise SchemaError(f"field path {path!r} must be a leaf, got a dict. Flatten it first.")
    branch[name] = value


def _both(path: str) -> SchemaError:
    return SchemaError(
        f"field path {path!r} must not be both a leaf and a branch. Rename one of them."
    )


def meant(path: object, paths: Iterable[str], otherwise: str = "Use one of these.") -> str:
    """Return the advice for an unknown path: the path that was probably meant, if any.

    A known path also matches if its beginning or one of its segments was given.
    """
    import difflib

    known, text = list(paths), str(path)
    near = difflib.get_close_matches(text, known, 1)
    near += [path for path in known if len(text) > 1 and path.startswith(text)]
    near += [path for path in known if text and text in path.split("/")]
    return f"Did you mean {near[0]!r}?" if near else otherwise


def check_path(path: str) -> None:
    """Refuse a path that no file keeps, or that is not safe to print.

    Args:
        path: Names joined by ``/``.

    Raises:
        SchemaError: It is too long, is no UTF-8, or has control characters.
    """
    if len(path) > MAX_PATH_LENGTH or not _encodable(path):
        raise SchemaError(
            f"field path {path[:60]!r} must have at most {MAX_PATH_LENGTH} characters "
            f"that UTF-8 can hold, got {len(path)} characters. Rename the field."
        )
    match = CONTROLS.search(path)
    if match is not None:
        raise SchemaError(
            f"field path {path[:60]!r} must not contain the control character "
            f"{match[0]!r}, because terminals obey it. Rename the field."
        )


def _encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
