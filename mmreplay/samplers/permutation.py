"""A shuffled order that is computed, not stored.

A balanced Feistel network whose halves are added modulo their sizes (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains", section 4 and, for cycle
walking, section 3) permutes ``[0, a * b)``; what falls beyond the size asked for is
put through again until it does not. With a and b next to the square root that
happens to less than one in sqrt(size).
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
ROUNDS = 8
TABLE = 1 << 16
"""Up to this size an order is drawn outright: 512 KiB, and exactly any of all."""


class Permutation:
    """A bijection of ``[0, size)`` chosen by a generator.

    Called with any indices at a time; some 0.2 us each. Memory does not grow with
    the size beyond `TABLE`.
    """

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        """Choose an order.

        Args:
            size: At least 1, below 2**62.
            rng: Chooses it; not kept.
        """
        self.size = size
        self._table = rng.permutation(size) if size <= TABLE else None
        self._keys = rng.integers(1 << 64, size=ROUNDS, dtype=np.uint64)
        self._tall = np.uint64(isqrt(size - 1) + 1)
        self._wide = np.uint64(-(-size // int(self._tall)))

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Values at indices.

        Args:
            indices: int64 ``[B]``, in ``[0, size)``.

        Returns:
            int64 ``[B]``, in ``[0, size)``.
        """
        if self._table is not None:
            permuted: NDArray[np.int64] = self._table[indices]
            return permuted
        values = self._once(indices.astype(np.uint64))
        beyond = np.flatnonzero(values >= self.size)
        while len(beyond):
            values[beyond] = self._once(values[beyond])
            beyond = beyond[values[beyond] >= self.size]
        return values.astype(np.int64)

    def _once(self, values: Words) -> Words:
        """Permute ``[0, tall * wide)``."""
        left, right = np.divmod(values, self._wide)
        for number, key in enumerate(self._keys):
            if number % 2:
                left = (left + _hashed(right, key) % self._tall) % self._tall
            else:
                right = (right + _hashed(left, key) % self._wide) % self._wide
        return left * self._wide + right


def _hashed(words: Words, key: np.uint64) -> Words:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) of words under a key."""
    words = words + key
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
