"""JSON as other writers of Zarr leave it: more than `strict_json` takes, and bounded.

Attributes may hold anything that Python's json writes, such as NaN, long integers and
deep lists, and nobody here needs them. What is needed is checked where it is read.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mmreplay.errors import CorruptError, FormatError
from mmreplay.format.strict_json import MAX_DIGITS, Json

MAX_DEPTH = 128
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
            parse_int=lambda digits: (
                int(digits) if len(digits) <= MAX_DIGITS else float(digits)
            ),
        )
    except RecursionError:
        _refuse_depth(name)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptError(
            f"{name} is not JSON ({error}), expected one object; it is damaged: "
            "restore it from a copy"
        ) from error
    if not isinstance(value, dict):
        raise FormatError(
            f"{name} holds a {type(value).__name__}, expected an object; it is no "
            "metadata of Zarr: restore it from a copy"
        )
    _check_depth(value, name)
    return value


def _unique(pairs: list[tuple[str, Any]], name: str) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise FormatError(
            f"{name} has a key twice among {list(found)[:20]}, expected each once; it "
            "is damaged, or made to deceive: restore it from a copy"
        )
    return found


def _check_depth(value: Json, name: str) -> None:
    waiting: list[tuple[object, int]] = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > MAX_DEPTH:
            _refuse_depth(name)
        if isinstance(each, dict | list):
            inner = each.values() if isinstance(each, dict) else each
            waiting += [(one, depth + 1) for one in inner]


def _refuse_depth(name: str) -> NoReturn:
    raise FormatError(
        f"{name} nests deeper than {MAX_DEPTH}, expected metadata of Zarr; remove "
        "attributes that deep, or copy the group without them"
    )
