"""What users ask for when they create and open buffers, checked before it is done."""

from __future__ import annotations

import numpy as np

from mmreplay.errors import SchemaError

ROWS_EACH = "give the rows to keep of each environment, int(1e6) for a million"


def check_count(name: str, number: int, most: int, way_out: str) -> None:
    """Refuse what is no integer in ``[1, most]``.

    Raises:
        SchemaError: It is none.
    """
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not whole or not 1 <= number <= most:
        raise SchemaError(
            f"{name}: got {number!r}, expected an integer in [1, {most}]; {way_out}"
        )


def check_mode(mode: str) -> None:
    """Refuse a mode that is none.

    Raises:
        SchemaError: It is neither ``"r"`` nor ``"r+"``.
    """
    if mode not in ("r", "r+"):
        raise SchemaError(
            f"mode: got {mode!r}, expected 'r' or 'r+'; to make a new buffer, use "
            "ReplayBuffer.create"
        )


def check_interval(commit_every: float | None) -> None:
    """Refuse an interval between commits that is no time.

    Raises:
        SchemaError: It is neither None nor above 0.
    """
    number = isinstance(commit_every, int | float | np.integer | np.floating)
    if commit_every is not None and not (number and commit_every > 0):
        raise SchemaError(
            f"commit_every: got {commit_every!r}, expected seconds above 0, or None "
            "to commit only by commit() and close()"
        )
