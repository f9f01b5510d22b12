"""Ends and beginnings of episodes among the rows of a reader.

`Marks` makes flags for sources that only know ends. `NamedEnds` finds terminations that
no role names, for targets that need them. `EpisodeStarts` says which rows begin an
episode, and `EpisodeNumbers` numbers episodes and their steps.

No object here stores anything for an episode: memory does not grow with their number.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Notes
from mmreplay.convert.description import Description
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SourceError
from mmreplay.ring import Span, one_env
from mmreplay.schema import Schema
from mmreplay.schema.naming import ROLE_NAMES, UNSURE, refuse_nan

Bools = NDArray[np.bool_]
Ids = NDArray[np.int64]
Ints = NDArray[np.int64]
EPISODE, STEP = "episode_index", "step_index"


class Marks:
    """Makes flags from ends, environment by environment, oldest row first.

    The first row of an environment, and the row after an end or after a final row,
    starts an episode; a final row follows an end and is no step.
    """

    def __init__(self, num_envs: int) -> None:
        # An environment's first row starts an episode, as if an end preceded it.
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
            breaks: bool ``[N]``, rows that start an episode although no end precedes
                them (the episode before was cut off).
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
    """Uses a field with a known name as terminations if the schema has no role.

    Attributes:
        path: Of that field, or ``""``.
    """

    def __init__(self, description: Description) -> None:
        self.path = _path(description.schema)
        self._truncates = bool(description.schema.role("truncated"))
        self._marks = Marks(description.num_envs)
        self._ended = np.zeros(description.num_envs, bool)
        self._rows = 0

    def add_notes(self, notes: Notes, *, both: bool) -> None:
        """Note which field is used.

        Args:
            notes: Of the target.
            both: The target does not distinguish terminations from truncations.
        """
        if not self.path:
            return
        notes.note(
            "the schema has no role for terminations: nonzero values of field "
            f"{self.path!r} were taken as ends"
        )
        if self.path in UNSURE and not both:
            notes.doubt(
                f"field {self.path!r} may mix time limits with terminations: all ends "
                "were taken as terminations, except those that the flags call "
                "truncations"
            )

    def marked(self, block: Block) -> Block:
        """A block with flags that include those ends.

        Raises:
            SourceError: An end is NaN.
        """
        if not self.path:
            return block
        flags = block.flags.copy()
        final, truncated = (flags & FINAL) != 0, (flags & TRUNCATED) != 0
        ends = block.columns[self.path].reshape(len(block))
        # In a final row only the observation is defined.
        ends = np.where(final, ends.dtype.type(0), ends)
        refuse_nan(f"field {self.path!r}", ends, self._rows)
        self._rows += len(block)
        terminated = ends.astype(bool)
        if not self._truncates:
            # TRUNCATED may come from the CUT of a next row that was not selected.
            flags[terminated] &= ~np.uint8(TRUNCATED)
            truncated &= ~terminated
        elif self.path in UNSURE:
            terminated &= ~truncated
        for env_id in np.unique(block.env_ids).tolist():
            mine = block.env_ids == env_id
            ended = np.concatenate([self._ended[env_id : env_id + 1], terminated[mine]])
            self._ended[env_id] = ended[-1]
            # A cut truncates an unfinished episode only; this one had ended.
            flags[mine] &= np.where(ended[:-1], ~np.uint8(CUT | BREAK), np.uint8(ALL_FLAGS))
            flags[mine] |= self._marks.mark(
                env_id, terminated[mine], truncated[mine], final[mine], (flags[mine] & START) != 0
            )
        return replace(block, flags=flags)


def _path(schema: Schema) -> str:
    if schema.role("terminated"):
        return ""
    for name in ROLE_NAMES["terminated"]:
        found = schema.fields.get(name)
        if found and found.shape in ((), (1,)) and found.dtype != "bfloat16":
            return name
    return ""


class EpisodeStarts:
    """Finds the rows that begin an episode, over blocks in order.

    If an environment's oldest row begins no episode, the beginning of its episode was
    overwritten: the row counts as one, unless it is final and no step is left.
    """

    def __init__(self, num_envs: int) -> None:
        self._seen = np.zeros(num_envs, bool)
        self.orphans = np.zeros(num_envs, bool)

    def look(self, block: Block) -> NDArray[np.bool_]:
        """Return which rows begin an episode, bool ``[N]``."""
        ids, places = first_rows(block.env_ids)
        check_env_ids(ids, len(self._seen))
        begins: NDArray[np.bool_] = (block.flags & START) != 0
        fresh = ~self._seen[ids]
        final = (block.flags[places] & FINAL) != 0
        begins[places[fresh & ~final]] = True
        self.orphans[ids[fresh & final]] = True
        self._seen[ids] = True
        return begins


class EpisodeNumbers:
    """Numbers episodes in the order in which they begin, over all environments.

    Steps of an episode whose beginning was overwritten are counted from the oldest one
    left. A final row counts as one more step of its episode; if no step is left of it,
    the episode has the number -1.
    """

    def __init__(self, num_envs: int) -> None:
        self._episode = np.full(num_envs, -1, np.int64)
        self._next_step = np.zeros(num_envs, np.int64)
        self._beginnings = EpisodeStarts(num_envs)
        self._begun = 0

    def number(self, block: Block) -> tuple[Ints, Ints]:
        """Episode and step of the next rows, int64 ``[N]`` each."""
        env_ids, count = block.env_ids, len(block)
        begins = self._beginnings.look(block)
        numbers = self._begun + np.cumsum(begins) - 1
        self._begun += int(begins.sum())
        # Within an environment, each row has the number of the last beginning before
        # it; rows before the first beginning continue the last call's episode.
        order = np.argsort(env_ids, kind="stable")
        sorted_ids, sorted_begins = env_ids[order], begins[order]
        place = np.arange(count)
        changes = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
        heads = np.repeat(changes, np.diff(changes, append=count))
        last = np.maximum.accumulate(np.where(sorted_begins, place, -1))
        carried = last < heads
        episode = np.where(carried, self._episode[sorted_ids], numbers[order][np.maximum(last, 0)])
        step = np.where(carried, self._next_step[sorted_ids] + place - heads, place - last)
        if count:
            tails = np.append(changes[1:], count) - 1
            self._episode[sorted_ids[tails]] = episode[tails]
            self._next_step[sorted_ids[tails]] = step[tails] + 1
        found = np.empty((2, count), np.int64)
        found[:, order] = episode, step
        return found[0], found[1]


def check_env_ids(env_ids: Ids, num_envs: int) -> None:
    """Refuse rows of environments that the description does not have.

    Raises:
        SourceError: There is one.
    """
    if len(env_ids) and (env_ids.min() < 0 or env_ids.max() >= num_envs):
        raise SourceError(
            f"environment {int(env_ids.max())}: environments must be in [0, "
            f"{num_envs}). The source is damaged."
        )


def first_rows(env_ids: Ids) -> tuple[Ids, Ids]:
    """The environments of rows, ascending, each once, and the first row of each."""
    if len(env_ids) and one_env(env_ids):
        # A copy: the block's arrays may change later.
        return env_ids[:1].copy(), np.zeros(1, np.int64)
    ids, places = np.unique(env_ids, return_index=True)
    return ids, places


def inside(block: Block, span: Span) -> NDArray[np.bool_]:
    """Return which rows lie in a span, bool ``[N]``.

    Raises:
        SourceError: One is of an unknown environment.
    """
    ids, positions = block.env_ids, block.positions
    check_env_ids(ids, len(span.stop))
    if len(ids) and one_env(ids):
        ids = ids[:1]
    found: NDArray[np.bool_] = positions >= span.first[ids]
    return found & (positions < span.stop[ids])
