"""Random numbers by (seed, step): a generator whose counter is set, not built anew.

Building a generator costs as much as gathering a batch; setting the counter of a
Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3") costs a microsecond, and step s of seed k is the same wherever it is drawn.
"""

from __future__ import annotations

import secrets

import numpy as np

from mmreplay.errors import SchemaError


class StepGenerator:
    """A `numpy.random.Generator` for each step.

    Attributes:
        seed: In ``[0, 2**63)``; drawn from the system where None was given.
    """

    def __init__(self, seed: int | None) -> None:
        """Make one.

        Raises:
            SchemaError: The seed is no integer in the range.
        """
        self.seed = secrets.randbits(63) if seed is None else _checked(seed)
        self._philox = np.random.Philox(key=self.seed)
        self._state = self._philox.state
        self._counter = self._state["state"]["counter"]
        self._counter[:] = 0
        self._generator = np.random.Generator(self._philox)

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
        f"seed: got {seed!r}, expected None or an integer in [0, 2**63); pass None "
        "to take one from the system"
    )
