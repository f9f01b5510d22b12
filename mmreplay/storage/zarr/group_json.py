"""JSON of Zarr groups: objects whose attributes other programs wrote.

Attributes of a group may hold anything that Python's json writes, such as NaN, long
integers and deep lists, so that `strict_json` would refuse them; `parse` accepts them
within bounds.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mmreplay.errors import CorruptError, FormatError
from mmreplay.strict_json import MAX_DIGITS, Json

MAX_JSON_DEPTH = 128
"""Messages that show a value nest as deep."""


def parse(data: bytes, name: str) -> Json:
    """Parse one JSON object; an integer of more than 20 digits is read as a float.

    Args:
        data: UTF-8 text.
        name: What to call it in errors, such as a path.

    Raises:
        CorruptError: It is not JSON.
        FormatError: It is not an object, nests deeper than 128, or has a key twice.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: _unique(pairs, name),
            parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else float(digits),
        )
    except RecursionError:
        _refuse_depth(name)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptError(
            f"{name} is not valid JSON ({error}). Restore it from a copy."
        ) from error
    if not isinstance(value, dict):
        raise FormatError(
            f"{name} must hold a JSON object, got a {type(value).__name__}. Restore it from a copy."
        )
    _check_depth(value, name)
    return value


def _unique(pairs: list[tuple[str, Any]], name: str) -> Json:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise FormatError(
            f"{name} has a key twice among {list(value)[:20]}. It is damaged or "
            "malicious: restore it from a copy."
        )
    return value


def _check_depth(value: Json, name: str) -> None:
    waiting: list[tuple[object, int]] = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_JSON_DEPTH:
            _refuse_depth(name)
        if isinstance(node, dict | list):
            inner = node.values() if isinstance(node, dict) else node
            waiting += [(value, depth + 1) for value in inner]


def _refuse_depth(name: str) -> NoReturn:
    raise FormatError(
        f"{name} nests deeper than {MAX_JSON_DEPTH}. Remove attributes that deep, or "
        "copy the group without them."
    )
