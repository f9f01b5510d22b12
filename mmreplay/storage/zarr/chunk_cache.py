"""A cache of unpacked chunks, bounded by their bytes."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Measured(Protocol):
    """An array, or several."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Measured)


class ChunkCache(Generic[K, V]):
    """Arrays by key; the oldest is dropped first.

    Threads: any. Two that unpack the same chunk both put it, and it counts once.

    Attributes:
        nbytes: Of the cached arrays.
    """

    def __init__(self, max_nbytes: int) -> None:
        """Cache at most so many bytes, and the newest array in any case."""
        self._max_nbytes, self.nbytes = max_nbytes, 0
        self._arrays: dict[K, V] = {}
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """Return the array of a key, or None."""
        return self._arrays.get(key)

    def put(self, key: K, array: V) -> None:
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
