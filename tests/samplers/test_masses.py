"""Masses have 24 bits, wherever they are made, and trees of others all of theirs."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError
from mmreplay.page.priorities import Weighing
from mmreplay.samplers.priority_distribution import Proportional, RankBased, Scheduled
from mmreplay.samplers.priority_store import PriorityStore
from mmreplay.samplers.sum_tree import to_masses
from tests.buffer.support import Twin
from tests.samplers.prioritized import filled, update
from tests.samplers.priority_model import mass

COUNT = 3000


@pytest.fixture
def priorities(rng):
    """Of all sizes that a priority has, and 0."""
    values = 10.0 ** rng.uniform(-38, 38, COUNT)
    values[:9] = 0
    return values.astype(np.float32)


def proportional(alpha, eps):
    return Proportional(COUNT, Scheduled("alpha", alpha, 4.0), eps, 1000)


@pytest.mark.parametrize("alpha", [0, 0.3, 0.5, 0.6, 1.0, 2.0, 2.5, 4.0])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_masses_of_priorities_are_powers_of_24_bits(priorities, alpha, eps):
    expected = [mass(float(value) + eps, alpha) for value in priorities]
    rows, made = np.arange(COUNT), proportional(alpha, eps)
    made.put(rows, priorities)
    assert made._tree.leaves.tolist() == expected
    made.put(rows, np.ones(COUNT, np.float32))
    assert made.renew(rows, priorities)
    assert made._tree.leaves.tolist() == expected
    page = Weighing(None, alpha, eps, 1.0)
    assert page.masses(priorities).tolist() == expected


@pytest.mark.parametrize("alpha", [0, 0.5, 0.7, 1.0, 4.0])
def test_masses_of_ranks_are_powers_of_24_bits(priorities, alpha):
    made = RankBased(COUNT, Scheduled("alpha", alpha, 4.0), None)
    expected = [mass(rank, -alpha) for rank in range(1, COUNT + 1)]
    made.put(np.arange(COUNT), priorities)
    assert made._tree.leaves.tolist() == expected
    made.ready(0, priorities)
    assert made._tree.leaves.tolist() == expected


def test_powers_that_differ_in_the_last_bit_give_one_mass(rng):
    numbers = rng.random(1_000_000) * 8 + 1e-6
    powers = np.power(numbers, 0.6)
    for side in (0, np.inf):
        masses = to_masses(np.nextafter(powers, side), 1.0)
        # The chance of a difference is 2**-29 for each, 0.002 for all.
        assert (masses == to_masses(numbers.copy(), 0.6)).all()


def test_trees_of_others_hold_every_bit(rng):
    values, tree = rng.random(COUNT), mr.SumTree(COUNT)
    tree.fill(values)
    assert tree.leaves.tolist() == values.tolist()
    tree.set(np.arange(COUNT), values[::-1])
    assert tree.leaves.tolist() == values[::-1].tolist()


@pytest.mark.parametrize(
    ("eps", "positive"), [(0.0, False), (1e-79, False), (1e-78, True), (1e100, True)]
)
def test_a_mass_that_is_rounded_to_zero_is_not_positive(eps, positive):
    assert proportional(4.0, eps).positive is positive


def test_steps_whose_mass_is_rounded_to_zero_are_never_drawn():
    sampler, view = filled([[0.0, 1.0, 0.0, 2.0]], alpha=4.0, eps=1e-79)
    draw = sampler.draw(view, 1000)
    assert set(draw.positions.tolist()) == {1, 3}
    sampler, view = filled([[0.0, 0.0]], alpha=4.0, eps=1e-79)
    with pytest.raises(EmptyError, match="all 2 legal starts have priority 0"):
        sampler.draw(view, 1)


def test_rows_of_mass_0_do_not_open_all_rows_again_at_each_step(monkeypatch):
    sampler = mr.PrioritizedSampler(4.0, eps=1e-79, initial_priority=1.0, seed=0)
    twin = Twin(None, 8, stored=True, sampler=sampler)
    twin.extend([[""]] * 3)
    update(twin.buffer, [(0, 1)], [0.0])
    monkeypatch.setattr(PriorityStore, "reopen", lambda *_: pytest.fail("opened again"))
    twin.add([""])
    assert set(twin.buffer.sample(100).positions.tolist()) == {0, 2, 3}


def test_a_mass_that_no_sum_can_hold_is_refused():
    _, view = filled([[1.0, 2.0]])
    sampler = mr.PrioritizedSampler(4.0, eps=1e77, seed=0, name=None)
    with pytest.raises(ValueError, match=r"at most 1.79769e\+307.* got 9.99999"):
        sampler.draw(view, 1)
