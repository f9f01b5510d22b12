"""Samplers without a seed draw differently in every process, or refuse to."""

import json
import os

import pytest

import mmreplay as mr
from tests.frozen.frozen_worlds import buffer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def prioritized(seed=None):
    return mr.PrioritizedSampler(name=None, seed=seed)


# Each class, and each wrapper around one, by the seed of what draws.
SAMPLERS = {
    "uniform": lambda b, s: mr.UniformSampler(s),
    "distinct": lambda b, s: mr.DistinctSampler(s),
    "shuffled": lambda b, s: mr.ShuffledSampler(s),
    "stratified": lambda b, s: mr.StratifiedSampler(s),
    "recent": lambda b, s: mr.RecentSampler(9, 0.3, seed=s),
    "shrinking": lambda b, s: mr.EmphasizeRecentSampler(40, smallest=20, seed=s),
    "prioritized": lambda b, s: prioritized(s),
    "rank_prioritized": lambda b, s: mr.RankPrioritizedSampler(name=None, seed=s),
    "recent_of": lambda b, s: mr.RecentSampler(9, 0.3, mr.UniformSampler(s), seed=0),
    "sequence": lambda b, s: mr.SequenceSampler(3, mr.UniformSampler(s)),
    "sequence_prioritized": lambda b, s: mr.SequenceSampler(3, prioritized(s)),
    "group": lambda b, s: mr.GroupSampler("action", seed=s),
    "staleness": lambda b, s: mr.StalenessSampler("action", 0, seed=s),
    "uses": lambda b, s: mr.UseCounter(9, name=None, seed=s),
    "episode": lambda b, s: mr.EpisodeSampler(mr.UniformSampler(s)),
    "mixture": lambda b, s: mr.MixtureSampler(
        [(mr.UniformSampler(0), 1), (mr.DistinctSampler(s), 1)], seed=0
    ),
    "mixture_of_wrappers": lambda b, s: mr.MixtureSampler(
        [(mr.ignore_earliest(2, mr.UniformSampler(s)), 1)], seed=0
    ),
    "ignore_earliest": lambda b, s: mr.ignore_earliest(9, mr.ShuffledSampler(s)),
    "split": lambda b, s: mr.split(b, [0.5, 0.5])[0].sampler(mr.UniformSampler(s)),
    "sequence_in_split": lambda b, s: mr.split(b, [0.5, 0.5])[0].sampler(
        mr.SequenceSampler(2, mr.UniformSampler(s))
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("unseeded") / "a"
    buffer(path).close()
    return path


def in_child(call):
    """What a call returns in a forked child, or the name of what it raises."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = json.dumps(call())
        except BaseException as error:
            text = json.dumps(type(error).__name__)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read, "rb") as pipe:
        return json.loads(pipe.read())


def steps(made, count=32):
    """Steps of two draws."""
    batches = [made.sample(count), made.sample(count)]
    return [[batch.env_ids.tolist(), batch.positions.tolist()] for batch in batches]


def test_each_public_sampler_is_among_them():
    classes = {name for name in mr.__all__ if name.endswith("Sampler")}
    with buffer(None, "memory") as made:
        text = " ".join(repr(make(made, 0)) for make in SAMPLERS.values())
    missing = [name for name in classes if name not in text]
    assert not missing, f"add {missing} to SAMPLERS of this file"


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.sliced(3)
def test_an_unseeded_sampler_does_not_draw_in_a_fork(folder, name):
    with mr.ReplayBuffer.open(folder) as made:
        made.sampler = SAMPLERS[name](made, None)
        steps(made)
        assert in_child(lambda: steps(made)) == "ForkedError"
        # With a seed it does, and as the parent would.
        made.sampler = SAMPLERS[name](made, 5)
        child = in_child(lambda: steps(made))
        assert child == steps(made)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.sliced(3)
def test_unseeded_samplers_of_several_processes_draw_differently(folder, name):
    def fresh():
        with mr.ReplayBuffer.open(folder) as made:
            made.sampler = SAMPLERS[name](made, None)
            return json.dumps(steps(made))

    # 128 steps each of more than 20: alike by chance below 1e-50.
    found = [fresh(), fresh(), in_child(fresh), in_child(fresh)]
    assert "ForkedError" not in found
    assert len(set(found)) == 4
