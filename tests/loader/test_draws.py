"""What goes back to draws that a DataLoader asked for: priorities, and states."""

from collections import deque

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError, StaleError
from tests.contracts.sampler import steps_of
from tests.loader.support import fill
from tests.loader.test_several import columns
from tests.loader.test_workers import WORKERS, options


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draws")
    fill(folder / "a")
    fill(folder / "b", count=60)
    return [folder / "a", folder / "b"]


def prioritized(seed=0):
    return mr.PrioritizedSampler(alpha=1.0, seed=seed, name=None)


def several(paths, make=prioritized, seed=0):
    buffers = [
        mr.ReplayBuffer.open(path, sampler=make(seed + number)) for number, path in enumerate(paths)
    ]
    return mr.concat(buffers, [3, 1], seed=seed)


def loader_of(dataset, draws, workers=0, context=None):
    more = options(workers, context)
    if workers:
        more["prefetch_factor"] = 1
    return DataLoader(dataset, sampler=draws, batch_size=None, **more)


def values_of(batch):
    """Priorities that single out some steps."""
    return np.where(batch.positions % 10 == 7, 5.0, 0.01)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_priorities_count_for_every_draw_made_after_them(paths, workers, context):
    dataset, drawn = mr.ReplayDataset(paths[0]), []
    draws = dataset.draws(prioritized(), 32, num_batches=30)
    with mr.ReplayBuffer.open(paths[0], sampler=prioritized()) as alone:
        # One a worker, and another is made before a batch is handed over.
        ahead = deque(alone.sample(32) for _ in range(workers))
        for batch in loader_of(dataset, draws, workers, context):
            if len(drawn) + workers < 30:
                ahead.append(alone.sample(32))
            expected = ahead.popleft()
            assert steps_of(batch) == steps_of(expected)
            np.testing.assert_allclose(batch.weights, expected.weights)
            assert draws.update_priorities(batch, values_of(batch)) == 0
            alone.update_priorities(expected, values_of(expected))
            drawn.append(batch)
    first, last = (np.mean(b.positions.numpy() % 10 == 7) for b in drawn[:: len(drawn) - 1])
    assert first < 0.4 < 0.8 < last


@pytest.mark.parametrize(("workers", "context"), WORKERS[:2])
def test_priorities_of_several_buffers_count_for_later_draws(paths, workers, context):
    dataset, alone = mr.ConcatDataset(several(paths)), several(paths)
    draws = dataset.draws(32, num_batches=20)
    ahead, done = deque(alone.sample(32) for _ in range(workers)), 0
    for batch in loader_of(dataset, draws, workers, context):
        if done + workers < 20:
            ahead.append(alone.sample(32))
        expected = ahead.popleft()
        assert columns(batch) == columns(expected)
        assert draws.update_priorities(batch, values_of(batch)) == 0
        alone.update_priorities(expected, values_of(expected))
        done += 1
    assert done == 20


def test_priorities_of_windows_go_to_the_sampler_inside(paths):
    dataset = mr.ReplayDataset(paths[0])
    draws = dataset.draws(mr.SequenceSampler(3, prioritized()), 400)
    batches = iter(loader_of(dataset, draws))
    batch = next(batches)
    values = np.where(batch.positions[:, None] % 10 == 7, 5.0, [0.0] * 3)
    assert draws.update_priorities(batch, values) == 0
    assert (next(batches).positions % 10 == 7).float().mean() > 0.9


def test_priorities_that_nobody_keeps_are_refused(paths):
    dataset = mr.ReplayDataset(paths[0])
    draws = dataset.draws(mr.UniformSampler(0), 4)
    batch = next(iter(loader_of(dataset, draws)))
    told = "update_priorities: these are draws of a UniformSampler, which has no"
    with pytest.raises(SchemaError, match=told):
        draws.update_priorities(batch, np.ones(4))
    with pytest.raises(
        SchemaError, match=r"update_priorities needs a sampler with.*got UniformSampler"
    ):
        dataset.buffer.update_priorities(batch, np.ones(4))
    draws = dataset.draws(prioritized(), 4)
    with pytest.raises(SchemaError, match=r"priorities must be finite.*got -1\.0 at 0"):
        draws.update_priorities(batch, -np.ones(4))
    batch.positions = batch.positions + 1000
    with pytest.raises(StaleError):
        draws.update_priorities(batch, np.ones(4))


@pytest.mark.parametrize(("workers", "context"), WORKERS[:2])
@pytest.mark.parametrize("kind", [mr.UniformSampler, mr.ShuffledSampler])
def test_a_run_continues_with_the_batches_after_those_used(paths, workers, context, kind):
    dataset = mr.ReplayDataset(paths[0])
    draws = dataset.draws(kind(seed=3), 16)
    batches = iter(loader_of(dataset, draws, workers, context))
    for _ in range(3):
        next(batches)
    state = draws.state_after(3)
    expected = [steps_of(next(batches)) for _ in range(4)]
    dataset = mr.ReplayDataset(paths[0])
    again = dataset.draws(kind(seed=9), 16)
    next(iter(again))
    again.load_state_dict(state)
    with pytest.raises(SchemaError, match=r"num_batches must count batches of.*got 1"):
        again.state_after(1)
    rest = iter(loader_of(dataset, again, workers, context))
    assert [steps_of(next(rest)) for _ in range(4)] == expected
    assert again.state_after(4) == draws.state_after(7)
    with pytest.raises(FormatError, match=r"sampler state: kind must be.*got 'Concat'"):
        again.load_state_dict({"kind": "Concat"})


@pytest.mark.parametrize(("workers", "context"), WORKERS[:2])
def test_a_run_over_several_buffers_goes_on_likewise(paths, workers, context):
    dataset = mr.ConcatDataset(several(paths, mr.ShuffledSampler))
    draws = dataset.draws(16)
    batches = iter(loader_of(dataset, draws, workers, context))
    for _ in range(3):
        next(batches)
    state = draws.state_after(3)
    expected = [columns(next(batches)) for _ in range(4)]
    dataset = mr.ConcatDataset(several(paths, mr.ShuffledSampler, seed=9))
    again = dataset.draws(16)
    next(iter(again))
    again.load_state_dict(state)
    with pytest.raises(SchemaError, match=r"num_batches must be one of the.*got 1"):
        again.state_after(1)
    rest = iter(loader_of(dataset, again, workers, context))
    assert [columns(next(rest)) for _ in range(4)] == expected
