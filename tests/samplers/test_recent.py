"""Newest steps more often: alf's share, and a window that shrinks."""

import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.recent import newest_counts
from tests.buffer.support import Twin
from tests.contracts.sampler import VIEWS, ListedView, SamplerContract, steps_of
from tests.samplers.frequencies import assert_distribution
from tests.samplers.moving import MovingView


def newest(view, count):
    """The newest legal starts of each environment, by looking at all."""
    found = {}
    for env_id, position in view.legal_starts():
        found.setdefault(env_id, []).append((env_id, position))
    return [place for starts in found.values() for place in starts[-count:]]


class TestRecentSampler(SamplerContract):
    def make(self, seed=0):
        return mr.RecentSampler(2, 0.4, mr.UniformSampler(seed), seed=seed)

    def test_another_samplers_parts_are_refused_and_nothing_is_loaded(self):
        sampler = self.make()
        before = sampler.state_dict()
        uniform = mr.UniformSampler(0).state_dict()
        for parts, message in (
            ([uniform], "sampler state: parts must be a list of 2, got 1"),
            ([uniform, uniform], "sampler state: kind must be.*got 'UniformSampler'"),
            (None, "sampler state: parts must be a list of 2, got NoneType"),
        ):
            with pytest.raises(FormatError, match=message):
                sampler.load_state_dict(before | {"parts": parts})
        for name in ("steps", "ratio"):
            with pytest.raises(FormatError, match=f"sampler state: {name} must be .* got 9"):
                sampler.load_state_dict(before | {name: 9})
        assert sampler.state_dict() == before


def test_alfs_example():
    sampler = mr.RecentSampler(4, 0.5, seed=0)
    draw = sampler.draw(ListedView(["s" * 32] * 4), 32)
    expected = [28] * 4 + [29] * 4 + [30] * 4 + [31] * 4
    assert draw.positions[:16].tolist() == expected
    assert draw.env_ids[:16].tolist() == [0, 1, 2, 3] * 4


@pytest.mark.parametrize(
    ("ratio", "batch_size", "recent"),
    [(0.1, 10, 1), (0.11, 10, 2), (0.3, 10, 3), (1.0, 10, 10), (0.01, 7, 1)],
)
def test_the_share_is_rounded_up(ratio, batch_size, recent):
    view = ListedView(["s" * 1000])
    counts = Counter()
    for seed in range(30):
        sampler = mr.RecentSampler(5, ratio, mr.UniformSampler(seed), seed=seed)
        positions = sampler.draw(view, batch_size).positions
        assert (positions[:recent] >= 995).all()
        counts[recent] += int((positions[recent:] >= 995).sum())
    # The rest is uniform: half a percent of at most 300 is newest by chance.
    assert counts[recent] < 12


@pytest.mark.parametrize("view", VIEWS[2:])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_newest_are_the_last_legal_starts_of_each_environment(view, steps):
    sampler = mr.RecentSampler(steps, 1.0, seed=0)
    drawn = [p for _ in range(100) for p in steps_of(sampler.draw(view, 60))]
    counts = Counter(env_id for env_id, _ in view.legal_starts())
    mean = np.mean([counts.get(env_id, 0) for env_id in range(len(view.rows))])
    # Below that mean everything is drawn uniformly.
    assert set(drawn) == set(newest(view, steps) if mean > steps else view.legal_starts())


def test_few_starts_are_drawn_as_if_there_was_no_share():
    view = ListedView(["s" * 8])
    sampler = mr.RecentSampler(4, 0.5, mr.UniformSampler(3), seed=0)
    expected = mr.UniformSampler(3)
    for _ in range(5):
        assert steps_of(sampler.draw(view, 9)) == steps_of(expected.draw(view, 9))
    more = ListedView(["s" * 9])
    assert (sampler.draw(more, 100).positions[:50] >= 5).all()


def test_newest_is_by_age_after_the_ring_has_wrapped(tmp_path, rng):
    sampler = mr.RecentSampler(3, 1.0, seed=0)
    twin = Twin(tmp_path / "b", 16, 2, sampler=sampler)
    for _ in range(25):
        kinds = rng.choice(["", "t", "u"], (5, 2), p=[0.6, 0.2, 0.2])
        twin.extend(kinds.tolist())
        legal = {}
        for env_id, position in twin.oracle.legal():
            legal.setdefault(env_id, []).append((env_id, position))
        if sum(map(len, legal.values())) / 2 <= 3:
            continue
        drawn = {p for _ in range(5) for p in steps_of(twin.buffer.sample(40))}
        expected = {place for starts in legal.values() for place in starts[-3:]}
        # Three strata an environment: one of six is missed below 6 * (2/3)**100.
        assert drawn == expected
    twin.buffer.close()


class NotedUpdates(mr.UniformSampler):
    weight = 0.5

    def draw(self, view, batch_size):
        draw = super().draw(view, batch_size)
        draw.weights[:] = self.weight
        return draw

    def update_priorities(self, view, env_ids, positions, values, mask=None):
        self.updated = (env_ids, positions, values, mask)
        return 3


def test_weights_and_priorities_are_the_other_samplers():
    kept = NotedUpdates(0)
    sampler = mr.RecentSampler(4, 0.25, kept, seed=0)
    view = ListedView(["s" * 90])
    draw = sampler.draw(view, 8)
    assert draw.weights.tolist() == [1, 1] + [0.5] * 6
    np.testing.assert_allclose(draw.probabilities, [1 / 4] * 2 + [1 / 90] * 6)
    updated = (draw.env_ids, draw.positions, np.arange(8.0), None)
    assert sampler.update_priorities(view, *updated) == 3
    assert all(a is b for a, b in zip(kept.updated, updated, strict=True))
    assert sampler.keeps_priorities
    plain = mr.RecentSampler(4, 0.25, seed=0)
    assert not plain.keeps_priorities
    with pytest.raises(SchemaError, match="update_priorities needs a sampler with"):
        plain.update_priorities(view, *updated)


def test_shares_that_make_no_sense_are_refused():
    for ratio in (0.0, 1.1, float("nan"), "a", None):
        with pytest.raises(SchemaError, match=r"ratio must be a number in \(0, 1\]"):
            mr.RecentSampler(3, ratio)
    for steps in (0, 2.5, "a", True):
        with pytest.raises(SchemaError, match=f"steps must be an integer .*, got {steps!r}"):
            mr.RecentSampler(steps, 0.5)


class TestEmphasizeRecentSampler(SamplerContract):
    def make(self, seed=0):
        return mr.EmphasizeRecentSampler(40, eta=1.0, smallest=1, seed=seed)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ({"eta": 0.0}, r"eta must be a number in \(0, 1\], got 0\.0"),
            ({"eta": "x"}, r"eta must be a number in \(0, 1\], got 'x'"),
            ({"smallest": 7}, "smallest must be 1 as in this sampler, got 7"),
            ({"update": 40}, r"update must be an integer in \[0, 40\), got 40"),
            ({"num_updates": -1}, r"num_updates must be an integer in \[0.*got -1"),
            ({"parts": []}, "parts must be a list of 1, got 0"),
        ],
    )
    def test_other_damage_is_refused(self, damage, message):
        sampler = self.make()
        before = sampler.state_dict()
        with pytest.raises(FormatError, match=f"sampler state: {message}"):
            sampler.load_state_dict(before | damage)
        assert sampler.state_dict() == before


def test_the_window_follows_the_paper():
    sampler = mr.EmphasizeRecentSampler(4, eta=0.996, smallest=30, seed=0)
    view = ListedView(["s" * 1000])
    for _ in range(2):
        for k in range(1, 5):
            size = max(int(1000 * 0.996 ** (1000 * k / 4)), 30)
            assert sampler.window(1000) == size
            positions = sampler.draw(view, 3000).positions
            # A window of 367 is missed at its edge by (1 - 1/367)**3000 < 3e-4; the
            # seed is fixed.
            assert positions.min() >= 1000 - size
            assert positions.min() < 1000 - size + 5
    assert mr.EmphasizeRecentSampler(4, smallest=5000).window(70) == 70


@pytest.mark.parametrize("eta", [0.9, 0.95, 0.97, 0.98, 0.99])
@pytest.mark.parametrize("num_starts", [10**4, 10**5, 10**6, 10**8])
def test_a_window_of_whole_steps_has_none_less_for_rounding(eta, num_starts):
    sampler = mr.EmphasizeRecentSampler(1000, eta=eta, smallest=1)
    for update in range(1, 6):
        sampler._update = update - 1
        exact = Fraction(str(eta)) ** update * num_starts
        assert sampler.window(num_starts) == math.floor(exact)


def test_a_phase_begins_with_the_whole_buffer():
    sampler = mr.EmphasizeRecentSampler(3, smallest=1)
    sampler.draw(VIEWS[0], 1)
    sampler.begin(10_000)
    assert sampler.window(1000) == 999
    with pytest.raises(SchemaError, match=r"num_updates must be an integer of.*got 0"):
        sampler.begin(0)


def brute_counts(counts, window):
    """As many of each as make window, by counting up."""
    each = 0
    while sum(min(count, each) for count in counts) < window:
        each += 1
    return [min(count, each) for count in counts]


def test_windows_of_many_environments_are_the_newest_of_all(rng):
    for _ in range(300):
        counts = rng.integers(0, 9, size=rng.integers(1, 6))
        for window in range(1, int(counts.sum()) + 1):
            found = newest_counts(counts, window).tolist()
            assert found == brute_counts(counts.tolist(), window)


def test_draws_from_the_window_are_uniform():
    view = ListedView(["sxsxs-", "xs" * 9, "", "sssxx"], [5, 3, 0, 9])
    sampler = mr.EmphasizeRecentSampler(1, eta=1e-9, smallest=9, seed=0)
    expected = newest(view, 3)
    assert len(expected) == 9
    drawn = [p for _ in range(60) for p in steps_of(sampler.draw(view, 30))]
    assert_distribution(drawn, dict.fromkeys(expected, 1 / 9))
    assert (sampler.draw(view, 4).probabilities == 1 / 9).all()


@pytest.mark.parametrize("stopped", range(8))
@pytest.mark.parametrize("kind", ["recent", "shrinking"])
def test_a_run_stopped_after_any_batch_goes_on(kind, stopped):
    def make(seed):
        if kind == "recent":
            return mr.RecentSampler(3, 0.3, mr.ShuffledSampler(seed), seed=seed)
        return mr.EmphasizeRecentSampler(5, eta=0.99, smallest=4, seed=seed)

    view, whole, other = MovingView(2), make(1), make(2)
    view.add(0, "ssxss" * 5)
    view.add(1, "s" * 9)
    expected = []
    for number in range(12):
        if number == stopped:
            other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        draw = whole.draw(view, 6)
        if number >= stopped:
            again = other.draw(view, 6)
            assert (steps_of(again), again.key) == (steps_of(draw), draw.key)
        expected.append(draw.key)
        view.add(number % 2, "sxs")
        view.give_up(0, number)
    assert len(set(expected)) == 12


def test_windows_that_make_no_sense_are_refused():
    for eta in (0.0, 1.5, "a"):
        with pytest.raises(SchemaError, match=f"eta must be a number.*got {eta!r}"):
            mr.EmphasizeRecentSampler(4, eta=eta)
    for smallest in (0, 2.5, "a"):
        with pytest.raises(SchemaError, match=f"smallest must be .*, got {smallest!r}"):
            mr.EmphasizeRecentSampler(4, smallest=smallest)
    with pytest.raises(EmptyError, match="is a legal start"):
        mr.EmphasizeRecentSampler(4).draw(ListedView(["-"]), 3)
