"""Equal mass for every environment, against a loop and alf's numbers."""

from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from tests.contracts.sampler import VIEWS, ListedView, SamplerContract, steps_of
from tests.samplers.frequencies import assert_distribution


def probabilities(view):
    """Probability of each legal start, environments alike."""
    counts = Counter(env_id for env_id, _ in view.legal_starts())
    return {place: 1 / len(counts) / counts[place[0]] for place in view.legal_starts()}


class TestStratifiedSampler(SamplerContract):
    def make(self, seed=0):
        return mr.StratifiedSampler(seed)

    @pytest.mark.parametrize("stratified", [True, False])
    @pytest.mark.parametrize("view", VIEWS)
    def test_environments_are_as_likely_and_their_starts_too(self, view, stratified):
        sampler = mr.StratifiedSampler(0, stratified=stratified)
        draws = [sampler.draw(view, 11) for _ in range(400)]
        drawn = [place for draw in draws for place in steps_of(draw)]
        # Stratified draws scatter less than independent ones, so the limit for
        # those holds all the more.
        assert_distribution(drawn, probabilities(view))
        for draw in draws[:5]:
            expected = [probabilities(view)[place] for place in steps_of(draw)]
            np.testing.assert_allclose(draw.probabilities, expected)
            assert (draw.weights == 1).all()

    def test_every_step_draws_anew(self):
        # Of many draws of few starts stratification leaves little to chance.
        sampler, view = self.make(), ListedView(["s" * 90, "sx" * 90])
        draws = [tuple(steps_of(sampler.draw(view, 9))) for _ in range(20)]
        assert len(set(draws)) == 20

    @pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 12, 13])
    def test_environments_take_turns_and_differ_by_one_at_most(self, batch_size):
        view = ListedView(["ss", "", "s" * 30, "xs"])
        sampler = self.make()
        rest = Counter()
        for _ in range(300):
            env_ids = sampler.draw(view, batch_size).env_ids.tolist()
            whole = batch_size // 3 * 3
            assert env_ids[:whole] == [0, 2, 3] * (batch_size // 3)
            left = env_ids[whole:]
            assert len(set(left)) == len(left)
            rest.update(left)
        if batch_size % 3:
            total = 300 * (batch_size % 3)
            # 300 draws with p of 1/3 or 2/3: five standard deviations are 41.
            assert all(abs(rest[env_id] - total / 3) < 41 for env_id in (0, 2, 3))

    def test_nine_rows_weigh_as_much_as_one(self):
        env_ids = self.make().draw(ListedView(["s" * 9, "s"]), 100).env_ids
        assert np.bincount(env_ids).tolist() == [50, 50]

    def test_every_stratum_has_one_draw(self):
        view = ListedView(["s" * 40, "sx" * 40])
        for _ in range(20):
            draw = self.make().draw(view, 16)
            for env_id, each in ((0, 1), (1, 2)):
                offsets = draw.positions[draw.env_ids == env_id] // each
                # Eight draws of 40 starts: one of each five, oldest first.
                assert (offsets // 5).tolist() == list(range(8))

    def test_as_many_draws_as_starts_are_all_of_them_in_order(self):
        draw = self.make().draw(ListedView(["s" * 4] * 3, [5, 0, 7]), 12)
        assert draw.env_ids.tolist() == [0, 1, 2] * 4
        assert draw.positions.tolist() == [5, 0, 7, 6, 1, 8, 7, 2, 9, 8, 3, 10]
