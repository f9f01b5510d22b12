"""Batches of several rings joined into one, and weighed as if all were one ring's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.concatenation import join_batches
from mmreplay.ragged import Ragged
from mmreplay.ray.requests import PlannedBatch
from mmreplay.ray.ring_table import RingTable
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.joint import JointSampler, JointWeights, Mass, Numbers
from mmreplay.storage.gather import BufferPool


class BatchJoiner:
    """Joins the batches of rings, in the order of the rings.

    Threads: any may call.

    Attributes:
        pool: Memory of the batches.
    """

    def __init__(self, sampler: Sampler, table: RingTable) -> None:
        """Weigh by a sampler and the masses of a table.

        Args:
            sampler: That the rings are drawn by.
            table: The rings that are known.
        """
        self._sampler, self._table = sampler, table
        self.pool = BufferPool()

    def join(
        self,
        planned: PlannedBatch,
        by_ring: Mapping[int, Sequence[Batch]],
        fractions: Numbers,
        silent: Collection[int] = (),
    ) -> Batch:
        """Join what the rings gave to a batch.

        Args:
            planned: The batch.
            by_ring: By number of the ring.
            fractions: float64 ``[R]``, how much of all draws was each ring's.
            silent: Numbers of rings that gave nothing, and do not count.
        """
        batches = []
        for number in sorted(by_ring):
            for batch in by_ring[number]:
                batch.buffer_ids = np.full(len(batch), number)
                batch.probabilities = batch.probabilities * fractions[number]
                batches.append(batch)
        joined = batches[0]
        if len(batches) > 1 or not _is_writeable(joined):
            joined = join_batches(batches, self._concatenate)
        joined.key, joined.buffer = planned.key, b""
        if self._table.prioritized:
            weights = self._weights(planned, fractions, silent)
            joined.weights = weights.of(joined.probabilities)
        return joined

    def _weights(
        self, planned: PlannedBatch, fractions: Numbers, silent: Collection[int]
    ) -> JointWeights:
        """Weights by the newest masses, as if all were one buffer's."""
        masses = []
        with self._table.lock:
            known = [(r.number, r.mass, r.shard.lost) for r in self._table.rings]
        for number, mass, lost in known:
            if lost or number in silent:
                continue
            # A ring's total is its share in the plan, and masses are in proportion.
            share = fractions[number] if number < len(fractions) else 0.0
            lowest = np.inf
            if share > 0 and mass.total > 0:
                lowest = share * mass.lowest / mass.total
            masses.append(Mass(float(share), mass.num_legal, lowest, mass.highest))
        sampler = cast(JointSampler, self._sampler)
        return sampler.joint_weights(planned.step, masses)

    def _concatenate(
        self, arrays: Sequence[NDArray[Any]], axis: int = 0
    ) -> NDArray[Any]:
        """Concatenate arrays in memory that is used again."""
        first = arrays[0]
        if len(arrays) == 1 and first.flags.writeable:
            return first
        shape = list(first.shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        out = self.pool.empty(tuple(shape), np.result_type(*arrays))
        return np.concatenate(arrays, axis, out=out)


def _is_writeable(batch: Batch) -> bool:
    """Whether no array is of Ray's memory, which is read-only and has to be left."""
    arrays = [batch.env_ids, batch.positions, *batch.fields.values()]
    return all(
        array.values.flags.writeable and array.offsets.flags.writeable
        if isinstance(array, Ragged)
        else array.flags.writeable
        for array in arrays
    )
