"""The bound that a rate limiter holds a writer and its learners to."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, SupportsFloat, cast, get_args

from mmreplay.arguments import one_of
from mmreplay.buffer.limiting import Count, LeftOut
from mmreplay.errors import SchemaError, shown
from mmreplay.limiter.bound import FOLDER, BoundLimit

OnTimeout = Literal["raise", "proceed"]


@dataclass(frozen=True, slots=True, init=False)
class RateLimiter:
    """Samples per insert, a minimum size and an error buffer, as in Reverb.

    Give equal ones to the writer's and the learners' `ReplayBuffer.create` or `open`.
    A call proceeds as soon as one more row or item is allowed, so a call of n items
    can exceed the bound by n - 1. Rows are counted over all environments, final rows
    included; items are the steps, or windows, of batches.

    Attributes:
        samples_per_insert: Items drawn per row written, in the long run.
        min_size: Rows alive before the first item is drawn; writing is free until then.
        error_buffer: How far r * inserts - samples may be from r * min_size, at least
            ``max(1, samples_per_insert)``, or both sides could wait for each other;
            ``float("inf")`` where min_size alone is to count.
        timeout: Seconds that a call waits at most; None for as long as another process
            or thread lives that could end the wait.
        patience: Seconds that a call waits where none lives, and nothing is counted.
        on_timeout: ``"raise"`` StarvedError after the wait, or ``"proceed"``.

    Example:
        >>> limiter = mr.RateLimiter(
        ...     samples_per_insert=8, min_size=1000, error_buffer=100
        ... )
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", limiter=limiter)
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float
    timeout: float | None = None
    patience: float = 10.0
    on_timeout: OnTimeout = "raise"

    def __init__(
        self,
        samples_per_insert: float,
        min_size: int,
        error_buffer: float,
        timeout: float | None = None,
        patience: float = 10.0,
        on_timeout: OnTimeout = "raise",
    ) -> None:
        """Make one.

        Args:
            samples_per_insert: See the attributes, as for all others.
            min_size: Rows alive before the first draw.
            error_buffer: How far both sides may be apart.
            timeout: Seconds that a call waits.
            patience: Seconds that a call waits alone.
            on_timeout: What happens after the wait.

        Raises:
            SchemaError: A value is not legal, or could block both sides.
        """
        values = (samples_per_insert, min_size, error_buffer, timeout, patience, on_timeout)
        for each, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, each.name, value)
        self._check()

    def _check(self) -> None:
        ratio = _number(self.samples_per_insert)
        if not 0 < ratio < math.inf:
            raise SchemaError(
                "samples_per_insert must be a number above 0, got "
                f"{shown(self.samples_per_insert)}. Give the items drawn for each row "
                "written."
            )
        if not _number(self.min_size, Integral) >= 1:
            raise SchemaError(
                "min_size must be an integer of at least 1, got "
                f"{shown(self.min_size)}. Give the rows that must be written before "
                "the first draw."
            )
        if not _number(self.error_buffer) >= max(1.0, ratio):
            raise SchemaError(
                f"error_buffer must be at least {max(1.0, ratio):g} (the larger of 1 "
                f"and samples_per_insert), got {shown(self.error_buffer)}: otherwise "
                "writer and learner could wait for each other. Pass a larger one, or "
                "float('inf') for min_size alone."
            )
        if not (self.timeout is None or _number(self.timeout) >= 0):
            raise SchemaError(
                "timeout must be seconds of at least 0 or None, got "
                f"{shown(self.timeout)}. Pass the longest wait of a call, or leave it "
                "out."
            )
        if not _number(self.patience) >= 0:
            raise SchemaError(
                f"patience must be seconds of at least 0, got {shown(self.patience)}. "
                "Pass how long a call may wait alone, or leave it out."
            )
        way_out = "Say what happens after the wait."
        one_of("on_timeout", self.on_timeout, get_args(OnTimeout), way_out)

    @property
    def settings(self) -> tuple[float, int, float]:
        """What must be equal on both sides."""
        return (float(self.samples_per_insert), int(self.min_size), float(self.error_buffer))

    def allows_insert(self, inserts: int, samples: int, size: int) -> bool:
        """Whether one more row may be written.

        Args:
            inserts: Rows written, all in all.
            samples: Items drawn, all in all.
            size: Steps alive.
        """
        if size < self.min_size:
            return True
        ratio, min_size, error = self.settings
        return ratio * (inserts + 1) - samples <= ratio * min_size + error

    def allows_sample(self, inserts: int, samples: int, size: int) -> bool:
        """Whether one more item may be drawn.

        Args:
            inserts: Rows written, all in all.
            samples: Items drawn, all in all.
            size: Steps alive.
        """
        if size < self.min_size:
            return False
        ratio, min_size, error = self.settings
        # Of a product that is infinite too the difference would be none.
        return error == math.inf or (ratio * inserts - (samples + 1) >= ratio * min_size - error)

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer that it does not fit; see `Limiter.check`.

        Raises:
            SchemaError: The buffer is in RAM or too small.
        """
        if folder is None:
            raise SchemaError(
                "limiter needs a buffer with a folder, which processes share. Create "
                "the buffer with a path."
            )
        if self.min_size > capacity:
            raise SchemaError(
                f"min_size must be at most {capacity}, the rows that the buffer can "
                f"hold, got {self.min_size}. Pass fewer, or a larger capacity."
            )

    def bind(
        self, folder: Path | None, capacity: int, count: Count, left_out: LeftOut | None = None
    ) -> BoundLimit:
        """Apply it to a buffer; see `Limiter.bind`.

        Raises:
            SchemaError: The buffer is in RAM or too small, or another process uses
                other settings.
        """
        self.check(folder, capacity)
        assert folder is not None
        return BoundLimit(self, folder / FOLDER, count, left_out)


def _number(value: object, kind: type = Real) -> float:
    """The number that it is; NaN where it is none of the kind."""
    if isinstance(value, kind) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(cast("SupportsFloat", value))
    return math.nan
