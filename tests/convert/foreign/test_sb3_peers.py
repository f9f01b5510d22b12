"""Replay buffers that Stable-Baselines3 itself saves; its own arrays are the oracle."""

import numpy as np
import pytest

import mmreplay as mr
from tests.convert.foreign.oracle import assert_same, drawn
from tests.convert.foreign.test_pickles import expected

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is missing")
gym = pytest.importorskip("gymnasium")


@pytest.mark.parametrize("count", [40, 150])
@pytest.mark.parametrize("envs", [1, 3])
def test_every_step_is_what_the_buffer_holds(tmp_path, count, envs):
    def make():
        return gym.make("CartPole-v1", max_episode_steps=15)

    env = sb3.common.vec_env.DummyVecEnv([make] * envs)
    model = sb3.DQN("MlpPolicy", env, buffer_size=100, learning_starts=10**6)
    model.learn(count)
    model.save_replay_buffer(tmp_path / "saved")
    mr.load(tmp_path / "saved.pkl", tmp_path / "buffer", allow_pickle=True)
    found, left = drawn(tmp_path / "buffer", ["observation"])
    assert left == 0
    buffer = model.replay_buffer
    wanted = expected(vars(buffer))
    assert_same(found, wanted)
    assert wanted["truncated"].any()


@pytest.mark.parametrize("count", [60, 150, 201])
def test_a_memory_efficient_buffer_gives_what_the_library_draws(tmp_path, count):
    env = sb3.common.vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2)
    model = sb3.DQN(
        "MlpPolicy",
        env,
        buffer_size=100,
        learning_starts=10**6,
        optimize_memory_usage=True,
        replay_buffer_kwargs={"handle_timeout_termination": False},
    )
    model.learn(count)
    model.save_replay_buffer(tmp_path / "saved")
    mr.load(tmp_path / "saved.pkl", tmp_path / "buffer", allow_pickle=True)
    found, left = drawn(tmp_path / "buffer", ["observation"])
    assert left == 0
    buffer = model.replay_buffer
    rows = np.arange(buffer.pos)
    if buffer.full:
        rows = (buffer.pos + np.arange(1, buffer.buffer_size)) % buffer.buffer_size
    for env_id in range(2):
        mine = slice(env_id * len(rows), (env_id + 1) * len(rows))
        done = buffer.dones[rows, env_id] > 0
        np.testing.assert_array_equal(found["terminated"][mine], done)
        seen = buffer.observations[:, env_id]
        np.testing.assert_array_equal(found["observation"][mine], seen[rows])
        nexts = found["next_observation"][mine]
        after = seen[(rows + 1) % len(seen)]
        np.testing.assert_array_equal(nexts[~done], after[~done])
        np.testing.assert_array_equal(nexts[-1], after[-1])


def test_dicts_of_a_hindsight_buffer_come_in(tmp_path):
    envs = pytest.importorskip("stable_baselines3.common.envs")
    env = envs.BitFlippingEnv(n_bits=4, continuous=False)
    model = sb3.DQN(
        "MultiInputPolicy",
        env,
        replay_buffer_class=sb3.HerReplayBuffer,
        buffer_size=100,
        learning_starts=10**6,
    )
    model.learn(60)
    model.save_replay_buffer(tmp_path / "saved")
    mr.load(tmp_path / "saved.pkl", tmp_path / "buffer", allow_pickle=True)
    names = [f"observation/{key}" for key in model.replay_buffer.observations]
    found, _ = drawn(tmp_path / "buffer", names)
    goals = model.replay_buffer.next_observations["achieved_goal"]
    np.testing.assert_array_equal(found["next_observation/achieved_goal"], goals[:60, 0])
