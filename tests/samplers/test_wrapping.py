"""What samplers made of others pass on: priorities to all or none, the end to all."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError, StaleError
from tests.buffer.support import Twin

MAKERS = {
    "mixture": lambda inner: mr.MixtureSampler([(mr.UniformSampler(0), 1), (inner, 1)]),
    "recent": lambda inner: mr.RecentSampler(3, 0.5, inner),
    "earliest": lambda inner: mr.ignore_earliest(1, inner),
    "sequence": lambda inner: mr.SequenceSampler(2, inner),
    "episode": lambda inner: mr.EpisodeSampler(inner),
}


class Probe(mr.UniformSampler):
    """Counts how often it was closed, and fails at that if it is to."""

    closed = 0

    def __init__(self, fails=False):
        super().__init__(0)
        self.fails = fails

    def close(self):
        self.closed += 1
        if self.fails:
            raise OSError("no")


def made(sampler, path=None):
    twin = Twin(path, 30, sampler=sampler)
    twin.extend([[k] for k in ["", "", "t"] * 5])
    return twin.buffer


def prioritized(name=None):
    return mr.PrioritizedSampler(1.0, eps=0, seed=0, name=name)


@pytest.mark.parametrize("outer", MAKERS)
@pytest.mark.parametrize("inner", ["mixture", "recent", "earliest"])
def test_closing_reaches_what_is_inside(outer, inner):
    probe = Probe()
    MAKERS[outer](MAKERS[inner](probe)).close()
    assert probe.closed == 1


def test_all_parts_are_closed_also_if_one_fails():
    probes = [Probe(), Probe(fails=True), Probe()]
    mixture = mr.MixtureSampler([(probe, 1) for probe in probes])
    with pytest.raises(OSError, match="no"):
        mixture.close()
    assert [probe.closed for probe in probes] == [1, 1, 1]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_closed_sampler_lets_others_have_its_priorities(tmp_path, kind):
    inner = prioritized("mine")
    sampler = MAKERS[kind](inner)
    buffer = made(sampler, tmp_path / "b")
    buffer.sample(4)
    other = prioritized("mine")
    sampler.close()
    other.draw(buffer.view, 4)
    assert other.where == "disk"
    other.close()
    buffer.close()


def test_priorities_in_ram_stay_when_the_sampler_is_closed():
    sampler = prioritized()
    buffer = made(sampler)
    steps = buffer.take(0, np.arange(10))
    buffer.update_priorities(steps, np.arange(1.0, 11))
    expected = buffer.sample(64)
    sampler.close()
    sampler.load_state_dict(sampler.state_dict() | {"step": 0})
    again = buffer.sample(64)
    np.testing.assert_array_equal(again.positions, expected.positions)
    np.testing.assert_array_equal(again.probabilities, expected.probabilities)


def raw(sampler, buffer):
    sampler.draw(buffer.view, 1)
    return sampler.state_dict(priorities=True)["priorities"].tolist()


class Unsaid(mr.PrioritizedSampler):
    """Does not say what it draws, as a user's sampler need not."""


def test_priorities_that_one_part_refuses_reach_none():
    single, within = Unsaid(1.0, eps=0, seed=0, name=None), prioritized()
    windows = mr.SequenceSampler(2, within)
    buffer = made(mr.MixtureSampler([(single, 1), (windows, 1)]))
    before = raw(single, buffer)
    steps = buffer.take(0, np.arange(4))
    with pytest.raises(SchemaError, match=r"priorities must have shape.*got \[4, 3\]"):
        buffer.update_priorities(steps, np.full((4, 3), 7.0))
    assert raw(single, buffer) == before
    assert buffer.update_priorities(steps, np.full((4, 2), 7.0)) == 0
    assert raw(single, buffer)[:4] == [7.0] * 4


class Refusing(mr.UniformSampler):
    """Takes no priorities at all, and says so when it is asked."""

    def check_priorities(self, view, env_ids, positions, values, mask=None):
        raise SchemaError("not these")

    def update_priorities(self, view, env_ids, positions, values, mask=None):
        raise AssertionError("was not asked first")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_sampler_inside_is_asked_before_the_first_one_takes_any(kind):
    single = Unsaid(1.0, eps=0, seed=0, name=None)
    wrapped = MAKERS[kind](Refusing(0))
    buffer = made(single)
    before = raw(single, buffer)
    mixture = mr.MixtureSampler([(single, 1), (wrapped, 1)])
    with pytest.raises(SchemaError, match="not these"):
        mixture.update_priorities(
            buffer.view, np.zeros(2, int), np.array([0, 1]), np.array([5.0, 5.0])
        )
    assert raw(single, buffer) == before


@pytest.mark.parametrize("kind", MAKERS)
def test_a_position_never_written_is_stale_wherever_it_arrives(kind):
    sampler = MAKERS[kind](prioritized())
    buffer = made(sampler)
    view, ids, ones = buffer.view, np.zeros(2, int), np.ones(2)
    for positions in ([0, 15], [0, -1]):
        with pytest.raises(StaleError, match="of environment 0 was never written"):
            sampler.update_priorities(view, ids, np.array(positions), ones)
        with pytest.raises(StaleError, match="of environment 0 was never written"):
            sampler.check_priorities(view, ids, np.array(positions), ones)
