"""Counts rows and items of a buffer without making any call wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mmreplay.buffer.limiting import Count, Counts, LeftOut
from mmreplay.limiter.bound import FOLDER, BoundLimit
from mmreplay.limiter.rate_limiter import RateLimiter


@dataclass(frozen=True, slots=True)
class RateCounter:
    """Counts what is written and drawn as a `RateLimiter` does, and never waits.

    For loops that decide themselves when to write and when to draw: one thread that
    does both, or an event loop. ``buffer.limit`` has the counts of all processes, and
    says what the bound allows now. Processes with a `RateLimiter` of equal arguments
    share the counts. Without arguments everything is allowed and only counted.

    Attributes:
        samples_per_insert: As in `RateLimiter`, like the next two.
        min_size: Rows alive before the first item may be drawn.
        error_buffer: How far r * inserts - samples may be from r * min_size.

    Example:
        >>> counter = mr.RateCounter(4.0, min_size=10, error_buffer=40.0)
        >>> schema = mr.Schema({"reward": mr.Field((), "float32")})
        >>> with mr.ReplayBuffer.create(
        ...     "runs/counted", schema, capacity=1000, limiter=counter
        ... ) as buffer:
        ...     for step in range(20):
        ...         heads = buffer.add(reward=1.0)
        ...         while buffer.limit.allows_sample(8):
        ...             batch = buffer.sample(8)
        ...     buffer.limit.counts()
        Counts(inserts=20, samples=80, size=20)
    """

    samples_per_insert: float = 1.0
    min_size: int = 1
    error_buffer: float = math.inf

    def __post_init__(self) -> None:
        """Refuse what a `RateLimiter` refuses.

        Raises:
            SchemaError: A value is not legal.
        """
        self._limiter()

    def _limiter(self) -> RateLimiter:
        return RateLimiter(self.samples_per_insert, self.min_size, self.error_buffer)

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer that it does not fit; see `Limiter.check`.

        Raises:
            SchemaError: The buffer is in RAM or too small.
        """
        self._limiter().check(folder, capacity)

    def bind(
        self, folder: Path | None, capacity: int, count: Count, left_out: LeftOut | None = None
    ) -> BoundCounter:
        """Count for a buffer; see `Limiter.bind`.

        Raises:
            SchemaError: The buffer is in RAM or too small, or another process uses
                other arguments.
        """
        limiter = self._limiter()
        limiter.check(folder, capacity)
        assert folder is not None
        return BoundCounter(BoundLimit(limiter, folder / FOLDER, count))


class BoundCounter:
    """A counter bound to a buffer, as one process uses it; see `Limit`."""

    def __init__(self, limit: BoundLimit) -> None:
        """Count by a limit.

        Args:
            limit: Its waits are never entered.
        """
        self._limit = limit

    def await_insert(self) -> None:
        """Return at once, known as the writer to those who wait for one."""
        self._limit.enter("insert")

    def await_sample(self) -> None:
        """Return at once, known as a learner to those who wait for one."""
        self._limit.enter("sample")

    def count(self, count: int) -> None:
        """Count items drawn; see `Limit.count`."""
        self._limit.count(count)

    def counts(self) -> Counts:
        """Return what is counted now, by all processes; see `Limit.counts`."""
        return self._limit.counts()

    def allows_insert(self, count: int = 1) -> bool:
        """Whether so many rows may be written now; see `Limit.allows_insert`."""
        return self._limit.allows_insert(count)

    def allows_sample(self, count: int = 1) -> bool:
        """Whether so many items may be drawn now; see `Limit.allows_sample`."""
        return self._limit.allows_sample(count)

    def close(self) -> None:
        """Release the locks; a second call does nothing."""
        self._limit.close()
