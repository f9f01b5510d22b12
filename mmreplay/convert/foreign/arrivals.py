"""Rows that hold an observation and what led to it: action or reward, and the end.

A step takes what led to the next row; the last row of an episode is no step, only the
observation that was seen at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

import numpy as np

from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Later, Rows
from mmreplay.convert.foreign.stretches import Stretch

NOTE = (
    "rewards and ends stand with the observation that they led to, and were moved to "
    "the one before it; the last row of an episode is its final observation"
)


def episodes(
    name: str,
    columns: Mapping[str, Rows],
    led: Collection[str],
    terminated: Bools,
    truncated: Bools,
    env_id: int = 0,
    begins: Bools | None = None,
) -> Iterator[Stretch]:
    """The episodes of an environment's rows.

    Args:
        name: What to call them in errors.
        columns: By path, ``N`` rows each, oldest first.
        led: Paths of what led to its row's observation.
        terminated: bool ``[N]``, rows that a terminated step led to.
        truncated: bool ``[N]``, likewise.
        env_id: The environment.
        begins: bool ``[N]``, rows that begin an episode, whether the one before them
            ended or not; those behind an end, if None.
    """
    count = len(terminated)
    over = (terminated | truncated)[:-1]
    if begins is not None:
        over |= begins[1:]
    behind = np.flatnonzero(over) + 1
    for first, stop in pairwise([0, *behind.tolist(), count]):
        steps = stop - first - 1

        def ends(low: int, high: int, by: int = first + 1) -> tuple[Bools, Bools]:
            return terminated[low + by : high + by], truncated[low + by : high + by]

        yield Stretch(
            f"{name}, row {first}",
            steps,
            {
                path: Later(rows, first + (path in led), steps)
                for path, rows in columns.items()
            },
            {
                path: Later(rows, first + 1, steps)
                for path, rows in columns.items()
                if path.split("/")[0] == "observation"
            },
            ends,
            env_id=env_id,
        )
