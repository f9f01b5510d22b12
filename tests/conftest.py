"""What every test may use, and the settings that make test runs repeatable."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# A shared or virtual machine stalls for longer than any deadline worth having, and
# a failure that CI finds has to be found again here.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that starts alike in every test."""
    return np.random.default_rng(0)
