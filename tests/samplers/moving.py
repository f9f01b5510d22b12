"""A buffer that moves on between draws, as lists, for samplers that remember."""

import numpy as np

from mmreplay.episodes.starts import BufferIdentity, StartView
from mmreplay.ring import Ring, Span


class MovingView(StartView):
    """Rows of several environments, each ``"s"``, a legal start, or ``"x"``, none.

    The newest row is only a legal start when another one follows it. Rows below
    `first` are given up.
    """

    def __init__(self, num_envs, uuid=bytes(16)):
        self.rows = [""] * num_envs
        self.first = [0] * num_envs
        self.home = BufferIdentity(Ring.sized(8, num_envs), None, uuid, 1)
        self._rows_and_first = None

    def add(self, env_id, rows):
        self.rows[env_id] += rows

    def give_up(self, env_id, first):
        self.first[env_id] = min(max(self.first[env_id], first), len(self.rows[env_id]))

    @property
    def span(self):
        stop = [len(rows) for rows in self.rows]
        return Span(np.array(self.first, np.int64), np.array(stop, np.int64))

    @property
    def starts(self):
        # One object a moment, as views promise.
        rows_and_first = (tuple(self.rows), tuple(self.first))
        if rows_and_first != self._rows_and_first:
            span = self.span
            self._rows_and_first = rows_and_first
            self._starts = Span(span.first, np.maximum(span.first, span.stop - 1))
        return self._starts

    @property
    def num_illegal(self):
        return int(self.starts.lengths.sum()) - len(self.legal_starts())

    def legal_starts(self):
        stops = self.starts.stop.tolist()
        return [
            (env_id, position)
            for env_id, rows in enumerate(self.rows)
            for position in range(self.first[env_id], stops[env_id])
            if rows[position] == "s"
        ]

    def legal(self, env_ids, positions):
        places = set(self.legal_starts())
        asked = zip(env_ids.tolist(), positions.tolist(), strict=True)
        return np.array([place in places for place in asked], bool)

    def start_at(self, ranks):
        found = np.array(self.legal_starts(), np.int64).reshape(-1, 2)[ranks]
        return found[:, 0], found[:, 1]
