"""What several tests of loaders need."""

import pytest

from tests.loader.support import fill


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two buffers, the second one of 60 steps."""
    folder = tmp_path_factory.mktemp("several")
    fill(folder / "a")
    fill(folder / "b", count=60)
    return [folder / "a", folder / "b"]
