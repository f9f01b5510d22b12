"""Which rows a draw will be read from, so that the disk is asked for them early."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mmreplay.buffer.steps import Ids
from mmreplay.buffer.view import LiveView, Window
from mmreplay.samplers.base import Draw
from mmreplay.schema import Schema
from mmreplay.storage.base import Store

Reach = Mapping[str, tuple[int, ...]]
"""Rows around a step, by the stored field that is read there."""


class ReadAhead:
    """Asks the disk for the rows of draws that are gathered later."""

    def __init__(
        self, store: Store, view: LiveView, reach: Reach, window: Window | None
    ) -> None:
        """Make one.

        Args:
            store: The rows.
            view: The buffer, for what is alive.
            reach: Rows around a step that its batch is read from.
            window: How far around it any field is read, which packed fields are asked
                for: those rows lie in one page or two. None: as far as reach says.
        """
        self._store = store
        self._view = view
        by_offsets: dict[tuple[int, ...], list[str]] = {}
        packed = [path for path in reach if path in store.packed]
        together = {offset for path in packed for offset in reach[path]}
        if window is not None:
            together = set(range(-window.before, window.after + 1))
        for path, offsets in reach.items():
            if path not in store.packed and offsets:
                by_offsets.setdefault(offsets, []).append(path)
        if packed:
            # To read one of them is to read all: one stands for the others.
            by_offsets.setdefault(tuple(sorted(together)), []).append(packed[0])
        self._groups = [
            (np.array(offsets), tuple(paths)) for offsets, paths in by_offsets.items()
        ]
        fields = store.schema.fields
        self._step_nbytes = sum(
            len(offsets) * fields[path].nbytes for path, offsets in reach.items()
        )

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
        env_ids, positions = _steps(draw)
        span = self._view.span
        first = span.first[env_ids][:, None]
        last = np.maximum(first, span.stop[env_ids][:, None] - 1)
        asked = 0
        for offsets, paths in self._groups:
            around = np.clip(positions[:, None] + offsets, first, last)
            every = np.repeat(env_ids, len(offsets))
            rows = self._store.ring.rows(every, around.reshape(-1))
            asked += self._store.prefetch(rows, paths)
        return asked


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
