"""When the heap of a compressed buffer may be overwritten: once shards hold the values.

The rows stay: they are in shards with their values, for as long as the ring keeps them.
A heap tail rises by whole shards, past those that are complete below the committed
heads and sealed with their numbers in places.bin synced. Incomplete ones are written
on, and what a power cut leaves may be one: their values stay in the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmreplay.format.heap import Array
from mmreplay.storage.commit_state import WritableCommitState, heap_bounds
from mmreplay.storage.heap import SCANNED_ROWS, Heap, HeapSpace

if TYPE_CHECKING:
    from mmreplay.storage.zarr.engine import ZarrStore


class SealedHeapSpace(HeapSpace):
    """How far the heap of each environment may be written; see `HeapSpace`."""

    ends_rows = False

    def __init__(self, store: ZarrStore, heap: Heap, commit_state: WritableCommitState) -> None:
        """Look at one store; see `HeapSpace`."""
        super().__init__(store, heap, commit_state)
        self._sealing = store.sealing
        self._ring = store.ring
        self._steps = store.sealing.steps
        # The first range of each environment that has values above the heap tail, and
        # that after a raise which may not have been made yet, with its heap tail.
        self._firsts: Array | None = None
        self._raised: dict[int, tuple[int, int]] = {}

    def raised(
        self, wanted: Array, limits: Array, highest: Array | None = None
    ) -> tuple[Array, Array]:
        """Tails as they are, and heap tails as far as shards hold the values.

        Those may be lower than wanted; see `HeapSpace.raised`, and `await_shards`.
        """
        state = self._commit_state
        heads, _, heap_heads = state.published
        assert heap_heads is not None
        (_, heap_tails), durable = heap_bounds(state), state.committed
        heap_tails = np.maximum(heap_tails, heap_bounds(durable)[1])
        # After a power cut the range of the committed head is written on.
        complete = np.minimum(heads, durable.heads)
        tails = durable.tails
        targets = wanted - self.nbytes
        short = np.flatnonzero(heap_tails < targets)
        if not len(short):
            return tails, heap_tails
        alive_from = self._alive_from(limits)
        firsts = self._unpassed(heads, heap_tails, alive_from)
        stops = complete // self._steps
        sealed = {env_id: self._sealed(env_id, firsts, stops) for env_id in short.tolist()}
        # Before the first byte is given up, as a power cut takes numbers back that
        # were not synced.
        self._sealing.states.file.sync()
        heap_tails = heap_tails.copy()
        for env_id, count in sealed.items():
            first, heap_tail = int(firsts[env_id]), int(heap_tails[env_id])
            for after in range(first, first + count + 1):
                # What lies below may be no row of this ring's.
                oldest = max(after * self._steps, int(alive_from[env_id]))
                begin = self._first_begin(env_id, oldest, int(heads[env_id]))
                begin = int(heap_heads[env_id]) if begin is None else begin
                heap_tail = max(heap_tail, begin)
                self._raised[env_id] = after, heap_tail
                if heap_tail >= targets[env_id]:
                    break
            heap_tails[env_id] = heap_tail
        return tails, heap_tails

    def await_shards(self, needed: Array, commit: Callable[[], object] | None) -> None:
        """Have shards made until the heap may be written so far; see `HeapSpace`."""
        heads, _, _ = self._commit_state.published
        limits = self._commit_state.committed.limits
        _, heap_tails = heap_bounds(self._commit_state)
        short = np.flatnonzero(self.free_until < needed)
        firsts = self._unpassed(heads, heap_tails, self._alive_from(limits))
        stops = heads // self._steps
        missing = [
            range_id
            for env_id in short.tolist()
            for range_id in self._range_ids(env_id, firsts, stops)
            if not self._sealing.states.get(range_id) & 1
        ]
        if missing:
            self._sealing.seal_now(missing)
            self._sealing.check()
            self._sealing.raise_if_staged(missing)
        if commit is None:
            return
        _, reached = self.raised(needed, limits)
        if (reached + self.nbytes < needed).any():
            commit()

    def _alive_from(self, limits: Array) -> Array:
        """int64 ``[E]``: no row below is alive, nor would be after a power cut."""
        state = self._commit_state
        tails = np.minimum(state.tails, state.committed.tails)
        return np.maximum(tails, limits - self._ring.slots)

    def _unpassed(self, heads: Array, heap_tails: Array, alive_from: Array) -> Array:
        """The first range of each environment with values above the heap tail."""
        if self._firsts is None:
            self._firsts = np.array(
                [
                    self._first_above(env_id, int(heads[env_id]), int(tail))
                    for env_id, tail in enumerate(heap_tails.tolist())
                ]
            )
        for env_id, (first, heap_tail) in self._raised.items():
            if heap_tails[env_id] >= heap_tail:
                self._firsts[env_id] = max(self._firsts[env_id], first)
        # Rows below need no shard.
        self._firsts = np.maximum(self._firsts, alive_from // self._steps)
        return self._firsts

    def _first_above(self, env_id: int, head: int, heap_position: int) -> int:
        """The range of the oldest row with a value from a heap position on.

        Looked for from the newest row back: at an opening, the rows of a heap or less.
        """
        oldest = max(0, head - self._ring.slots)
        first = head
        while first > oldest:
            at = max(oldest, first - SCANNED_ROWS)
            begins = self._begins(env_id, at, first)
            below = np.flatnonzero((begins >= 0) & (begins < heap_position))
            if len(below):
                return (at + int(below[-1]) + 1) // self._steps
            first = at
        return first // self._steps

    def _range_ids(self, env_id: int, firsts: Array, stops: Array) -> NDArray[np.int64]:
        """Numbers of ranges between two of an environment."""
        per_env = self._ring.slots // self._steps
        ranges = np.arange(int(firsts[env_id]), int(stops[env_id]))
        return env_id * per_env + ranges % per_env

    def _sealed(self, env_id: int, firsts: Array, stops: Array) -> int:
        """How many ranges from the first one on are sealed, one after another."""
        numbers = self._sealing.states.take(self._range_ids(env_id, firsts, stops))
        staged = np.flatnonzero(numbers & 1 == 0)
        return int(staged[0]) if len(staged) else len(numbers)
