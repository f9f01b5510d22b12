"""Samplers that are pickled or copied: they draw what the original draws."""

import copy
import pickle

import numpy as np
import pytest

import mmreplay as mr
from tests.buffer.support import schema, step

MEMORY = "memory"


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def per(**options):
    return mr.PrioritizedSampler(seed=1, **options)


def falling(number):
    """A schedule of the user's own, which pickles as its name."""
    return 1 / (1 + number)


def rich(buffer):
    """Episodes by their returns."""
    table = mr.episode_table(buffer)
    return mr.return_within(table, least=float(np.nanmedian(table.returns)))


SAMPLERS = {
    "uniform": lambda _: mr.UniformSampler(1),
    "uniform, no seed": lambda _: mr.UniformSampler(),
    "blocks": lambda _: mr.UniformSampler(1, block=4),
    "prioritized": lambda _: per(),
    "prioritized in RAM": lambda _: per(name=None),
    "prioritized, linear": lambda _: per(beta=mr.LinearSchedule(0.4, 1.0, 10)),
    "prioritized, alpha": lambda _: per(alpha=falling, alpha_every=2),
    "prioritized, buffer": lambda _: per(normalize="buffer"),
    "rank": lambda _: mr.RankPrioritizedSampler(seed=1, resort_every=20),
    "windows": lambda _: mr.SequenceSampler(4, mr.UniformSampler(1)),
    "windows, padded": lambda _: mr.SequenceSampler(4, per(), boundary="pad"),
    "windows, shuffled": lambda _: mr.SequenceSampler(4, mr.ShuffledSampler(1)),
    "episodes": lambda _: mr.EpisodeSampler(mr.UniformSampler(1)),
    "episodes, where": lambda b: mr.EpisodeSampler(mr.UniformSampler(1), where=rich(b)),
    "recent": lambda _: mr.RecentSampler(20, 0.5, per(), seed=1),
    "shrinking": lambda _: mr.EmphasizeRecentSampler(20, seed=1),
    "shuffled": lambda _: mr.ShuffledSampler(1),
    "stratified": lambda _: mr.StratifiedSampler(1),
    "distinct": lambda _: mr.DistinctSampler(1),
    "mixture": lambda _: mr.MixtureSampler([(mr.UniformSampler(1), 0.5), (per(), 0.5)], seed=1),
    "earliest": lambda _: mr.ignore_earliest(3, per()),
    "earliest windows": lambda _: mr.ignore_earliest(
        3, mr.SequenceSampler(4, mr.UniformSampler(1))
    ),
    "part": lambda b: mr.split(b, [0.5, 0.5], seed=0)[0].sampler(per()),
}


@pytest.fixture(params=["memory", "memmap"])
def buffer(request, tmp_path):
    path = None if request.param == MEMORY else tmp_path / "ring"
    with mr.ReplayBuffer.create(
        path, schema(), 100, engine=request.param, commit_every=None
    ) as made:
        for number in range(130):
            made.add(step(number, "t" if number % 9 == 8 else ""))
        yield made


def drawn(buffer, sampler, count):
    """So many batches, and what is learned of them, where that is kept."""
    buffer.sampler, found = sampler, []
    for _ in range(count):
        batch = buffer.sample(8)
        found.append((batch.env_ids, batch.positions, batch.probabilities, batch.weights))
        if getattr(sampler, "keeps_priorities", hasattr(sampler, "priorities")):
            buffer.update_priorities(batch, batch.positions % 7 + 1.0)
    return found


def same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("change", [pickled, copy.deepcopy])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_copy_draws_what_the_original_draws(buffer, kind, change):
    sampler = SAMPLERS[kind](buffer)
    drawn(buffer, change(sampler), 1)  # one of no buffer yet
    drawn(buffer, sampler, 3)
    copied = change(sampler)
    again = change(copied)  # one that was never used
    expected = drawn(buffer, sampler, 3)
    same(drawn(buffer, copied, 3), expected)
    same(drawn(buffer, again, 3), expected)


def test_a_copy_goes_to_another_buffer_as_the_original_would(buffer):
    other = mr.ReplayBuffer.create(None, schema(), 100, engine="memory")
    for number in range(50):
        other.add(step(number))
    sampler = per(name=None)
    drawn(buffer, sampler, 3)
    copied = pickled(sampler)
    same(drawn(other, copied, 2), drawn(other, sampler, 2))


def test_priorities_on_disk_count_more_than_those_of_a_copy(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "ring", schema(), 100) as buffer:
        for number in range(60):
            buffer.add(step(number))
        sampler = per()
        drawn(buffer, sampler, 1)
        copied = pickled(sampler)
        buffer.sampler = sampler
        batch = buffer.take(0, np.arange(59))
        buffer.update_priorities(batch, np.where(np.arange(59) == 7, 1e6, 1e-6))
        sampler.close()
        buffer.sampler = copied
        assert copied.where is None
        assert set(buffer.sample(50).positions.tolist()) == {7}
        assert copied.where == "disk"


def test_a_state_that_was_loaded_counts_in_a_copy_too(buffer):
    sampler, fresh = per(name=None), per(name=None)
    drawn(buffer, sampler, 3)
    fresh.load_state_dict(sampler.state_dict(priorities=True))
    same(drawn(buffer, pickled(fresh), 2), drawn(buffer, sampler, 2))
