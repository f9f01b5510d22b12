"""Numbers that change as a sampler goes on, such as the beta of prioritized draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mmreplay.arguments import is_number
from mmreplay.errors import SchemaError, called, shown

Schedule = float | Callable[[int], float]
"""A constant, or a number by step: a sampler's draws are its steps, from 0 on."""


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """From one number to another in equal steps, and no further.

    Attributes:
        start: The number at step 0.
        stop: The number from step `steps` on.
        steps: At least 1.

    Example:
        >>> beta = mr.LinearSchedule(0.4, 1.0, steps=100_000)
        >>> beta(50_000)
        0.7
        >>> sampler = mr.PrioritizedSampler(beta=beta)
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            number = getattr(self, name)
            if not (is_number(number) and math.isfinite(number)):
                raise SchemaError(
                    f"LinearSchedule {name}: got {shown(number)}, expected a finite "
                    "number; "
                    "such as 0.4"
                )
        if type(self.steps) is not int or self.steps < 1:
            raise SchemaError(
                f"LinearSchedule steps: got {shown(self.steps)}, expected an integer "
                "of at "
                "least 1; for a constant give the number itself"
            )

    def __call__(self, step: int) -> float:
        """The number at a step."""
        if step >= self.steps:
            return float(self.stop)
        return self.start + (self.stop - self.start) * (step / self.steps)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule and the range that it has to keep to.

    Attributes:
        name: What messages call it.
        schedule: The number, or what gives it by step.
        most: The greatest number allowed; the least one is 0.
    """

    name: str
    schedule: Schedule
    most: float

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            self._checked(self.schedule)

    @property
    def constant(self) -> bool:
        """Whether it is the same at every step."""
        return not callable(self.schedule)

    def at(self, step: int) -> float:
        """The number at a step.

        Raises:
            SchemaError: It is out of range.
        """
        if not callable(self.schedule):
            return float(self.schedule)
        return self._checked(
            called(f"the schedule of {self.name}", self.schedule, step)
        )

    def _checked(self, number: object) -> float:
        if not (is_number(number) and 0 <= number <= self.most):
            raise SchemaError(
                f"{self.name}: got {shown(number)}, expected a number in [0, "
                f"{self.most:g}], or a callable of the step that returns one, such as "
                "mmreplay.LinearSchedule(0.4, 1.0, steps=100_000)"
            )
        return float(number)
