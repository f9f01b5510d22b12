"""Where the steps of an episode that can be drawn begin and stop.

All but a few of an episode's rows can be drawn: what cannot lies at its ends, and
looking from there finds the edge in as few rows as it is away.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import START
from mmreplay.samplers.base import View

Ids = NDArray[np.int64]

MAX_WIDTH = 64
MAX_RUNS = 1 << 16


def last_legal(view: View, env_ids: Ids, lows: Ids, stops: Ids) -> Ids:
    """Find where the last legal starts of stretches are.

    Args:
        view: Looked at, see `View.starts`.
        env_ids: int64 ``[N]``.
        lows: int64 ``[N]``, first rows of the stretches, within `starts`.
        stops: int64 ``[N]``, one past their last rows, within `starts`.

    Returns:
        int64 ``[N]``, one past the last legal start of each stretch; its low where
        it has none.
    """
    found = lows.copy()
    # In pieces, so that opening a buffer of any size takes little memory.
    for first in range(0, len(lows), MAX_RUNS):
        piece = slice(first, first + MAX_RUNS)
        _from_the_end(view, env_ids[piece], lows[piece], stops[piece], found[piece])
    return found


def _from_the_end(view: View, env_ids: Ids, lows: Ids, stops: Ids, found: Ids) -> None:
    todo = np.flatnonzero(stops > lows)
    tops, width = stops[todo], 1
    while len(todo):
        rows = tops[:, None] - np.arange(1, width + 1)
        inside = rows >= lows[todo, None]
        rows = np.where(inside, rows, lows[todo, None])
        legal = view.legal(np.repeat(env_ids[todo], width), rows.reshape(-1))
        legal = legal.reshape(rows.shape) & inside
        hit = legal.any(1)
        found[todo[hit]] = rows[hit, legal[hit].argmax(1)] + 1
        left = np.flatnonzero(~hit & inside[:, -1])
        todo, tops = todo[left], tops[left] - width
        width = min(MAX_WIDTH, 4 * width)


def first_known(view: View, env_ids: Ids, firsts: Ids, stops: Ids) -> Ids:
    """Find the first rows that begin an episode or are legal starts.

    Args:
        view: Looked at, see `View.starts`.
        env_ids: int64 ``[N]``.
        firsts: int64 ``[N]``, within `starts`.
        stops: int64 ``[N]``, where to stop looking, within `starts`.

    Returns:
        int64 ``[N]``; stops where there is none.
    """
    found = np.maximum(firsts, stops)
    todo, width = np.flatnonzero(stops > firsts), 1
    lows = firsts[todo]
    while len(todo):
        rows = lows[:, None] + np.arange(width)
        inside = rows < stops[todo, None]
        rows = np.where(inside, rows, stops[todo, None] - 1)
        ids, flat = np.repeat(env_ids[todo], width), rows.reshape(-1)
        known = view.legal(ids, flat) | ((view.flags(ids, flat) & START) != 0)
        known = known.reshape(rows.shape)
        hit = known.any(1)
        found[todo[hit]] = rows[hit, known[hit].argmax(1)]
        left = np.flatnonzero(~hit & inside[:, -1])
        todo, lows = todo[left], lows[left] + width
        width = min(MAX_WIDTH, 4 * width)
    return found
