"""What alf's learners ask of a buffer, call by call, with an `Experience` of our own.

alf is on no index. The functions here make the calls of its hindsight and frame-stack
transformers and of its predictive-representation and MuZero learners, with the same
arguments and shapes, and return what these compute from the answers.
"""

from typing import Any, NamedTuple

import torch

from tests.adapters.alf.support import Spec


class TimeStep(NamedTuple):
    step_type: Any = ()
    reward: Any = ()
    discount: Any = ()
    observation: Any = ()
    prev_action: Any = ()
    env_id: Any = ()
    untransformed: Any = ()

    def is_last(self):
        return self.step_type == 2


class Fields(NamedTuple):
    time_step: Any = ()
    action: Any = ()
    rollout_info: Any = ()
    state: Any = ()
    batch_info: Any = ()
    replay_buffer: Any = ()


class Experience(Fields):
    """Forwards what a time step holds by properties, as alf's class does."""

    @property
    def step_type(self):
        return self.time_step.step_type

    @property
    def reward(self):
        return self.time_step.reward

    @property
    def discount(self):
        return self.time_step.discount

    @property
    def observation(self):
        return self.time_step.observation

    @property
    def prev_action(self):
        return self.time_step.prev_action

    @property
    def env_id(self):
        return self.time_step.env_id

    @property
    def doubled(self):
        return self.time_step.reward * 2


class Info(NamedTuple):
    """What a rollout computed; its reward is not the environment's."""

    reward: Any = ()
    value: Any = ()
    candidate_actions: Any = ()


def spec(reward=()):
    """Specs of an experience; the rollout's reward comes before the time step's."""
    whole = Spec((), torch.int64)
    return Experience(
        time_step=TimeStep(
            step_type=Spec((), torch.int32),
            reward=Spec(reward),
            discount=Spec(),
            observation={"achieved_goal": Spec((2,)), "desired_goal": Spec((2,))},
            prev_action=[whole, Spec((3,))],
            env_id=whole,
        ),
        action=[whole, Spec((3,))],
        rollout_info=Info(reward=Spec(), value=Spec()),
        state=(),
    )


def experience(step_types, discounts, numbers):
    """One row of each environment, all of whose values follow from its number."""
    number = torch.as_tensor(numbers, dtype=torch.float32)
    pair, three = number[:, None].expand(-1, 2), number[:, None].expand(-1, 3)
    actions = [number.to(torch.int64), three + 0.5]
    return Experience(
        time_step=TimeStep(
            step_type=torch.as_tensor(step_types, dtype=torch.int32),
            reward=number,
            discount=torch.as_tensor(discounts, dtype=torch.float32),
            observation={"achieved_goal": pair + 0.25, "desired_goal": -pair},
            prev_action=actions,
            env_id=torch.arange(len(numbers)),
        ),
        action=[actions[0] + 1000, actions[1] + 1000],
        rollout_info=Info(reward=number + 7000, value=number + 9000),
        state=(),
    )


def hindsight(data, info, chosen, fraction):
    """Relabel windows of two steps with goals achieved later in their episodes.

    Args:
        data: Experience ``[B, 2, ...]``.
        info: Where it is from.
        chosen: bool ``[B]``, windows to relabel.
        fraction: float ``[n]`` in [0, 1), how far ahead each goal lies.

    Returns:
        Desired goals ``[B, 2, 2]``, and the names under which means are reported.
    """
    data = data._replace(batch_info=info._replace(replay_buffer=()))
    buffer = info.replay_buffer
    assert torch.device(buffer.device).type == "cpu"
    (which,) = torch.where(chosen)
    last = info.positions[which] + data.reward.shape[1] - 1
    env_ids = info.env_ids[which]
    left = buffer.steps_to_episode_end(last, env_ids)
    names = ["replayer/" + buffer._name + ".mean_steps_to_episode_end"]
    future = last + (fraction * (left + 1)).to(torch.int64)
    path = "time_step.observation.achieved_goal"
    goals = buffer.get_field(path, env_ids, future).unsqueeze(1)
    desired = data.time_step.observation["desired_goal"].clone()
    desired[which.unsqueeze(1), torch.arange(2).unsqueeze(0)] = goals
    names.append("replayer/" + buffer._name + ".reward_mean_before_relabel")
    return desired, names


def stacked(data, info, size):
    """Observations of windows, each behind those before it in its episode.

    Returns:
        float ``[B, size - 1 + T, 2]``.
    """
    buffer, positions = info.replay_buffer, info.positions
    before = positions.unsqueeze(-1) + torch.arange(size - 1) - size + 1
    begins = buffer.get_episode_begin_position(positions, info.env_ids).unsqueeze(-1)
    before = torch.max(before, begins)
    assert (before[:, 0] >= buffer.get_earliest_position(info.env_ids)).all()
    field = "observation.achieved_goal"
    found = buffer.get_field(field, info.env_ids.unsqueeze(-1), before)
    return torch.cat((found, data.observation["achieved_goal"]), dim=1)


def predicted(data, info, steps, fields):
    """Targets of a predictive representation learner.

    Returns:
        The fields and the actions of the next steps, ``[B, T, steps + 1, ...]`` and
        ``[B, T, steps, ...]``, and which are within the episode.
    """
    buffer = info.replay_buffer
    positions = info.positions.unsqueeze(-1) + torch.arange(data.step_type.shape[1])
    env_ids = info.env_ids.unsqueeze(-1)
    ends = positions + buffer.steps_to_episode_end(positions, env_ids)
    positions = positions.unsqueeze(-1) + torch.arange(steps + 1)
    env_ids, ends = env_ids.unsqueeze(-1), ends.unsqueeze(-1)
    mask = positions <= ends
    positions = torch.min(positions, ends)
    target = buffer.get_field(fields, env_ids, positions)
    action = buffer.get_field("prev_action", env_ids, positions[:, :, 1:])
    return target, action, mask


def planned(data, info, steps):
    """What a MuZero learner reads, besides its predictions.

    Returns:
        Values, candidate actions, rewards, discounts, last discounts, step types and
        observations, folded and not, and whole experiences.
    """
    buffer, length = info.replay_buffer, data.step_type.shape[1]
    folded = info.positions.unsqueeze(-1) + torch.arange(length + steps)
    one = info.env_ids.unsqueeze(-1)
    two = one.unsqueeze(-1)
    positions = folded.unfold(1, steps + 1, 1)
    left = buffer.steps_to_episode_end(positions[:, :, 0], two[:, :, 0])
    ends = (positions[:, :, 0] + left).unsqueeze(-1)
    head = buffer.get_current_position()[info.env_ids, None]
    folded = torch.min(folded, head - 1)
    positions = torch.min(positions, ends)
    observation, step_type = buffer.get_field(("observation", "step_type"), one, folded)
    return {
        "value": buffer.get_field("rollout_info.value", one, folded),
        "candidates": buffer.get_field("rollout_info.candidate_actions", one, folded),
        "reward": buffer.get_field("reward", two, positions),
        "discount": buffer.get_field("discount", two, positions),
        "last": buffer.get_field("discount", two[:, :, 0], positions[:, :, -1]),
        "observation": observation,
        "step_type": step_type,
        "whole": buffer.get_field(None, one.expand_as(folded), folded),
        "positions": positions,
        "folded": folded,
    }
