"""A computed order: every index once, any order alike, whatever the size."""

import itertools
from math import factorial

import numpy as np
import pytest

from mmreplay.samplers import permutation
from mmreplay.samplers.permutation import Permutation
from tests.samplers.frequencies import assert_distribution

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 15, 16, 17, 63, 100, 1000, 4097]


@pytest.fixture
def computed(monkeypatch):
    """Orders of small sizes are computed, too."""
    monkeypatch.setattr(permutation, "TABLE", 0)


@pytest.mark.parametrize("size", [*SIZES, 65_536, 65_537, 99_999])
def test_every_index_comes_once(size, rng):
    values = Permutation(size, rng)(np.arange(size))
    assert values.dtype == np.int64
    assert np.sort(values).tolist() == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_every_index_comes_once_where_it_is_computed(size, rng, computed):
    for _ in range(5):
        values = Permutation(size, rng)(np.arange(size))
        assert np.sort(values).tolist() == list(range(size))


@pytest.mark.parametrize("size", [70_000, 10**9, (1 << 62) - 1])
def test_chunks_in_any_order_make_the_permutation(size, rng):
    order = Permutation(size, rng)
    indices = rng.integers(size, size=500)
    whole = order(indices)
    assert ((whole >= 0) & (whole < size)).all()
    assert len(set(whole.tolist())) == len(set(indices.tolist()))
    pieces = [order(indices[i : i + 7]) for i in range(0, 500, 7)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert len(order(indices[:0])) == 0


def test_the_generator_alone_decides(rng):
    indices = np.arange(80_000)
    first = Permutation(80_000, np.random.default_rng(3))(indices)
    again = Permutation(80_000, np.random.default_rng(3))(indices)
    other = Permutation(80_000, np.random.default_rng(4))(indices)
    assert (first == again).all()
    # Of two independent orders one index in 80,000 agrees on average.
    assert (first == other).sum() < 20


def test_a_table_draws_every_order_as_often(rng):
    drawn = [tuple(Permutation(4, rng)(np.arange(4))) for _ in range(2400)]
    law = dict.fromkeys(itertools.permutations(range(4)), 1 / factorial(4))
    assert_distribution(drawn, law)


@pytest.mark.parametrize("size", [5, 7, 12])
@pytest.mark.sliced(2)
def test_every_position_is_as_likely_for_every_index(size, rng, computed):
    # A network of eight rounds is close to a random order, not exactly one; at these
    # sizes, the worst for it, 2,000 orders do not tell the difference.
    orders = np.array([Permutation(size, rng)(np.arange(size)) for _ in range(2000)])
    for index in range(size):
        law = dict.fromkeys(range(size), 1 / size)
        assert_distribution(orders[:, index].tolist(), law)


def test_neighbours_are_as_likely_to_be_any_pair(rng, computed):
    pairs = []
    for _ in range(3000):
        first, second = Permutation(6, rng)(np.arange(2)).tolist()
        pairs.append((first, second))
    assert_distribution(pairs, dict.fromkeys(itertools.permutations(range(6), 2), 1 / 30))


def test_neighbours_of_a_large_order_are_far_apart_as_chance_has_it(rng):
    size = 10**9
    values = Permutation(size, rng)(np.arange(20_000))
    steps = np.diff(values)
    # Differences of independent uniform numbers: |d| has mean size / 3 and standard
    # deviation size / sqrt(18); five standard errors of 20,000 are 0.0084 of size.
    assert abs(np.abs(steps).mean() / size - 1 / 3) < 0.0084
    # Bins of a histogram: 20,000 in 100 bins.
    bins = (values // (size // 100)).tolist()
    assert_distribution(bins, dict.fromkeys(range(100), 0.01))
