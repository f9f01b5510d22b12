"""Steps in proportion to their priorities."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mmreplay.samplers.checks import call_repr, finite, whole
from mmreplay.samplers.laws import MAX_ALPHA, Powers
from mmreplay.samplers.prioritizing import (
    Normalize,
    Options,
    Prioritizing,
    PriorityDrawing,
)
from mmreplay.samplers.schedules import Schedule, Scheduled

Ids = NDArray[np.int64]


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
        floor = finite("eps", eps)
        every = whole("alpha_every", alpha_every, 1, "1 looks at alpha at every draw")
        options = Options(
            Scheduled("beta", beta, 1.0), initial_priority, stratified, normalize,
            eta, name,
        )  # fmt: skip
        self._eps, self._alpha_every = floor, every
        self._work = Prioritizing(
            "PrioritizedSampler",
            partial(Powers, alpha=power, eps=floor, every=every),
            options,
            seed,
        )

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(
            self, alpha=self._alpha, beta=self._beta, eps=self._eps,
            alpha_every=self._alpha_every, **self._work.options,
        )  # fmt: skip
