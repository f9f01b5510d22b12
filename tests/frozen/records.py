"""Recorded JSON: read by the tests, added to by `tests.frozen.record_surface`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def recorded(name: str) -> Any:
    """What was recorded under a name; nothing where no file is yet."""
    path = HERE / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def added(old: Any, new: Any, where: str) -> Any:
    """The recorded value with new entries.

    Raises:
        SystemExit: An entry that was recorded would change or go.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {
            key: added(old[key], value, f"{where}/{key}") if key in old else value
            for key, value in new.items()
        }
    if old != new:
        raise SystemExit(
            f"{where}: recorded {old!r}, the code gives {new!r}. Recorded entries do "
            "not change: restore the old behaviour, or add an alias"
        )
    return old


def text_of(value: Any, indent: str = "") -> str:
    """JSON in which what fits on a line is on one, so that a difference is short."""
    line = json.dumps(value, sort_keys=True)
    if len(indent) + len(line) <= 100 or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        rows = [
            f"{inner}{json.dumps(key)}: {text_of(each, inner)}"
            for key, each in sorted(value.items())
        ]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    rows = [f"{inner}{text_of(each, inner)}" for each in value]
    return "[\n" + ",\n".join(rows) + f"\n{indent}]"


def record(name: str, value: Any) -> None:
    """Write what is new, and leave what was recorded as it is."""
    path = HERE / f"{name}.json"
    value = json.loads(json.dumps(value))
    whole = added(recorded(name), value, name) if path.exists() else value
    path.write_text(text_of(whole) + "\n")
