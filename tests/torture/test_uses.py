"""A slice of ``python -m tools.torture uses``, and that it would notice."""

import pytest

from mmreplay.samplers.holding import Claims
from mmreplay.samplers.uses import Reservation
from tools.torture import uses

pytestmark = [pytest.mark.crash, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


def test_no_death_of_a_learner_makes_a_use_twice_or_loses_more_than_a_batch():
    report = uses.attack(6, 3)
    assert report.findings == {}, report.examples
    assert report.states == 6
    assert report.seen["uses"] > 0


@pytest.mark.slow
def test_nothing_is_found_in_many_deaths():
    report = uses.attack(300, 4)
    assert report.findings == {}, report.examples


def test_uses_that_are_stored_with_the_draw_are_noticed(monkeypatch):
    call = Claims.call

    def storing(self, draw, *args):
        result = call(self, draw, *args)
        self.store()
        self.clear()
        return result

    monkeypatch.setattr(Claims, "call", storing)
    report = uses.attack(4, 5, ("loader",))
    assert set(report.findings) == {"lost"}, report.examples


@pytest.mark.slow
def test_uses_that_are_stored_after_the_hand_over_are_noticed(monkeypatch):
    monkeypatch.setattr(Reservation, "store", Reservation.release)
    report = uses.attack(3, 6, ("draws",))
    assert "forgotten" in report.findings
