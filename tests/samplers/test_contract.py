"""Every built-in sampler keeps the contract of samplers."""

import pytest

import mmreplay as mr
from mmreplay.testing import SAMPLER_RULES, check_sampler

pytestmark = pytest.mark.filterwarnings(
    "ignore:windows with boundary='any' hold steps whose next observation is unknown"
)


def mixture(seed):
    members = [(mr.UniformSampler(seed), 2), (mr.StratifiedSampler(seed + 50), 1)]
    return mr.MixtureSampler(members, seed=seed)


SAMPLERS = {
    "uniform": mr.UniformSampler,
    "uniform, blocks": lambda seed: mr.UniformSampler(seed, block=4),
    "distinct": mr.DistinctSampler,
    "shuffled": mr.ShuffledSampler,
    "shuffled, blocks": lambda seed: mr.ShuffledSampler(seed, block=4),
    "shuffled, ranks": lambda seed: mr.ShuffledSampler(seed, rank=1, num_ranks=2),
    "shuffled, batches": lambda seed: mr.ShuffledSampler(seed, batches=5),
    "in order": lambda seed: mr.ShuffledSampler(seed, shuffle=False),
    "prioritized": lambda seed: mr.PrioritizedSampler(seed=seed),
    "prioritized, independent": lambda seed: mr.PrioritizedSampler(
        seed=seed, stratified=False, normalize="buffer"
    ),
    "ranks": lambda seed: mr.RankPrioritizedSampler(seed=seed),
    "ranks, independent": lambda seed: mr.RankPrioritizedSampler(seed=seed, stratified=False),
    "recent": lambda seed: mr.RecentSampler(2, 0.4, mr.UniformSampler(seed), seed=seed),
    "emphasize recent": lambda seed: mr.EmphasizeRecentSampler(40, seed=seed),
    "stratified": mr.StratifiedSampler,
    "stratified, independent": lambda seed: mr.StratifiedSampler(seed, stratified=False),
    "mixture": mixture,
    "ignore earliest": lambda seed: mr.ignore_earliest(2, mr.UniformSampler(seed)),
    "ignore earliest, sequences": lambda seed: mr.ignore_earliest(
        2, mr.SequenceSampler(2, mr.PrioritizedSampler(seed=seed))
    ),
    "sequences": lambda seed: mr.SequenceSampler(3, mr.UniformSampler(seed)),
    "sequences, padded": lambda seed: mr.SequenceSampler(
        4, mr.PrioritizedSampler(seed=seed), boundary="pad", burn_in=2
    ),
    "sequences, shuffled": lambda seed: mr.SequenceSampler(
        2, mr.ShuffledSampler(seed), boundary="any", bootstrap=1
    ),
    "episodes": lambda seed: mr.EpisodeSampler(mr.UniformSampler(seed)),
    "episodes, ragged": lambda seed: mr.EpisodeSampler(mr.ShuffledSampler(seed), layout="ragged"),
    "groups": lambda seed: mr.GroupSampler("pair", seed=seed),
    "recent versions": lambda seed: mr.StalenessSampler("pair", 9, seed=seed),
    "priorities of recent versions": lambda seed: mr.StalenessSampler(
        "pair", 9, sampler=mr.PrioritizedSampler(seed=seed), seed=seed
    ),
    "groups of recent versions": lambda seed: mr.StalenessSampler(
        "pair", 9, sampler=mr.GroupSampler("pair", seed=seed), seed=seed
    ),
    "uses": lambda seed: mr.UseCounter(60_000, mr.UniformSampler(seed), name=None, seed=seed),
    "leases of groups": lambda seed: mr.UseCounter(
        1, mr.GroupSampler("pair", seed=seed), lease_s=1e-9, name=None, seed=seed
    ),
}
OPTIONS = {
    "in order": {"depends_on_seed": False},
    "shuffled, ranks": {"draws_every_start": False},
    "ignore earliest, sequences": {"draws_every_start": False},
    "ignore earliest": {"draws_every_start": False},
    "groups": {"draws_every_start": False},
    "groups of recent versions": {"draws_every_start": False},
    "leases of groups": {"draws_every_start": False},
}
# `batches` is the number of batches of an epoch, whatever their size.
SIZES_OF_ITS_OWN = {("shuffled, batches", "draws_the_promised_arrays")}
CASES = [
    pytest.param(name, rule, id=f"{name}-{rule}")
    for name in SAMPLERS
    for rule in SAMPLER_RULES
    if (name, rule) not in SIZES_OF_ITS_OWN
]


@pytest.mark.parametrize(("name", "rule"), CASES)
@pytest.mark.sliced(100)
def test_built_in_samplers_keep_the_contract(name, rule, tmp_path):
    options = OPTIONS.get(name, {})
    check_sampler(SAMPLERS[name], tmp_path, rules=[rule], **options)
