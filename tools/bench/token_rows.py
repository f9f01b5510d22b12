"""Token sequences of 40 to 8,000 items that the benchmarks add and draw.

Their lengths are log-normal, of 660 int32 on average, as prompts with their answers
are. The first item of row n is n, and everything else follows from n modulo the length
of a table, so that any row drawn from any side can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import Field, ReplayBuffer, Schema

Tokens = NDArray[np.int32]

SHORTEST, LONGEST, MEAN = 40, 8000, 660
SPREAD = 0.9
"""Standard deviation of the lengths' logarithm."""
TABLE = 4096
"""Rows after which lengths come again."""

_rng = np.random.default_rng(11)
_drawn = _rng.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, TABLE)
LENGTHS: NDArray[np.int64] = np.clip(_drawn, SHORTEST, LONGEST).astype(np.int64)
_ITEMS = _rng.integers(1 << 31, size=TABLE + LONGEST, dtype=np.int32)


def row(number: int) -> Tokens:
    """One sequence by its number, int32 ``[length]``."""
    begin = number % TABLE
    tokens = _ITEMS[begin : begin + int(LENGTHS[begin])].copy()
    tokens[0] = number
    return tokens


def rows(first: int, count: int) -> list[Tokens]:
    """Consecutive sequences from one number on."""
    return [row(number) for number in range(first, first + count)]


def nbytes(count: int) -> int:
    """Bytes of the items of the first rows."""
    whole, left = divmod(count, TABLE)
    return 4 * int(whole * LENGTHS.sum() + LENGTHS[:left].sum())


def check(drawn: Iterable[Any], side: str) -> None:
    """Refuse rows that are not the rows of their numbers.

    Args:
        drawn: Arrays or tensors, int32 ``[length]`` each.
        side: Who drew them.
    """
    for values in drawn:
        tokens = np.asarray(values)
        if not len(tokens) or not np.array_equal(tokens, row(int(tokens[0]))):
            raise AssertionError(f"{side}: a drawn row is not that of its number")


def make(folder: Path, capacity: int, **options: Any) -> ReplayBuffer:
    """Create a ring for so many of these rows."""
    schema = Schema({"tokens": Field((None,), "int32", max_length=LONGEST)})
    # Values begin at multiples of 8, and a sixteenth of the heap is its reserve.
    heap = (nbytes(capacity) + 8 * capacity) * 17 // 16
    heap = max(-(-heap // 4096) * 4096, 4 * 4 * LONGEST // 4096 * 4096 + 4096)
    return ReplayBuffer.create(folder, schema, capacity, heap_bytes=heap, **options)
