"""A cache of unpacked chunks, bounded by their bytes."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
K = TypeVar("K", bound=Hashable)


class ChunkCache(Generic[K]):
    """Arrays by key; the oldest is dropped first.

    Threads: any. Two that unpack the same chunk both put it, and it counts once.

    Attributes:
        nbytes: Of the cached arrays.
    """

    def __init__(self, max_nbytes: int) -> None:
        """Cache at most so many bytes, and the newest array in any case."""
        self._max_nbytes, self.nbytes = max_nbytes, 0
        self._arrays: dict[K, Array] = {}
        self._lock = Lock()

    def get(self, key: K) -> Array | None:
        """Return the array of a key, or None."""
        return self._arrays.get(key)

    def put(self, key: K, array: Array) -> None:
        """Cache an array, unless another thread is caching one now."""
        # Never waited for: a fork may have taken the lock along, held for good.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._drop(key)
            self.nbytes += array.nbytes
            while self.nbytes > self._max_nbytes and self._arrays:
                self._drop(next(iter(self._arrays)))
            self._arrays[key] = array
        finally:
            self._lock.release()

    def _drop(self, key: K) -> None:
        known = self._arrays.pop(key, None)
        self.nbytes -= 0 if known is None else known.nbytes
