"""Batches made of several samplers' draws, in exact shares."""

from __future__ import annotations

from collections.abc import Sequence

from mmreplay.errors import SchemaError, shown
from mmreplay.samplers.base import Draw, Sampler, State, View
from mmreplay.samplers.checks import call_repr
from mmreplay.samplers.forms import alike
from mmreplay.samplers.joined import draw_joined, state_of
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.shares import Shares
from mmreplay.samplers.states import check_kind, integer, parts
from mmreplay.samplers.wrapping import Wrapping


class MixtureSampler(Wrapping):
    """Draws a share of each batch with each of several samplers, over one buffer.

    ``MixtureSampler([(PrioritizedSampler(), 3), (UniformSampler(), 1)])`` draws 192
    and 64 of 256, in that order; see `Shares` for batches that do not divide. A part
    that draws fewer (a `ShuffledSampler` at an epoch's end) makes the batch shorter,
    and gets what it missed later. Whole episodes are padded to the longest of all
    parts. For shares over several buffers see `concat`.

    Probabilities and weights are of the sampler that drew the step, not of the
    mixture: samplers do not know how likely another one's steps are to them.
    Priorities go to every part that keeps some, whoever drew the steps.

    Example:
        >>> newest = mr.ShrinkingSampler(1000, seed=0)
        >>> sampler = mr.MixtureSampler([(mr.UniformSampler(seed=0), 3), (newest, 1)])
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> len(buffer.sample(32))
        32
    """

    def __init__(
        self, samplers: Sequence[tuple[Sampler, float]], *, seed: int | None = None
    ) -> None:
        """Make a sampler.

        Args:
            samplers: Each with its share, above 0; only the shares' ratios count.
            seed: Of `Draw.key` alone; None takes one from the system.

        Raises:
            SchemaError: A share is not above 0, there is no sampler, or what they draw
                does not fit one batch: windows of several lengths, ragged episodes.
        """
        if not isinstance(samplers, Sequence):
            raise SchemaError(
                f"samplers: got {shown(samplers)}, expected a list of pairs of a "
                "sampler and its share; such as [(mmreplay.UniformSampler(), 1)]"
            )
        pairs = [_pair(given) for given in samplers]
        self._shares = Shares([share for _, share in pairs])
        self._parts = alike([sampler for sampler, _ in pairs])
        self._random = StepGenerator(seed)
        self._step = 0

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(
            self,
            samplers=list(
                zip(self._parts, self._shares.fractions.tolist(), strict=True)
            ),
            seed=self._random.given_seed,
        )

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch, part by part; see `Sampler.draw`.

        Raises:
            EmptyError: A part has nothing to draw.
            SchemaError: Some draw windows, and not all of the same length.
        """
        counts = self._shares.split(batch_size)
        asked = [
            (sampler, view, count)
            for sampler, count in zip(self._parts, counts, strict=True)
            if count
        ]
        draw, drawn = draw_joined(asked, self._random.key(self._step))
        lengths = iter(drawn)
        self._shares.count([next(lengths) if count else 0 for count in counts])
        self._step += 1
        return draw

    def state_dict(self, priorities: bool = False) -> State:
        """Seed, step, what each part has drawn, and the states of the parts.

        Args:
            priorities: With those that parts keep, as arrays.
        """
        return {
            "kind": "MixtureSampler",
            "seed": self._random.seed,
            "step": self._step,
            "parts": [state_of(sampler, priorities) for sampler in self._parts],
            **self._shares.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "MixtureSampler")
        seed, step = integer(state, "seed"), integer(state, "step")
        others = parts(state, "parts", len(self._parts))
        before = self.state_dict(priorities=True)
        try:
            self._shares.load_state_dict(state)
            for sampler, other in zip(self._parts, others, strict=True):
                sampler.load_state_dict(other)
        except BaseException:
            # Half of another state would be a third one.
            self._shares.load_state_dict(before)
            for sampler, mine in zip(self._parts, before["parts"], strict=True):
                sampler.load_state_dict(mine)
            raise
        self._random, self._step = StepGenerator(seed), step


def _pair(given: object) -> tuple[object, float]:
    """A sampler and its share."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return given[0], given[1]
    raise SchemaError(
        f"samplers: got {shown(given)} among them, expected pairs of a sampler and its "
        "share; such as [(mmreplay.UniformSampler(), 1)]"
    )
