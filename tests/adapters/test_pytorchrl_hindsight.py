"""pytorchrl's HERBuffer on disk inserts each episode again, with another goal."""

import os
import pickle
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import HERBuffer
from mmreplay.errors import SchemaError
from tests.adapters.pytorchrl_steps import ALGORITHM, actor, numbers, transition


def shifted(o, rhs, o2, rhs2, r, initial_state, final_state):
    """Add 1000 to what is seen, and tell the episode's first and last observation."""
    return o + 1000, rhs, o2 + 1000, rhs2, initial_state * 1000 + final_state


@pytest.fixture
def make(tmp_path):
    made = []

    def make(size=100, her_function=shifted, with_=None, **named):
        named.setdefault("path", tmp_path / "ring")
        build = HERBuffer.create_factory(size, her_function, **named)
        made.append(build("cpu", with_ or actor(), ALGORITHM, None))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def episodes(storage, *lengths, envs=1, first=0):
    """Insert episodes whose steps are numbered on; the first step after an end is Done.

    Returns:
        The number of the next step.
    """
    for length in lengths:
        for place in range(length):
            step = transition(first, envs, done=place == length - 1, reward=1.0)
            step["Done"] = torch.full((envs, 1), float(place == 0 and first > 0))
            storage.insert_transition(step)
            first += 1
    return first


@pytest.mark.parametrize("envs", [1, 3])
def test_an_episode_is_inserted_again_but_for_its_last_step(make, envs):
    storage = make()
    episodes(storage, 4, 3, envs=envs)
    episodes(storage, 1, envs=envs, first=7)
    storage.insert_transition(transition(8, envs, reward=1.0))
    assert numbers(storage.data) == [0, 1, 2, 3, 1000, 1001, 1002, 4, 5, 6, 1004, 1005, 7, 8]
    assert (storage.size, storage.step) == (14, 14)
    rows = storage.get_data_slice(0, 14)
    for env in range(envs):
        seen = rows["Observation"][:, env, 0]
        again = seen >= 1000
        np.testing.assert_allclose(rows["NextObservation"][:, env, 0], seen + 1)
        # What the step did stays.
        acts = np.where(again, seen - 1000, seen) + 100
        np.testing.assert_allclose(rows["Action"][:, env, 0], acts, rtol=1e-6)
        ends = np.isin(np.arange(14), [3, 9, 12])
        np.testing.assert_array_equal(rows["NextDone"][:, env, 0], ends)
        told = rows["Reward"][:, env, 0]
        assert (told[~again] == 1).all()
        shift = env / 10
        first = [shift * 1000 + 3 + shift] * 3 + [(4 + shift) * 1000 + 6 + shift] * 2
        np.testing.assert_allclose(told[again], first, rtol=1e-6)
        begins = np.isin(np.arange(14), [4, 7, 10, 12])
        np.testing.assert_array_equal(rows["Done"][:, env, 0], begins)


def test_the_default_function_changes_nothing(tmp_path):
    build = pickle.loads(pickle.dumps(HERBuffer.create_factory(50)))
    storage = build("cpu", actor(), ALGORITHM, None)
    episodes(storage, 4)
    assert numbers(storage.data) == [0, 1, 2, 3, 0, 1, 2]
    (batch,) = storage.generate_batches(1, 20)
    assert set(batch) == {
        "Observation",
        "RecurrentHiddenStates",
        "Done",
        "Action",
        "Reward",
        "NextObservation",
        "NextRecurrentHiddenStates",
        "NextDone",
        "n_step",
        "idxs",
        "ck",
    }
    storage.close()


def drawn_of(storage):
    found = {}
    for batch in storage.generate_batches(40, 32):
        steps = torch.as_tensor(batch["n_step"]).expand(32, 1)
        keys = batch["NextObservation"], batch["Reward"], steps, batch["NextDone"]
        for start, *told in zip(batch["Observation"], *keys, strict=True):
            found[int(start)] = tuple(round(float(each), 4) for each in told)
    return found


def as_rewards_of_one(o, rhs, o2, rhs2, r, initial_state, final_state):
    return o + 1000, rhs, o2 + 1000, rhs2, r


@pytest.mark.parametrize("sent", [False, True])
def test_n_steps_end_with_the_relabelled_steps(make, tmp_path, sent):
    storage = make(her_function=as_rewards_of_one, n_step=3)
    episodes(storage, 5, 5, 3)
    if sent:
        # To a learner in another process, as a slice.
        rows = pickle.loads(pickle.dumps(storage.get_all_buffer_data()))
        storage = make(n_step=3, path=tmp_path / "learner")
        storage.insert_data_slice(rows)
    # The newest steps wait for what may follow them.
    storage.insert_transition(transition(500))
    expected = {}
    for first, length in ((0, 5), (5, 5), (10, 3)):
        for place in range(length):
            count = min(3, length - place)
            reward = round(sum(0.9**k for k in range(count)), 4)
            end = float(place + count == length)
            row = first + place
            expected[row] = (row + count, reward, 3, end)
            count = min(3, length - 1 - place)
            if count:
                reward = round(sum(0.9**k for k in range(count)), 4)
                # Nothing ended: the value is discounted by the steps that were summed.
                expected[row + 1000] = (row + 1000 + count, reward, count, 0.0)
    # 1,280 draws miss one of 23 with a probability below 1e-22.
    assert drawn_of(storage) == expected


def test_arrays_and_dicts_of_arrays_are_accepted_and_returned(make):
    calls = []

    def function(o, rhs, o2, rhs2, r, initial_state, final_state):
        calls.append((o, rhs, o2, rhs2, r, initial_state, final_state))
        goal = final_state["goal"]
        o["goal"][:] = o2["goal"][:] = goal
        # Writing into the states changes no later call.
        initial_state["image"][:] = 9
        return o, rhs, o2, rhs2, torch.as_tensor(r, dtype=torch.float64) + 1

    def step(number, done):
        image = torch.full((2, 4, 4), number, dtype=torch.uint8)
        seen = {"image": image, "goal": torch.full((2, 1), float(number))}
        return transition(number, 2, done, 0.0) | {"Observation": seen, "NextObservation": seen}

    storage = make(her_function=function)
    for number in range(3):
        storage.insert_transition(step(number, number == 2))
    for given in calls:
        assert {given[0]["image"].dtype, given[4].dtype} == {np.dtype("float32")}
        assert given[0]["image"].shape == (2, 4, 4)
        assert given[1]["rhs"].shape == given[3]["rhs"].shape == (2, 3)
        assert given[4].shape == (2, 1)
    assert [float(given[5]["goal"][0, 0]) for given in calls] == [0, 0]
    rows = storage.get_data_slice(0, 5)
    assert rows["Observation"]["goal"][:, 0, 0].tolist() == [0, 1, 2, 2, 2]
    assert rows["Observation"]["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert rows["Reward"][:, 0, 0].tolist() == [0, 0, 0, 1, 1]
    assert storage._ring.schema["Observation/image"].dtype == "uint8"


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda *args: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda o, *args: (o, o), "ValueError"),
        (lambda o, rhs, o2, rhs2, r, a, b: (o[:, 0], rhs, o2, rhs2, r), "Observation"),
        (lambda o, rhs, o2, rhs2, r, a, b: (o, rhs, o2, rhs2, r[0]), "Reward"),
    ],
)
def test_a_function_that_fails_is_named_and_loses_no_step(make, function, match):
    storage = make(her_function=function)
    with pytest.raises(SchemaError, match=rf"^her_function.* {match}"):
        episodes(storage, 4)
    assert numbers(storage.data) == [0, 1, 2, 3]
    storage.her_function = as_rewards_of_one
    episodes(storage, 3, first=4)
    assert numbers(storage.data) == [0, 1, 2, 3, 4, 5, 6, 1004, 1005]


def test_a_function_that_is_none_is_refused_where_it_is_given(make):
    with pytest.raises(SchemaError, match=r"her_function must be a function of \(o, rhs,"):
        HERBuffer.create_factory(50, 3)
    storage = make()
    with pytest.raises(SchemaError, match=r"^her_function must be .* got None"):
        storage.update_storage_parameter("her_function", None)


def test_a_transition_without_an_end_is_refused(make):
    storage, step = make(), transition(0)
    del step["NextDone"]
    with pytest.raises(SchemaError, match="transition: NextDone is missing, which says"):
        storage.insert_transition(step)
    assert storage.size == 0


def test_episodes_that_end_apart_are_not_relabelled_and_warn_once(make):
    storage = make()
    uneven = transition(0, 2)
    uneven["NextDone"] = torch.tensor([[1.0], [0.0]])
    with pytest.warns(RuntimeWarning, match="must end at the same step") as told:
        storage.insert_transition(uneven)
    assert (len(told), told[0].filename) == (1, __file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage.insert_transition(uneven)
        episodes(storage, 2, envs=2, first=1)
        # From where all ended on, they begin together.
        episodes(storage, 3, envs=2, first=3)
    assert numbers(storage.data) == [0, 0, 1, 2, 3, 4, 5, 1003, 1004]


def test_a_collector_relabels_episodes_that_it_sent_in_blocks(make):
    storage = make()
    sent = []
    for number in range(6):
        step = transition(number, done=number == 5, reward=1.0)
        storage.insert_transition(step)
        if number % 2:
            sent += numbers(storage.get_all_buffer_data())
            storage.reset()
    assert sent == [0, 1, 2, 3, 4, 5, 1000, 1001, 1002, 1003, 1004]


def test_an_episode_longer_than_the_ring_is_relabelled_from_its_start(make):
    storage = make(size=8)
    episodes(storage, 12)
    assert numbers(storage.data) == list(range(1003, 1011))
    told = storage.get_data_slice(0, 8)["Reward"]
    assert (told == 11).all()


def test_an_episode_goes_on_through_a_pickle_and_not_through_a_resume(make, tmp_path):
    storage = make()
    episodes(storage, 4)
    for number in (4, 5):
        storage.insert_transition(transition(number))
    kept = pickle.dumps(storage)
    storage.close()
    storage = make(resume=True)
    # Another process's environments begin anew.
    storage.insert_transition(transition(50, done=True))
    assert numbers(storage.data) == [0, 1, 2, 3, 1000, 1001, 1002, 4, 5, 50]
    storage.close()
    again = pickle.loads(kept)
    again.insert_transition(transition(6, done=True))
    assert numbers(again.data)[-3:] == [6, 1004, 1005]
    again.close()


KILLED = """
import os, signal, sys
import torch
from mmreplay.adapters.pytorchrl import HERBuffer
from tests.adapters.pytorchrl_steps import ALGORITHM, actor
from tests.adapters.test_pytorchrl_hindsight import as_rewards_of_one, episodes
storage = HERBuffer(
    100, "cpu", actor(), ALGORITHM, None, as_rewards_of_one, alpha=1.0,
    default_error=0.5, cmin=4, path=sys.argv[1],
)
episodes(storage, 4, 3)
for batch in storage.generate_batches(20, 32):
    errors = torch.where(batch["Observation"] == 1001, 5.5, 0.5)
    storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_relabelled_steps_and_errors_survive_a_kill(make, tmp_path):
    run = [sys.executable, "-c", KILLED, str(tmp_path / "ring")]
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    storage = make(alpha=1.0, default_error=0.5, cmin=4, resume=True)
    expected = [0, 1, 2, 3, 1000, 1001, 1002, 4, 5, 6, 1004, 1005]
    assert numbers(storage.data) == expected
    (batch,) = storage.generate_batches(1, 4000)
    portion = (batch["Observation"] == 1001).float().mean()
    # 5.5 of 11; five standard deviations of 4,000 draws are 0.04.
    assert abs(portion - 0.5) < 0.04


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_sequences_go_on_through_relabelled_steps(make, alpha):
    model = actor(recurrent=True)
    model.sequence_overlap = 0.0

    def function(o, rhs, o2, rhs2, r, initial_state, final_state):
        return o + 1000, {"rhs": rhs["rhs"] + 5}, o2 + 1000, rhs2, r

    storage = make(her_function=function, with_=model, alpha=alpha)
    episodes(storage, 6)
    assert numbers(storage.data) == [0, 1, 2, 3, 4, 5, *range(1000, 1005)]
    rows = storage.get_data_slice(0, 11)
    assert rows["RecurrentHiddenStates"]["rhs"][:, 0, 0].tolist() == [1] * 6 + [6] * 5
    # The state of before is not carried over.
    assert rows["Done"][:, 0, 0].tolist() == [0] * 6 + [1] + [0] * 4
    firsts = {float(batch["Observation"][0]) for batch in storage.generate_batches(60, 1)}
    assert firsts == {0.0, 5.0}
    with pytest.raises(SchemaError, match=r"in a HERBuffer with a recurrent actor, got 3\."):
        make(with_=model, n_step=3)


def test_relabelled_steps_enter_at_the_highest_error(make):
    storage = make(alpha=1.0, default_error=2.0, cmin=1)
    episodes(storage, 4)
    for batch in storage.generate_batches(10, 32):
        errors = torch.full((32, 1), 6.0)
        storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    storage.update_storage_parameter("alpha", 0.5)
    episodes(storage, 3, first=4)
    # Of 12 values none is missed: (11 / 12) ** 512 is below 1e-19.
    (batch,) = storage.generate_batches(1, 512)
    assert torch.allclose(batch["per_weights"], torch.ones(512, 1))
    assert len(batch["Observation"].unique()) == 12
