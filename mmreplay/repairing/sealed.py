"""Repair of a compressed buffer: its rows are unpacked, and packed anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mmreplay.repairing.evidence import Evidence
from mmreplay.repairing.kept import Kept
from mmreplay.repairing.pieces import Progress, pieces
from mmreplay.storage.zarr import ZarrStore
from mmreplay.verify.sealed import unreadable as torn

Array = NDArray[np.int64]
CHUNK_ROWS = 1024


@contextmanager
def opened(evidence: Evidence) -> Iterator[ZarrStore]:
    """The rows of the damaged buffer, through its shards."""
    folder = evidence.path / evidence.metadata.folder
    store = ZarrStore.open(folder, evidence.metadata, writable=False)
    try:
        yield store
    finally:
        store.close()


def unreadable(evidence: Evidence, env_id: int) -> list[tuple[int, int, str]]:
    """Stretches of rows that no checksum covers, and whose shards cannot be read."""
    size = evidence.metadata.ring.block_rows
    first, head = int(evidence.firsts[env_id]), int(evidence.heads[env_id])
    begin = min(max(first, int(evidence.unsummed[env_id])), head)
    end = max(begin, min(int(evidence.summed[env_id]) // size * size, head))
    found = []
    with opened(evidence) as store:
        for low, high in ((first, -(-begin // size) * size), (end, head)):
            for at, stop, _ in torn(store, env_id, low, min(high, head)):
                found.append((at, stop, "missing"))
    return found


def copied(
    evidence: Evidence,
    kept: list[Kept],
    store: ZarrStore,
    tails: Array,
    progress: Progress | None,
) -> None:
    """Copy the rows that stay to their new positions, and seal them.

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
            store.write(piece.to, source.gather(piece.rows, paths), flags)
    store.settle(tails, evidence.heads)
