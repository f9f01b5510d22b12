"""What several tests of loaders need."""

import pytest
import torch

from tests.loader.support import fill


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two buffers, the second one of 60 steps."""
    folder = tmp_path_factory.mktemp("several")
    fill(folder / "a")
    fill(folder / "b", count=60)
    return [folder / "a", folder / "b"]


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch wait a second, not five, for each worker that met an error."""
    utilities = torch.utils.data._utils
    for module in (utilities, utilities.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 1.0)
