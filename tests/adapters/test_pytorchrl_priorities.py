"""Sequences of pytorchrl's recurrent actors are drawn by their errors."""

import operator
from itertools import accumulate

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import EREBuffer, HERBuffer, PERBuffer
from mmreplay.adapters.pytorchrl.data import nstep_sums
from mmreplay.errors import EmptyError, SchemaError
from tests.adapters.pytorchrl_steps import (
    ALGORITHM,
    actor,
    recurrent_actor,
    recurrent_step,
    transition,
)
from tests.samplers.priority_model import mass


def test_sequences_are_drawn_by_what_was_learned_of_their_steps(tmp_path):
    path = tmp_path / "ring"
    make = PERBuffer.create_factory(
        40, 1, 0.5, 0.7, 0.4, 2.0, path=path, resume=True
    )  # n_step, epsilon, alpha, beta, default_error
    storage = make("cpu", recurrent_actor(), ALGORITHM, None)
    for number in range(12):
        storage.insert_transition(recurrent_step(number, envs=2))
    told = {}
    for batch in storage.generate_batches(60, 12):
        assert batch["per_weights"].shape == (15, 1)
        assert batch["idxs"].shape == (3, 2)
        rows = batch["Observation"].reshape(3, 5)
        # Overlaps are burnt in: errors are those of the last three rows.
        errors = rows[:, 2:]
        for start, line in zip(rows[:, 0], errors, strict=True):
            told[round(float(start), 1)] = 0.9 * line.max() + 0.1 * line.mean() + 0.5
        info = {"Algorithm": {"errors": errors.reshape(-1, 1)}}
        assert storage.after_gradients(batch, info) is info
        assert "idxs" not in batch
    # Sequences begin every three steps, of two environments.
    assert sorted(told) == [0.0, 0.1, 3.0, 3.1, 6.0, 6.1]
    storage.close()
    again = make("cpu", recurrent_actor(), ALGORITHM, None)
    shares = np.array([told[key] for key in sorted(told)], float) ** 0.7
    shares /= shares.sum()
    counts, weights = np.zeros(6), np.zeros(6)
    for batch in again.generate_batches(700, 12):
        rows = batch["Observation"].reshape(3, 5)[:, 0]
        for start, weight in zip(rows, batch["per_weights"][::5], strict=True):
            which = sorted(told).index(round(float(start), 1))
            counts[which] += 1
            weights[which] = float(weight)
    # Five standard deviations of 2,100 draws are at most 115.
    assert np.abs(counts - 2100 * shares).max() < 115
    expected = (6 * shares) ** -0.4
    np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-5)
    again.close()


@pytest.mark.parametrize("kind", [PERBuffer, EREBuffer, HERBuffer])
def test_slices_have_the_priorities_of_their_rows(tmp_path, kind):
    build = kind.create_factory(
        8, alpha=0.5, epsilon=0.25, default_error=4.0, path=tmp_path / "ring"
    )
    storage = build("cpu", actor(), ALGORITHM, None)
    assert "priority" not in storage.data
    expected = {}
    for number in range(11):
        storage.insert_transition(transition(number, envs=2))
        for env_id in range(2):
            expected[number, env_id] = 4.0
    first = storage._ring.span.first[0]
    steps = {key: error for key, error in expected.items() if key[0] >= first}
    for number, env_id in [(5, 0), (5, 1), (9, 0), (10, 1)]:
        error = steps[number, env_id] = (number + env_id / 10) / 2
        batch = {"per_weights": torch.ones(1, 1), "idxs": np.array([[env_id, number]]), "ck": 1}
        storage.after_gradients(batch, {"Algorithm": {"errors": torch.tensor([error])}})
        steps[number, env_id] += 0.25
    rows = sorted({number for number, _ in steps})
    found = storage.data["priority"]
    assert found.shape == (len(rows), 2, 1)
    oracle = [[[steps[row, env_id] ** 0.5] for env_id in range(2)] for row in rows]
    np.testing.assert_allclose(found, oracle, rtol=1e-6)
    copied = storage.get_data_slice(2, 6)
    np.testing.assert_allclose(copied["priority"], oracle[2:6], rtol=1e-6)
    np.testing.assert_allclose(storage.get_all_buffer_data()["priority"], oracle, rtol=1e-6)
    # Inserted again, rows are new ones.
    storage.insert_data_slice(copied)
    assert storage.size == 8
    assert (storage.data["priority"][-4:] >= 2).all()
    (batch,) = storage.generate_batches(1, 4)
    assert "priority" not in batch
    storage.close()


def test_slices_of_sequences_have_their_priorities(tmp_path):
    build = PERBuffer.create_factory(40, alpha=0.5, default_error=9.0, path=tmp_path / "ring")
    storage = build("cpu", recurrent_actor(overlap=0), ALGORITHM, None)
    for number in range(13):
        storage.insert_transition(recurrent_step(number, envs=2))
    assert (storage.data["priority"] == 3.0).all()
    errors = torch.arange(5.0)
    batch = {"per_weights": torch.ones(5, 1), "idxs": np.array([[1, 5]])}
    storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    expected = np.full((13, 2, 1), 3.0)
    expected[5:10, 1] = (0.9 * 4 + 0.1 * 2) ** 0.5
    np.testing.assert_allclose(storage.data["priority"], expected, rtol=1e-6)
    copied = storage.get_data_slice(4, 11)["priority"]
    np.testing.assert_allclose(copied, expected[4:11], rtol=1e-6)
    storage.close()


class Watched:
    """A generator that keeps the shares it chose by."""

    def __init__(self, seed):
        self.rng, self.shares = np.random.default_rng(seed), []

    def choice(self, count, size, p):
        self.shares.append(p)
        return self.rng.choice(count, size=size, p=p)


def test_sequences_are_drawn_by_masses_of_24_bits(tmp_path, rng):
    storage = PERBuffer(
        40,
        "cpu",
        recurrent_actor(),
        ALGORITHM,
        None,
        epsilon=0.5,
        alpha=0.7,
        path=tmp_path / "ring",
    )
    for number in range(20):
        storage.insert_transition(recurrent_step(number))
    watched = storage._random = Watched(0)
    for batch in storage.generate_batches(40, 12):
        errors = torch.from_numpy(rng.random((len(batch["Observation"]), 1)))
        storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    list(storage.generate_batches(1, 12))
    ring = storage._ring
    stored = ring.get_field("sequence_priority", 0, np.arange(ring.heads[0]))
    errors = stored[stored > 0].tolist()
    masses = np.array([mass(error, 0.7) for error in errors])
    assert len(set(errors)) == len(watched.shares[-1]) > 3
    assert watched.shares[-1].tolist() == (masses / masses.sum()).tolist()
    storage.close()


@pytest.mark.parametrize("gamma", [0.9, 0.97, 0.99])
def test_n_steps_are_discounted_by_products(gamma):
    ends, there = np.zeros((40, 40), bool), np.ones((40, 40), bool)
    _, sums = nstep_sums(np.eye(40), ends, there, np.full(40, gamma))
    products = list(accumulate([gamma] * 39, initial=1.0, func=operator.mul))
    assert sums[:, 0].tolist() == products


def test_errors_of_sequences_that_do_not_fit_are_refused_and_late_ones_left_out(tmp_path):
    storage = PERBuffer(
        10, "cpu", recurrent_actor(), ALGORITHM, None, alpha=1.0, path=tmp_path / "ring"
    )
    for number in range(8):
        storage.insert_transition(recurrent_step(number))
    for errors in (
        torch.ones(4, 1),
        torch.ones(0, 1),
        -torch.ones(5, 1),
        torch.full((5, 1), np.nan),
        torch.full((5, 1), np.inf),
        torch.full((5, 1), 1e300, dtype=torch.float64),
    ):
        (batch,) = storage.generate_batches(1, 1)
        with pytest.raises(
            SchemaError, match=r"finite and at least 0, got .* Pass absolute errors\."
        ):
            storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    (batch,) = storage.generate_batches(1, 12)
    with pytest.raises(SchemaError, match=r"for each of 3 sequences, .* got 7 from 1 to 1"):
        storage.after_gradients(batch, {"Algorithm": {"errors": torch.ones(7, 1)}})
    (batch,) = storage.generate_batches(1, 1)
    for number in range(8, 60):
        storage.insert_transition(recurrent_step(number))
    info = {"Algorithm": {"errors": torch.full((5, 1), 1e9)}}
    storage.after_gradients(batch, info)
    storage.update_storage_parameter("alpha", 0.0)
    (batch,) = storage.generate_batches(1, 1)
    assert batch["per_weights"] == 1.0
    storage.close()


def test_a_sequence_whose_error_is_0_is_not_drawn_again(tmp_path):
    storage = PERBuffer(
        40, "cpu", recurrent_actor(0.0), ALGORITHM, None, alpha=1.0, path=tmp_path / "ring"
    )
    for number in range(15):
        storage.insert_transition(recurrent_step(number))
    for batch in storage.generate_batches(60, 1):
        error = 2.0 * (batch["Observation"][0] != 0)
        info = {"Algorithm": {"errors": error.expand(5, 1)}}
        storage.after_gradients(batch, info)
    drawn = list(storage.generate_batches(100, 1))
    # 160 draws miss one of the other two with a probability below 1e-30.
    assert {float(batch["Observation"][0]) for batch in drawn} == {5.0, 10.0}
    # The greatest weight is that of what can be drawn.
    assert all(batch["per_weights"].eq(1).all() for batch in drawn)
    for batch in drawn:
        storage.after_gradients(batch, {"Algorithm": {"errors": torch.zeros(5, 1)}})
    with pytest.raises(EmptyError, match=r"the errors of all 3 are 0\. Pass an epsilon,"):
        next(storage.generate_batches(1, 1))
    storage.close()


def test_priorities_of_sequences_stay_with_rows_that_a_reset_keeps(tmp_path):
    make = PERBuffer.create_factory(
        40, alpha=1.0, default_error=1.0, path=tmp_path / "ring", resume=True
    )
    storage = make("cpu", recurrent_actor(), ALGORITHM, None)
    for number in range(8):
        storage.insert_transition(recurrent_step(number))
    storage.close()
    # What was there before it was opened is older than the last reset.
    storage = make("cpu", recurrent_actor(), ALGORITHM, None)
    for batch in storage.generate_batches(40, 1):
        error = 1e6 if batch["Observation"][0] == 3 else 1.0
        storage.after_gradients(batch, {"Algorithm": {"errors": torch.full((3, 1), error)}})
    storage.insert_transition(recurrent_step(50))
    storage.reset()
    storage.insert_transition(recurrent_step(60))
    drawn = [float(b["Observation"][0]) for b in storage.generate_batches(50, 1)]
    # The other is drawn once in a million.
    assert drawn == [3.0] * 50
    storage.close()


@pytest.mark.parametrize("size", [20, 12])
def test_priorities_of_steps_stay_with_rows_that_a_reset_keeps(tmp_path, size):
    make = PERBuffer.create_factory(
        size, alpha=1.0, default_error=5.0, path=tmp_path / "ring", resume=True
    )
    storage = make("cpu", actor(), ALGORITHM, None)
    for number in range(9):
        storage.insert_transition(transition(number, 2))
    for batch in storage.generate_batches(40, 8):
        errors = batch["Observation"][:, :1] + 0.5
        storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    expected = shares(storage)
    assert len(expected) == 18
    storage.close()
    # What was there before it was opened is older than the last reset.
    storage = make("cpu", actor(), ALGORITHM, None)
    for again in range(2):
        for number in range(3):
            storage.insert_transition(transition(100 + number, 2))
        storage.reset()
        storage.get_data_slice(0, size)
        assert shares(storage) == pytest.approx(expected, rel=1e-5), again
    storage.close()


def shares(storage):
    """The probability of each step, by its observation."""
    drawn = storage._ring.sample(3000)
    seen = drawn["Observation"][:, 0].tolist()
    return dict(zip(seen, drawn.probabilities.tolist(), strict=True))
