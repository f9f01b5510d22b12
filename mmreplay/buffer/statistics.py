"""What lies beside the rows: statistics.json, and the columns of samplers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmreplay import strict_json
from mmreplay.disk import files
from mmreplay.errors import SchemaError
from mmreplay.samplers.priority_file import COLUMN

FILE_NAME = "statistics.json"
MAX_NBYTES = 16 << 20


def read_statistics(folder: Path | None) -> dict[str, Any]:
    """Return what was stored, or ``{}``."""
    path = None if folder is None else folder / FILE_NAME
    if path is None or not path.exists():
        return {}
    return strict_json.parse(files.read_bytes(path, MAX_NBYTES), str(path))


def write_statistics(folder: Path | None, statistics: dict[str, Any]) -> None:
    """Store statistics durably, in one step.

    Raises:
        SchemaError: There is no folder, or they are too large.
        FormatError: A value is no JSON.
    """
    if folder is None:
        raise SchemaError(
            "statistics: got a buffer in RAM, expected one with a folder; keep them "
            "in a variable, or create the buffer with a path"
        )
    data = strict_json.dump(statistics, "statistics")
    if len(data) > MAX_NBYTES:
        raise SchemaError(
            f"statistics take {len(data)} bytes, expected at most {MAX_NBYTES}; keep "
            "large values in a field, or a file of their own"
        )
    files.replace_bytes(folder / FILE_NAME, data)


def stored_priorities(folder: Path | None) -> list[str]:
    """Names of the samplers whose priorities are stored beside a buffer, sorted."""
    place = None if folder is None else folder / "samplers"
    if place is None or not place.is_dir():
        return []
    return sorted(
        name for name in files.names(place) if (place / name / COLUMN).exists()
    )


def left_behind(folder: Path | None) -> list[str]:
    """What is told where stored priorities do not come along, a sentence each."""
    try:
        names = stored_priorities(folder)
    except OSError as error:
        return [f"stored priorities stay behind: {error}"]
    return [
        f"the priorities {name!r} stay behind: export(..., priorities={name!r}) takes "
        f"them along, as mmreplay convert --priorities {name} does"
        for name in names
    ]
