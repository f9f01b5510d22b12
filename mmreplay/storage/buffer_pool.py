"""Arrays for batches, used again once nobody holds the batch.

A batch of new memory costs a page fault for every 4 KiB and the kernel's zeroing
of it: for large rows, as much as the gather itself. So the arrays handed out are
remembered, and handed out again when the last view of them is gone, which their
reference count tells exactly.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_ARRAYS = 4
"""Arrays kept of each shape: one being filled, and a few with the learner."""
MAX_SHAPES = 8
MAX_NBYTES = 64 << 20
SPARE = 2
"""Times as much as ever was in use at a time is kept in all: shapes that never come
again, as of whole episodes, would else add up."""
LITTLE_NBYTES = 64 << 20
"""What is kept in any case."""

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

Make = Callable[[tuple[int, ...], np.dtype[np.generic]], NDArray[Any]]
"""Makes an array of a shape and dtype whose content means nothing."""


class _Serving(threading.local):
    """Whom this thread is given arrays by, whichever recycler it asks.

    A default of the class: to miss an attribute of a thread's own costs as much as all
    else that `Recycler.empty` does.
    """

    recycler: BufferPool | None = None


_serving = _Serving()


class BufferPool:
    """Hands out uninitialised arrays of a few recurring shapes.

    Holds at most MAX_SHAPES * MAX_ARRAYS arrays of at most 64 MiB, and where that is
    more than 64 MiB, twice what was in use at a time. Any thread may call: an array is
    out of its pool while it is looked at.
    """

    def __init__(
        self,
        max_arrays: int = MAX_ARRAYS,
        max_shapes: int = MAX_SHAPES,
        max_nbytes: int = MAX_NBYTES,
        make: Make = np.empty,
    ) -> None:
        """Make one that holds nothing yet.

        Args:
            max_arrays: Arrays kept of each shape.
            max_shapes: Shapes kept.
            max_nbytes: Bytes of the largest array kept.
            make: Where the arrays come from.
        """
        self._max_arrays, self._max_shapes = max_arrays, max_shapes
        self._max_nbytes = max_nbytes
        self._make = make
        self._pools: dict[Hashable, list[NDArray[np.generic]]] = {}
        self._kept_nbytes = self._most_used = 0

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> NDArray[np.generic]:
        """Return an array whose content means nothing.

        Args:
            shape: Its shape.
            dtype: Its dtype.
        """
        other = _serving.recycler
        if other is not None and other is not self:
            return other.empty(shape, dtype)
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
        fresh: NDArray[np.generic] = self._make(shape, dtype)
        if len(pool) < self._max_arrays and fresh.nbytes <= self._max_nbytes:
            pool.insert(0, fresh)
            self._kept_nbytes += fresh.nbytes
            if self._kept_nbytes > LITTLE_NBYTES:
                self._let_go()
        return fresh

    def _let_go(self) -> None:
        """Keep no more than a few times what was in use, the latest shapes of it."""
        used, unused = 0, []
        for key, pool in list(self._pools.items()):
            for at in range(len(pool)):
                with suppress(IndexError):
                    array, references = _next(pool, at)
                    if references == UNSHARED:
                        unused.append((key, array))
                    else:
                        used += array.nbytes
        self._most_used = max(self._most_used, used)
        kept = used + sum([array.nbytes for _, array in unused])
        for key, array in unused:
            if kept <= SPARE * self._most_used:
                break
            kept -= array.nbytes
            left = [each for each in self._pools.pop(key, []) if each is not array]
            if left:
                self._pools.setdefault(key, left)
        self._kept_nbytes = kept

    def __enter__(self) -> None:
        """Give this thread arrays whichever recycler it asks, until the exit.

        So who gathers ahead has memory of its own kind, and of its own number.
        """
        _serving.recycler = self

    def __exit__(self, *_: object) -> None:
        """Let others give it arrays again."""
        _serving.recycler = None

    def clear(self) -> None:
        """Keep nothing; what was handed out stays as it is."""
        self._pools.clear()
        self._kept_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays kept, whoever holds them."""
        pools = list(self._pools.values())
        return sum(array.nbytes for pool in pools for array in list(pool))

    def _new_pool(self, key: Hashable) -> list[NDArray[np.generic]]:
        if len(self._pools) >= self._max_shapes:
            self.clear()
        return self._pools.setdefault(key, [])
