"""Fixtures of several files."""

import pytest

from mmreplay.samplers import shuffled
from tests.buffer.support import Twin


@pytest.fixture
def ring(tmp_path):
    """A ring of 48 rows of two environments, written round more than once."""
    twin = Twin(tmp_path / "ring", 48, 2, stored=True)
    twin.extend([["", ""]] * 70)
    yield twin.buffer
    twin.buffer.close()


@pytest.fixture(params=[8192, 3], ids=["chunk-8192", "chunk-3"])
def chunk(request, monkeypatch):
    """Places are worked out in pieces that end within batches, too."""
    monkeypatch.setattr(shuffled, "CHUNK", request.param)
