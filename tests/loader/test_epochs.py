"""Epochs through torch's DataLoader: shuffled draws, workers, resumption, parts."""

import itertools

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.contracts.sampler import steps_of
from tests.loader.support import fill, legal, same_as_take, steps
from tests.loader.test_workers import WORKERS, options


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("epochs") / "b"
    fill(path)
    return path


def loader_of(dataset, draws, workers=0, context=None, way="sampler"):
    if way == "sampler":
        more = {"sampler": draws, "batch_size": None}
    else:
        more = {"batch_sampler": draws, "collate_fn": mr.collate}
    return DataLoader(dataset, **more, **options(workers, context))


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("way", ["sampler", "batch_sampler"])
def test_each_iteration_is_an_epoch_whatever_the_workers(path, workers, context, way):
    dataset = mr.ReplayDataset(path)
    draws = dataset.draws(mr.ShuffledSampler(seed=0), batch_size=32)
    loader = loader_of(dataset, draws, workers, context, way)
    alone = mr.ShuffledSampler(seed=0)
    expected = legal(dataset.buffer)
    for _ in range(2):
        assert len(loader) == -(-len(expected) // 32)
        found = []
        for batch in loader:
            assert steps_of(batch) == steps_of(alone.draw(dataset.buffer.view, 32))
            same_as_take(dataset.buffer, batch)
            found += steps_of(batch)
        assert sorted(found) == expected


@pytest.mark.parametrize(("workers", "context"), WORKERS[:2])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_run_stopped_after_any_batch_goes_on_whatever_was_prefetched(path, workers, context):
    dataset = mr.ReplayDataset(path)
    whole = mr.ShuffledSampler(seed=3)
    expected = [steps_of(b) for b in loader_of(dataset, dataset.draws(whole, 48))]
    assert len(expected) == 4
    for stopped in range(len(expected) + 1):
        draws = dataset.draws(mr.ShuffledSampler(seed=3), 48)
        batches = iter(loader_of(dataset, draws, workers, context))
        assert [steps_of(b) for b in itertools.islice(batches, stopped)] == (expected[:stopped])
        state = draws.state_after(stopped)
        del batches
        fresh = mr.ShuffledSampler(seed=9)
        fresh.load_state_dict(state)
        if stopped == len(expected):
            assert fresh.epoch == 1
            continue
        rest = loader_of(dataset, dataset.draws(fresh, 48), workers, context)
        assert [steps_of(b) for b in rest] == expected[stopped:]


def test_states_that_are_no_longer_stored_are_refused(path):
    dataset = mr.ReplayDataset(path)
    draws = dataset.draws(mr.ShuffledSampler(seed=3), 48)
    next(iter(draws))
    for number in (2, -1):
        with pytest.raises(
            SchemaError, match=rf"num_batches must .* from \[0\] to \[1\], got {number}"
        ):
            draws.state_after(number)


@pytest.mark.parametrize(("workers", "context"), WORKERS[:2])
def test_ranks_share_an_epoch(path, workers, context):
    dataset, found, counts = mr.ReplayDataset(path), [], []
    for rank in range(3):
        sampler = mr.ShuffledSampler(seed=0, rank=rank, num_ranks=3)
        loader = loader_of(dataset, dataset.draws(sampler, 16), workers, context)
        mine = [place for batch in loader for place in steps_of(batch)]
        counts.append(len(mine))
        found += mine
    assert sorted(found) == legal(dataset.buffer)
    assert max(counts) - min(counts) <= 1


def test_a_number_of_batches_runs_over_epochs(path):
    dataset = mr.ReplayDataset(path)
    sampler = mr.ShuffledSampler(seed=0)
    draws = dataset.draws(sampler, 100, num_batches=5)
    assert len(draws) == len(list(draws)) == 5
    assert sampler.epoch == 2


@pytest.mark.parametrize(("workers", "context"), WORKERS[:2])
def test_training_and_validation_read_one_folder(path, workers, context):
    dataset = mr.ReplayDataset(path)
    found = []
    for part in mr.split(dataset.buffer, [0.8, 0.2], seed=0):
        draws = dataset.draws(part.sampler(mr.ShuffledSampler(seed=0)), 32)
        loader = loader_of(dataset, draws, workers, context)
        mine = [place for batch in loader for place in steps_of(batch)]
        assert len(loader) == -(-len(mine) // 32)
        assert sorted(mine) == sorted(set(mine))
        found += mine
    assert sorted(found) == legal(dataset.buffer)


def test_sequences_come_by_epochs_too(path):
    dataset = mr.ReplayDataset(path)
    sampler = mr.SequenceSampler(3, mr.ShuffledSampler(seed=0))
    found = [steps_of(batch) for batch in dataset.draws(sampler, 20)]
    starts = [place for batch in found for place in batch]
    assert sampler.epoch == 1
    uniform = mr.SequenceSampler(3, mr.UniformSampler(0))
    # At most 200 starts: one is missed with a probability below 200 * exp(-25).
    expected = set(steps_of(uniform.draw(dataset.buffer.view, 5000)))
    assert len(starts) == len(set(starts))
    assert set(starts) == expected


def test_an_epoch_of_a_buffer_that_is_being_written_ends(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(tmp_path / "b")
    sampler = mr.ShuffledSampler(seed=0)
    frozen = set(legal(dataset.buffer))
    found, count = [], 200
    for draw in dataset.draws(sampler, 16):
        found += steps_of(draw)
        buffer.extend(steps(count, 7))
        count += 7
    assert sampler.epoch == 1
    assert len(found) == len(set(found))
    assert set(found) < frozen
    buffer.clear()
    buffer.extend(steps(count, 9))
    again = [place for draw in dataset.draws(sampler, 16) for place in steps_of(draw)]
    assert sorted(again) == legal(dataset.buffer)
    buffer.close()


def test_steps_overwritten_at_an_epochs_end_are_left_out(tmp_path, monkeypatch):
    sampler = mr.ShuffledSampler(seed=0)
    buffer = fill(tmp_path / "b", close=False, sampler=sampler)
    everything = legal(buffer)
    first = buffer.sample(len(everything) - 12)
    strikes = iter([[0, 3, 4, 5, 6]])

    def stale(view, env_ids, positions, before):
        bad = np.zeros(len(positions), bool)
        bad[next(strikes, [])] = True
        return bad if bad.any() else None

    monkeypatch.setattr(type(buffer.view), "stale", stale)
    # Of ten steps five are gone; two are left of this epoch.
    batch, rest = buffer.sample(10), buffer.sample(10)
    assert (len(batch), len(rest), sampler.epoch) == (5, 2, 1)
    same_as_take(buffer, batch.torch())
    drawn = steps_of(first) + steps_of(batch) + steps_of(rest)
    assert len({*drawn}) == len(everything) - 5
    assert {*drawn} <= {*everything}
    buffer.close()


def test_sampling_a_buffer_goes_epoch_by_epoch(tmp_path):
    sampler = mr.ShuffledSampler(seed=0, batches=5)
    buffer = fill(tmp_path / "b", close=False, sampler=sampler)
    expected = legal(buffer)
    found, sizes = [], []
    while sampler.epoch == 0:
        batch = buffer.sample(1)
        sizes.append(len(batch))
        found += steps_of(batch)
    assert sorted(found) == expected
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 5
    assert np.isclose(batch.probabilities, 1 / len(expected)).all()
    buffer.close()
