"""A few real power cuts of ``python -m tools.torture outages``, where root may."""

import os

import pytest

from mmreplay.disk.files import Disk
from mmreplay.testing.disks import using
from tools.torture import outages


def attacked(kind, num_outages):
    try:
        return outages.attack(kind, num_outages, 7)
    except outages.Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("kind", outages.KINDS)
def test_no_power_cut_of_a_real_file_system_loses_a_committed_row(kind):
    report = attacked(kind, 10)
    assert report.findings == {}, report.examples
    assert report.seen[f"{kind}: power_cut"] > 5


class Careless(Disk):
    """A disk whose data is not synced, only its records."""

    def datasync(self, fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("COMMIT"):
            super().datasync(fd)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("kind", outages.KINDS)
def test_a_power_cut_finds_what_was_not_synced(kind):
    with using(Careless()):
        assert attacked(kind, 6).findings
