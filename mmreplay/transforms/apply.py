"""A function of the user's, applied to every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmreplay.errors import SchemaError, called, refuse_masked, shown
from mmreplay.ragged import Ragged
from mmreplay.transforms.base import Bound, Fields, Layer, Over
from mmreplay.transforms.base_steps import BaseSteps
from mmreplay.transforms.outline import Outline


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of the finished batch, such as an augmentation.

    It gets a dict of arrays by path, ``[B, *shape]``, or ``[B, T, *shape]`` of windows,
    and returns such a dict; it may change, add and leave out fields. Fields that vary
    are `Ragged` of shape ``[B]``, or ``[B, T]`` of windows, and it may return `Ragged`
    under any name. bfloat16 numbers are uint16 bits. It runs wherever batches are made,
    in worker processes, too, to which it must be picklable: a function of a module. As
    what it returns is known only then, no transform but another `Apply` may follow.

    Attributes:
        function: ``function(fields)``, or ``function(fields, generator)``.
        random: Give it a `numpy.random.Generator`, which the draw determines: the same
            draw gives the same batch. Use no other source of chance.

    Example:
        >>> def clip_rewards(batch):
        ...     return {"reward": np.clip(batch["reward"], -1, 1)}
        >>> transform = mr.Apply(clip_rewards)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[transform])
        >>> batch = buffer.sample(32)
    """

    function: Callable[..., Mapping[str, Any]]
    random: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not callable(self.function):
            raise SchemaError(
                f"Apply needs a function of a batch's fields, got {shown(self.function)}. Pass one."
            )

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`."""
        stream = len(outline.names)

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _Applied(below, base_steps, self, stream)

        return Bound(outline, over)


class _Applied(Over):
    """A finished batch with a function applied to it."""

    def __init__(self, below: Layer, base_steps: BaseSteps, apply: Apply, stream: int) -> None:
        super().__init__(below, base_steps)
        self._apply = apply
        self._stream = stream

    def finish(self, fields: Fields) -> Fields:
        """Apply it after those below; see `Layer.finish`."""
        lead: tuple[int, ...] = (len(self.base_steps.positions),)
        if self.base_steps.length is not None:
            lead = (lead[0] // self.base_steps.length, self.base_steps.length)
        below = self.below.finish(fields)
        given = {p: a.reshape(*lead, *a.shape[1:]) for p, a in below.items()}
        apply = self._apply
        chance = (self.base_steps.random(self._stream),) if apply.random else ()
        found = called("Apply's function", apply.function, given, *chance)
        if not isinstance(found, Mapping):
            raise SchemaError(
                f"Apply: {apply.function!r} must return a dict of arrays by path, got "
                f"{type(found).__name__}. Return the fields."
            )
        return {path: _flat(path, found[path], lead) for path in found}


def _flat(path: str, values: object, lead: tuple[int, ...]) -> Any:
    refuse_masked(values, f"Apply: {path!r}")
    array: Any = values.numpy() if isinstance(values, Ragged) else np.asarray(values)
    if array.shape[: len(lead)] != lead:
        raise SchemaError(
            f"Apply: the shape of {path!r} must begin with {list(lead)}, got "
            f"{list(array.shape)}. Return a value for every step."
        )
    if isinstance(array, Ragged):
        offsets, total = array.offsets, len(array.values)
        if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
            raise SchemaError(
                f"Apply: offsets of {path!r} must rise from 0 to {total}, its items, "
                f"got {shown(offsets.tolist())}. Return where each value begins, and "
                "the end of the last."
            )
    return array.reshape(math.prod(lead), *array.shape[len(lead) :])
