"""alf's options of draws as samplers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.adapters.alf.errors import RefusedError
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.samplers.base import Draw, Sampler, State, View
from mmreplay.samplers.combine import Wrapper, state_of
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.recent import RecentSampler, ignore_earliest
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.stratified import StratifiedSampler


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Options of draws.

    Attributes:
        ignored: Oldest rows of each environment that start no window.
        initial_priority: The least that a new row enters at; None for no priorities.
        recent_steps: Newest starts of each environment.
        recent_ratio: Share of a batch that is drawn from those.
        replacement: Draws are independent, not spread over each environment.
        seed: Of all draws.
    """

    ignored: int
    initial_priority: float | None
    recent_steps: int
    recent_ratio: float
    replacement: bool
    seed: int


class WindowSampling:
    """Samplers of windows of any length over one sampler of their starts."""

    def __init__(self, options: DrawOptions) -> None:
        """Make the sampler of starts."""
        self._options = options
        self._priorities: PrioritizedSampler | None = None
        starts: Sampler
        if options.initial_priority is None:
            starts = StratifiedSampler(options.seed, stratified=not options.replacement)
        else:
            self._priorities = PrioritizedSampler(
                1.0,
                1.0,
                eps=0.0,
                initial_priority=options.initial_priority,
                normalize="mean",
                seed=options.seed,
            )
            starts = _OverOpen(self._priorities)
        if options.recent_ratio > 0:
            starts = RecentSampler(
                options.recent_steps, options.recent_ratio, starts, seed=options.seed
            )
        self._starts = ignore_earliest(options.ignored, starts) if options.ignored else starts
        self._windows: dict[int, SequenceSampler] = {}

    def of(self, length: int) -> SequenceSampler:
        """Return the sampler of windows of a length, which cross episode ends."""
        if length not in self._windows:
            self._windows[length] = SequenceSampler(length, self._starts, boundary="any")
        return self._windows[length]

    def check(self, buffer: ReplayBuffer, length: int) -> None:
        """Refuse windows that are longer than an environment.

        Raises:
            RefusedError: One is, where every environment is drawn from.
        """
        if length < 1:
            raise RefusedError(f"batch_length must be at least 1, got {length}.")
        least = int(buffer.span.lengths.min()) - self._options.ignored
        if self._priorities is None and least < length:
            raise RefusedError(
                f"cannot draw windows of {length} steps: an environment has only "
                f"{least} that are not ignored. Add steps first."
            )

    @property
    def prioritized(self) -> bool:
        """Whether draws are prioritized."""
        return self._priorities is not None

    def check_prioritized(self) -> None:
        """Refuse priorities of a buffer without prioritized draws."""
        if self._priorities is None:
            raise RefusedError(
                "update_priority needs a buffer with priorities. Make it with "
                "prioritized_sampling=True."
            )

    def weights(self, batch: Batch) -> NDArray[np.float32] | None:
        """Return priorities over the mean of those above 0; None without priorities."""
        if self._priorities is None:
            return None
        return (1 / batch.weights).astype(np.float32)  # type: ignore[no-any-return]  # a batch holds any arrays

    def initial_priority(self, buffer: ReplayBuffer) -> float:
        """Return the priority of a new row."""
        self.check_prioritized()
        assert self._priorities is not None
        assert self._options.initial_priority is not None
        known = self._priorities.priorities
        with (view := buffer.view).lock:
            known.follow(view)
            return max(known.highest(), self._options.initial_priority)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws; priorities are in the buffer's folder."""
        return dict(self._starts.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._starts.load_state_dict(state)


class _OverOpen(Wrapper):
    """Draws by priority, with weights over the mean of priorities above 0.

    The mean of all priorities would also scale the steps of the other sampler where
    two samplers are mixed.
    """

    def __init__(self, sampler: PrioritizedSampler) -> None:
        super().__init__([sampler])
        self._sampler = sampler

    def draw(self, view: View, batch_size: int) -> Draw:
        """See `Sampler.draw`."""
        draw = self._sampler.draw(view, batch_size)
        known = self._sampler.priorities
        share = known.distribution.num_open / known.num_legal
        return replace(draw, weights=(draw.weights / share).astype(np.float32))

    def state_dict(self, priorities: bool = False) -> State:
        """Return the state of the sampler."""
        return state_of(self._sampler, priorities)

    def load_state_dict(self, state: State) -> None:
        """See `Sampler.load_state_dict`."""
        self._sampler.load_state_dict(state)
