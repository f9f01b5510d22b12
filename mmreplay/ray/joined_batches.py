"""Batches of several rings joined into one, and weighed as if all were one ring's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.ray.requests import PlannedBatch, RingRows
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
        by_ring: Mapping[int, Sequence[RingRows]],
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
        each = [rows for number in sorted(by_ring) for rows in by_ring[number]]
        first, count = each[0], sum([len(rows) for rows in each])
        probabilities = _joined(
            [rows.probabilities * fractions[rows.number] for rows in each]
        )
        if self._table.prioritized:
            weights = self._weights(planned, fractions, silent).of(probabilities)
        else:
            weights = np.ones(count, np.float32)
        # Of all rings, or of none.
        masks = [rows.mask for rows in each if rows.mask is not None]
        windows = [rows.windows for rows in each if rows.windows is not None]
        return Batch(
            {
                path: self._rows([a for rows in each for a in rows.fields[path]])
                for path in first.fields
            },
            _joined([rows.env_ids for rows in each]),
            _joined([rows.positions for rows in each]),
            probabilities,
            weights,
            _joined(masks) if masks else None,
            first.bfloat16,
            planned.key,
            _joined(windows) if windows else None,
            buffer_ids=_numbers(each, count),
        )

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

    def _rows(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Join rows of a field in memory that is used again.

        What travelled is Ray's memory, read-only and not to be held, so that it is
        copied even where it is one array.
        """
        first = arrays[0]
        if len(arrays) == 1 and first.flags.writeable:
            return first
        count = sum([len(array) for array in arrays])
        out = self.pool.empty((count, *first.shape[1:]), first.dtype)
        return np.concatenate(arrays, out=out)


def _numbers(rings: Sequence[RingRows], count: int) -> NDArray[np.int64]:
    """The number of the ring of each row."""
    numbers, first = np.empty(count, np.int64), 0
    for rows in rings:
        numbers[first : first + len(rows)] = rows.number
        first += len(rows)
    return numbers


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join columns of the draw, which learners seldom look at."""
    if len(columns) == 1 and columns[0].flags.writeable:
        return columns[0]
    return np.concatenate(columns)
