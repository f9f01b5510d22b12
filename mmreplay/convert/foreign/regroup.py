"""Blocks of any size made into blocks of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mmreplay.convert.base import Block


def regroup(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """The same rows in blocks of exactly rows each, but for the last.

    Args:
        blocks: Whose arrays last, unlike a reader's, until the rows are given on.
        rows: At least 1.
    """
    held: list[Block] = []
    count = 0
    for block in blocks:
        first = 0
        while first < len(block):
            stop = min(first + rows - count, len(block))
            held.append(sliced(block, first, stop))
            count += stop - first
            first = stop
            if count == rows:
                yield joined(held)
                held, count = [], 0
    if held:
        yield joined(held)


def quartered(block: Block) -> Iterator[Block]:
    """A block in four, for those who hold what they make of it several times."""
    size = max(1, -(-len(block) // 4))
    for first in range(0, len(block), size):
        yield sliced(block, first, min(first + size, len(block)))


def sliced(block: Block, first: int, stop: int) -> Block:
    """Rows ``[first, stop)`` of a block."""
    if first == 0 and stop == len(block):
        return block
    return Block(
        {path: column[first:stop] for path, column in block.columns.items()},
        block.env_ids[first:stop],
        block.positions[first:stop],
        block.flags[first:stop],
    )


def joined(blocks: list[Block]) -> Block:
    """Blocks of the same columns as one."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        {
            path: np.concatenate([each.columns[path] for each in blocks])
            for path in blocks[0].columns
        },
        np.concatenate([each.env_ids for each in blocks]),
        np.concatenate([each.positions for each in blocks]),
        np.concatenate([each.flags for each in blocks]),
    )
