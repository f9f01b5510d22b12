"""Repair of a compressed buffer: its rows are unpacked, and packed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mmreplay.repairing.evidence import Evidence
from mmreplay.repairing.kept import Flags, Kept
from mmreplay.ring import runs
from mmreplay.storage.zarr import ZarrStore
from mmreplay.verify.sealed import unreadable as torn

Array = NDArray[np.int64]
Progress = Callable[[int, int], None]
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
    mark: Callable[[Flags, Array, dict[int, int]], None],
    progress: Progress | None,
) -> None:
    """Copy the rows that stay to their new positions, and seal them.

    Args:
        evidence: Of the damaged buffer.
        kept: What stays, by environment.
        store: The new buffer's.
        tails: int64 ``[E]``, the oldest position of the new buffer.
        mark: Puts the flags of seams in place.
        progress: Called with (rows written, rows to write).
    """
    ring, paths = store.ring, store.schema.paths
    done, total = 0, int((evidence.heads - tails).sum())
    with opened(evidence) as source:
        for env_id in range(ring.num_envs):
            tail, head = int(tails[env_id]), int(evidence.heads[env_id])
            for first in range(tail, head, CHUNK_ROWS):
                positions = np.arange(first, min(first + CHUNK_ROWS, head))
                sources = kept[env_id].sources(head, positions)
                ids = np.full(len(positions), env_id)
                rows = ring.rows(ids, sources)
                flags = source.flags(rows).copy()
                mark(flags, sources, kept[env_id].marks)
                columns = source.gather(rows, paths)
                store.write(runs(ring.rows(ids, positions)), columns, flags)
                done += len(positions)
                if progress is not None:
                    progress(done, total)
    store.settle(tails, evidence.heads)
