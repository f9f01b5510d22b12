"""What lies beside a buffer's rows: statistics.json and the columns of samplers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmreplay import strict_json
from mmreplay.disk import files
from mmreplay.errors import SchemaError
from mmreplay.samplers.priority_file import PRIORITIES, USES, ColumnKind

FILE_NAME = "statistics.json"
MAX_NBYTES = 16 << 20


def read_statistics(folder: Path | None) -> dict[str, Any]:
    """Return the stored statistics, or ``{}`` if there are none."""
    path = None if folder is None else folder / FILE_NAME
    if path is None or not path.exists():
        return {}
    return strict_json.parse(files.read_bytes(path, MAX_NBYTES), str(path))


def write_statistics(folder: Path | None, statistics: dict[str, Any]) -> None:
    """Store statistics durably, in one step.

    Raises:
        SchemaError: The buffer has no folder, or the statistics are too large.
        FormatError: A value is no JSON.
    """
    if folder is None:
        raise SchemaError(
            "a buffer in RAM cannot store statistics. Keep them in a variable, or "
            "create the buffer with a path."
        )
    data = strict_json.dump(statistics, "statistics")
    if len(data) > MAX_NBYTES:
        raise SchemaError(
            f"statistics must take at most {MAX_NBYTES} bytes, got {len(data)}. Store "
            "large values in a field, or in a file of your own."
        )
    files.replace_bytes(folder / FILE_NAME, data)


def stored_priorities(folder: Path | None) -> list[str]:
    """Names of the samplers whose priorities are stored beside a buffer, sorted."""
    return _stored(folder, PRIORITIES)


def _stored(folder: Path | None, kind: ColumnKind) -> list[str]:
    root = None if folder is None else folder / "samplers"
    if root is None or not root.is_dir():
        return []
    return sorted(name for name in files.names(root) if (root / name / kind.file).exists())


def left_behind(folder: Path | None) -> list[str]:
    """Return a sentence for each sampler's column that a copy leaves behind."""
    try:
        names, counts = stored_priorities(folder), counts_left_behind(folder)
    except OSError as error:
        return [f"stored priorities were not copied: {error}"]
    priorities = [
        f"the priorities {name!r} were not copied. Use export(..., "
        f"priorities={name!r}) or mmreplay convert --priorities {name} to copy them."
        for name in names
    ]
    return priorities + counts


def counts_left_behind(folder: Path | None) -> list[str]:
    """Return a sentence for each UseCounter whose counts a copy leaves behind."""
    return [
        f"the counts of uses {name!r} were not copied: a UseCounter draws each row of "
        "the copy as often as it may. Only a snapshot takes them along."
        for name in _stored(folder, USES)
    ]
