"""The rows that stay, piece by piece: where they lie, and where they are to go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import called
from mmreplay.repairing.evidence import Evidence
from mmreplay.repairing.kept import Flags, Kept
from mmreplay.ring import Run, runs

Array = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with (rows written, rows to write)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one environment that are copied at once.

    Attributes:
        sources: int64 ``[N]``, their positions in the damaged buffer, growing.
        rows: int64 ``[N]``, where they lie in it.
        to: Where they go.
        marks: Flags by position, of the rows whose flags change.
    """

    sources: Array
    rows: Array
    to: list[Run]
    marks: dict[int, int]

    def mark(self, flags: Flags) -> None:
        """Put the flags of seams among those that were read, uint8 ``[N]``."""
        first, last = int(self.sources[0]), int(self.sources[-1])
        for position, value in self.marks.items():
            if first <= position <= last:
                flags[np.searchsorted(self.sources, position)] = value


def pieces(
    evidence: Evidence,
    kept: list[Kept],
    tails: Array,
    size: int,
    progress: Progress | None,
) -> Iterator[Piece]:
    """Go through all that stays, environment by environment, oldest first.

    Args:
        evidence: Of the damaged buffer.
        kept: What stays, by environment.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        size: Rows of a piece, at most.
        progress: Called when a piece is done.
    """
    ring = evidence.metadata.ring
    done, total = 0, int((evidence.heads - tails).sum())
    for env_id, each in enumerate(kept):
        tail, head = int(tails[env_id]), int(evidence.heads[env_id])
        for first in range(tail, head, size):
            positions = np.arange(first, min(first + size, head))
            sources = each.sources(head, positions)
            ids = np.full(len(positions), env_id)
            rows, to = ring.rows(ids, sources), runs(ring.rows(ids, positions))
            yield Piece(sources, rows, to, each.marks)
            done += len(positions)
            if progress is not None:
                called("progress", progress, done, total)
