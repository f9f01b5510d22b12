"""Prioritized draws by any law: strata, weights, updates, state.

Steps in proportion to their priorities.

Steps by the rank of their priorities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import flag, integer, number
from mmreplay.errors import EmptyError, FormatError, SchemaError, shown
from mmreplay.samplers import states
from mmreplay.samplers.base import MOST, Draw, State, View, call_repr, storable
from mmreplay.samplers.priority_distribution import MAX_ALPHA, Proportional, Ranks
from mmreplay.samplers.priority_file import check_name
from mmreplay.samplers.priority_store import MakeLaw, Priorities, Saved
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.schedules import Schedule, Scheduled
from mmreplay.samplers.starts import nothing_to_draw

Normalize = Literal["batch", "buffer", "mean"]
Ids = NDArray[np.int64]
Masses = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """What prioritized samplers have in common.

    Attributes:
        beta: Exponent of the importance weights.
        initial_priority: The least priority that a new row enters at.
        stratified: Draw one step from each of as many segments of equal mass.
        normalize: What the weights are divided by.
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
                f"normalize: got {shown(self.normalize)}, expected one of "
                f"{get_args(Normalize)}; 'batch' divides by the greatest weight drawn"
            )
        for name, low, high in (("initial_priority", 1e-30, MOST), ("eta", 0, 1)):
            number = getattr(self, name)
            if not (isinstance(number, int | float) and low <= number <= high):
                raise SchemaError(
                    f"{name}: got {shown(number)}, expected a number in [{low:g}, "
                    f"{high:g}]; leave it out for the default"
                )


class Prioritizing:
    """The work of every prioritized sampler; its law is the difference."""

    def __init__(
        self, kind: str, make_law: MakeLaw, options: Options, seed: int | None
    ) -> None:
        """Make one.

        Args:
            kind: Name of the sampler, for states.
            make_law: Called for every ring.
            options: What samplers have in common.
            seed: Seed of its own generator; None takes one from the system.
        """
        self._kind = kind
        self._options = options
        self._random = StepGenerator(seed)
        self._step = 0
        self._priorities = Priorities(
            options.name, float(options.initial_priority), make_law
        )

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start, or none of a priority above 0.
        """
        rows = self._priorities
        rows.follow(view)
        if rows.num_legal < 1:
            raise nothing_to_draw(view, batch_size)
        law = rows.law
        if not law.ready(self._step, rows.column.values):
            rows.reopen(view)
        total = law.total
        if not total > 0:
            raise EmptyError(
                f"cannot draw {batch_size} steps: got priority 0 for all of "
                f"{rows.num_legal} legal starts, expected one above it; update "
                "priorities, or make the sampler with eps above 0"
            )
        options, step = self._options, self._step
        beta = options.beta.at(step)
        shares = self._random.shares(step, batch_size)
        drawn, ratios = law.draw(shares, options.stratified, self._scale(total))
        env_ids, positions = rows.places(drawn)
        self._step += 1
        return Draw(
            env_ids, positions, shares, (ratios**beta).astype(np.float32),
            self._random.key(step),
        )  # fmt: skip

    def _scale(self, total: float) -> float:
        """What importance weights compare masses with; 0 is the least drawn.

        With P = mass / total, weights are ``(N * P) ** -beta``, normalised. Divided
        by a greatest weight, N and the total are no part of them.
        """
        if self._options.normalize == "batch":
            return 0.0
        if self._options.normalize == "mean":
            return total / self._priorities.num_legal
        return self._priorities.law.lowest()

    def update_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Set priorities; see `PrioritySampler.update_priorities`."""
        ids, places, numbers = self._numbers(env_ids, positions, values, mask)
        return self._priorities.update(view, ids, places, numbers)

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what `update_priorities` would; see `joined.check_each`."""
        ids, places, numbers = self._numbers(env_ids, positions, values, mask)
        self._priorities.check(view, ids, places, numbers)

    def _numbers(
        self,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None,
    ) -> tuple[Ids, Ids, NDArray[np.generic]]:
        """Environments, positions and priorities, ``[B]`` each, of one shape."""
        ids, places = np.asarray(env_ids, np.int64), np.asarray(positions, np.int64)
        numbers = np.asarray(values)
        if numbers.dtype.kind not in "fiu" and numbers.size:
            raise SchemaError(
                f"priorities: got {numbers.dtype}, expected real numbers; cast them"
            )
        if numbers.ndim == 2:
            numbers = _mixed(numbers, mask, self._options.eta)
        if not numbers.shape == ids.shape == places.shape:
            raise SchemaError(
                f"priorities: got shape {list(numbers.shape)} for "
                f"{list(ids.shape)} env_ids and {list(places.shape)} positions, "
                "expected one for each step drawn; pass each step's own, not their "
                "mean, and the batch that they are of"
            )
        return ids, places, numbers

    @property
    def where(self) -> str | None:
        """``"disk"``, or ``"RAM"`` and why; None before a draw."""
        if self._priorities.home is None:
            return None
        return self._priorities.column.where

    @property
    def options(self) -> dict[str, object]:
        """Arguments that samplers have in common, by name, for a `repr`."""
        names = ("initial_priority", "stratified", "normalize", "eta", "name")
        found = {name: getattr(self._options, name) for name in names}
        return {**found, "seed": self._random.given_seed}

    def state_dict(self, priorities: bool) -> State:
        """Seed and step, and the priorities if asked for."""
        state: State = {
            "kind": self._kind, "seed": self._random.seed, "step": self._step,
        }  # fmt: skip
        known = self._priorities.save() if priorities else None
        if known is not None:
            saved, law = known
            state["uuid"] = saved.uuid.hex()
            state["first"], state["seen"] = saved.first, saved.seen
            state["priorities"] = saved.values
            # What was loaded and not yet used holds more than the law's own.
            state = dict(law) | state
        return state

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        states.check_kind(state, self._kind)
        seed, step = (
            states.stored_integer(state, "seed"),
            states.stored_integer(state, "step"),
        )
        saved = _saved(state) if "priorities" in state else None
        self._random = StepGenerator(seed)
        self._step = step
        if saved is not None:
            self._priorities.load(saved, state)

    def close(self) -> None:
        """Make priorities on disk durable and give them back; a draw opens them again.

        Those in RAM stay, since nobody else has them.
        """
        self._priorities.close()


def _mixed(
    values: NDArray[np.generic], mask: NDArray[np.bool_] | None, eta: float
) -> Masses:
    """Priorities of windows, of their steps': ``eta * max + (1 - eta) * mean``.

    Kapturowski et al. 2019, "Recurrent experience replay in distributed
    reinforcement learning" (R2D2), section 2.3.

    Args:
        values: Numbers ``[B, T]``.
        mask: bool ``[B, T]``, which of them are steps; None for all.
        eta: In ``[0, 1]``.

    Returns:
        float64 ``[B]``.
    """
    real = np.ones(values.shape, bool) if mask is None else np.asarray(mask, bool)
    if real.shape != values.shape:
        raise SchemaError(
            f"priorities: got a mask of shape {list(real.shape)}, expected "
            f"{list(values.shape)}, as the priorities; pass the batch's own"
        )
    counts = real.sum(1)
    if not counts.all():
        raise SchemaError(
            f"priorities: got a mask without a step for window "
            f"{int(np.argmin(counts))}, expected one at least; leave such windows out"
        )
    numbers = np.where(real, values.astype(np.float64), 0.0)
    if np.isnan(numbers).any() or (numbers < 0).any():
        storable(numbers.ravel())  # says which
    return cast(Masses, eta * numbers.max(1) + (1 - eta) * (numbers.sum(1) / counts))


def _saved(state: State) -> Saved:
    """Priorities of a state; it comes from a file, so nothing is believed."""
    text = state.get("uuid")
    try:
        uuid = bytes.fromhex(text if isinstance(text, str) else "-")
    except ValueError:
        uuid = b""
    if len(uuid) != 16:
        raise FormatError(
            f"sampler state: got uuid {text!r:.60}, expected 32 hex digits; pass what "
            "state_dict returned, unchanged"
        )
    first, seen = states.integers(state, "first"), states.integers(state, "seen")
    values = np.asarray(state["priorities"])
    count = int((seen - first).sum()) if first.shape == seen.shape else -1
    if count < 0 or values.shape != (count,) or values.dtype.kind not in "fiu":
        raise FormatError(
            f"sampler state: got priorities {values.dtype}{list(values.shape)} for "
            f"{count} rows, expected a number for each; pass what state_dict returned, "
            "unchanged"
        )
    if (seen < first).any():
        raise FormatError(
            "sampler state: got seen below first, expected a span; pass what "
            "state_dict returned, unchanged"
        )
    try:
        numbers = storable(values)
    except SchemaError as error:
        raise FormatError(f"sampler state: {error}") from error
    return Saved(uuid, first, seen, numbers)


class PriorityDrawing(Protocol):
    """What prioritized samplers leave to the work that they have in common."""

    _work: Prioritizing

    @property
    def where(self) -> str | None:
        """``"disk"``, or ``"RAM"`` and why; None before the first draw."""
        return self._work.where

    @property
    def priorities(self) -> Priorities:
        """The priorities kept, and the law over them, as of the last look."""
        return self._work._priorities

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: There is no legal start, or all of them have priority 0.
        """
        return self._work.draw(view, batch_size)

    def update_priorities(
        self,
        view: View,
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
        return self._work.update_priorities(view, env_ids, positions, values, mask)

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what `update_priorities` would; see `joined.check_each`."""
        self._work.check_priorities(view, env_ids, positions, values, mask)

    def state_dict(self, priorities: bool = False) -> State:
        """Seed and step.

        Args:
            priorities: Also the priorities, as arrays: with them a run over a buffer
                that nobody writes goes on exactly where it was.
        """
        return self._work.state_dict(priorities)

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        self._work.load_state_dict(state)

    def close(self) -> None:
        """Make stored priorities durable and let others have them.

        The next draw opens them again. Those in RAM stay, and are drawn by as before.
        """
        self._work.close()


class PrioritizedSampler(PriorityDrawing):
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
        options = Options(
            Scheduled("beta", beta, 1.0), initial_priority, stratified, normalize,
            eta, name,
        )  # fmt: skip
        self._eps, self._alpha_every = floor, every
        self._work = Prioritizing(
            "PrioritizedSampler",
            partial(Proportional, alpha=power, eps=floor, every=every),
            options,
            seed,
        )

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(
            self, alpha=self._alpha, beta=self._beta, eps=self._eps,
            alpha_every=self._alpha_every, **self._work.options,
        )  # fmt: skip


class RankPrioritizedSampler(PriorityDrawing):
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
        options = Options(
            Scheduled("beta", beta, 1.0), initial_priority, stratified, normalize,
            eta, name,
        )  # fmt: skip
        self._resort_every = resort_every
        self._work = Prioritizing(
            "RankPrioritizedSampler",
            partial(Ranks, alpha=power, every=resort_every),
            options,
            seed,
        )

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(
            self, alpha=self._alpha, beta=self._beta, resort_every=self._resort_every,
            **self._work.options,
        )  # fmt: skip
