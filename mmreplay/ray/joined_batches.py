"""Batches of several rings joined into one, and weighed as if all were one ring's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.ragged import Ragged
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
        each = [rows for number in sorted(by_ring) for rows in by_ring[number]]
        first = each[0]
        probabilities = _joined([rows.probabilities * fractions[rows.number] for rows in each])
        weights = self._weights(planned, fractions, silent).of(probabilities)
        # Of all rings, or of none.
        masks = [rows.mask for rows in each if rows.mask is not None]
        windows = [rows.windows for rows in each if rows.windows is not None]
        return Batch(
            self._fields(each, shared),
            _joined([rows.env_ids for rows in each]),
            _joined([rows.positions for rows in each]),
            probabilities,
            weights,
            _joined(masks) if masks else None,
            first.bfloat16,
            planned.key,
            _joined(windows) if windows else None,
            buffer_ids=_numbers([(rows.number, len(rows)) for rows in each]),
        )

    def join_all(self, call: PlannedCall, rings: Sequence[RingRows], shared: SharedArrays) -> Batch:
        """Join all batches of a call to one, in which they follow each other.

        Args:
            call: The call.
            rings: What each ring gave for all batches, in the order of the rings.
            shared: Into which rings of this node were gathered.
        """
        fractions = call.fractions
        order = batch_by_batch([call.stops[rows.number] for rows in rings])
        as_gathered = [ring for ring, _, _ in order] == [*range(len(rings))]

        def joined(columns: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
            return in_order(columns, order)

        probabilities = _joined(
            joined([[rows.probabilities * fractions[rows.number]] for rows in rings])
        )
        masks = [[rows.mask] for rows in rings if rows.mask is not None]
        windows = [[rows.windows] for rows in rings if rows.windows is not None]
        return Batch(
            self._fields(rings, shared, None if as_gathered else order),
            _joined(joined([[rows.env_ids] for rows in rings])),
            _joined(joined([[rows.positions] for rows in rings])),
            probabilities,
            self._all_weights(call, probabilities),
            _joined(joined(masks)) if masks else None,
            rings[0].bfloat16,
            0,
            _joined(joined(windows)) if windows else None,
            buffer_ids=_numbers(
                [(rings[ring].number, stop - first) for ring, first, stop in order]
            ),
        )

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

    def _fields(
        self,
        rings: Sequence[RingRows],
        shared: SharedArrays,
        order: Sequence[Fragment] | None = None,
    ) -> dict[str, Any]:
        """Join the fields of the rings' rows in memory that is used again.

        What travelled is Ray's memory, read-only and not to be held, so that it is
        copied even where it is one array, or one `Ragged`.

        Args:
            rings: What the rings gave.
            shared: Into which rings of this node were gathered.
            order: The rows of each ring in the order of the batches; None as they are.
        """
        blocks = [block for rows in rings for block in rows.blocks]
        one_each = len(blocks) == len(rings) > 1
        found: dict[str, Any] = {}
        for path, first in blocks[0].items():
            arrays = [block[path] for block in blocks]
            if isinstance(first, Ragged):
                if len(arrays) > 1 or not first.values.flags.writeable:
                    first = Ragged.concatenate(arrays)
                found[path] = first
                continue
            whole = shared.joined(arrays, path, order) if one_each else None
            if whole is None:
                if order is not None:
                    columns = [[block[path] for block in rows.blocks] for rows in rings]
                    arrays = in_order(columns, order)
                whole = arrays[0]
                if len(arrays) > 1 or not whole.flags.writeable:
                    count = sum([len(array) for array in arrays])
                    out = self.pool.empty((count, *first.shape[1:]), first.dtype)
                    whole = np.concatenate(arrays, out=out)
            found[path] = whole
        return found


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


def in_order(
    columns: Sequence[Sequence[NDArray[Any]]], order: Sequence[Fragment]
) -> list[NDArray[Any]]:
    """Arrays of the rings, fragment by fragment.

    Args:
        columns: Of each ring, arrays that follow each other.
        order: The fragments.

    Example:
        >>> from mmreplay.ray.joined_batches import in_order
        >>> rings = [[np.arange(3)], [np.arange(10, 12), np.arange(12, 15)]]
        >>> found = in_order(rings, [(0, 0, 1), (1, 0, 3), (0, 1, 3), (1, 3, 5)])
        >>> np.concatenate(found).tolist()
        [0, 10, 11, 12, 1, 2, 13, 14]
    """
    if all(len(own) == 1 for own in columns):
        return [columns[ring][0][first:stop] for ring, first, stop in order]
    found = []
    for ring, first, stop in order:
        begin = 0
        for array in columns[ring]:
            end = begin + len(array)
            if begin < stop and end > first:
                found.append(array[max(0, first - begin) : stop - begin])
            begin = end
    return found


def _numbers(fragments: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """The number of the ring of each row.

    Args:
        fragments: Of rows that follow each other the number, and how many they are.
    """
    numbers = np.empty(sum([count for _, count in fragments]), np.int64)
    at = 0
    for number, count in fragments:
        numbers[at : at + count] = number
        at += count
    return numbers


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join columns of the draw, which learners seldom look at."""
    if len(columns) == 1 and columns[0].flags.writeable:
        return columns[0]
    return np.concatenate(columns)
