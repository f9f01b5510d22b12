"""Compressed shards are sealed, put back and retired without losing a row."""

import pytest

from tools.torture import kills, powerloss
from tools.torture.rows import SHARDED


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("geometry", SHARDED, ids=lambda geometry: geometry.name)
@pytest.mark.sliced(1)
def test_no_power_cut_loses_or_invents_a_row_in_shards(geometry):
    report = powerloss.attack(40, 21, (geometry,))
    assert report.findings == {}, report.examples
    assert report.seen["how power_cut"] > 10
    assert report.seen["group tells"] > 10


@pytest.mark.slow
@pytest.mark.crash
def test_no_kill_loses_a_row_in_shards():
    report = kills.attack(12, 22, geometries=SHARDED)
    assert report.findings == {}, report.examples
    assert report.states == 12
    looks = report.seen["group tells"] + report.seen["group silent"]
    assert looks == 12 + report.seen["closed"]


@pytest.mark.slow
@pytest.mark.crash
def test_nothing_is_found_in_many_power_cuts_and_kills_of_shards():
    report = powerloss.attack(1000, 23, SHARDED)
    assert report.findings == {}, report.examples
    assert report.seen["group rows"] > 1000
    report = kills.attack(120, 24, geometries=SHARDED)
    assert report.findings == {}, report.examples
