"""The greatest or least of many numbers of which a few change between two looks.

Changes are only noted; a look works through the blocks of 16 that hold them, so
that updates which nobody looks at cost nothing. 1/15 of the numbers' own size.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS
FEW_BLOCKS = 4096
"""As many are looked through whole."""

T = TypeVar("T", np.float32, np.float64)


class Extremes(Generic[T]):
    """The greatest, or the least, of the numbers above 0 in an array.

    It holds no reference to the array, which may be a mapping that is to be closed.
    """

    def __init__(self, ufunc: np.ufunc, nothing: float) -> None:
        """Make one that knows nothing yet.

        Args:
            ufunc: ``np.maximum`` or ``np.minimum``.
            nothing: What a look gives where no number is above 0.
        """
        self._ufunc = ufunc
        self._nothing = nothing
        self._blocks: NDArray[T] | None = None
        self._above: Extremes[T] | None = None
        self._changed: list[NDArray[np.int64]] = []
        self._num_changed = 0

    def note(self, places: NDArray[np.int64]) -> None:
        """Note numbers that are about to change.

        Args:
            places: int64 ``[N]``, where they are.
        """
        if self._blocks is None:
            return
        if self._num_changed > len(self._blocks):
            self.forget()
            return
        self._changed.append(places >> BLOCK_BITS)
        self._num_changed += len(places)

    def forget(self) -> None:
        """Take every number for changed."""
        self._blocks, self._changed, self._num_changed = None, [], 0

    def look(self, numbers: NDArray[T]) -> float:
        """The extreme of the numbers above 0.

        Args:
            numbers: ``[N]``, N at least 1; the same array at every look.
        """
        if self._blocks is None:
            self._fill(numbers)
        elif self._changed:
            self._follow(numbers)
        assert self._blocks is not None
        if self._above is not None:
            return self._above.look(self._blocks)
        return float(self._ufunc.reduce(self._present(self._blocks)))

    def _fill(self, numbers: NDArray[T]) -> None:
        count = -(-len(numbers) // BLOCK)
        blocks: NDArray[T] = np.empty(count, numbers.dtype)
        for first in range(0, count, FEW_BLOCKS):
            piece = numbers[first * BLOCK : (first + FEW_BLOCKS) * BLOCK]
            edges = np.arange(0, len(piece), BLOCK)
            blocks[first : first + FEW_BLOCKS] = self._ufunc.reduceat(
                self._present(piece), edges
            )
        self._blocks = blocks
        few = count <= FEW_BLOCKS
        self._above = None if few else Extremes(self._ufunc, self._nothing)

    def _follow(self, numbers: NDArray[T]) -> None:
        assert self._blocks is not None
        # Blocks more than once are fewer than finding them out would be worth.
        changed = np.concatenate(self._changed)
        whole = len(numbers) // BLOCK
        if self._above is not None:
            self._above.note(changed)
        if whole:
            # Where the last block is short, the one before stands in for it.
            blocks = np.minimum(changed, whole - 1)
            found = numbers[: whole * BLOCK].reshape(whole, BLOCK).take(blocks, 0)
            # Along short rows numpy reduces nine times more slowly than across.
            across = np.ascontiguousarray(found.T)
            self._blocks[blocks] = self._ufunc.reduce(self._present(across), axis=0)
        if whole < len(self._blocks):
            rest = self._present(numbers[whole * BLOCK :])
            self._blocks[-1] = self._ufunc.reduce(rest)
        self._changed, self._num_changed = [], 0

    def _present(self, numbers: NDArray[T]) -> NDArray[T]:
        """Put what stands for nothing in the place of zeros."""
        if self._nothing == 0:
            return numbers
        present: NDArray[T] = np.where(
            numbers > 0, numbers, numbers.dtype.type(self._nothing)
        )
        return present
