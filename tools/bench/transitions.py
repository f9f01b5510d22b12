"""The vector transitions that the benchmarks add and draw, known by their number.

Row n has the reward n, and everything else follows from n, so that any row drawn
from any side can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import Field, ReplayBuffer, Schema

Columns = dict[str, NDArray[Any]]

TABLE = 4096
EPISODE = 100
BLOCK = 1024
ROW_NBYTES = 168
"""Of a stored row with its next observation, as the record file aligns it."""
FILL_BLOCKS = 8
CAPACITY = 977 * BLOCK
"""A million rows, in whole blocks: the rings of some peers are of environments."""

_rng = np.random.default_rng(7)
_OBSERVATIONS = _rng.standard_normal((TABLE, 17)).astype(np.float32)
_ACTIONS = _rng.standard_normal((TABLE, 6)).astype(np.float32)


def columns(numbers: NDArray[np.int64]) -> Columns:
    """Fields of rows by their numbers, ``[B, *shape]``."""
    last = numbers % EPISODE == EPISODE - 1
    odd = numbers // EPISODE % 2 == 1
    return {
        "observation": _OBSERVATIONS[numbers % TABLE],
        "action": _ACTIONS[numbers % TABLE],
        "reward": numbers.astype(np.float32),
        "next_observation": _OBSERVATIONS[(numbers + 1) % TABLE],
        "terminated": last & ~odd,
        "truncated": last & odd,
    }


def block(first: int, count: int = BLOCK) -> Columns:
    """Consecutive rows from one number on."""
    return columns(np.arange(first, first + count))


def check(drawn: Mapping[str, Any], side: str) -> None:
    """Refuse a batch whose rows are not the rows of their numbers.

    Args:
        drawn: Arrays or tensors ``[B, *shape]`` or ``[B, 1]``, with the reward.
        side: Who drew it.
    """
    numbers = np.asarray(drawn["reward"]).reshape(-1).astype(np.int64)
    expected = columns(numbers)
    for path, values in drawn.items():
        want = expected[path]
        got = np.asarray(values).reshape(want.shape)
        if not np.array_equal(got, want):
            raise AssertionError(f"{side}: {path} of the drawn rows is not their own")


def schema(*, derived: bool = False) -> Schema:
    """The fields; without the next observation where it is to be derived."""
    fields = {
        "observation": Field((17,), "float32"),
        "action": Field((6,), "float32"),
        "reward": Field((), "float32"),
        "next_observation": Field((17,), "float32"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }
    if derived:
        del fields["next_observation"]
    return Schema(fields)


def fill(buffer: ReplayBuffer, rows: int) -> None:
    """Add rows 0 to rows, in blocks; with final observations where derived."""
    derived = "next_observation" not in buffer.schema.paths
    for first in range(0, rows, BLOCK * FILL_BLOCKS):
        data = block(first, min(BLOCK * FILL_BLOCKS, rows - first))
        final = data.pop("next_observation") if derived else None
        buffer.extend(data, final_observation=final)


def make(folder: Path, capacity: int, *, derived: bool = False) -> ReplayBuffer:
    """Create a ring for these rows; final rows take slots of their own."""
    if derived:
        capacity += capacity // EPISODE
    return ReplayBuffer.create(folder, schema(derived=derived), capacity)
