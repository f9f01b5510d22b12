"""The attack on loaders finds nothing, and what is wrong it finds."""

import numpy as np
import pytest

from mmreplay.buffer.reader import GenerationReader
from tools.torture import loading

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_a_few_tries_find_nothing():
    report = loading.attack(2, 1)
    assert report.states == 2
    assert report.findings == {}, report.examples


@pytest.mark.slow
def test_more_tries_find_nothing():
    report = loading.attack(60, 2)
    assert report.findings == {}, report.examples
    assert len(report.seen) > 15


def test_a_misplaced_step_is_found(monkeypatch):
    copy = GenerationReader.copy_draw

    def moved(self, draw, *options):
        found = copy(self, draw, *options)
        found["reward"] = np.roll(found["reward"], 1, 0)
        return found

    monkeypatch.setattr(loading, "TRIES", (loading.live,))
    monkeypatch.setattr(GenerationReader, "copy_draw", moved)
    report = loading.attack(1, 3)
    assert any("rewards" in told for told in report.examples.values())
