"""Recurrent actors of pytorchrl are given whole sequences, which overlap."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import NStepReplayBuffer, PERBuffer, ReplayBuffer
from mmreplay.adapters.pytorchrl_sequences import Grid
from mmreplay.errors import EmptyError, SchemaError
from tests.adapters.pytorchrl_steps import ALGORITHM, actor, numbers, transition


def remembering(overlap=0.4):
    made = actor(recurrent=True)
    made.sequence_overlap = overlap
    return made


def step(number, envs=1):
    """A step whose hidden state tells its number as well."""
    hidden = {"rhs": torch.full((envs, 2), float(number))}
    return transition(number, envs) | {"RecurrentHiddenStates": hidden}


@pytest.fixture
def make(tmp_path):
    made = []

    def make(size=40, envs=None, overlap=0.4, **named):
        build = ReplayBuffer.create_factory(size, path=tmp_path / "ring", **named)
        made.append(build("cpu", remembering(overlap), ALGORITHM, envs))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def test_sequences_of_five_overlap_by_two_rows_stored_twice(make):
    storage = make()
    lengths = storage.sequence_length, storage.overlap_length
    assert (*lengths, storage.non_overlap_length, storage.max_size) == (5, 2, 3, 80)
    for number in range(11):
        storage.insert_transition(step(number))
    assert numbers(storage.data) == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10]
    # Half a sequence is not given away.
    storage.insert_transition(step(11))
    assert len(numbers(storage.get_all_buffer_data())) == 15


def test_without_overlap_no_row_is_stored_twice(make):
    storage = make(overlap=0.0)
    for number in range(11):
        storage.insert_transition(step(number))
    assert numbers(storage.data) == list(range(11))


@pytest.mark.parametrize("count", [7, 200])
def test_batches_are_whole_sequences_also_after_a_wrap(make, count):
    storage = make(envs=2)
    with pytest.raises(EmptyError, match="insert transitions first"):
        next(storage.generate_batches(1, 12))
    for number in range(count):
        storage.insert_transition(step(number, envs=2))
    (batch,) = storage.generate_batches(1, 12)
    # 12 // 5 + 1 sequences of 5.
    assert batch["Observation"].shape == (15, 1)
    assert batch["RecurrentHiddenStates"]["rhs"].shape == (3, 2)
    for _ in range(30):
        (batch,) = storage.generate_batches(1, 12)
        rows = batch["Observation"].reshape(3, 5)
        assert torch.allclose(rows, rows[:, :1] + torch.arange(5))
        # Sequences begin every three steps.
        assert (rows[:, 0].floor() % 3 == 0).all()
        assert torch.equal(
            batch["RecurrentHiddenStates"]["rhs"][:, 0], rows[:, 0].floor()
        )


def test_a_collector_begins_with_the_end_of_what_it_sent(make):
    storage = make()
    for number in range(5):
        storage.insert_transition(step(number))
    sent = storage.get_all_buffer_data(data_to_cpu=True)
    storage.reset()
    assert numbers(sent) == [0, 1, 2, 3, 4]
    assert (storage.size, storage.step) == (2, 2)
    assert numbers(storage.data) == [3, 4]
    for number in range(5, 8):
        storage.insert_transition(step(number))
    assert numbers(storage.get_all_buffer_data(data_to_cpu=True)) == [3, 4, 5, 6, 7]


def test_ones_own_rows_put_back_move_nothing_and_lose_no_half_sequence(make):
    storage = make()
    for number in range(7):
        storage.insert_transition(step(number))
    data = storage.get_all_buffer_data()
    storage.reset()
    storage.insert_data_slice(data)
    assert numbers(storage.data) == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    storage.insert_transition(step(7))
    assert len(numbers(storage.get_all_buffer_data())) == 10


def test_sequences_after_a_resume_are_their_own(make):
    storage = make()
    for number in range(7):
        storage.insert_transition(step(number))
    storage.close()
    again = make(resume=True)
    for number in range(50, 55):
        again.insert_transition(step(number))
    firsts = set()
    for batch in again.generate_batches(20, 12):
        rows = batch["Observation"].reshape(3, 5)
        assert torch.equal(rows, rows[:, :1] + torch.arange(5))
        firsts |= set(rows[:, 0].tolist())
    # 60 draws miss one of two with probability 2**-59.
    assert firsts == {0.0, 50.0}
    again.reset()
    # What was before the last reset stays, and keeps its sequences.
    again.insert_transition(step(90))
    assert numbers(again.data) == [0, 1, 2, 3, 4, 3, 4, 5, 6, 90]
    (batch,) = again.generate_batches(1, 1)
    assert batch["Observation"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_the_grid_gives_every_whole_sequence_and_no_other():
    rng = np.random.default_rng(0)
    for _ in range(200):
        length = int(rng.integers(1, 6))
        origins = np.unique(rng.integers(0, 30, rng.integers(1, 4))).tolist()
        first = int(rng.integers(origins[0], 35))
        stop = int(rng.integers(max(first, origins[-1]), 45))
        edges = [*origins[1:], stop]
        expected = {
            begin
            for origin, end in zip(origins, edges, strict=True)
            for begin in range(origin, end - length + 1, length)
            if begin >= first
        }
        grid = Grid(length, origins)
        if not expected:
            with pytest.raises(EmptyError, match="that follow each other"):
                grid.draw(first, stop, 5, rng)
            continue
        # 1,000 draws miss one of at most 45 with probability 45 * (44 / 45)**1000.
        assert set(grid.draw(first, stop, 1000, rng).tolist()) == expected


@pytest.mark.parametrize("kind", [NStepReplayBuffer, PERBuffer])
def test_n_step_and_prioritized_storages_refuse_recurrent_actors(kind):
    with pytest.raises(SchemaError, match="expected one without memory; use Replay"):
        kind(10, "cpu", remembering(), SimpleNamespace(gamma=0.9, update_every=5), None)
