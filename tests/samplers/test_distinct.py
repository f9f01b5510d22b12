"""Draws of different steps: each set alike, found by brute force."""

from collections import Counter
from itertools import combinations

import pytest

from mmreplay.samplers.distinct import DistinctSampler
from tests.contracts.sampler import VIEWS, ListedView, SamplerContract, steps_of


class TestDistinctSampler(SamplerContract):
    def make(self, seed=0):
        return DistinctSampler(seed)

    @pytest.mark.parametrize("batch_size", [1, 7, 256])
    def test_a_draw_has_the_promised_shape(self, batch_size):
        for view in VIEWS:
            drawn = steps_of(self.make().draw(view, batch_size))
            assert len(drawn) == len(set(drawn))
            assert len(drawn) == min(batch_size, len(view.legal_starts()))

    def test_every_set_is_as_likely(self):
        view = ListedView(["sxs", "s-", "xss"])
        sampler, draws = self.make(), 4000
        drawn = Counter(tuple(sorted(steps_of(sampler.draw(view, 2)))) for _ in range(draws))
        sets = list(combinations(sorted(view.legal_starts()), 2))
        mean = draws / len(sets)
        assert set(drawn) == set(sets)
        # Five standard deviations of a count; ten counts.
        assert all(abs(count - mean) < 5 * mean**0.5 for count in drawn.values())

    def test_a_few_of_many_are_drawn_without_a_list_of_them(self):
        view = ListedView(["s" * 20_000])
        draw = self.make().draw(view, 5)
        assert len(set(steps_of(draw))) == 5
        assert (draw.probabilities == 1 / 20_000).all()
