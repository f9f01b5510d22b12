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


def folded(*, derived: bool) -> NDArray[np.bool_]:
    """Whether steps may be folded up to a row, by its flags and those of the row after.

    Where the row after begins an episode, the row is the last one that can be read for
    a step. That does if the next observation is known or not needed.

    Args:
        derived: The next observation is read from the following row.

    Returns:
        bool ``[64 * 64]``, by ``here << 6 | after``.
    """
    here, after = np.divmod(np.arange((ALL_FLAGS + 1) ** 2), ALL_FLAGS + 1)
    if derived:
        usable = (here & (TERMINATED | FINAL)) != 0
    else:
        usable = ((here & (END | FINAL)) != 0) | ((after & CUT) != 0)
    legal: NDArray[np.bool_] = ((after & START) == 0) | usable
    return legal
