"""Batches of several rings joined into one, and weighed as if all were one ring's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.ray.requests import PlannedBatch, PlannedCall, RingRows
from mmreplay.ray.ring_table import RingTable
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.joint import JointWeights, Mass, Numbers
from mmreplay.storage.gather import BufferPool, Offsets, SharedArrays


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
        self._offsets: Offsets = {}
        self.pool = BufferPool()

    def join(
        self,
        planned: PlannedBatch,
        by_ring: Mapping[int, Sequence[RingRows]],
        fractions: Numbers,
        silent: Collection[int] = (),
        *,
        shared: SharedArrays,
    ) -> Batch:
        """Join what the rings gave to a batch.

        Args:
            planned: The batch.
            by_ring: By number of the ring.
            fractions: float64 ``[R]``, how much of all draws was each ring's.
            silent: Numbers of rings that gave nothing, and do not count.
            shared: Into which rings of this node were gathered.
        """
        rings = [rows for number in sorted(by_ring) for rows in by_ring[number]]
        joined = self._join(rings, fractions, shared)
        joined.key = planned.key
        weights = self._weights(planned, fractions, silent)
        joined.weights = weights.of(joined.probabilities)
        return joined

    def join_all(self, call: PlannedCall, rings: Sequence[RingRows], shared: SharedArrays) -> Batch:
        """Join all batches of a call to one, in which they follow each other.

        Args:
            call: The call.
            rings: What each ring gave for all batches, in the order of the rings.
            shared: Into which rings of this node were gathered.
        """
        order = batch_by_batch([call.stops[rows.number] for rows in rings])
        as_gathered = [ring for ring, _, _ in order] == [*range(len(rings))]
        joined = self._join(rings, call.fractions, shared, None if as_gathered else order)
        joined.weights = self._all_weights(call, joined.probabilities)
        return joined

    def batch_of(self, call: PlannedCall, joined: Batch, number: int) -> Batch:
        """Return one of the batches that `join_all` joined."""
        own = slice(number * call.count, (number + 1) * call.count)
        mask, windows, ids = joined.mask, joined.window_positions, joined.buffer_ids
        assert ids is not None
        return Batch(
            {path: array[own] for path, array in joined.fields.items()},
            joined.env_ids[own],
            joined.positions[own],
            joined.probabilities[own],
            joined.weights[own],
            None if mask is None else mask[own],
            joined.bfloat16,
            call.keys[number],
            None if windows is None else windows[own],
            buffer_ids=ids[own],
        )

    def _all_weights(self, call: PlannedCall, probabilities: Numbers) -> NDArray[np.float32]:
        """Weights of all batches of a call."""
        masses = self._masses(call.fractions)
        by_batch = [self._sampler.joint_weights(step, masses) for step in call.steps]
        numbers = probabilities.reshape(len(by_batch), -1)
        if all(each == by_batch[0] for each in by_batch):
            return by_batch[0].of(numbers).reshape(-1)
        each = zip(by_batch, numbers, strict=True)
        return np.concatenate([weights.of(own) for weights, own in each])

    def _weights(
        self, planned: PlannedBatch, fractions: Numbers, silent: Collection[int]
    ) -> JointWeights:
        """Weights by the newest masses, as if all were one buffer's."""
        return self._sampler.joint_weights(planned.step, self._masses(fractions, silent))

    def _masses(self, fractions: Numbers, silent: Collection[int] = ()) -> list[Mass]:
        """The newest masses, as if all were one buffer's."""
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
        return masses

    def share(self, stops: Sequence[int]) -> SharedArrays:
        """Return memory that rings are gathered into one after another.

        Args:
            stops: Of each ring, where its rows end among those of all.
        """
        # Transforms may return another view of what was gathered each time.
        offsets = None if self._table.transforms else self._offsets
        return SharedArrays(self.pool, stops, offsets)

    def _join(
        self,
        rings: Sequence[RingRows],
        fractions: Numbers,
        shared: SharedArrays,
        order: Sequence[Fragment] | None = None,
    ) -> Batch:
        """Join the rings' rows in memory that is used again, without weights.

        Args:
            rings: What the rings gave.
            fractions: float64 ``[R]``, how much of all draws was each ring's.
            shared: Into which rings of this node were gathered.
            order: The rows of each ring in the order of the batches; None as they are.
        """
        batches = [batch for rows in rings for batch in rows.batches(fractions[rows.number])]
        one_each = len(batches) == len(rings)
        if order is not None and not one_each:
            order = of_blocks(order, [len(rows.blocks) for rows in rings], [*map(len, batches)])
        return Batch.join(
            batches, order, memory=self.pool, shared=shared if one_each and len(rings) > 1 else None
        )


Fragment = tuple[int, int, int]
"""Rows of a ring that are together in a batch: which ring, the first, one past the
last."""


def batch_by_batch(stops: Sequence[Sequence[int]]) -> list[Fragment]:
    """Return the rows of each batch, in the order of the rings.

    Args:
        stops: Of each ring where its rows for each batch end.

    Example:
        >>> from mmreplay.ray.joined_batches import batch_by_batch
        >>> batch_by_batch([[1, 3], [3, 5]])
        [(0, 0, 1), (1, 0, 3), (0, 1, 3), (1, 3, 5)]
    """
    if len(stops) == 1 or len(stops[0]) == 1:
        return [(ring, 0, own[-1]) for ring, own in enumerate(stops) if own[-1]]
    order, before = [], (0,) * len(stops)
    for after in zip(*stops, strict=True):
        for ring, (first, stop) in enumerate(zip(before, after, strict=True)):
            if first < stop:
                order.append((ring, first, stop))
        before = after
    return order


def of_blocks(
    order: Sequence[Fragment], num_blocks: Sequence[int], lengths: Sequence[int]
) -> list[Fragment]:
    """The rows of fragments of rings as fragments of the rings' blocks.

    Args:
        order: Fragments of rings.
        num_blocks: Of each ring, in how many blocks its rows are.
        lengths: Rows of each block, ring by ring.

    Example:
        >>> from mmreplay.ray.joined_batches import of_blocks
        >>> of_blocks([(0, 0, 1), (1, 0, 3), (0, 1, 3), (1, 3, 5)], [1, 2], [3, 2, 3])
        [(0, 0, 1), (1, 0, 2), (2, 0, 1), (0, 1, 3), (2, 1, 3)]
    """
    stops = [*accumulate(num_blocks)]
    found = []
    for ring, first, stop in order:
        begin = 0
        for block in range(stops[ring] - num_blocks[ring], stops[ring]):
            end = begin + lengths[block]
            if begin < stop and end > first:
                found.append((block, max(0, first - begin), min(stop, end) - begin))
            begin = end
    return found
