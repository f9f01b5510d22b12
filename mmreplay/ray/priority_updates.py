"""Priorities that a learner gives to steps of rings, on their way to the shards.

They travel with the next request to the shard that owns them, or by themselves where
nothing is drawn. Repeating them does no harm.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.batch import Batch, as_numpy
from mmreplay.errors import SchemaError, frames_to_caller
from mmreplay.ray.client_stats import ClientStats, LostWarning
from mmreplay.ray.draws import Update
from mmreplay.ray.requests import Requests, number_of
from mmreplay.ray.ring_table import KnownShard, RingTable
from mmreplay.samplers.base import Sampler, traits_of
from mmreplay.samplers.priority_store import Numbers, storable

IDLE_S = 0.1
"""Priorities of a shard are sent by themselves where it had no request for so long."""


class PriorityUpdates:
    """Takes priorities from the learner, and has them sent.

    Threads: any may call.
    """

    def __init__(
        self, sampler: Sampler, table: RingTable, requests: Requests, stats: ClientStats
    ) -> None:
        """Send to the shards of a table.

        Args:
            sampler: Whose priorities they are.
            table: The rings that are known.
            requests: To their shards.
            stats: What is met is counted there.
        """
        self._sampler, self._table, self._stats = sampler, table, stats
        self._requests = requests
        # Looked at once: to ask what a sampler is takes as long as to note rows.
        traits = traits_of(sampler)
        whole = traits.window_length
        self._learned = traits.learned or (0, whole or 0)
        first, stop = self._learned
        self._lengths = () if whole is None else (whole, stop - first)

    def update(self, batch: Batch, values: ArrayLike) -> int:
        """Note priorities for the rings of a batch's steps.

        Returns:
            How many were dropped; of other processes' rings that is not known yet, and
            is counted in the stats.

        Raises:
            SchemaError: The sampler has no priorities, the batch is not of a client,
                or values do not fit.
        """
        if not self._table.prioritized:
            raise SchemaError(
                "update_priorities needs a sampler with priorities, got "
                f"{type(self._sampler).__name__}. Create the client with "
                "PrioritizedSampler(...)."
            )
        if not isinstance(batch, Batch) or batch.buffer_ids is None:
            raise SchemaError(
                "update_priorities needs a batch that a ReplayClient returned, got "
                f"{type(batch).__name__} without buffer_ids. Pass it to the buffer "
                "that drew it."
            )
        ids, rings, dropped = as_numpy(batch.buffer_ids), list(self._table.rings), 0
        numbers = self._checked(as_numpy(values), batch, len(ids))
        # Looked at as arrays, of which no tensor was made yet.
        env_ids = as_numpy(batch.drawn("env_ids"))
        positions = as_numpy(batch.drawn("positions"))
        mask = None
        if numbers.ndim == 2 and batch.mask is not None:
            mask = as_numpy(batch.mask)
        counts = np.bincount(ids).tolist() if len(ids) else []
        if len(counts) > len(rings):
            raise SchemaError(
                f"buffer_ids must be in [0, {len(rings)}), got values up to "
                f"{len(counts) - 1}. Pass a batch of this client."
            )
        # Batches are laid out ring by ring; what was made of them may not be.
        in_order = len(ids) in counts or not np.count_nonzero(ids[1:] < ids[:-1])
        stop = 0
        for number, count in enumerate(counts):
            first, stop = stop, stop + count
            if not count:
                continue
            rows: Any = slice(first, stop)
            if not in_order:
                rows = np.flatnonzero(ids == number)
            update: Update = {
                "env_ids": env_ids[rows],
                "positions": positions[rows],
                "values": numbers[rows],
                "mask": None if mask is None else mask[rows],
            }
            ring = rings[number]
            if ring.shard.draws is not None:
                step = self._table.step
                dropped += ring.shard.draws.update(ring.name, [update], step)
            else:
                with self._table.lock:
                    ring.shard.updates.setdefault(ring.name, []).append(update)
        self._stats.dropped += dropped
        return dropped

    def _checked(self, values: NDArray[Any], batch: Batch, count: int) -> Numbers:
        """A copy of priorities, which are refused here where a shard would do so."""
        if values.dtype.kind not in "fiu" and values.size:
            raise SchemaError(f"priorities must be real numbers, got {values.dtype}. Cast them.")
        lengths = self._lengths
        fits = values.ndim == 1 or (values.ndim == 2 and values.shape[1] in lengths)
        if not fits or len(values) != count:
            windows = "".join(f" or [{count}, {n}]" for n in dict.fromkeys(lengths))
            raise SchemaError(
                f"priorities must have shape [{count}]{windows}, got "
                f"{list(values.shape)}. Pass one priority for each step of the batch."
            )
        shape: tuple[int, ...] = values.shape
        if len(shape) == 1:
            return storable(values)
        mask = np.ones(shape, bool)
        if batch.mask is not None:
            mask, width = as_numpy(batch.mask), shape[1]
            if mask.shape[1] != width:
                mask = mask[:, slice(*self._learned)]
        # A copy, as of priorities [B]: they are sent later, and the learner may use its
        # array again.
        numbers = np.zeros(shape, np.float32)
        numbers[mask] = storable(values[mask])
        return numbers

    def send_waiting(self, shard: KnownShard) -> None:
        """Send the priorities of a shard by themselves where it is not asked."""
        self._requests.settle(shard)
        idle_s = time.monotonic() - shard.sent_at
        waits = shard.updates and shard.updating is None and not shard.lost
        if waits and idle_s > IDLE_S:
            self._requests.send(shard, self._table.step, 0, {})

    def send_last(self) -> None:
        """Send all priorities that wait, and wait for the answers.

        Warns:
            LostWarning: Some could not be stored.
        """
        for shard in list(self._table.shards.values()):
            cause = ""
            try:
                if shard.updating is not None:
                    self._requests.draw_no_more(shard.updating)
                    self._requests.answer(shard.updating)
            except Exception as error:
                cause = f": {error}"
            try:
                if shard.updates and not shard.lost:
                    request = self._requests.send(shard, self._table.step, 0, {})
                    self._requests.answer(request)
            except Exception as error:
                cause = f": {error}"
            with self._table.lock:
                left, shard.updates = number_of(shard.updates), {}
            self._stats.dropped += left
            if left or cause:
                warnings.warn(
                    f"run {self._table.run.run!r}: the last priorities of node "
                    f"{shard.remote.key!r} were not stored{cause}",
                    LostWarning,
                    stacklevel=frames_to_caller(),
                )
