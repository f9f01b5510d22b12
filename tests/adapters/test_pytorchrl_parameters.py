"""Parameters of pytorchrl's storages: judged where they are given, and changed later.

A change holds for rows to come; rows whose n steps were there keep what they had.
"""

import os
import pickle
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters.pytorchrl import MBReplayBuffer, NStepReplayBuffer, PERBuffer, ReplayBuffer
from mmreplay.errors import SchemaError
from tests.adapters.pytorchrl_steps import (
    ALGORITHM,
    actor,
    numbers,
    recurrent_actor,
    slice_of,
    transition,
)

KINDS = [(NStepReplayBuffer, {}), (PERBuffer, {"alpha": 0.6})]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(kind=NStepReplayBuffer, size=60, n_step=3, **named):
        model = named.pop("with_", None) or actor()
        algorithm = named.pop("algorithm", ALGORITHM)
        named.setdefault("path", tmp_path / "ring")
        if kind is ReplayBuffer or kind is MBReplayBuffer:
            build = kind.create_factory(size, **named)
        else:
            build = kind.create_factory(size, n_step, **named)
        made.append(build("cpu", model, algorithm, None))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def insert(storage, values, **kinds):
    for value in values:
        storage.insert_transition(transition(value, reward=1.0, **kinds))


def drawn_of(storage, batches=60, size=16):
    """Reward, steps summed and next observation, by the observation."""
    found = {}
    for batch in storage.generate_batches(batches, size):
        rows = len(batch["Reward"])
        steps = torch.as_tensor(batch["n_step"]).expand(rows, 1)
        for row in range(rows):
            told = batch["Reward"][row], steps[row], batch["NextObservation"][row]
            found[float(batch["Observation"][row])] = tuple(round(float(each), 4) for each in told)
    return found


def expected_of(first, gammas, n_step=3):
    """Of rows from an observation on, each with a gamma and a reward of 1."""
    return {
        float(first + i): (
            round(sum(gamma**k for k in range(n_step)), 4),
            n_step,
            first + i + n_step,
        )
        for i, gamma in enumerate(gammas)
    }


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_new_gamma_sums_new_rows_and_old_rows_keep_theirs(make, kind, options):
    storage = make(kind, **options)
    insert(storage, range(10))
    storage.update_storage_parameter("gamma", 0.5)
    assert storage.gamma == 0.5
    insert(storage, range(10, 20))
    # Rows 8 and 9 were not complete yet; the last two are not complete now.
    expected = expected_of(0, [0.9] * 8 + [0.5] * 10)
    assert expected[17.0] == (1.75, 3, 20)
    # 960 draws miss one of 18 with a probability below 1e-21.
    assert drawn_of(storage) == expected


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_gammas_of_rows_survive_a_resume(make, kind, options):
    storage = make(kind, **options)
    insert(storage, range(10))
    storage.update_storage_parameter("gamma", 0.5)
    insert(storage, range(10, 20))
    storage.close()
    # ALGORITHM still has 0.9, which the rows to come take.
    storage = make(kind, resume=True, **options)
    assert storage.gamma == 0.9
    insert(storage, range(50, 60))
    expected = expected_of(0, [0.9] * 8 + [0.5] * 10) | expected_of(50, [0.9] * 8)
    assert drawn_of(storage, batches=120) == expected


def test_gammas_of_rows_go_with_a_pickle(make):
    storage = make()
    insert(storage, range(10))
    storage.gamma = 0.5
    insert(storage, range(10, 20))
    # Loaded beside the storage, it shares the ring.
    shared = pickle.loads(pickle.dumps(storage))
    expected = expected_of(0, [0.9] * 8 + [0.5] * 10)
    assert drawn_of(shared) == expected
    kept = pickle.dumps(storage)
    storage.close()
    again = pickle.loads(kept)
    assert again.gamma == 0.5
    insert(again, range(50, 60))
    expected |= expected_of(50, [0.5] * 8)
    assert drawn_of(again, batches=120) == expected
    again.close()


WRITER = """
import os, signal, sys
from mmreplay.adapters.pytorchrl import NStepReplayBuffer
from tests.adapters.pytorchrl_steps import ALGORITHM, actor, transition
storage = NStepReplayBuffer(60, "cpu", actor(), ALGORITHM, None, 3, path=sys.argv[1])
for value in range(20):
    if value == 10:
        storage.update_storage_parameter("gamma", 0.5)
    storage.insert_transition(transition(value, reward=1.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_gammas_of_rows_survive_a_kill(make, tmp_path):
    run = [sys.executable, "-c", WRITER, str(tmp_path / "ring")]
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    expected = expected_of(0, [0.9] * 8 + [0.5] * 10)
    assert drawn_of(make(resume=True), batches=60) == expected


def test_gammas_stay_with_rows_that_a_reset_copies(make):
    storage = make()
    insert(storage, range(6))
    storage.gamma = 0.5
    insert(storage, range(6, 12))
    storage.close()
    storage = make(resume=True, algorithm=SimpleNamespace(gamma=0.25, update_every=5))
    insert(storage, range(90, 95))
    storage.reset()
    insert(storage, range(50, 60))
    # Rows of before were written again, and end at a cut.
    expected = expected_of(0, [0.9] * 4 + [0.5] * 6) | expected_of(50, [0.25] * 8)
    expected |= {10.0: (1.5, 2, 12), 11.0: (1.0, 1, 12)}
    assert numbers(storage.data) == [*range(12), *range(50, 60)]
    assert drawn_of(storage, batches=120) == expected


def test_rows_of_a_slice_are_complete_when_gamma_changes(make):
    storage = make()
    storage.insert_data_slice(slice_of(range(5)) | {"Reward": np.ones((5, 1, 1))})
    storage.gamma = 0.5
    storage.insert_data_slice(slice_of(range(50, 55)) | {"Reward": np.ones((5, 1, 1))})
    insert(storage, range(90, 95))
    expected = {
        base + i: (round(sum(gamma**k for k in range(n)), 4), n, base + i + n)
        for base, gamma in ((0, 0.9), (50, 0.5))
        for i, n in enumerate((3, 3, 3, 2, 1))
    } | expected_of(90, [0.5] * 3)
    assert drawn_of(storage, batches=120) == expected


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_truncated_rows_give_their_step_counts_when_gamma_cannot(make, gamma):
    storage = make(algorithm=SimpleNamespace(gamma=gamma))
    storage.insert_data_slice(slice_of(range(5)) | {"Reward": np.ones((5, 1, 1))})
    storage.gamma = 0.9
    insert(storage, range(50, 55))
    # Also in batches without a row of the new gamma: a seventh of these.
    found = drawn_of(storage, batches=400, size=4)
    assert [found[i][1] for i in range(5)] == [3, 3, 3, 2, 1]
    assert found[0][0] == 1 + gamma + gamma**2
    assert found[50] == (2.71, 3, 53)


@pytest.mark.parametrize("seed", range(3))
def test_random_gammas_ends_and_wraps_are_those_of_a_list(make, seed):
    rng = np.random.default_rng(seed)
    storage, rows, complete, gamma = make(size=25), [], {}, 0.9
    for value in range(60):
        if rng.random() < 0.15:
            gamma = float(rng.choice([0.0, 0.3, 0.7, 0.95, 1.0]))
            storage.update_storage_parameter("gamma", gamma)
        done = bool(rng.random() < 0.2)
        storage.insert_transition(transition(value, done=done, reward=1.0))
        rows.append(done)
        if value >= 2:
            # As pytorchrl does: summed once the third step comes.
            ends = rows[value - 2 : value + 1]
            count = ends.index(True) + 1 if True in ends else 3
            complete[value - 2] = round(sum(gamma**k for k in range(count)), 4)
        if value % 10 == 9:
            for start, (reward, _, _) in drawn_of(storage, batches=20).items():
                # A row whose end is there is drawn before its third step comes.
                if start in complete:
                    assert reward == pytest.approx(complete[start], abs=1e-4)


@pytest.mark.parametrize("overlap", [0.0, 0.4])
@pytest.mark.parametrize("kind", [NStepReplayBuffer, PERBuffer])
def test_sequences_keep_the_gammas_of_their_rows(make, kind, overlap):
    storage = make(kind, with_=recurrent_actor(overlap))
    insert(storage, range(20))
    storage.gamma = 0.5
    insert(storage, range(20, 40))
    storage.close()
    storage = make(kind, with_=recurrent_actor(overlap), resume=True)
    found = drawn_of(storage, batches=100)
    assert len(found) > 30
    for start, (reward, n_step, following) in found.items():
        if start < 18 or start >= 20:
            gamma = 0.9 if start < 18 else 0.5
            count = int(n_step)
            assert reward == pytest.approx(sum(gamma**k for k in range(count)), abs=1e-4)
            assert following == start + count


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("n_step", [1, 5])
def test_a_new_n_step_is_refused_once_there_are_rows(make, kind, options, n_step):
    storage = make(kind, **options)
    insert(storage, range(10))
    for change in (
        lambda: storage.update_storage_parameter("n_step", n_step),
        lambda: setattr(storage, "n_step", n_step),
    ):
        with pytest.raises(SchemaError, match=rf"^n_step must .* got {n_step}"):
            change()
    storage.update_storage_parameter("n_step", 3)
    assert storage.n_step == 3
    assert drawn_of(storage) == expected_of(0, [0.9] * 8)
    storage.close()
    # The way out: it then holds for all rows.
    storage = make(kind, n_step=n_step, resume=True, **options)
    found = drawn_of(storage)
    assert found[0.0] == expected_of(0, [0.9], n_step)[0.0]


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_new_n_step_holds_before_there_are_rows(make, recurrent):
    storage = make(with_=recurrent_actor() if recurrent else None)
    storage.update_storage_parameter("n_step", 2)
    storage.update_storage_parameter("gamma", 0.5)
    with pytest.raises(SchemaError, match="n_step must be an integer of at least 1, got"):
        storage.update_storage_parameter("n_step", 0)
    insert(storage, range(12))
    found = drawn_of(storage)
    assert set(found.values()) <= {(1.5, 2, i + 2) for i in range(12)}
    assert len(found) > 5


@pytest.mark.parametrize("name", ["sequence_length", "overlap_length", "non_overlap_length"])
@pytest.mark.parametrize("kind", [ReplayBuffer, NStepReplayBuffer, PERBuffer])
def test_the_layout_of_sequences_is_refused_by_name(make, kind, name):
    storage = make(kind, with_=recurrent_actor())
    insert(storage, range(12))
    with pytest.raises(
        SchemaError, match=rf"^{name} cannot change, got the new value 4\..* update_"
    ):
        storage.update_storage_parameter(name, 4)
    assert len(next(storage.generate_batches(1, 1))["Observation"]) == 5


@pytest.mark.parametrize("name", ["size", "step", "data", "reset", "_ring", "home"])
def test_what_follows_from_the_rows_is_refused_by_name(make, name):
    storage = make()
    insert(storage, range(5))
    with pytest.raises(SchemaError, match=rf"^{name} cannot change, got the new value 4"):
        storage.update_storage_parameter(name, 4)
    assert (storage.size, storage.step) == (5, 5)


def test_parameters_of_other_storages_are_ignored_as_in_pytorchrl(make):
    storage = make(ReplayBuffer)
    for name in ("n_step", "gamma", "beta", "sequence_length"):
        storage.update_storage_parameter(name, 7)
        assert not hasattr(storage, name)


WRONG = [
    ("beta", 1.5, r"\[0, 1\]"),
    ("beta", -0.1, r"\[0, 1\]"),
    ("alpha", -0.5, r"\[0, 4\]"),
    ("alpha", np.nan, r"\[0, 4\]"),
    ("epsilon", -1e-3, r"\[0, 3"),
    ("default_error", 0, r"\[1e-30, 3"),
    ("default_error", np.inf, r"\[1e-30, 3"),
    ("n_step", 0, "at least 1"),
]


@pytest.mark.parametrize(("name", "value", "match"), WRONG)
def test_parameters_are_judged_where_they_are_given(make, tmp_path, name, value, match):
    wrong = rf"^{name} must be .*{match}.*, got {value}"
    with pytest.raises(SchemaError, match=wrong):
        PERBuffer.create_factory(60, **{name: value})
    with pytest.raises(SchemaError, match=wrong):
        PERBuffer(60, "cpu", actor(), ALGORITHM, None, path=tmp_path / "new", **{name: value})
    assert not (tmp_path / "new").exists()
    storage = make(PERBuffer, alpha=0.6, beta=0.4)
    insert(storage, range(5))
    before = {key: getattr(storage, key) for key, _, _ in WRONG}
    with pytest.raises(SchemaError, match=wrong):
        storage.update_storage_parameter(name, value)
    with pytest.raises(SchemaError, match=rf"got {value}"):
        setattr(storage, name, value)
    assert {key: getattr(storage, key) for key, _, _ in WRONG} == before
    next(storage.generate_batches(1, 8))


def test_an_unknown_option_is_refused_by_the_factory():
    with pytest.raises(TypeError, match="alhpa"):
        PERBuffer.create_factory(60, alhpa=0.6)


@pytest.mark.parametrize("gamma", [-0.1, 1.5, np.nan, None])
def test_a_gamma_that_is_none_is_refused(make, gamma):
    with pytest.raises(SchemaError, match=rf"^gamma must be .*, got {gamma}"):
        make(algorithm=SimpleNamespace(gamma=gamma))
    storage = make()
    insert(storage, range(5))
    with pytest.raises(SchemaError, match=rf"^gamma must be .*, got {gamma}"):
        storage.update_storage_parameter("gamma", gamma)
    assert storage.gamma == 0.9


@pytest.mark.parametrize("name", ["error", "default_error"])
def test_a_new_default_error_holds_for_rows_to_come(make, name):
    storage = make(PERBuffer, n_step=1, alpha=1.0, default_error=1.0)
    insert(storage, range(10))
    storage.update_storage_parameter(name, 9.0)
    assert storage.error == storage.default_error == 9.0
    insert(storage, range(10, 20))
    drawn = storage._ring.sample(2000)
    shares = dict(zip(drawn["Observation"][:, 0].tolist(), drawn.probabilities, strict=True))
    expected = {float(i): 0.01 if i < 10 else 0.09 for i in range(20)}
    assert shares == pytest.approx(expected)


def test_storages_that_share_a_ring_share_the_gammas_of_its_rows(make):
    storage = make()
    insert(storage, range(10))
    shared = pickle.loads(pickle.dumps(storage))
    storage.gamma = 0.5
    insert(shared, range(10, 20))
    expected = expected_of(0, [0.9] * 8 + [0.5] * 10)
    assert shared.gamma == 0.5
    assert drawn_of(shared) == expected == drawn_of(storage)
    shared.gamma = 0.7
    insert(storage, range(20, 30))
    expected = expected_of(0, [0.9] * 8 + [0.5] * 10 + [0.7] * 10)
    assert drawn_of(storage, batches=120) == expected
