"""Recurrent actors of pytorchrl are given whole sequences, which overlap."""

import pickle

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import NStepReplayBuffer, PERBuffer, ReplayBuffer
from mmreplay.adapters.pytorchrl.sequences import Grid
from mmreplay.errors import EmptyError, FormatError
from tests.adapters.pytorchrl_steps import (
    ALGORITHM,
    actor,
    numbers,
    recurrent_actor,
    recurrent_step,
    transition,
)


@pytest.fixture
def make(tmp_path):
    made = []

    def make(size=40, envs=None, overlap=0.4, **named):
        build = ReplayBuffer.create_factory(size, path=tmp_path / "ring", **named)
        made.append(build("cpu", recurrent_actor(overlap), ALGORITHM, envs))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def test_sequences_of_five_overlap_by_two_rows_stored_twice(make):
    storage = make()
    lengths = storage.sequence_length, storage.overlap_length
    assert (*lengths, storage.non_overlap_length, storage.max_size) == (5, 2, 3, 80)
    for number in range(11):
        storage.insert_transition(recurrent_step(number))
    assert numbers(storage.data) == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10]
    # Half a sequence is not given away.
    storage.insert_transition(recurrent_step(11))
    assert len(numbers(storage.get_all_buffer_data())) == 15


def test_the_oldest_sequence_is_drawn_though_the_one_before_is_gone(tmp_path):
    build = NStepReplayBuffer.create_factory(10, 3, path=tmp_path / "ring")
    storage = build("cpu", recurrent_actor(), ALGORITHM, None)
    # As many rows more as make the oldest one alive begin a sequence.
    for number in range(24):
        storage.insert_transition(recurrent_step(number))
        first, stop = storage._alive()
        oldest = numbers(storage.data)[0]
        if not first or storage._grid.starts(first, stop)[0] != first:
            continue
        drawn = set()
        for batch in storage.generate_batches(30, 9):
            seen = batch["Observation"][:, 0]
            assert torch.equal(batch["NextObservation"][:, 0], seen + 3)
            drawn |= set(seen.tolist())
        assert oldest in drawn
    assert first >= 10
    storage.close()


def test_without_overlap_no_row_is_stored_twice(make):
    storage = make(overlap=0.0)
    for number in range(11):
        storage.insert_transition(recurrent_step(number))
    assert numbers(storage.data) == list(range(11))


@pytest.mark.parametrize("count", [7, 200])
def test_batches_are_whole_sequences_also_after_a_wrap(make, count):
    storage = make(envs=2)
    with pytest.raises(EmptyError, match=r"Insert transitions first\."):
        next(storage.generate_batches(1, 12))
    for number in range(count):
        storage.insert_transition(recurrent_step(number, envs=2))
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
        assert torch.equal(batch["RecurrentHiddenStates"]["rhs"][:, 0], rows[:, 0].floor())


def test_a_collector_begins_with_the_end_of_what_it_sent(make):
    storage = make()
    for number in range(5):
        storage.insert_transition(recurrent_step(number))
    sent = storage.get_all_buffer_data(data_to_cpu=True)
    storage.reset()
    assert numbers(sent) == [0, 1, 2, 3, 4]
    assert (storage.size, storage.step) == (2, 2)
    assert numbers(storage.data) == [3, 4]
    for number in range(5, 8):
        storage.insert_transition(recurrent_step(number))
    assert numbers(storage.get_all_buffer_data(data_to_cpu=True)) == [3, 4, 5, 6, 7]


def test_ones_own_rows_put_back_move_nothing_and_lose_no_half_sequence(make):
    storage = make()
    for number in range(7):
        storage.insert_transition(recurrent_step(number))
    data = storage.get_all_buffer_data()
    storage.reset()
    storage.insert_data_slice(data)
    assert numbers(storage.data) == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    storage.insert_transition(recurrent_step(7))
    assert len(numbers(storage.get_all_buffer_data())) == 10


def test_sequences_after_a_resume_are_their_own(make):
    storage = make()
    for number in range(7):
        storage.insert_transition(recurrent_step(number))
    storage.close()
    again = make(resume=True)
    for number in range(50, 55):
        again.insert_transition(recurrent_step(number))
    firsts = set()
    for batch in again.generate_batches(20, 12):
        rows = batch["Observation"].reshape(3, 5)
        assert torch.equal(rows, rows[:, :1] + torch.arange(5))
        firsts |= set(rows[:, 0].tolist())
    # 60 draws miss one of two with probability 2**-59.
    assert firsts == {0.0, 50.0}
    again.reset()
    # What was before the last reset stays, and keeps its sequences.
    again.insert_transition(recurrent_step(90))
    assert numbers(again.data) == [0, 1, 2, 3, 4, 3, 4, 5, 6, 90]
    (batch,) = again.generate_batches(1, 1)
    assert batch["Observation"][:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(4))
def test_the_grid_gives_every_whole_sequence_and_what_follows_its_rows(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        length, n_step = (int(n) for n in rng.integers(1, 6, 2))
        overlap = int(rng.integers(length))
        # Steps as they are laid out: (part, number) of each row.
        rows, origins = [], []
        for part in range(int(rng.integers(1, 4))):
            origins.append(len(rows))
            since = []
            for number in range(int(rng.integers(1, 25))):
                if since and len(since) % length == 0:
                    since += since[len(since) - overlap :] if overlap else []
                since.append((part, number))
            rows += since
        first = int(rng.integers(len(rows)))
        grid = Grid(length, origins, overlap, n_step)
        expected = {}
        for part, origin in enumerate(origins):
            end = [*origins[1:], len(rows)][part]
            for begin in range(origin, end - length + 1, length):
                wanted = [
                    [(part, number + ahead) for ahead in range(n_step)]
                    for _, number in rows[begin : begin + length]
                ]
                there = rows[origin:end]
                whole = all(w in there for line in wanted for w in line)
                # Of a part that another one follows, nothing more will come.
                if begin >= first and (whole or end < len(rows)):
                    expected[begin] = [[w for w in line if w in there] for line in wanted]
        found = grid.starts(first, len(rows))
        assert found.tolist() == sorted(expected)
        places, known = grid.following(found, len(rows))
        for begin, lines, masks in zip(found, places, known, strict=True):
            assert [
                [rows[p] for p in line[mask]] for line, mask in zip(lines, masks, strict=True)
            ] == expected[begin]


@pytest.mark.parametrize("kind", [NStepReplayBuffer, PERBuffer])
@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_n_step_rows_of_sequences_stop_at_the_first_end(tmp_path, rng, kind, overlap):
    storage = kind(40, "cpu", recurrent_actor(overlap), ALGORITHM, None, 3, path=tmp_path / "ring")
    ends = rng.random(60) < 0.2
    for number, end in enumerate(ends):
        storage.insert_transition(recurrent_step(number, envs=2) | ended(end, 2))
    seen = set()
    for batch in storage.generate_batches(60, 12):
        assert batch["n_step"] == 3
        assert batch["NextRecurrentHiddenStates"]["rhs"].shape == (3, 3)
        for row in range(15):
            start = float(batch["Observation"][row])
            number = int(start)
            stop = next((i for i in range(3) if ends[number + i]), 2)
            rewards = [0.9**i * (start + i) for i in range(stop + 1)]
            # Sums of three float32 numbers below 100.
            assert abs(float(batch["Reward"][row]) - sum(rewards)) < 1e-4
            assert float(batch["NextObservation"][row]) == pytest.approx(start + stop + 1)
            assert batch["NextDone"][row] == ends[number + stop]
            seen.add(number)
    # The newest steps wait for what follows them.
    assert max(seen) + 2 < 60
    storage.close()


@pytest.mark.parametrize("overlap", [0.0, 0.4])
@pytest.mark.parametrize("n_step", [1, 3])
def test_sequences_of_two_collectors_are_followed_by_their_own(tmp_path, overlap, n_step):
    def storage(name):
        return NStepReplayBuffer(
            100, "cpu", recurrent_actor(overlap), ALGORITHM, None, n_step, path=tmp_path / name
        )

    learner, *collectors = [storage(name) for name in "lab"]
    numbers_of = [iter(range(100)), iter(range(1000, 1100))]
    for turn in range(4):
        for collector, values in zip(collectors, numbers_of, strict=True):
            for _ in range(collector.non_overlap_length if turn else 5):
                collector.insert_transition(recurrent_step(next(values)))
            sent = pickle.dumps(collector.get_all_buffer_data(True))
            collector.reset()
            learner.insert_data_slice(pickle.loads(sent))
    # One's own steps behind a slice repeat nothing of it.
    for number in range(500, 505):
        learner.insert_transition(recurrent_step(number))
    firsts = set()
    for batch in learner.generate_batches(60, 12):
        steps = torch.as_tensor(batch["n_step"]).expand(15, 1)
        assert torch.equal(batch["NextObservation"] - batch["Observation"], steps)
        rows = batch["Observation"].reshape(3, 5)
        assert torch.equal(rows, rows[:, :1] + torch.arange(5))
        firsts |= set(rows[:, 0].tolist())
    fresh = learner.non_overlap_length
    begun = {base + fresh * turn for base in (0, 1000) for turn in range(4)}
    # 180 draws miss one of nine with a probability below 1e-8. The newest steps wait.
    assert firsts == (begun | {500} if n_step == 1 else begun)
    for each in (learner, *collectors):
        each.close()


def ended(end, envs=1):
    return {"NextDone": torch.full((envs, 1), float(end))}


def test_storages_and_their_makers_pickle_as_the_way_to_the_folder(tmp_path):
    options = {"alpha": 0.6, "n_step": 2, "path": tmp_path / "ring", "resume": True}
    make = pickle.loads(pickle.dumps(PERBuffer.create_factory(40, **options)))
    storage = make("cpu", recurrent_actor(), ALGORITHM, None)
    for number in range(20):
        storage.insert_transition(recurrent_step(number))
    kept = pickle.dumps(storage)
    storage.insert_transition(recurrent_step(20))
    storage.close()
    again = pickle.loads(kept)
    assert numbers(again.data)[-1] == 20
    assert (again.n_step, again.alpha, again.max_size) == (2, 0.6, 80)
    again.insert_transition(recurrent_step(21))
    assert len(next(again.generate_batches(1, 1))["Observation"]) == 5
    again.close()


@pytest.mark.parametrize("kind", [ReplayBuffer, PERBuffer])
def test_a_storage_without_memory_pickles_too_and_goes_on_drawing(tmp_path, kind):
    storage = kind(40, "cpu", actor(), ALGORITHM, None, path=tmp_path / "ring")
    for number in range(30):
        storage.insert_transition(transition(number))
    next(storage.generate_batches(1, 6))
    kept = pickle.dumps(storage)
    (expected,) = storage.generate_batches(1, 6)
    storage.close()
    again = pickle.loads(kept)
    (found,) = again.generate_batches(1, 6)
    assert torch.equal(found["Observation"], expected["Observation"])
    again.close()


def test_a_storage_in_a_temporary_folder_is_not_pickled():
    storage = ReplayBuffer(40, "cpu", actor(), ALGORITHM, None)
    storage.insert_transition(transition(0))
    with pytest.raises(FormatError, match=r"which is removed at exit\. Pass path=, or set"):
        pickle.dumps(storage)
    storage.close()
