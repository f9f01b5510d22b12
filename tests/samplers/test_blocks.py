"""Draws of neighbours: every start as likely, whole blocks together, epochs exact."""

from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.shuffled import ShuffledSampler
from mmreplay.samplers.uniform import BlockPermutation, UniformSampler, block_ranks
from tests.contracts.sampler import VIEWS, SamplerContract, steps_of
from tests.samplers.epochs import epoch, flat
from tests.samplers.frequencies import chi_square_limit

BLOCK = 4


class TestUniformBlocks(SamplerContract):
    def make(self, seed=0):
        return UniformSampler(seed, block=BLOCK)

    @pytest.mark.parametrize("view", VIEWS)
    def test_each_index_of_a_batch_is_uniform_over_the_legal_starts(self, view):
        # Steps of a block hang together, so that the chi-square law holds for one
        # place of each draw only: at a time the first of a block, its last, and one
        # of a block that a batch cuts short.
        sampler = self.make()
        drawn = [steps_of(sampler.draw(view, 10)) for _ in range(2000)]
        legal = view.legal_starts()
        for which in (0, 3, 9):
            counts = Counter(batch[which] for batch in drawn)
            mean = len(drawn) / len(legal)
            if mean < 5:
                pytest.skip("the law of large numbers needs more draws")
            assert set(counts) <= set(legal)
            off = [(counts[place] - mean) ** 2 / mean for place in legal]
            assert sum(off) < chi_square_limit(max(1, len(legal) - 1))

    @pytest.mark.parametrize("view", VIEWS)
    def test_a_batch_is_of_blocks_in_rank_order(self, view):
        legal = view.legal_starts()
        sampler = self.make()
        for size in (1, 3, 8, 10):
            drawn = steps_of(sampler.draw(view, size))
            for first in range(0, size, BLOCK):
                some = drawn[first : first + BLOCK]
                start = legal.index(some[0])
                expected = [legal[(start + k) % len(legal)] for k in range(len(some))]
                assert some == expected

    def test_steps_of_a_batch_depend_on_each_other_as_the_page_says(self):
        # The variance of a batch's mean is (1 + (block - 1) * r) / B of a step's,
        # r being what neighbours share: all of it here, where a value lasts for long.
        values = np.repeat(np.random.default_rng(1).random(1000), 1000)
        means = {}
        for block in (1, 16):
            random = StepGenerator(3)
            ranks = [block_ranks(random, step, len(values), block, 256) for step in range(2000)]
            means[block] = np.var([values[each].mean() for each in ranks])
        # Of 2000 means the variance is known to sqrt(2 / 2000) = 3.2%, of the ratio
        # of two to 4.5%; a block that crosses values takes 1.5% off. 4.75 sigmas.
        assert means[16] / means[1] == pytest.approx(16, rel=0.23)


@pytest.mark.parametrize("size", [1, 3, 4, 17, 64, 1001])
@pytest.mark.parametrize("block", [2, 4, 16])
def test_an_order_of_blocks_has_everything_once(size, block):
    order = BlockPermutation(size, block, np.random.default_rng(size))
    found = order(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))
    whole = found[: size // block * block].reshape(-1, block)
    assert ((np.diff(whole, axis=1) % size) == 1).all() or size == 1
    some = np.arange(size)[::-3]
    assert (order(some) == found[some]).all()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_of_blocks_draws_every_start_once(view, ranks):
    drawn = []
    ranks = min(ranks, len(view.legal_starts()))
    for rank in range(ranks):
        sampler = ShuffledSampler(5, rank=rank, num_ranks=ranks, block=BLOCK)
        drawn += flat(epoch(sampler, view, 6))
    assert sorted(drawn) == sorted(view.legal_starts())


def test_epochs_of_blocks_begin_them_at_other_positions():
    view = max(VIEWS, key=lambda view: len(view.legal_starts()))
    sampler = ShuffledSampler(5, block=BLOCK)
    firsts = {tuple(sorted(flat(epoch(sampler, view, BLOCK))[:BLOCK])) for _ in range(9)}
    assert len(firsts) > 2


def test_an_epoch_of_blocks_goes_on_where_its_state_says():
    view = max(VIEWS, key=lambda view: len(view.legal_starts()))
    one, other = (ShuffledSampler(seed, block=BLOCK) for seed in (1, 2))
    one.draw(view, 3)
    other.load_state_dict(one.state_dict())
    assert flat(epoch(one, view, 3)) == flat(epoch(other, view, 3))


@pytest.mark.parametrize("kind", [UniformSampler, ShuffledSampler])
def test_a_state_of_other_blocks_is_refused(kind):
    for saved, own in ((1, 4), (4, 1), (4, 8)):
        state = kind(1, block=saved).state_dict()
        with pytest.raises(FormatError, match="sampler state: block must be"):
            kind(1, block=own).load_state_dict(state)


@pytest.mark.parametrize("kind", [mr.UniformSampler, mr.ShuffledSampler])
@pytest.mark.parametrize("block", [0, -1, 2.0, True, "4"])
def test_a_block_that_is_none_is_refused(kind, block):
    with pytest.raises(SchemaError, match=r"block must be an integer"):
        kind(1, block=block)


def test_blocks_without_shuffling_are_refused():
    with pytest.raises(SchemaError, match=r"block must be None with.*got 4"):
        mr.ShuffledSampler(1, shuffle=False, block=4)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_of_a_block_that_is_longer_than_a_draw_only_the_draw_is_made(count):
    # Of 2**31 ranks the first eight would take 16 GiB; of 2**70 there is no array.
    found = [block_ranks(StepGenerator(3), 5, 100, block, count) for block in (8, 2**31, 2**70)]
    assert len(found[0]) == count
    assert all((each == found[0]).all() for each in found)


def test_of_a_block_that_is_longer_than_all_an_epoch_is_one(rng):
    orders = [
        BlockPermutation(100, block, np.random.default_rng(1))(np.arange(100))
        for block in (100, 101, 2**31, 2**70)
    ]
    assert all((each == orders[0]).all() for each in orders)
    assert sorted(orders[0]) == list(range(100))
