"""Repair of a compressed buffer: its rows are unpacked, and packed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mmreplay.repairing.evidence import Evidence
from mmreplay.repairing.kept import Kept
from mmreplay.repairing.lenient import ShortStore, open_store
from mmreplay.repairing.pieces import Progress, pieces
from mmreplay.ring import Ring
from mmreplay.storage.zarr import ZarrStore
from mmreplay.verify.sealed import unreadable as torn

Array = NDArray[np.int64]
Stretch = tuple[int, int]
CHUNK_ROWS = 1024
LOOK_ROWS = 1 << 16


@contextmanager
def opened(evidence: Evidence) -> Iterator[ShortStore]:
    """The rows of the damaged buffer, through its shards."""
    folder = evidence.path / evidence.metadata.folder
    store = open_store(folder, evidence.metadata)
    try:
        yield store
    finally:
        store.close()


def unreadable(evidence: Evidence, store: ShortStore, env_id: int) -> list[Stretch]:
    """Stretches in reach that are not there, or unreadable and without a checksum."""
    size = evidence.metadata.ring.block_rows
    first, head = int(evidence.firsts[env_id]), int(evidence.heads[env_id])
    begin = min(max(first, int(evidence.unsummed[env_id])), head)
    end = max(begin, min(int(evidence.summed[env_id]) // size * size, head))
    found: list[Stretch] = []
    for inside in evidence.alive(env_id)[0]:
        if store.held < store.ring.num_rows:
            found += _stretches(store.ring, env_id, inside, store.absent)
        for low, high in ((first, -(-begin // size) * size), (end, head)):
            span = range(max(low, inside.start), min(high, inside.stop))
            found += _unplaced(evidence, env_id, span)
            for at, stop, _ in torn(store, env_id, span.start, span.stop):
                found.append((at, stop))
    return found


def _unplaced(evidence: Evidence, env_id: int, span: range) -> Iterator[Stretch]:
    """Stretches of rows that may be elsewhere, where no checksum would tell."""
    ring, placed = evidence.metadata.ring, evidence.placed()
    if placed < ring.num_rows:
        yield from _stretches(ring, env_id, span, lambda rows: rows >= placed)


def _stretches(
    ring: Ring, env_id: int, span: range, gone: Callable[[Array], NDArray[np.bool_]]
) -> Iterator[Stretch]:
    """Stretches of those positions of a span whose rows are gone."""
    for low in range(span.start, span.stop, LOOK_ROWS):
        positions = np.arange(low, min(low + LOOK_ROWS, span.stop))
        lost = gone(ring.rows(np.full(len(positions), env_id), positions))
        edges = np.flatnonzero(np.diff(lost, prepend=False, append=False)) + low
        yield from map(tuple, edges.reshape(-1, 2).tolist())


def copied(
    evidence: Evidence,
    kept: list[Kept],
    store: ZarrStore,
    tails: Array,
    progress: Progress | None,
) -> None:
    """Copy the rows that stay to their new positions; places that are full are sealed.

    Args:
        evidence: Of the damaged buffer.
        kept: What stays, by environment.
        store: The new buffer's.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        progress: Called with (rows written, rows to write).
    """
    paths = store.schema.paths
    with opened(evidence) as source:
        for piece in pieces(evidence, kept, tails, CHUNK_ROWS, progress):
            flags = source.flags(piece.rows).copy()
            piece.mark(flags)
            source.prefetch(piece.rows, paths)
            store.write(piece.to, source.gather(piece.rows, paths), flags)
