"""The number of each row's episode, and of each step in it, to group and sort by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block
from mmreplay.convert.count import Beginnings

Ints = NDArray[np.int64]
EPISODE, STEP = "episode_index", "step_index"


class Steps:
    """Counts episodes in the order in which they begin, over all environments.

    An episode whose beginning was overwritten counts its steps from the oldest that is
    left. A final row belongs to the episode that it ends, as one step more. One of
    which no step is left has the number -1.
    """

    def __init__(self, num_envs: int) -> None:
        self._episode = np.full(num_envs, -1, np.int64)
        self._next_step = np.zeros(num_envs, np.int64)
        self._beginnings = Beginnings(num_envs)
        self._begun = 0

    def number(self, block: Block) -> tuple[Ints, Ints]:
        """Episode and step of the next rows, int64 ``[N]`` each."""
        env_ids, count = block.env_ids, len(block)
        begins = self._beginnings.look(block)
        numbers = self._begun + np.cumsum(begins) - 1
        self._begun += int(begins.sum())
        # Environment by environment, each row has what the last beginning before it
        # had; what stands before the first is carried over from the last call.
        order = np.argsort(env_ids, kind="stable")
        sorted_ids, sorted_begins = env_ids[order], begins[order]
        place = np.arange(count)
        changes = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
        heads = np.repeat(changes, np.diff(changes, append=count))
        last = np.maximum.accumulate(np.where(sorted_begins, place, -1))
        carried = last < heads
        episode = np.where(
            carried, self._episode[sorted_ids], numbers[order][np.maximum(last, 0)]
        )
        step = np.where(
            carried, self._next_step[sorted_ids] + place - heads, place - last
        )
        if count:
            tails = np.append(changes[1:], count) - 1
            self._episode[sorted_ids[tails]] = episode[tails]
            self._next_step[sorted_ids[tails]] = step[tails] + 1
        found = np.empty((2, count), np.int64)
        found[:, order] = episode, step
        return found[0], found[1]
