"""Draws of neighbours: blocks of legal starts that follow each other by rank.

Rows that lie side by side share chunks and pages, so a batch of few blocks touches a
fraction of what single rows do. What is paid for it is said in docs/samplers.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError
from mmreplay.samplers.checks import whole
from mmreplay.samplers.permutation import Permutation
from mmreplay.samplers.random import StepGenerator

Ids = NDArray[np.int64]


def checked_block(block: object, shuffle: bool = True) -> int:
    """The argument ``block``.

    Raises:
        SchemaError: It is no integer of at least 1, or there is no shuffling.
    """
    number = whole("block", block, 1, "leave it out to draw single steps")
    if number > 1 and not shuffle:
        raise SchemaError(
            f"block: got {block!r} with shuffle=False, expected one with shuffle=True "
            "only; leave it out, steps that are not shuffled follow each other"
        )
    return number


def block_ranks(
    random: StepGenerator, step: int, total: int, block: int, count: int
) -> Ids:
    """Ranks of blocks that begin anywhere alike, and go on at 0 behind the last one.

    Args:
        random: Draws them, by the first numbers of the step.
        step: At least 0.
        total: Legal starts, at least 1.
        block: Ranks of a block; of the last one the first few, if they are enough.
        count: How many.

    Returns:
        int64 ``[count]``, in ``[0, total)``: each of them any rank alike.
    """
    # Of a longer one no more is drawn, and its ranks would fill the memory.
    block = max(1, min(block, count))
    shares = random.shares(step, -(-count // block))
    firsts = (shares * total).astype(np.int64)
    ranks: Ids = (firsts[:, None] + np.arange(block)).reshape(-1)[:count] % total
    return ranks


class BlockPermutation:
    """A bijection of ``[0, size)`` that keeps blocks together; see `Permutation`.

    Blocks begin at a place of their own in each epoch, and come in a shuffled order;
    what fills none comes last.
    """

    def __init__(self, size: int, block: int, rng: np.random.Generator) -> None:
        """Choose an order.

        Args:
            size: At least 1, below 2**62.
            block: At least 1.
            rng: Chooses it; not kept.
        """
        self._size, self._block = size, min(block, size)
        self._full = size // self._block
        self._first = int(rng.integers(size))
        self._blocks = Permutation(max(1, self._full), rng)

    def __call__(self, indices: Ids) -> Ids:
        """Values at indices.

        Args:
            indices: int64 ``[B]``, in ``[0, size)``.

        Returns:
            int64 ``[B]``, in ``[0, size)``.
        """
        which, within = np.divmod(indices, self._block)
        full = which < self._full
        which[full] = self._blocks(which[full])
        values: Ids = (which * self._block + within + self._first) % self._size
        return values


def order_of(
    size: int, block: int, rng: np.random.Generator
) -> Permutation | BlockPermutation:
    """The order of one epoch."""
    return Permutation(size, rng) if block == 1 else BlockPermutation(size, block, rng)
