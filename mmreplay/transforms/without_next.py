"""Steps without their next observations, for imitation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mmreplay.transforms.base import Bound, Layer
from mmreplay.transforms.base_steps import BaseSteps
from mmreplay.transforms.outline import Outline


@dataclass(frozen=True, slots=True)
class WithoutNext:
    """Batches without next observations: each step is a legal start.

    Imitation learns actions from observations and needs no next observation. A step
    whose next observation is unknown, such as the last one of a truncated episode or
    the newest one, is then drawn as any other, and its `Batch.mask` is true in windows
    and episodes. No row after a step is read for its observation, so that batches cost
    one row less a step.

    `NStep`, `Delta`, `HER`, `GAE`, `LambdaReturn` and a `DiscountedReturn` that
    bootstraps need next observations, and are refused beside it.

    Example:
        >>> without = [mr.WithoutNext()]
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=without)
        >>> "next_observation" in buffer.sample(32)
        False
    """

    described: ClassVar[bool] = True

    def bind(self, outline: Outline) -> Bound:
        """Leave the next observations out; see `Transform.bind`."""
        left_out = set(outline.next_obs.values())
        above = replace(
            outline,
            fields={n: f for n, f in outline.fields.items() if n not in left_out},
            read_at={n: at for n, at in outline.read_at.items() if n not in left_out},
            next_obs={},
        )
        return Bound(above, _below, finishes=False)


def _below(below: Layer, base_steps: BaseSteps) -> Layer:
    """The layer below, which shows what is left."""
    return below
