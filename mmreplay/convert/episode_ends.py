"""Flags of rows whose source knows ends only.

Ends of episodes that no role tells, for targets that need them.

Where episodes begin among the rows of a reader, which are looked at twice.

Nothing is kept of an episode, so that memory does not grow with their number.

The number of each row's episode, and of each step in it, to group and sort by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Notes, Reader
from mmreplay.convert.description import Description
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SourceError
from mmreplay.ring import Span
from mmreplay.schema import Schema
from mmreplay.schema.naming import ROLE_NAMES, UNSURE, refuse_nan

Bools = NDArray[np.bool_]


class Marks:
    """Gives rows their flags, environment by environment, oldest first.

    The first row of an environment, and the row after an end or after a final row,
    starts an episode; a final row follows an end and is no step.
    """

    def __init__(self, num_envs: int) -> None:
        # What stands before an environment's first row lets it start an episode.
        self._over = np.ones(num_envs, bool)

    def mark(
        self,
        env_id: int,
        terminated: Bools,
        truncated: Bools,
        final: Bools | None = None,
        breaks: Bools | None = None,
    ) -> NDArray[np.uint8]:
        """Flags of an environment's next rows, uint8 ``[N]``.

        Args:
            env_id: The environment.
            terminated: bool ``[N]``.
            truncated: bool ``[N]``.
            final: bool ``[N]``, rows that hold a final observation only; each follows
                an end.
            breaks: bool ``[N]``, rows that start anew though no end stands before
                them (an episode that was cut off).
        """
        if not len(terminated):
            return np.zeros(0, np.uint8)
        ended = terminated | truncated
        flags = terminated * np.uint8(TERMINATED) + truncated * np.uint8(TRUNCATED)
        if final is not None:
            flags[final] = FINAL
            ended = ended | final
        over = np.concatenate([self._over[env_id : env_id + 1], ended[:-1]])
        starts = over if final is None else over & ~final
        flags[starts] |= START
        if breaks is not None:
            flags[breaks & ~over] |= START | BREAK
        self._over[env_id] = ended[-1]
        found: NDArray[np.uint8] = flags.astype(np.uint8)
        return found


class NamedEnds:
    """Takes terminations from a field named as one where the schema has no role.

    Attributes:
        path: Of that field, or ``""``.
    """

    def __init__(self, description: Description) -> None:
        self.path = _path(description.schema)
        self._truncates = bool(description.schema.role("truncated"))
        self._marks = Marks(description.num_envs)
        self._ended = np.zeros(description.num_envs, bool)
        self._rows = 0

    def tell(self, notes: Notes, *, both: bool) -> None:
        """Say what was taken.

        Args:
            notes: Of the target.
            both: It does not tell terminations from truncations itself.
        """
        if not self.path:
            return
        notes.note(
            f"no role tells terminations: they were taken from field {self.path!r}, "
            "any value but 0 being an end"
        )
        if self.path in UNSURE and not both:
            notes.doubt(
                f"field {self.path!r} may mix time limits with terminations: all were "
                "taken as terminations, but for those that the flags call truncations"
            )

    def marked(self, block: Block) -> Block:
        """A block with the flags that those ends make.

        Raises:
            SourceError: An end is NaN.
        """
        if not self.path:
            return block
        flags = block.flags.copy()
        final, truncated = (flags & FINAL) != 0, (flags & TRUNCATED) != 0
        told = block.columns[self.path].reshape(len(block))
        # Of a final row the other fields mean nothing.
        told = np.where(final, told.dtype.type(0), told)
        refuse_nan(f"field {self.path!r}", told, self._rows)
        self._rows += len(block)
        terminated = told.astype(bool)
        if not self._truncates:
            # A cut says so, by a row behind it that was not chosen; see below.
            flags[terminated] &= ~np.uint8(TRUNCATED)
            truncated &= ~terminated
        elif self.path in UNSURE:
            terminated &= ~truncated
        for env_id in np.unique(block.env_ids).tolist():
            mine = block.env_ids == env_id
            ended = np.concatenate([self._ended[env_id : env_id + 1], terminated[mine]])
            self._ended[env_id] = ended[-1]
            # A cut truncates an episode that runs; this one had ended by itself.
            flags[mine] &= np.where(
                ended[:-1], ~np.uint8(CUT | BREAK), np.uint8(ALL_FLAGS)
            )
            flags[mine] |= self._marks.mark(
                env_id, terminated[mine], truncated[mine], final[mine],
                (flags[mine] & START) != 0,
            )  # fmt: skip
        return replace(block, flags=flags)


def _path(schema: Schema) -> str:
    if schema.role("terminated"):
        return ""
    for name in ROLE_NAMES["terminated"]:
        found = schema.fields.get(name)
        if found and found.shape in ((), (1,)) and found.dtype != "bfloat16":
            return name
    return ""


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


Ints = NDArray[np.int64]
EPISODE, STEP = "episode_index", "step_index"


class Steps:
    """Counts episodes in the order in which they begin, over all environments.

    An episode whose beginning was overwritten counts its steps from the oldest that is
    left. A final row belongs to the episode that it ends, as one step more. One of
    which no step is left has the number -1.
    """

    def __init__(self, num_envs: int) -> None:
        self._episode = np.full(num_envs, -1, np.int64)
        self._next_step = np.zeros(num_envs, np.int64)
        self._beginnings = Beginnings(num_envs)
        self._begun = 0

    def number(self, block: Block) -> tuple[Ints, Ints]:
        """Episode and step of the next rows, int64 ``[N]`` each."""
        env_ids, count = block.env_ids, len(block)
        begins = self._beginnings.look(block)
        numbers = self._begun + np.cumsum(begins) - 1
        self._begun += int(begins.sum())
        # Environment by environment, each row has what the last beginning before it
        # had; what stands before the first is carried over from the last call.
        order = np.argsort(env_ids, kind="stable")
        sorted_ids, sorted_begins = env_ids[order], begins[order]
        place = np.arange(count)
        changes = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
        heads = np.repeat(changes, np.diff(changes, append=count))
        last = np.maximum.accumulate(np.where(sorted_begins, place, -1))
        carried = last < heads
        episode = np.where(
            carried, self._episode[sorted_ids], numbers[order][np.maximum(last, 0)]
        )
        step = np.where(
            carried, self._next_step[sorted_ids] + place - heads, place - last
        )
        if count:
            tails = np.append(changes[1:], count) - 1
            self._episode[sorted_ids[tails]] = episode[tails]
            self._next_step[sorted_ids[tails]] = step[tails] + 1
        found = np.empty((2, count), np.int64)
        found[:, order] = episode, step
        return found[0], found[1]
