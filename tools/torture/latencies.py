"""How long calls take, counted in bins that many processes share."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

SHORTEST_US = 0.1
PER_DECADE = 48
"""Bins of each factor of ten: a percentile is right within 5 percent."""
NUM_BINS = 9 * PER_DECADE
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Latencies:
    """Counts of calls by kind and duration, in memory that forked children share.

    Each kind is counted by one process only. Memory: constant.

    Args:
        kinds: What is timed.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        shared = mmap.mmap(-1, 8 * len(kinds) * (NUM_BINS + 1))
        held = np.frombuffer(shared, np.int64).reshape(len(kinds), NUM_BINS + 1)
        self.counts, self._longest_ns = held[:, :-1], held[:, -1]

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Time what is done inside; what raises is not counted."""
        begin = time.perf_counter_ns()
        yield
        self.note(kind, time.perf_counter_ns() - begin)

    def note(self, kind: str, nanoseconds: int) -> None:
        """Count one call."""
        at = self.kinds.index(kind)
        factor = max(1.0, nanoseconds / (1000 * SHORTEST_US))
        which = min(NUM_BINS - 1, int(PER_DECADE * math.log10(factor)))
        self.counts[at, which] += 1
        self._longest_ns[at] = max(self._longest_ns[at], nanoseconds)

    def percentile_us(self, kind: str, percent: float) -> float:
        """Microseconds that so many percent of the calls took at most; NaN of none."""
        counts = self.counts[self.kinds.index(kind)]
        total = int(counts.sum())
        if not total:
            return math.nan
        which = int(np.searchsorted(counts.cumsum(), math.ceil(total * percent / 100)))
        return float(SHORTEST_US * 10 ** ((which + 1) / PER_DECADE))

    def table(self) -> str:
        """A line for each kind: calls, percentiles and the longest, in microseconds."""
        names = "".join(f"{f'p{percent:g}':>10}" for percent in PERCENTILES)
        lines = [f"{'us':<18}{'calls':>10}{names}{'longest':>12}"]
        for at, kind in enumerate(self.kinds):
            each = (self.percentile_us(kind, percent) for percent in PERCENTILES)
            found = "".join(f"{value:>10.3g}" for value in each)
            longest = f"{self._longest_ns[at] / 1000:>12.6g}"
            lines.append(f"{kind:<18}{int(self.counts[at].sum()):>10}{found}{longest}")
        return "\n".join(lines)
