"""One episode: where it begins and ends, its neighbours, and its rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import FINAL
from mmreplay.page.episodes import KINDS, end_kinds
from mmreplay.page.requests import NOT_IN_RING, Refusal
from mmreplay.stats import reward_field, widen

LISTED_REWARDS = 2000
"""Steps with a reward other than 0 that are listed."""
BLOCK_ROWS = 1 << 20
MAX_ROWS = 1 << 24
"""Of a longer episode no return is computed, and later rewards are not listed."""


def read_episode(buffer: ReplayBuffer, env_id: int, position: int) -> dict[str, Any]:
    """Return the episode that holds a position, as JSON values.

    Args:
        buffer: Open in any mode.
        env_id: The environment.
        position: Of any of its steps, or of its final row.

    Returns:
        ``begin`` and ``end`` (one past the last step), ``kind``, ``missing_start``,
        ``previous`` and ``next`` (where the neighbours begin; None where there is
        none), ``number`` and ``count`` within the environment, ``return``,
        ``nonfinite`` and ``rewards``: ``count``, ``at`` and ``values`` of those that
        are not 0, ``at`` as steps within the episode.

    Raises:
        Refusal: The position is not in the buffer.
    """
    view = buffer.view
    with view.lock:
        index, span = view.index, view.span
        first, stop = int(span.first[env_id]), int(span.stop[env_id])
        if not first <= position < stop:
            raise Refusal(NOT_IN_RING, _why_not_there(env_id, position, first))
        episodes = index.episodes(env_id)
    if not len(episodes.begin):
        raise Refusal(NOT_IN_RING, f"No step of environment {env_id} is left.")
    number = max(0, int(np.searchsorted(episodes.begin, position, "right")) - 1)
    begin, end = int(episodes.begin[number]), int(episodes.end[number])
    count = len(episodes.begin)
    kinds = end_kinds(
        view, np.array([env_id]), np.array([end - 1]), episodes.running[[number]]
    )
    final = end < stop and bool(
        view.flags(np.array([env_id]), np.array([end]))[0] & FINAL
    )
    return {
        "env": env_id,
        "begin": begin,
        "end": end,
        "kind": KINDS[kinds[0]],
        "missing_start": bool(episodes.headless[number]),
        "final_row": final,
        "previous": int(episodes.begin[number - 1]) if number else None,
        "next": int(episodes.begin[number + 1]) if number + 1 < count else None,
        "number": number,
        "count": count,
        "age": stop - end,
        **_rewards(buffer, env_id, begin, end),
    }


def _why_not_there(env_id: int, position: int, first: int) -> str:
    if position < first:
        return f"Position {position:,} of environment {env_id} was overwritten."
    return f"Position {position:,} of environment {env_id} is not written yet."


def _rewards(buffer: ReplayBuffer, env_id: int, begin: int, end: int) -> dict[str, Any]:
    """Return of an episode, and its rewards other than 0."""
    path = reward_field(buffer)
    if path is None:
        return {"return": None, "nonfinite": 0, "rewards": None}
    field = buffer.schema[path]
    total, num_nonfinite, num_nonzero = 0.0, 0, 0
    steps: list[int] = []
    values: list[float] = []
    stop = min(end, begin + MAX_ROWS)
    for first in range(begin, stop, BLOCK_ROWS):
        positions = np.arange(first, min(first + BLOCK_ROWS, stop))
        rewards = widen(buffer.get_field(path, env_id, positions), field)
        numbers = rewards.reshape(-1).astype(np.float64)
        finite = np.isfinite(numbers)
        num_nonfinite += int(len(numbers) - finite.sum())
        total += float(numbers.sum())
        nonzero = np.flatnonzero(finite & (numbers != 0))
        num_nonzero += len(nonzero)
        some = nonzero[: LISTED_REWARDS - len(steps)]
        steps += (some + first - begin).tolist()
        values += numbers[some].tolist()
    return {
        "return": total if stop == end else None,
        "nonfinite": num_nonfinite,
        "rewards": {"count": num_nonzero, "at": steps, "values": values},
    }
