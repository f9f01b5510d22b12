"""Draws by rank: the order, its staleness, and segments of equal mass."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError
from mmreplay.samplers.priority_distribution import RankBased, Scheduled, _descending
from tests.buffer.support import Twin
from tests.contracts.sampler import ListedView, steps_of
from tests.samplers.prioritized import assert_masses, masses_of, update

ALPHA = 0.7


def ranked(priorities, **options):
    """A sampler that was told priorities, and the view of as many rows."""
    view = ListedView(["s" * len(priorities)])
    sampler = mr.RankPrioritizedSampler(**({"alpha": ALPHA, "seed": 0} | options))
    positions = np.arange(len(priorities))
    sampler.update_priorities(view, positions * 0, positions, np.array(priorities))
    return sampler, view


def probabilities_of(ranks):
    """Probabilities by the paper's formula, given each row's rank from 1 on."""
    masses = np.array(ranks, float) ** -ALPHA
    return {(0, p): m / masses.sum() for p, m in enumerate(masses)}


@pytest.mark.parametrize("stratified", [True, False])
def test_frequencies_and_probabilities_are_the_ranks(stratified):
    sampler, view = ranked([3.0, 0.5, 100.0, 4.0, 0.0], stratified=stratified)
    law = probabilities_of([3, 4, 1, 2, 5])
    drawn = []
    for _ in range(40):
        draw = sampler.draw(view, 300)
        drawn += steps_of(draw)
        expected = [law[place] for place in steps_of(draw)]
        np.testing.assert_allclose(draw.probabilities, expected)
    assert_masses(drawn, law)


def test_equal_priorities_keep_the_order_that_they_were_in():
    sampler, view = ranked([2.0, 2.0, 5.0, 2.0])
    found = dict(zip(*draws(sampler, view), strict=True))
    assert found == pytest.approx(probabilities_of([2, 3, 1, 4]))


def draws(sampler, view, count=2000):
    draw = sampler.draw(view, count)
    return steps_of(draw), draw.probabilities.tolist()


def test_strata_are_segments_of_like_priorities(rng):
    values = rng.random(400)
    sampler, view = ranked(values)
    ranks = np.empty(400)
    ranks[np.argsort(-values)] = np.arange(1, 401)
    edges = np.cumsum(np.arange(1, 401) ** -ALPHA)
    draw = sampler.draw(view, 32)
    for stratum, position in enumerate(draw.positions):
        rank = int(ranks[position])
        low, high = edges[-1] * stratum / 32, edges[-1] * (stratum + 1) / 32
        before = edges[rank - 2] if rank > 1 else 0.0
        assert before <= high * (1 + 1e-9)
        assert edges[rank - 1] >= low * (1 - 1e-9)


def test_between_two_sorts_an_updated_row_keeps_its_rank():
    sampler, view = ranked([5.0, 4.0, 3.0, 2.0], resort_every=3)
    sampler.draw(view, 1)
    stale, fresh = probabilities_of([1, 2, 3, 4]), probabilities_of([2, 3, 4, 1])
    zero = np.zeros(1, int)
    for number, expected in enumerate([stale, stale, fresh]):
        sampler.update_priorities(view, zero, zero + 3, np.array([9.0 + number]))
        assert dict(zip(*draws(sampler, view), strict=True)) == pytest.approx(expected)


def test_new_rows_share_the_first_ranks_until_the_next_sort():
    sampler = mr.RankPrioritizedSampler(alpha=ALPHA, seed=0, resort_every=3)
    twin = Twin(None, 8, stored=True, sampler=sampler)
    twin.extend([[""]] * 3)
    twin.buffer.sample(1)
    update(twin.buffer, [(0, 0), (0, 1), (0, 2)], [3.0, 2.0, 4.0])
    twin.buffer.sample(1)
    twin.add([""])
    twin.add([""])
    masses = np.array([2.0, 3, 1, 1, 2]) ** -ALPHA
    expected = dict(zip([(0, p) for p in range(5)], masses / masses.sum(), strict=True))
    assert masses_of(twin.buffer) == pytest.approx(expected)
    twin.add([""])
    # All three entered at 4, the highest, after the row that has it already.
    masses = np.array([5.0, 6, 1, 2, 3, 4]) ** -ALPHA
    expected = dict(zip([(0, p) for p in range(6)], masses / masses.sum(), strict=True))
    assert masses_of(twin.buffer) == pytest.approx(expected)


def test_ranks_of_rows_that_left_are_left_out():
    sampler = mr.RankPrioritizedSampler(alpha=ALPHA, seed=0, resort_every=1000)
    twin = Twin(None, 4, stored=True, sampler=sampler)
    twin.extend([[""]] * 4)
    update(twin.buffer, [(0, p) for p in range(4)], [9.0, 8.0, 7.0, 6.0])
    twin.buffer.sample(1)
    twin.add([""])
    # Rank 1 left with position 0; the new row has the mass of rank 1.
    masses = np.array([2.0, 3, 4, 1]) ** -ALPHA
    expected = dict(zip([(0, p) for p in (1, 2, 3, 4)], masses / masses.sum(), strict=True))
    assert masses_of(twin.buffer) == pytest.approx(expected)


def test_a_ring_that_wraps_without_a_sort_never_runs_out_of_slots():
    sampler = mr.RankPrioritizedSampler(seed=0, resort_every=10**9)
    twin = Twin(None, 20, 2, stored=True, sampler=sampler)
    for _ in range(100):
        twin.extend([["", ""]] * 7)
        alive = set(twin.oracle.alive())
        draw = sampler.draw(twin.buffer.view, 600)
        assert set(steps_of(draw)) <= alive
        assert sampler.priorities.distribution.num_open == len(alive)


def test_alpha_zero_is_uniform_and_a_change_of_alpha_sorts():
    sampler, view = ranked(
        [1.0, 2.0, 3.0], alpha=lambda step: float(step > 0) * ALPHA, resort_every=10**9
    )
    assert draws(sampler, view)[1] == pytest.approx([1 / 3] * 2000)
    assert dict(zip(*draws(sampler, view), strict=True)) == pytest.approx(
        probabilities_of([3, 2, 1])
    )


@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
def test_weights_are_those_of_the_ranks(normalize):
    sampler, view = ranked([3.0, 1.0, 2.0], beta=1.0, normalize=normalize)
    draw = sampler.draw(view, 100)
    weights = 1 / (3 * draw.probabilities)
    if normalize != "mean":
        weights /= weights.max()
    np.testing.assert_allclose(draw.weights, weights, rtol=1e-6)


def test_sorting_is_descending_and_stable(rng):
    for values in (
        rng.random(1000),
        rng.integers(0, 5, 1000) / 4,
        [0.0, -0.0, 1e-45, 3e38, 0.0],
        [],
    ):
        numbers = np.array(values, np.float32)
        expected = np.argsort(-numbers, kind="stable")
        assert _descending(numbers).tolist() == expected.tolist()


def test_it_takes_at_most_18_bytes_a_row():
    law = RankBased(200_000, Scheduled("alpha", 0.7, 4), None)
    values = np.ones(200_000, np.float32)
    law.put(np.arange(200_000), values)
    law.ready(0, values)
    law.lowest()
    held = law._order.nbytes + law._index_of.nbytes + law._tree.nbytes
    assert held + law._low._blocks.nbytes + law._low._above._blocks.nbytes <= (18 * 200_000)


@pytest.mark.parametrize(
    "damage",
    [
        {"order": "x"},
        {"order": np.zeros((2, 2), int)},
        {"num_sorted": -1},
        {"num_sorted": 99},
        {"num_changed": None},
        {"alpha": 5.0},
        {"stale": 2},
    ],
)
def test_a_damaged_order_is_refused(damage):
    sampler, view = ranked([3.0, 1.0, 2.0])
    sampler.draw(view, 2)
    state = sampler.state_dict(priorities=True)
    sampler.load_state_dict(state | damage)
    with pytest.raises(FormatError, match="sampler state:"):
        sampler.draw(view, 2)


@pytest.mark.parametrize(("rows", "changes"), [(8192, 2048), (400, 1024)])
def test_by_default_a_quarter_of_the_rows_is_changed_before_a_sort(rows, changes):
    law = RankBased(rows, Scheduled("alpha", ALPHA, 4.0), None)
    values, every = np.arange(1.0, rows + 1).astype(np.float32), np.arange(rows)
    law.put(every, values)
    law.ready(0, values)
    values[0] = rows + 9.0
    law.put(np.zeros(changes - 1, np.int64), values)
    law.ready(1, values)
    assert law.draw(np.zeros(1), False, 0.0)[0].tolist() == [rows - 1]
    law.put(np.zeros(1, np.int64), values)
    law.ready(2, values)
    assert law.draw(np.zeros(1), False, 0.0)[0].tolist() == [0]
