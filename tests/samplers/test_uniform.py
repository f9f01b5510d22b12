"""Uniform draws: every legal start alike, found by brute force."""

from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers import uniform
from mmreplay.samplers.uniform import UniformSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import VIEWS, ListedView, SamplerContract, steps_of

# One false alarm in a million tests, were the seeds not fixed.
SIGMAS = 4.75


def chi_square_limit(degrees):
    """Quantile at 1 - 1e-6 of chi-square, after Wilson and Hilferty (1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + SIGMAS * part**0.5) ** 3


def assert_uniform(drawn, expected):
    """Each of the expected is as frequent as chance lets it be, and no other is."""
    counts = Counter(drawn)
    assert set(counts) == set(expected)
    mean = len(drawn) / len(expected)
    # Below five expected draws a cell the chi-square law does not hold.
    assert mean >= 5
    statistic = sum((count - mean) ** 2 / mean for count in counts.values())
    assert statistic < chi_square_limit(max(1, len(expected) - 1))


class TestUniformSampler(SamplerContract):
    def make(self, seed=0):
        return UniformSampler(seed)

    @pytest.mark.parametrize("view", VIEWS)
    def test_every_legal_start_is_as_likely(self, view):
        sampler = self.make()
        drawn = [p for _ in range(40) for p in steps_of(sampler.draw(view, 500))]
        assert_uniform(drawn, view.legal_starts())

    @pytest.mark.parametrize("view", VIEWS)
    def test_probabilities_are_one_in_the_legal_starts(self, view):
        draw = self.make().draw(view, 9)
        assert (draw.probabilities == 1 / len(view.legal_starts())).all()
        assert (draw.weights == 1).all()

    def test_one_start_among_many_rows_is_found_by_its_rank(self):
        rows = ["x" * 999 + "s" + "x" * 9000, "x" * 5000, "x" * 3000 + "sxs" + "x" * 50]
        view = ListedView(rows, [3, 0, 1 << 33])
        sampler = self.make()
        drawn = [p for _ in range(20) for p in steps_of(sampler.draw(view, 150))]
        assert_uniform(drawn, view.legal_starts())

    def test_where_spare_rows_end_ranks_go_on_without_a_seam(self, monkeypatch):
        # Without spare rows a third of the batch is drawn by rank.
        monkeypatch.setattr(uniform, "MIN_LEGAL", 0.0)
        monkeypatch.setattr(uniform, "SPARE_SIGMAS", -100.0)
        view = VIEWS[3]
        drawn = steps_of(self.make().draw(view, 20_000))
        assert_uniform(drawn, view.legal_starts())

    @pytest.mark.parametrize("total", [1, 3, 7, 10**6 + 3, (1 << 40) + 1])
    def test_the_largest_random_number_stays_inside(self, total):
        # Where ranks are made of shares in C, by the same product: see kernels.
        last = np.full(2, np.nextafter(1.0, 0.0))
        assert uniform._below(total, last).tolist() == [total - 1] * 2

    def test_seeds_outside_the_range_are_refused(self):
        for seed in (-1, 1 << 63, "a", 1.5, True, np.int64(-3)):
            with pytest.raises(SchemaError, match="seed must be None or an integer in"):
                UniformSampler(seed)
        assert UniformSampler(np.int32(7)).state_dict()["seed"] == 7

    def test_no_seed_is_another_seed_each_time(self):
        seeds = {UniformSampler().state_dict()["seed"] for _ in range(10)}
        assert len(seeds) == 10


@pytest.mark.parametrize("engine", ["memmap", "memory"])
@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
def test_draws_of_a_buffer_are_the_oracles_legal_starts(tmp_path, engine, autoreset, rng):
    path = tmp_path / "ring" if engine == "memmap" else None
    twin = Twin(path, 12, 3, autoreset=autoreset, sampler=UniformSampler(1))
    for turn in range(60):
        steps = int(rng.integers(1, 7))
        env_ids = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        kinds = rng.choice(["", "t", "u"], (steps, len(env_ids)), p=[0.5, 0.2, 0.3])
        twin.extend(kinds.tolist(), env_ids, autoreset != "next_step" and turn % 3 == 0)
        if turn % 9 == 8:
            twin.buffer.clear([turn % 3])
            twin.oracle.clear([turn % 3])
        legal = list(twin.oracle.legal())
        if legal:
            batch = twin.buffer.sample(60 * len(legal))
            # One of 36 starts is missed with a probability below 36 * exp(-60).
            assert_uniform(steps_of(batch), legal)
            assert (batch.probabilities == 1 / len(legal)).all()


def test_an_episode_that_fills_the_buffer_but_for_one_step(tmp_path):
    twin = Twin(tmp_path / "ring", 50)
    twin.extend([["u"]] * 49 + [[""]])
    with pytest.raises(EmptyError, match="cannot draw 3 steps: none of 50 published"):
        twin.buffer.sample(3)
    twin.add([""])
    batch = twin.buffer.sample(3)
    assert steps_of(batch) == [(0, 49)] * 3
    assert batch.probabilities.tolist() == [1.0] * 3


def test_draws_do_not_depend_on_who_looked_before(tmp_path):
    twin = Twin(tmp_path / "ring", 20, 2)
    twin.extend([["", "t"], ["u", ""], ["", ""], ["t", "u"], ["", ""]])
    with (
        mr.ReplayBuffer.open(twin.path, sampler=UniformSampler(2)) as one,
        mr.ReplayBuffer.open(twin.path, sampler=UniformSampler(2)) as other,
    ):
        len(other), other.gather_all(), other.take([0], [0])
        expected = [steps_of(one.sample(30)) for _ in range(3)]
        assert [steps_of(other.sample(30)) for _ in range(3)] == expected
    twin.buffer.close()
