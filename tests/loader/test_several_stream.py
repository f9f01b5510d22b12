"""Several buffers drawn from in workers: dealt out as one buffer's draws are."""

import pickle
from functools import partial

import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.loader.support import fill, steps
from tests.loader.test_several import columns
from tests.loader.test_workers import WORKERS, options


def opened(paths, shares=(3, 1), kind=mr.ShuffledSampler):
    buffers = [
        mr.ReplayBuffer.open(path, sampler=kind(seed=k), transforms=[])
        for k, path in enumerate(paths)
    ]
    return mr.concat(buffers, shares, seed=4)


def batches_of(stream, workers=0, context=None):
    loader = DataLoader(stream, batch_size=None, **options(workers, context))
    return [columns(batch) for batch in loader]


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("shares", [(3, 1), None])
def test_workers_give_what_one_process_gives(paths, shares, workers, context):
    alone = opened(paths, shares)
    expected = [columns(alone.sample(16)) for _ in range(6)]
    stream = mr.ConcatStream(opened(paths, shares), 16, num_batches=6)
    assert len(stream) == 6
    assert batches_of(stream, workers, context) == expected
    # Each iteration is another one, and the same whatever the workers.
    again = mr.ConcatStream(opened(paths, shares), 16, num_batches=6)
    again.set_epoch(1)
    second = batches_of(stream, workers, context)
    assert second == batches_of(again)
    assert second != expected


def test_batches_hold_the_data_of_their_positions(paths):
    both = opened(paths)
    stream = mr.ConcatStream(opened(paths), 16, num_batches=3)
    for batch in DataLoader(stream, batch_size=None, num_workers=2):
        ids = [c.numpy() for c in (batch.buffer_ids, batch.env_ids, batch.positions)]
        expected = both.take(*ids).torch()
        for path in expected:
            assert (batch[path] == expected[path]).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_what_one_process_gives(paths, workers):
    alone = opened(paths)
    expected = [columns(alone.sample(16)) for _ in range(6)]
    dealt = [
        batches_of(
            mr.ConcatStream(opened(paths), 16, 3, rank=rank, num_ranks=2),
            workers,
            "fork" if workers else None,
        )
        for rank in range(2)
    ]
    assert [batch for pair in zip(*dealt, strict=True) for batch in pair] == expected


def test_a_run_goes_on_whatever_the_workers(paths):
    expected = batches_of(mr.ConcatStream(opened(paths), 16, num_batches=7))
    stream = mr.ConcatStream(opened(paths), 16, num_batches=7)
    batches = iter(DataLoader(stream, batch_size=None, num_workers=2))
    assert [columns(next(batches)) for _ in range(3)] == expected[:3]
    state = stream.state_after(3)
    del batches
    other = mr.ConcatStream(opened(paths), 16, num_batches=7)
    other.load_state_dict(state)
    assert batches_of(other) == expected[3:]


def test_a_pickle_holds_the_paths_and_goes_on(paths):
    stream = mr.ConcatStream(opened(paths), 16, num_batches=3)
    again = pickle.loads(pickle.dumps(stream))
    assert batches_of(again) == batches_of(stream)


def test_what_workers_cannot_share_is_refused(paths):
    prioritized = opened(paths, kind=mr.PrioritizedSampler)
    with pytest.raises(SchemaError, match="ConcatStream: each worker would have its"):
        mr.ConcatStream(prioritized, 16)
    counting = opened(paths, kind=partial(mr.UseCounter, 1))
    with pytest.raises(SchemaError, match="each worker would have its own counts of"):
        mr.ConcatStream(counting, 16)
    with pytest.raises(SchemaError, match=r"batch_size must be an integer of.*got 0"):
        mr.ConcatStream(opened(paths), 0)
    with pytest.raises(SchemaError, match=r"num_batches must be an integer.*got '2'"):
        mr.ConcatStream(opened(paths), 8, "2")
    with pytest.raises(
        SchemaError, match="concat must be several buffers as one, got ReplayBuffer"
    ):
        mr.ConcatStream(opened(paths).buffers[0], 8)
    with pytest.raises(SchemaError, match=r"rank must be .* in \[0, 1\], got 2"):
        mr.ConcatStream(opened(paths), 8, rank=2, num_ranks=2)
    with pytest.raises(TypeError, match="draws without num_batches have no length"):
        len(mr.ConcatStream(opened(paths), 8))


def test_ranks_with_seeds_of_their_own_are_refused(paths):
    for seed, sampler, name in ((None, 0, "Concat"), (0, None, "UniformSampler")):
        buffers = [mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(sampler)) for path in paths]
        both = mr.concat(buffers, seed=seed)
        told = rf"num_ranks: the {name} has no seed, so each of 2 .*same seed=\.\.\."
        with pytest.raises(SchemaError, match=told):
            mr.ConcatStream(both, 8, rank=0, num_ranks=2)
        mr.ConcatStream(both, 8)
        both.load_state_dict(both.state_dict())
        mr.ConcatStream(both, 8, rank=0, num_ranks=2)


@pytest.mark.parametrize("laps", [1, 3])
def test_a_draw_that_a_writer_lapped_is_made_anew(tmp_path, monkeypatch, laps):
    fill(tmp_path / "a")
    writer = fill(tmp_path / "b", close=False)
    both = opened([tmp_path / "a", tmp_path / "b"], kind=mr.UniformSampler)
    stream = mr.ConcatStream(both, 16)
    gather, lapped = mr.ConcatDataset.__getitem__, []

    def late(dataset, draw):
        if len(lapped) < laps:
            lapped.append(draw)
            writer.extend(steps(int(writer.heads[0]), 2 * writer.capacity))
        return gather(dataset, draw)

    monkeypatch.setattr(mr.ConcatDataset, "__getitem__", late)
    with writer:
        batch = next(iter(stream))
        assert len(batch) == 16
        live = batch.positions[batch.buffer_ids == 1]
        assert min(live) >= writer.heads.min() - writer.capacity
