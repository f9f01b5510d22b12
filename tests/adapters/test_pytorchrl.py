"""pytorchrl's storages on disk: rows, slices, batches, by its golden values."""

import pickle

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import EREBuffer, MBReplayBuffer, PERBuffer, ReplayBuffer
from mmreplay.errors import EmptyError, FormatError, SchemaError
from tests.adapters.pytorchrl_steps import KEYS, actor, numbers, slice_of, storages, transition


@pytest.fixture
def make(tmp_path):
    with storages(tmp_path) as make:
        yield make


@pytest.mark.parametrize("kind", [ReplayBuffer, MBReplayBuffer])
def test_thirteen_into_ten_leave_the_newest_in_order(make, kind):
    storage = make(kind)
    for number in range(13):
        storage.insert_transition(transition(number))
    assert (storage.size, storage.step, storage.max_size) == (10, 3, 10)
    assert numbers(storage.get_all_buffer_data()) == list(range(3, 13))
    assert numbers(storage.data) == list(range(3, 13))
    storage.reset()
    # All of what is there came since the last reset.
    assert (storage.size, storage.step) == (0, 0)
    storage.insert_transition(transition(20))
    assert numbers(storage.data) == [20]
    assert storage.step == 1


def test_eight_inserted_twice_wrap(make):
    storage = make()
    storage.insert_data_slice(slice_of(range(8)))
    storage.insert_data_slice(slice_of(range(8)))
    assert (storage.size, storage.step) == (10, 6)
    assert numbers(storage.get_data_slice(0, 10)) == [6, 7, 0, 1, 2, 3, 4, 5, 6, 7]


def test_slices_are_clipped_as_pythons_are(make):
    storage = make()
    assert storage.get_data_slice(0, 5)["Observation"] is None
    storage.insert_data_slice(slice_of(range(8), envs=2))
    assert numbers(storage.get_data_slice(6, 50)) == [6, 7]
    assert numbers(storage.get_data_slice(-3, -1)) == [5, 6]
    found = storage.get_data_slice(5, 2)
    assert found["Observation"].shape == (0, 2, 1)
    found = storage.get_data_slice(0, 8)
    assert found["IntrinsicReward"] is None
    assert {array.dtype.name for array in found.values() if array is not None} == {"float32"}
    found["Observation"][:] = 0
    assert numbers(storage.data) == list(range(8))


def test_slices_of_off_policy_storages_have_no_keys_of_none(make):
    storage = make()
    assert dict(storage.data) == dict(storage.get_all_buffer_data()) == {}
    storage.insert_data_slice(slice_of(range(3)))
    stored = set(KEYS)
    for found in (storage.data, storage.get_all_buffer_data()):
        assert set(found) == stored
        assert set(pickle.loads(pickle.dumps(found))) == stored
        assert "IntrinsicReward" not in found
    # As pytorchrl's do, copies have all keys.
    found = storage.get_data_slice(0, 3)
    assert set(found) == set(storage.storage_tensors)
    assert {key for key, value in found.items() if value is None} == set(found) - stored


def test_slices_of_a_models_storage_have_every_key(make):
    storage = make(MBReplayBuffer)
    assert set(storage.data) == set(storage.storage_tensors)
    storage.insert_data_slice(slice_of(range(3)))
    found = storage.get_all_buffer_data()
    assert set(found) == set(storage.storage_tensors)
    assert found["RecurrentHiddenStates"] is None


@pytest.mark.parametrize("kind", [MBReplayBuffer, ReplayBuffer, PERBuffer, EREBuffer])
def test_a_tensor_put_among_the_data_gives_its_length_and_changes_no_row(make, kind):
    storage = make(kind)
    steps = np.full((4, 2, 1), 9.0, np.float32)
    put = storage.insert_single_tensor_slice
    assert put(storage.data, "Observation", steps) == 4
    assert storage.size == 0
    storage.insert_data_slice(slice_of(range(3), envs=2))
    for data in (storage.data, storage.get_all_buffer_data()):
        assert put(data, "Observation", steps) == 4
        assert put(data, "IntrinsicReward", torch.ones(5, 2, 1)) == 5
    assert (storage.size, storage.step) == (3, 3)
    assert numbers(storage.data) == [0, 1, 2]
    with pytest.raises(
        SchemaError, match=r"Reward must have the shape \[steps, 2, 1\], got \[4, 1, 1\]"
    ):
        put(storage.data, "Reward", steps[:, :1])
    with pytest.raises(SchemaError, match=r"shape \[steps, num_proc, \.\.\.\], got \[4\]"):
        put(storage.data, "IntrinsicReward", np.zeros(4))


def test_resetting_and_inserting_ones_own_rows_moves_nothing(make):
    storage = make(size=20)
    for number in range(15):
        storage.insert_transition(transition(number))
        if number % 4 == 3:
            data = storage.get_all_buffer_data()
            storage.reset()
            assert storage.size == 0
            storage.insert_data_slice(data)
            assert storage.size == number + 1
    assert storage._ring.heads.tolist() == [15]


def test_rows_older_than_the_last_reset_stay(make):
    storage = make(size=6)
    storage.insert_data_slice(slice_of(range(4)))
    mine = storage.get_all_buffer_data()
    copied = pickle.loads(pickle.dumps(mine))
    assert type(copied) is dict
    storage.reset()
    storage.insert_data_slice(copied)
    assert numbers(storage.data) == [0, 1, 2, 3]
    storage._mark = int(storage._ring.heads[0])  # as after resume=True
    storage.insert_data_slice(slice_of(range(4, 9)))
    kept = storage.get_all_buffer_data()
    storage.reset()
    assert numbers(storage.data) == [3]
    storage.insert_transition(transition(50))
    assert numbers(storage.data) == [3, 50]
    # What was taken out before it went is still what it was.
    assert numbers(kept) == [4, 5, 6, 7, 8]


def test_random_calls_are_those_of_a_list(make):
    rng = np.random.default_rng(1)
    storage = make(size=9)
    rows, since, value = [], 0, 0
    for _ in range(80):
        what = rng.choice(["one", "slice", "reset", "cycle"], p=[0.5, 0.3, 0.1, 0.1])
        if what == "one":
            storage.insert_transition(transition(value))
            rows, since, value = [*rows, value], since + 1, value + 1
        elif what == "slice":
            count = int(rng.integers(1, 13))
            storage.insert_data_slice(slice_of(range(value, value + count)))
            rows += range(value, value + count)
            since, value = since + count, value + count
        elif what == "reset":
            storage.reset()
            rows, since = rows[: len(rows) - min(since, len(rows))], 0
        else:
            data = storage.get_all_buffer_data()
            storage.reset()
            storage.insert_data_slice(data)
        rows = rows[-9:]
        assert storage.size == len(rows)
        if storage._ring is not None:
            assert numbers(storage.data) == rows
            assert (
                numbers(storage.get_all_buffer_data()) == rows[len(rows) - min(since, len(rows)) :]
            )


def test_draws_are_whole_transitions_of_all_environments(make):
    storage = make(size=50)
    with pytest.raises(EmptyError, match=r"Insert transitions first\."):
        next(storage.generate_batches(1, 4))
    for number in range(12):
        storage.insert_transition(transition(number, envs=3, done=number % 5 == 4))
    batches = list(storage.generate_batches(3, 64))
    assert len(batches) == 3
    for batch in batches:
        obs = batch["Observation"]
        assert set(batch) == set(transition(0)) - {"EnvironmentInformation"}
        assert obs.shape == (64, 1)
        assert torch.equal(batch["Action"], obs + 100)
        assert torch.equal(batch["NextObservation"], obs + 1)
        assert torch.equal(batch["NextDone"], (obs.floor() % 5 == 4).float())
        assert torch.equal(batch["NextRecurrentHiddenStates"]["rhs"], torch.zeros(1, 3))
    seen = torch.cat([batch["Observation"] for batch in batches])
    # 192 draws of 36 leave out more than ten with a probability below 1e-6.
    assert len(seen.unique()) > 25


def test_slices_that_do_not_fit_are_refused_whole(make):
    storage = make()
    storage.insert_data_slice(slice_of(range(3)))
    uneven = slice_of(range(4)) | {"Reward": np.zeros((3, 1, 1), np.float32)}
    with pytest.raises(SchemaError, match="slice: all keys must have the same number of"):
        storage.insert_data_slice(uneven)
    missing = transition(3)
    del missing["Action"]
    with pytest.raises(SchemaError, match="Action"):
        storage.insert_transition(missing)
    assert storage.size == 3
    with pytest.raises(SchemaError, match="keys must have one length"):
        make(name="other").insert_transition(transition(0) | {"Reward": torch.zeros(2, 1)})


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("Reward", torch.tensor(1.0), r"of the environments, got shapes \{'Reward':"),
        ("Reward", 1.0, r"of the environments, got shapes \{'Reward':"),
        ("NextDone", torch.zeros(2), r"a last axis of 1, got shape \[2\]\. Unsqueeze it\."),
    ],
)
def test_values_that_lack_an_axis_are_refused(make, first, key, value, match):
    storage = make()
    if not first:
        storage.insert_transition(transition(0, 2))
    with pytest.raises(SchemaError, match=match):
        storage.insert_transition(transition(1, 2) | {key: value})
    assert storage.size == (not first)


def test_whole_numbers_as_floats_go_where_bytes_came_first(make):
    storage = make()
    ends = {key: torch.zeros(1, 1, dtype=torch.bool) for key in ("Done", "NextDone")}
    seen = torch.full((1, 1), 200, dtype=torch.uint8)
    seen = {"Observation": seen, "NextObservation": seen}
    storage.insert_transition(transition(0) | ends | seen)
    storage.insert_transition(transition(1, done=True))
    found = storage.get_data_slice(0, 2)
    assert numbers(found) == [200, 1]
    assert found["NextDone"].flatten().tolist() == [0, 1]
    with pytest.raises(SchemaError, match=r"'Observation' must be .*, got float32"):
        storage.insert_transition(transition(0.5))


def test_observations_of_dicts_come_out_as_dicts(make):
    def step(number):
        image = torch.full((2, 4, 4), number, dtype=torch.uint8)
        seen = {"image": image, "speed": torch.full((2, 1), float(number))}
        return transition(number, envs=2) | {"Observation": seen, "NextObservation": seen}

    storage = make()
    storage.init_tensors(step(0))
    assert storage.size == 0
    for number in range(5):
        storage.insert_transition(step(number))
    (batch,) = storage.generate_batches(1, 8)
    seen = batch["Observation"]
    assert seen["image"].shape == (8, 4, 4)
    assert seen["image"].dtype == torch.float32
    assert torch.equal(seen["image"][:, 0, 0], seen["speed"][:, 0])
    # A byte is stored as one.
    assert storage._ring.schema["Observation/image"].dtype == "uint8"
    found = storage.get_data_slice(1, 3)["NextObservation"]["image"]
    assert (found.shape, found.dtype.name) == ((2, 2, 4, 4), "float32")


def test_parameters_change_and_a_new_size_keeps_the_newest(make):
    storage = make(PERBuffer, 10, 1, 0.01, 0.6)
    storage.insert_data_slice(slice_of(range(10)))
    storage.update_storage_parameter("max_size", 4)
    assert numbers(storage.data) == [6, 7, 8, 9]
    storage.update_storage_parameter("max_size", 6)
    storage.insert_data_slice(slice_of(range(10, 14)))
    assert numbers(storage.data) == [8, 9, 10, 11, 12, 13]
    storage.update_storage_parameter("beta", 0.25)
    storage.update_storage_parameter("nothing of ours", 1)
    assert storage.beta == 0.25
    assert not hasattr(storage, "nothing of ours")


def test_a_ring_that_is_there_needs_resume_and_goes_on(make):
    storage = make()
    storage.insert_data_slice(slice_of(range(7)))
    storage.close()
    with pytest.raises(FormatError, match="resume=True"):
        make()
    again = make(resume=True)
    assert (again.size, again.step) == (7, 0)
    again.insert_transition(transition(7))
    assert numbers(again.data) == list(range(8))
    assert numbers(again.get_all_buffer_data()) == [7]
    assert "ring" in repr(again)


@pytest.mark.parametrize("count", [12, 13])
def test_model_based_batches_hold_every_row_once(make, count):
    model = actor()
    storage = make(MBReplayBuffer, 20, with_=model)
    with pytest.raises(EmptyError, match=r"Insert transitions first\."):
        next(storage.generate_batches(1))
    for number in range(count):
        storage.insert_transition(transition(number))
    batches = list(storage.generate_batches(1, 4))
    assert [len(b["train_input"]) for b in batches] == [4, 4, 4, 1][: -(-count // 4)]
    assert [b["batch_number"] for b in batches] == list(range(len(batches)))
    inputs = (
        torch.cat([b["train_input"] for b in batches])
        + model.dynamics_model.standard_scaler.means[0]
    )
    labels = (
        torch.cat([b["train_label"] for b in batches])
        + model.dynamics_model.standard_scaler.means[1]
    )
    order = inputs[:, 0].argsort()
    assert inputs[order, 0].round().tolist() == list(range(count))
    assert inputs[order, 0].tolist() != inputs[:, 0].tolist()
    assert torch.allclose(inputs[:, 1], inputs[:, 0] + 100)
    # The change of the observation, and the reward.
    assert torch.allclose(labels[:, 0], torch.ones(count))
    assert torch.allclose(labels[:, 1], inputs[:, 0], atol=1e-5)


def test_numbers_that_make_no_sense_are_refused_at_once(make):
    for size in (0, 1.5):
        with pytest.raises(SchemaError, match="size must be an integer of at least 1"):
            make(size=size)
    with pytest.raises(SchemaError, match="n_step must be an integer of at least 1, got"):
        make(PERBuffer, 10, 0)
    storage = make(MBReplayBuffer)
    storage.insert_transition(transition(0))
    for size in (0, -1):
        with pytest.raises(SchemaError, match=r"^mini_batch_size must be"):
            list(storage.generate_batches(1, size))


def test_model_based_actions_are_one_hot_whichever_occurred(make):
    storage = make(MBReplayBuffer, 20, with_=actor(actions=4, reward_function=max))
    for number in range(6):
        storage.insert_transition(
            transition(number, envs=2) | {"Action": torch.full((2, 1), number % 3)}
        )
    (batch,) = storage.generate_batches(1, 100)
    scaler = storage.scaler
    inputs = batch["train_input"] + scaler.means[0]
    assert inputs.shape == (12, 5)
    assert batch["train_label"].shape == (12, 1)
    chosen = inputs[:, 1:].round().argmax(1)
    assert torch.equal(chosen, inputs[:, 0].round().long() % 3)
