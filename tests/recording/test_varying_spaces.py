"""Sources of environments whose observations vary in length."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from mmreplay.buffer.validation import StepValidator
from mmreplay.recording.sources import open_source
from mmreplay.schema import Schema

MEMBERS = ("nodes", "edges", "edge_links")
SPACE = spaces.Dict(
    mission=spaces.Text(12),
    plan=spaces.Sequence(spaces.Discrete(5)),
    path=spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True),
    world=spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,))),
    speed=spaces.Box(-1, 1),
)


class Speaking(gym.Env):
    """Gives samples of its space, and logs them; each episode has two steps."""

    observation_space = SPACE
    action_space = spaces.Discrete(2)

    def __init__(self, seed=0):
        self._own = spaces.Dict(SPACE.spaces)
        self._own.seed(seed)
        self.log = []

    def _sample(self):
        self._own.seed(int(np.random.default_rng(len(self.log)).integers(99)))
        self.log.append(self._own.sample())
        return self.log[-1]

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return self._sample(), {}

    def step(self, action):
        self.age += 1
        return self._sample(), 1.0, self.age == 2, False, {}


def as_lists(sample):
    """One observation by path, as lists and text."""
    found = {
        "observation/mission": sample["mission"],
        "observation/plan": [int(item) for item in sample["plan"]],
        "observation/path": sample["path"].tolist(),
        "observation/speed": sample["speed"].tolist(),
    }
    for name, member in zip(MEMBERS, sample["world"], strict=True):
        found[f"observation/world/{name}"] = [] if member is None else member.tolist()
    return found


def stored(columns, envs):
    """What a validator makes of the columns, environment by environment."""
    found = []
    for env_id in range(envs):
        one = {path: column[env_id].tolist() for path, column in columns.items()}
        text = columns["observation/mission"][env_id : env_id + 1].text()[0]
        found.append(one | {"observation/mission": text})
    return found


def validated(leaves, num_envs):
    schema = Schema.from_spaces(
        SPACE, spaces.Discrete(2), exclude=["action", "reward", "truncated"]
    )
    validator = StepValidator(schema, num_envs)
    step = dict(leaves) | {"terminated": np.zeros(num_envs, bool)}
    columns = validator.step(validator.flat(step), num_envs)
    columns.pop("terminated")
    return stored(columns, num_envs)


def open_varying(env):
    source = open_source(env, None, None)
    source.varying = Schema.from_env(env).varying
    source.reset(0)
    return source


def test_the_observations_of_one_environment_are_copied_whole():
    env = Speaking()
    source = open_varying(env)
    finals = 0
    for _ in range(7):
        seen = source.leaves("observation", source.observation)
        assert validated(seen, 1) == [as_lists(env.log[-1])]
        turn = source.step(0)
        if turn.final is not None:
            finals += 1
            assert validated(turn.final, 1) == [as_lists(env.log[-2])]
    assert finals == 3


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_observations_of_a_vector_environment_are_copied_whole(mode):
    envs = [Speaking(seed) for seed in range(3)]
    vector = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)
    source = open_varying(vector)
    finals = 0
    for _ in range(7):
        seen = source.leaves("observation", source.observation)
        assert validated(seen, 3) == [as_lists(env.log[-1]) for env in envs]
        turn = source.step(vector.action_space.sample())
        if turn.final is not None:
            finals += 1
            assert validated(turn.final, 3) == [as_lists(env.log[-2]) for env in envs]
    assert finals == (0 if mode is AutoresetMode.NEXT_STEP else 3)
