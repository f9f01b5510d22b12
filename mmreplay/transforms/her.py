"""Hindsight: steps relabelled with a goal that their episode did reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.arguments import number, one_of
from mmreplay.errors import SchemaError, called, refuse_masked, shown
from mmreplay.nesting import meant
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over, RowReads
from mmreplay.transforms.base_steps import BaseSteps, Where, around
from mmreplay.transforms.outline import Outline

_kernel = kernels.load("steps")

BOOL, INT64 = np.dtype(np.bool_), np.dtype(np.int64)
"""Given as what they are, they need not be looked up."""
STRATEGIES = ("future", "final", "episode")

RewardFunction = Callable[
    [NDArray[np.generic], NDArray[np.generic], Mapping[str, NDArray[np.generic]]], Any
]
"""(achieved ``[M, *goal]``, desired ``[M, *goal]``, info) to rewards ``[M]``."""


@dataclass(frozen=True, slots=True)
class HER:
    """Hindsight experience replay (Andrychowicz et al. 2017).

    A share of the steps drawn gets another desired goal, in the observation and in the
    next one, and the reward that `reward_fn` gives for it. The goal is what the step's
    own episode achieved after one of its steps:

    - ``"future"``: after the step drawn or a later one, each as likely;
    - ``"final"``: after the last one that is known;
    - ``"episode"``: after any one that is alive.

    An `NStep` after it sums n rewards recomputed for the goal of the step drawn. The
    steps of a window that are of one episode get one goal; its future begins with the
    last of them. ``terminated`` and ``truncated`` stay as the environment gave them.

    What was achieved after a step is in its next observation. Where that is not known
    (an end without a final observation, the newest step), the step's reward cannot be
    recomputed: a transition that holds it keeps its goal, and it gives no goal.

    Costs one row of goals a step drawn, two of goals a reward, one call of `reward_fn`
    a batch, and a look-up in the episode index.

    Attributes:
        strategy: One of ``"future"``, ``"final"``, ``"episode"``.
        ratio: Chance that a step, or window, is relabelled; k goals to each real one
            in the paper are ``k / (k + 1)``.
        reward_fn: As Gymnasium-Robotics' ``compute_reward``, over arrays: achieved and
            desired goals ``[M, *goal]`` and info to ``[M]``. Must be picklable for
            worker processes.
        achieved: Leaf of the observation; by default its ``achieved_goal``.
        desired: Field of the goal; by default the observation's ``desired_goal``.
        info: Fields whose values ``[M, *shape]`` at the rewarded steps `reward_fn` gets
            by path.

    Example:
        >>> box = mr.Field((2,), "float32")
        >>> schema = mr.Schema(
        ...     {
        ...         "observation": {"achieved_goal": box, "desired_goal": box},
        ...         "reward": mr.Field((), "float32"),
        ...         "terminated": mr.Field((), "bool"),
        ...     }
        ... )
        >>> def reached(achieved, desired, info):
        ...     return (np.abs(achieved - desired).max(-1) < 0.1).astype(np.float32)
        >>> buffer = mr.ReplayBuffer.create(
        ...     "runs/goals", schema, 100, transforms=[mr.HER("future", 0.8, reached)]
        ... )
    """

    strategy: str
    ratio: float
    reward_fn: RewardFunction
    achieved: str | None = None
    desired: str | None = None
    info: Sequence[str] = ()

    reads_next = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        number("HER ratio", self.ratio, 0, "0.8 is the usual one.", maximum=1)
        one_of("HER strategy", self.strategy, STRATEGIES, "'future' is the usual one.")
        if not callable(self.reward_fn):
            raise SchemaError(
                "HER reward_fn must be a function of achieved goals, desired goals "
                f"and info, got {shown(self.reward_fn)}. Pass the environment's "
                "compute_reward."
            )

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: Goals or reward are not there, do not fit, or were changed by
                a transform before it.
        """
        top = outline.schema.role("observation")
        achieved = self.achieved or f"{top}/achieved_goal"
        desired = self.desired or f"{top}/desired_goal"
        reward = outline.schema.role("reward")
        self._check_names(outline, achieved, desired, reward)
        assert reward is not None
        for path in (achieved, desired, reward, *self.info):
            _check_stored(path, outline)
        outline.refuse_varying((achieved, desired, reward, *self.info), "HER")
        if outline.fields[achieved].shape != outline.fields[desired].shape:
            raise SchemaError(
                "HER: achieved and desired goals must have one shape, got "
                f"{achieved!r} of shape {list(outline.fields[achieved].shape)} and "
                f"{desired!r} of shape {list(outline.fields[desired].shape)}. Name "
                "other fields."
            )
        goals = _Goals(self, outline, achieved, desired, reward)
        above = outline.changed((desired, reward), lambda field: field, "HER")

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _Relabelled(below, base_steps, goals)

        def elsewhere(base_steps: BaseSteps) -> Iterator[RowReads]:
            return _rows_read(base_steps, goals)

        return Bound(above, over, elsewhere)

    def _check_names(
        self, outline: Outline, achieved: str, desired: str, reward: str | None
    ) -> None:
        for name in ("HER", "DiscountedReturn", "LambdaReturn", "GAE"):
            if name in outline.names:
                raise SchemaError(
                    f"HER must not follow {name} in transforms, which has other goals "
                    "and rewards. Leave one of them out."
                )
        if achieved not in outline.next_obs:
            raise SchemaError(
                "HER: the achieved goal must be a leaf of the observation, got "
                f"{achieved!r}. "
                f"{meant(achieved, outline.next_obs, 'Name it in achieved=.')}"
            )
        if desired not in outline.fields or desired == achieved:
            others = [path for path in outline.fields if path != achieved]
            raise SchemaError(
                "HER: the desired goal must be a field of the schema, got "
                f"{desired!r}. {meant(desired, others, 'Name it in desired=.')}"
            )
        if reward is None or reward not in outline.fields:
            raise SchemaError(
                f"HER: the reward must be one field, got {reward!r}. Name it in the schema's roles."
            )


def _check_stored(path: str, outline: Outline) -> None:
    if not outline.stored(path):
        found, way_out = "not a field", meant(path, outline.schema.paths)
        if path in outline.fields:
            found = f"changed by {' and '.join(outline.changed_by.get(path, ()))}"
            way_out = "Put HER first."
        raise SchemaError(
            f"HER: {path!r} must be a stored field that no transform changed, but it "
            f"is {found}. {way_out}"
        )


class _Goals:
    """A HER fitted to fields: what is the same for every draw.

    Attributes:
        source: The stored field of what a step achieved, and how many rows after it.
        desireds: The desired goal, and the stored next one of it.
    """

    def __init__(
        self, her: HER, outline: Outline, achieved: str, desired: str, reward: str
    ) -> None:
        self.her, self.outline, self.reward = her, outline, reward
        self.stream = len(outline.names)
        self.kind = STRATEGIES.index(her.strategy)
        self.source = (outline.next_obs[achieved], 0)
        if outline.derived:
            self.source = (achieved, 1)
        self.desireds = tuple(outline.sources((desired,)))
        self._goal, self._achieved = outline.fields[desired], outline.fields[achieved]

    def goal(self, achieved: NDArray[np.generic]) -> NDArray[np.generic]:
        """Goals of what was achieved, of the dtype of those desired."""
        if self._goal.dtype == self._achieved.dtype:
            return achieved
        return widen(achieved, self._achieved).astype(self._goal.numpy)

    def numbers(self, goal: NDArray[np.generic]) -> NDArray[np.generic]:
        """Goals as numbers that numpy has."""
        return widen(goal, self._goal)


@dataclass(frozen=True, slots=True)
class _GoalRows:
    """Steps after which goals were achieved.

    Attributes:
        chosen: bool ``[N]``, which steps are relabelled.
        rows: int64 ``[N]``, the step that gives the goal.
        later: int64 ``[N]``, one not before the step drawn, where that one is gone.
    """

    chosen: NDArray[np.bool_]
    rows: Ids
    later: Ids


def _goal_rows(base_steps: BaseSteps, goals: _Goals) -> _GoalRows:
    """Draw whose goals steps get: boundaries are read, no field."""
    rows = base_steps.rows
    begins, ends = rows.locate(base_steps.env_ids, base_steps.positions)
    stops = rows.known(base_steps.env_ids, ends)
    starts, lasts, group = base_steps.positions, base_steps.last, None
    if base_steps.length is not None:
        # Every step of a group has the same episode, so the same begin and stop.
        group, some = _groups(base_steps.length, begins)
        begins, stops = begins[some], stops[some]
        # A step without a known next observation achieved nothing that is known: it
        # keeps its goal, and the others of its group do not wait for it.
        known = np.ones(len(group), BOOL)
        if goals.outline.derived:
            known = base_steps.following != base_steps.positions
            known |= base_steps.terminated
        starts, lasts = np.zeros((2, len(some)), np.int64)
        np.maximum.at(starts, group[known], base_steps.positions[known])
        np.maximum.at(lasts, group[known], base_steps.last[known])
    count = len(begins)
    chosen = np.empty(count, BOOL)
    goal_rows, later = np.empty(count, INT64), np.empty(count, INT64)
    _kernel.hindsight(
        base_steps.key,
        goals.stream,
        goals.her.ratio,
        goals.kind,
        begins,
        stops,
        np.ascontiguousarray(starts),
        lasts,
        chosen,
        goal_rows,
        later,
    )
    if group is not None:
        return _GoalRows(chosen[group] & known, goal_rows[group], later[group])
    return _GoalRows(chosen, goal_rows, later)


def _rows_read(base_steps: BaseSteps, goals: _Goals) -> Iterator[RowReads]:
    """Rows of goals, and of what the rewards are made of; see `Bound.elsewhere`."""
    drawn, (path, shift) = _goal_rows(base_steps, goals), goals.source
    chosen = drawn.chosen
    yield (path,), base_steps.env_ids[chosen], drawn.rows[chosen] + shift
    every, steps = around(base_steps, base_steps.positions, base_steps.last, 0)
    yield (path,), every, steps + shift
    yield tuple(goals.her.info), every, steps


def _groups(length: int, begin: Ids) -> tuple[Ids, Ids]:
    """Steps of one window and one episode, which share their goal.

    Args:
        length: Steps a window, one window after another.
        begin: int64 ``[N]``, where the episode of each step begins.

    Returns:
        int64 ``[N]``, the number of the group of each step, and int64 ``[G]``, the
        first step of each group.
    """
    windows = np.arange(len(begin)) // length
    _, first, group = np.unique(
        np.stack([windows, begin], axis=1), axis=0, return_index=True, return_inverse=True
    )
    numbers: Ids = group.reshape(-1)
    return numbers, first


class _Relabelled(Over):
    """Steps with other goals, and the rewards for them."""

    def __init__(self, below: Layer, base_steps: BaseSteps, goals: _Goals) -> None:
        super().__init__(below, base_steps)
        self._goals = goals
        self._relabelled: tuple[Ids, NDArray[np.generic]] | None = None

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows, goals and rewards relabelled; see `Layer.read`."""
        fields = dict(self.below.read(paths, rows))
        goals = self._goals
        for path in goals.desireds:
            if path in fields:
                fields[path] = _replaced(fields[path], *self._relabelling())
        if goals.reward in fields:
            fields[goals.reward] = self._rewards(fields[goals.reward], rows)
        return fields

    def _relabelling(self) -> tuple[Ids, NDArray[np.generic]]:
        """Which steps are relabelled, int64 ``[M]``, and their goals ``[M, *goal]``."""
        if self._relabelled is not None:
            return self._relabelled
        base_steps = self.base_steps
        drawn = _goal_rows(base_steps, self._goals)
        rows, which = drawn.rows, drawn.chosen.nonzero()[0]
        goal = self._achieved(rows[:, None], which)
        if self._goals.her.strategy == "episode":
            # The past may be overwritten while it is read; the future outlives us.
            lost = ~base_steps.rows.intact(base_steps.env_ids, rows)
            if lost.any():
                rows = np.where(lost, drawn.later, rows)
                goal = self._achieved(rows[:, None], which)
        self._relabelled = which, goal[:, 0]
        return self._relabelled

    def _achieved(self, rows: Where | Ids, which: Ids) -> NDArray[np.generic]:
        """What some achieved after steps ``[N, K]``, ``[M, K, *goal]``."""
        goals = self._goals
        path, shift = goals.source
        there: Where | Ids | None = rows
        if shift:
            there = rows.following() if isinstance(rows, Where) else None
        if there is None:
            # Where a step keeps its goal, the row after it need not be there.
            there = np.repeat(self.base_steps.positions[:, None], _width(rows), axis=1)
            there[which] = self.base_steps.at(rows)[which] + shift
        return goals.goal(self.below.read((path,), there)[path].take(which, 0))

    def _rewards(self, stored: NDArray[np.generic], rows: Where | Ids) -> NDArray[np.generic]:
        which, goal = self._relabelling()
        if not len(which):
            return stored
        goals = self._goals
        shape = (len(goal), stored.shape[1])
        achieved = goals.numbers(self._achieved(rows, which))
        desired = goals.numbers(goal)
        if shape[1] > 1:
            desired = np.repeat(desired, shape[1], axis=0)
        infos = {}
        if goals.her.info:
            info = self.below.read(tuple(goals.her.info), rows)
            fields = goals.outline.fields
            infos = {p: _flat(widen(a.take(which, 0), fields[p])) for p, a in info.items()}
        given = _flat(achieved), desired, infos
        made = called("HER reward_fn", goals.her.reward_fn, *given)
        refuse_masked(made, "HER reward_fn")
        made = np.asarray(made)
        field = goals.outline.fields[goals.reward]
        return _replaced(stored, which, _as_rewards(made, field, shape))


def _replaced(
    values: NDArray[np.generic], which: Ids, some: NDArray[np.generic]
) -> NDArray[np.generic]:
    """Values ``[N, K, *shape]``, with those of some steps replaced.

    Args:
        values: Left as they are.
        which: int64 ``[M]``.
        some: ``[M, K, *shape]``, or ``[M, *shape]`` for all K.
    """
    out = values.copy()
    _kernel.replace(out, len(out), which, np.ascontiguousarray(some, out.dtype))
    return out


def _width(rows: Where | Ids) -> int:
    """Rows of each step, K."""
    return len(rows.ahead) if isinstance(rows, Where) else rows.shape[1]


def _flat(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """``[M, K, *shape]`` to ``[M * K, *shape]``."""
    if values.shape[1] == 1:
        return values[:, 0]
    return values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])


def _as_rewards(
    made: NDArray[np.generic], field: Field, shape: tuple[int, int]
) -> NDArray[np.generic]:
    expected = (shape[0] * shape[1], *field.shape)
    if made.shape != expected or made.dtype.kind not in "biuf":
        raise SchemaError(
            f"HER reward_fn must return numbers {list(expected)}, got "
            f"{made.dtype}{list(made.shape)}. Compute all rewards at once, as arrays."
        )
    return field.convert(made, "reward", expected[:1]).reshape(*shape, *field.shape)
