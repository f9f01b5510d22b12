"""The legal starts of one moment, found again when the buffer has moved on.

Steps leave a ring at its old end and come at its new end. So a legal start is named
for good by its environment and by how many follow it, up to the newest one of that
moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FormatError
from mmreplay.samplers.base import State, View
from mmreplay.samplers.ranks import legal_before, num_legal, rank_edges
from mmreplay.samplers.states import integers

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frozen:
    """How many legal starts each environment had, and where the newest one was.

    Attributes:
        buffer: The buffer's uuid, in hexadecimal.
        stops: int64 ``[E]``, one past the newest legal start; 0 where there is none.
        counts: int64 ``[E]``.
    """

    buffer: str
    stops: Ids
    counts: Ids

    @classmethod
    def of(cls, view: View) -> Frozen:
        """Keep what a view has now."""
        edges = rank_edges(view)
        counts, stops = np.diff(edges), np.zeros(len(edges) - 1, np.int64)
        some = np.flatnonzero(counts)
        if len(some):
            # The newest legal start and not the end of the rows: what lies between
            # may become legal, and would move every place that is counted from there.
            stops[some] = view.start_at(edges[some + 1] - 1)[1] + 1
        return cls(view.home.uuid.hex(), stops, counts)

    @property
    def total(self) -> int:
        """Legal starts of that moment."""
        return int(self.counts.sum())

    def check(self, view: View) -> None:
        """Refuse a view of another buffer.

        Raises:
            FormatError: It is of another one, or of an older state of this one.
        """
        uuid = view.home.uuid.hex()
        if uuid != self.buffer or len(self.stops) != len(view.starts.first):
            raise FormatError(
                f"sampler: got buffer {uuid} with {len(view.starts.first)} "
                f"environments in the middle of an epoch over {self.buffer} with "
                f"{len(self.stops)}, expected the same; make a sampler for each "
                "buffer, or call restart()"
            )
        short = np.flatnonzero(view.starts.stop < self.stops)
        if len(short):
            env_id = int(short[0])
            raise FormatError(
                f"sampler: got a buffer whose environment {env_id} ends at "
                f"{view.starts.stop[env_id]} in the middle of an epoch up to "
                f"{self.stops[env_id]}, expected those rows; they were lost, so call "
                "restart() to begin another epoch"
            )

    def places(self, view: View, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by their rank at that moment.

        Args:
            view: The buffer now.
            ranks: int64 ``[B]``, in ``[0, total)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each; position -1 where the step
            was given up since.
        """
        every = np.arange(len(self.counts))
        first = legal_before(view, every, view.starts.first)
        stop = legal_before(view, every, self.stops)
        ends = np.cumsum(self.counts)
        env_ids = np.searchsorted(ends, ranks, side="right")
        now = stop[env_ids] - (ends[env_ids] - ranks)
        alive = now >= first[env_ids]
        positions = np.full(len(ranks), -1)
        if alive.any():
            positions[alive] = view.start_at(now[alive])[1]
        return env_ids, positions

    def alive(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Bool ``[B]``: which of the places found before can be drawn now."""
        alive: NDArray[np.bool_] = positions >= view.starts.first[env_ids]
        if view.num_illegal and alive.any():
            alive[alive] = view.legal(env_ids[alive], positions[alive])
        return alive

    def all_gone(self, view: View) -> bool:
        """Whether nothing of that moment is left."""
        return bool((view.starts.first >= self.stops).all()) or num_legal(view) == 0

    def in_turn(self, indices: Ids) -> Ids:
        """Ranks in time-major order: the oldest of each environment, the second...

        Args:
            indices: int64 ``[B]``, in ``[0, total)``.
        """
        order = np.argsort(self.counts, kind="stable")
        rounds = self.counts[order]
        left = len(order) - np.arange(len(order))
        # Steps before the round in which each environment, shortest first, is through.
        before = np.cumsum(rounds) - rounds + left * rounds
        through = np.searchsorted(before, indices, side="right")
        base = np.append(0, rounds)[through]
        turn, which = np.divmod(indices - np.append(0, before)[through], left[through])
        ranks = base + turn
        edges = np.cumsum(self.counts) - self.counts
        for count in np.unique(through).tolist():
            here = through == count
            ranks[here] += edges[np.sort(order[count:])[which[here]]]
        return ranks

    def state_dict(self) -> State:
        """JSON values; O(environments)."""
        return {
            "buffer": self.buffer,
            "stops": self.stops.tolist(),
            "counts": self.counts.tolist(),
        }

    @classmethod
    def from_state(cls, state: State) -> Frozen:
        """Read a state.

        Raises:
            FormatError: It is none.
        """
        buffer = state.get("buffer") if isinstance(state, Mapping) else None
        if not isinstance(buffer, str):
            raise FormatError(
                f"sampler state: got began {state!r:.60}, expected where an epoch "
                "began; pass what state_dict returned, unchanged"
            )
        stops, counts = integers(state, "stops"), integers(state, "counts")
        if len(stops) != len(counts) or (counts > stops).any() or not counts.any():
            raise FormatError(
                f"sampler state: got stops of {len(stops)} and counts of {len(counts)} "
                "environments, expected a stop and a count of at most that for each; "
                "pass what state_dict returned, unchanged"
            )
        return cls(buffer, stops, counts)
