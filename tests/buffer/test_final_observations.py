"""Final observations as vector environments give them, and as lists."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

spaces = gymnasium.spaces
BOX = spaces.Box(-1e9, 1e9, (2,), np.float32)
SPACES = {
    "box": BOX,
    "discrete": spaces.Discrete(100_000),
    "tuple": spaces.Tuple((BOX, spaces.Discrete(100_000))),
    "dict": spaces.Dict(
        {"a": BOX, "b": spaces.Dict(c=spaces.Tuple((BOX, spaces.Discrete(100_000))))}
    ),
}
END = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}


class Counting(gymnasium.Env):
    """Its observation counts the steps: what follows is one more, also at ends."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind, env):
        self.observation_space = SPACES[kind]
        self.kind, self.length, self.count = kind, 2 + env, 1000 * env

    def seen(self):
        return seen(self.kind, self.count)

    def reset(self, *, seed=None, options=None):
        self.count += 100 - self.count % 100
        return self.seen(), {}

    def step(self, action):
        self.count += 1
        ended = self.count % 100 >= self.length
        return self.seen(), 1.0, ended and self.length % 2 == 0, ended, {}


def seen(kind, count):
    box, number = np.array([count, -count], np.float32), np.int64(count)
    return {
        "box": box,
        "discrete": number,
        "tuple": (box, number),
        "dict": {"a": box, "b": {"c": (box, number)}},
    }[kind]


def counts(data, kind):
    """Of observations, nested as they are stored, the counts; all leaves agree."""
    box = {"dict": "a", "tuple": "0"}.get(kind)
    if kind == "discrete":
        return data
    boxes = data if box is None else data[box]
    number = boxes[..., 0]
    assert (boxes[..., 1] == -number).all()
    if kind in ("tuple", "dict"):
        other = data["1"] if kind == "tuple" else data["b"]["c"]["1"]
        assert (other == number).all()
    return number


def stepped(vector, kind, num_envs, steps):
    """Steps and infos of a same-step vector environment."""
    envs = vector(
        [lambda env=env: Counting(kind, env) for env in range(num_envs)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    schema = mr.Schema.from_env(envs)
    observation, _ = envs.reset()
    observation = copied(observation)
    made = []
    for _ in range(steps):
        action = np.zeros(num_envs, np.int64)
        following, reward, terminated, truncated, infos = envs.step(action)
        step = {"observation": observation, "action": action, "reward": reward}
        made.append((step | {"terminated": terminated, "truncated": truncated}, infos))
        observation = copied(following)
    envs.close()
    return schema, made


def copied(nested):
    if isinstance(nested, dict):
        return {name: copied(value) for name, value in nested.items()}
    return tuple(map(copied, nested)) if isinstance(nested, tuple) else nested.copy()


def stacked(values):
    if isinstance(values[0], dict):
        return {name: stacked([v[name] for v in values]) for name in values[0]}
    if isinstance(values[0], tuple):
        return tuple(stacked(list(parts)) for parts in zip(*values, strict=True))
    return np.stack(values)


def assert_every_step_is_followed_by_its_count(buffer, kind, steps, num_envs):
    spans = [np.arange(first, stop) for first, stop in zip(*span(buffer), strict=True)]
    env_ids = np.repeat(np.arange(num_envs), [len(each) for each in spans])
    positions = np.concatenate(spans)
    final = (buffer.flags(env_ids, positions) & 8) != 0
    last = positions == buffer.heads[env_ids] - 1
    drawn = buffer.take(env_ids[~final & ~last], positions[~final & ~last])
    now = counts(drawn.data["observation"], kind)
    then = counts(drawn.data["next_observation"], kind)
    assert (then == now + 1).all()
    assert len(buffer) == steps * num_envs


def span(buffer):
    return buffer.span.first, buffer.span.stop


@pytest.mark.parametrize("call", ["add", "extend"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", SPACES)
def test_the_infos_of_a_same_step_vector_are_accepted_as_they_come(kind, num_envs, call):
    schema, made = stepped(SyncVectorEnv, kind, num_envs, 25)
    with mr.ReplayBuffer.create(None, schema, 99, num_envs, engine="memory") as buffer:
        if call == "add":
            for step, infos in made:
                buffer.add(step, final_observation=infos.get("final_obs"))
        else:
            block = stacked([step for step, _ in made])
            infos = [infos.get("final_obs") for _, infos in made]
            buffer.extend(block, final_observation=infos)
        assert_every_step_is_followed_by_its_count(buffer, kind, 25, num_envs)


@pytest.mark.parametrize("kind", ["box", "dict"])
def test_the_infos_of_processes_are_accepted_as_they_come(kind):
    schema, made = stepped(AsyncVectorEnv, kind, 2, 12)
    with mr.ReplayBuffer.create(None, schema, 99, 2, engine="memory") as buffer:
        for step, infos in made:
            buffer.add(step, final_observation=infos.get("final_obs"))
        assert_every_step_is_followed_by_its_count(buffer, kind, 12, 2)


def ring(num_envs=3, shape=(2,), **fields):
    schema = mr.Schema({"observation": mr.Field(shape, "float32")} | END | fields)
    return mr.ReplayBuffer.create(
        None, schema, 50, num_envs, engine="memory", autoreset="same_step"
    )


def ended(*where, num_envs=3):
    flags = np.isin(np.arange(num_envs), where)
    none = np.zeros(num_envs, bool)
    seen_ = np.zeros((num_envs, 2), np.float32)
    return {"observation": seen_, "terminated": flags, "truncated": none}


LAST = np.array([1, 2], np.float32)


def boxed(*values):
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.mark.parametrize(
    "finals",
    [
        [None, LAST, None],
        [None, LAST.tolist(), None],
        [None, tuple(LAST.tolist()), None],
        boxed(None, LAST, None),
        boxed(None, LAST.astype(np.float64), "of an episode that did not end"),
        np.array([LAST, LAST, LAST], object),
        [None, {"observation": LAST}["observation"], LAST],
    ],
    ids=range(7),
)
def test_lists_and_object_arrays_are_read_where_an_episode_ended(finals):
    with ring() as buffer:
        buffer.add(ended(1), final_observation=finals)
        buffer.add(ended(1), final_observation=None)
        assert buffer.heads.tolist() == [2, 3, 2]
        drawn = buffer.take([1], [0])
        assert (drawn["next_observation"] == LAST).all()
        assert drawn["terminated"].all()


def test_an_only_environment_gives_one_or_a_list_of_one():
    step = {"observation": [0.0, 0.0], "terminated": True, "truncated": False}
    with ring(num_envs=1) as buffer:
        for given in (LAST, [LAST], boxed(LAST), LAST[None], LAST.astype(object)):
            buffer.add(step, final_observation=given)
        finals = buffer.gather_all()
        assert (finals["observation"][1::2] == LAST).all()
        block = {name: np.asarray([value] * 4) for name, value in step.items()}
        block["terminated"] = np.array([False, True, False, True])
        buffer.extend(block, final_observation=[None, LAST, None, boxed(LAST)])
        last = buffer.gather_all()["observation"][10:]
        assert (last == np.array([0, 0, 1, 0, 0, 1])[:, None] * LAST).all()


def test_only_the_environments_of_the_step_have_final_observations():
    with ring() as buffer:
        step = {name: value[:2] for name, value in ended(1).items()}
        buffer.add(step, final_observation=[None, LAST], env_ids=[2, 0])
        assert buffer.heads.tolist() == [2, 0, 1]
        assert (buffer.get_field("observation", [0], [1]) == LAST).all()


@pytest.mark.parametrize(
    ("finals", "message"),
    [
        (
            [None, LAST, None],
            r"final_observation of.*ended with, got None\. Pass the infos of the sa",
        ),
        ([None, None], r"final_observation must.*the 3 environments, got 2"),
        (boxed(None, LAST, LAST[:1]), r"field.*got float32\[1\]"),
        (
            boxed(None, LAST, {"a": LAST}),
            r"final_observation of.*got \['observation/a'\]\. Nest it as the observati",
        ),
        (boxed(None, LAST, "x"), "'final_observation/observation of env.* got str 'x'"),
    ],
    ids=range(5),
)
def test_a_final_observation_that_is_none_or_does_not_fit_is_refused(finals, message):
    with ring() as buffer:
        with pytest.raises(SchemaError, match=message):
            buffer.add(ended(1, 2), final_observation=finals)
        assert buffer.heads.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("finals", "message"),
    [
        ([None, boxed(None, LAST, None)], r"final_observation of.*ended with, got None"),
        ([None], r"final_observation must.*of the 2 steps, got 1\. Put None where no episod"),
        ([[LAST] * 3, [None]], r"final_observation must.*the 3 environments, got 1"),
        ([boxed(LAST, LAST, LAST), {"a": 1}], r"final_observation must.*the 3 environments, got 0"),
    ],
    ids=range(4),
)
def test_final_observations_of_many_steps_that_do_not_fit_are_refused(finals, message):
    block = stacked([ended(1), ended(1)])
    with ring() as buffer:
        with pytest.raises(SchemaError, match=message):
            buffer.extend(block, final_observation=finals)
        assert buffer.heads.tolist() == [0, 0, 0]
