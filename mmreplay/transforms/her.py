"""Hindsight: steps relabelled with a goal that their episode did reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import FINAL
from mmreplay.errors import SchemaError, called, shown
from mmreplay.schema import Field
from mmreplay.transforms.anchors import Anchors, around
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over, Touched
from mmreplay.transforms.checks import fraction, numbers
from mmreplay.transforms.outline import Outline

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

    def __post_init__(self) -> None:
        """Check the arguments."""
        fraction("HER ratio", self.ratio)
        if self.strategy not in STRATEGIES:
            raise SchemaError(
                f"HER strategy: got {shown(self.strategy)}, expected one of "
                f"{', '.join(STRATEGIES)}; 'future' is the usual one"
            )
        if not callable(self.reward_fn):
            raise SchemaError(
                f"HER reward_fn: got {shown(self.reward_fn)}, expected a function of "
                "achieved and desired goals and info; pass the environment's "
                "compute_reward"
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
        if outline.fields[achieved].shape != outline.fields[desired].shape:
            raise SchemaError(
                f"HER: got {achieved!r} of shape {list(outline.fields[achieved].shape)}"
                f" and {desired!r} of shape {list(outline.fields[desired].shape)}, "
                "expected goals of one shape; name other fields"
            )
        goals = _Goals(self, outline, achieved, desired, reward, len(outline.names))
        above = outline.changed((desired, reward), lambda field: field, "HER")

        def over(below: Layer, anchors: Anchors) -> Layer:
            return _Relabelled(below, anchors, goals)

        def elsewhere(anchors: Anchors) -> Iterator[Touched]:
            return _touched(anchors, goals)

        return Bound(above, over, elsewhere)

    def _check_names(
        self, outline: Outline, achieved: str, desired: str, reward: str | None
    ) -> None:
        for name in ("HER", "DiscountedReturn", "LambdaReturn", "GAE"):
            if name in outline.names:
                raise SchemaError(
                    f"HER: got transforms with a {name} before it, expected none: "
                    "its goals and rewards are others; leave one of them out"
                )
        if achieved not in outline.nexts:
            raise SchemaError(
                f"HER: got {achieved!r} as the goal achieved, expected a leaf of the "
                "observation, whose next one tells what a step achieved; name it in "
                "achieved="
            )
        if desired not in outline.fields or desired == achieved:
            raise SchemaError(
                f"HER: got {desired!r} as the goal desired, expected a field of the "
                "schema; name it in desired="
            )
        if reward is None or reward not in outline.fields:
            raise SchemaError(
                f"HER: got {reward!r} as the reward, expected one field; name it in "
                "the schema's roles"
            )


def _check_stored(path: str, outline: Outline) -> None:
    if not outline.stored(path):
        found = "no field"
        if path in outline.fields:
            found = f"changed by {' and '.join(outline.touched.get(path, ()))}"
        raise SchemaError(
            f"HER: got {path!r}, which is {found}, expected a field as it was stored, "
            "since goals are compared and rewards made of those; put HER first"
        )


@dataclass(frozen=True, slots=True)
class _Goals:
    """A HER fitted to fields."""

    her: HER
    outline: Outline
    achieved: str
    desired: str
    reward: str
    stream: int

    @property
    def source(self) -> tuple[str, int]:
        """The stored field of what a step achieved, and how many rows after it."""
        if self.outline.derived:
            return self.achieved, 1
        return self.outline.nexts[self.achieved], 0

    @property
    def desireds(self) -> tuple[str, ...]:
        """The desired goal, and the stored next one of it."""
        return tuple(self.outline.sources((self.desired,)))

    def numbers(self, path: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
        return numbers(values, self.outline.fields[path])


@dataclass(frozen=True, slots=True)
class _Places:
    """Steps after which goals were achieved.

    Attributes:
        chosen: bool ``[N]``, which steps are relabelled.
        rows: int64 ``[N]``, the step that gives the goal.
        later: int64 ``[N]``, one not before the step drawn, where that one is gone.
    """

    chosen: NDArray[np.bool_]
    rows: Ids
    later: Ids


def _places(anchors: Anchors, goals: _Goals) -> _Places:
    """Draw whose goals steps get: boundaries are read, no field."""
    her, random = goals.her, anchors.random(goals.stream)
    begin, end = anchors.rows.locate(anchors.env_ids, anchors.positions)
    stop = _known_stop(anchors, end, goals.outline.derived)
    group = _groups(anchors, begin)
    count = int(group.max(initial=-1)) + 1
    # Every step of a group has the same episode, so the same begin and stop.
    start, last = np.zeros((2, count), np.int64)
    np.maximum.at(start, group, anchors.positions)
    np.maximum.at(last, group, anchors.last)
    chance, place = random.random((2, count))
    first = begin if her.strategy == "episode" else start[group]
    chosen = (chance[group] < her.ratio) & (last[group] < stop)
    share = np.ones(count) if her.strategy == "final" else place
    later = _between(start[group], stop, place[group])
    return _Places(chosen, _between(first, stop, share[group]), later)


def _touched(anchors: Anchors, goals: _Goals) -> Iterator[Touched]:
    """Rows of goals, and of what the rewards are made of; see `Bound.elsewhere`."""
    places, (path, shift) = _places(anchors, goals), goals.source
    chosen = places.chosen
    yield (path,), anchors.env_ids[chosen], places.rows[chosen] + shift
    every, steps = around(anchors, anchors.positions, anchors.last, 0)
    yield (path,), every, steps + shift
    yield tuple(goals.her.info), every, steps


def _known_stop(anchors: Anchors, end: Ids, derived: bool) -> Ids:
    """One past the last step whose next observation is known, int64 ``[N]``."""
    if not derived:
        return end
    heads = anchors.rows.heads[anchors.env_ids]
    flags = anchors.rows.flags(anchors.env_ids, np.minimum(end, heads - 1))
    unknown = (end >= heads) | ((flags & FINAL) == 0)
    stop: Ids = end - unknown
    return stop


def _groups(anchors: Anchors, begin: Ids) -> Ids:
    """Number of the group that each step shares its goal with, int64 ``[N]``."""
    length, count = anchors.length, len(begin)
    if length is None:
        return np.arange(count)
    windows = np.arange(count) // length
    _, group = np.unique(
        np.stack([windows, begin], axis=1), axis=0, return_inverse=True
    )
    numbers: Ids = group.reshape(-1)
    return numbers


class _Relabelled(Over):
    """Steps with other goals, and the rewards for them."""

    def __init__(self, below: Layer, anchors: Anchors, goals: _Goals) -> None:
        super().__init__(below, anchors)
        self._goals = goals

    def read(self, paths: tuple[str, ...], rows: Ids) -> Fields:
        """Fields of rows, goals and rewards relabelled; see `Layer.read`."""
        found = self.below.read(paths, rows)
        goals = self._goals
        for path in goals.desireds:
            if path in found:
                chosen, goal = self._relabelling
                values = found[path].copy()
                values[chosen] = goal[:, None]
                found[path] = values
        if goals.reward in found:
            found[goals.reward] = self._rewards(found[goals.reward], rows)
        return found

    @cached_property
    def _relabelling(self) -> tuple[NDArray[np.bool_], NDArray[np.generic]]:
        """Which steps are relabelled, bool ``[N]``, and their goals ``[M, *goal]``."""
        anchors = self.anchors
        places = _places(anchors, self._goals)
        rows, chosen = places.rows, places.chosen
        goal = self._achieved(rows[:, None], chosen)
        if self._goals.her.strategy == "episode":
            # The past may be overwritten while it is read; the future outlives us.
            lost = ~anchors.rows.intact(anchors.env_ids, rows)
            if lost.any():
                rows = np.where(lost, places.later, rows)
                goal = self._achieved(rows[:, None], chosen)
        return chosen, goal[:, 0]

    def _achieved(self, rows: Ids, chosen: NDArray[np.bool_]) -> NDArray[np.generic]:
        """What chosen ones achieved after steps ``[N, K]``, ``[M, K, *goal]``."""
        goals = self._goals
        path, shift = goals.source
        # Where a step keeps its goal, the row after it need not be there.
        there = np.where(chosen[:, None], rows + shift, self.anchors.positions[:, None])
        found = self.below.read((path,), there)[path][chosen]
        goal = goals.outline.fields[goals.desired]
        if goal.dtype == goals.outline.fields[goals.achieved].dtype:
            return found
        return goals.numbers(goals.achieved, found).astype(goal.numpy)

    def _rewards(self, stored: NDArray[np.generic], rows: Ids) -> NDArray[np.generic]:
        chosen, goal = self._relabelling
        if not chosen.any():
            return stored
        goals = self._goals
        shape = (int(chosen.sum()), rows.shape[1])
        achieved = goals.numbers(goals.desired, self._achieved(rows, chosen))
        desired = np.broadcast_to(
            goals.numbers(goals.desired, goal)[:, None], achieved.shape
        )
        info = self.below.read(tuple(goals.her.info), rows)
        told = {p: _flat(goals.numbers(p, a[chosen])) for p, a in info.items()}
        given = _flat(achieved), _flat(desired), told
        made = np.asarray(called("HER reward_fn", goals.her.reward_fn, *given))
        field = goals.outline.fields[goals.reward]
        rewards = stored.copy()
        rewards[chosen] = _as_rewards(made, field, shape)
        return rewards


def _between(first: Ids, stop: Ids, share: NDArray[np.float64]) -> Ids:
    """Positions in ``[first, stop)`` by share in ``[0, 1]``, 1 being the last."""
    length = np.maximum(stop - first, 1)
    steps = np.minimum((share * length).astype(np.int64), length - 1)
    positions: Ids = first + steps
    return positions


def _flat(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """``[M, K, *shape]`` to ``[M * K, *shape]``."""
    return values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])


def _as_rewards(
    made: NDArray[np.generic], field: Field, shape: tuple[int, int]
) -> NDArray[np.generic]:
    expected = (shape[0] * shape[1], *field.shape)
    if made.shape != expected or made.dtype.kind not in "biuf":
        raise SchemaError(
            f"HER reward_fn: got {made.dtype}{list(made.shape)}, expected numbers "
            f"{list(expected)}; compute all rewards at once, as arrays"
        )
    return field.convert(made, "reward", expected[:1]).reshape(*shape, *field.shape)
