"""What `write_field` gave the rows of a buffer, and what a crash may leave of it.

Until a commit has returned, a power cut leaves each row any of the values that it had
since the one before; a kill leaves the last one, or one that was being written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mmreplay.buffer.replay_buffer import ReplayBuffer
from tools.torture.rows import MUTABLE, Array, Geometry, content

Row = tuple[int, int]


@dataclass(slots=True)
class Values:
    """Versions of rows' values by (environment, position); 0 is a row's own.

    Attributes:
        durable: What the last commit vouches for.
        since: What was written after that, oldest first.
        under_way: Rows of a call that has not returned.
    """

    durable: dict[Row, int] = field(default_factory=dict)
    since: dict[Row, list[int]] = field(default_factory=dict)
    under_way: set[Row] = field(default_factory=set)

    def begin(self, env_id: int, positions: Array, version: int) -> None:
        """Note a call that is about to be made."""
        for position in positions.tolist():
            self.since.setdefault((env_id, position), []).append(version)
            self.under_way.add((env_id, position))

    def end(self) -> None:
        """Note that it returned."""
        self.under_way.clear()

    def committed(self) -> None:
        """Note that a commit, begun after every call here, returned."""
        for row, versions in self.since.items():
            self.durable[row] = versions[-1]
        self.since.clear()

    def broken(self, buffer: ReplayBuffer, geometry: Geometry, *, killed: bool) -> list[str]:
        """Which rows of a buffer just opened have a value that they may not have."""
        found = self._values_in(buffer, geometry)
        lines = []
        for row, version in found.items():
            allowed = self._allowed(row, killed)
            if version not in allowed:
                lines.append(
                    f"wrong value: version {version} of env {row[0]} position "
                    f"{row[1]}, expected one of {sorted(allowed)}"
                )
        self._take(found, killed)
        return lines[:1]

    def _values_in(self, buffer: ReplayBuffer, geometry: Geometry) -> dict[Row, int]:
        span = buffer.span
        rows = sorted(self.durable.keys() | self.since.keys())
        alive = [
            (env_id, position)
            for env_id, position in rows
            if span.first[env_id] <= position < span.stop[env_id]
        ]
        if not alive:
            return {}
        env_ids, positions = np.array(alive, np.int64).T
        origin = buffer.get_field("origin", env_ids, positions).astype(np.int64)
        own = content(geometry, env_ids, origin[:, 1], origin[:, 2])[MUTABLE]
        versions = buffer.get_field(MUTABLE, env_ids, positions) - own
        return dict(zip(alive, versions.astype(int).tolist(), strict=True))

    def _allowed(self, row: Row, killed: bool) -> set[int]:
        versions = [self.durable.get(row, 0), *self.since.get(row, [])]
        if not killed:
            return set(versions)
        return set(versions[-2:] if row in self.under_way else versions[-1:])

    def _take(self, values: dict[Row, int], killed: bool) -> None:
        """Go on from what is there.

        Rows that were taken out, and not committed since, may be back after a power
        cut; after one, what is gone is gone.
        """
        self.under_way.clear()
        if killed:
            for row in values.keys() & self.since.keys():
                self.since[row].append(values[row])
        else:
            self.durable, self.since = values, {}
