"""Sources of environments whose observations vary in length."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import mmreplay as mr
from mmreplay.buffer.validation import StepValidator
from mmreplay.errors import SchemaError
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


# Whole recordings.


def recorded(env_ids, buffer):
    """What a ring holds, environment by environment, as `as_lists` gives it."""
    every = buffer.gather_all()
    found = {env_id: [] for env_id in env_ids}
    for number, env_id in enumerate(every.env_ids.tolist()):
        one = {
            path: every[path][number].tolist() for path in buffer.schema.role_paths("observation")
        }
        if "observation/mission" in one:
            text = every["observation/mission"][number : number + 1].text()[0]
            one["observation/mission"] = text
        found[env_id].append(one)
    return found


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_observations_that_vary_are_recorded_to_the_step(tmp_path, mode):
    envs = [Speaking(seed) for seed in range(1 if mode is None else 3)]
    env = envs[0]
    if mode is not None:
        env = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)
    report = mr.record(env, tmp_path / "ring", steps=21, seed=0)
    assert report.heap_bytes > 0
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        assert buffer.metadata.heap_nbytes == report.heap_bytes
        fields = buffer.schema.fields.values()
        row_nbytes = 1 + sum(field.nbytes for field in fields) - 2
        assert report.nbytes == (
            int(buffer.heads.sum()) * row_nbytes + int(buffer.view.heap_used.sum())
        )
        rows = recorded(range(len(envs)), buffer)
    for env_id, one in enumerate(envs):
        logged = [as_lists(sample) for sample in one.log]
        assert rows[env_id] == logged[: len(rows[env_id])]
        assert len(rows[env_id]) >= 7


def test_the_heap_is_planned_or_given_and_that_of_a_buffer_stays(tmp_path):
    path = tmp_path / "ring"
    report = mr.record(Speaking(), path, steps=5, capacity=99, heap_bytes="4 MiB")
    assert report.heap_bytes == 4 << 20
    assert mr.record(Speaking(), path, steps=5).heap_bytes == 4 << 20
    assert mr.record(Speaking(), path, steps=5, heap_bytes=4 << 20).held == 15
    # As it was rounded up, so are later ones.
    assert mr.record(Speaking(), path, steps=5, heap_bytes=(4 << 20) - 9).held == 20
    with pytest.raises(
        SchemaError, match=r"heap_bytes must be 4194304, .*got 8192\. Leave it out, or .* resize\.$"
    ):
        mr.record(Speaking(), path, steps=5, heap_bytes=8192)
    with pytest.raises(SchemaError, match="heap_bytes must be None without a field"):
        mr.record("CartPole-v1", tmp_path / "other", steps=5, heap_bytes=8192)
    with pytest.raises(SchemaError, match="heap_bytes must be at least"):
        mr.record(Speaking(), tmp_path / "small", steps=5, heap_bytes=4096)


def test_the_first_sample_of_an_environment_plans_a_heap_that_holds_all(tmp_path):
    env = Speaking()
    mr.record(env, tmp_path / "ring", steps=40, capacity=50)
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        # A sixteenth of 4,096 items is far more than these samples have.
        assert int(buffer.heads[0]) > 50
        assert int(buffer.span.lengths[0]) == 50


@pytest.mark.parametrize("mode", [None, AutoresetMode.SAME_STEP])
def test_a_ring_without_the_fields_that_vary_is_gone_on_with_and_warns(tmp_path, mode):
    path = tmp_path / "ring"
    env = Speaking()
    if mode is not None:
        env = SyncVectorEnv([Speaking], autoreset_mode=mode)
    exclude = [f"observation/{name}" for name in ("mission", "plan", "path", "world")]
    schema = Schema.from_env(env, exclude=exclude)
    autoreset = "disabled" if mode is None else "same_step"
    mr.ReplayBuffer.create(path, schema, 100, autoreset=autoreset).close()
    with pytest.warns(
        RuntimeWarning,
        match="ring has no field 'observation/mission', whose values vary, so they are "
        "left out as before. Add the field with add_field, or record to another path",
    ):
        assert mr.record(env, path, steps=9).held == 9
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.schema.varying == ()
        inner = env if mode is None else env.envs[0]
        assert [row["observation/speed"] for row in recorded([0], buffer)[0]] == [
            sample["speed"].tolist() for sample in inner.log[: int(buffer.heads[0])]
        ]


def test_fields_that_vary_are_recorded_once_they_are_added(tmp_path):
    path, env = tmp_path / "ring", Speaking()
    exclude = [f"observation/{name}" for name in ("mission", "plan", "path", "world")]
    mr.ReplayBuffer.create(path, Schema.from_env(env, exclude=exclude), 100).close()
    with pytest.warns(RuntimeWarning, match="whose values vary"):
        mr.record(env, path, steps=9)
    wanted = Schema.from_env(env)
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        old = int(buffer.heads[0])
        for name in wanted.varying:
            empty = "" if wanted[name].kind == "text" else []
            buffer.add_field(name, wanted[name], empty, heap_bytes="1 MiB")
    again = Speaking()
    assert mr.record(again, path, steps=9).steps == 9
    with mr.ReplayBuffer.open(path) as buffer:
        missions = buffer.gather_all()["observation/mission"].text()
        new = int(buffer.heads[0]) - old
        assert missions[:old] == [""] * old
        assert missions[old:] == [each["mission"] for each in again.log[:new]]
        assert any(missions[old:])


class Bare(Speaking):
    """Gives graphs without edges, and empty sequences of points."""

    observation_space = spaces.Dict(
        world=SPACE["world"], points=spaces.Sequence(spaces.Box(-1, 1, (2,)))
    )

    def _sample(self):
        nodes = np.ones((1, 2), np.float32)
        return {"world": spaces.GraphInstance(nodes, None, None), "points": ()}


@pytest.mark.parametrize("vector", [False, True])
def test_graphs_without_edges_and_empty_sequences_are_recorded(tmp_path, vector):
    env = SyncVectorEnv([Bare, Bare]) if vector else Bare()
    mr.record(env, tmp_path / "ring", steps=8)
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        rows = buffer.gather_all()
    world = "observation/world"
    assert all(each.tolist() == [[1, 1]] for each in rows[f"{world}/nodes"])
    shapes = {f"{world}/edges": (0, 3), f"{world}/edge_links": (0, 2)}
    for path, shape in (shapes | {"observation/points": (0, 2)}).items():
        assert {each.shape for each in rows[path]} == {shape}


class Talking(gym.Env):
    """Says more at each step: the second of an episode is longer than spaces state."""

    observation_space = spaces.Dict(
        path=spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True), word=spaces.Text(3)
    )
    action_space = spaces.Discrete(2)

    def __init__(self, first=10):
        self.first = first

    def _say(self):
        path = np.ones((self.first + 5_000 * self.age, 2), np.float32)
        return {"path": path, "word": "é" * (20 * self.age)}

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return self._say(), {}

    def step(self, action):
        self.age += 1
        return self._say(), 1.0, self.age == 2, False, {}


@pytest.mark.parametrize(("first", "vector"), [(10, False), (5_000, False), (10, True)])
def test_the_error_about_a_long_value_has_the_call_for_longer_ones(tmp_path, first, vector):
    def made():
        if vector:
            return SyncVectorEnv(
                [Talking, Talking],
                autoreset_mode=AutoresetMode.NEXT_STEP,
                observation_mode="different",
            )
        return Talking(first)

    env = made()
    with pytest.raises(SchemaError, match="must have at most") as caught:
        mr.record(env, tmp_path / "ring", steps=12, capacity=50)
    path = tmp_path / "ring"
    for _ in range(5):
        (note,) = caught.value.__notes__
        told, _, calls = note.partition(": ")
        assert told == ("to record longer values, make a buffer for them and record into it")
        made_, _, recorded_ = calls.rpartition("; ")
        exec(made_, {"mr": mr, "env": env})
        path = path.with_name(f"{path.name}-longer")
        assert recorded_ == f"mr.record(env, {str(path)!r}, ...)"
        try:
            env = made()
            assert mr.record(env, path, steps=12).held == 12
            break
        except SchemaError as error:
            caught.value.__notes__ = error.__notes__
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.gather_all()["observation/path"].lengths.max() > 5_000
        assert buffer.schema["observation/path"].max_length > 5_000


def test_another_kind_of_field_that_varies_is_no_such_field(tmp_path):
    schema = mr.Schema.from_env(Talking())
    for path, field in (
        ("observation/path", mr.Field((None, 3), "float32", max_length=9)),
        ("observation/path", mr.Field((None, 2), "float64", max_length=9)),
        ("observation/path", mr.Field((2,), "float32")),
        ("observation/word", mr.Field.bytes(max_bytes=12)),
    ):
        other = mr.Schema.from_flat({**schema.fields, path: field})
        there = tmp_path / str(len(list(tmp_path.iterdir())))
        mr.ReplayBuffer.create(there, other, 9, heap_bytes="1 MiB", autoreset="disabled").close()
        with pytest.raises(SchemaError, match=f"field '{path}': the env.* to another"):
            mr.record(Talking(), there, steps=2)
