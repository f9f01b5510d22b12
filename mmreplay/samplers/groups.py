"""Whole groups of rows: those that share the value of an integer field.

A group is drawn by one of its legal starts, which a uniform draw finds, so that no list
of groups is kept: groups of one size are as likely as each other, and of groups of any
size each counts by its newest row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.episodes.column_index import ColumnIndex, require_path
from mmreplay.episodes.starts import legal_among, nothing_to_draw, num_legal
from mmreplay.errors import EmptyError, SchemaError, called, refuse_masked, shown
from mmreplay.ragged import Ragged
from mmreplay.samplers import states
from mmreplay.samplers.base import GROUPS, Draw, Sampler, State, View, call_repr
from mmreplay.samplers.random import StepGenerator

REWARD_VARIES = "reward_varies"
MIN_CANDIDATES = 64
"""Legal starts that are looked at together, at least."""

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of some groups, for a filter to look at.

    Attributes:
        values: Integers ``[N]``, what the rows of each group share.
        env_ids: int64 ``[R]``.
        positions: int64 ``[R]``, oldest first within a group.
        offsets: int64 ``[N + 1]``, where the rows of each group begin, and R.
    """

    values: NDArray[Any]
    env_ids: Ids
    positions: Ids
    offsets: Ids
    _view: View

    def __len__(self) -> int:
        """Groups."""
        return len(self.values)

    def read(self, path: str) -> Any:
        """Read a stored field of the rows, ``[R, *shape]``, or `Ragged` if it varies.

        Args:
            path: Of the field.

        Raises:
            SchemaError: There is no such field.
        """
        fields, _ = self._view.read_rows((path,), self.env_ids, self.positions)
        column: Any = fields[path]
        return column if isinstance(column, Ragged) else np.asarray(column)

    def only(self, chosen: Bools) -> GroupRows:
        """Return some of the groups, bool ``[N]``."""
        lengths = np.diff(self.offsets)
        rows = np.repeat(chosen, lengths)
        offsets = np.append(0, np.cumsum(lengths[chosen]))
        return GroupRows(
            self.values[chosen], self.env_ids[rows], self.positions[rows], offsets, self._view
        )


Where = Callable[[GroupRows], Bools]
"""Returns which groups may be drawn, bool ``[N]``."""


class GroupSampler(Sampler):
    """Draws whole groups: all rows alive that share the value of an integer field.

    Such as the answers to one prompt in group-relative policy optimization, or the
    steps of all agents. A batch of N groups holds their steps one group after another,
    oldest first, and `Batch.offsets`, int64 ``[N + 1]``, where each begins; with `rows`
    they are N times as many. No group comes twice in a batch; where there are fewer
    than asked for, all of them come.

    A group is drawn when each of its rows is a legal start. One that lost rows to the
    ring is not complete: with `rows` by its number; without, as far as this process saw
    them, so give `rows` where groups have one size.

    Probabilities are those that one uniform draw of a legal start leads to the group:
    rows over legal starts, and without `rows` one over legal starts. A draw costs
    O(groups * rows * log rows) times legal starts per row of a group that may be
    drawn, and O(legal starts) where few may. `Sampler.draw` and ``buffer.sample`` count
    groups.

    Example:
        >>> schema = mr.Schema(
        ...     {
        ...         "prompt": mr.Field((), "int64"),
        ...         "reward": mr.Field((), "float32", mutable=True),
        ...     }
        ... )
        >>> sampler = mr.GroupSampler("prompt", rows=2, where="reward_varies", seed=0)
        >>> buffer = mr.ReplayBuffer.create(
        ...     None, schema, 9, engine="memory", sampler=sampler
        ... )
        >>> buffer.extend(prompt=[1, 2, 1, 2, 3], reward=[0.0, 1.0, 1.0, 1.0, 0.0])
        >>> batch = buffer.sample(1)
        >>> batch["prompt"].tolist(), batch["reward"].tolist()
        ([1, 1], [0.0, 1.0])
    """

    form = GROUPS
    only_starts = False
    looked_up: str
    _random: StepGenerator

    def __init__(
        self,
        field: str,
        rows: int | None = None,
        where: str | Where | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            field: Path of an integer field of one number, which is not mutable.
            rows: Rows of a complete group; None for any number.
            where: ``"reward_varies"`` for groups whose rewards are not all equal; or a
                callable of `GroupRows` that returns bool ``[N]``. Called again at
                each draw.
            seed: Seed of its own generator; None takes one from the system.

        Raises:
            SchemaError: An argument is not legal.
        """
        require_path(field, "prompt_id")
        if rows is not None:
            way_out = "Leave it out for groups of any size."
            rows = integer("rows", rows, 1, way_out)
        if where is not None and where != REWARD_VARIES and not callable(where):
            raise SchemaError(
                f"where must be {REWARD_VARIES!r} or a callable that selects groups, "
                f"got {shown(where)}. Leave it out for all groups."
            )
        self.looked_up, self._rows, self._where = field, rows, where
        self._random = StepGenerator(seed)
        self._step = 0

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "field": self.looked_up,
            "rows": self._rows,
            "where": self._where,
            "seed": self._random.given_seed,
        }

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw groups, or what there is; see `Sampler.draw`.

        Raises:
            EmptyError: No group is complete and selected by `where`.
            SchemaError: The field is no such field.
        """
        total = num_legal(view)
        if total < 1:
            raise nothing_to_draw(view, batch_size)
        index = view.column_index(self.looked_up)
        rng = self._random.at(self._step)
        seen: set[int] = set()
        chosen: list[GroupRows] = []
        count = looked_at = 0
        while count < batch_size and looked_at < total:
            # To read rows is to look at the writer, too: ranks are those of now.
            total = num_legal(view)
            if total < 1:
                break
            missing = batch_size - count
            size = max(MIN_CANDIDATES, 2 * missing * (self._rows or 2))
            ranks = rng.integers(total, size=size)
            some = self._groups(view, index, ranks, seen, newest=self._rows is None)
            chosen.append(some.only(np.arange(len(some)) < missing))
            count += len(chosen[-1])
            looked_at += size
        if count < batch_size:
            # Few may be drawn, or there are no more: each legal start is looked at.
            total = num_legal(view)
            every = self._groups(view, index, np.arange(total), seen, newest=False)
            order = rng.permutation(len(every))[: batch_size - count]
            chosen.append(_in_order(every, order))
            count += len(chosen[-1])
        if not count:
            what = "group" if self._rows is None else f"group of {self._rows} rows"
            selects = change = ""
            if self._rows is not None:
                change = ", or change rows"
            if self._where is not None:
                selects, change = " that where= selects", ", or change rows or where"
            raise EmptyError(
                f"cannot draw {batch_size} groups: none of the {total} legal starts is "
                f"of a complete {what} of field {self.looked_up!r}{selects}. Add the "
                f"rows that are missing{change}."
            )
        key = self._random.key(self._step)
        self._step += 1
        env_ids = np.concatenate([each.env_ids for each in chosen])
        positions = np.concatenate([each.positions for each in chosen])
        lengths = np.concatenate([np.diff(each.offsets) for each in chosen])
        shares = np.full(len(positions), (self._rows or 1) / total)
        return Draw(
            env_ids,
            positions,
            shares,
            np.ones(len(positions), np.float32),
            key,
            offsets=np.append(0, np.cumsum(lengths)),
        )

    def _groups(
        self, view: View, index: ColumnIndex, ranks: Ids, seen: set[int], newest: bool
    ) -> GroupRows:
        """Return the groups that legal starts lead to, in their order, each once.

        Args:
            view: The buffer now.
            index: Of the field.
            ranks: int64 ``[C]``.
            seen: Values of groups that were decided on; takes those of this call.
            newest: Only a group's newest row leads to it.
        """
        env_ids, positions = view.start_at(ranks)
        fields, whole = view.read_rows((self.looked_up,), env_ids, positions)
        column = np.asarray(fields[self.looked_up])[whole]
        env_ids, positions = env_ids[whole], positions[whole]
        values, firsts, which = np.unique(column, return_index=True, return_inverse=True)
        matches = index.look_up(values)
        lengths = matches.counts
        # Where a row was overwritten since the look, its value may be gone.
        good = lengths > 0
        if newest:
            leading = np.minimum(matches.offsets[:-1], max(0, len(matches.env_ids) - 1))
            leads = np.zeros(len(values), bool)
            if len(matches.env_ids):
                same = matches.env_ids[leading][which] == env_ids
                same &= matches.positions[leading][which] == positions
                leads[which[same]] = True
                # In the order of the rows that lead to them.
                firsts = np.full(len(values), len(which))
                np.minimum.at(firsts, which[same], np.flatnonzero(same))
            good &= leads
        good &= np.array([value not in seen for value in values.tolist()], bool)
        seen.update(values[good].tolist())
        if self._rows is None:
            good &= ~matches.broken
        else:
            good &= lengths == self._rows
        order = np.argsort(firsts[good], kind="stable")
        found = GroupRows(values, matches.env_ids, matches.positions, matches.offsets, view).only(
            good
        )
        # Matches come newest first.
        found = _in_order(found, order, backwards=True)
        legal = legal_among(view, found.env_ids, found.positions)
        if len(found):
            found = found.only(np.logical_and.reduceat(legal, found.offsets[:-1]))
        if self._where is not None and len(found):
            found = found.only(self._selected(view, found))
        return found

    def _selected(self, view: View, groups: GroupRows) -> Bools:
        """Ask the filter, bool ``[N]``."""
        if callable(self._where):
            answer = called("GroupSampler where", self._where, groups)
            refuse_masked(answer, "GroupSampler where")
            answer = np.asarray(answer)
            if answer.shape != (len(groups),) or answer.dtype != np.bool_:
                raise SchemaError(
                    f"where must return bool[{len(groups)}], got {answer.dtype}"
                    f"{list(answer.shape)}. Return True for each group that may be "
                    "drawn."
                )
            return answer
        path = view.role("reward")
        if path is None:
            raise SchemaError(
                f"where={REWARD_VARIES!r} needs a field that plays the role 'reward', "
                "got a schema without one. Name it in roles, or pass a callable."
            )
        rewards = groups.read(path).reshape(len(groups.positions), -1)
        firsts = groups.offsets[:-1]
        most = np.maximum.reduceat(rewards, firsts)
        least = np.minimum.reduceat(rewards, firsts)
        varies: Bools = np.any(most > least, axis=1)
        return varies

    def can_draw(self, view: View, env_ids: Ids, positions: Ids) -> Bools:
        """Which legal starts are of complete groups; see `Sampler.can_draw`."""
        index = view.column_index(self.looked_up)
        ranks = np.arange(num_legal(view))
        groups = self._groups(view, index, ranks, set(), newest=False)
        num_envs = view.home.ring.num_envs
        drawn = groups.positions * num_envs + groups.env_ids
        return np.isin(positions * num_envs + env_ids, drawn)

    def state_dict(self) -> State:
        """Seed and step."""
        return {
            "kind": "GroupSampler",
            "seed": self._random.seed,
            "step": self._step,
            "field": self.looked_up,
            "rows": self._rows,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        states.check_kind(state, "GroupSampler")
        seed = states.stored_integer(state, "seed")
        step = states.stored_integer(state, "step")
        states.same(state, "field", self.looked_up)
        states.same(state, "rows", self._rows)
        self._random, self._step = StepGenerator(seed), step


def _in_order(groups: GroupRows, order: Ids, backwards: bool = False) -> GroupRows:
    """Return some groups in another order, on request with their rows backwards."""
    lengths = np.diff(groups.offsets)[order]
    offsets = np.append(0, np.cumsum(lengths))
    within = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], lengths)
    if backwards:
        rows = np.repeat(groups.offsets[1:][order] - 1, lengths) - within
    else:
        rows = np.repeat(groups.offsets[:-1][order], lengths) + within
    return GroupRows(
        groups.values[order], groups.env_ids[rows], groups.positions[rows], offsets, groups._view
    )
