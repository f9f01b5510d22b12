"""Returns against the recursion that defines them, over episodes in Python lists."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.transforms import returns
from tests.transforms.world import World

KINDS = st.sampled_from(["", "", "", "t", "u", "tu"])


def value(observations):
    """A value function that tells every observation apart."""
    return observations["observation/frame"][:, 0] / 8


def wanted(world, spec, episode, t):
    """G of step t by its recursion, or the default."""
    last = len(episode.steps) - 1
    after, known = 0.0, "t" in episode.end
    if "u" in episode.end and not known:
        known = spec.time_limit == "none"
        if spec.time_limit == "bootstrap":
            final = episode.final
            if world.stored:
                final = episode.steps[last]["next_observation"]
            known = final is not None
            after = final["frame"][0] / 8 if known else 0.0
    for i in range(last, t - 1, -1):
        reward = float(np.clip(episode.steps[i]["reward"], *(spec.clip or (-99, 99))))
        discount = 1.0 if spec.discount is None else episode.steps[i]["life"]
        known = known or spec.gamma * discount == 0
        if spec.discount_with == "reward":
            after = reward + spec.gamma * discount * after
        else:
            after = discount * (reward + spec.gamma * after)
    return after if known else spec.default


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_returns_equal_the_recursion(data):
    draw = data.draw
    limit = draw(st.sampled_from(["default", "none", "bootstrap"]))
    spec = mr.DiscountedReturn(
        draw(st.sampled_from([0.0, 0.5, 1.0])),
        default=-7.0,
        clip=draw(st.sampled_from([None, (0.5, 4.0)])),
        time_limit=limit,
        value_fn=value if limit == "bootstrap" else None,
        discount=draw(st.sampled_from([None, "life"])),
        discount_with=draw(st.sampled_from(["reward", "observation"])),
    )
    num_envs = draw(st.integers(1, 2))
    autoreset = draw(st.sampled_from(["disabled", "next_step"]))
    stored = draw(st.booleans())
    world = World(draw(st.integers(2, 12)), num_envs, autoreset, stored, [spec])
    for _ in range(draw(st.integers(1, 30))):
        final = draw(st.booleans()) and autoreset != "next_step" and not stored
        world.add(draw(st.tuples(*[KINDS] * num_envs)), final=final)
    rows = world.legal()
    if not rows:
        return
    # Twice each, in no order, as a sampler draws them.
    rows = draw(st.permutations(rows + rows))
    batch = world.draw([row[0] for row in rows], [row[1] for row in rows])
    expected = [wanted(world, spec, episode, t) for _, _, episode, t in rows]
    np.testing.assert_allclose(batch["discounted_return"], expected, rtol=2e-7)


@pytest.mark.parametrize("block", [1, 3, 128])
def test_long_episodes_are_read_in_blocks_none_twice(block, monkeypatch):
    monkeypatch.setattr(returns, "BLOCK_STEPS", block)
    world = World(64, 1, "disabled", False, [mr.DiscountedReturn(0.75)])
    for number in range(40):
        world.add(["t" if number == 39 else ""])
    view, read = world.buffer._reader, []
    plain = view.read

    def counting(self, paths, env_ids, positions):
        if paths == ("reward",):
            read.extend(positions.tolist())
        return plain(paths, env_ids, positions)

    monkeypatch.setattr(type(view), "read", counting)
    positions = [0, 1, 2, 17, 17, 38, 39]
    batch = world.draw([0] * len(positions), positions)
    rewards = [(number + 1) / 4 for number in range(40)]
    expected = [sum(0.75 ** (i - t) * rewards[i] for i in range(t, 40)) for t in positions]
    np.testing.assert_allclose(batch["discounted_return"], expected, rtol=2e-7)
    if block == 1:
        # The world draws every batch three times.
        assert sorted(read) == sorted(3 * list(range(40)))


def test_unknown_returns_are_nan_by_default():
    world = World(8, 1, "disabled", False, [mr.DiscountedReturn(0.5)])
    world.add([""])
    world.add([""])
    assert math.isnan(world.draw([0], [0])["discounted_return"][0])


@pytest.mark.parametrize("others", [[], [1000, 1198]])
def test_a_long_running_episode_is_not_known_whatever_else_is_drawn(others):
    world = World(1300, 1, "disabled", False, [mr.DiscountedReturn(0.5)])
    for _ in range(1200):
        world.add([""])
    # What is 1,100 steps on weighs 0.5 ** 1100, which no float64 holds.
    positions = [0, *others]
    found = world.draw([0] * len(positions), positions)["discounted_return"]
    assert np.isnan(found).all()


@pytest.mark.parametrize("positions", [[0], [0, 1], [0, 1, 3]])
@pytest.mark.parametrize("discount_with", ["reward", "observation"])
def test_what_follows_a_discount_of_0_does_not_count_even_if_infinite(positions, discount_with):
    fields = {
        "observation": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "life": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    spec = mr.DiscountedReturn(0.5, discount="life", discount_with=discount_with)
    buffer = mr.ReplayBuffer.create(None, mr.Schema(fields), 8, engine="memory", transforms=[spec])
    for number, reward in enumerate([1.0, 2.0, np.inf, 5.0]):
        buffer.add(observation=number, reward=reward, life=number != 1, terminated=number == 3)
    known = [2, 2] if discount_with == "reward" else [1, 0]
    expected = [[*known, np.inf, 5.0][position] for position in positions]
    assert buffer.take(0, positions)["discounted_return"].tolist() == expected


def test_rewards_of_several_elements_keep_their_shape():
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "reward": mr.Field((2,), "float16"),
            "terminated": mr.Field((), "bool"),
        }
    )
    buffer = mr.ReplayBuffer.create(
        None, schema, 8, engine="memory", transforms=[mr.DiscountedReturn(0.5), mr.NStep(2, 0.5)]
    )
    for number in range(3):
        reward = np.float16([number, 2 * number])
        buffer.add(observation=number, reward=reward, terminated=number == 2)
    batch = buffer.take(0, [0, 1, 2])
    assert batch["discounted_return"].tolist() == [[1, 2], [2, 4], [2, 4]]
    assert batch["reward"].tolist() == [[0.5, 1], [2, 4], [2, 4]]
    assert batch["reward"].dtype == batch["discounted_return"].dtype == np.float32


def test_values_of_a_wrong_shape_are_refused():
    spec = mr.DiscountedReturn(0.5, time_limit="bootstrap", value_fn=lambda seen: np.zeros((3, 3)))
    world = World(8, 1, "disabled", False, [spec])
    world.add(["u"], final=True)
    with pytest.raises(SchemaError, match=r"DiscountedReturn value_fn.*got \[3, 3\]"):
        world.draw([0], [0])


@pytest.mark.parametrize("clip", [3, (1,), (2, 1), ("a", 1)])
def test_bounds_that_are_no_two_numbers_are_refused(clip):
    with pytest.raises(SchemaError, match=r"DiscountedReturn clip must be \(lowest"):
        mr.DiscountedReturn(0.5, clip=clip)


@pytest.mark.parametrize(
    ("observation", "match"),
    [
        ({}, "the schema names no observation"),
        ({"observation": mr.Field.text(max_bytes=9)}, "'observation' must have one s"),
        (
            {
                "observation": {
                    "a": mr.Field((2,), "float32"),
                    "b": mr.Field((None,), "int32", max_length=3),
                }
            },
            "'observation/b' must have one shape",
        ),
    ],
)
def test_values_of_no_observation_of_one_shape_are_refused_at_opening(observation, match):
    schema = mr.Schema(
        {
            **observation,
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    spec = mr.DiscountedReturn(0.9, time_limit="bootstrap", value_fn=value)
    with pytest.raises(SchemaError, match=f"DiscountedReturn: .*{match}"):
        mr.ReplayBuffer.create(
            None,
            schema,
            8,
            engine="memory",
            transforms=[spec],
            heap_bytes=1 << 12 if match != "the schema names no observation" else None,
        )


@pytest.mark.parametrize(
    "before",
    [
        mr.FrameStack(2),
        mr.Cast("float64", "observation"),
        mr.Normalize({"observation/frame": 1.0}, {"observation/frame": 2.0}),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_values_of_observations_that_a_transform_changed_are_refused(before):
    spec = mr.DiscountedReturn(0.9, time_limit="bootstrap", value_fn=value)
    match = f"as they are stored, but {type(before).__name__} changed 'observation/"
    with pytest.raises(SchemaError, match=f"DiscountedReturn: .*{match}"):
        World(16, 1, "disabled", False, [before, spec])
    World(16, 1, "disabled", False, [spec, before])


def test_a_value_function_that_is_none_is_refused():
    with pytest.raises(SchemaError, match=r"DiscountedReturn value_fn must be.*got 3"):
        mr.DiscountedReturn(0.5, time_limit="bootstrap", value_fn=3)
