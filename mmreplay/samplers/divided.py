"""Samplers by which several buffers are drawn from as one; see `joint` for the plan.

A sampler says in `Traits.divides` whether its batches can be divided between buffers.
One that cannot draws from each buffer by itself, and is refused by `refuse_alone` where
one law over several buffers is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Draw, Sampler, State, View, ask, replaces_draw, traits_of
from mmreplay.samplers.joint import JointWeights, Numbers


class DrawAtShares(Sampler):
    """One buffer's part of a batch: draws the same shares whenever it is asked.

    Where rows were overwritten between draw and copy, the same shares are drawn again,
    with the probabilities of then.
    """

    keeps_priorities = False

    def __init__(self, sampler: Sampler, shares: Numbers, key: int, weights: JointWeights) -> None:
        """Take a part.

        Args:
            sampler: Of the buffer.
            shares: float64 ``[B]``, from a `DrawPlan`.
            key: Of the batch; see `Draw.key`.
            weights: Of the whole batch.
        """
        self.sampler, self._shares, self._key = sampler, shares, key
        self.weights = weights
        self.form = ask(sampler, "form")

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw the steps at the shares, whatever the batch_size."""
        draw: Draw = ask(self.sampler, "draw_at")(view, self._shares.copy())
        draw.key = self._key
        return draw

    def state_dict(self) -> State:
        """Nothing: it is of one batch."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


def called_sampler(sampler: Sampler) -> str:
    """What to call a sampler in a message: its class, and those inside it."""
    parts = ask(sampler, "parts")
    inside = f" around {called_sampler(parts[0])}" if len(parts) == 1 else ""
    return type(sampler).__name__ + inside


def refuse_alone(samplers: Sequence[Sampler], asked: str, ranks: bool = False) -> None:
    """Refuse samplers whose batches cannot be divided.

    Args:
        samplers: Of each buffer.
        asked: What asks for it, for the message.
        ranks: Whether an epoch can be divided by its ranks, and the draw that a class
            replaces counts, also where it keeps priorities.

    Raises:
        SchemaError: One cannot draw a batch in parts.
    """

    def divides(sampler: Sampler) -> bool:
        traits = traits_of(sampler)
        if not ranks:
            return traits.in_shares
        inside = [part for part in ask(sampler, "parts") if traits_of(part).in_shares]
        own = traits.in_shares or traits.in_ranks
        return own and not replaces_draw(type(sampler)) and all(map(divides, inside))

    for sampler in samplers:
        if divides(sampler):
            continue
        name, inside = type(sampler).__name__, ask(sampler, "parts")
        if len(inside) == 1 and not divides(inside[0]):
            name = called_sampler(sampler)
        raise SchemaError(
            f"{name} cannot draw a batch in parts, which {asked} needs. Use one that can, "
            "such as UniformSampler, StratifiedSampler or PrioritizedSampler, or a "
            "SequenceSampler around it."
        )


PROBABILITIES = ("mass", "draw_at", "points", "joint_weights", "shown")
"""Methods by which several buffers are drawn from as one."""


def sources_of_probabilities(sampler: Sampler) -> list[type]:
    """The classes that say the probabilities of a sampler, and of those inside it.

    A class that inherits all of that from a sampler of mmreplay is as that one; of
    others, what their methods call may have been replaced.
    """
    kind, parts = type(sampler), ask(sampler, "parts")
    says = (each for each in kind.__mro__ if not vars(each).keys().isdisjoint(PROBABILITIES))
    source = next(says, Sampler)
    inside = sources_of_probabilities(parts[0]) if len(parts) == 1 else []
    return [source if source.__module__.startswith("mmreplay.") else kind, *inside]


def not_alike(samplers: Sequence[Sampler]) -> str | None:
    """Say what keeps samplers from drawing from their buffers as from one.

    Returns:
        None where they can.
    """
    sources = sources_of_probabilities(samplers[0])
    first: dict[str, Any] = ask(samplers[0], "joint_settings")
    for number, sampler in enumerate(samplers):
        own: dict[str, Any] = ask(sampler, "joint_settings")
        if sources_of_probabilities(sampler) != sources or own.keys() != first.keys():
            name = called_sampler(samplers[0])
            return f"buffer {number} has a {called_sampler(sampler)}, and buffer 0 a {name}"
        for argument, value in own.items():
            if np.any(value != first[argument]):
                return (
                    f"{argument} is {value!r} in buffer {number}, and {first[argument]!r} in "
                    "buffer 0"
                )
    return None
