"""N steps folded into one transition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.arguments import integer, number
from mmreplay.errors import SchemaError
from mmreplay.schema import Field, Schema
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound, Fields, Layer, Over, Sums
from mmreplay.transforms.base_steps import BaseSteps, Where
from mmreplay.transforms.checks import real
from mmreplay.transforms.outline import Outline, ReadAt

_kernel = kernels.load("steps")
FLOAT32 = np.dtype(np.float32)
"""Given as what it is, it need not be looked up."""


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

    described: ClassVar[bool] = True

    n: int
    gamma: float
    rewards: str | Sequence[str] | None = None
    discount: str = "discount"

    reads_next = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        integer("NStep n", self.n, 1, "Give the number of rewards to sum.")
        number("NStep gamma", self.gamma, 0, "0.99 is usual.", maximum=1)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no reward, steps are folded already, or a reward
                cannot be summed.
        """
        if "NStep" in outline.names:
            raise SchemaError(
                "NStep must not follow another NStep. Use one NStep with the total n."
            )
        rewards = self._rewards(outline)
        changed = outline.changed(rewards, real, "NStep")
        read_at = dict(changed.read_at) | dict.fromkeys(rewards, ReadAt.MADE)
        for role in ("terminated", "truncated"):
            read_at |= dict.fromkeys(outline.schema.role_paths(role), ReadAt.LAST)
        folded = replace(changed, read_at=read_at, steps=int(self.n))
        agents = outline.schema.num_agents
        field = Field(() if agents is None else (agents,), "float32")
        above = folded.with_field(self.discount, field, ReadAt.MADE, "NStep")
        fields = {path: outline.fields[path] for path in rewards}
        sums = _Sums(self, fields, outline.schema)

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _Folded(below, base_steps, sums)

        exact = {
            path: sums.reals[path]
            for path, field in fields.items()
            if outline.as_stored(path)
            and field.dtype in ("float32", "float64")
            and math.prod(field.shape) > 0
        }
        discount = self.discount if agents is None else None
        stored = Sums(sums.steps, sums.powers, exact, discount)
        return Bound(above, over, finishes=False, sums=stored)

    def _rewards(self, outline: Outline) -> tuple[str, ...]:
        chosen = self.rewards
        if chosen is None:
            chosen = outline.playing("reward", "NStep", "rewards")
        rewards = outline.pick(chosen, "NStep")
        outline.refuse_varying(rewards, "NStep")
        for path in rewards:
            if not outline.of_rows(path) or outline.fields[path].dtype == "bool":
                raise SchemaError(
                    f"NStep: {path!r} must be a field of numbers that each step has. "
                    "Cast it before, or name another field in rewards=."
                )
        return rewards


class _Sums:
    """An NStep fitted to fields: what is the same for every draw."""

    def __init__(self, nstep: NStep, fields: dict[str, Field], schema: Schema) -> None:
        self.discount = nstep.discount
        self.num_agents, self.terminated = schema.num_agents, schema.role("terminated")
        self.fields = fields
        factors = np.full(nstep.n + 1, nstep.gamma, np.float64)
        factors[0] = 1
        # Products round alike on every processor, and powers do not.
        self.powers = np.multiply.accumulate(factors)
        self.weights = self.powers[:-1]
        self.steps = Where(tuple(range(nstep.n)), (0,) * nstep.n, False)
        self.reals = {path: real(field).numpy for path, field in fields.items()}
        self._parted: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}

    def parted(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Names that are summed here, and those that neither sums nor discount are."""
        found = self._parted.get(names)
        if found is None:
            others = (*self.fields, self.discount)
            found = self._parted[names] = (
                tuple(name for name in names if name in self.fields),
                tuple(name for name in names if name not in others),
            )
        return found


class _Folded(Over):
    """Rewards summed over the steps that are folded."""

    def __init__(self, below: Layer, base_steps: BaseSteps, sums: _Sums) -> None:
        super().__init__(below, base_steps)
        self._sums = sums

    def made(self, names: tuple[str, ...]) -> Fields:
        """Summed rewards and the discount; see `Layer.made`."""
        sums, base_steps = self._sums, self.base_steps
        mine, rest = sums.parted(names)
        found = self.below.made(rest) if rest else Fields()
        positions, last = base_steps.positions, base_steps.last
        if mine:
            for path, values in self.below.read(mine, sums.steps).items():
                wide = values
                if wide.dtype.char not in "fd" or not wide.flags.c_contiguous:
                    wide = _wide(values, sums.fields[path])
                shape = (len(positions), *wide.shape[2:])
                total = np.empty(shape, sums.reals[path])
                _kernel.weighted_sums(
                    positions, last, sums.weights, wide, wide.itemsize, total, total.itemsize
                )
                found[path] = total
        if sums.discount in names and sums.num_agents is not None:
            # Each agent has an end of its own, stored as a field.
            discounts = np.repeat(sums.powers[last - positions + 1, None], sums.num_agents, axis=1)
            if sums.terminated is not None:
                ends = self.below.read((sums.terminated,), last[:, None])
                ended = ends[sums.terminated].reshape(discounts.shape)
                discounts[ended != 0] = 0.0
            found[sums.discount] = discounts.astype(np.float32)
        elif sums.discount in names:
            discount = np.empty(len(positions), FLOAT32)
            _kernel.discounts(positions, last, sums.powers, base_steps.terminated, discount)
            found[sums.discount] = discount
        return found


def _wide(values: NDArray[np.generic], field: Field) -> NDArray[np.generic]:
    """Numbers as float32 or float64, one after the other."""
    some = widen(values, field)
    exact = some.dtype == np.float32 or some.dtype == np.float64
    return np.ascontiguousarray(some, some.dtype if exact else np.float64)
