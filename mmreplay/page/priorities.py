"""The stored priorities of a buffer: how they are spread, and draws by them.

They are read without the sampler's lock; nothing is written. Draws copy no priorities
either: `BlockMasses` are sums over blocks of rows, and only the rows of the blocks that
a draw falls on are read again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.buffer.statistics import stored_priorities
from mmreplay.episodes.starts import StartView
from mmreplay.errors import StaleError
from mmreplay.page.sample import Sample
from mmreplay.samplers.priority_file import COLUMN, StoredColumn, read_column
from mmreplay.samplers.sum_tree import to_masses

BINS = 48
DEFAULT_ALPHA, EPS = 0.6, 1e-6
"""The sampler's defaults; a column stores the priority alone."""
MAX_ALPHA = 4.0
BLOCK_ROWS = 1 << 12
CHUNK_ROWS = 1 << 18
"""Rows that are weighed at a time: whole blocks, some 10 MB of memory."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PriorityFacts:
    """What a sample says of one column of priorities.

    Attributes:
        name: Of the column.
        alpha: Exponent that the shares are at.
        steps: Steps of the sample.
        rows: Those of them with a priority.
        complete: These are all rows with one.
        low: Lowest priority.
        high: Highest priority.
        counts: int64 ``[N]``.
        edges: float64 ``[N + 1]``, growing by one factor.
        top_share: Share of the mass that the top 1 % of rows have.
        effective: Effective sample size, ``(sum m)**2 / sum m**2``, as a share of the
            rows; m is a row's mass, ``(p + 1e-6) ** alpha``.
        common_share: Share of the rows with the most frequent priority.
    """

    name: str
    alpha: float
    steps: int
    rows: int
    complete: bool
    low: float
    high: float
    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    top_share: float
    effective: float
    common_share: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "whole": self.complete}


def written_at(buffer: ReplayBuffer) -> int:
    """Return when any column was last written, in ns; 0 where there is none.

    A column that is mapped has the time of its pages' writing, some seconds old.
    """
    if buffer.path is None:
        return 0
    columns = [buffer.path / "samplers" / name / COLUMN for name in stored_priorities(buffer.path)]
    return max((column.stat().st_mtime_ns for column in columns), default=0)


def measure_priorities(buffer: ReplayBuffer, sample: Sample, alpha: float) -> PriorityFacts | None:
    """Measure the first column of priorities.

    Args:
        buffer: Open in any mode.
        sample: Some of its steps.
        alpha: Exponent of the priorities, in ``[0, 4]``.

    Returns:
        None where no row of the sample has a priority.
    """
    names = stored_priorities(buffer.path)
    if not names:
        return None
    column = read_column(buffer.view.home, names[0])
    stored = column.read(sample.env_ids, sample.positions)
    values = stored[stored >= 0].astype(np.float64)
    if not len(values):
        return None
    masses = np.sort(to_masses(values + EPS, alpha))[::-1]
    top = max(1, len(masses) // 100)
    low, high = float(values.min()), float(values.max())
    floor = max(low, high * 1e-9, 1e-30)
    if high > floor:
        edges = np.geomspace(floor, high, BINS + 1)
        # What geomspace rounds must not leave the highest value out.
        edges[0], edges[-1] = floor, high
        counts = np.histogram(values.clip(floor, high), edges)[0]
    else:
        edges = np.array([floor * 0.9, floor * 1.1])
        counts = np.array([len(values)])
    common = np.unique(values, return_counts=True)[1].max()
    return PriorityFacts(
        name=names[0],
        alpha=alpha,
        steps=len(sample),
        rows=len(values),
        complete=sample.complete,
        low=low,
        high=high,
        counts=counts.astype(np.int64),
        edges=edges,
        top_share=float(masses[:top].sum() / masses.sum()),
        effective=float(masses.sum() ** 2 / (masses**2).sum() / len(masses)),
        common_share=float(common / len(values)),
    )


@dataclass(frozen=True, slots=True)
class Weighing:
    """How much a row counts: ``(priority + eps) ** alpha``.

    Attributes:
        column: The stored priorities; None where there are none.
        alpha: Exponent of the priorities.
        eps: Added to each priority.
        initial: The least priority that a row without one enters at.
    """

    column: StoredColumn | None
    alpha: float
    eps: float
    initial: float

    def masses(self, priorities: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the masses of priorities ``[N]``, float64 ``[N]``."""
        with np.errstate(over="ignore"):  # A draw refuses them.
            numbers = np.add(priorities, self.eps, dtype=np.float64)
            return to_masses(numbers, self.alpha)

    def look(
        self, view: StartView, first: int, stop: int
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], Ids, Ids]:
        """Look rows up.

        Args:
            view: Of the buffer.
            first: Row of the files.
            stop: One past the last row.

        Returns:
            Priorities float32 ``[N]`` (-1 where a row has none, or is not alive), which
            rows are legal starts, bool ``[N]``, and their environments and positions,
            int64 ``[N]``.
        """
        starts, span, ring = view.starts, view.span, view.home.ring
        rows = np.arange(first, stop)
        env_ids, positions = ring.newest(rows, span.stop)
        values = np.full(len(rows), np.float32(-1))
        if self.column is not None:
            alive = np.flatnonzero(positions >= span.first[env_ids])
            values[alive] = self.column.read(env_ids[alive], positions[alive])
        legal = positions >= starts.first[env_ids]
        legal &= positions < starts.stop[env_ids]
        inside = np.flatnonzero(legal)
        legal[inside] = view.legal(env_ids[inside], positions[inside])
        return values, legal, env_ids, positions


@dataclass(frozen=True, slots=True)
class BlockMasses:
    """The mass of the legal starts in each block of 4,096 rows: 8 bytes a block.

    Attributes:
        ends: float64 ``[N]``, the mass of all blocks up to the end of each.
        lowest: The lowest mass of a row.
        entry: Priority that rows without one enter at.
    """

    ends: NDArray[np.float64]
    lowest: float
    entry: float

    @property
    def total(self) -> float:
        """Mass of all legal starts."""
        return float(self.ends[-1])

    @classmethod
    def of(
        cls, view: StartView, weighing: Weighing, lock: AbstractContextManager[Any]
    ) -> BlockMasses:
        """Weigh all rows of a buffer once: some 20 ns each.

        Args:
            view: Of the buffer.
            weighing: How much a row counts.
            lock: Held for a chunk of rows at a time.
        """
        num_rows = view.home.ring.num_rows
        num_blocks = -(-num_rows // BLOCK_ROWS)
        sums, num_new = np.zeros(num_blocks), np.zeros(num_blocks, np.int64)
        lowest, highest = np.inf, 0.0
        for first in range(0, num_rows, CHUNK_ROWS):
            stop = min(first + CHUNK_ROWS, num_rows)
            with lock:
                values, legal, _, _ = weighing.look(view, first, stop)
            known = values >= 0
            highest = max(highest, float(values.max()))
            masses = np.zeros(len(values))
            masses[known & legal] = weighing.masses(values[known & legal])
            lowest = min(lowest, masses.min(where=known & legal, initial=np.inf))
            edges = np.arange(0, len(values), BLOCK_ROWS)
            blocks = slice(first // BLOCK_ROWS, first // BLOCK_ROWS + len(edges))
            sums[blocks] = np.add.reduceat(masses, edges)
            num_new[blocks] = np.add.reduceat(legal & ~known, edges, dtype=np.int64)
        entry = np.float32(max(highest, weighing.initial))
        if num_new.any():
            mass = float(weighing.masses(np.array([entry]))[0])
            sums += num_new * mass
            lowest = min(lowest, mass)
        return cls(np.cumsum(sums), float(lowest), float(entry))

    def draw(
        self, view: StartView, weighing: Weighing, shares: NDArray[np.float64]
    ) -> tuple[Ids, Ids, NDArray[np.float64], NDArray[np.float64]]:
        """Draw rows by mass: a block by its mass, and then one of its rows.

        Args:
            view: Of the buffer; its lock is held.
            weighing: As in `of`.
            shares: float64 ``[B]``, in ``[0, 1)``, of the total.

        Returns:
            Environments and positions, int64 ``[N]``, masses and probabilities,
            float64 ``[N]``; N is below B where blocks were overwritten since.

        Raises:
            StaleError: All of the blocks were.
        """
        targets = shares * self.total
        blocks = np.searchsorted(self.ends, targets, "right")
        # The total itself falls on the last block that has a mass.
        last = int(np.searchsorted(self.ends, self.total))
        blocks = np.minimum(blocks, last)
        num_rows = view.home.ring.num_rows
        drawn: list[tuple[Ids, Ids, Ids, NDArray[np.float64], NDArray[np.float64]]] = []
        for block in np.unique(blocks).tolist():
            begin = float(self.ends[block - 1]) if block else 0.0
            mass = float(self.ends[block]) - begin
            first = block * BLOCK_ROWS
            stop = min(first + BLOCK_ROWS, num_rows)
            values, legal, env_ids, positions = weighing.look(view, first, stop)
            rows = np.flatnonzero(legal)
            priorities = np.where(values < 0, np.float32(self.entry), values)[rows]
            masses = weighing.masses(priorities)
            ends = np.cumsum(masses)
            if not len(rows) or not ends[-1] > 0:
                continue
            order = np.flatnonzero(blocks == block)
            within = (targets[order] - begin) / mass * ends[-1]
            which = np.searchsorted(ends, within, "right")
            which = np.minimum(which, np.searchsorted(ends, ends[-1]))
            chances = mass / self.total * masses[which] / ends[-1]
            steps = env_ids[rows[which]], positions[rows[which]]
            drawn.append((order, *steps, masses[which], chances))
        if not drawn:
            raise StaleError("The steps were overwritten while they were drawn. Draw again.")
        order, *columns = (np.concatenate(column) for column in zip(*drawn, strict=True))
        env_ids, positions, masses, chances = (column[np.argsort(order)] for column in columns)
        return env_ids, positions, masses, chances
