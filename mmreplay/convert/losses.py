"""What is said of what files have lost, and of what targets cannot hold."""

from __future__ import annotations

from mmreplay.convert.base import Notes
from mmreplay.convert.description import KEY, Description
from mmreplay.errors import CorruptError, SchemaError


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


def undescribed(where: object) -> CorruptError:
    """The error of a file that has our checksums, and no description."""
    return CorruptError(
        f"{where} has checksums of mmreplay's in its metadata, expected {KEY!r} beside "
        "them; the file was damaged: restore it from a copy"
    )


def doubt_priorities(notes: Notes, description: Description, target: str) -> None:
    """Doubt a target that has no place for the priorities that come along."""
    if description.priorities:
        notes.doubt(
            f"priorities {description.priorities!r} were left out: {target} has no "
            "place for them"
        )


def refuse_empty(steps: int, target: str) -> None:
    """Refuse to write no steps where nobody would read what that makes.

    Raises:
        SchemaError: There are none.
    """
    if not steps:
        raise SchemaError(
            f"got no steps to write, expected at least one for {target}, which says "
            "nothing without; choose others, or a format of mmreplay's own"
        )
