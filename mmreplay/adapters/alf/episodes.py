"""Episodes of rows, found by step type FIRST, and returns.

With each row the ring stores the first position of its episode, which may be
overwritten by then, and the position of the last row up to it that is FIRST or has a
discount of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.adapters.alf.errors import MissingError, RefusedError
from mmreplay.adapters.alf.nests import Columns, Leaf, LeafValues, is_scalar, path_of, subnest
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.schema import Field

FIRST, MID, LAST = 0, 1, 2
BEGIN, ZERO = "episode/begin", "episode/zero"
RETURN = "discounted_return"

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Names:
    """Paths of the leaves that define episodes; None for a missing leaf."""

    step_type: str | None = None
    discount: str | None = None
    reward: str | None = None

    @classmethod
    def among(cls, fields: Mapping[str, Field], nest: Any) -> Names:
        """Find the leaves of a nest.

        The nest's own attributes and properties decide, as in alf. A nest without them
        is searched for scalars of these names.

        Args:
            fields: Of the leaves, by path.
            nest: `leaf_nest` of the spec.
        """
        found = {}
        for word in ("step_type", "discount", "reward"):
            try:
                part = subnest(nest, word)
            except MissingError:
                found[word] = path_of(fields, word)
                continue
            found[word] = None
            if isinstance(part, Leaf) and is_scalar(fields[part.path]):
                found[word] = part.path
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ReturnRule:
    """Rule for the sum of returns.

    Attributes:
        default: Return of rows whose episode has not ended.
        gamma: Discount per step.
        clip: Bounds of each reward, or None.
    """

    default: float
    gamma: float
    clip: tuple[float, float] | None

    def returns(self, rewards: NDArray[Any], discounts: NDArray[Any]) -> NDArray[np.float32]:
        """Return ``G[t] = discount[t] * (reward[t + 1] + gamma * G[t + 1])``.

        Args:
            rewards: ``[N]``, of the rows after those.
            discounts: ``[N]``, of those rows.

        Returns:
            float32 ``[N]``; what follows the last row is worth nothing.
        """
        if self.clip is not None:
            rewards = np.clip(rewards, *self.clip)
        found, value = np.empty(len(rewards), np.float32), 0.0
        pairs = zip(rewards.tolist(), discounts.tolist(), strict=True)
        for place, (reward, discount) in reversed(list(enumerate(pairs))):
            value = discount * (reward + self.gamma * value)
            found[place] = value
        return found


class Log:
    """Writes and reads the fields that connect rows with their episodes.

    Attributes:
        names: Leaves that tell.
        fields: What is stored beside the nest, by path.
    """

    def __init__(self, names: Names, num_envs: int, keep: bool, rule: ReturnRule | None) -> None:
        """Make the log of an empty ring.

        Args:
            names: Leaves that tell.
            num_envs: Environments.
            keep: Store where episodes begin.
            rule: Store returns.

        Raises:
            RefusedError: A leaf that is needed is not there.
        """
        wanted = (keep, rule is not None, rule is not None)
        leaves = (names.step_type, names.discount, names.reward)
        for name, path, needed in zip(
            ("step_type", "discount", "reward"), leaves, wanted, strict=True
        ):
            if needed and path is None:
                raise RefusedError(
                    f"data_spec has no scalar named {name!r}, which marks episodes. "
                    "Add it, or make the buffer without episodes."
                )
        self.names, self._keep, self._rule = names, keep, rule
        self.fields: dict[str, Field] = {}
        if names.step_type is not None:
            # Ends are flags of a row, and take no room of their own.
            self.fields |= {n: Field((), "bool") for n in ("terminated", "truncated")}
        if keep:
            self.fields[BEGIN] = Field((), "int64")
            if names.discount is not None:
                self.fields[ZERO] = Field((), "int64")
        if rule is not None:
            self.fields[RETURN] = Field((), "float32", mutable=True)
        self._begin = np.zeros(num_envs, np.int64)
        self._zero = np.zeros(num_envs, np.int64)
        # The next row is the first that is known of its environment.
        self._fresh = np.ones(num_envs, bool)
        # The newest row is LAST, or there is none.
        self._over = np.ones(num_envs, bool)
        # The head after the newest row that all this is of.
        self._heads = np.zeros(num_envs, np.int64)
        self._plain = num_envs > 1 and not keep and rule is None
        self._none = np.zeros(num_envs, bool)
        # What the ring published when all this was known last, and rows in the middle
        # of episodes as bytes.
        self._known: Ids | None = None
        self._middle = b""
        self._no_boundary = False

    def forget(self, env_ids: Ids) -> None:
        """Let the next rows begin episodes, whatever their step type."""
        self._no_boundary = False
        self._fresh[env_ids] = self._over[env_ids] = True

    def end_unfinished(
        self, buffer: ReplayBuffer, env_ids: Ids, columns: Mapping[str, NDArray[Any]]
    ) -> None:
        """End episodes whose next row is FIRST without a LAST row before.

        Raises:
            SchemaError: It would refuse the rows; nothing is cut then.
        """
        if self.names.step_type is not None:
            first = columns[self.names.step_type] == FIRST
            torn = env_ids[first & ~self._over[env_ids]]
            if len(torn):
                for path, column in columns.items():
                    field = buffer.schema[path]
                    alone = buffer.num_envs == 1 and column.ndim == len(field.shape)
                    field.convert(column, path, () if alone else (len(env_ids),))
                buffer.end_episodes(torn)

    def break_off(self, buffer: ReplayBuffer) -> None:
        """Turn the newest row of every environment into a LAST row.

        Rows of another run then do not continue its episode.
        """
        if self.names.step_type is not None:
            env_ids = np.flatnonzero(buffer.span.lengths)
            positions = buffer.heads[env_ids] - 1
            buffer.write_field(
                self.names.step_type,
                env_ids,
                positions,
                np.full(len(env_ids), LAST, buffer.schema[self.names.step_type].numpy),
            )
        buffer.end_episodes()
        self.forget(np.arange(len(self._fresh)))
        self._heads = buffer.heads.copy()

    def resume(self, buffer: ReplayBuffer) -> None:
        """Continue after another run, which may have died during an add."""
        self._settle(buffer, np.arange(len(self._fresh)))
        self.break_off(buffer)

    def recover_interrupted(self, buffer: ReplayBuffer, env_ids: Ids, heads: Ids) -> None:
        """Take note of rows that came past this, by an add that was interrupted.

        Args:
            buffer: It has them.
            env_ids: int64 ``[B]``.
            heads: int64 ``[B]``, the next positions of those.
        """
        late = env_ids[heads != self._heads[env_ids]]
        if len(late) == 0:
            return
        held = late[buffer.span.lengths[late] > 0]
        newest = buffer.heads[held] - 1
        self._no_boundary = False
        self._fresh[held] = False
        if self.names.step_type is not None:
            kinds = buffer.get_field(self.names.step_type, held, newest)
            self._over[held] = kinds == LAST
        for path, known in ((BEGIN, self._begin), (ZERO, self._zero)):
            if path in self.fields:
                known[held] = buffer.get_field(path, held, newest)
        self._settle(buffer, held)
        self._heads = self._heads.copy()
        self._heads[late] = buffer.heads[late]

    def plain(self, columns: Mapping[str, object], heads: Ids) -> LeafValues | None:
        """Return a row of every environment with its episode fields, the fast way.

        Args:
            columns: Leaves of the row; the step type must be an array.
            heads: int64 ``[E]``, what the ring published last.

        Returns:
            All columns; None where episodes begin or end, or more columns are needed.
        """
        if not self._plain:
            return None
        if heads is not self._known:
            if (heads != self._heads).any():
                return None
            self._known = heads
        path = self.names.step_type
        if path is None:
            return dict(columns)
        types: NDArray[Any] = columns[path]  # type: ignore[assignment]  # as asked for
        if types.tobytes() != self._middle:
            # The ring looks at the shape later, when these bytes are remembered: those
            # of one MID in int64 are those of MID and FIRST in int32.
            if types.shape != self._none.shape or (types != MID).any():
                return None
            self._middle = types.tobytes()
        return {**columns, "terminated": self._none, "truncated": self._none}

    def mark_added(self, heads: Ids) -> None:
        """Account for the row of `plain` after it was added.

        Args:
            heads: int64 ``[E]``, what the ring published with it; must not be changed.
        """
        if not self._no_boundary:
            self._fresh[:] = self._over[:] = False
            self._no_boundary = True
        self._heads = self._known = heads

    def columns(self, env_ids: Ids, positions: Ids, columns: Mapping[str, NDArray[Any]]) -> Columns:
        """Return the episode fields of rows before they are added; change nothing.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, where they will be.
            columns: Leaves of the rows.
        """
        names = self.names
        if names.step_type is None:
            return {}
        ends = columns[names.step_type] == LAST
        zero = None if names.discount is None else columns[names.discount] == 0
        over = ends if zero is None else ends & zero
        found: Columns = {"terminated": over, "truncated": ends & ~over}
        if self._keep:
            first = (columns[names.step_type] == FIRST) | self._fresh[env_ids]
            found[BEGIN] = np.where(first, positions, self._begin[env_ids])
            if zero is not None:
                found[ZERO] = np.where(first | zero, positions, self._zero[env_ids])
        if self._rule is not None:
            found[RETURN] = np.full(len(env_ids), self._rule.default, np.float32)
        return found

    def added(
        self,
        buffer: ReplayBuffer,
        env_ids: Ids,
        positions: Ids,
        columns: Mapping[str, NDArray[Any]],
    ) -> None:
        """Account for added rows, and store the returns that they complete.

        Args:
            buffer: It has them.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``.
            columns: All that was stored of them.
        """
        self._no_boundary = False
        self._fresh[env_ids] = False
        if self.names.step_type is not None:
            self._over[env_ids] = columns["terminated"] | columns["truncated"]
        for path, known in ((BEGIN, self._begin), (ZERO, self._zero)):
            if path in columns:
                known[env_ids] = columns[path]
        if self._rule is not None and self.names.discount is not None:
            over = columns[self.names.discount] == 0
            if over.any():
                self._settle(buffer, env_ids[over])
        # Last: whatever is interrupted before is caught up with.
        self._heads = self._heads.copy()
        self._heads[env_ids] = positions + 1

    def _settle(self, buffer: ReplayBuffer, env_ids: Ids) -> None:
        """Store the returns that newest rows of discount 0 complete."""
        rule, names = self._rule, self.names
        if rule is None or names.discount is None or names.reward is None:
            return
        env_ids = env_ids[buffer.span.lengths[env_ids] > 1]
        stops = buffer.heads[env_ids] - 1
        over = buffer.get_field(names.discount, env_ids, stops) == 0
        over &= buffer.get_field(BEGIN, env_ids, stops) != stops
        env_ids, stops = env_ids[over], stops[over]
        # All was known up to there.
        since = buffer.get_field(ZERO, env_ids, stops - 1).astype(np.int64)
        firsts = np.maximum(since, buffer.span.first[env_ids])
        for env_id, first, stop in zip(env_ids, firsts, stops, strict=True):
            rows = np.arange(first, stop)
            rewards = buffer.get_field(names.reward, env_id, rows + 1)
            discounts = buffer.get_field(names.discount, env_id, rows)
            buffer.write_field(RETURN, env_id, rows, rule.returns(rewards, discounts))


def last_rows(buffer: ReplayBuffer, env_ids: Ids, positions: Ids) -> Ids:
    """Return the newest row of each row's episode, int64 of the same shape.

    The buffer's index has them where every row after a LAST one is FIRST. Elsewhere
    they are found by bisection: beginnings grow along a ring.
    """
    ids, rows = env_ids.reshape(-1), positions.reshape(-1)
    begins = buffer.get_field(BEGIN, ids, rows)
    heads = buffer.heads[ids]
    low = buffer.episodes.locate(ids, rows)[1] - 1
    low = np.where(buffer.get_field(BEGIN, ids, low) == begins, low, rows)
    after = np.minimum(low + 1, heads - 1)
    goes_on = (low + 1 < heads) & (buffer.get_field(BEGIN, ids, after) == begins)
    # The last row that is known to be of the episode, and the first not to be.
    high = np.where(goes_on, heads, low + 1)
    while (high - low > 1).any():
        middle = (low + high) // 2
        same = buffer.get_field(BEGIN, ids, middle) == begins
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return low.reshape(positions.shape)
