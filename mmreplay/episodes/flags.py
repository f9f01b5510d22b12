"""The flags of rows: where episodes begin and end, and nothing else says so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

START = 1
TERMINATED = 2
TRUNCATED = 4
FINAL = 8
BREAK = 16
CUT = 32
"""The step before this row is reported as truncated (``on_resume="truncate"``)."""
END = TERMINATED | TRUNCATED
ALL_FLAGS = 63


def flags_of_steps(
    before: NDArray[np.uint8],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    final_follows: bool,
) -> NDArray[np.uint8]:
    """Flags of one step of each environment.

    Args:
        before: uint8 ``[N]``, flags of each environment's row before this one; of
            an environment without one, FINAL.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        final_follows: The row after an end is the final row (``"next_step"``).

    Returns:
        uint8 ``[N]``.
    """
    ended = (before & END) != 0
    flags: NDArray[np.uint8] = terminated * np.uint8(TERMINATED)
    flags |= truncated * np.uint8(TRUNCATED)
    if final_follows:
        # What the reset call returned beside the final observation is no step.
        flags = np.where(ended, np.uint8(FINAL), flags)
        ended = (before & FINAL) != 0
    else:
        ended |= (before & FINAL) != 0
    flags |= ended * np.uint8(START)
    return flags


def judged(*, derived: bool) -> NDArray[np.bool_]:
    """Which rows are legal starts, by their flags and those of the row after.

    Args:
        derived: The next observation is read from the following row.

    Returns:
        bool ``[64 * 64]``, by ``here << 6 | after``; of rows that are known to be
        followed, or to need no row after them.
    """
    here, after = np.divmod(np.arange((ALL_FLAGS + 1) ** 2), ALL_FLAGS + 1)
    legal: NDArray[np.bool_] = (here & FINAL) == 0
    if derived:
        # An end without a final row: a terminated step needs no next observation, a
        # truncated one cannot be bootstrapped and is left out.
        usable = ((after & FINAL) != 0) | ((here & TERMINATED) != 0)
        legal &= np.where((here & END) != 0, usable, (after & START) == 0)
    return legal
