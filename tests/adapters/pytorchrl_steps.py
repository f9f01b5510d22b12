"""Transitions and actors like pytorchrl's, in which everything tells its number."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch

from mmreplay.adapters.pytorchrl import ReplayBuffer

ALGORITHM = SimpleNamespace(gamma=0.9, update_every=5)
KEYS = ("Observation", "Done", "Action", "Reward", "NextObservation", "NextDone")


class Scaler:
    """Takes the mean off, and remembers it."""

    def fit(self, inputs, targets):
        self.means = inputs.mean(0), targets.mean(0)

    def transform(self, inputs, targets):
        return inputs - self.means[0], targets - self.means[1]


def actor(recurrent=False, actions=None, reward_function=None):
    space = SimpleNamespace() if actions is None else Discrete(actions)
    model = SimpleNamespace(standard_scaler=Scaler(), reward_function=reward_function)
    return SimpleNamespace(is_recurrent=recurrent, action_space=space, dynamics_model=model)


def recurrent_actor(overlap=0.4):
    made = actor(recurrent=True)
    made.sequence_overlap = overlap
    return made


class Discrete:
    def __init__(self, n):
        self.n = n


def transition(number, envs=1, done=False, reward=None):
    """A step in which everything tells its number and environment."""
    value = torch.full((envs, 1), float(number)) + torch.arange(envs)[:, None] / 10
    end = torch.full((envs, 1), float(done))
    return {
        "Observation": value,
        "RecurrentHiddenStates": {"rhs": torch.ones(envs, 3)},
        "Done": torch.zeros(envs, 1),
        "Action": value + 100,
        "Reward": value if reward is None else torch.full((envs, 1), reward),
        "NextObservation": value + 1,
        "NextRecurrentHiddenStates": {"rhs": torch.ones(envs, 3)},
        "NextDone": end,
        "EnvironmentInformation": [{}] * envs,
    }


def recurrent_step(number, envs=1):
    """A step whose hidden state tells its number as well."""
    hidden = {"rhs": torch.full((envs, 2), float(number))}
    return transition(number, envs) | {"RecurrentHiddenStates": hidden}


def numbers(data):
    return data["Observation"][:, 0, 0].tolist()


def slice_of(values, envs=1):
    steps = [transition(v, envs) for v in values]
    return {key: np.stack([np.asarray(step[key]) for step in steps]) for key in KEYS}


@contextmanager
def storages(folder):
    """A function that makes storages below a folder; they are closed at the end."""
    made = []

    def make(kind=ReplayBuffer, size=10, *options, name="ring", with_=None, **named):
        build = kind.create_factory(size, *options, path=folder / name, **named)
        made.append(build("cpu", with_ or actor(), ALGORITHM, None))
        return made[-1]

    yield make
    for storage in made:
        storage.close()
