"""pytorchrl's storages on disk: resumed, resized, copied, and let go."""

import copy
import gc
import multiprocessing
import pickle
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import (
    EREBuffer,
    HERBuffer,
    MBReplayBuffer,
    NStepReplayBuffer,
    PERBuffer,
    ReplayBuffer,
)
from mmreplay.adapters.pytorchrl.data import Slice
from mmreplay.errors import FormatError, SchemaError
from tests.adapters.pytorchrl_steps import (
    ALGORITHM,
    actor,
    numbers,
    recurrent_actor,
    slice_of,
    transition,
)


@pytest.fixture
def make(tmp_path):
    made = []

    def make(kind=ReplayBuffer, size=10, with_=None, **named):
        build = kind.create_factory(size, path=tmp_path / "ring", **named)
        made.append(build("cpu", with_ or actor(), ALGORITHM, None))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def in_bytes(number):
    """A step whose observation is an image, and whose end is a bool."""
    step = transition(number)
    for key in ("Observation", "NextObservation", "Done"):
        step[key] = step[key].to(torch.uint8)
    return step | {"NextDone": step["NextDone"] != 0}


@pytest.mark.parametrize("recurrent", [False, True])
def test_bytes_and_bools_are_put_in_again_as_they_were(make, recurrent):
    storage = make(size=30, with_=recurrent_actor() if recurrent else None)
    for number in range(7):
        storage.insert_transition(in_bytes(number))
    again = [3, 4] if recurrent else []
    expected = [*range(5), *again, 5, 6]
    assert numbers(storage.data) == expected
    taken = storage.get_data_slice(0, 3)
    assert taken["Observation"].dtype == taken["NextDone"].dtype == np.float32
    storage.insert_data_slice(taken)
    assert numbers(storage.data) == [*expected, 0, 1, 2]
    fields = storage._ring.schema.fields
    assert (fields["Observation"].dtype, fields["NextDone"].dtype) == ("uint8", "bool")
    with pytest.raises(SchemaError, match=r"must be uint8.*got float32"):
        storage.insert_data_slice(taken | {"Observation": taken["Observation"] + 0.5})
    storage.close()
    # Rows of before are copied on where those since are taken out.
    storage = make(size=30, with_=recurrent_actor() if recurrent else None, resume=True)
    storage.insert_transition(in_bytes(7))
    storage.reset()
    storage.insert_transition(in_bytes(8))
    assert numbers(storage.data) == [*expected, 0, 1, 2, 8]


@pytest.mark.parametrize("kind", [ReplayBuffer, PERBuffer])
def test_a_copy_has_the_rows_and_a_ring_of_its_own(make, tmp_path, kind):
    options = {"alpha": 1.0} if kind is PERBuffer else {}
    storage = make(kind, 30, **options)
    empty = copy.deepcopy(storage)
    empty.insert_transition(transition(7))
    storage.insert_data_slice(slice_of(range(20)))
    if kind is PERBuffer:
        for batch in storage.generate_batches(40, 16):
            errors = (batch["Observation"] == 3).float()
            storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    taken = copy.deepcopy(storage)
    # As pytorchrl's scheme does, where collection and updates take turns no more.
    storage.update_storage_parameter("max_size", 4)
    assert (storage.size, taken.size, taken.max_size) == (4, 20, 30)
    taken.insert_data_slice(storage.get_all_buffer_data())
    assert numbers(taken.data) == [*range(20), *range(16, 20)]
    assert numbers(storage.data) == [16, 17, 18, 19]
    assert numbers(empty.data) == [7]
    places = [each.home.path for each in (storage, empty, taken)]
    assert places == [tmp_path / name for name in ("ring", "ring-copy1", "ring-copy2")]
    if kind is PERBuffer:
        taken.update_storage_parameter("beta", 0.5)
        assert (storage.beta, taken.beta) == (1.0, 0.5)
    for each in (empty, taken):
        each.close()


def unchanged_by(worker, o, rhs, o2, rhs2, r, initial_state, final_state):
    return o, rhs, o2, rhs2, r


@pytest.mark.parametrize("kind", [ReplayBuffer, NStepReplayBuffer, PERBuffer, EREBuffer, HERBuffer])
def test_a_copy_shares_actor_algorithm_and_environments(tmp_path, kind):
    # As a vector of several environments does: it cannot be copied.
    worker = SimpleNamespace(process=multiprocessing.Process())
    with pytest.raises(TypeError, match="AuthenticationString"):
        copy.deepcopy(worker)
    algorithm = SimpleNamespace(gamma=0.9, update_every=5, envs=worker)
    model = actor()
    functions = [partial(unchanged_by, worker)] if kind is HERBuffer else []
    storage = kind(30, "cpu", model, algorithm, worker, *functions, path=tmp_path / "ring")
    storage.insert_data_slice(slice_of(range(20)))
    taken = copy.deepcopy(storage)
    if functions:
        assert taken.her_function is functions[0]
    assert taken.actor is model
    assert taken.algo is algorithm
    assert taken.envs is worker
    assert numbers(taken.data) == list(range(20))
    taken.close()
    storage.close()


def test_the_scaler_of_a_copy_is_the_one_that_its_actor_uses(make):
    model = actor()
    storage = make(MBReplayBuffer, 30, with_=model)
    storage.insert_data_slice(slice_of(range(20)))
    taken = copy.deepcopy(storage)
    list(taken.generate_batches(1, 8))
    assert taken.scaler is model.dynamics_model.standard_scaler
    assert model.dynamics_model.standard_scaler.means[0][0] == 9.5
    taken.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_fails_leaves_no_folder(make, tmp_path, monkeypatch, late):
    storage = make(size=30)
    storage.insert_data_slice(slice_of(range(20)))
    with monkeypatch.context() as patch:
        if late:
            patch.setattr(ReplayBuffer, "_recall", lambda self: 1 / 0)
        else:
            storage.extra = multiprocessing.Process()
        with pytest.raises(ZeroDivisionError if late else TypeError):
            copy.deepcopy(storage)
    assert [each.name for each in tmp_path.iterdir()] == ["ring"]
    storage.insert_transition(transition(20))
    assert numbers(storage.data) == list(range(21))


def test_a_copy_of_a_resumed_storage_goes_on_with_its_own_folder(make):
    storage = make(size=30)
    storage.insert_data_slice(slice_of(range(5)))
    taken = copy.deepcopy(storage)
    storage.update_storage_parameter("max_size", 4)
    taken.insert_data_slice(slice_of(range(5, 9)))
    storage.close()
    taken.close()
    with pytest.raises(FormatError, match="resume=True"):
        make(size=30)
    storage = make(size=30, resume=True)
    taken = copy.deepcopy(storage)
    assert (numbers(storage.data), storage.max_size) == ([1, 2, 3, 4], 30)
    assert (numbers(taken.data), taken.max_size) == (list(range(9)), 30)
    assert numbers(taken.get_all_buffer_data()) == []
    taken.insert_transition(transition(9))
    assert numbers(taken.data) == list(range(10))
    taken.close()


def test_a_copy_of_a_temporary_storage_is_temporary_too(tmp_path, monkeypatch):
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    storage = ReplayBuffer(10, "cpu", actor(), ALGORITHM, None)
    storage.insert_data_slice(slice_of(range(5)))
    taken = copy.deepcopy(storage)
    storage.close()
    assert numbers(taken.data) == list(range(5))
    assert next(taken.generate_batches(1, 4))["Observation"].shape == (4, 1)
    taken.close()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_sequences_keeps_their_grid(make):
    storage = make(with_=recurrent_actor(), size=40)
    for number in range(11):
        storage.insert_transition(transition(number))
    taken = copy.deepcopy(storage)
    for number in range(50, 55):
        taken.insert_transition(transition(number))
    firsts = {
        float(batch["Observation"][first])
        for batch in taken.generate_batches(40, 12)
        for first in (0, 5, 10)
    }
    # 120 draws miss one of four with a probability below 1e-14.
    assert firsts == {0.0, 3.0, 6.0, 50.0}
    taken.close()


@pytest.mark.parametrize("kind", [ReplayBuffer, NStepReplayBuffer, PERBuffer])
def test_a_temporary_storage_that_is_dropped_is_gone(tmp_path, monkeypatch, kind):
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = {"alpha": 1.0} if kind is PERBuffer else {}
    storage = kind(10, "cpu", actor(), ALGORITHM, None, **options)
    storage.insert_data_slice(slice_of(range(5)))
    next(storage.generate_batches(1, 4))
    assert len(list(tmp_path.iterdir())) == 1
    del storage
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_is_there_grows_to_the_size_and_does_not_shrink(make):
    make(size=10).insert_data_slice(slice_of(range(10)))
    make(size=10, resume=True).close()
    storage = make(size=50, resume=True)
    assert (storage.max_size, numbers(storage.data)) == (50, list(range(10)))
    storage.close()
    with pytest.raises(SchemaError, match="size must be at least the 50 rows of"):
        make(size=20, resume=True)
    storage = make(size=50, resume=True)
    storage.update_storage_parameter("max_size", 20)
    assert storage.max_size == 20


def test_a_new_size_of_sequences_is_rounded_and_doubled(make):
    storage = make(with_=recurrent_actor(), size=20)
    assert storage.max_size == 40
    storage.update_storage_parameter("max_size", 43)
    assert storage.max_size == 80
    with pytest.raises(SchemaError, match=r"must be an integer of at least 5, got 4\."):
        storage.update_storage_parameter("max_size", 4)
    storage.insert_transition(transition(0))
    storage.update_storage_parameter("max_size", 20)
    assert storage.max_size == storage._ring.capacity == 40


@pytest.mark.parametrize("size", [0, -3, 1.5])
def test_a_new_size_that_is_none_is_refused_at_once(make, size):
    storage = make()
    with pytest.raises(SchemaError, match="max_size must be an integer of at least 1,"):
        storage.update_storage_parameter("max_size", size)
    assert storage.max_size == 10


def test_dequeued_rows_stay_dequeued_after_a_resize(make):
    storage = make()
    storage.insert_data_slice(slice_of(range(8)))
    taken = storage.get_all_buffer_data()
    storage.update_storage_parameter("max_size", 3)
    assert numbers(taken) == list(range(8))


def test_a_slice_that_two_threads_look_at_is_read_once():
    begun, go, calls = threading.Event(), threading.Event(), []

    class Storage:
        def sliced_rows(self, first, stop):
            calls.append((first, stop))
            begun.set()
            go.wait(30)
            return {"Reward": np.zeros(stop - first)}

    taken = Slice(Storage(), 3, 7)
    threads = [threading.Thread(target=taken.loaded) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    go.set()
    for thread in threads:
        thread.join()
    assert (calls, len(taken["Reward"])) == ([(3, 7)], 4)


@pytest.mark.parametrize("sliced", [False, True])
def test_batches_of_a_resumed_storage_have_hidden_states_at_once(make, sliced):
    storage = make(size=20)
    for number in range(8):
        storage.insert_transition(transition(number, envs=2))
    if sliced:
        sent = pickle.loads(pickle.dumps(storage.get_all_buffer_data()))
        storage = NStepReplayBuffer(20, "cpu", actor(), ALGORITHM, None)
        storage.insert_data_slice(sent)
    (expected,) = make(size=20, resume=True).generate_batches(1, 4)
    (found,) = storage.generate_batches(1, 4)
    assert set(expected) <= set(found)
    for key in ("RecurrentHiddenStates", "NextRecurrentHiddenStates"):
        assert torch.equal(found[key]["rhs"], torch.zeros(1, 3))
        assert torch.equal(expected[key]["rhs"], torch.zeros(1, 3))
