"""The steps of a draw, how far each is folded, and the rows around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mmreplay.transforms.base import BufferRows

Ids = NDArray[np.int64]


class Where:
    """Rows around each step drawn, K of them, described before any step is drawn.

    Row k of a step is at the position ``max(min(position + ahead[k], cap) - back[k],
    first)``, where cap is the last step folded, or with `beyond` the row that holds the
    next observation; see `BaseSteps`. Instances compare by identity: columns
    that were read for one are looked up by it, so keep it and those derived from it.

    Attributes:
        ahead: Steps after the step drawn; at most the steps folded.
        back: Rows before that.
        beyond: Whether the row of the next observation counts.
    """

    __slots__ = ("_made", "ahead", "back", "beyond")

    def __init__(self, ahead: tuple[int, ...], back: tuple[int, ...], beyond: bool) -> None:
        """Describe some rows."""
        self.ahead, self.back, self.beyond = ahead, back, beyond
        self._made: dict[tuple[int, int], Where] = {}

    def __repr__(self) -> str:
        """Say which rows."""
        return f"Where({self.ahead}, {self.back}, {self.beyond})"

    def stacked(self, k: int, behind: int = 0) -> Where:
        """Return the k rows up to each, oldest first.

        Args:
            k: At least 1.
            behind: Rows between the newest of them and the row.
        """
        if k == 1 and not behind:
            return self
        found = self._made.get((k, behind))
        if found is None:
            lags = range(k - 1 + behind, behind - 1, -1)
            found = Where(
                tuple(ahead for ahead in self.ahead for _ in lags),
                tuple(back + lag for back in self.back for lag in lags),
                self.beyond,
            )
            found = self._made.setdefault((k, behind), found)
        return found

    def following(self) -> Where | None:
        """Return the rows after each, where a next observation is known.

        Returns:
            None if `Where` cannot express it, because some rows lie `back`.
        """
        if any(self.back) or self.beyond:
            return None
        found = self._made.get((0, 0))
        if found is None:
            found = Where(tuple(ahead + 1 for ahead in self.ahead), self.back, True)
            found = self._made.setdefault((0, 0), found)
        return found


class BaseSteps:
    """Steps drawn, N of them.

    Attributes:
        rows: The buffer.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.
        first: int64 ``[N]``, the oldest row of the step's episode that may be read
            for it.
        last: int64 ``[N]``, the last step folded into it: the episode's last, or
            the n-th.
        following: int64 ``[N]``, the row that holds the derived next observation; the
            step itself where that is unknown, and the episode did not terminate.
        terminated: bool ``[N]``, the episode terminates at the last step.
        key: All randomness follows from it.
        length: Steps a window, one window after another; None without windows.
        batch_rows: The rows that transforms ask for by name; see `BatchRows`.
    """

    __slots__ = (
        "_bounds",
        "batch_rows",
        "env_ids",
        "key",
        "length",
        "positions",
        "rows",
        "terminated",
    )

    def __init__(
        self,
        rows: BufferRows,
        env_ids: Ids,
        positions: Ids,
        key: int,
        length: int | None,
        batch_rows: BatchRows,
        bounds: Ids,
        terminated: NDArray[np.bool_],
    ) -> None:
        """Hold them.

        Args:
            rows: See `BaseSteps`, as the next five.
            env_ids: See `BaseSteps`.
            positions: See `BaseSteps`.
            key: See `BaseSteps`.
            length: See `BaseSteps`.
            batch_rows: See `BaseSteps`.
            bounds: int64 ``[3, N]`` or longer: first, last and following.
            terminated: See `BaseSteps`.
        """
        self.rows, self.env_ids, self.positions = rows, env_ids, positions
        self.key, self.length, self.batch_rows = key, length, batch_rows
        self._bounds, self.terminated = bounds, terminated

    @property
    def first(self) -> Ids:
        """See `BaseSteps`."""
        first: Ids = self._bounds[0]
        return first

    @property
    def last(self) -> Ids:
        """See `BaseSteps`."""
        last: Ids = self._bounds[1]
        return last

    @property
    def following(self) -> Ids:
        """See `BaseSteps`."""
        following: Ids = self._bounds[2]
        return following

    def at(self, rows: Where | Ids) -> Ids:
        """Positions of rows, int64 ``[N, K]``."""
        if not isinstance(rows, Where):
            return rows
        return np.maximum(self.unclipped(rows), self.first[:, None])

    def unclipped(self, rows: Where) -> Ids:
        """Positions where rows would be, had the episode no beginning."""
        cap = self._bounds[2 if rows.beyond else 1]
        ahead = self.positions[:, None] + np.array(rows.ahead)
        positions: Ids = np.minimum(ahead, cap[:, None]) - np.array(rows.back)
        return positions

    def random(self, stream: int) -> np.random.Generator:
        """Return a generator of this draw alone; each transform has its stream."""
        return np.random.Generator(np.random.Philox(key=self.key + (stream << 64)))


class BatchRows:
    """The rows that batches are made of.

    Attributes:
        here: The step drawn.
        last: The last step folded into it.
        following: The row that holds the next observation, where it is derived.
    """

    def __init__(self, steps: int) -> None:
        """Describe them for at most so many folded steps."""
        self.here = Where((0,), (0,), False)
        self.last = self.here if steps == 1 else Where((steps - 1,), (0,), False)
        self.following = Where((steps,), (0,), True)


def around(base_steps: BaseSteps, begin: Ids, end: Ids, back: int) -> tuple[Ids, Ids]:
    """Rows of the episodes of steps, from so many before one row to another.

    Args:
        base_steps: N steps.
        begin: int64 ``[N]``, not after end.
        end: int64 ``[N]``.
        back: Rows before begin.

    Returns:
        Environments and positions, int64 ``[N * K]`` each, some of them twice.
    """
    count = int((end - begin).max(initial=0)) + 1 + back
    rows = end[:, None] - np.arange(count)
    rows = np.maximum(rows, np.maximum(begin - back, base_steps.first)[:, None])
    return np.repeat(base_steps.env_ids, count), rows.reshape(-1)


def from_chain_ends(joined: NDArray[np.bool_]) -> Iterator[Ids]:
    """Yield the indices of rows in groups, each after the rows that its rows need.

    Args:
        joined: bool ``[N]``: a row needs the next one, as its return needs that of the
            row that follows. Rows that are joined are a chain, which is gone through
            from its end, all chains at the same time.
    """
    rows = np.arange(len(joined))
    ends = np.flatnonzero(~joined)
    left = ends[np.searchsorted(ends, rows)] - rows
    order = np.argsort(left, kind="stable")
    edges = np.flatnonzero(np.diff(left[order])) + 1
    yield from np.split(order, edges)
