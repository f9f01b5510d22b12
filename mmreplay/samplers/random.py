"""Random numbers by (seed, step): a generator whose counter is set, not built anew.

Building a generator costs as much as gathering a batch; setting the counter of a
Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3") costs a microsecond, and step s of seed k is the same wherever it is drawn.
"""

from __future__ import annotations

import secrets

import numpy as np


class StepGenerator:
    """A `numpy.random.Generator` for each step.

    Attributes:
        seed: In ``[0, 2**63)``; drawn from the system where None was given.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = secrets.randbits(63) if seed is None else int(seed)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed: got {seed!r}, expected None or [0, 2**63)")
        self._philox = np.random.Philox(key=self.seed)
        self._state = self._philox.state
        self._generator = np.random.Generator(self._philox)

    def at(self, step: int) -> np.random.Generator:
        """Return the generator of one step; it is void when the next is asked for.

        Args:
            step: At least 0.
        """
        # 2**64 numbers a step: no step reaches into the next one's.
        self._state["state"]["counter"][:] = (0, step, 0, 0)
        self._state["buffer_pos"] = 4
        self._state["has_uint32"] = 0
        self._philox.state = self._state
        return self._generator

    def key(self, step: int) -> int:
        """Return a number of one step, in ``[0, 2**64)``, for `Draw.key`."""
        # Weyl's sequence: steps in a row give keys far apart, whatever the seed.
        return (self.seed + (step + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
