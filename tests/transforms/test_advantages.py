"""Lambda returns and advantages against sums written out, over episodes in lists.

The oracle takes the forward view: a lambda return is a weighted mean of n-step returns,
an advantage a sum of discounted errors. Nothing in it is recursive.
"""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.transforms import advantages
from tests.slices import count
from tests.transforms.world import World, distance

KINDS = st.sampled_from(["", "", "", "t", "u", "tu"])
MODES = ["disabled", "same_step", "next_step"]


def critic(observations):
    """A value function that tells every observation apart."""
    return observations["observation/frame"][:, 0] / 8


def other_critic(observations):
    return torch.from_numpy(observations["observation/frame"][:, 0] / 4 + 1)


def value_of(observation, function):
    frame = np.array([observation["frame"]])
    return float(function({"observation/frame": frame})[0])


def values_of(world, spec, episode):
    """V of each step, and of what follows the last one; None where it is not known."""
    if callable(spec.value):
        values = [value_of(step["observation"], spec.value) for step in episode.steps]
    else:
        values = [float(step[spec.value]) for step in episode.steps]
    if "t" in episode.end:
        return values, 0.0
    last = episode.steps[-1]
    if isinstance(spec.bootstrap, str):
        return values, float(last[spec.bootstrap])
    function = spec.value if spec.bootstrap is None else spec.bootstrap
    if callable(function):
        after = last["next_observation"] if world.stored else episode.final
        return values, None if after is None else value_of(after, function)
    if world.autoreset == "next_step" and episode.final is not None:
        # The action of the environment's own final row, by which values are told.
        return values, float(episode.final["frame"][0])
    return values, None


def wanted(world, spec, episode, t):
    """The advantage and the lambda return of step t, or None for each."""
    values, after = values_of(world, spec, episode)
    count = len(values) - (after is None)
    if t >= count:
        return None, None
    nexts = [*values[1:], after]
    rewards = [float(step["reward"]) for step in episode.steps]
    stop = min(count, t + (spec.horizon or count))
    # n-step returns, each bootstrapped from the value that follows.
    returns = [
        sum(spec.gamma ** (i - t) * rewards[i] for i in range(t, t + n))
        + spec.gamma**n * nexts[t + n - 1]
        for n in range(1, stop - t + 1)
    ]
    weights = [(1 - spec.lam) * spec.lam ** (n - 1) for n in range(1, len(returns))]
    weights.append(spec.lam ** (len(returns) - 1))
    target = sum(w * g for w, g in zip(weights, returns, strict=True))
    advantage = sum(
        (spec.gamma * spec.lam) ** (i - t) * (rewards[i] + spec.gamma * nexts[i] - values[i])
        for i in range(t, stop)
    )
    return advantage, target


def compare(world, gae, rows):
    """Draw rows, and hold both transforms to the sums."""
    batch = world.draw([row[0] for row in rows], [row[1] for row in rows])
    pairs = [wanted(world, gae, episode, t) for _, _, episode, t in rows]
    default = gae.default
    advantage, target = (
        [default if one is None else one for one in column] for column in zip(*pairs, strict=True)
    )
    found = [batch[name] for name in ("advantage", "value_target", "lambda_return")]
    for one, expected in zip(found, (advantage, target, target), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, expected, rtol=2e-6, atol=2e-5)
    return pairs


def both(**options):
    """The two transforms with the same arguments."""
    return [mr.GAE(**options), mr.LambdaReturn(**options)]


@settings(max_examples=count(120, 25), deadline=None)
@given(st.data())
def test_estimates_equal_the_sums(data):
    draw = data.draw
    transforms = both(
        gamma=draw(st.sampled_from([0.0, 0.5, 1.0])),
        lam=draw(st.sampled_from([0.0, 0.5, 1.0])),
        value=draw(st.sampled_from(["action", critic])),
        bootstrap=draw(st.sampled_from([None, "life", other_critic])),
        horizon=draw(st.sampled_from([None, None, 1, 2, 5])),
        default=-7.0,
    )
    num_envs = draw(st.integers(1, 2))
    autoreset = draw(st.sampled_from(MODES))
    stored = draw(st.booleans())
    world = World(draw(st.integers(2, 12)), num_envs, autoreset, stored, transforms)
    for _ in range(draw(st.integers(1, 30))):
        final = draw(st.booleans()) and autoreset != "next_step" and not stored
        world.add(draw(st.tuples(*[KINDS] * num_envs)), final=final)
        if draw(st.integers(0, 19)) == 0:
            world.clear()
    rows = world.legal()
    if rows:
        # Twice each, in no order, as a sampler draws them.
        compare(world, transforms[0], draw(st.permutations(rows + rows)))


@pytest.mark.parametrize("autoreset", MODES)
@pytest.mark.parametrize("stored", [False, True], ids=["derived", "stored"])
@pytest.mark.parametrize("bootstrap", [None, "life", other_critic])
@pytest.mark.parametrize("value", ["action", pytest.param(critic, marks=pytest.mark.slow)])
@pytest.mark.sliced(1)
def test_every_short_story_of_ends_is_as_the_sums_say(autoreset, stored, bootstrap, value):
    transforms = both(gamma=0.5, lam=0.75, value=value, bootstrap=bootstrap, default=-7.0)
    known = set()
    for kinds in itertools.product(["", "t", "u"], repeat=4):
        for final in {False, autoreset != "next_step" and not stored}:
            world = World(5, 1, autoreset, stored, transforms)
            for kind in kinds:
                world.add([kind], final=final)
            rows = world.legal()
            if rows:
                pairs = compare(world, transforms[0], rows)
                known |= {pair[0] is not None for pair in pairs}
    # What is drawn has its next observation: only values alone may be unknown after it.
    alone = value == "action" and bootstrap is None
    some = alone and (stored or autoreset != "next_step")
    assert known == ({True, False} if some else {True})


@pytest.mark.parametrize("how", ["break", "truncate", "continue"])
@pytest.mark.parametrize("bootstrap", [None, "life"])
def test_episodes_that_a_restart_broke_off_bootstrap_where_values_are_known(
    tmp_path, how, bootstrap
):
    transforms = both(gamma=0.5, lam=0.75, value="action", bootstrap=bootstrap, default=-7.0)
    world = World(9, 2, "disabled", True, transforms, tmp_path / "ring")
    for number in range(12):
        if number in (4, 7):
            world.reopen(how)
        world.add(["t" if number == 5 else "", ""])
        compare(world, transforms[0], world.legal())
    world.buffer.close()


def test_rollouts_are_those_of_ppos_loop():
    """Backwards over ``[T, E]``, as on-policy code has it, from one stored rollout."""
    rng, gamma, lam = np.random.default_rng(0), 0.99, 0.95
    steps, envs = 40, 3
    fields = {
        "observation": mr.Field((2,), "float32"),
        "reward": mr.Field((), "float32"),
        "value": mr.Field((), "float32"),
        "next_value": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
    transform = mr.GAE(gamma, lam, bootstrap="next_value")
    buffer = mr.ReplayBuffer.create(
        None,
        mr.Schema(fields),
        steps,
        envs,
        engine="memory",
        autoreset="same_step",
        transforms=[transform],
    )
    reward, value = rng.random((2, steps, envs)).astype(np.float32)
    ends = rng.random((steps, envs)) < 0.15
    terminated = ends & (rng.random((steps, envs)) < 0.5)
    truncated = ends & ~terminated
    next_value = np.concatenate([value[1:], rng.random((1, envs))]).astype(np.float32)
    next_value[ends] = rng.random(int(ends.sum()))
    shape = (steps, envs)
    buffer.extend(
        observation=rng.random((*shape, 2), np.float32),
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
    )
    expected, after = np.zeros(shape), np.zeros(envs)
    for t in reversed(range(steps)):
        following = np.where(terminated[t], 0, next_value[t])
        delta = reward[t] + gamma * following - value[t]
        after = delta + gamma * lam * np.where(ends[t], 0, after)
        expected[t] = after
    view = buffer._reader
    ids, places = np.meshgrid(range(envs), range(steps), indexing="ij")
    ids, places = ids.ravel(), places.ravel()
    within = places < view.starts.stop[ids]
    legal = within & view.legal(ids, places)
    # A truncated step without its final observation is no transition; nor the newest.
    assert set(zip(*np.nonzero(~legal.reshape(envs, steps).T), strict=True)) == {
        *zip(*np.nonzero(truncated), strict=True),
        *((steps - 1, env_id) for env_id in range(envs)),
    }
    ids, places = ids[legal], places[legal]
    batch = buffer.take(ids, places)
    np.testing.assert_allclose(batch["advantage"], expected[places, ids], atol=1e-5)
    targets = expected[places, ids] + value[places, ids]
    np.testing.assert_allclose(batch["value_target"], targets, atol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 128])
def test_long_episodes_are_read_in_blocks_none_twice(block, monkeypatch):
    monkeypatch.setattr(advantages, "BLOCK_STEPS", block)
    world = World(64, 1, "disabled", False, [mr.GAE(0.75, 0.5, "action")])
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
    rows = [(0, p, world.episodes[0][0], p) for p in positions]
    batch = world.draw([0] * len(rows), positions)
    expected = [wanted(world, world.buffer.transforms[0], *row[2:])[0] for row in rows]
    np.testing.assert_allclose(batch["advantage"], expected, rtol=1e-6)
    if block == 1:
        # The world draws every batch three times.
        assert sorted(read) == sorted(3 * list(range(40)))


def test_a_function_sees_observations_as_the_transforms_before_show_them():
    seen = []

    def of_stacks(observations):
        seen.append(observations["observation/frame"].shape[1:])
        return observations["observation/frame"][:, :, 0].sum(1) / 8

    transforms = [
        mr.FrameStack(3, "observation/frame"),
        mr.LambdaReturn(0.5, 1.0, of_stacks, horizon=2, name="mine"),
    ]
    world = World(30, 1, "next_step", False, transforms)
    for number in range(20):
        world.add(["u" if number % 6 == 4 else ""])
    for env_id, position, episode, t in world.legal():
        found = float(world.draw([env_id], [position])["mine"][0])
        frames = [o["frame"][0] for o in episode.observations()]
        stop = min(t + 2, len(episode.steps), len(frames) - 1)
        stack = [frames[max(0, stop - back)] for back in range(3)]
        rewards = [episode.steps[i]["reward"] * 0.5 ** (i - t) for i in range(t, stop)]
        assert found == sum(rewards) + 0.5 ** (stop - t) * sum(stack) / 8
    assert set(seen) == {(3, 2)}


def test_values_that_do_not_count_are_not_looked_at():
    fields = dict.fromkeys(["observation", "reward", "value"], mr.Field((), "float32"))
    fields["terminated"] = mr.Field((), "bool")
    nothing = mr.LambdaReturn(0.5, 1.0)
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(fields), 8, engine="memory", transforms=[nothing]
    )
    for number in range(3):
        # Values that are not known: with lam=1 and a terminated end none is needed.
        buffer.add(observation=0, reward=1, value=math.nan, terminated=number == 2)
    assert buffer.take(0, [0, 1, 2])["lambda_return"].tolist() == [1.75, 1.5, 1.0]
    buffer.add(observation=0, reward=math.inf, value=2, terminated=False)
    buffer.add(observation=0, reward=1, value=2, terminated=False)
    found = buffer.take(0, [1, 3])["lambda_return"].tolist()
    assert found == [1.5, math.inf]


def test_values_may_be_written_later_and_have_several_elements():
    pair = mr.Field((2,), "float64")
    fields = {
        "observation": mr.Field((), "int64"),
        "reward": pair,
        "value": mr.Field((2,), "float32", mutable=True),
        "terminated": mr.Field((), "bool"),
    }
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(fields), 8, engine="memory", transforms=[mr.GAE(0.5, 0.5), mr.NStep(2, 0.5)]
    )
    for number in range(3):
        buffer.add(
            observation=number,
            reward=[number, 2 * number],
            value=[math.nan] * 2,
            terminated=number == 2,
        )
    buffer.write_field("value", [0] * 3, range(3), np.float32([[1, 2], [3, 4], [5, 6]]))
    batch = buffer.take(0, [0, 1, 2])
    assert batch["advantage"].dtype == np.float64
    # delta = r + V' / 2 - V, and A = delta + A' / 4.
    assert batch["advantage"][2].tolist() == [2 - 5, 4 - 6]
    assert batch["advantage"][1].tolist() == [1 + 2.5 - 3 - 0.75, 2 + 3 - 4 - 0.5]
    assert batch["advantage"][0].tolist() == [0.5 - 0.0625, 0 + 0.125]
    values = np.array([[1, 2], [3, 4], [5, 6]])
    assert (batch["value_target"] - values == batch["advantage"]).all()


def test_unknown_estimates_are_nan_by_default():
    world = World(8, 1, "disabled", True, both(gamma=0.5, value="action"))
    world.add([""])
    world.add([""])
    batch = world.draw([0, 0], [0, 1])
    for name in ("advantage", "value_target", "lambda_return"):
        assert np.isnan(batch[name]).tolist() == [False, True]


def test_transforms_are_values_that_pickle():
    options = {"value": critic, "bootstrap": "life", "horizon": 3, "default": 0.0}
    for transform in both(gamma=0.5, **options):
        assert pickle.loads(pickle.dumps(transform)) == transform
    names = mr.GAE(0.5, value="action", target=None, name="mine")
    world = World(8, 1, "disabled", False, [names])
    world.add(["t"])
    batch = world.draw([0], [0])
    assert "value_target" not in batch.fields
    assert batch["mine"].tolist() == [0.25 - 1]


HER = mr.HER("future", 0.5, distance)
REFUSED = [
    ({"gamma": 2}, r"GAE gamma must be a number in \[0, 1\], got 2"),
    ({"lam": -1}, r"GAE lam must be a number in \[0, 1\], got -1"),
    ({"value": 3}, r"GAE value must be the path of a stored.*got 3"),
    ({"value": None}, r"GAE value must be the path of a stored.*got None"),
    ({"bootstrap": ""}, r"GAE bootstrap must be the path of a stored.*got ''"),
    ({"horizon": 0}, "GAE horizon must be an integer of at least 1, got 0"),
    ({"default": "a"}, "GAE default must be a number.*got 'a'"),
    ({"name": ""}, "GAE name must be the name of a field, got ''"),
    ({"target": 3}, "GAE target must be the name of a field, got 3"),
]
UNFIT = [
    ([mr.GAE(0.5)], r"GAE value must be a stored field of numbers.*got 'value'"),
    ([mr.LambdaReturn(0.5)], r"LambdaReturn value must be a stored field.*got 'value'"),
    ([mr.GAE(0.5, value="terminated")], r"GAE value must be a.*got 'terminated'"),
    (
        [mr.GAE(0.5, value="observation/frame")],
        r"GAE value must have shape \[\] as.*got 'observation/frame' of shape \[2\]",
    ),
    ([mr.GAE(0.5, value="life", bootstrap="x")], r"GAE bootstrap must be a.*got 'x'"),
    ([mr.GAE(0.5, value="life", name="reward")], "GAE: the name 'reward' must be new"),
    ([mr.NStep(2, 0.5), mr.GAE(0.5, value="life")], r"GAE: the reward.*got 'reward'"),
    ([HER, mr.LambdaReturn(0.5, value="life")], "put LambdaReturn before"),
    ([mr.GAE(0.5, value="life"), HER], "HER must not follow GAE in transforms, which"),
    ([mr.LambdaReturn(0.5, value="life"), HER], "HER must not follow LambdaReturn in"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_arguments_that_cannot_be_are_refused(options, reason):
    with pytest.raises(SchemaError, match=reason):
        mr.GAE(**{"gamma": 0.5, "value": "life"} | options)


@pytest.mark.parametrize(("transforms", "reason"), UNFIT)
def test_what_does_not_fit_is_refused_with_the_reason(transforms, reason):
    with pytest.raises(SchemaError, match=reason):
        World(8, 1, "disabled", False, transforms)


def test_schemas_without_rewards_or_observations_are_refused():
    one = mr.Field((), "float32")
    with pytest.raises(SchemaError, match=r"GAE: the reward must be one.*got None"):
        mr.ReplayBuffer.create(
            None, mr.Schema({"value": one}), 8, engine="memory", transforms=[mr.GAE(0.5)]
        )
    with pytest.raises(SchemaError, match="GAE value is a function of observations"):
        mr.ReplayBuffer.create(
            None,
            mr.Schema({"reward": one}),
            8,
            engine="memory",
            transforms=[mr.GAE(0.5, value=critic)],
        )


def test_a_function_that_gives_no_value_for_each_is_refused():
    world = World(8, 1, "disabled", False, [mr.GAE(0.5, value=lambda seen: np.zeros(9))])
    world.add(["t"])
    with pytest.raises(SchemaError, match=r"GAE: the value function must return \[1\], got \[9\]"):
        world.draw([0], [0])


@pytest.mark.parametrize("transform", [mr.GAE(0.9), mr.LambdaReturn(0.9)])
def test_ends_of_agents_are_refused(transform):
    """An agent that terminated has no next value while the others go on."""
    fields = dict.fromkeys(["reward", "value"], mr.Field((2,), "float32"))
    fields |= dict.fromkeys(["terminated", "truncated"], mr.Field((2,), "bool"))
    with pytest.raises(SchemaError, match="one value a step, got 2 agents"):
        mr.ReplayBuffer.create(None, mr.Schema(fields), 8, engine="memory", transforms=[transform])
