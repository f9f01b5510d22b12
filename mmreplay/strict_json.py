"""JSON from files that somebody else may have written.

Python's parser takes duplicate keys, NaN, numbers of a million digits and any
depth. This one takes none of them, and says where.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from mmreplay.errors import CorruptError, FormatError

Json = dict[str, Any]
MAX_DEPTH = 32
MAX_DIGITS = 20


def parse(data: bytes, name: str) -> Json:
    """Parse one JSON object.

    Args:
        data: UTF-8 text.
        name: What to call it in errors, such as a path.

    Raises:
        CorruptError: It is not JSON.
        FormatError: It is not an object, nested deeper than 32, has a key twice, a
            NaN or Infinity, an integer of more than 20 digits, or a float that no
            float64 holds.
    """
    try:
        text = data.decode("utf-8")
        _check_depth(text, name)
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, name),
            parse_constant=lambda token: _refuse_constant(token, name),
            parse_int=lambda digits: _short_int(digits, name),
            parse_float=lambda digits: _finite(digits, name),
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptError(
            f"{name} is not JSON ({error}). It is damaged or not a file of "
            "mmreplay: restore it from a copy."
        ) from error
    if not isinstance(value, dict):
        raise FormatError(f"{name} must be a JSON object, got a {type(value).__name__}.")
    return value


def dump(value: Json, name: str) -> bytes:
    """Write one JSON object, indented, as UTF-8 text that `parse` takes back.

    Raises:
        FormatError: A value is no JSON, is NaN or infinite, or nests too deep.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{name} cannot be stored: {error}. Pass JSON values (dict with str keys, "
            "list, str, finite number, bool, None), and convert arrays with .tolist()."
        ) from error
    _check_keys(value, name)
    data = text.encode("utf-8")
    parse(data, name)
    return data


def _check_keys(value: object, name: str) -> None:
    """Refuse keys that json would turn into strings: {1: 2} is read as {"1": 2}."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise FormatError(
                    f"{name} cannot be stored: keys must be str, got {key!r}. Write "
                    f"it as {str(key)!r}."
                )
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _check_keys(item, name)


def _check_depth(text: str, name: str) -> None:
    """Bound the depth before the recursive parser sees it."""
    depth = 0
    quoted = False
    escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise FormatError(
                    f"{name} nests deeper than {MAX_DEPTH}. Store deep structures as "
                    "files of their own."
                )
        elif char in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]], name: str) -> Json:
    found: Json = {}
    for key, value in pairs:
        if key in found:
            raise FormatError(f"{name} has the key {key!r} twice.")
        found[key] = value
    return found


def _refuse_constant(token: str, name: str) -> NoReturn:
    raise FormatError(f"{name} holds {token}, which is not a finite number. Store it as a string.")


def _finite(digits: str, name: str) -> float:
    # 1e999 reads as infinity, which could then never be written again.
    value = float(digits)
    if math.isinf(value):
        _refuse_constant(digits[:MAX_DIGITS], name)
    return value


def _short_int(digits: str, name: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise FormatError(
            f"{name} holds a number of {len(digits)} digits, more than {MAX_DIGITS}. "
            "Store it as a string."
        )
    return int(digits)
