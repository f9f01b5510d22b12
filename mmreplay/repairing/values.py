"""Values that vary, of a damaged buffer: which of them are whole.

A value is trusted if its reference is legal and its own checksum fits: block sums do
not cover the heap. The new heap begins at 0, and holds the values of the newest rows.
Of a compressed buffer the shards hold the values of their rows, and only the others lie
in the heap; the new shards take them from the new heap, which bounds no row's life.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import CorruptError, FailedError, raise_if_out_of_files
from mmreplay.format.heap import References, aligned, checksums, nbytes_of
from mmreplay.format.metadata import heap_reserve_nbytes
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.verify.values import CHUNK_NBYTES, CHUNK_ROWS, StoredValues

if TYPE_CHECKING:
    from mmreplay.repairing.scan import DamageScan

Array = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Interval = tuple[int, int]


def rows_at_once(store: ZarrStore, nbytes: int) -> int:
    """Rows of a compressed buffer whose longest values take so many bytes, or one.

    At most those of a shard, whose values a heap holds beside those of others.
    """
    return max(1, min(store.sealing.steps, nbytes // store.schema.max_heap_nbytes))


def read_values(
    scan: DamageScan, store: ZarrStore, path: str, env_id: int, positions: Array
) -> tuple[References, Bytes, NDArray[np.bool_]]:
    """Read the values of rows of a damaged compressed buffer, and check each.

    Args:
        scan: Of the buffer.
        store: Its rows.
        path: A field that varies.
        env_id: The environment of the rows.
        positions: int64 ``[N]``.

    Returns:
        `REFERENCE` ``[N]``; uint8, the values one after another; and bool ``[N]``, the
        rows whose value is not whole.

    Raises:
        CorruptError: A file ends before one of them, or its shard is damaged.
        FailedError: The device refuses.
    """
    ids = np.full(len(positions), env_id)
    rows, field = store.ring.rows(ids, positions), store.schema.fields[path]
    references: References = store.stored(rows, [path])[path].copy()  # type: ignore[assignment]  # of a field that varies
    # A value without items is whole whatever became of the bytes of others.
    empty = references["length"] == 0
    bad = empty & ((references["position"] != 0) | (references["crc"] != 0))
    there = np.flatnonzero(~empty)
    if not len(there):
        return references, np.empty(0, np.uint8), bad
    found, data, illegal = store.take_values_of(
        path,
        rows[there],
        scan.heap_tails[ids[there]],
        scan.heap_heads[ids[there]],
        lambda nbytes: np.empty(nbytes, np.uint8),
    )
    nbytes = nbytes_of(found, field)
    sums = checksums(data, np.cumsum(nbytes) - nbytes, nbytes)
    references[there] = found
    bad[there] = illegal | (sums != found["crc"])
    return references, data, bad


class ValueScan:
    """The values of a damaged buffer's rows."""

    def __init__(self, scan: DamageScan) -> None:
        self._scan, self._metadata = scan, scan.metadata
        self._values = StoredValues(scan.opened, scan.metadata)

    def damaged(self, env_id: int, intervals: list[Interval]) -> list[Interval]:
        """Return the rows that have a value which is not whole.

        Args:
            env_id: Their environment.
            intervals: ``(first, stop)`` of the rows to look at, rising.
        """
        found = []
        bounds = int(self._scan.heap_tails[env_id]), int(self._scan.heap_heads[env_id])
        for first, stop in intervals:
            for at in range(first, stop, CHUNK_ROWS):
                records = self._values.records(env_id, at, min(at + CHUNK_ROWS, stop))
                problems = self._values.problems(records, env_id, *bounds)
                bad = (problems != None).any(axis=1)  # noqa: E711  # of each element
                edges = np.flatnonzero(np.diff(bad, prepend=False, append=False)) + at
                found += [(a, b) for a, b in edges.reshape(-1, 2).tolist()]
        return found

    def count_fitting(self, env_id: int, intervals: list[Interval]) -> int:
        """Count the newest rows whose values fit into a new heap, beside its reserve.

        Args:
            env_id: Their environment.
            intervals: ``(first, stop)`` of the rows, rising; their references are
                legal.
        """
        heap_nbytes, schema = self._metadata.heap_nbytes, self._metadata.schema
        # From 0 on, less than a ring: no bytes are skipped at its end.
        left, fitting = heap_nbytes - heap_reserve_nbytes(schema, heap_nbytes), 0
        for first, stop in reversed(intervals):
            for end in range(stop, first, -CHUNK_ROWS):
                begin = max(first, end - CHUNK_ROWS)
                records = self._values.records(env_id, begin, end)
                sizes = [
                    aligned(nbytes_of(records[path], field))
                    for path, field in self._values.fields.items()
                ]
                used = np.cumsum(np.sum(sizes, axis=0)[::-1])
                over = np.flatnonzero(used > left)
                if len(over):
                    return fitting + int(over[0])
                left -= int(used[-1])
                fitting += end - begin
        return fitting


class SealedValueScan:
    """The values of a damaged compressed buffer's rows; see `ValueScan`."""

    def __init__(self, scan: DamageScan, store: ZarrStore) -> None:
        self._scan, self._store = scan, store
        self._size = rows_at_once(store, CHUNK_NBYTES)
        self._values = StoredValues(scan.opened, scan.metadata)

    def damaged(self, env_id: int, intervals: list[Interval]) -> list[Interval]:
        """Return the rows that have a value which is not whole, as `ValueScan` does."""
        found = []
        for first, stop in intervals:
            for at in range(first, stop, self._size):
                found += self._damaged(env_id, at, min(at + self._size, stop))
        return found

    def _damaged(self, env_id: int, first: int, stop: int) -> list[Interval]:
        positions, paths = np.arange(first, stop), self._store.schema.varying
        bad = np.zeros(len(positions), np.bool_)
        rows = self._store.ring.rows(np.full(len(positions), env_id), positions)
        try:
            self._store.prefetch(rows, paths)
            for path in paths:
                references, data, wrong = read_values(
                    self._scan, self._store, path, env_id, positions
                )
                bad |= wrong | self._no_images(path, references, data, ~wrong)
        except (CorruptError, FailedError) as error:
            raise_if_out_of_files(error)
            # Each chunk of a shard is damaged by itself: the rows of others are whole.
            if stop - first == 1:
                return [(first, stop)]
            middle = (first + stop) // 2
            below = self._damaged(env_id, first, middle)
            return below + self._damaged(env_id, middle, stop)
        edges = np.flatnonzero(np.diff(bad, prepend=False, append=False)) + first
        return [(a, b) for a, b in edges.reshape(-1, 2).tolist()]

    def _no_images(
        self, path: str, references: References, data: Bytes, sound: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which values of a field of images are none, of those with their checksum."""
        field, bad = self._store.schema.fields[path], np.zeros(len(references), np.bool_)
        if field.encoding is None:
            return bad
        nbytes = nbytes_of(references, field)
        ends = np.cumsum(nbytes)
        for at in np.flatnonzero(sound & (nbytes > 0)).tolist():
            file = data[ends[at] - nbytes[at] : ends[at]]
            bad[at] = self._values.image_problem(field, file) is not None
        return bad

    def count_fitting(self, env_id: int, intervals: list[Interval]) -> int:
        """All rows: shards take their values from the heap."""
        return sum(stop - first for first, stop in intervals)
