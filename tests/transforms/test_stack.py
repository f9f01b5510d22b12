"""Frames and actions of the past, against slices of Python lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from tests.transforms.world import World

KINDS = st.sampled_from(["", "", "", "t", "u"])


def history(episode, t, k, fill):
    """The k actions before step t."""
    actions = [fill] * k + [step["action"] for step in episode.steps]
    return actions[t : t + k]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_action_histories_equal_slices(data):
    draw = data.draw
    k, n, stored = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.booleans())
    transforms = draw(st.permutations([mr.ActionHistory(k, fill=-3), mr.NStep(n, 0.5)]))
    autoreset = draw(st.sampled_from(["disabled", "next_step"]))
    capacity = draw(st.integers(k + n + 1, 12))
    world = World(capacity, 1, autoreset, stored, transforms)
    for _ in range(draw(st.integers(1, 30))):
        final = draw(st.booleans()) and autoreset != "next_step" and not stored
        world.add([draw(KINDS)], final=final)
    rows = world.legal()
    if not rows:
        return
    batch = world.draw([0] * len(rows), [row[1] for row in rows])
    for i, (_, _, episode, t) in enumerate(rows):
        end = min(t + n, len(episode.steps))
        assert batch["action_history"][i].tolist() == history(episode, t, k, -3)
        following = batch["next_action_history"][i].tolist()
        assert following == history(episode, end, k, -3)


def test_histories_of_vectors_fill_with_vectors():
    schema = mr.Schema({"observation": mr.Field((), "int64"), "action": mr.Field((2,), "float32")})
    history = mr.ActionHistory(2, fill=[0.5, -0.5])
    buffer = mr.ReplayBuffer.create(None, schema, 8, engine="memory", transforms=[history])
    for number in range(3):
        buffer.add(observation=number, action=np.float32([number, number]))
    batch = buffer.take(0, [0, 1])
    nothing = [0.5, -0.5]
    assert batch["action_history"].tolist() == [[nothing, nothing], [nothing, [0, 0]]]
    assert batch["next_action_history"][1].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_frames_join_along_an_axis_as_concatenate_does(axis):
    shape = (2, 3, 4)
    schema = mr.Schema({"observation": mr.Field(shape, "uint8")})
    joined, apart = (
        mr.ReplayBuffer.create(None, schema, 16, engine="memory", transforms=[transform])
        for transform in (mr.FrameStack(3, axis=axis), mr.FrameStack(3))
    )
    frames = np.random.default_rng(0).integers(0, 256, (8, *shape), np.uint8)
    for frame in frames:
        joined.add(observation=frame)
        apart.add(observation=frame)
    one, other = joined.take(0, range(7)), apart.take(0, range(7))
    for path in ("observation", "next_observation"):
        parts = np.moveaxis(other[path], 1, 0)
        positive = axis % 3 + 1
        assert (one[path] == np.concatenate(list(parts), axis=positive)).all()


def test_one_frame_is_the_frame():
    world = World(8, 1, "disabled", False, [mr.FrameStack(1, "observation/frame")])
    world.add([""])
    world.add([""])
    batch = world.draw([0], [0])
    assert batch["observation/frame"].tolist() == [[[1, -1]]]
    assert batch["next_observation/frame"].tolist() == [[[2, -2]]]


def test_paths_of_different_lengths_stack_side_by_side():
    transforms = [mr.FrameStack(2, "observation/frame"), mr.FrameStack(3, ["action", "reward"])]
    world = World(16, 1, "disabled", False, transforms)
    for _ in range(6):
        world.add([""])
    batch = world.draw([0], [4])
    assert batch["observation/frame"].tolist() == [[[4, -4], [5, -5]]]
    assert batch["action"].tolist() == [[3, 4, 5]]
    assert batch["reward"].tolist() == [[0.75, 1.0, 1.25]]
