"""Samplers around prioritized and shuffled ones: laws and priorities hold together."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError
from mmreplay.samplers.prioritized import PrioritizedSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import steps_of
from tests.samplers.frequencies import assert_distribution


def prioritized(seed=0):
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0, seed=seed)


def grown(twin, rng, times):
    for _ in range(times):
        twin.extend(rng.choice(["", "t", "u"], (7, 2), p=[0.7, 0.15, 0.15]).tolist())


def set_all(buffer, sampler, legal):
    """Give every legal start the priority that its position says."""
    env_ids, positions = np.array(legal).T
    values = 1.0 + positions % 3
    view = buffer.view
    assert sampler.update_priorities(view, env_ids, positions, values) == 0
    return dict(zip(legal, values.tolist(), strict=True))


def test_priorities_of_what_is_left_when_the_earliest_are_ignored(rng):
    sampler = mr.ignore_earliest(5, prioritized())
    twin = Twin(None, 30, 2, sampler=sampler)
    for _ in range(6):
        grown(twin, rng, 3)
        first, legal = twin.buffer.span.first, list(twin.oracle.legal())
        left = [p for p in legal if p[1] >= first[p[0]] + 5]
        values = set_all(twin.buffer, sampler, left)
        total = sum(values.values())
        drawn = [p for _ in range(30) for p in steps_of(twin.buffer.sample(400))]
        assert_distribution(drawn, {place: v / total for place, v in values.items()})


def test_a_late_update_does_not_bring_an_ignored_step_back(rng):
    sampler = mr.ignore_earliest(5, prioritized())
    twin = Twin(None, 30, 2, sampler=sampler)
    grown(twin, rng, 5)
    old = twin.buffer.sample(200)
    grown(twin, rng, 1)
    twin.buffer.update_priorities(old, np.full(200, 1e6))
    first = twin.buffer.span.first
    for _ in range(20):
        batch = twin.buffer.sample(100)
        assert (batch.positions >= first[batch.env_ids] + 5).all()


def test_a_mixture_follows_priorities_in_its_prioritized_part_alone(rng):
    sampler = mr.MixtureSampler([(prioritized(), 3), (mr.UniformSampler(1), 1)], seed=0)
    twin = Twin(None, 30, 2, sampler=sampler)
    grown(twin, rng, 6)
    values = set_all(twin.buffer, sampler, list(twin.oracle.legal()))
    total = sum(values.values())
    law = {p: 0.75 * v / total + 0.25 / len(values) for p, v in values.items()}
    drawn = [p for _ in range(30) for p in steps_of(twin.buffer.sample(400))]
    assert_distribution(drawn, law)


def test_newest_steps_join_prioritized_ones_with_their_weights(rng):
    sampler = mr.RecentSampler(2, 0.25, prioritized(), seed=0)
    twin = Twin(None, 30, 2, sampler=sampler)
    grown(twin, rng, 6)
    legal = list(twin.oracle.legal())
    values = set_all(twin.buffer, sampler, legal)
    total = sum(values.values())
    newest = {p for e in range(2) for p in [q for q in legal if q[0] == e][-2:]}
    rest = []
    for _ in range(60):
        batch = twin.buffer.sample(200)
        drawn = steps_of(batch)
        assert set(drawn[:50]) == newest
        assert (batch.weights[:50] == 1).all()
        for place, probability in zip(drawn[50:], batch.probabilities[50:], strict=True):
            assert probability == pytest.approx(values[place] / total)
        rest += drawn[50:]
    assert_distribution(rest, {place: value / total for place, value in values.items()})


def test_a_part_keeps_priorities_of_its_own(tmp_path, rng):
    twin = Twin(tmp_path / "b", 60, 2)
    grown(twin, rng, 8)
    view, legal = twin.buffer.view, list(twin.oracle.legal())
    for number, part in enumerate(mr.split(twin.buffer, [0.6, 0.4], seed=0)):
        sampler = part.sampler(prioritized(number))
        left = [p for p in legal if part.of(view).legal(*np.array([p]).T)[0]]
        values = set_all(twin.buffer, sampler, left)
        total = sum(values.values())
        drawn = [p for _ in range(30) for p in steps_of(sampler.draw(view, 400))]
        assert_distribution(drawn, {place: v / total for place, v in values.items()})
    twin.buffer.close()


def test_offline_and_online_learn_priorities_apart(rng):
    twins = [Twin(None, 30, 2, sampler=prioritized(k)) for k in range(2)]
    for twin in twins:
        grown(twin, rng, 6)
    both = mr.concat([twin.buffer for twin in twins], [0.5, 0.5], seed=0)
    for _ in range(40):
        batch = both.sample(64)
        values = 1.0 + (batch.positions + batch.buffer_ids) % 3
        assert both.update_priorities(batch, values) == 0
    for number, twin in enumerate(twins):
        legal = list(twin.oracle.legal())
        values = {p: 1.0 + (p[1] + number) % 3 for p in legal}
        total = sum(values.values())
        drawn = [p for _ in range(20) for p in steps_of(twin.buffer.sample(400))]
        assert_distribution(drawn, {place: v / total for place, v in values.items()})


def test_epochs_of_windows_of_a_part_with_the_earliest_ignored(tmp_path, rng):
    twin = Twin(tmp_path / "b", 60, 2)
    grown(twin, rng, 12)
    view = twin.buffer.view
    part, _ = mr.split(twin.buffer, [0.7, 0.3], seed=1)

    def made(inner):
        return mr.SequenceSampler(3, mr.ignore_earliest(6, part.sampler(inner)))

    shuffled, found = made(mr.ShuffledSampler(0)), []
    while shuffled.epoch == 0 and shuffled.more(view, 4):
        found += steps_of(shuffled.draw(view, 4))
    uniform = made(mr.UniformSampler(0))
    # At most 120 starts: one is missed with a probability below 120 * exp(-33).
    expected = set(steps_of(uniform.draw(view, 4000)))
    assert len(found) == len(set(found))
    assert set(found) == expected
    legal = {p for p in expected if p[1] >= view.span.first[p[0]] + 6}
    assert legal == expected
    twin.buffer.close()


@pytest.mark.parametrize(
    "make",
    [
        mr.UniformSampler,
        mr.StratifiedSampler,
        mr.DistinctSampler,
        mr.ShuffledSampler,
        mr.PrioritizedSampler,
        mr.RankPrioritizedSampler,
        lambda seed: mr.RecentSampler(3, 0.5, seed=seed),
        lambda seed: mr.EmphasizeRecentSampler(4, seed=seed),
    ],
)
def test_where_none_can_be_drawn_all_that_is_published_is_counted(make):
    transforms, sampler = [mr.NStep(15, 0.9)], make(seed=0)
    twin = Twin(None, 20, sampler=sampler, transforms=transforms)
    twin.extend([[""]] * 15)
    with pytest.raises(EmptyError, match="none of 15 published rows is a legal"):
        twin.buffer.sample(4)
    twin.extend([[""]])
    assert twin.buffer.sample(1).positions.tolist() == [0]
