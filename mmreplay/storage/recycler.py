"""Arrays for batches, used again once nobody holds the batch.

A batch of new memory costs a page fault for every 4 KiB and the kernel's zeroing
of it: for large rows, as much as the gather itself. So the arrays handed out are
remembered, and handed out again when the last view of them is gone, which their
reference count tells exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_ARRAYS = 4
"""Arrays kept of each shape: one being filled, and a few with the learner."""
MAX_SHAPES = 8
MAX_NBYTES = 64 << 20

T = TypeVar("T")


def _next(pool: list[T], at: int) -> tuple[T, int]:
    """Move one of a pool's items to its front; return it and its references meanwhile.

    Raises:
        IndexError: Other threads have taken all of them out.
    """
    item = pool.pop(at)
    references = sys.getrefcount(item)
    pool.insert(0, item)
    return item, references


# Measured: up to Python 3.13 the argument of getrefcount counts beside the name,
# later it may not. Never more than two: a debugger that holds the object as well
# would let arrays be handed out that somebody still reads.
UNSHARED = min(2, _next([object()], 0)[1])


class Recycler:
    """Hands out uninitialised arrays of a few recurring shapes.

    Holds at most MAX_SHAPES * MAX_ARRAYS arrays of at most 64 MiB. Any thread may
    call: an array is out of its pool while it is looked at.
    """

    def __init__(self) -> None:
        self._pools: dict[Hashable, list[NDArray[np.generic]]] = {}

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> NDArray[np.generic]:
        """Return an array whose content means nothing.

        Args:
            shape: Its shape.
            dtype: Its dtype.
        """
        pool = self._pools.get((shape, dtype))
        if pool is None:
            pool = self._new_pool((shape, dtype))
        # The latest first: what was given back last is still in the processor's
        # caches, and 4,096 records are gathered 28 us faster into it.
        for at in range(len(pool)):
            try:
                array, references = _next(pool, at)
            except IndexError:
                break
            if references == UNSHARED:
                return array
        array = np.empty(shape, dtype)
        if len(pool) < MAX_ARRAYS and array.nbytes <= MAX_NBYTES:
            pool.insert(0, array)
        return array

    def _new_pool(self, key: Hashable) -> list[NDArray[np.generic]]:
        if len(self._pools) >= MAX_SHAPES:
            self._pools.clear()
        return self._pools.setdefault(key, [])
