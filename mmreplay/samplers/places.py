"""Positions laid end to end, and what lies in a row of a ring."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmreplay.ring import Ring

CHUNK_ROWS = 1 << 20

Ids = NDArray[np.int64]
Stretches = Iterator[tuple[Ids, Ids]]


def stretches(ring: Ring, first: Ids, stop: Ids) -> Stretches:
    """Lay stretches of positions end to end, at most some million at a time.

    Args:
        ring: For its environments.
        first: int64 ``[E]``.
        stop: int64 ``[E]``; below first there is nothing.

    Yields:
        env_ids and positions, int64 ``[N]`` each, N at least 1.
    """
    if ring.num_envs == 1:
        yield from _pieces(0, int(first[0]), int(stop[0]))
        return
    lengths = np.maximum(stop - first, 0)
    total = int(lengths.sum())
    if total == 0:
        return
    if total <= CHUNK_ROWS:
        some = np.flatnonzero(lengths)
        counts = lengths[some]
        edges = np.cumsum(counts) - counts
        yield (
            np.repeat(some, counts),
            np.arange(total) + np.repeat(first[some] - edges, counts),
        )
        return
    for env_id in np.flatnonzero(lengths).tolist():
        yield from _pieces(env_id, int(first[env_id]), int(stop[env_id]))


def _pieces(env_id: int, first: int, stop: int) -> Stretches:
    for begin in range(first, stop, CHUNK_ROWS):
        positions = np.arange(begin, min(begin + CHUNK_ROWS, stop))
        yield np.full(len(positions), env_id), positions


def places_of(ring: Ring, stop: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Environments and positions of rows that are alive.

    Args:
        ring: Where they lie.
        stop: int64 ``[E]``, the next position to be written.
        rows: int64 ``[B]``.

    Returns:
        int64 ``[B]`` each.
    """
    last = stop - 1
    if ring.num_envs == 1:
        # The newest row's lap, or, above its slot, the lap before.
        newest = int(last[0])
        slot = newest % ring.slots
        positions = rows + (newest - slot)
        positions[rows > slot] -= ring.slots
        return np.zeros(len(rows), np.int64), positions
    if ring.layout == "env_major":
        env_ids = rows // ring.slots
        slots = rows - env_ids * ring.slots
    else:
        slots = rows // ring.num_envs
        env_ids = rows - slots * ring.num_envs
    newest_of = last[env_ids]
    ages: Ids = (newest_of - slots) % ring.slots
    return env_ids, newest_of - ages
