"""The moving mean over episodes, of the plot and of the page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMOOTHED = 20
"""Episodes that a mean is taken over, at least."""


def smoothing_window(count: int) -> int:
    """Return how many episodes a moving mean is taken over; below 2 for none.

    Longer over many episodes, or the line is as restless as the points.

    Args:
        count: Episodes.
    """
    return min(max(SMOOTHED, count // 50), count // 3)


def moving_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return means of neighbouring values.

    Args:
        values: Finite, float64 ``[N]``, N at least window.
        window: Values in a mean, at least 1.

    Returns:
        float64 ``[N - window + 1]``; the first is of the first values.
    """
    # Sums of what differs from the mean: of large values no digit is lost.
    middle = values.mean()
    sums = np.concatenate([[0.0], np.cumsum(values - middle)])
    means: NDArray[np.float64] = middle + (sums[window:] - sums[:-window]) / window
    return means
