"""n-step and prioritized draws of pytorchrl's storages on disk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import NStepReplayBuffer, PERBuffer
from mmreplay.errors import SchemaError
from tests.adapters.pytorchrl_steps import actor, numbers, slice_of, storages, transition


@pytest.fixture
def make(tmp_path):
    with storages(tmp_path) as make:
        yield make


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


def drawn_of(storage):
    """By the observation: the next one, the reward and the steps that it sums."""
    found = {}
    for batch in storage.generate_batches(40, 16):
        steps = torch.as_tensor(batch["n_step"]).expand(16, 1)
        for i in range(16):
            told = batch["NextObservation"][i], batch["Reward"][i], steps[i]
            found[int(batch["Observation"][i])] = tuple(round(float(x), 4) for x in told)
    return found


@pytest.mark.parametrize(("kind", "options"), [(NStepReplayBuffer, ()), (PERBuffer, (0.0, 0.6))])
def test_slices_of_two_collectors_are_not_summed_across(make, kind, options):
    storage = make(kind, 50, 3, *options)
    storage.insert_data_slice(slice_of(range(5)) | {"Reward": np.ones((5, 1, 1))})
    storage.insert_data_slice(slice_of(range(100, 105)) | {"Reward": np.ones((5, 1, 1))})
    for number in range(200, 206):
        storage.insert_transition(transition(number, reward=1.0))
    # What is missing is not summed, and n_step says by which power to discount.
    expected = {}
    for first, starts in ((0, 5), (100, 5), (200, 4)):
        for number in range(first, first + starts):
            k = min(3, first + 5 - number) if first < 200 else 3
            expected[number] = (number + k, round(sum(0.9**i for i in range(k)), 4), k)
    # 640 draws miss one of 14 with a probability below 1e-19.
    assert drawn_of(storage) == expected


def test_ends_and_gammas_of_0_and_1_leave_n_step_a_number(make):
    for number, gamma in enumerate((0.0, 0.9, 1.0)):
        algorithm = SimpleNamespace(gamma=gamma)
        storage = NStepReplayBuffer(50, "cpu", actor(), algorithm, None, 3)
        for i in range(9):
            storage.insert_transition(transition(i, done=i % 2 == 1))
        assert all(b["n_step"] == 3 for b in storage.generate_batches(9, 9)), number
        storage.close()


def test_breaks_stay_where_a_reset_copies_rows(make):
    storage = make(NStepReplayBuffer, 40, 3)
    for number in range(10):
        storage.insert_transition(transition(number))
    storage.close()
    storage = make(NStepReplayBuffer, 40, 3, resume=True)
    storage.insert_data_slice(slice_of(range(50, 60)))
    storage.reset()
    storage._settle()
    storage.insert_data_slice(slice_of(range(70, 80)))
    storage.reset()
    storage.insert_transition(transition(90))
    assert numbers(storage.data) == [*range(10), 90]
    assert max(following for following, _, _ in drawn_of(storage).values()) == 10
    # A break within what is copied: mark all of it as older than the last reset.
    storage.insert_data_slice(slice_of(range(100, 105)))
    storage._mark = int(storage._ring.heads[0])
    storage.insert_transition(transition(110))
    storage.reset()
    storage.insert_transition(transition(120))
    assert numbers(storage.data) == [*range(10), 90, *range(100, 105), 120]
    found = drawn_of(storage)
    assert all(0 < following - start <= 3 for start, (following, _, _) in found.items())
    assert set(found) == {*range(10), 90, *range(100, 105)}


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


def test_new_steps_enter_at_the_highest_error_that_is_not_overwritten(make):
    # epsilon, alpha, beta and default_error.
    storage = make(PERBuffer, 4, 1, 0.0, 1.0, 1.0, 2.0)
    storage.insert_data_slice(slice_of(range(4)))
    (batch,) = storage.generate_batches(1, 500)
    learned = torch.tensor([9.0, 1.0, 3.0, 1.0])
    errors = learned[batch["Observation"].long()]
    storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    storage.insert_transition(transition(4))
    (batch,) = storage.generate_batches(1, 500)
    # The 9 of step 0 is overwritten; the highest of the others is 3.
    present = torch.tensor([np.nan, 1.0, 3.0, 1.0, 3.0])
    priorities = present[batch["Observation"].long()]
    # Steps 1 and 3 have shares of 1 / 8: 500 draws miss one of them with a
    # probability of 2 * (7 / 8)**500 < 1e-28.
    assert set(batch["Observation"].flatten().tolist()) == {1, 2, 3, 4}
    assert torch.allclose(batch["per_weights"], 1 / priorities)


def test_an_alpha_of_0_draws_uniformly_and_updates_nothing(make):
    storage = make(PERBuffer)
    storage.insert_data_slice(slice_of(range(10)))
    (batch,) = storage.generate_batches(1, 30)
    assert batch["per_weights"] == 1.0
    assert storage.after_gradients(batch, {"Algorithm": {}}) == {"Algorithm": {}}
    storage.update_storage_parameter("alpha", 0.6)
    (batch,) = storage.generate_batches(1, 30)
    with pytest.raises(SchemaError, match=r"Use an algorithm that returns TD errors\."):
        storage.after_gradients(batch, {"Algorithm": {}})
