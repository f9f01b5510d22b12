"""What is said of a file of ours that has lost what its rows are held against."""

from __future__ import annotations

from collections.abc import Collection

from mmreplay.convert.base import Notes
from mmreplay.convert.description import KEY, RESERVED
from mmreplay.errors import CorruptError


def doubt_sums(notes: Notes, name: str, what: str) -> None:
    """Doubt values that nothing vouches for, although mmreplay described them.

    Args:
        notes: Of the reader.
        name: Of the file.
        what: It lacks.
    """
    notes.doubt(
        f"{name} has no {what} beside its description, so that its values are taken as "
        "they are"
    )


def doubt_description(notes: Notes, names: Collection[str]) -> None:
    """Doubt plain columns of these names if they are those of a buffer."""
    if RESERVED.keys() <= set(names):
        notes.doubt(
            f"columns {', '.join(RESERVED)} tell of a buffer whose description is "
            "lost: they were left out"
        )


def undescribed(where: object) -> CorruptError:
    """The error of a file that has our checksums, and no description."""
    return CorruptError(
        f"{where} has checksums of mmreplay's in its metadata, expected {KEY!r} beside "
        "them; the file was damaged: restore it from a copy"
    )
