"""Several buffers through torch's DataLoader, with workers and without."""

import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.loader.support import fill, steps
from tests.loader.test_workers import WORKERS, options


def opened(paths, seed=0):
    """Two buffers whose samplers have seeds."""
    buffers = [
        mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed + k))
        for k, path in enumerate(paths)
    ]
    return mr.concat(buffers, [0.75, 0.25], seed=seed)


def columns(batch):
    return (batch.buffer_ids.tolist(), batch.env_ids.tolist(), batch.positions.tolist())


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("way", ["sampler", "batch_sampler"])
def test_batches_are_those_of_concat_whatever_the_workers(paths, way, workers, context):
    dataset, alone = mr.ConcatDataset(opened(paths)), opened(paths)
    draws = dataset.draws(32, num_batches=5)
    if way == "sampler":
        more = {"sampler": draws, "batch_size": None}
    else:
        more = {"batch_sampler": draws, "collate_fn": mr.collate}
    loader = DataLoader(dataset, **more, **options(workers, context))
    assert len(loader) == 5
    found = list(loader)
    assert len(found) == 5
    for batch in found:
        expected = alone.sample(32).torch()
        assert columns(batch) == columns(expected)
        assert batch.buffer_ids.tolist() == [0] * 24 + [1] * 8
        assert list(batch) == list(expected)
        for path in expected:
            assert batch[path].dtype == expected[path].dtype
            assert (batch[path] == expected[path]).all(), path
        np.testing.assert_allclose(batch.probabilities, expected.probabilities)


def test_draws_of_other_buffers_are_refused(paths):
    one = mr.ConcatDataset(opened(paths))
    other = mr.ConcatDataset(opened(paths[::-1]))
    draw = next(iter(other.draws(32)))
    assert len(other[draw]) == 32
    with pytest.raises(SchemaError, match=r"index must be a draw.*got one of buffer"):
        one[draw]


def test_a_run_continues_after_the_batches_used_and_not_the_prefetched_ones(paths):
    dataset = mr.ConcatDataset(opened(paths))
    draws = dataset.draws(20, num_batches=8)
    loader = DataLoader(dataset, sampler=draws, batch_size=None, **options(2, "fork"))
    batches = iter(loader)
    taken = [columns(next(batches)) for _ in range(3)]
    state = draws.state_after(3)
    rest = [columns(batch) for batch in batches]
    fresh = opened(paths, seed=9)
    fresh.load_state_dict(state)
    assert [columns(fresh.sample(20)) for _ in range(5)] == rest
    assert len(taken) + len(rest) == 8
    with pytest.raises(SchemaError, match=r"num_batches must be one of the.*got 9"):
        draws.state_after(9)


def test_steps_that_died_since_the_draw_are_left_out_of_their_buffer(tmp_path):
    one, two = fill(tmp_path / "a", close=False), fill(tmp_path / "b", close=False)
    dataset = mr.ConcatDataset(mr.concat([one, two], [0.5, 0.5], seed=0))
    draw = next(iter(dataset.draws(40)))
    one.extend(steps(200, 40))
    part = draw.draws[0].draw
    alive = part.positions >= one.span.first[part.env_ids]
    assert 0 < alive.sum() < 20
    batch = dataset[draw]
    assert batch.buffer_ids.tolist() == [0] * int(alive.sum()) + [1] * 20
    expected = part.positions[alive].tolist() + draw.draws[1].draw.positions.tolist()
    assert batch.positions.tolist() == expected
    one.close()
    two.close()


def test_what_makes_no_sense_is_refused(paths):
    dataset = mr.ConcatDataset(opened(paths))
    sent = pickle.loads(pickle.dumps(dataset))
    assert len(sent) == len(dataset)
    with pytest.raises(SchemaError, match="draws: this dataset was sent to another"):
        sent.draws(4)
    with pytest.raises(SchemaError, match="index must be a draw, got int"):
        dataset[0]
    for number in (0, 2.5, None, True, "8"):
        told = f"batch_size must be an integer of at least 1, got {number!r}"
        with pytest.raises(SchemaError, match=told):
            dataset.draws(number)
    with pytest.raises(SchemaError, match=r"num_batches must be an integer.*got 2\.5"):
        dataset.draws(4, 2.5)
    with pytest.raises(SchemaError, match="concat must be several buffers as one, got list"):
        mr.ConcatDataset(list(opened(paths).buffers))
    loader = DataLoader(dataset, sampler=dataset.draws(4))
    with pytest.raises(SchemaError, match="index must be a draw, got list"):
        next(iter(loader))
    with pytest.raises(TypeError, match="draws without num_batches have no length"):
        len(dataset.draws(4))
    with pytest.raises(SchemaError, match="source must be one buffer, got several"):
        mr.ReplayDataset(opened(paths))
    with pytest.raises(SchemaError, match="source must be one buffer, got several"):
        mr.ReplayStream(opened(paths), mr.UniformSampler(0), 4)
