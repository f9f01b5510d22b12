"""The same calls to pytorchrl's own storages and to ours; its own learner trains."""

import inspect
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmreplay.adapters import pytorchrl as ours
from tests.adapters.pytorchrl_steps import Scaler, transition

# gym, which it needs, tells everybody to leave it.
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
prl = pytest.importorskip("pytorchrl", reason="pytorchrl is not installed")
theirs = pytest.importorskip("pytorchrl.agent.storages")
gym = pytest.importorskip("gym")


def actor():
    model = SimpleNamespace(standard_scaler=Scaler(), reward_function=None)
    space = gym.spaces.Box(-1, 1, (1,))
    return SimpleNamespace(is_recurrent=False, action_space=space, dynamics_model=model)


def algorithm():
    return SimpleNamespace(gamma=0.9, update_every=5, _update_every=5)


def both(name, tmp_path, size, *options):
    make = getattr(ours, name).create_factory(size, *options, path=tmp_path / "ring")
    mine = make("cpu", actor(), algorithm(), None)
    make = getattr(theirs, name).create_factory(size, *options)
    return mine, make("cpu", actor(), algorithm(), None)


def assert_same(mine, other):
    assert set(mine) >= {key for key, value in other.items() if value is not None}
    for key, value in other.items():
        if isinstance(value, dict):
            # Of hidden states that are not stored, both give a row of zeros at most.
            if mine[key]["rhs"].any() or value["rhs"].any():
                assert_same(mine[key], value)
        elif value is not None:
            assert mine[key].dtype == value.dtype == np.float32
            assert np.array_equal(mine[key], value)


def assert_same_rows(mine, other, number):
    assert (mine.size, mine.step) == (other.size, other.step)
    assert mine.max_size == other.max_size
    if number:
        assert_same(mine.get_all_buffer_data(), other.get_all_buffer_data())
        for named in ("get_all_buffer_data", "data"):
            keys = [getattr(storage, named) for storage in (mine, other)]
            keys = [set(found() if callable(found) else found) for found in keys]
            assert keys[0] == keys[1]
        # Beyond its rows pytorchrl gives zeros that nobody wrote.
        for first, stop in ((0, min(5, number)), (2, number), (4, 3)):
            theirs_ = other.get_data_slice(first, stop)
            assert_same(mine.get_data_slice(first, stop), theirs_)


def copied(nest):
    if isinstance(nest, dict):
        return {key: copied(part) for key, part in nest.items()}
    return None if nest is None else np.array(nest)


@pytest.mark.parametrize("name", ["MBReplayBuffer", "ReplayBuffer"])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_leave_the_same_rows(tmp_path, name, seed):
    rng = np.random.default_rng(seed)
    size, envs = 60, 1 + seed % 2
    mine, other = both(name, tmp_path, size)
    number = 0
    # Until it wraps: from then on, those of pytorchrl are not in order any more.
    while number < size - 8:
        what = rng.choice(["one", "slice", "cycle", "reset"], p=[0.5, 0.3, 0.15, 0.05])
        if what == "one":
            for storage in (mine, other):
                storage.insert_transition(transition(number, envs))
            number += 1
        elif what == "slice" and number:
            rows = copied(other.get_data_slice(0, int(rng.integers(1, 8))))
            number += len(rows["Done"])
            for storage in (mine, other):
                storage.insert_data_slice(rows)
        elif what == "cycle" and number:
            for storage in (mine, other):
                data = storage.get_all_buffer_data()
                storage.reset()
                storage.insert_data_slice(data)
        elif what == "reset":
            number = 0
            mine.reset()
            other.reset()
        assert_same_rows(mine, other, number)
    mine.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [("ReplayBuffer", ()), ("NStepReplayBuffer", (3,)), ("PERBuffer", (1, 0.1, 0.6))],
)
def test_batches_have_the_same_keys_shapes_and_dtypes(tmp_path, name, options):
    mine, other = both(name, tmp_path, 30, *options)
    for number in range(20):
        for storage in (mine, other):
            storage.insert_transition(transition(number, envs=2))
    for storage in (mine, other):
        storage.before_gradients()
    batches = [next(s.generate_batches(1, 12)) for s in (mine, other)]
    # pytorchrl's prioritized storage sends its priorities along.
    assert set(batches[0]) == set(batches[1]) - {"priority"}
    for key in set(batches[0]) - {"idxs"}:
        assert_alike(batches[0][key], batches[1][key])
    mine.close()


def assert_alike(mine, other):
    if isinstance(other, dict):
        assert mine.keys() == other.keys()
        for key, part in other.items():
            assert_alike(mine[key], part)
    elif isinstance(other, torch.Tensor):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
    else:
        assert mine == other


def test_n_step_rewards_are_those_of_pytorchrl_where_no_end_is(tmp_path):
    mine, other = both("NStepReplayBuffer", tmp_path, 30, 3)
    for number in range(20):
        for storage in (mine, other):
            storage.insert_transition(transition(number))
    rows = other.get_data_slice(0, other.size)
    expected = dict(zip(rows["Observation"].ravel(), rows["Reward"].ravel(), strict=True))
    following = dict(zip(rows["Observation"].ravel(), rows["NextObservation"].ravel(), strict=True))
    (batch,) = mine.generate_batches(1, 300)
    for i in range(300):
        start = float(batch["Observation"][i])
        # Both sum float32 numbers of at most 60.
        assert abs(float(batch["Reward"][i]) - expected[start]) < 1e-5
        assert float(batch["NextObservation"][i]) == following[start]
    mine.close()


@pytest.mark.parametrize(
    ("name", "options"), [("NStepReplayBuffer", (3,)), ("PERBuffer", (3, 0.1, 0.6))]
)
def test_a_new_gamma_holds_for_the_same_rows_as_in_pytorchrl(tmp_path, name, options):
    mine, other = both(name, tmp_path, 60, *options)
    for number in range(40):
        if number in (15, 30):
            for storage in (mine, other):
                storage.update_storage_parameter("gamma", 0.5 if number == 15 else 0.99)
        for storage in (mine, other):
            storage.insert_transition(transition(number, envs=2))
    rows = other.get_data_slice(0, other.size)
    keys = ("Observation", "Reward", "NextObservation")
    columns = [rows[key].ravel() for key in keys]
    expected = {start: told for start, *told in zip(*columns, strict=True)}
    assert len(expected) == 76
    seen = set()
    for batch in mine.generate_batches(60, 16):
        assert batch["n_step"] == other.n_step == 3
        for row in zip(*(batch[key].ravel().tolist() for key in keys), strict=True):
            start = np.float32(row[0])
            # Both sum float32 numbers of at most 120.
            np.testing.assert_allclose(row[1:], expected[start], atol=1e-4)
            seen.add(start)
    # 960 draws miss one of 76 with a probability below 1e-3.
    assert len(seen) > 70
    mine.close()


@pytest.mark.parametrize("count", [13, 20])
def test_model_based_batches_hold_the_same_examples(tmp_path, count):
    mine, other = both("MBReplayBuffer", tmp_path, 30)
    for number in range(count):
        for storage in (mine, other):
            storage.insert_transition(transition(number, reward=float(number % 4)))
    sets = []
    for storage in (mine, other):
        batches = list(storage.generate_batches(1, 5))
        both_ = [
            torch.cat([batch[key] for batch in batches]) for key in ("train_input", "train_label")
        ]
        rows = torch.cat(both_, dim=1)
        sets.append(rows[rows[:, 0].argsort()])
    # Means of the same numbers, in another order.
    assert torch.allclose(*sets, atol=1e-5)
    mine.close()


@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_sequences_overlap_and_begin_anew_as_in_pytorchrl(tmp_path, overlap):
    storages = []
    for module, options in ((ours, {"path": tmp_path / "ring"}), (theirs, {})):
        remembering = actor()
        remembering.is_recurrent, remembering.sequence_overlap = True, overlap
        make = module.ReplayBuffer.create_factory(40, **options)
        storages.append(make("cpu", remembering, algorithm(), None))
    mine, other = storages
    assert mine.max_size == other.max_size
    number = 0
    for _ in range(4):
        for _ in range(5 if number == 0 else other.non_overlap_length):
            for storage in storages:
                storage.insert_transition(transition(number, envs=2))
            number += 1
            assert (mine.size, mine.step) == (other.size, other.step)
            whole = other.get_data_slice(0, other.size)
            assert_same(mine.get_data_slice(0, mine.size), whole)
        sent = [storage.get_all_buffer_data(data_to_cpu=True) for storage in storages]
        assert_same(*sent)
        batches = [next(storage.generate_batches(1, 12)) for storage in storages]
        assert_alike(*batches)
        for storage in storages:
            storage.reset()
    mine.close()


@pytest.mark.parametrize("name", ["NStepReplayBuffer", "PERBuffer"])
@pytest.mark.parametrize("overlap", [0.2, 0.4])
def test_n_step_sequences_are_those_of_pytorchrl_where_no_end_is(tmp_path, name, overlap):
    storages = []
    for module, options in ((ours, {"path": tmp_path / "ring"}), (theirs, {})):
        remembering = actor()
        remembering.is_recurrent, remembering.sequence_overlap = True, overlap
        make = getattr(module, name).create_factory(40, 3, **options)
        storages.append(make("cpu", remembering, algorithm(), None))
    mine, other = storages
    # Theirs lengthens the sequences by what n steps take; see the page.
    length = mine.sequence_length = 5
    other.sequence_length, other.overlap_length = length, mine.overlap_length
    for number in range(29):
        for storage in storages:
            storage.insert_transition(transition(number, envs=2))
    rows = other.get_data_slice(0, other.size // length * length)
    keys = ("Observation", "Action", "Reward", "NextObservation", "NextDone")
    expected = {}
    for env in range(2):
        for begin in range(0, len(rows["Done"]), length):
            found = {key: rows[key][begin : begin + length, env] for key in keys}
            expected[float(found["Observation"][0, 0])] = found
    seen = set()
    for batch in mine.generate_batches(60, 12):
        assert set(batch) - {"per_weights", "idxs"} >= {*keys, "n_step"}
        for place in range(0, 15, length):
            start = float(batch["Observation"][place])
            for key in keys:
                part = batch[key][place : place + length].numpy()
                # Both sum float32 numbers of at most 90.
                np.testing.assert_allclose(part, expected[start][key], atol=1e-4)
            seen.add(start)
    assert seen == set(expected)
    mine.close()


@pytest.fixture
def recent(tmp_path, monkeypatch):
    """Both of EREBuffer; theirs asks for a name that NumPy 2 has no more."""
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)
    made = []

    def make(size, **options):
        mine, other = [
            module.EREBuffer.create_factory(size, **options, **places)(
                "cpu", actor(), algorithm(), None
            )
            for module, places in ((ours, {"path": tmp_path / "ring"}), (theirs, {}))
        ]
        made.append(mine)
        return mine, other

    yield make
    for storage in made:
        storage.close()


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("cmin", [30, 5000])
def test_recent_draws_are_from_the_windows_of_pytorchrl(recent, alpha, envs, cmin):
    storages = recent(
        100, n_step=1, epsilon=0.1, alpha=alpha, beta=0.5, default_error=1.0, eta=0.999, cmin=cmin
    )
    # With hidden states, theirs fails once the window leaves rows out.
    hidden = {"RecurrentHiddenStates": {}, "NextRecurrentHiddenStates": {}}
    for number in range(80):
        for storage in storages:
            storage.insert_transition(transition(number, envs) | hidden)
    counts = [[{} for _ in range(4)] for _ in storages]
    for turn in range(40):
        for storage in storages:
            storage.before_gradients()
        for k, batches in enumerate(
            zip(*(s.generate_batches(4, 200) for s in storages), strict=True)
        ):
            mine, other = batches
            assert set(mine) == set(other) - {"priority"}
            assert mine["ck"] == other["ck"]
            for key in set(mine) - {"idxs", "ck"}:
                assert_alike(mine[key], other[key])
            if "per_weights" in other and turn >= 20:
                # Once all errors are known, a step's weight is the same in both.
                weights = [
                    dict(
                        zip(
                            b["Observation"].ravel().tolist(),
                            b["per_weights"].ravel().tolist(),
                            strict=True,
                        )
                    )
                    for b in batches
                ]
                same = weights[0].keys() & weights[1].keys()
                assert len(same) > 5
                for seen in same:
                    assert weights[0][seen] == pytest.approx(weights[1][seen], 1e-3)
            for number, (storage, batch) in enumerate(zip(storages, batches, strict=True)):
                if turn >= 20:
                    for seen in batch["Observation"].ravel().tolist():
                        found = counts[number][k]
                        found[seen] = found.get(seen, 0) + 1
                errors = 0.2 + batch["Observation"] % 5
                storage.after_gradients(batch, {"Algorithm": {"errors": errors}})
    for mine, other in zip(*counts, strict=True):
        # All steps of the window are drawn by both, 4,000 draws of each.
        assert set(mine) == set(other)
        both_ = np.array([[c[seen] for seen in sorted(mine)] for c in (mine, other)])
        # Two samples of one law: a mean of the number of steps, a variance of twice
        # that; six standard deviations are exceeded once in a million.
        chi = ((both_[0] - both_[1]) ** 2 / both_.sum(0)).sum()
        assert chi < len(mine) + 6 * np.sqrt(2 * len(mine))


@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_recent_sequences_are_from_the_windows_of_pytorchrl(tmp_path, monkeypatch, overlap):
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)
    storages = []
    for module, places in ((ours, {"path": tmp_path / "ring"}), (theirs, {})):
        remembering = actor()
        remembering.is_recurrent, remembering.sequence_overlap = True, overlap
        make = module.EREBuffer.create_factory(80, eta=0.999, cmin=30, **places)
        storages.append(make("cpu", remembering, algorithm(), None))
    mine = storages[0]
    for number in range(5 + 9 * mine.non_overlap_length):
        for storage in storages:
            storage.insert_transition(transition(number, envs=2))
    firsts = [[set() for _ in range(4)] for _ in storages]
    for _ in range(60):
        for storage, found in zip(storages, firsts, strict=True):
            storage.before_gradients()
            cks = []
            for k, batch in enumerate(storage.generate_batches(4, 12)):
                assert (batch["per_weights"], batch["n_step"]) == (1.0, 1)
                found[k] |= set(batch["Observation"][::5, 0].tolist())
                cks.append(batch["ck"])
            assert cks == [10, 7, 6, 4]
    # 180 draws miss one of at most 20 with a probability below 1e-2, together.
    for seen in zip(*firsts, strict=True):
        assert len(seen[0] ^ seen[1]) <= 1
    mine.close()


def test_eta_is_adapted_as_by_pytorchrl(recent):
    mine, other = recent(50, eta=0.995)
    returns = np.random.default_rng(4).normal(size=100).cumsum()
    for number, each in enumerate(returns):
        infos = []
        for storage in (mine, other):
            info = {"Algorithm": {}, "Episodes": {"TrainReward": float(each)}}
            if number % 7 == 6:
                del info["Episodes"]
            infos.append(storage.after_gradients({}, info))
        assert infos[0] == infos[1]
        assert mine.eta == other.eta
    assert len({mine.eta, 1.0, 0.995}) == 3


def repaired():
    """pytorchrl's HERBuffer without what ends its call at each episode's end."""
    module = import_module("pytorchrl.agent.storages.off_policy.her_buffer")
    source = inspect.getsource(module)
    for wrong, right in (
        ("torch.as_tensor(k,", "torch.as_tensor(v,"),
        ("in k.items():", "in v.items():"),
        ("obs2, rhs2, done2)._asdict()", "obs2, rhs2, done2, {})._asdict()"),
        (
            "actor, algorithm, her_function, n_step,",
            "actor, algorithm, envs, her_function, n_step,",
        ),
    ):
        assert source.count(wrong) == 1, wrong
        source = source.replace(wrong, right)
    names = dict(vars(module))
    exec(compile(source, module.__file__, "exec"), names)
    return names["HERBuffer"]


def relabel(o, rhs, o2, rhs2, r, initial_state, final_state):
    assert set(rhs) == set(rhs2) == {"rhs"}
    return o + 1000, rhs, o2 + 1000, rhs2, r + 7 * initial_state + 11 * final_state


@pytest.mark.parametrize("envs", [1, 2])
def test_hindsight_rows_are_those_of_pytorchrl_without_its_faults(tmp_path, monkeypatch, envs):
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)
    places = {"path": tmp_path / "ring"}
    mine, other = [
        kind.create_factory(60, relabel, cmin=10, **named)("cpu", actor(), algorithm(), None)
        for kind, named in ((ours.HERBuffer, places), (repaired(), {}))
    ]
    number = 0
    for length in (4, 6, 2, 1, 5):
        for place in range(length):
            step = transition(number, envs, done=place == length - 1)
            # It takes Done for the end of this step, as its comments say.
            step["Done"] = step["NextDone"]
            for storage in (mine, other):
                storage.insert_transition(step)
            number += 1
    rows = [storage.get_all_buffer_data() for storage in (mine, other)]
    assert (mine.size, mine.step) == (other.size, other.step) == (31, 31)
    for key in ("Observation", "Action", "Reward", "NextObservation", "NextDone"):
        np.testing.assert_allclose(rows[0][key], rows[1][key], rtol=1e-6)
    for storage in (mine, other):
        storage.before_gradients()
    batches = [next(storage.generate_batches(1, 12)) for storage in (mine, other)]
    assert set(batches[0]) == set(batches[1]) - {"priority"}
    for key in set(batches[0]) - {"idxs", "ck"}:
        assert_alike(batches[0][key], batches[1][key])
    mine.close()


class Pendulum(gym.Env):
    """Gymnasium's, as pytorchrl expects environments to be."""

    def __init__(self):
        gymnasium = pytest.importorskip("gymnasium")
        self._env = gymnasium.make("Pendulum-v1", max_episode_steps=50)
        self.observation_space = gym.spaces.Box(-8, 8, (3,), np.float32)
        self.action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self):
        return self._env.reset(seed=0)[0]

    def step(self, action):
        obs, reward, terminated, truncated, info = self._env.step(np.reshape(action, 1))
        return obs, float(reward), terminated or truncated, info


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ReplayBuffer", ()),
        ("NStepReplayBuffer", (3,)),
        ("PERBuffer", (1, 0.01, 0.6)),
        ("EREBuffer", (3, 0.01, 0.6, 0.4, 1e6, 0.999, 100)),
        ("HERBuffer", (ours.unchanged, 1, 0.01, 0.6, 0.4, 1e6, 0.999, 100)),
    ],
)
def test_ddpg_trains_on_pendulum(tmp_path, name, options):
    pytest.importorskip("ray", reason="ray, which pytorchrl imports, is missing")
    from pytorchrl.agent.actors import OffPolicyActor
    from pytorchrl.agent.algorithms import DDPG
    from pytorchrl.agent.env import VecEnv
    from pytorchrl.learner import Learner
    from pytorchrl.scheme import Scheme

    envs, actions, observations = VecEnv.create_factory(Pendulum, vec_env_size=1)
    algo, algo_name = DDPG.create_factory(
        start_steps=60, update_every=20, num_updates=5, mini_batch_size=16, num_test_episodes=0
    )
    storage = getattr(ours, name).create_factory(200, *options, path=tmp_path / "ring")
    made = []

    def keeping(*args):
        made.append(storage(*args))
        return made[-1]

    scheme = Scheme(
        algo_factory=algo,
        actor_factory=OffPolicyActor.create_factory(
            observations, actions, algo_name, noise="Gauss"
        ),
        storage_factory=keeping,
        train_envs_factory=envs,
    )
    learner = Learner(scheme, target_steps=400)
    while not learner.done():
        learner.step()
    (ring,) = made
    assert ring.size == 200
    rows = ring.get_data_slice(0, 200)
    if name == "HERBuffer":
        # 49 of 50 steps are there twice; the ring holds two episodes of them.
        assert rows["NextDone"].sum() in (2, 3)
        assert 90 <= len(np.unique(rows["Observation"][:, 0], axis=0)) <= 110
        ring.close()
        return
    # Each step follows the one before, or an end.
    same = (rows["NextObservation"][:-1] == rows["Observation"][1:]).all(axis=(1, 2))
    assert (same | (rows["NextDone"][:-1, 0, 0] == 1)).all()
    assert rows["NextDone"].sum() in (3, 4)
    ring.close()


ASYNC = """
import os, sys
import pytorchrl as prl
from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.algorithms import DDPG
from pytorchrl.agent.env import VecEnv
from pytorchrl.learner import Learner
from pytorchrl.scheme import Scheme
from mmreplay.adapters import pytorchrl as ours
from tests.adapters.test_pytorchrl_peers import Pendulum

if __name__ == "__main__":
    envs, actions, observations = VecEnv.create_factory(Pendulum, vec_env_size=2)
    algo, algo_name = DDPG.create_factory(
        start_steps=60, update_every=20, num_updates=5, mini_batch_size=16,
        num_test_episodes=0,
    )
    actor = OffPolicyActor.create_factory(
        observations, actions, algo_name, noise="Gauss"
    )
    scheme = Scheme(
        algo_factory=algo, actor_factory=actor, train_envs_factory=envs,
        storage_factory=ours.ReplayBuffer.create_factory(200, path=sys.argv[1]),
        col_workers_communication=prl.ASYNC,
    )
    worker = scheme.update_worker().local_worker
    learner = Learner(scheme, target_steps=400)
    while not learner.done():
        learner.step()
    mine, collecting = worker.storage, worker.local_worker.storage
    assert mine.actor is worker.actor
    # The learner has what was collected first and what was sent since.
    print(mine.size, mine.home.path.name, collecting.max_size, flush=True)
    os._exit(0)  # its collecting thread never ends
"""


@pytest.mark.slow
def test_ddpg_trains_on_two_environments_that_collect_apart(tmp_path):
    pytest.importorskip("ray", reason="ray, which pytorchrl imports, is missing")
    script = tmp_path / "train.py"
    script.write_text(ASYNC)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "ring")],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "200 ring-copy1 40"
