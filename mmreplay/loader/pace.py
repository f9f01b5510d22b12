"""How soon a learner comes back for the next batch, and what follows from it."""

from __future__ import annotations

from time import perf_counter

QUICK_S = 100e-6
"""A learner that is back sooner makes small batches itself: to have a thread make one
and wait for it takes longer than the batch (tools/bench/bench_loader.py)."""
HURRIED = 0.25
"""A learner that is back within so much of the time that a gather takes is going to
wait, and leaves its core to one thread more: at less than a half, two batches are done
sooner than one after the other beside what the learner does."""


class Pace:
    """Of one learner.

    Attributes:
        quick: It is back at once, for a small batch.
        hurried: It is back long before a gather is over.
        gather_s: What the last gather took, in seconds.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.quick = self.hurried = False
        self.gather_s = self._left_at = 0.0

    def back(self, small: bool) -> None:
        """It asks for a batch, a small one or not."""
        away_s = perf_counter() - self._left_at
        self.hurried = away_s < HURRIED * self.gather_s
        self.quick = small and away_s < QUICK_S

    def leaves(self) -> None:
        """It has got one."""
        self._left_at = perf_counter()
