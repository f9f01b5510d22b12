"""A slice of ``python -m tools.torture actors``, and that it would notice."""

import pytest

from mmreplay.disk.lock import WriterLock
from tests.slices import count
from tools.torture import actors


@pytest.mark.crash
@pytest.mark.slow
def test_eight_writers_and_a_learner_get_along_while_writers_die():
    states = count(6, 2)
    report = actors.attack(states, 5)
    assert report.findings == {}, report.examples
    assert report.states == states
    assert report.seen["rows"] >= states * actors.BATCH


@pytest.mark.slow
@pytest.mark.crash
def test_nothing_is_found_in_many_deaths():
    report = actors.attack(100, 6)
    assert report.findings == {}, report.examples


@pytest.mark.crash
def test_a_lock_that_lets_everybody_in_is_noticed(monkeypatch):
    monkeypatch.setattr(actors, "NUM_ACTORS", 1)
    monkeypatch.setattr(WriterLock, "_take", lambda self, folder: None)
    monkeypatch.setattr(WriterLock, "release", lambda self: self._file.close())
    report = actors.attack(1, 5)
    assert "lock" in report.findings
