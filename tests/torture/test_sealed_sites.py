"""The operations of a compressed buffer fail, are killed and lose power at each call.

What the sealing thread does is done at once, by who gives it: so each of its disk calls
is one whose number says which. There are hundreds: every eleventh is attacked, and all
with ``TORTURE_STRIDE=1``.
"""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mmreplay.storage.zarr.sealing import Sealer
from tests.slices import count
from tests.torture import test_call_sites as sites
from tests.torture import test_snapshot_sites as copies
from tests.torture.test_call_sites import (  # noqa: F401
    prepared,
    test_a_fault_at_any_call_is_reported_and_releases_everything,
    test_a_power_cut_or_kill_at_any_call_leaves_a_whole_buffer,
    test_a_short_write_at_any_call_is_carried_on,
)


@pytest.fixture(autouse=True)
def sealed(monkeypatch):
    """Compressed buffers, sealed without a thread."""
    geometry = replace(sites.GEOMETRY, engine="zarr")
    monkeypatch.setattr(sites, "GEOMETRY", geometry)
    monkeypatch.setattr(sites, "STRIDE", int(os.environ.get("TORTURE_STRIDE", "11")))
    monkeypatch.setattr(copies, "GEOMETRY", geometry)

    def submit(self, work):
        if self.failure is None:
            self._submitted += 1
            items = iter([work, None])
            self._run(SimpleNamespace(get=lambda: next(items)))

    monkeypatch.setattr(Sealer, "submit", submit)


def sealings(path):
    return list((path / "data-000001" / "zarr").rglob("c.*"))


def test_what_is_attacked_is_sealed(prepared):  # noqa: F811
    assert sealings(prepared / "buffer")


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("name", ["add over the wrap", "commit"])
@pytest.mark.sliced(1)
def test_a_kill_or_power_cut_at_some_calls_loses_nothing(
    name,
    prepared,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """A slice of the whole, which is slow."""
    total = sites.num_calls(name, prepared, tmp_path)
    monkeypatch.setattr(sites, "num_calls", lambda *_: 0)
    monkeypatch.setattr(sites, "IMAGES", 1)
    crash = test_a_power_cut_or_kill_at_any_call_leaves_a_whole_buffer
    for at in range(0, total, count(11, 33)):
        monkeypatch.setattr(sites, "range", lambda *_, at=at: [at], raising=False)
        crash(name, prepared, tmp_path)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("make", [copies.take, copies.mend], ids=["link", "repair"])
def test_a_power_cut_or_kill_leaves_a_copy_whole_or_marked(
    prepared,  # noqa: F811
    tmp_path,
    make,
):
    with sites.ReplayBuffer.open(prepared / "buffer", "r+") as buffer:
        buffer.set_statistics({"mean": 1})
    attack = copies.test_a_power_cut_or_kill_at_a_call_leaves_a_copy_whole_or_marked
    attack(prepared, tmp_path, make, False, sites.STRIDE == 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT", "EINTR"])
def test_a_fault_at_a_call_of_a_snapshot_is_reported(
    prepared,  # noqa: F811
    tmp_path,
    number,
):
    with sites.ReplayBuffer.open(prepared / "buffer", "r+") as buffer:
        buffer.set_statistics({"mean": 1})
    code = getattr(errno, number)
    fault = OSError(code, os.strerror(code))
    attack = copies.test_a_fault_at_a_call_is_reported_and_releases_everything
    attack(prepared, tmp_path, fault, copies.take, sites.STRIDE == 1)
