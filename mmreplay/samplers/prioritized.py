"""Samplers that draw by priority: strata, importance weights, updates and state.

A sampler owns a `PriorityStore`, which keeps a priority for each row of the buffer. The
store's `PriorityDistribution` makes probabilities of them: in proportion to the
priorities (`PrioritizedSampler`) or by their order (`RankPrioritizedSampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import flag, integer, number
from mmreplay.episodes.starts import StartView, nothing_to_draw
from mmreplay.errors import EmptyError, FormatError, SchemaError, refuse_masked, shown
from mmreplay.samplers import states
from mmreplay.samplers.base import SHARES, Draw, Sampler, State, Traits, call_repr
from mmreplay.samplers.joint import JointWeights, Mass
from mmreplay.samplers.priority_distribution import (
    MAX_ALPHA,
    Proportional,
    RankBased,
    Schedule,
    Scheduled,
)
from mmreplay.samplers.priority_file import check_name
from mmreplay.samplers.priority_store import (
    MAX_PRIORITY,
    MakeDistribution,
    PriorityStore,
    SavedPriorities,
    storable,
)
from mmreplay.samplers.random import StepGenerator

ONLY_LEARNERS = frozenset(("seed", "beta", "stratified"))
"""Arguments by which steps are chosen and weighed; masses do not depend on them."""
Normalize = Literal["batch", "buffer", "mean"]
Ids = NDArray[np.int64]
Masses = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrioritizedOptions:
    """Arguments that all prioritized samplers take.

    Attributes:
        beta: Exponent of the importance weights.
        initial_priority: The least priority that a new row enters at.
        stratified: Draw one step from each of as many segments of equal mass.
        normalize: What weights are divided by.
        eta: Share of the greatest priority of a window's steps in the window's own.
        name: Of the column on disk, or None.
    """

    beta: Scheduled
    initial_priority: float
    stratified: bool
    normalize: Normalize
    eta: float
    name: str | None

    def __post_init__(self) -> None:
        check_name(self.name)
        flag("stratified", self.stratified)
        if self.normalize not in get_args(Normalize):
            raise SchemaError(
                f"normalize must be one of {get_args(Normalize)}, got "
                f"{shown(self.normalize)}. 'batch' divides by the greatest weight "
                "drawn."
            )
        for name, low, high in (("initial_priority", 1e-30, MAX_PRIORITY), ("eta", 0, 1)):
            number = getattr(self, name)
            if not (isinstance(number, int | float) and low <= number <= high):
                raise SchemaError(
                    f"{name} must be a number in [{low:g}, {high:g}], got "
                    f"{shown(number)}. Leave it out for the default."
                )


class PriorityBasedSampler(Sampler):
    """What prioritized samplers share: all but the distribution and its arguments."""

    # The `kind` of states, written out: renaming a class changes no state.
    _kind: str
    keeps_priorities = True
    _random: StepGenerator

    def __init__(
        self, make_distribution: MakeDistribution, options: PrioritizedOptions, seed: int | None
    ) -> None:
        """Make a sampler.

        Args:
            make_distribution: Called for every ring.
            options: The arguments that all take.
            seed: Seed of its own generator; None takes one from the system.
        """
        self._options = options
        self._random = StepGenerator(seed)
        self._step = 0
        self._priorities = PriorityStore(
            options.name, float(options.initial_priority), make_distribution
        )

    @property
    def name(self) -> str | None:
        """Name of the folder with the priorities; None of priorities in RAM."""
        return self._options.name

    @property
    def where(self) -> str | None:  # type: ignore[override]  # known after a draw
        """``"disk"``, or ``"RAM"`` and why; None before the first draw."""
        if self._priorities.home is None:
            return None
        return self._priorities.column.where

    @property
    def priorities(self) -> PriorityStore:
        """The priorities and the distribution over them, as of the last look."""
        return self._priorities

    def draw(self, view: StartView, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start, or all of them have priority 0.
        """
        store = self._priorities
        store.follow(view)
        if store.num_legal < 1:
            raise nothing_to_draw(view, batch_size)
        distribution = store.distribution
        if not distribution.ready(self._step, store.column.values):
            store.reopen(view)
        total = distribution.total
        if not total > 0:
            raise EmptyError(
                f"cannot draw {batch_size} steps: all {store.num_legal} legal starts "
                "have priority 0. Update the priorities, or create the sampler with "
                "eps above 0."
            )
        options, step = self._options, self._step
        beta = options.beta.at(step)
        # With P = mass / total, weights are (N * P) ** -beta, normalised. Divided by a
        # greatest weight, N and the total cancel out. The scale is the mass of weight
        # 1; 0 stands for the least mass drawn.
        scale = 0.0
        if options.normalize == "mean":
            scale = total / store.num_legal
        elif options.normalize == "buffer":
            scale = distribution.lowest()
        shares = self._random.shares(step, batch_size)
        rows, ratios = distribution.draw(shares, options.stratified, scale)
        env_ids, positions = store.steps_of(rows)
        self._step += 1
        return Draw(
            env_ids, positions, shares, (ratios**beta).astype(np.float32), self._random.key(step)
        )

    def can_draw(self, view: StartView, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Which legal starts have a mass above 0; see `Sampler.can_draw`."""
        store = self._priorities
        store.follow(view)
        return store.distribution.is_open(view.home.ring.rows(env_ids, positions))

    def update_priorities(
        self,
        view: StartView,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Set priorities, all or none; see `PrioritySampler.update_priorities`.

        Where a step is named more than once, the last one counts. A step that is no
        legal start keeps its priority for when it becomes one.

        Raises:
            SchemaError: A value is negative, NaN or infinite, or shapes differ.
            StaleError: A position was never written.
        """
        ids, steps, numbers = self._numbers(env_ids, positions, values, mask)
        return self._priorities.update(view, ids, steps, numbers)

    def check_priorities(
        self,
        view: StartView,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what `update_priorities` would; see `Sampler.check_priorities`."""
        ids, steps, numbers = self._numbers(env_ids, positions, values, mask)
        self._priorities.check(view, ids, steps, numbers)

    def _numbers(
        self,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None,
    ) -> tuple[Ids, Ids, NDArray[np.generic]]:
        """Environments, positions and priorities, ``[B]`` each, of one shape."""
        ids, steps = np.asarray(env_ids, np.int64), np.asarray(positions, np.int64)
        refuse_masked(values, "priorities")
        numbers = np.asarray(values)
        if numbers.dtype.kind not in "fiu" and numbers.size:
            raise SchemaError(f"priorities must be real numbers, got {numbers.dtype}. Cast them.")
        if numbers.ndim == 2:
            numbers = _mixed(numbers, mask, self._options.eta)
        if not numbers.shape == ids.shape == steps.shape:
            raise SchemaError(
                "priorities must have one value for each step drawn, got shape "
                f"{list(numbers.shape)} for {list(ids.shape)} env_ids and "
                f"{list(steps.shape)} positions. Pass the batch and the priority of "
                "each of its steps, not their mean."
            )
        return ids, steps, numbers

    def mass(self, view: StartView, step: int) -> Mass:
        """What there is to draw from; see `Sampler.mass`."""
        store = self._priorities
        store.follow(view)
        distribution = store.distribution
        if not distribution.ready(step, store.column.values):
            store.reopen(view)
        # The least mass of all rows is looked for only where weights need it.
        buffer = self._options.normalize == "buffer"
        lowest = distribution.lowest() if buffer else np.inf
        return Mass(distribution.total, store.num_legal, lowest, store.highest())

    def draw_at(self, view: StartView, shares: Masses) -> Draw:
        """Draw the steps that shares fall on; see `Sampler.draw_at`."""
        store = self._priorities
        store.follow(view)
        if not store.num_legal or not store.distribution.total > 0:
            raise nothing_to_draw(view, len(shares))
        rows, _ = store.distribution.draw(shares, stratified=False, scale=0.0)
        env_ids, positions = store.steps_of(rows)
        return Draw(env_ids, positions, shares, np.ones(len(rows), np.float32))

    def enter_at(self, priority: float) -> None:
        """See `Sampler.enter_at`; below the initial priority it has no effect."""
        self._priorities.initial = max(float(self._options.initial_priority), priority)

    def _common_arguments(self) -> dict[str, object]:
        """Arguments that all prioritized samplers take, by name."""
        names = ("initial_priority", "stratified", "normalize", "eta", "name")
        arguments = {name: getattr(self._options, name) for name in names}
        return {**arguments, "seed": self._random.given_seed}

    def bookmark(self) -> Any:
        """See `Sampler.bookmark`; priorities stay as they are."""
        return self._step

    def return_to(self, bookmark: Any) -> None:
        """See `Sampler.return_to`."""
        self._step = bookmark

    def state_dict(self, priorities: bool = False) -> State:
        """Seed and step.

        Args:
            priorities: Also the priorities, as arrays: with them a run over a buffer
                without a writer continues exactly where it was.
        """
        state: State = {"kind": self._kind, "seed": self._random.seed, "step": self._step}
        known = self._priorities.save() if priorities else None
        if known is not None:
            saved, distribution = known
            state["uuid"] = saved.uuid.hex()
            state["first"], state["seen"] = saved.first, saved.seen
            state["priorities"] = saved.values
            # A state that was loaded and not yet used holds more than the
            # distribution's own.
            state = dict(distribution) | state
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        states.check_kind(state, self._kind)
        seed = states.stored_integer(state, "seed")
        step = states.stored_integer(state, "step")
        saved = _saved(state) if "priorities" in state else None
        self._random = StepGenerator(seed)
        self._step = step
        if saved is not None:
            self._priorities.load(saved, state)

    def close(self) -> None:
        """Make stored priorities durable and let other samplers have them.

        The next draw opens them again. Those in RAM stay, and are drawn by as before.
        """
        self._priorities.close()


class PrioritizedSampler(PriorityBasedSampler):
    """Draws steps with ``P = (p + eps) ** alpha / sum``, p being their priorities.

    Schaul et al. 2016, "Prioritized experience replay", section 3.3, proportional.
    A row enters at the highest priority in the buffer, or at the initial one if that
    is larger, when the sampler first sees it; `update_priorities` sets what was
    learned. N being the legal starts, importance weights are ``(N * P) ** -beta``,
    divided by the greatest of the batch (``normalize="batch"``), by the greatest that
    any step of the buffer would have (``"buffer"``), or not at all (``"mean"``: then
    ``N * P`` is a step's mass over the mean mass, as in alf).

    Priorities are stored beside the data, in ``samplers/<name>/``, by whichever
    process draws, and survive its death; see `where`. Give each of several samplers
    of one buffer a name of its own.

    A draw costs O(new rows + batch log rows). An alpha that is not constant is looked
    at every `alpha_every` draws, and a change costs O(rows). Not thread-safe: hold
    the view's lock. Memory: 8.8 bytes a row beside the stored 4 (9.4 with "buffer").

    Example:
        >>> sampler = mr.PrioritizedSampler(alpha=0.6, beta=0.4, seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> batch = buffer.sample(32)
        >>> td_errors = np.ones(32)  # of your learner; weight its loss by batch.weights
        >>> buffer.update_priorities(batch, td_errors)
        0
    """

    _kind = "PrioritizedSampler"
    divides = SHARES

    def __init__(
        self,
        alpha: Schedule = 0.6,
        beta: Schedule = 0.4,
        *,
        eps: float = 1e-6,
        initial_priority: float = 1.0,
        stratified: bool = True,
        normalize: Normalize = "batch",
        eta: float = 0.9,
        name: str | None = "prioritized",
        alpha_every: int = 1000,
        seed: int | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            alpha: How much priorities count, in ``[0, 4]``; 0 is uniform. A number or
                a callable of the step, such as `LinearSchedule`.
            beta: How much the weights make up for it, in ``[0, 1]``; likewise.
            eps: Added to every priority, so that none is 0.
            initial_priority: The least priority that a new row enters at.
            stratified: Draw one step from each of B segments of equal mass, rather
                than B steps apart from each other.
            normalize: ``"batch"``, ``"buffer"`` or ``"mean"``.
            eta: Priorities ``[B, T]`` of windows become ``eta * max + (1 - eta) *
                mean`` of each window's steps.
            name: Of the folder that priorities are stored in; None keeps them in RAM.
            alpha_every: Draws between two looks at an alpha that is not constant.
            seed: Seed of its own generator; None takes one from the system.

        Raises:
            SchemaError: An argument is out of range.
        """
        self._alpha, self._beta = alpha, beta
        power = Scheduled("alpha", alpha, MAX_ALPHA)
        floor = number("eps", eps, 0)
        every = integer("alpha_every", alpha_every, 1, "1 updates alpha at every draw.")
        options = PrioritizedOptions(
            Scheduled("beta", beta, 1.0), initial_priority, stratified, normalize, eta, name
        )
        self._eps, self._alpha_every = floor, every
        distribution = partial(Proportional, alpha=power, eps=floor, every=every)
        super().__init__(distribution, options, seed)

    @property
    def traits(self) -> Traits:
        """Which steps are drawn is the learner's, and how they are weighed."""
        return replace(super().traits, local=ONLY_LEARNERS)

    @property
    def joint_settings(self) -> dict[str, Any]:
        """See `Sampler.joint_settings`."""
        # Each buffer has priorities of its own, and those of windows are made there.
        own = PrioritizedSampler.settings(self)
        return {name: own[name] for name in own if name not in ("seed", "name", "eta")}

    def points(self, numbers: Masses) -> Masses:
        """Points of a batch; see `Sampler.points`."""
        if not self._options.stratified:
            return numbers
        # As a draw from one buffer does, to the last bit.
        count = numbers.shape[-1]
        points: Masses = (numbers + np.arange(count)) / count
        return points

    def joint_weights(self, step: int, masses: Sequence[Mass]) -> JointWeights:
        """Weights of a batch that is drawn from several buffers as one.

        Args:
            step: The batch's.
            masses: Of each buffer.
        """
        options = self._options
        total = sum(mass.total for mass in masses)
        scale = 0.0
        if options.normalize == "mean":
            scale = 1.0 / sum(mass.num_legal for mass in masses)
        elif options.normalize == "buffer":
            scale = min(mass.lowest for mass in masses) / total
        return JointWeights(options.beta.at(step), scale)

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
            "alpha_every": self._alpha_every,
            **self._common_arguments(),
        }


class RankPrioritizedSampler(PriorityBasedSampler):
    """Draws steps with ``P = rank ** -alpha / sum``, the highest priority first.

    Schaul et al. 2016, "Prioritized experience replay", section 3.3, rank-based, and
    appendix B.2.1: stratified draws take one step from each of B segments of equal
    mass, which are segments of like priorities. How large priorities are does not
    count, only which are larger: outliers do no harm.

    The order is sorted every so many updates. Until then it is stale: a step whose
    priority was updated keeps its rank, and new rows share the first ranks with the
    steps that have them, in the order in which they come. Probabilities and weights
    are exact for the ranks as they are.

    All else is as in `PrioritizedSampler`. A sort costs O(rows log rows), 0.1 s
    for a million. Memory: 16.8 bytes a row beside the stored 4.

    Example:
        >>> sampler = mr.RankPrioritizedSampler(alpha=0.7, beta=0.5, seed=0)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> batch = buffer.sample(32)
        >>> buffer.update_priorities(batch, np.ones(32))
        0
    """

    _kind = "RankPrioritizedSampler"

    def __init__(
        self,
        alpha: Schedule = 0.7,
        beta: Schedule = 0.5,
        *,
        resort_every: int | None = None,
        initial_priority: float = 1.0,
        stratified: bool = True,
        normalize: Normalize = "batch",
        eta: float = 0.9,
        name: str | None = "rank_prioritized",
        seed: int | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            alpha: How much ranks count, in ``[0, 4]``; a change of it sorts.
            beta: As in `PrioritizedSampler`.
            resort_every: Updated and new priorities between two sorts; None for a
                quarter of the rows, and at least 1,024.
            initial_priority: As in `PrioritizedSampler`.
            stratified: As in `PrioritizedSampler`.
            normalize: As in `PrioritizedSampler`.
            eta: As in `PrioritizedSampler`.
            name: As in `PrioritizedSampler`.
            seed: Seed of its own generator; None takes one from the system.

        Raises:
            SchemaError: An argument is out of range.
        """
        self._alpha, self._beta = alpha, beta
        power = Scheduled("alpha", alpha, MAX_ALPHA)
        if resort_every is not None:
            way_out = "Leave it out to sort after every quarter of the rows."
            resort_every = integer("resort_every", resort_every, 1, way_out)
        options = PrioritizedOptions(
            Scheduled("beta", beta, 1.0), initial_priority, stratified, normalize, eta, name
        )
        self._resort_every = resort_every
        distribution = partial(RankBased, alpha=power, every=resort_every)
        super().__init__(distribution, options, seed)

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "alpha": self._alpha,
            "beta": self._beta,
            "resort_every": self._resort_every,
            **self._common_arguments(),
        }


def _mixed(values: NDArray[np.generic], mask: NDArray[np.bool_] | None, eta: float) -> Masses:
    """Priorities of windows from their steps': ``eta * max + (1 - eta) * mean``.

    Kapturowski et al. 2019, "Recurrent experience replay in distributed
    reinforcement learning" (R2D2), section 2.3.

    Args:
        values: Numbers ``[B, T]``.
        mask: bool ``[B, T]``, which of them count; None for all. A window of which none
            does, as its steps are no transitions, gets priority 0.
        eta: In ``[0, 1]``.

    Returns:
        float64 ``[B]``.
    """
    real = np.ones(values.shape, bool) if mask is None else np.asarray(mask, bool)
    if real.shape != values.shape:
        raise SchemaError(
            "priorities: the mask must have the shape of the priorities, "
            f"{list(values.shape)}, got {list(real.shape)}. Pass the mask of the "
            "batch."
        )
    counts = np.maximum(real.sum(1), 1)
    numbers = np.where(real, values.astype(np.float64), 0.0)
    if np.isnan(numbers).any() or (numbers < 0).any():
        storable(numbers.ravel())  # says which
    return cast(Masses, eta * numbers.max(1) + (1 - eta) * (numbers.sum(1) / counts))


def _saved(state: State) -> SavedPriorities:
    """Priorities of a state; it comes from a file, so everything is checked."""
    text = state.get("uuid")
    try:
        uuid = bytes.fromhex(text if isinstance(text, str) else "-")
    except ValueError:
        uuid = b""
    if len(uuid) != 16:
        raise FormatError(
            f"sampler state: uuid must be 32 hex digits, got {text!r:.60}. Pass what "
            "state_dict returned, unchanged."
        )
    first, seen = states.integers(state, "first"), states.integers(state, "seen")
    values = np.asarray(state["priorities"])
    count = int((seen - first).sum()) if first.shape == seen.shape else -1
    if count < 0 or values.shape != (count,) or values.dtype.kind not in "fiu":
        raise FormatError(
            f"sampler state: priorities must be one number for each of {count} rows, "
            f"got {values.dtype}{list(values.shape)}. Pass what state_dict returned, "
            "unchanged."
        )
    if (seen < first).any():
        raise FormatError(
            "sampler state: seen must be at least first in every environment. Pass "
            "what state_dict returned, unchanged."
        )
    try:
        numbers = storable(values)
    except SchemaError as error:
        raise FormatError(f"sampler state: {error}") from error
    return SavedPriorities(uuid, first, seen, numbers)
