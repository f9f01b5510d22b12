"""Stable-Baselines3's buffers on disk where one folder has several faces."""

import pickle

import numpy as np
import pytest

from mmreplay.episodes import START
from mmreplay.errors import SchemaError

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
spaces = pytest.importorskip("gymnasium").spaces
adapter = pytest.importorskip("mmreplay.adapters.sb3.replay_buffer")

LINE = spaces.Box(-1e9, 1e9, (1,), np.float32)


def give(buffer, number, done=False, action=(1,)):
    """Add the step from a number to the next one, in every environment."""
    envs = buffer.n_envs
    now = np.full((envs, 1), number, np.float32)
    buffer.add(
        now,
        now + 1,
        np.zeros((envs, *action), np.float32),
        np.zeros(envs, np.float32),
        np.full(envs, done),
        [{}] * envs,
    )


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("envs", [1, 2])
def test_faces_that_take_turns_make_no_transition_up(tmp_path, rng, once, envs):
    first = adapter.ReplayBuffer(
        80, LINE, LINE, "cpu", envs, once, path=tmp_path / "ring", n_steps=2, gamma=1
    )
    give(first, 0)
    faces = [first, pickle.loads(pickle.dumps(first))]
    numbers = [1, 1000]
    for _ in range(60):
        which = int(rng.integers(2))
        done = rng.random() < 0.2
        give(faces[which], numbers[which], done)
        numbers[which] += 1 + 100 * done  # another episode begins elsewhere
    samples = first.sample(500)
    steps = samples.next_observations - samples.observations
    assert set(steps.flatten().tolist()) <= {1, 2}
    first.close()


@pytest.mark.parametrize("how", ["nan", "end"])
def test_a_step_that_comes_right_after_ours_is_not_confused_with_it(tmp_path, monkeypatch, how):
    """By another thread's face, before we look at what is there."""
    first = adapter.ReplayBuffer(80, LINE, LINE, "cpu", 1, True, path=tmp_path / "ring")
    for number in range(3):
        give(first, number)
    other = pickle.loads(pickle.dumps(first))
    give(other, 500)
    give(first, 3)
    ring, add = first.ring, first.ring.add

    def beaten(*args, **named):
        add(*args, **named)
        monkeypatch.undo()
        give(other, 777)

    monkeypatch.setattr(ring, "add", beaten)
    now = np.full((1, 1), 4, np.float32)
    reward = np.array([np.nan if how == "nan" else 0], np.float32)
    done = np.array([how == "end"])
    first.add(now, now + 1, np.zeros((1, 1), np.float32), reward, done, [{}])
    give(first, 5 if how == "nan" else 50)
    give(first, 6 if how == "nan" else 51)
    samples = first.sample(300)
    steps = samples.next_observations - samples.observations
    assert set(steps.flatten().tolist()) == {1}


def test_the_folder_says_whose_it_is(tmp_path):
    buffer = adapter.ReplayBuffer(50, LINE, LINE, "cpu", path=tmp_path / "ring")
    give(buffer, 0)
    buffer.close()
    skrl = pytest.importorskip("mmreplay.adapters.skrl")
    with pytest.raises(SchemaError, match=r"a buffer of the adapter 'sb3'\. Choose"):
        skrl.Memory(50, path=tmp_path / "ring", resume=True)


def test_one_face_goes_on_with_its_episode_where_none_came_between(tmp_path):
    buffer = adapter.ReplayBuffer(50, LINE, LINE, "cpu", path=tmp_path / "ring")
    give(buffer, 0)
    buffer.sample(4)
    buffer.ring.commit()
    give(buffer, 1)
    flags = buffer.ring.flags(0, np.arange(2))
    assert np.flatnonzero(flags & START).tolist() == [0]
    buffer.close()


def test_a_copy_ends_episodes_only_when_it_adds(tmp_path):
    buffer = adapter.ReplayBuffer(50, LINE, LINE, "cpu", path=tmp_path / "ring")
    give(buffer, 0)
    copy = pickle.loads(pickle.dumps(buffer))
    assert copy.sample(4).observations.tolist() == [[0.0]] * 4
    give(buffer, 1)
    flags = buffer.ring.flags(0, np.arange(2))
    assert np.flatnonzero(flags & START).tolist() == [0]
    other = pickle.loads(pickle.dumps(buffer))
    assert other.size() == 2
    give(other, 2)
    flags = buffer.ring.flags(0, np.arange(3))
    assert np.flatnonzero(flags & START).tolist() == [0, 2]
    buffer.close()


def test_a_refused_step_ends_no_episode(tmp_path):
    buffer = adapter.ReplayBuffer(50, LINE, LINE, "cpu", path=tmp_path / "ring", n_steps=2)
    give(buffer, 0)
    with pytest.raises(SchemaError, match=r"action must have .* got \[1, 5\]"):
        give(buffer, 7, action=(5,))
    give(buffer, 1)
    flags = buffer.ring.flags(0, np.arange(2))
    assert np.flatnonzero(flags & START).tolist() == [0]
    buffer.close()


def test_a_model_that_is_loaded_to_be_looked_at_leaves_the_folder_alone(tmp_path):
    options = {"path": tmp_path / "ring", "resume": True}
    model = sb3.DQN(
        "MlpPolicy",
        "CartPole-v1",
        device="cpu",
        buffer_size=500,
        learning_starts=10,
        policy_kwargs={"net_arch": [8]},
        replay_buffer_class=adapter.ReplayBuffer,
        replay_buffer_kwargs=options,
    )
    model.learn(30)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    model.replay_buffer.close()
    before = files(tmp_path / "ring")
    again = sb3.DQN.load(tmp_path / "model")
    again.load_replay_buffer(tmp_path / "buffer")
    assert "not open yet" in repr(again.replay_buffer)
    again.replay_buffer.close()
    assert files(tmp_path / "ring") == before
    # Whoever draws, adds or asks opens it.
    again = sb3.DQN.load(tmp_path / "model")
    held = again.replay_buffer.size()
    assert held == again.replay_buffer.pos >= 30
    assert len(again.replay_buffer.sample(4).rewards) == 4
    again.replay_buffer.close()
