"""A closed buffer of whole blocks, to be damaged."""

import pytest

from tests.verify.support import make


@pytest.fixture
def path(tmp_path, rng):
    return make(tmp_path / "b", rng)
