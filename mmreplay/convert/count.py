"""Where episodes begin among the rows of a reader, which are looked at twice.

Nothing is kept of an episode, so that memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Reader
from mmreplay.episodes import FINAL, START
from mmreplay.errors import SourceError
from mmreplay.ring import Span

Ids = NDArray[np.int64]


def check_env_ids(env_ids: Ids, num_envs: int) -> None:
    """Refuse rows of environments that the description does not know.

    Raises:
        SourceError: There is one.
    """
    if len(env_ids) and (env_ids.min() < 0 or env_ids.max() >= num_envs):
        raise SourceError(
            f"environment {int(env_ids.max())}: got a row of it, expected "
            f"environments in [0, {num_envs}); the source is damaged"
        )


def firsts(env_ids: Ids) -> tuple[Ids, Ids]:
    """Environments of rows, ascending, each once, and the first row of each."""
    if len(env_ids) and alone(env_ids):
        # Nobody keeps a block: a copy.
        return env_ids[:1].copy(), np.zeros(1, np.int64)
    ids, places = np.unique(env_ids, return_index=True)
    return ids, places


def alone(env_ids: Ids) -> bool:
    """Whether all rows, at least one, are of one environment."""
    # Of several that are mixed, the last row is seldom of the first one's.
    return bool(env_ids[0] == env_ids[-1] and (env_ids == env_ids[0]).all())


def inside(block: Block, span: Span) -> NDArray[np.bool_]:
    """Which rows lie in a span, bool ``[N]``.

    Raises:
        SourceError: One is of an environment that is not there.
    """
    ids, positions = block.env_ids, block.positions
    check_env_ids(ids, len(span.stop))
    found: NDArray[np.bool_] = positions >= span.first[ids]
    return found & (positions < span.stop[ids])


class Beginnings:
    """Tells where episodes begin in blocks that come in order.

    An oldest row that begins none belongs to an episode that lost its beginning, and
    counts as one; unless it is final: then no step of its episode is left.
    """

    def __init__(self, num_envs: int) -> None:
        self._seen = np.zeros(num_envs, bool)
        self.orphans = np.zeros(num_envs, bool)

    def look(self, block: Block) -> NDArray[np.bool_]:
        """Which rows begin an episode, bool ``[N]``."""
        ids, places = firsts(block.env_ids)
        check_env_ids(ids, len(self._seen))
        begins: NDArray[np.bool_] = (block.flags & START) != 0
        fresh = ~self._seen[ids]
        final = (block.flags[places] & FINAL) != 0
        begins[places[fresh & ~final]] = True
        self.orphans[ids[fresh & final]] = True
        self._seen[ids] = True
        return begins


class Begins:
    """The episodes of stretches of a reader's rows, environment by environment.

    Attributes:
        total: How many there are, the running and the headless included.
    """

    def __init__(self, reader: Reader, span: Span) -> None:
        """Count them."""
        self._reader, self._within = reader, span
        self._counts = np.zeros(len(span.stop), np.int64)
        for block, begins in self._look():
            self._counts += np.bincount(
                block.env_ids[begins], minlength=len(self._counts)
            )
        self.total = int(self._counts.sum())

    def _look(self) -> Iterator[tuple[Block, NDArray[np.bool_]]]:
        """Blocks of the stretches, and which of their rows begin an episode."""
        beginnings, span = Beginnings(len(self._counts)), self._within
        for block in self._reader.marks():
            part = block.taken(inside(block, span))
            if len(part):
                yield part, beginnings.look(part)
        self._orphans = beginnings.orphans

    def span(self, first: int, stop: int) -> Span:
        """The stretches that hold the episodes from first up to stop."""
        within, counts = self._within, self._counts
        before = np.cumsum(counts) - counts
        low = np.clip(first - before, 0, counts)
        high = np.clip(stop - before, 0, counts)
        some = low < high
        firsts = within.first + self._orphans
        stops = within.stop.copy()
        for env_id, number, position in self._positions(low, high, some):
            side = firsts if number == low[env_id] else stops
            side[env_id] = position
        return Span(
            np.where(some, firsts, within.stop), np.where(some, stops, within.stop)
        )

    def _positions(
        self, low: Ids, high: Ids, some: NDArray[np.bool_]
    ) -> Iterator[tuple[int, int, int]]:
        """Environment, number and position of the beginnings at which is cut."""
        wanted = {
            (env_id, int(number))
            for env_id in np.flatnonzero(some).tolist()
            for number in (low[env_id], high[env_id])
            if 0 < number < self._counts[env_id]
        }
        if not wanted:
            return
        done = np.zeros(len(self._counts), np.int64)
        for block, begins in self._look():
            for env_id in {env for env, _ in wanted}:
                found = block.positions[begins & (block.env_ids == env_id)]
                for number in (low[env_id], high[env_id]):
                    place = int(number - done[env_id])
                    if (env_id, int(number)) in wanted and 0 <= place < len(found):
                        yield env_id, int(number), int(found[place])
                done[env_id] += len(found)
