"""alf's learners and data transformers find in the buffer what they look for."""

import re
from typing import Any, NamedTuple

import pytest
import torch

from mmreplay.adapters.alf import ReplayBuffer, RingBuffer
from tests.adapters.alf.learners import (
    Experience,
    Info,
    TimeStep,
    experience,
    hindsight,
    planned,
    predicted,
    spec,
    stacked,
)
from tests.adapters.alf.support import FIRST, LAST, MID, Spec

ENVS, LENGTH = 2, 24


def refused(message, kind=AssertionError):
    return pytest.raises(kind, match=re.escape(message))


@pytest.fixture
def played():
    """A buffer that wrapped, of episodes of different lengths; and its rows."""
    buffer = ReplayBuffer(spec(), ENVS, LENGTH, num_earliest_frames_ignored=3, name="mine")
    every = (5, 7)  # steps of an episode of each environment
    rows = [{} for _ in range(ENVS)]
    for step in range(40):
        kinds = [FIRST if step % n == 0 else LAST if step % n == n - 1 else MID for n in every]
        discounts = [0.0 if kind == LAST else 1.0 for kind in kinds]
        numbers = [step + 100.0 * env_id for env_id in range(ENVS)]
        buffer.add_batch(experience(kinds, discounts, numbers))
        for env_id in range(ENVS):
            rows[env_id][step] = {
                "kind": kinds[env_id],
                "discount": discounts[env_id],
                "number": numbers[env_id],
                "begin": step - step % every[env_id],
                "end": min(step - step % every[env_id] + every[env_id] - 1, 39),
            }
    return buffer, rows


def asked(rows, info, function):
    """A value of each window's environment and first position."""
    pairs = zip(info.env_ids.tolist(), info.positions.tolist(), strict=True)
    return [function(rows[env_id], position) for env_id, position in pairs]


def test_hindsight_relabels_with_goals_of_the_same_episode(played):
    buffer, rows = played
    data, info = buffer.get_batch(64, 2)
    assert type(data) is Experience
    chosen = torch.rand(64) < 0.8
    fraction = torch.rand(int(chosen.sum()))
    desired, names = hindsight(data, info, chosen, fraction)
    assert names[0] == "replayer/mine.mean_steps_to_episode_end"
    parts = iter(fraction.tolist())

    def goal(of_env, position):
        last = of_env[position + 1]
        ahead = int(next(parts) * (last["end"] - position))
        return of_env[position + 1 + ahead]["number"] + 0.25

    for place, is_chosen in enumerate(chosen.tolist()):
        env_id, position = int(info.env_ids[place]), int(info.positions[place])
        if is_chosen:
            wanted = [[goal(rows[env_id], position)] * 2] * 2
        else:
            wanted = [[-rows[env_id][position + t]["number"]] * 2 for t in range(2)]
        assert desired[place].tolist() == wanted


def test_frames_are_stacked_within_an_episode(played):
    buffer, rows = played
    data, info = buffer.get_batch(64, 2)

    def frames(of_env, position):
        begin = of_env[position]["begin"]
        at = [max(position - age, begin) for age in (3, 2, 1)] + [position, position + 1]
        return [[of_env[p]["number"] + 0.25] * 2 for p in at]

    assert stacked(data, info, 4).tolist() == asked(rows, info, frames)


def test_targets_are_read_by_properties_and_lists_of_them(played):
    buffer, rows = played
    data, info = buffer.get_batch(64, 2)
    target, action, mask = predicted(data, info, 3, ["reward", "observation"])

    def ahead(of_env, position, t):
        return [min(position + t + k, of_env[position + t]["end"]) for k in range(4)]

    def numbers(of_env, position):
        return [[of_env[p]["number"] for p in ahead(of_env, position, t)] for t in (0, 1)]

    wanted = torch.tensor(asked(rows, info, numbers))
    assert type(target) is list
    assert torch.equal(target[0], wanted)
    assert target[1].keys() == {"achieved_goal", "desired_goal"}
    assert torch.equal(target[1]["desired_goal"][..., 1], -wanted)
    assert type(action) is list
    assert torch.equal(action[0], wanted[:, :, 1:].to(torch.int64))
    assert torch.equal(action[1][..., 2], wanted[:, :, 1:] + 0.5)

    def within(of_env, position):
        return [[position + t + k <= of_env[position + t]["end"] for k in range(4)] for t in (0, 1)]

    assert mask.tolist() == asked(rows, info, within)
    lone, _, _ = predicted(data, info, 3, "reward")
    assert torch.equal(lone, wanted)


def test_planning_reads_values_rewards_discounts_and_whole_steps(played):
    buffer, rows = played
    data, info = buffer.get_batch(64, 2)
    found = planned(data, info, 3)

    def read(positions, function):
        return torch.tensor(
            [
                [function(rows[env_id][p]) for p in some]
                for env_id, some in zip(
                    info.env_ids.tolist(), positions.flatten(1).tolist(), strict=True
                )
            ]
        ).reshape(positions.shape)

    folded, unfolded = found["folded"], found["positions"]
    number = read(folded, lambda row: row["number"])
    assert torch.equal(found["value"], number + 9000)
    assert found["candidates"] == ()
    assert torch.equal(found["reward"], read(unfolded, lambda row: row["number"]))
    assert torch.equal(found["discount"], read(unfolded, lambda row: row["discount"]))
    last = read(unfolded[:, :, -1], lambda row: row["discount"])
    assert torch.equal(found["last"], last)
    assert torch.equal(found["step_type"], read(folded, lambda row: row["kind"]).int())
    assert torch.equal(found["observation"]["desired_goal"][..., 0], -number)
    whole = found["whole"]
    assert type(whole) is Experience
    assert (type(whole.time_step), type(whole.rollout_info)) == (TimeStep, Info)
    assert torch.equal(whole.reward, number)
    assert torch.equal(whole.action[1][..., 0], number + 1000.5)
    assert whole.state == () == whole.rollout_info.candidate_actions


class Turned(NamedTuple):
    """A scalar named reward, as deep as the time step's, is stored before it."""

    rollout_info: Any
    time_step: Any

    @property
    def step_type(self):
        return self.time_step.step_type

    @property
    def reward(self):
        return self.time_step.reward

    @property
    def discount(self):
        return self.time_step.discount


def test_returns_are_of_the_reward_that_the_nest_forwards():
    def turned(nest):
        return Turned(nest.rollout_info, nest.time_step)

    buffer = ReplayBuffer(
        turned(spec()), 1, 8, keep_episodic_info=True, record_episodic_return=True, gamma=1.0
    )
    for kind, number in ((FIRST, 0.0), (MID, 1.0), (LAST, 2.0)):
        row = experience([kind], [0.0 if kind == LAST else 1.0], [number])
        buffer.add_batch(turned(row))
    _, info = buffer.get_batch(30, 1)
    pairs = zip(info.positions.tolist(), info.discounted_return.tolist(), strict=True)
    assert dict(pairs) == {0: 3.0, 1: 2.0, 2: -1000.0}
    assert buffer._core.buffer.schema.roles["reward"] == "step/time_step/reward"


def test_a_vector_of_rewards_is_not_replaced_by_another_scalar():
    with refused("data_spec has no scalar named 'reward', which"):
        ReplayBuffer(spec(reward=(2,)), 1, keep_episodic_info=True, record_episodic_return=True)
    ring = RingBuffer(spec(reward=(2,)), 1)
    assert ring._core.buffer.schema.roles.get("reward") is None


def test_names_are_looked_up_as_attributes_keys_and_numbers(played):
    buffer, _ = played
    place = torch.tensor(0), torch.tensor(30)
    number = buffer.get_field("reward", *place)
    assert number.shape == ()
    for name in (
        "time_step.reward",
        "observation.achieved_goal",
        "prev_action.0",
        "env_id",
        "prev_action.-1",
        "rollout_info.value",
        "time_step.observation.desired_goal",
    ):
        assert isinstance(buffer.get_field(name, *place), torch.Tensor)
    assert type(buffer.get_field("time_step", *place)) is TimeStep
    assert buffer.get_field("rollout_info.candidate_actions", *place) == ()
    nest = buffer.get_field({"a": "reward", "b": ["discount", ("env_id",)]}, *place)
    assert (float(nest["a"]), float(nest["b"][0])) == (30, 1)
    assert type(nest["b"][1]) is tuple
    known = (
        "field 'rewards': 'rewards' must be one of ['time_step', 'action', "
        "'rollout_info', 'state', 'batch_info', 'replay_buffer', 'discount', "
        "'doubled', 'env_id', 'observation', 'prev_action', 'reward', 'step_type']"
    )
    with refused(known, LookupError):
        buffer.get_field("rewards", *place)
    for name in ("prev_action.2", "prev_action.x", "reward.x", "time_step.0", 7):
        with refused(f"field {name!r}: ", LookupError):
            buffer.get_field(name, *place)
    with refused("field 'time_step.is_last' must be a leaf of", LookupError):
        buffer.get_field("time_step.is_last", *place)
    with refused("field 'doubled': 'doubled' must be one of", LookupError):
        buffer.get_field("doubled", *place)


@pytest.mark.parametrize("envs", [1, 3])
def test_leaves_of_one_value_are_repeated_to_the_spec(envs):
    buffer = RingBuffer({"a": Spec((4,)), "b": Spec((2, 3), torch.int64)}, envs, 4)
    a = torch.arange(envs, dtype=torch.float32)[:, None]
    b = torch.arange(3 * envs).reshape(envs, 1, 3)
    for ids in (None, torch.arange(envs).flip(0)):
        buffer.enqueue({"a": a, "b": b}, ids)
    # What alf does: into storage [E, L, *shape], at one slot of each environment.
    slots = [torch.zeros(envs, 2, 4), torch.zeros(envs, 2, 2, 3, dtype=torch.int64)]
    for storage, leaf in zip(slots, (a, b), strict=True):
        storage[:, 0] = leaf
        storage[torch.arange(envs).flip(0), 1] = leaf
    out = buffer.dequeue(n=2)
    assert torch.equal(out["a"], slots[0])
    assert torch.equal(out["b"], slots[1])


def test_leaves_that_lack_an_axis_or_have_too_many_values_are_refused():
    buffer = RingBuffer({"a": Spec((3,))}, 3, 4)
    # torch would take the first of these for one value an element, not one a row.
    for shape in ((3,), (3, 2), (3, 1, 1), (3, 1, 3)):
        with refused("field 'step/a'", RuntimeError):
            buffer.enqueue({"a": torch.ones(shape)})
    assert buffer.current_size.tolist() == [0, 0, 0]


def test_positions_come_back_in_the_shape_of_the_environments():
    buffer = RingBuffer({"a": Spec()}, 3, 4)
    for _ in range(6):
        buffer.enqueue({"a": torch.zeros(3)})
    for ids in (1, torch.tensor(1), torch.tensor([1]), torch.tensor([[0, 2], [1, 1]])):
        wanted = torch.full(torch.as_tensor(ids).shape, 2)
        found = buffer.get_earliest_position(ids)
        assert (found.shape, found.tolist()) == (wanted.shape, wanted.tolist())
    positions = torch.arange(9).reshape(3, 3)
    assert torch.equal(buffer.circular(positions), positions % 4)
    assert buffer.circular(7) == 3
    assert buffer.check_convert_env_ids(None).tolist() == [0, 1, 2]
    ids = buffer.check_convert_env_ids(torch.tensor([2, 0], dtype=torch.int32))
    assert (ids.dtype, ids.tolist()) == (torch.int64, [2, 0])
    with refused("env_ids must have one axis, got shape [1, 2]."):
        buffer.check_convert_env_ids(torch.tensor([[2, 0]]))
