"""What several tests of conversions need."""

import pytest

from mmreplay.convert import device

PAGE = 4096


@pytest.fixture
def small(monkeypatch):
    """Files of any size go past the cache, in slabs of a few pages."""
    monkeypatch.setattr(device, "DIRECT_NBYTES", 0)
    monkeypatch.setattr(device, "SLAB_NBYTES", 4 * PAGE)
    monkeypatch.setattr(device, "LEAST_SLAB_NBYTES", 4 * PAGE)
