"""One distribution over several buffers: a batch is drawn as from one large buffer.

Each buffer s has the sum of its masses M_s. A batch of B steps has B points in [0, 1),
stratified over all buffers at once. Buffer s takes the points in its part of the line,
``f_s = M_s / sum(M)`` long, and they are handed to it as shares in [0, 1) of its own
mass: so a buffer whose masses moved since they were summed still draws in proportion
to its masses of now. A step's probability is f_s times its probability in its buffer.

With u_b uniform in the b-th of B segments, the points have density B on [0, 1). Step i
of buffer s is drawn by points in an interval of length ``f_s * m_i / M_s``, M_s being
its sum when it draws. So it is drawn ``B * q_i`` times on average, with ``q_i = f_s *
m_i / M_s``: weights ``(N * q_i) ** -1`` are unbiased, whatever the masses did since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.samplers.base import Draw, Sampler, State, View

Numbers = NDArray[np.float64]
_steps = kernels.load("steps")


@dataclass(frozen=True, slots=True)
class Mass:
    """What a sampler draws from one buffer now.

    Attributes:
        total: Sum of the masses of all legal starts.
        num_legal: Legal starts, also those of mass 0.
        lowest: The least mass above 0; infinity where there is none.
        highest: The highest priority, at which new rows enter.
    """

    total: float
    num_legal: int
    lowest: float
    highest: float


@runtime_checkable
class ShareSampler(Protocol):
    """A sampler that draws what given shares of its mass fall on."""

    def mass(self, view: View, step: int) -> Mass:
        """Return what there is to draw from.

        Args:
            view: The buffer now.
            step: The draw's, for exponents that follow a schedule.
        """

    def draw_at(self, view: View, shares: Numbers) -> Draw:
        """Draw the steps that shares fall on; `draw` is not affected.

        Args:
            view: The buffer now.
            shares: float64 ``[B]`` in ``[0, 1)``, of the mass.

        Returns:
            In the order of the shares; weights are ones, and the key is 0.

        Raises:
            EmptyError: There is no mass.
        """

    def enter_at(self, priority: float) -> None:
        """Have rows that are first seen from now on enter at least at a priority."""


@runtime_checkable
class JointSampler(ShareSampler, Protocol):
    """A sampler by priority whose buffer can be drawn from as a part of a larger."""

    @property
    def joint_settings(self) -> dict[str, object] | None:
        """What has to be equal in all buffers; None: it cannot draw so."""

    def joint_weights(self, step: int, masses: Sequence[Mass]) -> JointWeights:
        """Weights of a batch that is drawn from several buffers as one.

        Args:
            step: The batch's.
            masses: Of each buffer.
        """

    def points(self, numbers: Numbers) -> Numbers:
        """Points of batches in ``[0, 1)`` from independent numbers, stratified or not.

        Args:
            numbers: float64 ``[B]``, in ``[0, 1)``, or ``[N, B]`` of several batches.
        """


def plan(totals: Numbers, points: Numbers) -> tuple[Numbers, list[Numbers]]:
    """Divide the points of a batch between buffers.

    Args:
        totals: float64 ``[R]``, sum of masses of each buffer, one of them above 0.
        points: float64 ``[B]``, in ``[0, 1)``.

    Returns:
        float64 ``[R]``, the share of each buffer in all mass, and for each buffer its
        points as shares of its own mass, in ``[0, 1)``. Over one buffer they are the
        points themselves.

    Example:
        >>> from mmreplay.samplers.joint import plan
        >>> fractions, shares = plan(np.array([1.0, 3.0]), np.array([0.125, 0.5, 0.75]))
        >>> fractions.tolist(), [each.round(3).tolist() for each in shares]
        ([0.25, 0.75], [[0.5], [0.333, 0.667]])
    """
    fractions, shares, _ = plan_batches(totals, points[np.newaxis])
    return fractions, shares


def plan_batches(
    totals: Numbers, points: Numbers
) -> tuple[Numbers, list[Numbers], list[list[int]]]:
    """Divide the points of several batches between buffers; see `plan`.

    Args:
        totals: float64 ``[R]``, sum of masses of each buffer, one of them above 0.
        points: float64 ``[N, B]``, in ``[0, 1)``, of each batch.

    Returns:
        The share of each buffer in all mass; for each buffer its points of all batches,
        batch by batch, as shares of its own mass; and for each buffer where the points
        of each batch end.
    """
    num_batches, count = points.shape
    if len(totals) == 1:
        stops = [count * (number + 1) for number in range(num_batches)]
        return np.ones(1), [points.reshape(-1)], [stops]
    fractions: Numbers = totals / totals.sum()
    divided = np.empty(points.size)
    counts = np.empty((len(totals), num_batches), np.int64)
    _steps.divide(fractions, np.ascontiguousarray(points), divided, counts)
    shares, all_stops, first = [], [], 0
    for own in counts.tolist():
        stops = own if num_batches == 1 else list(accumulate(own))
        shares.append(divided[first : first + stops[-1]])
        all_stops.append(stops)
        first += stops[-1]
    return fractions, shares, all_stops


@dataclass(frozen=True, slots=True)
class JointWeights:
    """Importance weights of a batch by the probabilities of its steps in all buffers.

    Attributes:
        beta: The exponent.
        scale: Probability of weight 1; 0 for the least of the batch.
    """

    beta: float
    scale: float

    def of(self, probabilities: Numbers) -> NDArray[np.float32]:
        """Weights of probabilities, ``[B]``, or ``[N, B]`` of several batches."""
        scale = self.scale or np.minimum.reduce(probabilities, -1, keepdims=True)
        weights: Numbers = (scale / probabilities) ** self.beta
        return weights.astype(np.float32)


class DrawAtShares(Sampler):
    """One buffer's part of a batch: draws the same shares whenever it is asked.

    Where rows were overwritten between draw and copy, the same shares are drawn again,
    with the probabilities of then.
    """

    keeps_priorities = False

    def __init__(
        self, sampler: ShareSampler, shares: Numbers, key: int, weights: JointWeights
    ) -> None:
        """Take a part.

        Args:
            sampler: Of the buffer.
            shares: float64 ``[B]``, from `plan`.
            key: Of the batch; see `Draw.key`.
            weights: Of the whole batch.
        """
        self.sampler, self._shares, self._key = sampler, shares, key
        self.weights = weights
        self.form = getattr(sampler, "form", None)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw the steps at the shares, whatever the batch_size."""
        draw = self.sampler.draw_at(view, self._shares.copy())
        draw.key = self._key
        return draw

    def state_dict(self) -> State:
        """Nothing: it is of one batch."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


def not_alike(samplers: Sequence[object]) -> str | None:
    """Say what keeps samplers from drawing from their buffers as from one.

    Returns:
        None where they can.
    """
    first: dict[str, object] | None = None
    for number, sampler in enumerate(samplers):
        own = getattr(sampler, "joint_settings", None)
        if own is None:
            return f"buffer {number} has a {type(sampler).__name__}"
        first = own if first is None else first
        for name, value in own.items():
            if name not in first or value != first[name]:
                other = f"{first[name]!r} in buffer 0" if name in first else "no such"
                return f"{name} is {value!r} in buffer {number}, and {other}"
        if len(own) < len(first):
            return f"buffer {number} has a {type(sampler).__name__}"
    return None
