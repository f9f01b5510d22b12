"""Nests as alf's code has them, with specs of our own: alf does not install."""

from typing import Any, NamedTuple

import numpy as np
import torch

from mmreplay.adapters.alf import ReplayBuffer

FIRST, MID, LAST = 0, 1, 2
TYPES = {"F": FIRST, "M": MID, "L": LAST}


class Spec:
    """What a TensorSpec is to a buffer."""

    def __init__(self, shape=(), dtype=torch.float32):
        self.shape, self.dtype = shape, dtype


class Row(NamedTuple):
    step_type: Any
    discount: Any
    reward: Any
    observation: Any = ()


SPEC = Row(
    Spec((), torch.int32),
    Spec(),
    Spec(),
    {
        "image": Spec((2, 2), torch.uint8),
        "rest": [Spec((), torch.int64), (Spec((3,), torch.bfloat16),)],
    },
)


def rows(step_types, discounts, rewards):
    """One row of each environment; the observation follows from the reward."""
    reward = torch.as_tensor(rewards, dtype=torch.float32)
    whole = reward.to(torch.int64)
    return Row(
        torch.as_tensor(step_types, dtype=torch.int32),
        torch.as_tensor(discounts, dtype=torch.float32),
        reward,
        {
            "image": (whole % 251).to(torch.uint8)[:, None, None].expand(-1, 2, 2),
            "rest": [whole, ((whole % 100).to(torch.bfloat16)[:, None].expand(-1, 3),)],
        },
    )


def story(buffer, text):
    """Add rows of the only environment, told as ``"F1/0 M.9/1 L0/2"``."""
    for word in text.split():
        discount, reward = word[1:].split("/")
        buffer.add_batch(rows([TYPES[word[0]]], [float(discount)], [float(reward)]))


def counted(buffer, steps, num_envs):
    """Add rows whose reward is the number of the step."""
    for step in range(steps):
        buffer.enqueue(rows([MID] * num_envs, [1.0] * num_envs, [step] * num_envs))


def episodic(path=None, length=10, **options):
    """A buffer of one environment that tells everything of its episodes."""
    given = {"default_return": -7.0, "gamma": 0.5} | options
    return ReplayBuffer(
        SPEC, 1, length, keep_episodic_info=True, record_episodic_return=True, path=path, **given
    )


def rows_of(buffer, env_id=0):
    """Environments and positions of all rows of one environment."""
    first = int(buffer.get_earliest_position()[env_id])
    positions = torch.arange(first, int(buffer.get_current_position()[env_id]))
    return torch.full_like(positions, env_id), positions


def returns(buffer):
    """Stored returns of the only environment, drawn one row at a time."""
    found = {}
    while len(found) < int(buffer.total_size):
        _, info = buffer.get_batch(int(buffer.total_size), 1)
        found |= dict(zip(info.positions.tolist(), info.discounted_return.tolist(), strict=True))
    return [found[position] for position in sorted(found)]


def equal(ours, theirs):
    """Whether two nests hold the same numbers, of the same dtypes."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and all(
            equal(a, b) for a, b in zip(ours, theirs, strict=True)
        )
    return ours.dtype == theirs.dtype and bool(
        np.array_equal(ours.float().numpy(), theirs.float().numpy())
    )
