"""N steps folded into one transition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.schema import Field, Schema
from mmreplay.transforms.anchors import Anchors
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over
from mmreplay.transforms.checks import fraction, numbers, real, whole
from mmreplay.transforms.outline import Outline, Place


@dataclass(frozen=True, slots=True)
class NStep:
    """The n-step transition from each step drawn (Sutton 1988; Sutton and Barto, 7.1).

    With k the steps until the episode ends or n, whichever is less, the batch holds

    - each reward: ``sum(gamma**i * reward[t + i] for i in range(k))``, float32, or
      float64 where the stored dtype is that exact; summed in float64;
    - each next observation: the one after step ``t + k - 1``;
    - ``terminated`` and ``truncated``: those of step ``t + k - 1``;
    - a field named by `discount`, float32 ``[N]``: ``gamma**k * (1 - terminated)``,
      by which to multiply the value of the next observation. A truncated episode is
      bootstrapped, from its final observation. With ``terminated`` per agent
      (`Schema.num_agents`) it is float32 ``[N, num_agents]``;

    Everything else is the step's own. Stored rows never change, so one buffer serves
    any n. Costs n rows of rewards a step drawn.

    Attributes:
        n: Steps, at least 1.
        gamma: Discount per step, in [0, 1].
        rewards: Fields to sum; by default those that play the reward.
        discount: Name of the field for the discount.

    Example:
        >>> nstep = mr.NStep(3, gamma=0.99)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[nstep])
        >>> batch = buffer.sample(32)
        >>> batch["reward"].shape, batch["discount"].shape
        ((32,), (32,))
    """

    n: int
    gamma: float
    rewards: str | Sequence[str] | None = None
    discount: str = "discount"

    def __post_init__(self) -> None:
        """Check the arguments."""
        whole("NStep n", self.n, 1)
        fraction("NStep gamma", self.gamma)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no reward, steps are folded already, or a reward
                cannot be summed.
        """
        if "NStep" in outline.names:
            raise SchemaError(
                "NStep: got steps that an NStep before it has folded already, expected "
                "single steps; use one NStep with the n that you want"
            )
        rewards = self._rewards(outline)
        changed = outline.changed(rewards, real, "NStep")
        places = dict(changed.places) | dict.fromkeys(rewards, Place.MADE)
        for role in ("terminated", "truncated"):
            places |= dict.fromkeys(outline.schema.role_paths(role), Place.LAST)
        folded = replace(changed, places=places, steps=int(self.n))
        agents = outline.schema.num_agents
        field = Field(() if agents is None else (agents,), "float32")
        above = folded.with_field(self.discount, field, Place.MADE, "NStep")
        fields = {path: outline.fields[path] for path in rewards}

        def over(below: Layer, anchors: Anchors) -> Layer:
            return _Folded(below, anchors, self, fields, outline.schema)

        return Bound(above, over)

    def _rewards(self, outline: Outline) -> tuple[str, ...]:
        chosen = self.rewards
        if chosen is None:
            chosen = outline.playing("reward", "NStep", "rewards")
        rewards = outline.pick(chosen, "NStep")
        for path in rewards:
            if not outline.of_rows(path) or outline.fields[path].dtype == "bool":
                raise SchemaError(
                    f"NStep: got {path!r} to sum, expected numbers that each step has; "
                    "cast it before, or name another field in rewards="
                )
        return rewards


class _Folded(Over):
    """Rewards summed over the steps that are folded."""

    def __init__(
        self, below: Layer, anchors: Anchors, fold: NStep, fields: dict[str, Field],
        schema: Schema,
    ) -> None:  # fmt: skip
        super().__init__(below, anchors)
        self._fold, self._schema = fold, schema
        self._fields = fields

    def made(self, names: tuple[str, ...]) -> Fields:
        """Summed rewards and the discount; see `Layer.made`."""
        mine = tuple(name for name in names if name in self._fields)
        name = self._fold.discount
        rest = tuple(n for n in names if n not in self._fields and n != name)
        found = self.below.made(rest) | self._sums(mine)
        if name in names:
            found[name] = self._discount()
        return found

    def _sums(self, paths: tuple[str, ...]) -> Fields:
        if not paths:
            return {}
        steps, found = self._steps(), Fields()
        powers = self._fold.gamma ** np.arange(steps.shape[1], dtype=np.float64)
        within = steps <= self.anchors.last[:, None]
        weights = np.where(within, powers, 0.0)
        rows = np.minimum(steps, self.anchors.last[:, None])
        for path, values in self.below.read(paths, rows).items():
            field = self._fields[path]
            wide = numbers(values, field).astype(np.float64)
            # Not left to the weight: 0 times infinity is no 0.
            wide[~within] = 0
            total = np.einsum("nk,nk...->n...", weights, wide)
            found[path] = total.astype(real(field).numpy)
        return found

    def _steps(self) -> Ids:
        count = int((self.anchors.last - self.anchors.positions).max(initial=0)) + 1
        return self.anchors.positions[:, None] + np.arange(count)

    def _discount(self) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        steps = self.anchors.last - self.anchors.positions + 1
        powers = self._fold.gamma ** steps.astype(np.float64)
        terminated, agents = self.anchors.terminated, self._schema.num_agents
        if agents is not None:
            powers, terminated = powers[:, None], np.zeros((len(steps), agents), bool)
            path = self._schema.role("terminated")
            if path is not None:
                last = self.below.read((path,), self.anchors.last[:, None])[path]
                terminated = last.reshape(terminated.shape) != 0
        return np.where(terminated, 0.0, powers).astype(np.float32)
