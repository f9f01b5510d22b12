"""How far ahead a writer asks for room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.committer import Committer
from mmreplay.ring import Ring
from mmreplay.storage.base import whole

Array = NDArray[np.int64]


def targets(
    ring: Ring, committer: Committer | None,
    heads: Array, limits: Array, needed: Array, ahead_rows: int, grain: int,
) -> tuple[Array, bool]:  # fmt: skip
    """Limits to ask for, and whether nothing is overwritten below them.

    Args:
        ring: Of the rows.
        committer: Who knows what no power cut brings back; None in RAM.
        heads: int64 ``[E]``, what is written.
        limits: int64 ``[E]``, what may be.
        needed: int64 ``[E]``, what is to be.
        ahead_rows: Rows whose space is promised in the first lap.
        grain: See `Store`.
    """
    ahead = np.maximum(heads + min(ring.reserve, ahead_rows), needed)
    free: Array | int = ring.slots
    if committer is not None:
        free = free + committer.given_up_blocks() * ring.block_rows
    first_lap = np.minimum(ahead, np.maximum(free, needed))
    if (first_lap <= free).all():
        return np.maximum(first_lap, limits), True
    wide = np.maximum(heads + ring.reserve, needed)
    return np.maximum(whole(wide, grain), limits), False
