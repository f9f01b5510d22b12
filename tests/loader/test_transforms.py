"""Windows and transforms through a DataLoader: the same batches in any process."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.errors import SchemaError, StaleError
from tests.loader.support import fill, steps
from tests.loader.test_workers import WORKERS, options

TRANSFORMS = [mr.NStep(3, 0.9, rewards="action"), mr.FrameStack(2, "observation/number")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("folds") / "b"
    fill(path)
    return path


def same(batch, expected):
    """Two batches are equal in everything."""
    assert list(batch) == list(expected)
    for name in expected:
        assert batch[name].dtype == expected[name].dtype
        assert (batch[name] == expected[name]).all(), name
    for name in ("env_ids", "positions", "probabilities", "weights", "mask"):
        one, other = getattr(batch, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or (one == other).all(), name
    assert batch.key == expected.key


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("sequences", [False, True])
def test_workers_make_what_the_main_process_makes(path, sequences, workers, context):
    def sampler():
        inner = mr.UniformSampler(seed=3)
        return mr.SequenceSampler(4, inner, boundary="pad") if sequences else inner

    dataset = mr.ReplayDataset(path, transforms=TRANSFORMS)
    draws = dataset.draws(sampler(), 16, num_batches=4)
    loader = DataLoader(dataset, sampler=draws, batch_size=None, **options(workers, context))
    with mr.ReplayBuffer.open(path, sampler=sampler(), transforms=TRANSFORMS) as buffer:
        for batch in loader:
            same(batch, buffer.sample(16).torch())
            shape = (16, 4) if sequences else (16,)
            assert batch["discount"].shape == shape
            assert batch["observation/number"].shape == (*shape, 2)


def test_single_steps_are_folded_too(path):
    dataset = mr.ReplayDataset(path, transforms=TRANSFORMS)
    plain = mr.ReplayDataset(path)
    assert 0 < len(dataset) < len(plain)
    item = dataset[7]
    assert item["observation"]["number"].shape == (2,)
    env_ids, positions = dataset.buffer.view.start_at(np.array([7]))
    batch = dataset.buffer.take(env_ids, positions)
    assert item["action"].tolist() == batch["action"][0].tolist()


def test_an_open_buffer_has_its_own_transforms(path):
    with mr.ReplayBuffer.open(path, transforms=TRANSFORMS) as buffer:
        assert "discount" in mr.ReplayDataset(buffer)[0]
        with pytest.raises(SchemaError, match="ReplayDataset: an open buffer has its"):
            mr.ReplayDataset(buffer, transforms=TRANSFORMS)


def test_windows_that_died_are_left_out(tmp_path):
    buffer = fill(tmp_path / "b", close=False)
    dataset = mr.ReplayDataset(tmp_path / "b")
    sampler = mr.SequenceSampler(3, mr.UniformSampler(seed=1))
    draw = sampler.draw(dataset.buffer.view, 40)
    buffer.extend(steps(200, 30))
    oldest = buffer.span.first[draw.env_ids]
    dead = draw.windows.positions[:, 0] < oldest
    assert 0 < dead.sum() < 40
    batch = dataset[draw]
    assert dataset.left_out == dead.sum()
    np.testing.assert_array_equal(batch.env_ids, draw.env_ids[~dead])
    np.testing.assert_array_equal(batch.positions, draw.positions[~dead])
    number = batch.window_positions * 2 + batch.env_ids[:, None]
    assert (batch["observation/number"] == number).all()
    buffer.clear()
    with pytest.raises(StaleError, match="all 40 steps or windows of a draw were"):
        dataset[draw]
    buffer.close()
