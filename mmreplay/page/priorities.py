"""The stored priorities of a buffer: their histogram, and how draws are spread by them.

They are read without the sampler's lock; nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.buffer.statistics import stored_priorities
from mmreplay.page.sample import Sample
from mmreplay.samplers.priority_file import StoredColumn, read_column

BINS = 48
DEFAULT_ALPHA, EPS = 0.6, 1e-6
"""The sampler's defaults; a column stores the priority alone."""
MAX_ALPHA = 4.0


@dataclass(frozen=True, slots=True)
class PriorityFacts:
    """What a sample says of one column of priorities.

    Attributes:
        name: Of the column.
        alpha: Exponent that the shares are at.
        rows: Rows of the sample with a priority.
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


def column_of(buffer: ReplayBuffer, name: str | None = None) -> StoredColumn | None:
    """Read the column of a buffer, the first by name; None where there is none."""
    names = stored_priorities(buffer.path)
    if not names or (name is not None and name not in names):
        return None
    return read_column(buffer.view.home, names[0] if name is None else name)


def measure_priorities(
    buffer: ReplayBuffer, sample: Sample, alpha: float
) -> PriorityFacts | None:
    """Measure the first column of priorities.

    Args:
        buffer: Open in any mode.
        sample: Some of its steps.
        alpha: Exponent of the priorities, in ``[0, 4]``.

    Returns:
        None where no row of the sample has a priority.
    """
    column = column_of(buffer)
    if column is None:
        return None
    stored = column.read(sample.env_ids, sample.positions)
    values = stored[stored >= 0].astype(np.float64)
    if not len(values):
        return None
    masses = np.sort((values + EPS) ** alpha)[::-1]
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
        name=stored_priorities(buffer.path)[0],
        alpha=alpha,
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
