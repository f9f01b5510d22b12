"""Steps whose data is not too old: by the version of the policy that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.episodes.column_index import require_path
from mmreplay.episodes.starts import ListedStarts, legal_among, nothing_to_draw, num_legal
from mmreplay.errors import EmptyError, SchemaError, called, refuse_masked, shown
from mmreplay.samplers import states
from mmreplay.samplers.base import (
    GROUPS,
    STEPS,
    Draw,
    Sampler,
    State,
    View,
    call_repr,
    checked,
    traits_of,
)
from mmreplay.samplers.combine import Wrapper, joined, state_of
from mmreplay.samplers.distinct import DistinctSampler
from mmreplay.samplers.holding import all_or_nothing
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.samplers.uses import called_counter, counters_in

MAX_ROUNDS = 32
"""Draws of the inner sampler for one batch."""
MAX_CANDIDATES = 1 << 16
MAX_VERSION = (1 << 63) - 1
NUMBERS_A_DRAW = MAX_ROUNDS + 1
"""Generators of one draw: one a round, and one for steps that the index lists."""

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]
Weight = Callable[[Ids], NDArray[Any]]
"""Returns how likely steps so many versions old are kept, ``[N]`` in ``[0, 1]``."""


class StalenessSampler(Wrapper):
    """Draws steps that are at most so many versions behind, with another sampler.

    A field holds the version of the policy that made each step; `current` is the
    learner's, moved by `move_to`. Steps that the other sampler draws are left out where
    they are more than `maximum` versions behind, and with `weight` by chance. What was
    left out is counted.

    Probabilities and weights are those of the other sampler, the probabilities times
    what `weight` gives: divide them by ``1 - left_out`` for those among the steps that
    are left. Costs a draw of the other sampler and a read of the field for each batch,
    times ``1 / (1 - left_out)``. Where few steps are left, those of a `UniformSampler`
    or `DistinctSampler` are found by the values of the field instead. A batch of
    another sampler is shorter where nearly all of what it draws is left out.

    With a `DistinctSampler` inside no step comes twice in a batch: each set of steps
    that are recent enough is as likely as each other. A batch is shorter where fewer
    are left.

    With a `GroupSampler` inside, groups are drawn whose rows are all recent enough: it
    is shown those alone, by the values of the field, at a cost of O(rows that are
    recent enough). Its probabilities are those among these rows.

    Attributes:
        current: Version of the learner's policy.

    Example:
        >>> schema = mr.Schema({"version": mr.Field((), "int32")})
        >>> sampler = mr.StalenessSampler("version", current=9, maximum=1, seed=0)
        >>> buffer = mr.ReplayBuffer.create(
        ...     None, schema, 9, engine="memory", sampler=sampler
        ... )
        >>> buffer.extend(version=[7, 8, 9])
        >>> sorted(set(buffer.sample(32)["version"].tolist()))
        [8, 9]
        >>> sampler.move_to(10)
        >>> set(buffer.sample(32)["version"].tolist())
        {9}
    """

    only_starts = False
    looked_up: str
    _random: StepGenerator

    def __init__(
        self,
        field: str,
        current: int,
        maximum: int | None = None,
        weight: Weight | None = None,
        *,
        sampler: Any = None,
        seed: int | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            field: Path of an integer field of one number, which is not mutable.
            current: Version of the learner's policy.
            maximum: Versions that a step may be behind; None for any number.
            weight: Returns how likely a step is kept, ``[N]`` in ``[0, 1]``, by the
                versions that it is behind, int64 ``[N]``; those ahead count as 0. None
                keeps all.
            sampler: Draws the steps to choose from, single steps or groups, without
                epochs; `UniformSampler` with the same seed by default. A `UseCounter`
                goes around this sampler, as it would count steps that are left out.
            seed: Seed of its own generator; None takes one from the system.

        Raises:
            SchemaError: An argument is not legal.
        """
        require_path(field, "version")
        if maximum is not None:
            way_out = "Leave it out for any number of versions."
            maximum = integer("maximum", maximum, 0, way_out, maximum=MAX_VERSION)
        if weight is not None and not callable(weight):
            raise SchemaError(
                "weight must be a callable of the versions that steps are behind, got "
                f"{shown(weight)}. Pass, for example, lambda behind: 0.5**behind."
            )
        self.looked_up, self._maximum, self._weight = field, maximum, weight
        self._seed(StepGenerator(seed))
        self._step = 0
        self._looked_at = self._left_out = 0
        self.move_to(current)
        inner = UniformSampler(self._random.seed) if sampler is None else sampler
        super().__init__([self._inner(inner)])
        self.distinct = traits_of(inner).distinct

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "field": self.looked_up,
            "current": self.current,
            "maximum": self._maximum,
            "weight": self._weight,
            "sampler": self.parts[0],
            "seed": self._random.given_seed,
        }

    def _inner(self, sampler: Any) -> Sampler:
        """Return the sampler to draw with.

        Raises:
            SchemaError: It cannot be inside of this one.
        """
        traits = traits_of(checked(sampler))
        form = traits.form
        if form not in (None, STEPS, GROUPS):
            raise SchemaError(
                "the sampler inside a StalenessSampler must draw single steps or "
                f"groups, got the {type(sampler).__name__}, of {form}. Put the "
                "StalenessSampler inside of it."
            )
        if counters_in(sampler):
            raise SchemaError(
                "the sampler inside a StalenessSampler must not count uses, got a "
                f"{called_counter(sampler)}. Put the StalenessSampler inside of the "
                "UseCounter: steps that are left out are not used."
            )
        if traits.once:
            # Of a draw that has more recent steps than are asked for, the rest would be
            # lost for the epoch.
            raise SchemaError(
                "the sampler inside a StalenessSampler must have no epochs, got "
                f"{type(sampler).__name__}. Use a DistinctSampler, in a UseCounter(1, "
                "StalenessSampler(...)) for each step once."
            )
        if form == GROUPS and self._weight is not None:
            raise SchemaError(
                f"weight must be None where groups are drawn, got {shown(self._weight)}"
                ". Pass maximum, or select groups by where= of the GroupSampler."
            )
        own: Sampler = sampler
        return own

    def _seed(self, random: StepGenerator) -> None:
        self._random = random
        # Other numbers than those of the inner sampler, which may have the same seed.
        self._chance = StepGenerator(random.seed ^ (1 << 62))

    def move_to(self, current: int) -> None:
        """Set the version of the learner's policy.

        Args:
            current: An integer in ``[0, 2**63)``.

        Raises:
            SchemaError: It is none.
        """
        way_out = "Pass a version."
        self.current = integer("current", current, 0, way_out, maximum=MAX_VERSION)

    @property
    def left_out(self) -> float:
        """Share of the steps drawn since it was made that were left out, in [0, 1]."""
        return self._left_out / max(1, self._looked_at)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`.

        Raises:
            EmptyError: No step that the other sampler draws is recent enough.
            SchemaError: The field is no such field.
        """
        if num_legal(view) < 1:
            raise nothing_to_draw(view, batch_size)
        # Refuses what is no version before a step is drawn.
        view.column_index(self.looked_up)
        before = self._looked_at, self._left_out
        try:
            draw = all_or_nothing(self.parts, self._draw, view, batch_size)
        except BaseException:
            # A failed draw does not count.
            self._looked_at, self._left_out = before
            raise
        self._step += 1
        return draw

    def _draw(self, view: View, batch_size: int) -> Draw:
        if self.form == GROUPS:
            return self._draw_groups(view, batch_size)
        drawn: list[Draw] = []
        count, size = 0, batch_size
        listable = type(self.parts[0]) in (UniformSampler, DistinctSampler)
        for round_number in range(MAX_ROUNDS):
            draw = self.parts[0].draw(view, size)
            # A distinct sampler draws fewer where there are no more.
            everything = self.distinct and len(draw) < size
            recent = self._recent(view, draw, round_number, drawn, batch_size - count)
            drawn.append(recent)
            count += len(drawn[-1])
            if count == batch_size:
                break
            size = min(2 * size, MAX_CANDIDATES)
            if listable and (everything or size == MAX_CANDIDATES):
                drawn.append(self._listed(view, drawn, batch_size - count))
                count += len(drawn[-1])
                break
        if not count:
            raise self._nothing_recent(f"{batch_size} steps")
        some = [draw for draw in drawn if len(draw)]
        return joined(some, self._random.key(self._step))

    def _draw_groups(self, view: View, batch_size: int) -> Draw:
        """Draw groups of steps that are recent enough."""
        env_ids, positions, _ = self._recent_starts(view)
        # After the look for them, which is one at the writer, too.
        total = num_legal(view)
        if not len(positions):
            raise self._nothing_recent(f"{batch_size} groups")
        recent = ListedStarts(view, env_ids, positions)
        draw = self.parts[0].draw(recent, batch_size)
        self._looked_at += total
        self._left_out += max(0, total - len(positions))
        return replace(draw, key=self._random.key(self._step))

    def _nothing_recent(self, asked: str) -> EmptyError:
        behind = "" if self._maximum is None else f" at most {self._maximum}"
        return EmptyError(
            f"cannot draw {asked} of field {self.looked_up!r}{behind} versions behind "
            f"{self.current}. Add newer steps, or raise maximum."
        )

    def _recent(
        self, view: View, draw: Draw, round_number: int, before: Sequence[Draw], maximum: int
    ) -> Draw:
        """Leave out what is too old, and by chance what `weight` says."""
        fields, whole = view.read_rows((self.looked_up,), draw.env_ids, draw.positions)
        chances = self._chances(np.asarray(fields[self.looked_up])) * whole
        rng = self._chance.at(self._step * NUMBERS_A_DRAW + round_number)
        kept = np.flatnonzero(rng.random(len(draw)) < chances)
        self._looked_at += len(draw)
        self._left_out += len(draw) - len(kept)
        if self.distinct and before:
            there = _steps_in(before, draw.env_ids[kept], draw.positions[kept])
            kept = kept[~there]
        if len(kept) > maximum:
            # Not the first ones: stratified steps come in the order of the rows.
            kept = np.sort(rng.choice(kept, maximum, replace=False))
        chosen = draw.taken(kept)
        chosen.probabilities = chosen.probabilities * chances[kept]
        return chosen

    def _listed(self, view: View, before: Sequence[Draw], count: int) -> Draw:
        """Draw from the steps that the index lists as recent enough."""
        env_ids, positions, versions = self._recent_starts(view)
        chances = self._chances(versions)
        if self.distinct:
            chances[_steps_in(before, env_ids, positions)] = 0
        total = float(chances.sum())
        if not total > 0:
            none = np.empty(0, np.int64)
            return Draw(none, none, np.empty(0), np.empty(0, np.float32))
        rng = self._chance.at(self._step * NUMBERS_A_DRAW + MAX_ROUNDS)
        if self.distinct:
            count = min(count, int(np.count_nonzero(chances)))
            which = rng.choice(len(chances), count, replace=False, p=chances / total)
        else:
            sums = np.cumsum(chances)
            which = np.searchsorted(sums, rng.random(count) * total, "right")
            which = np.minimum(which, len(chances) - 1)
        shares = chances[which] / num_legal(view)
        ones = np.ones(count, np.float32)
        return Draw(env_ids[which], positions[which], shares, ones)

    def _recent_starts(self, view: View) -> tuple[Ids, Ids, NDArray[Any]]:
        """List the legal starts that are recent enough, with their versions."""
        index = view.column_index(self.looked_up)
        env_ids, positions, versions = index.in_range(self._oldest, MAX_VERSION)
        legal = legal_among(view, env_ids, positions)
        return env_ids[legal], positions[legal], versions[legal]

    def can_draw(self, view: View, env_ids: Ids, positions: Ids) -> Bools:
        """Which legal starts are recent enough; see `Sampler.can_draw`."""
        recent_envs, recent_positions, versions = self._recent_starts(view)
        if self.form == GROUPS:
            # Of a group each row has to be recent enough.
            view = ListedStarts(view, recent_envs, recent_positions)
        else:
            likely = self._chances(versions) > 0
            recent_envs, recent_positions = (recent_envs[likely], recent_positions[likely])
        num_envs = view.home.ring.num_envs
        recent = np.isin(positions * num_envs + env_ids, recent_positions * num_envs + recent_envs)
        return recent & super().can_draw(view, env_ids, positions)

    @property
    def _oldest(self) -> int:
        """The oldest version that is recent enough, an int64."""
        if self._maximum is None:
            return -MAX_VERSION - 1
        return self.current - self._maximum

    def _chances(self, versions: NDArray[Any]) -> NDArray[np.float64]:
        """How likely steps are kept, float64 ``[N]``."""
        numbers = versions.astype(np.int64)
        # Compared, not subtracted: from a mark such as -2**63 the difference wraps.
        recent = numbers >= self._oldest
        if versions.dtype == np.uint64:
            recent &= versions <= np.uint64(MAX_VERSION)
        if self._weight is None:
            return recent.astype(np.float64)
        # Those that are further behind than int64 can say are not older than that.
        asked = self.current - np.clip(numbers, self.current - MAX_VERSION, self.current)
        chances = called("StalenessSampler weight", self._weight, asked)
        refuse_masked(chances, "StalenessSampler weight")
        chances = np.asarray(chances)
        legal = chances.shape == asked.shape and chances.dtype.kind in "fiub"
        if not legal or not ((chances >= 0) & (chances <= 1)).all():
            got = f"{chances.dtype}{list(chances.shape)}"
            if legal:
                got = str(chances[~((chances >= 0) & (chances <= 1))][0])
            raise SchemaError(
                f"weight must return {len(asked)} numbers in [0, 1], got {got}. Divide "
                "by the greatest."
            )
        return np.where(recent, chances, 0.0).astype(np.float64)

    def state_dict(self, priorities: bool = False) -> State:
        """Seed, step, version and counts, and the state of the other sampler.

        Args:
            priorities: With those that the other sampler keeps, as arrays.
        """
        return {
            "kind": "StalenessSampler",
            "seed": self._random.seed,
            "step": self._step,
            "field": self.looked_up,
            "maximum": self._maximum,
            "current": self.current,
            "looked_at": self._looked_at,
            "left_out": self._left_out,
            "parts": [state_of(self.parts[0], priorities)],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        states.check_kind(state, "StalenessSampler")
        seed = states.stored_integer(state, "seed")
        step = states.stored_integer(state, "step")
        states.same(state, "field", self.looked_up)
        states.same(state, "maximum", self._maximum)
        current = states.stored_integer(state, "current")
        looked_at = states.stored_integer(state, "looked_at")
        left_out = states.stored_integer(state, "left_out", looked_at + 1)
        self.parts[0].load_state_dict(states.parts(state, "parts", 1)[0])
        self._seed(StepGenerator(seed))
        self._step, self.current = step, current
        self._looked_at, self._left_out = looked_at, left_out


def _steps_in(draws: Sequence[Draw], env_ids: Ids, positions: Ids) -> Bools:
    """Which steps are among those of draws, bool ``[N]``."""
    ids = np.concatenate([draw.env_ids for draw in draws])
    num_envs = 1 + max(ids.max(initial=0), env_ids.max(initial=0))
    steps = np.concatenate([draw.positions for draw in draws]) * num_envs + ids
    return np.isin(positions * num_envs + env_ids, steps)
