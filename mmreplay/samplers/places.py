"""Positions laid end to end, and what lies in a row of a ring."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.errors import SchemaError, StaleError
from mmreplay.ring import Ring, Span

_steps = kernels.load("steps")

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
    env_ids, positions = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    rows = np.ascontiguousarray(rows)
    _steps.unplace(rows, stop, *ring.shape, env_ids, positions)
    return env_ids, positions


def alive(span: Span, env_ids: Ids, positions: Ids) -> NDArray[np.bool_] | None:
    """Which places are still in a buffer, bool ``[B]``, or None where all are.

    Args:
        span: What is alive.
        env_ids: int64 ``[B]``, B at least 1.
        positions: int64 ``[B]``.

    Raises:
        SchemaError: An environment is unknown.
        StaleError: A position was never written.
    """
    if env_ids.min() < 0 or env_ids.max() >= len(span.stop):
        raise SchemaError(
            f"env_ids: got values in [{env_ids.min()}, {env_ids.max()}], expected "
            f"them in [0, {len(span.stop)}); pass those of the batch"
        )
    strange = (positions >= span.stop[env_ids]) | (positions < 0)
    if strange.any():
        which = int(np.argmax(strange))
        env_id, position = int(env_ids[which]), int(positions[which])
        raise StaleError(
            f"position {position} of environment {env_id}: got a priority for a "
            "row that was never written, expected one below "
            f"{span.stop[env_id]}; pass the positions of the batch"
        )
    found: NDArray[np.bool_] = positions >= span.first[env_ids]
    return None if found.all() else found
