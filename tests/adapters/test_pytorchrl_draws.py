"""n-step and prioritized draws of pytorchrl's storages on disk."""

import pytest
import torch

from mmreplay.adapters.pytorchrl import NStepReplayBuffer, PERBuffer, ReplayBuffer
from mmreplay.errors import SchemaError
from tests.adapters.pytorchrl_steps import (
    ALGORITHM,
    actor,
    slice_of,
    transition,
)


@pytest.fixture
def make(tmp_path):
    made = []

    def make(kind=ReplayBuffer, size=10, *options, name="ring", with_=None, **named):
        folder = tmp_path / name
        build = kind.create_factory(size, *options, path=folder, **named)
        made.append(build("cpu", with_ or actor(), ALGORITHM, None))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def test_n_step_draws_stop_at_ends_and_bootstrap_nothing_across(make):
    storage = make(NStepReplayBuffer, 50, 3)
    for number in range(12):
        storage.insert_transition(transition(number, done=number == 1, reward=1.0))
    drawn = {}
    for batch in storage.generate_batches(20, 16):
        assert batch["n_step"] == 3
        for i in range(16):
            start = int(batch["Observation"][i])
            drawn[start] = (
                round(float(batch["Reward"][i]), 5),
                int(batch["NextObservation"][i]),
                float(batch["NextDone"][i]),
            )
    # Golden: t0 1.9 and terminal, t1 1 and terminal, t2 2.71 with observation 5.
    assert drawn[0] == (1.9, 2, 1.0)
    assert drawn[1] == (1.0, 2, 1.0)
    assert drawn[2] == (2.71, 5, 0.0)
    assert all(drawn[t] == (2.71, t + 3, 0.0) for t in range(2, 9))
    # 320 draws miss one of ten with probability 10 * 0.9**320 < 1e-13.
    assert set(drawn) >= set(range(9))


def test_prioritized_draws_follow_errors_and_forget_what_is_overwritten(make):
    storage = make(PERBuffer, 20, 1, 0.5, 1.0, 0.5, 3.0)
    storage.insert_data_slice(slice_of(range(10)))
    for _ in range(20):
        (batch,) = storage.generate_batches(1, 64)
        errors = torch.where(batch["Observation"] == 4, 8.5, 0.5)
        storage.before_gradients()
        info = {"Algorithm": {"errors": errors}}
        assert storage.after_gradients(batch, info) is info
        assert "idxs" not in batch
    (batch,) = storage.generate_batches(1, 9000)
    share = (batch["Observation"] == 4).float().mean()
    # P = 9 / (9 + 9 * 1); five standard deviations of 9,000 draws are 0.027.
    assert abs(share - 0.5) < 0.027
    weights = batch["per_weights"]
    assert weights.shape == (9000, 1)
    # (N * P) ** -beta over the greatest: (0.5 / (1 / 18)) ** -0.5 = 1 / 3.
    expected = torch.where(batch["Observation"] == 4, 1 / 3, 1.0)
    assert torch.allclose(weights, expected)
    storage.insert_data_slice(slice_of(range(10, 30)))
    storage.after_gradients(batch, {"Algorithm": {"errors": torch.ones(9000, 1)}})
    (batch,) = storage.generate_batches(1, 2000)
    # All of them are new, and enter alike.
    assert torch.allclose(batch["per_weights"], torch.ones(2000, 1))
    assert len(batch["Observation"].unique()) == 20


def test_an_alpha_of_0_draws_uniformly_and_updates_nothing(make):
    storage = make(PERBuffer)
    storage.insert_data_slice(slice_of(range(10)))
    (batch,) = storage.generate_batches(1, 30)
    assert batch["per_weights"] == 1.0
    assert storage.after_gradients(batch, {"Algorithm": {}}) == {"Algorithm": {}}
    storage.update_storage_parameter("alpha", 0.6)
    (batch,) = storage.generate_batches(1, 30)
    with pytest.raises(SchemaError, match="use an algorithm that gives TD errors"):
        storage.after_gradients(batch, {"Algorithm": {}})
