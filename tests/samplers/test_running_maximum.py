"""Greatest and least numbers, against numpy's own, whatever changes."""

import numpy as np
import pytest

from mmreplay.samplers import priority_distribution
from mmreplay.samplers.priority_distribution import RunningMaximum

KINDS = [(np.maximum, 0.0, np.float32), (np.minimum, np.inf, np.float64)]


def expected(numbers, ufunc, nothing):
    present = numbers[numbers > 0]
    return float(ufunc.reduce(present)) if len(present) else nothing


@pytest.mark.parametrize(("ufunc", "nothing", "dtype"), KINDS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 256, 300, 5000])
@pytest.mark.parametrize(("few", "few_numbers"), [(2, 0), (4096, 0), (2, 4096)])
def test_looks_follow_every_change(monkeypatch, rng, ufunc, nothing, dtype, size, few, few_numbers):
    monkeypatch.setattr(priority_distribution, "FEW_BLOCKS", few)
    monkeypatch.setattr(priority_distribution, "FEW_NUMBERS", few_numbers)
    numbers = np.zeros(size, dtype)
    found = RunningMaximum(ufunc, nothing)
    assert found.look(numbers) == nothing
    for turn in range(300):
        places = rng.integers(0, size, rng.integers(0, 12))
        found.note(places)
        numbers[places] = rng.integers(0, 3 if turn % 50 > 40 else 40, len(places)) / 8
        if turn % 3:
            assert found.look(numbers) == expected(numbers, ufunc, nothing)


def test_more_changes_than_blocks_are_looked_through_whole(rng, monkeypatch):
    monkeypatch.setattr(priority_distribution, "FEW_NUMBERS", 0)
    numbers = rng.random(1000).astype(np.float32)
    found = RunningMaximum(np.maximum, 0.0)
    found.look(numbers)
    for _ in range(50):
        places = rng.integers(0, 1000, 100)
        found.note(places)
        numbers[places] = 2 + rng.random(100)
    assert found._blocks is None
    assert found.look(numbers) == numbers.max()
