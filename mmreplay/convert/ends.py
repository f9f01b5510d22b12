"""Flags of rows whose source knows ends only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import BREAK, FINAL, START, TERMINATED, TRUNCATED

Bools = NDArray[np.bool_]


class Marks:
    """Gives rows their flags, environment by environment, oldest first.

    The first row of an environment, and the row after an end or after a final row,
    starts an episode; a final row follows an end and is no step.
    """

    def __init__(self, num_envs: int) -> None:
        # What stands before an environment's first row lets it start an episode.
        self._over = np.ones(num_envs, bool)

    def mark(
        self,
        env_id: int,
        terminated: Bools,
        truncated: Bools,
        final: Bools | None = None,
        breaks: Bools | None = None,
    ) -> NDArray[np.uint8]:
        """Flags of an environment's next rows, uint8 ``[N]``.

        Args:
            env_id: The environment.
            terminated: bool ``[N]``.
            truncated: bool ``[N]``.
            final: bool ``[N]``, rows that hold a final observation only; each follows
                an end.
            breaks: bool ``[N]``, rows that start anew though no end stands before
                them (an episode that was cut off).
        """
        if not len(terminated):
            return np.zeros(0, np.uint8)
        ended = terminated | truncated
        flags = terminated * np.uint8(TERMINATED) + truncated * np.uint8(TRUNCATED)
        if final is not None:
            flags[final] = FINAL
            ended = ended | final
        over = np.concatenate([self._over[env_id : env_id + 1], ended[:-1]])
        starts = over if final is None else over & ~final
        flags[starts] |= START
        if breaks is not None:
            flags[breaks & ~over] |= START | BREAK
        self._over[env_id] = ended[-1]
        found: NDArray[np.uint8] = flags.astype(np.uint8)
        return found
