"""Whether a sampler's seed was given, or drawn from the system."""

import pytest

import mmreplay as mr
from mmreplay.samplers.base import unseeded

OWN = {
    "DistinctSampler": mr.DistinctSampler,
    "RecentSampler": lambda seed=None: mr.RecentSampler(5, 0.5, seed=seed),
    "EmphasizeRecentSampler": lambda seed=None: mr.EmphasizeRecentSampler(10, seed=seed),
    "GroupSampler": lambda seed=None: mr.GroupSampler("group", seed=seed),
    "ShuffledSampler": mr.ShuffledSampler,
    "StalenessSampler": lambda seed=None: mr.StalenessSampler("version", 0, seed=seed),
    "StratifiedSampler": mr.StratifiedSampler,
    "UniformSampler": mr.UniformSampler,
}
AROUND = {
    "EpisodeSampler": mr.EpisodeSampler,
    "MixtureSampler": lambda inner: mr.MixtureSampler([(inner, 1)], seed=0),
    "RecentSampler": lambda inner: mr.RecentSampler(5, 0.5, sampler=inner, seed=0),
    "SequenceSampler": lambda inner: mr.SequenceSampler(3, inner),
    "ignore_earliest": lambda inner: mr.ignore_earliest(2, inner),
}


def test_every_public_sampler_without_priorities_is_looked_at():
    names = {name for name in mr.__all__ if name.endswith("Sampler")}
    kept = {"PrioritizedSampler", "RankPrioritizedSampler"}
    assert names - kept == {*OWN, *AROUND} - {"ignore_earliest"}


@pytest.mark.parametrize("name", OWN)
def test_a_seed_is_given_or_loaded(name):
    sampler = OWN[name]()
    assert unseeded(sampler) == name
    assert unseeded(OWN[name](seed=0)) is None
    sampler.load_state_dict(OWN[name]().state_dict())
    assert unseeded(sampler) is None


@pytest.mark.parametrize("name", AROUND)
def test_what_draws_inside_needs_a_seed_as_well(name):
    make = AROUND[name]
    sampler = make(mr.UniformSampler())
    assert unseeded(sampler) == "UniformSampler"
    assert unseeded(make(mr.UniformSampler(0))) is None
    sampler.load_state_dict(make(mr.UniformSampler()).state_dict())
    assert unseeded(sampler) is None
