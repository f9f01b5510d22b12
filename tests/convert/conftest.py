"""What several tests of conversions need."""

import pytest

from mmreplay.convert import direct_file

PAGE = 4096


@pytest.fixture
def small(monkeypatch):
    """Files of any size go past the cache, in slabs of a few pages."""
    monkeypatch.setattr(direct_file, "DIRECT_NBYTES", 0)
    monkeypatch.setattr(direct_file, "SLAB_NBYTES", 4 * PAGE)
    monkeypatch.setattr(direct_file, "LEAST_SLAB_NBYTES", 4 * PAGE)
