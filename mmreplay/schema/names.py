"""Legal names of fields."""

from __future__ import annotations

import re

from mmreplay.errors import SchemaError
from mmreplay.nesting import MAX_PATH_LENGTH

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")
"""Unicode's control characters, of which terminals make more than text."""


def check_path(path: str) -> None:
    """Refuse a path that no file keeps, or that is not safe to print.

    Args:
        path: Names joined by ``/``.

    Raises:
        SchemaError: It is too long, is no UTF-8, or has control characters.
    """
    if len(path) > MAX_PATH_LENGTH or not _encodable(path):
        raise SchemaError(
            f"field path {path[:60]!r}: got {len(path)} characters, expected at "
            f"most {MAX_PATH_LENGTH} that UTF-8 can hold; rename the field"
        )
    match = CONTROLS.search(path)
    if match is not None:
        raise SchemaError(
            f"field path {path[:60]!r}: got the control character {match[0]!r}, "
            "expected none, as terminals obey them; rename the field"
        )


def _encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
