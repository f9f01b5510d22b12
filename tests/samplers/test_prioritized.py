"""Prioritized draws: exact laws, strata, weights and schedules."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError
from mmreplay.samplers.prioritized import PrioritizedSampler, RankPrioritizedSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import ListedView, SamplerContract, steps_of
from tests.samplers.prioritized import KINDS, assert_masses, counts, filled, masses_of, update


class TestPrioritizedSampler(SamplerContract):
    def make(self, seed=0):
        return PrioritizedSampler(seed=seed, stratified=False)


class TestRankPrioritizedSampler(SamplerContract):
    def make(self, seed=0):
        return RankPrioritizedSampler(seed=seed, stratified=False)


# Golden values from alf, of 1,000 stratified draws (env_ids, positions and shares).


def test_equal_priorities_share_the_strata():
    sampler, view = filled([[1, 1]])
    assert counts(sampler.draw(view, 1000)) == {(0, 0): 500, (0, 1): 500}


def test_strata_give_each_step_its_exact_share():
    sampler, view = filled([[0.5, 1.5]])
    assert counts(sampler.draw(view, 1000)) == {(0, 0): 250, (0, 1): 750}


@pytest.mark.parametrize(
    ("priorities", "shares", "ratios"),
    [
        ([[1.5], [0.5, 1.5], [1.5]], [300, 100, 300, 300], [1.2, 0.4, 1.2, 1.2]),
        ([[1.5], [0.5, 1.0], [1.0]], [375, 125, 250, 250], [1.5, 0.5, 1.0, 1.0]),
    ],
)
def test_shares_and_mean_weights_are_alfs(priorities, shares, ratios):
    sampler, view = filled(priorities, normalize="mean", beta=1.0)
    draw = sampler.draw(view, 1000)
    found = counts(draw)
    assert [found[place] for place in view.legal_starts()] == shares
    expected = dict(zip(view.legal_starts(), ratios, strict=True))
    for place, weight in zip(steps_of(draw), draw.weights, strict=True):
        assert weight == pytest.approx(1 / expected[place], rel=1e-6)


def test_weights_of_a_whole_ring_are_alfs():
    sampler, view = filled([[1, 1, 1, 3], [1, 5, 1, 1]], [2, 2], normalize="mean", beta=1)
    draw = sampler.draw(view, 1400)
    found = dict(zip(steps_of(draw), (1 / draw.weights).tolist(), strict=True))
    assert found[0, 5] == pytest.approx(1.7142857, rel=1e-6)
    assert found[1, 3] == pytest.approx(2.8571429, rel=1e-6)
    assert found[0, 2] == pytest.approx(0.5714286, rel=1e-6)


def test_a_new_row_enters_at_the_highest_priority_in_the_buffer(tmp_path):
    twin = Twin(None, 4, 2, stored=True, sampler=mr.PrioritizedSampler(alpha=1, seed=0))
    twin.extend([["", ""]] * 6)
    batch = twin.buffer.sample(64)
    given = {(0, 3): 3.0, (1, 5): 5.0}
    values = [given.get(place, 1.0) for place in steps_of(batch)]
    twin.buffer.update_priorities(batch, np.array(values))
    twin.add(["", ""])
    draw = twin.buffer.sample(1000)
    masses = dict(zip(steps_of(draw), draw.probabilities, strict=True))
    # 3 + 1 + 1 + 5 of environment 0, 1 + 1 + 5 + 5 of environment 1.
    assert masses[0, 6] == pytest.approx(5 / 22, rel=1e-5)
    assert masses[1, 6] == pytest.approx(5 / 22, rel=1e-5)
    assert masses[0, 3] == pytest.approx(3 / 22, rel=1e-5)


def test_the_highest_priority_leaves_with_its_row():
    twin = Twin(None, 4, stored=True, sampler=mr.PrioritizedSampler(alpha=1, seed=0))
    twin.extend([[""]] * 4)
    update(twin.buffer, [(0, 0)], [50.0])
    update(twin.buffer, [(0, 1), (0, 2), (0, 3)], [2.0, 2.0, 2.0])
    twin.add([""])
    # It left as the new row came, and what is left is not as high.
    assert masses_of(twin.buffer) == pytest.approx({(0, p): 1 / 4 for p in (1, 2, 3, 4)}, rel=1e-5)


def test_the_initial_priority_is_the_least_to_enter_at():
    sampler = mr.PrioritizedSampler(alpha=1, initial_priority=3.0, eps=0, seed=0)
    twin = Twin(None, 8, stored=True, sampler=sampler)
    twin.extend([[""]] * 2)
    update(twin.buffer, [(0, 0), (0, 1)], [1.0, 1.0])
    twin.add([""])
    assert masses_of(twin.buffer)[0, 2] == pytest.approx(3 / 5)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(("alpha", "eps"), [(0.6, 1e-6), (1.0, 0.0), (2.5, 0.5), (0, 0)])
def test_frequencies_and_probabilities_are_those_of_the_distribution(alpha, eps, stratified):
    priorities = [[0.3, 2.0, 0.9, 7.0], [1.1, 0.25], [4.0, 4.0, 0.7]]
    sampler, view = filled(priorities, [5, 0, 9], alpha=alpha, eps=eps, stratified=stratified)
    masses = (np.concatenate(priorities).astype(np.float32) + eps) ** alpha
    law = dict(zip(view.legal_starts(), masses, strict=True))
    drawn = []
    for _ in range(40):
        draw = sampler.draw(view, 600)
        drawn += steps_of(draw)
        expected = [law[place] / masses.sum() for place in steps_of(draw)]
        np.testing.assert_allclose(draw.probabilities, expected, rtol=1e-6)
    assert_masses(drawn, law)


def test_strata_leave_no_step_off_its_share_by_one():
    sampler, view = filled([np.random.default_rng(3).random(40)])
    draw = sampler.draw(view, 500)
    shares = dict(zip(steps_of(draw), 500 * draw.probabilities, strict=True))
    for place, count in counts(draw).items():
        # A step's segment of the masses meets that many strata, whole ones and two
        # at its ends.
        assert abs(count - shares[place]) < 2


@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_what_the_paper_says(normalize, beta):
    priorities = [[0.3, 2.0, 0.9, 7.0, 0.01]]
    sampler, view = filled(priorities, beta=beta, normalize=normalize, stratified=False)
    for count in (1, 4, 200):
        draw = sampler.draw(view, count)
        weights = (5 * draw.probabilities) ** -beta
        most = {
            "batch": weights.max(),
            "buffer": (5 * 0.01 / sum(priorities[0])) ** -beta,
            "mean": 1.0,
        }[normalize]
        np.testing.assert_allclose(draw.weights, weights / most, rtol=1e-5)
        assert draw.weights.dtype == np.float32


def test_the_buffers_greatest_weight_follows_its_least_priority():
    sampler, view = filled([[2.0, 4.0, 8.0]], beta=1, normalize="buffer")
    ids = np.zeros(1, np.int64)
    for position, value, least in ((0, 16.0, 4.0), (1, 0.5, 0.5), (1, 9.0, 8.0)):
        sampler.update_priorities(view, ids, np.array([position]), np.array([value]))
        draw = sampler.draw(view, 50)
        values = draw.probabilities * sampler.priorities.distribution.total
        np.testing.assert_allclose(draw.weights, least / values, rtol=1e-6)


def test_n_is_the_number_of_legal_starts():
    view = ListedView(["sxs-", "xxsxx"])
    sampler = PrioritizedSampler(normalize="mean", beta=1.0, seed=0)
    draw = sampler.draw(view, 30)
    np.testing.assert_allclose(draw.probabilities, 1 / 3)
    np.testing.assert_allclose(draw.weights, 1.0)


@pytest.mark.parametrize("make", KINDS)
def test_beta_follows_its_schedule(make):
    view = ListedView(["ssss"])
    seen = []
    sampler = make(beta=lambda step: seen.append(step) or 0.5, seed=0)
    for _ in range(3):
        sampler.draw(view, 4)
    assert seen == [0, 1, 2]


def test_alpha_follows_its_schedule_every_so_many_draws():
    sampler, view = filled([[1.0, 3.0]], alpha=mr.LinearSchedule(0.0, 1.0, 4), alpha_every=2)
    found = [
        dict(zip(steps_of(d), d.probabilities, strict=True))[0, 1]
        for d in (sampler.draw(view, 100) for _ in range(6))
    ]
    expected = [3**a / (1 + 3**a) for a in (0, 0, 0.5, 0.5, 1, 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_priority_of_zero_is_never_drawn_and_its_row_is_still_legal():
    sampler, view = filled([[0.0, 1.0, 0.0, 3.0]], beta=1, normalize="mean")
    draw = sampler.draw(view, 1000)
    assert counts(draw) == {(0, 1): 250, (0, 3): 750}
    np.testing.assert_allclose(draw.weights[:250], 1 / (4 * 0.25))
    sampler.update_priorities(view, np.zeros(1, int), np.array([0]), np.array([4.0]))
    assert counts(sampler.draw(view, 1000)) == {(0, 0): 500, (0, 1): 125, (0, 3): 375}


def test_priorities_that_are_all_zero_are_said():
    sampler, view = filled([[0.0, 0.0]])
    with pytest.raises(EmptyError, match="cannot draw 3 steps: all 2 legal starts"):
        sampler.draw(view, 3)


def test_eps_keeps_a_priority_of_zero_alive():
    sampler, view = filled([[0.0, 0.0]], eps=1e-6)
    assert counts(sampler.draw(view, 100)) == {(0, 0): 50, (0, 1): 50}
