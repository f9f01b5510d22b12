"""Which rows a draw will be read from, so that the disk is asked for them early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from mmreplay.buffer.drawing import Fold
from mmreplay.buffer.steps import Ids
from mmreplay.buffer.view import LiveView
from mmreplay.samplers.base import Draw
from mmreplay.schema import Schema
from mmreplay.storage.base import Store
from mmreplay.transforms.base import Touched

Reach = Mapping[str, tuple[int, ...]]
"""Rows around a step, by the stored field that is read there."""


class ReadAhead:
    """Asks the disk for the rows of draws that are gathered later."""

    def __init__(
        self,
        store: Store,
        view: LiveView,
        nexts: Mapping[str, str],
        fold: Fold | None,
    ) -> None:
        """Make one.

        Args:
            store: The rows.
            view: The buffer, for what is alive.
            nexts: Paths whose next row is read as well where there is no fold.
            fold: What makes the batches; None gathers steps as they are.
        """
        self._store = store
        self._view = view
        self._fold = fold
        fields = store.schema.fields
        reach = plain_reach(store.schema, nexts) if fold is None else fold.reach
        self._step_nbytes = sum(
            len(offsets) * fields[path].nbytes for path, offsets in reach.items()
        )
        following = tuple(path for path in fields if path in nexts)
        self._plain = ((tuple(fields), 0), (following, 1))

    def nbytes(self, draw: Draw) -> int:
        """Bytes that the draw is read from, rows read twice counted twice."""
        windows = draw.windows
        count = len(draw) if windows is None else windows.positions.size
        return count * self._step_nbytes

    def ask(self, draw: Draw) -> int:
        """Start reading the draw's rows where pages are missing.

        Returns:
            Bytes asked for; 0 where all seem to be in memory.
        """
        span, packed = self._view.span, self._store.packed
        together: dict[str, list[Ids]] = {}
        asked = 0
        for paths, env_ids, positions in self._touched(draw):
            # A writer may have given some up since; others are still to be written.
            last = np.maximum(span.first, span.stop - 1)
            alive = np.clip(positions, span.first[env_ids], last[env_ids])
            rows = self._store.ring.rows(env_ids, alive)
            apart = tuple(path for path in paths if path not in packed)
            if apart:
                asked += self._store.prefetch(rows, apart)
            for path in paths:
                if path in packed:
                    # To read one of them is to read all: one stands for the others.
                    together.setdefault(next(iter(together), path), []).append(rows)
                    break
        for path, every in together.items():
            asked += self._store.prefetch(np.concatenate(every), (path,))
        return asked

    def _touched(self, draw: Draw) -> Iterable[Touched]:
        """Where the draw is read."""
        env_ids, positions = _steps(draw)
        if self._fold is None:
            return [(paths, env_ids, positions + k) for paths, k in self._plain]
        length = None if draw.windows is None else draw.windows.positions.shape[1]
        return self._fold.touched(self._view, env_ids, positions, draw.key, length)


def _steps(draw: Draw) -> tuple[Ids, Ids]:
    """Every step of a draw, those of windows one window after another."""
    if draw.windows is None:
        return draw.env_ids, draw.positions
    places = draw.windows.positions
    return np.repeat(draw.env_ids, places.shape[1]), places.reshape(-1)


def plain_reach(schema: Schema, nexts: Mapping[str, str]) -> Reach:
    """What steps as they are, with derived next observations, are read from.

    Args:
        schema: The fields.
        nexts: Paths whose next row is read as well, by path.
    """
    return {path: (0, 1) if path in nexts else (0,) for path in schema.paths}
