"""Which rows of one environment are kept, and what their flags become at the seams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START
from mmreplay.verify.boundaries import alone_problem, pair_problem

Array = NDArray[np.int64]
Flags = NDArray[np.uint8]
CHUNK_ROWS = 1 << 20


@dataclass(slots=True)
class Kept:
    """Rows of one environment that stay, in stretches, oldest first.

    Attributes:
        firsts: First position of each stretch.
        counts: Rows of each.
        marks: Flags by position, of the rows whose flags change.
        torn: Rows that begin an episode now, whose first steps are cut.
    """

    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)
    torn: int = 0

    @property
    def total(self) -> int:
        """Rows that stay."""
        return sum(self.counts)

    def keep(self, positions: Array) -> None:
        """Keep rows, growing, above all kept before."""
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        for part in np.split(positions, breaks):
            if (
                len(part)
                and self.counts
                and self.firsts[-1] + self.counts[-1] == part[0]
            ):
                self.counts[-1] += len(part)
            elif len(part):
                self.firsts.append(int(part[0]))
                self.counts.append(len(part))

    def sources(self, head: int, positions: Array) -> Array:
        """Where the rows of new positions come from; the newest one stays where it is.

        Args:
            head: The environment's.
            positions: int64 ``[N]``, new positions in ``[head - total, head)``.
        """
        stops = head - self.total + np.cumsum(self.counts)
        which = np.searchsorted(stops, positions, side="right")
        begins = stops - np.array(self.counts)
        found: Array = np.array(self.firsts)[which] + positions - begins[which]
        return found


class Sorter:
    """Goes through the rows of one environment, and keeps those that make sense."""

    def __init__(self, final_follows: bool) -> None:
        self.alone = np.array([not alone_problem(flags) for flags in range(256)])
        known = range(ALL_FLAGS + 1)
        pairs = [[not pair_problem(b, a, final_follows) for a in known] for b in known]
        self.pairs = np.array(pairs)

    def sort(
        self,
        stretches: list[tuple[int, int]],
        read: Callable[[int, int], Flags],
    ) -> Kept:
        """Keep the rows of stretches whose flags are possible.

        Args:
            stretches: ``(first, stop)`` of the rows not known to be bad.
            read: Flags of positions ``[first, stop)``.
        """
        kept = Kept()
        last: tuple[int, int] | None = None
        for first, stop in stretches:
            for at in range(first, stop, CHUNK_ROWS):
                flags = read(at, min(at + CHUNK_ROWS, stop))
                last = self._chunk(at, flags, kept, last)
        return kept

    def _chunk(
        self, first: int, flags: Flags, kept: Kept, last: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Keep rows of a chunk; last is the position and flags of the row before."""
        chosen = np.flatnonzero(self.alone[flags])
        positions, found = first + chosen, flags[chosen].copy()
        while len(positions):
            seams, bad = self._problems(positions, found, last)
            orphans = (seams | bad) & (found == FINAL)
            if not orphans.any():
                break
            # What they ended is gone: nobody can be told what they followed.
            positions, found = positions[~orphans], found[~orphans]
        if not len(positions):
            return last
        for index in np.flatnonzero(seams | bad).tolist():
            # Of the step before a seam nothing is known any more, its cut neither.
            own = int(found[index]) & ~(CUT if seams[index] else 0)
            kept.torn += not own & START
            found[index] = own | START | BREAK
            kept.marks[int(positions[index])] = int(found[index])
        kept.keep(positions)
        return int(positions[-1]), int(found[-1])

    def _problems(
        self, positions: Array, flags: Flags, last: tuple[int, int] | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Rows that follow a gap, and rows that cannot follow the one before."""
        before_position, before = (positions[0] - 1, None) if last is None else last
        earlier = np.concatenate([[before_position], positions[:-1]])
        seams = earlier + 1 != positions
        head = flags[:1] if before is None else np.array([before], np.uint8)
        bad = ~self.pairs[np.concatenate([head, flags[:-1]]), flags]
        if before is None:
            bad[0] = positions[0] == 0 and not flags[0] & START
        return seams, bad
