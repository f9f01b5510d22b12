"""States that torch loads with weights_only=True, and the draws that follow."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmreplay as mr
from tests.buffer.support import schema, step
from tests.samplers.test_pickling import SAMPLERS

LEARNERS = ["prioritized", "prioritized, buffer", "rank", "mixture", "recent"]


def filled(path):
    with mr.ReplayBuffer.create(path, schema(), 100, commit_every=None) as buffer:
        for number in range(130):
            buffer.add(step(number, "t" if number % 9 == 8 else ""))
    return path


def saved(path, state):
    """The state as another program would load it."""
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def first_batches(batches, count):
    return [
        (batch.env_ids.tolist(), batch.positions.tolist(), batch.weights.tolist())
        for _, batch in zip(range(count), batches, strict=False)
    ]


def opened(path, kind):
    with mr.ReplayBuffer.open(path) as buffer:
        sampler = SAMPLERS[kind](buffer)
    return mr.ReplayBuffer.open(path, sampler=sampler)


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if "no seed" not in kind])
def test_a_loader_goes_on_from_a_state_that_torch_saved(tmp_path, kind):
    path = filled(tmp_path / "a")
    with opened(path, kind) as buffer, mr.ReplayLoader(buffer, 8) as loader:
        first_batches(loader, 2)
        if kind in LEARNERS:
            batch = next(loader)
            loader.update_priorities(batch, batch.positions % 7 + 1.0)
            loader.load_state_dict(loader.state_dict())  # draws anew what was ahead
        state = saved(tmp_path / "state.pt", loader.state_dict(priorities=True))
        expected = first_batches(loader, 3)
    with opened(path, kind) as buffer, mr.ReplayLoader(buffer, 8) as loader:
        loader.load_state_dict(state)
        assert first_batches(loader, 3) == expected
    # A sampler takes the state as it is, too.
    with opened(path, kind) as buffer:
        buffer.sampler.load_state_dict(state["sampler"])
        batch = buffer.sample(8)
        assert batch.positions.tolist() == expected[0][1]


# The second sampler finds the priorities of the first open.
@pytest.mark.filterwarnings("ignore::mmreplay.DurabilityWarning")
@pytest.mark.parametrize("kind", ["shuffled", "windows, shuffled", "prioritized"])
def test_draws_go_on_from_a_state_that_torch_saved(tmp_path, kind):
    dataset = mr.ReplayDataset(filled(tmp_path / "a"))

    def loader():
        draws = dataset.draws(SAMPLERS[kind](dataset.buffer), 8)
        return draws, DataLoader(dataset, sampler=draws, batch_size=None)

    draws, batches = loader()
    going = iter(batches)
    first_batches(going, 3)
    state = saved(tmp_path / "state.pt", draws.state_after(3))
    expected = first_batches(going, 3)
    draws, batches = loader()
    draws.load_state_dict(state)
    assert first_batches(iter(batches), 3) == expected


def test_streams_and_several_buffers_go_on_from_a_state_that_torch_saved(tmp_path):
    paths = [filled(tmp_path / name) for name in "ab"]

    def both():
        return mr.concat(
            [
                mr.ReplayBuffer.open(path, sampler=mr.PrioritizedSampler(seed=seed, name=None))
                for seed, path in enumerate(paths)
            ],
            [0.5, 0.5],
            seed=0,
        )

    with mr.ReplayLoader(both(), 8) as loader:
        batch = next(iter(loader))
        loader.update_priorities(batch, np.arange(8) + 1.0)
        loader.load_state_dict(loader.state_dict())
        state = saved(tmp_path / "state.pt", loader.state_dict(priorities=True))
        expected = first_batches(loader, 3)
    with mr.ReplayLoader(both(), 8) as loader:
        loader.load_state_dict(state)
        assert first_batches(loader, 3) == expected

    dataset = mr.ConcatDataset(both())
    draws = dataset.draws(8)
    going = iter(DataLoader(dataset, sampler=draws, batch_size=None))
    first_batches(going, 2)
    state = saved(tmp_path / "state.pt", draws.state_after(2))
    expected = first_batches(going, 2)
    dataset = mr.ConcatDataset(both())
    draws = dataset.draws(8)
    draws.load_state_dict(state)
    going = iter(DataLoader(dataset, sampler=draws, batch_size=None))
    assert first_batches(going, 2) == expected

    for make in (
        lambda: mr.ReplayStream(paths[0], mr.ShuffledSampler(0), batch_size=8),
        lambda: mr.ConcatStream(
            mr.concat(
                [mr.ReplayBuffer.open(p, sampler=mr.UniformSampler(0)) for p in paths],
                [0.5, 0.5],
                seed=0,
            ),
            8,
            num_batches=6,
        ),
    ):
        stream = make()
        going = iter(DataLoader(stream, batch_size=None))
        first_batches(going, 2)
        state = saved(tmp_path / "state.pt", stream.state_after(2))
        expected = first_batches(going, 2)
        stream = make()
        stream.load_state_dict(state)
        assert first_batches(iter(DataLoader(stream, batch_size=None)), 2) == expected
