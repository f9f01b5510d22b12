"""Rows of one stream that several environments took in turns, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Marks
from mmreplay.episodes import TERMINATED, TRUNCATED

Ids = NDArray[np.int64]


def dealt(rows: int, num_envs: int) -> Ids:
    """Steps that each environment has of so many rows, int64 ``[E]``."""
    return (rows + num_envs - 1 - np.arange(num_envs)) // num_envs


class InterleavedReader(Reader):
    """Deals the rows of a reader of one environment out to several; see `Reader`.

    Ends are those that the reader tells; what begins after them is found anew.
    """

    def __init__(self, reader: Reader, stop: Ids, start: int = 0) -> None:
        """Wrap a reader, which is closed with this one.

        Args:
            reader: Of one environment, ``rows`` step by step.
            stop: int64 ``[E]``, steps of each environment; later ones are left out.
            start: The oldest step, of a ring that is full.
        """
        self.report = reader.report
        self._reader = reader
        self._start, self._stop = start, stop
        described = reader.describe()
        self._length = -(-described.rows // len(stop))
        self._description = replace(
            described, first=np.zeros_like(stop), stop=stop,
            capacity=max(1, self._length),
        )  # fmt: skip

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        marks = Marks(len(self._stop))
        # From the oldest step on, and then those before it.
        yield from self._pass(marks, rows_per_block, self._start, self._length)
        if self._start:
            yield from self._pass(marks, rows_per_block, 0, self._start)

    def _pass(
        self, marks: Marks, rows: int | None, first: int, stop: int
    ) -> Iterator[Block]:
        for block in self._reader.blocks(rows):
            steps, env_ids = np.divmod(block.positions, len(self._stop))
            kept = (steps >= first) & (steps < stop) & (steps < self._stop[env_ids])
            if kept.any():
                part, ids = block.taken(kept), env_ids[kept]
                positions = (steps[kept] - self._start) % self._length
                yield Block(part.columns, ids, positions, _flags(part, ids, marks))

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


def _flags(block: Block, env_ids: Ids, marks: Marks) -> NDArray[np.uint8]:
    terminated = (block.flags & TERMINATED) != 0
    truncated = (block.flags & TRUNCATED) != 0
    flags = np.zeros(len(block), np.uint8)
    for env_id in np.unique(env_ids).tolist():
        rows = env_ids == env_id
        flags[rows] = marks.mark(env_id, terminated[rows], truncated[rows])
    return flags
