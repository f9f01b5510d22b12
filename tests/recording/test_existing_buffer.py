"""Recording into a buffer that is there: with the environments that it was made for."""

import gymnasium as gym
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.recording.test_recorder import LoggedEnv, vector


def test_a_buffer_of_other_num_envs_is_refused(tmp_path):
    mr.record(vector("next_step", 2), tmp_path / "b", steps=3)
    told = r"num_envs must be .*got 3"
    with pytest.raises(SchemaError, match=told):
        mr.record(vector("next_step", 3), tmp_path / "b", steps=3)


def test_an_id_is_gone_on_with_by_as_many_environments(tmp_path):
    for num_envs in (2, None):
        mr.record("CartPole-v1", tmp_path / "b", steps=6, num_envs=num_envs)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert (buffer.num_envs, len(buffer)) == (2, 12)
    with pytest.raises(SchemaError, match=r"num_envs must be .*got 1"):
        mr.record("CartPole-v1", tmp_path / "b", steps=6, num_envs=1)


def test_a_buffer_of_another_autoreset_is_refused(tmp_path):
    mr.record(vector("next_step"), tmp_path / "b", steps=3)
    with pytest.raises(SchemaError, match=r"autoreset must be .*got 'same_step'"):
        mr.record(vector("same_step"), tmp_path / "b", steps=3)


def test_another_capacity_is_refused(tmp_path):
    mr.record(LoggedEnv(), tmp_path / "b", steps=3, capacity=10)
    with pytest.raises(SchemaError, match=r"capacity must be .*got 11"):
        mr.record(LoggedEnv(), tmp_path / "b", steps=3, capacity=11)


class Camera(gym.Env):
    """Its frames count the steps."""

    observation_space = gym.spaces.Box(0, 255, (12, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.frame = np.zeros((12, 16, 3), np.uint8)
        return self.frame, {}

    def step(self, action):
        self.frame = self.frame + 1
        return self.frame, 1.0, bool(self.frame[0, 0, 0] == 6), False, {}


def test_a_ring_of_images_is_gone_on_with(tmp_path):
    schema = mr.Schema.from_env(Camera())
    images = {**schema.fields, "observation": mr.Field.image((12, 16, 3), "png")}
    path = tmp_path / "b"
    mr.ReplayBuffer.create(path, mr.Schema(images), 50, autoreset="disabled").close()
    mr.record(Camera(), path, steps=20)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.schema["observation"].encoding.codec == "png"
        batch = buffer.sample(32)
        frames = batch["observation"][:, 0, 0, 0].astype(int)
        assert (batch["observation"] == frames[:, None, None, None]).all()
        assert (batch["next_observation"][:, 0, 0, 0] == frames + 1).all()
    # An image of another shape is another field.
    other = {**schema.fields, "observation": mr.Field.image((16, 12, 3), "png")}
    mr.ReplayBuffer.create(tmp_path / "c", mr.Schema(other), 50, autoreset="disabled").close()
    with pytest.raises(SchemaError, match=r"field 'observation'.*png image"):
        mr.record(Camera(), tmp_path / "c", steps=20)
