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

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels

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


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """Batches divided between buffers, or between the only one and none.

    Attributes:
        fractions: float64 ``[R]``, the share of each buffer in all mass.
        shares: Of each buffer its points of all batches, batch by batch, as shares of
            its own mass, in ``[0, 1)``. Over one buffer they are the points themselves.
        stops: Of each buffer where the points of each batch end.

    Example:
        >>> from mmreplay.samplers.joint import DrawPlan
        >>> plan = DrawPlan.of(np.array([1.0, 3.0]), np.array([0.125, 0.5, 0.75]))
        >>> plan.fractions.tolist(), [each.round(3).tolist() for each in plan.shares]
        ([0.25, 0.75], [[0.5], [0.333, 0.667]])
    """

    fractions: Numbers
    shares: list[Numbers]
    stops: list[list[int]]

    @classmethod
    def of(cls, totals: Numbers, points: Numbers) -> Self:
        """Divide the points of batches.

        Args:
            totals: float64 ``[R]``, sum of masses of each buffer, one of them above 0.
            points: float64 ``[B]``, in ``[0, 1)``, or ``[N, B]`` of several batches.
        """
        points = np.atleast_2d(points)
        num_batches, count = points.shape
        if len(totals) == 1:
            stops = [count * (number + 1) for number in range(num_batches)]
            return cls(np.ones(1), [points.reshape(-1)], [stops])
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
        return cls(fractions, shares, all_stops)


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
        if self.beta == 0:
            return np.ones(probabilities.shape, np.float32)
        scale = self.scale or np.minimum.reduce(probabilities, -1, keepdims=True)
        weights: Numbers = (scale / probabilities) ** self.beta
        return weights.astype(np.float32)
