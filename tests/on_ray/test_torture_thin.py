"""A slice of ``python -m tools.torture thin``, and that it would notice."""

import pytest

from mmreplay.ray.lanes import Lanes
from mmreplay.ray.thin import ThinWriter
from tools.torture import thin


@pytest.mark.crash
def test_thin_writers_count_what_they_lose_by_kills_and_removals():
    report = thin.attack(8, 5)
    assert report.findings == {}, report.examples
    assert report.states == 8
    assert report.seen["lost rows"] > 0


@pytest.mark.slow
@pytest.mark.crash
def test_nothing_is_found_in_a_hundred_kills_and_removals():
    report = thin.attack(100, 6)
    assert report.findings == {}, report.examples
    assert set(thin.KINDS) < set(report.seen)


@pytest.mark.crash
def test_a_shard_that_goes_on_in_a_folder_of_before_is_noticed(monkeypatch):
    monkeypatch.setattr(thin, "KINDS", ("again",))
    monkeypatch.setattr(thin, "WAIT_S", 3.0)
    monkeypatch.setattr(Lanes, "in_place", True)
    # Rows that no one counts, or commits that fail for ever.
    assert thin.attack(1, 5).findings.keys() & {"not counted", "stuck"}


@pytest.mark.crash
def test_a_writer_that_counts_no_loss_is_noticed(monkeypatch):
    monkeypatch.setattr(thin, "KINDS", ("again",))
    monkeypatch.setattr(ThinWriter, "_count_lost", lambda *_: None)
    assert "not counted" in thin.attack(1, 5).findings
