"""The steps of a draw that a batch is folded around, and how far each reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import END, FINAL, START, TERMINATED

if TYPE_CHECKING:
    from mmreplay.transforms.base import Rows

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Anchors:
    """Steps drawn, N of them.

    Attributes:
        rows: The buffer.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        first: int64 ``[N]``, the oldest row of the step's episode that may be read
            for it.
        last: int64 ``[N]``, the last step folded into it: the episode's last, or
            the n-th.
        following: int64 ``[N]``, the row that holds the derived next observation.
        terminated: bool ``[N]``, the episode terminates at the last step.
        key: All randomness follows from it.
        length: Steps a window, one window after another; None without windows.
    """

    rows: Rows
    env_ids: Ids
    positions: Ids
    first: Ids
    last: Ids
    following: Ids
    terminated: NDArray[np.bool_]
    key: int
    length: int | None

    def random(self, stream: int) -> np.random.Generator:
        """Return a generator of this draw alone; each transform has its stream."""
        return np.random.Generator(np.random.Philox(key=self.key + (stream << 64)))


def anchor(
    rows: Rows, env_ids: Ids, positions: Ids, key: int, length: int | None,
    *, before: int, steps: int,
) -> Anchors:  # fmt: skip
    """Look at the boundaries around steps.

    Args:
        rows: The buffer.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``, legal starts.
        key: As in `Anchors`.
        length: As in `Anchors`.
        before: Rows before each step that are read.
        steps: Steps folded into one, at least 1.
    """
    at = positions[:, None] + np.arange(-before, steps + 1)
    heads = rows.heads[env_ids][:, None]
    within = np.clip(at, 0, heads - 1)
    flags = rows.flags(np.repeat(env_ids, at.shape[1]), within.reshape(-1))
    flags = np.where(within == at, flags.reshape(at.shape), np.uint8(0))
    # What lies before the newest START may be overwritten already: no matter.
    began = (flags[:, before::-1] & START) != 0
    began[:, -1] = True
    back = began.argmax(1)
    ahead = flags[:, before:]
    ends = ((ahead[:, :-1] & END) != 0) | ((ahead[:, 1:] & (START | FINAL)) != 0)
    ends[:, -1] = True
    count = ends.argmax(1) + 1
    each = np.arange(len(positions))
    terminated = (ahead[each, count - 1] & TERMINATED) != 0
    # A terminated step without a final row has no next observation, and needs none:
    # it is drawn with its own, to be discounted by 0.
    own = terminated & ((ahead[each, count] & FINAL) == 0)
    last = positions + count - 1
    return Anchors(
        rows, env_ids, positions, positions - back, last, last + ~own, terminated,
        key, length,
    )  # fmt: skip


def around(anchors: Anchors, begin: Ids, end: Ids, back: int) -> tuple[Ids, Ids]:
    """Rows of the episodes of steps, from so many before one row to another.

    Args:
        anchors: N steps.
        begin: int64 ``[N]``, not after end.
        end: int64 ``[N]``.
        back: Rows before begin.

    Returns:
        Environments and positions, int64 ``[N * K]`` each, some of them twice.
    """
    count = int((end - begin).max(initial=0)) + 1 + back
    rows = end[:, None] - np.arange(count)
    rows = np.maximum(rows, np.maximum(begin - back, anchors.first)[:, None])
    return np.repeat(anchors.env_ids, count), rows.reshape(-1)
