"""Random numbers by (seed, step): one generator whose counter is set for each step.

Building a generator costs as much as gathering a batch; setting the counter of a
Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3") costs a microsecond, and step s of seed k is the same wherever it is drawn.
"""

from __future__ import annotations

import os
import secrets

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.episodes.starts import StartTable
from mmreplay.errors import SchemaError, shown

INT64 = np.dtype(np.int64)
"""Given as what it is, it need not be looked up."""

Ids = NDArray[np.int64]
_steps = kernels.load("steps")


def shares(key: int, step: int, count: int) -> NDArray[np.float64]:
    """Return the first numbers of a step of a draw's key, float64 in ``[0, 1)``.

    Args:
        key: In ``[0, 2**64)``, of the draw: all its randomness follows from it.
        step: At least 0; each use of a key takes another one.
        count: How many.
    """
    numbers = np.empty(count)
    _steps.shares(key, step, numbers)
    return numbers


class StepGenerator:
    """A `numpy.random.Generator` for each step.

    Attributes:
        seed: In ``[0, 2**63)``; drawn from the system where None was given.
        given: Whether it was given, so that others can have the same.
        pid: The process that drew it, if it was not.
    """

    def __init__(self, seed: int | None) -> None:
        """Make one.

        Raises:
            SchemaError: The seed is no integer in the range.
        """
        self.given, self.pid = seed is not None, os.getpid()
        self.seed = secrets.randbits(63) if seed is None else _checked(seed)
        self._philox = np.random.Philox(key=self.seed)
        self._state = self._philox.state
        self._counter = self._state["state"]["counter"]
        self._counter[:] = 0
        self._generator = np.random.Generator(self._philox)

    @property
    def given_seed(self) -> int | None:
        """The seed that was given, for a `repr`; None where none was."""
        return self.seed if self.given else None

    def at(self, step: int) -> np.random.Generator:
        """Return the generator of one step; it is void when the next is asked for.

        Args:
            step: At least 0.
        """
        # 2**64 numbers a step: no step reaches into the next one's. The state that is
        # set is the one of a new generator, with nothing buffered, but for this.
        self._counter[1] = step
        self._philox.state = self._state
        return self._generator

    def shares(self, step: int, count: int) -> NDArray[np.float64]:
        """Return the first numbers of one step, float64 ``[count]`` in ``[0, 1)``."""
        numbers = np.empty(count)
        _steps.shares(self.seed, step, numbers)
        return numbers

    def shares_of(self, steps: range, count: int) -> NDArray[np.float64]:
        """Return `shares` of several steps, float64 ``[len(steps), count]``."""
        numbers = np.empty((len(steps), count))
        for own, step in zip(numbers, steps, strict=True):
            _steps.shares(self.seed, step, own)
        return numbers

    def pick(self, step: int, ends: Ids, stops: Ids, count: int) -> tuple[Ids, Ids]:
        """Draw rows of stretches by the first numbers of one step.

        Args:
            step: At least 0.
            ends: int64 ``[E]``, rows of the stretches up to the end of each.
            stops: int64 ``[E]``, the position after each stretch.
            count: How many.

        Returns:
            Stretch and position, int64 ``[count]`` each; a number for each row.
        """
        env_ids, positions = np.empty(count, INT64), np.empty(count, INT64)
        _steps.pick(self.seed, step, ends, stops, env_ids, positions)
        return env_ids, positions

    def pick_legal(
        self, step: int, ends: Ids, stops: Ids, table: StartTable, tries: int, count: int
    ) -> tuple[Ids, Ids]:
        """Keep those that are legal of so many rows that `pick` draws.

        Args:
            step: See `pick`, as the next two.
            ends: See `pick`.
            stops: See `pick`.
            table: What legal starts are looked up in.
            tries: Rows to draw.
            count: Legal ones to return at most.

        Returns:
            Stretch and position, int64 ``[N]`` each, N at most count.
        """
        env_ids, positions = np.empty(count, INT64), np.empty(count, INT64)
        num_found = _steps.pick_legal(
            self.seed, step, ends, stops, *table, tries, env_ids, positions
        )
        if num_found < count:
            return env_ids[:num_found], positions[:num_found]
        return env_ids, positions

    def key(self, step: int) -> int:
        """Return a number of one step, in ``[0, 2**64)``, for `Draw.key`."""
        # Weyl's sequence: steps in a row give keys far apart, whatever the seed.
        return (self.seed + (step + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def _checked(seed: object) -> int:
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        number = int(seed)
        if 0 <= number < 1 << 63:
            return number
    raise SchemaError(
        f"seed must be None or an integer in [0, 2**63), got {shown(seed)}. Pass None "
        "for a seed from the operating system."
    )
