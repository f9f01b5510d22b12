"""Draws out of compressed shards are those out of files, in workers and samplers."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from tests.buffer.test_zarr import SCHEMA, nested, steps


@pytest.fixture
def pair(tmp_path):
    """Two buffers of the same steps, one of each engine; the second in shards."""
    rng = np.random.default_rng(8)
    columns = [nested(steps(rng, count, 2)) for count in (50, 45)]
    for engine in ("memmap", "zarr"):
        with mr.ReplayBuffer.create(
            tmp_path / engine, SCHEMA, 60, 2, engine=engine, autoreset="next_step"
        ) as buffer:
            for each in columns:
                buffer.extend(each)
    return tmp_path / "memmap", tmp_path / "zarr"


def equal(left, right):
    assert (left.positions == right.positions).all()
    for path in set(SCHEMA.paths) - {"weight"}:
        assert (np.asarray(left[path]) == np.asarray(right[path])).all(), path


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: mr.UniformSampler(seed=1),
        lambda: mr.ShuffledSampler(seed=1),
        lambda: mr.SequenceSampler(4, mr.UniformSampler(seed=1)),
    ],
)
@pytest.mark.parametrize("transforms", [(), (mr.FrameStack(3), mr.NStep(2, 0.9))])
@pytest.mark.sliced(1)
def test_samplers_that_keep_no_rows_draw_the_same(pair, sampler, transforms):
    drawn = []
    for path in pair:
        with mr.ReplayBuffer.open(path, sampler=sampler(), transforms=transforms) as buffer:
            drawn.append([buffer.sample(16) for _ in range(4)])
    for left, right in zip(*drawn, strict=True):
        equal(left, right)


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_shards(pair, how):
    batches = []
    for path in pair:
        dataset = mr.ReplayDataset(path)
        # Three and no more: of a loader that is left early, torch's own spawned workers
        # abort at times ("terminate called without an active exception").
        draws = dataset.draws(mr.ShuffledSampler(seed=0), 16, num_batches=3)
        with mr.ReplayBuffer.open(path) as buffer:
            buffer.sample(8)  # what is open before a fork is of no harm
            loader = DataLoader(
                dataset, sampler=draws, batch_size=None, num_workers=2, multiprocessing_context=how
            )
            batches.append([*loader])
            assert len(batches[-1]) == 3
    for left, right in zip(*batches, strict=True):
        equal(left, right)
