"""What every test of these sources uses."""

import pytest

from mmreplay.disk import files


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    """Wait for no device: what these tests look at is in the page cache."""
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)
