"""Prioritized draws: exact laws, weights, updates, and the faults of others."""

import json
from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError, StaleError
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.rank_prioritized import RankPrioritizedSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import ListedView, SamplerContract, places
from tests.samplers.test_uniform import chi_square_limit

KINDS = [PrioritizedSampler, RankPrioritizedSampler]


class TestPrioritizedSampler(SamplerContract):
    def make(self, seed=0):
        return PrioritizedSampler(seed=seed, stratified=False)


class TestRankPrioritizedSampler(SamplerContract):
    def make(self, seed=0):
        return RankPrioritizedSampler(seed=seed, stratified=False)


def held(priorities, firsts=None, **options):
    """A sampler that was told the priorities of a view's rows, and the view."""
    view = ListedView(["s" * len(row) for row in priorities], firsts)
    options = {"alpha": 1.0, "eps": 0.0, "seed": 0} | options
    sampler = PrioritizedSampler(**options)
    set_all(sampler, view, priorities)
    return sampler, view


def set_all(sampler, view, priorities):
    env_ids, positions = np.array(view.places(), np.int64).T
    values = np.concatenate(priorities).astype(np.float32)
    assert sampler.update_priorities(view, env_ids, positions, values) == 0


def counts(draw):
    return Counter(places(draw))


def assert_law(drawn, law):
    """Frequencies are as likely as not under a law, by chi-square.

    The limit is passed once in a million draws, were the seeds not fixed; below five
    expected draws a cell the chi-square law does not hold.
    """
    found, total = Counter(drawn), sum(law.values())
    assert set(found) <= {place for place, mass in law.items() if mass > 0}
    statistic = 0.0
    for place, mass in law.items():
        expected = len(drawn) * mass / total
        if mass > 0:
            assert expected >= 5
            statistic += (found[place] - expected) ** 2 / expected
    cells = sum(mass > 0 for mass in law.values())
    assert statistic < chi_square_limit(max(1, cells - 1))


# Golden values from alf, of 1,000 stratified draws (env_ids, positions and shares).


def test_equal_priorities_share_the_strata():
    sampler, view = held([[1, 1]])
    assert counts(sampler.draw(view, 1000)) == {(0, 0): 500, (0, 1): 500}


def test_strata_give_each_step_its_exact_share():
    sampler, view = held([[0.5, 1.5]])
    assert counts(sampler.draw(view, 1000)) == {(0, 0): 250, (0, 1): 750}


@pytest.mark.parametrize(
    ("priorities", "shares", "ratios"),
    [
        ([[1.5], [0.5, 1.5], [1.5]], [300, 100, 300, 300], [1.2, 0.4, 1.2, 1.2]),
        ([[1.5], [0.5, 1.0], [1.0]], [375, 125, 250, 250], [1.5, 0.5, 1.0, 1.0]),
    ],
)
def test_shares_and_mean_weights_are_alfs(priorities, shares, ratios):
    sampler, view = held(priorities, normalize="mean", beta=1.0)
    draw = sampler.draw(view, 1000)
    found = counts(draw)
    assert [found[place] for place in view.places()] == shares
    expected = dict(zip(view.places(), ratios, strict=True))
    for place, weight in zip(places(draw), draw.weights, strict=True):
        assert weight == pytest.approx(1 / expected[place], rel=1e-6)


def test_weights_of_a_whole_ring_are_alfs():
    sampler, view = held([[1, 1, 1, 3], [1, 5, 1, 1]], [2, 2], normalize="mean", beta=1)
    draw = sampler.draw(view, 1400)
    found = dict(zip(places(draw), (1 / draw.weights).tolist(), strict=True))
    assert found[0, 5] == pytest.approx(1.7142857, rel=1e-6)
    assert found[1, 3] == pytest.approx(2.8571429, rel=1e-6)
    assert found[0, 2] == pytest.approx(0.5714286, rel=1e-6)


def test_a_new_row_enters_at_the_highest_priority_in_the_buffer(tmp_path):
    twin = Twin(None, 4, 2, stored=True, sampler=mr.PrioritizedSampler(alpha=1, seed=0))
    twin.extend([["", ""]] * 6)
    batch = twin.buffer.sample(64)
    given = {(0, 3): 3.0, (1, 5): 5.0}
    values = [given.get(place, 1.0) for place in places(batch)]
    twin.buffer.update_priorities(batch, np.array(values))
    twin.add(["", ""])
    draw = twin.buffer.sample(1000)
    masses = dict(zip(places(draw), draw.probabilities, strict=True))
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
    assert masses_of(twin.buffer) == pytest.approx(
        {(0, p): 1 / 4 for p in (1, 2, 3, 4)}, rel=1e-5
    )


def test_the_initial_priority_is_the_least_to_enter_at():
    sampler = mr.PrioritizedSampler(alpha=1, initial_priority=3.0, eps=0, seed=0)
    twin = Twin(None, 8, stored=True, sampler=sampler)
    twin.extend([[""]] * 2)
    update(twin.buffer, [(0, 0), (0, 1)], [1.0, 1.0])
    twin.add([""])
    assert masses_of(twin.buffer)[0, 2] == pytest.approx(3 / 5)


def update(buffer, pairs, values):
    env_ids, positions = np.array(pairs, np.int64).reshape(-1, 2).T
    return buffer.sampler.update_priorities(
        buffer.view, env_ids, positions, np.array(values)
    )


def masses_of(buffer, count=2000):
    """Probability of every step that a draw finds."""
    draw = buffer.sampler.draw(buffer.view, count)
    return dict(zip(places(draw), draw.probabilities.tolist(), strict=True))


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(
    ("alpha", "eps"), [(0.6, 1e-6), (1.0, 0.0), (2.5, 0.5), (0, 0)]
)
def test_frequencies_and_probabilities_are_the_laws(alpha, eps, stratified):
    priorities = [[0.3, 2.0, 0.9, 7.0], [1.1, 0.25], [4.0, 4.0, 0.7]]
    sampler, view = held(
        priorities, [5, 0, 9], alpha=alpha, eps=eps, stratified=stratified
    )
    masses = (np.concatenate(priorities).astype(np.float32) + eps) ** alpha
    law = dict(zip(view.places(), masses, strict=True))
    drawn = []
    for _ in range(40):
        draw = sampler.draw(view, 600)
        drawn += places(draw)
        expected = [law[place] / masses.sum() for place in places(draw)]
        np.testing.assert_allclose(draw.probabilities, expected, rtol=1e-6)
    assert_law(drawn, law)


def test_strata_leave_no_step_off_its_share_by_one():
    sampler, view = held([np.random.default_rng(3).random(40)])
    draw = sampler.draw(view, 500)
    shares = dict(zip(places(draw), 500 * draw.probabilities, strict=True))
    for place, count in counts(draw).items():
        # A step's segment of the masses meets that many strata, whole ones and two
        # at its ends.
        assert abs(count - shares[place]) < 2


@pytest.mark.parametrize("normalize", ["batch", "buffer", "mean"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_what_the_paper_says(normalize, beta):
    priorities = [[0.3, 2.0, 0.9, 7.0, 0.01]]
    sampler, view = held(priorities, beta=beta, normalize=normalize, stratified=False)
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
    sampler, view = held([[2.0, 4.0, 8.0]], beta=1, normalize="buffer")
    ids = np.zeros(1, np.int64)
    for position, value, least in ((0, 16.0, 4.0), (1, 0.5, 0.5), (1, 9.0, 8.0)):
        sampler.update_priorities(view, ids, np.array([position]), np.array([value]))
        draw = sampler.draw(view, 50)
        values = draw.probabilities * sampler._work._priorities.law.total
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
    sampler, view = held(
        [[1.0, 3.0]], alpha=mr.LinearSchedule(0.0, 1.0, 4), alpha_every=2
    )
    found = [
        dict(zip(places(d), d.probabilities, strict=True))[0, 1]
        for d in (sampler.draw(view, 100) for _ in range(6))
    ]
    expected = [3**a / (1 + 3**a) for a in (0, 0, 0.5, 0.5, 1, 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_priority_of_zero_is_never_drawn_and_its_row_is_still_legal():
    sampler, view = held([[0.0, 1.0, 0.0, 3.0]], beta=1, normalize="mean")
    draw = sampler.draw(view, 1000)
    assert counts(draw) == {(0, 1): 250, (0, 3): 750}
    np.testing.assert_allclose(draw.weights[:250], 1 / (4 * 0.25))
    sampler.update_priorities(view, np.zeros(1, int), np.array([0]), np.array([4.0]))
    assert counts(sampler.draw(view, 1000)) == {(0, 0): 500, (0, 1): 125, (0, 3): 375}


def test_priorities_that_are_all_zero_are_said():
    sampler, view = held([[0.0, 0.0]])
    with pytest.raises(EmptyError, match=r"priority 0 for all of 2 .*eps above 0"):
        sampler.draw(view, 3)


def test_eps_keeps_a_priority_of_zero_alive():
    sampler, view = held([[0.0, 0.0]], eps=1e-6)
    assert counts(sampler.draw(view, 100)) == {(0, 0): 50, (0, 1): 50}


@pytest.mark.parametrize("make", KINDS)
class TestUpdates:
    """What `update_priorities` takes, drops and refuses."""

    def buffer(self, make, capacity=4, num_envs=2, **options):
        twin = Twin(None, capacity, num_envs, sampler=make(seed=0, **options))
        return twin, twin.buffer

    def test_of_equal_places_the_last_wins(self, make):
        _, view = held([[1.0, 1.0, 1.0]])
        sampler = make(alpha=1.0, seed=0)
        sampler.draw(view, 1)
        ids = np.zeros(4, np.int64)
        where = np.array([1, 2, 1, 1])
        sampler.update_priorities(view, ids, where, np.array([9.0, 4.0, 7.0, 2.5]))
        column = sampler._work._priorities.column.values
        assert column[:3].tolist() == [1.0, 2.5, 4.0]

    def test_nothing_may_be_updated(self, make):
        twin, buffer = self.buffer(make)
        assert update(buffer, [], []) == 0
        twin.extend([["", ""]] * 3)
        assert update(buffer, [], []) == 0

    def test_what_was_overwritten_is_dropped_and_counted(self, make):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 9)
        buffer.sample(2)
        before = column_of(buffer).copy()
        # Position 4 lies where position 8 would in a ring of four slots.
        assert update(buffer, [(0, 4), (1, 0)], [77.0, 77.0]) == 2
        assert (column_of(buffer) == before).all()
        assert update(buffer, [(1, 4), (0, 6), (1, 1)], [77.0, 5.0, 77.0]) == 2
        assert (column_of(buffer) == 77.0).sum() == 0
        assert (column_of(buffer) == 5.0).sum() == 1

    @pytest.mark.parametrize("position", [9, 10, 1 << 40, -1])
    def test_what_was_never_written_is_refused(self, make, position):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 9)
        buffer.sample(2)
        before = column_of(buffer).copy()
        with pytest.raises(StaleError, match=r"never written, expected one below 9"):
            update(buffer, [(0, 7), (1, position)], [3.0, 3.0])
        assert (column_of(buffer) == before).all()

    @pytest.mark.parametrize("env_id", [2, -1])
    def test_environments_that_are_none_are_refused(self, make, env_id):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        with pytest.raises(SchemaError, match=r"env_ids: got values in .*\[0, 2\)"):
            update(buffer, [(env_id, 1)], [1.0])

    @pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, -np.inf, 1e39])
    def test_what_is_no_priority_is_refused_and_nothing_is_taken(self, make, value):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        buffer.sample(2)
        before = column_of(buffer).copy()
        with pytest.raises(SchemaError, match=r"priorities: got .* at 1, expected fin"):
            update(buffer, [(0, 0), (0, 1)], [5.0, value])
        assert (column_of(buffer) == before).all()

    def test_an_illegal_start_is_never_opened(self, make):
        twin, buffer = self.buffer(make, capacity=8, num_envs=1)
        twin.extend([[""], ["u"], [""], [""]])
        # Position 1 ends without a final observation, and 3 waits for the next row.
        update(buffer, [(0, 1), (0, 3)], [1e6, 1e6])
        assert set(places(buffer.sample(300))) == {(0, 0), (0, 2)}

    def test_a_row_keeps_the_priority_that_it_got_before_it_was_legal(self, make):
        twin, buffer = self.buffer(make, capacity=8, num_envs=1)
        twin.extend([[""]] * 3)
        update(buffer, [(0, 0), (0, 2)], [2.0, 6.0])
        twin.extend([[""]] * 2)
        assert set(places(buffer.sample(300))) == {(0, p) for p in range(4)}
        assert column_of(buffer)[:5].tolist() == [2.0, 1.0, 6.0, 6.0, 6.0]

    def test_shapes_that_differ_are_refused(self, make):
        twin, buffer = self.buffer(make)
        twin.extend([["", ""]] * 3)
        with pytest.raises(SchemaError, match=r"got shape \[3\] for \[2\] env_ids"):
            update(buffer, [(0, 0), (0, 1)], [1.0, 2.0, 3.0])
        with pytest.raises(SchemaError, match="got bool, expected real numbers"):
            update(buffer, [(0, 0)], [True])

    def test_windows_mix_the_priorities_of_their_steps(self, make):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1, eta=0.75)
        twin.extend([[""]] * 9)
        values = np.array([[1.0, 4.0, np.nan], [2.0, 2.0, 8.0]])
        mask = np.array([[True, True, False], [True, True, True]])
        buffer.sampler.update_priorities(
            buffer.view, np.zeros(2, int), np.array([1, 4]), values, mask
        )
        # 0.75 * 4 + 0.25 * 2.5 and 0.75 * 8 + 0.25 * 4.
        assert column_of(buffer)[[1, 4]].tolist() == [3.625, 7.0]

    @pytest.mark.parametrize(
        ("mask", "told"),
        [
            ([[True, False], [False, False]], "without a step for window 1"),
            ([[True], [True]], r"a mask of shape \[2, 1\], expected \[2, 2\]"),
        ],
    )
    def test_masks_that_do_not_fit_are_refused(self, make, mask, told):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1)
        twin.extend([[""]] * 9)
        with pytest.raises(SchemaError, match=told):
            buffer.sampler.update_priorities(
                buffer.view, np.zeros(2, int), np.array([1, 4]), np.ones((2, 2)),
                np.array(mask),
            )  # fmt: skip

    def test_bad_values_of_windows_are_refused(self, make):
        twin, buffer = self.buffer(make, capacity=9, num_envs=1)
        twin.extend([[""]] * 9)
        with pytest.raises(SchemaError, match="priorities: got nan at 3"):
            buffer.sampler.update_priorities(
                buffer.view, np.zeros(2, int), np.array([1, 4]),
                np.array([[1, 2], [3, np.nan]]),
            )  # fmt: skip


def column_of(buffer):
    return buffer.sampler._work._priorities.column.values


# The faults of alf's prioritized buffer (and of pytorchrl's), each undone here.


@pytest.mark.parametrize("make", KINDS)
def test_an_unwritten_row_is_never_drawn(make):
    twin = Twin(None, 8, 3, stored=True, sampler=make(seed=0))
    twin.add([""], env_ids=[1])
    assert set(places(twin.buffer.sample(400))) == {(1, 0)}


@pytest.mark.parametrize("make", KINDS)
def test_priorities_that_are_all_outdated_are_no_error(make):
    twin = Twin(None, 4, stored=True, sampler=make(seed=0))
    twin.extend([[""]] * 20)
    assert update(twin.buffer, [(0, 1), (0, 2)], [9.0, 9.0]) == 2


@pytest.mark.parametrize("make", KINDS)
def test_an_empty_buffer_is_an_empty_error(make):
    twin = Twin(None, 4, sampler=make(seed=0))
    with pytest.raises(EmptyError, match=r"got 0 published rows of which none"):
        twin.buffer.sample(2)


@pytest.mark.parametrize("make", KINDS)
def test_cleared_rows_are_not_drawn(make):
    twin = Twin(None, 6, 2, stored=True, sampler=make(seed=0))
    twin.extend([["", ""]] * 5)
    update(twin.buffer, [(0, 1), (1, 2)], [100.0, 50.0])
    twin.buffer.sample(8)
    twin.buffer.clear([0])
    assert {e for e, _ in places(twin.buffer.sample(300))} == {1}
    twin.buffer.clear()
    with pytest.raises(EmptyError):
        twin.buffer.sample(2)
    twin.extend([["", ""]] * 2)
    assert set(places(twin.buffer.sample(300))) == {(0, 5), (0, 6), (1, 5), (1, 6)}
    # What was cleared is not the highest priority of what came after.
    assert column_of(twin.buffer).max() == 1.0


@pytest.mark.parametrize("make", KINDS)
def test_dequeued_rows_are_not_drawn(make):
    twin = Twin(None, 6, stored=True, sampler=make(seed=0))
    twin.extend([[""]] * 5)
    update(twin.buffer, [(0, 0)], [100.0])
    twin.buffer.dequeue(2)
    assert set(places(twin.buffer.sample(300))) == {(0, 2), (0, 3), (0, 4)}


def test_weights_after_a_reload_are_what_they_were(tmp_path):
    with Twin(tmp_path / "ring", 8, stored=True).buffer as buffer:
        buffer.sampler = sampler = mr.PrioritizedSampler(alpha=1, beta=1, seed=0)
        for number in range(5):
            buffer.add(
                observation=[number, 0], next_observation=[0, 0], action=0, reward=0,
                terminated=False, truncated=False,
            )  # fmt: skip
        update(buffer, [(0, 1), (0, 3)], [2.5, 0.5])
        state = sampler.state_dict()
        expected = sampler.draw(buffer.view, 20)
        sampler.close()
        again = mr.PrioritizedSampler(alpha=1, beta=1, seed=5)
        again.load_state_dict(json.loads(json.dumps(state)))
        found = again.draw(buffer.view, 20)
        assert places(found) == places(expected)
        assert (found.weights == expected.weights).all()
        again.close()


@pytest.mark.parametrize("make", KINDS)
def test_a_late_priority_does_not_open_an_ignored_start(make):
    sampler = mr.ignore_earliest(2, make(seed=0))
    twin = Twin(None, 8, stored=True, sampler=sampler)
    twin.extend([[""]] * 6)
    batch = twin.buffer.sample(64)
    assert set(places(batch)) == {(0, p) for p in (2, 3, 4, 5)}
    twin.extend([[""]] * 4)
    # 2 is alive, and one of the earliest two now.
    twin.buffer.update_priorities(batch, np.full(64, 3.0))
    assert set(places(twin.buffer.sample(300))) == {(0, p) for p in range(4, 10)}


@pytest.mark.parametrize("make", KINDS)
def test_priorities_stay_when_windows_become_longer(make):
    inner = make(seed=0)
    twin = Twin(None, 20, stored=True, sampler=mr.SequenceSampler(2, inner))
    twin.extend([[""]] * 12)
    batch = twin.buffer.sample(40)
    twin.buffer.update_priorities(batch, 1.0 + batch.positions)
    before = inner._work._priorities.column.values.copy()
    twin.buffer.sampler = mr.SequenceSampler(5, inner)
    assert set(places(twin.buffer.sample(400))) == {(0, p) for p in range(8)}
    twin.buffer.sampler = mr.SequenceSampler(2, inner)
    assert set(places(twin.buffer.sample(400))) == {(0, p) for p in range(11)}
    assert (inner._work._priorities.column.values == before).all()


@pytest.mark.parametrize("make", KINDS)
def test_no_environment_and_no_position_is_mixed_up(make, rng):
    twin = Twin(None, 32, 4, stored=True, layout="time_major", sampler=make(seed=0))
    twin.extend([[""] * 4] * 70)
    pairs = [(e, p) for e in range(4) for p in range(38, 70)]
    rng.shuffle(pairs)
    values = [e + p / 100 for e, p in pairs]
    assert update(twin.buffer, pairs, values) == 0
    if make is PrioritizedSampler:
        total = sum((v + 1e-6) ** 0.6 for v in values)
        for (env_id, position), found in masses_of(twin.buffer, 9000).items():
            mass = (env_id + position / 100 + 1e-6) ** 0.6
            assert found == pytest.approx(mass / total, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"alpha": -1}, r"alpha: got -1, expected a number in \[0, 4\]"),
        ({"alpha": "x"}, "alpha: got 'x', expected a number"),
        ({"beta": 1.5}, r"beta: got 1.5, expected a number in \[0, 1\]"),
        ({"beta": float("nan")}, "beta: got nan"),
        ({"normalize": "max"}, "normalize: got 'max', expected one of"),
        ({"eta": 2}, r"eta: got 2, expected a number in \[0, 1\]"),
        ({"initial_priority": 0}, "initial_priority: got 0, expected a number in"),
        ({"name": "a/b"}, "name: got 'a/b', expected 1 to 64 letters"),
        ({"name": ".."}, r"name: got '\.\.', expected 1 to 64 letters"),
    ],
)
@pytest.mark.parametrize("make", KINDS)
def test_arguments_out_of_range_are_refused(make, options, told):
    with pytest.raises(SchemaError, match=told):
        make(**options)


def test_arguments_of_one_kind_out_of_range_are_refused():
    with pytest.raises(SchemaError, match="eps: got -1, expected a finite number"):
        PrioritizedSampler(eps=-1)
    with pytest.raises(SchemaError, match="alpha_every: got 0, expected an integer"):
        PrioritizedSampler(alpha_every=0)
    with pytest.raises(
        SchemaError, match=r"resort_every: got 0\.5, expected an integer"
    ):
        RankPrioritizedSampler(resort_every=0.5)


@pytest.mark.parametrize("make", KINDS)
def test_a_schedule_out_of_range_is_refused_when_it_gets_there(make):
    sampler = make(beta=lambda step: 0.5 + step, seed=0)
    view = ListedView(["sss"])
    sampler.draw(view, 2)
    with pytest.raises(SchemaError, match=r"beta: got 1\.5, expected"):
        sampler.draw(view, 2)


# Exact resume.


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_run_stopped_after_any_batch_goes_on_exactly(make, stop, rng):
    view = ListedView(["s" * 30, "sxsx" * 5, "ss-"], [4, 0, 7])

    def go_on(sampler, number):
        draw = sampler.draw(view, 16)
        errors = np.random.default_rng(number).random(16)
        sampler.update_priorities(view, draw.env_ids, draw.positions, errors)
        return places(draw), draw.probabilities.tolist(), draw.weights.tolist()

    sampler = make(
        seed=3, name=None, **({"resort_every": 40} if make is KINDS[1] else {})
    )
    for number in range(stop):
        go_on(sampler, number)
    state = sampler.state_dict(priorities=True)
    expected = [go_on(sampler, stop + n) for n in range(6)]
    other = make(
        seed=9, name=None, **({"resort_every": 40} if make is KINDS[1] else {})
    )
    other.draw(view, 16)
    other.load_state_dict(state)
    assert [go_on(other, stop + n) for n in range(6)] == expected


@pytest.mark.parametrize("make", KINDS)
def test_priorities_of_another_buffer_are_refused(make):
    twins = [Twin(None, 6, stored=True, sampler=make(seed=0)) for _ in range(2)]
    for twin in twins:
        twin.extend([[""]] * 4)
        twin.buffer.sample(3)
    state = twins[0].buffer.sampler.state_dict(priorities=True)
    twins[1].buffer.sampler.load_state_dict(state)
    with pytest.raises(FormatError, match=r"priorities of the buffer .* with 1 env"):
        twins[1].buffer.sample(3)


@pytest.mark.parametrize(
    "damage",
    [
        {"uuid": "zz"}, {"uuid": None}, {"seen": [-1]}, {"seen": [9]}, {"first": "x"},
        {"priorities": np.full(4, np.nan)}, {"priorities": np.full(4, -1.0)},
        {"priorities": "abc"}, {"priorities": np.ones((2, 2))},
        {"first": [5], "seen": [1]},
    ],
)  # fmt: skip
def test_damaged_priorities_are_refused_and_nothing_is_taken_over(damage):
    twin = Twin(None, 6, stored=True, sampler=mr.PrioritizedSampler(seed=0))
    twin.extend([[""]] * 4)
    twin.buffer.sample(3)
    sampler = twin.buffer.sampler
    state = sampler.state_dict(priorities=True)
    with pytest.raises(FormatError, match="sampler state: "):
        sampler.load_state_dict(state | {"seed": 77} | damage)
    assert sampler.state_dict()["seed"] == 0
    twin.buffer.sample(3)


def test_the_sampler_says_what_it_is():
    sampler = mr.PrioritizedSampler(seed=0)
    assert repr(sampler) == (
        "<PrioritizedSampler 'prioritized', step 0, priorities of no buffer yet>"
    )
    assert sampler.where is None
    sampler.draw(ListedView(["ss"]), 2)
    assert sampler.where == "RAM, as the data"
    assert repr(sampler).endswith("step 1, priorities: RAM, as the data>")


def test_it_takes_at_most_10_bytes_a_row_beside_the_column():
    view = ListedView(["s" * 100_000])
    sampler = PrioritizedSampler(normalize="buffer", seed=0)
    draw = sampler.draw(view, 64)
    sampler.update_priorities(view, draw.env_ids, draw.positions, np.arange(64.0))
    sampler.draw(view, 64)
    rows = sampler._work._priorities
    rows.highest()
    held = rows.law._tree.nbytes
    for found in (rows.law._low, rows._highest):
        held += found._blocks.nbytes + found._above._blocks.nbytes
    assert held <= 10 * len(rows.column.values)
