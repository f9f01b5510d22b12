"""Reads rows while a writer overwrites the oldest of them.

A full ring loses its oldest rows all the time. What is read of many rows is read of
those that are left: rows that were overwritten during the read are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import StaleError
from mmreplay.page.varying import read_numbers

MAX_TRIES = 8
"""Each leaves twice as many rows out as were overwritten during the one before."""

Ids = NDArray[np.int64]


def read_left(
    buffer: ReplayBuffer, path: str, env_ids: Ids, positions: Ids
) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Read a field of those rows that are in the buffer until they are read.

    Args:
        buffer: Open in any mode.
        path: The field.
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``.

    Returns:
        Which rows were read, bool ``[B]``, and their values ``[N, *shape]``; see
        `read_numbers`.
    """
    margin = np.zeros(buffer.num_envs, np.int64)
    for _ in range(MAX_TRIES):
        span = buffer.span
        left = positions >= (span.first + margin)[env_ids]
        left &= positions < span.stop[env_ids]
        try:
            return left, read_numbers(buffer, path, env_ids[left], positions[left])
        except StaleError:
            margin = 2 * (margin + buffer.span.first - span.first)
    none = np.zeros(0, np.int64)
    return np.zeros(len(positions), bool), read_numbers(buffer, path, none, none)
