"""The moving mean equals numpy's, also of large values."""

import numpy as np
import pytest

from mmreplay.episodes.smoothing import moving_mean, smoothing_window


@pytest.mark.parametrize("offset", [0.0, 1e12])
@pytest.mark.parametrize(("count", "window"), [(1, 1), (50, 20), (500, 37)])
def test_means_are_numpys(rng, offset, count, window):
    values = rng.normal(size=count) + offset
    expected = np.convolve(values - offset, np.full(window, 1 / window), "valid")
    found = moving_mean(values, window)
    assert found.shape == (count - window + 1,)
    np.testing.assert_allclose(found - offset, expected, atol=1e-12 + 1e-15 * offset)


def test_windows_grow_with_the_number_of_episodes():
    assert [smoothing_window(count) for count in (0, 5, 60, 1000, 100_000)] == [0, 1, 20, 20, 2000]
