"""Arrays of numpy.ma: what lies under a mask means nothing, and is never taken."""

from collections import UserList, deque

import gymnasium as gym
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import Block
from mmreplay.convert.buffer_writer import open_writer
from mmreplay.convert.description import plain
from mmreplay.errors import SchemaError

OBSERVATION = np.array([1.0, -9999.0], np.float32)
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "float32"),
        "count": mr.Field((), "int64"),
        "tokens": mr.Field((None,), "int32", max_length=4),
        "reward": mr.Field((), "float32", mutable=True),
        "terminated": mr.Field((), "bool"),
    }
)
ENGINES = ["memory", "memmap", "zarr"]


def masked(values, *positions_of):
    """A masked array whose dtype and shape are those that need no conversion."""
    values = np.asarray(values)
    mask = np.zeros(values.shape, bool)
    for place in positions_of:
        mask.reshape(-1)[place] = True
    return np.ma.MaskedArray(values, mask)


def step(num_envs=1, **changed):
    lead = () if num_envs == 1 else (num_envs,)
    made = {
        "observation": np.ones((*lead, 2), np.float32),
        "count": np.ones(lead, np.int64),
        "tokens": [np.ones(3, np.int32)] * num_envs,
        "reward": np.ones(lead, np.float32),
        "terminated": np.zeros(lead, bool),
    }
    if num_envs == 1:
        made["tokens"] = made["tokens"][0]
    return {**made, **changed}


def make(tmp_path, engine="memory", num_envs=1):
    path = None if engine == "memory" else tmp_path / "b"
    return mr.ReplayBuffer.create(
        path, SCHEMA, 16, num_envs, engine=engine, autoreset="disabled", heap_bytes=8192
    )


VALUES = {
    "observation": masked(OBSERVATION, 1),
    "observation of float64": masked(OBSERVATION.astype(np.float64), 1),
    "observation in a list": [1.0, np.ma.masked],
    "count": masked(np.int64(7), 0),
    "count of int32": masked(np.int32(7), 0),
    "tokens": masked(np.arange(3, dtype=np.int32), 0),
    "tokens of int64": masked(np.arange(3), 0),
    "tokens in a list": [1, np.ma.masked],
    "reward": np.ma.masked,
    "terminated": masked(np.zeros((), bool), 0),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", VALUES)
def test_a_masked_value_is_refused_by_its_field(tmp_path, engine, case):
    field = case.split(" ", maxsplit=1)[0]
    with make(tmp_path, engine) as buffer:
        buffer.add(step())
        with pytest.raises(
            SchemaError,
            match=f"field '{field}' must have a value in each place, got 1 masked "
            r"item\. Pass values for them, such as array\.filled\(0\), or leave",
        ):
            buffer.add(step(**{field: VALUES[case]}))
        assert len(buffer) == 0 or buffer.heads[0] == 1
        assert buffer.heads.tolist() == [1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_envs", [1, 2])
def test_masked_columns_of_a_block_are_refused(tmp_path, engine, num_envs):
    lead = (3,) if num_envs == 1 else (3, num_envs)
    fine = {
        "observation": np.ones((*lead, 2), np.float32),
        "count": np.ones(lead, np.int64),
        "tokens": np.ones((*lead, 2), np.int32),
        "reward": np.ones(lead, np.float32),
        "terminated": np.zeros(lead, bool),
    }
    with make(tmp_path, engine, num_envs) as buffer:
        buffer.extend(fine)
        for field, column in fine.items():
            for bad in (masked(column, 0, -1), list(masked(column, 0, -1))):
                with pytest.raises(
                    SchemaError, match=rf"'{field}' must have a value .* got \d masked i"
                ):
                    buffer.extend({**fine, field: bad})
        assert buffer.heads.tolist() == [3] * num_envs


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_array_that_masks_nothing_is_stored(tmp_path, num_envs):
    with make(tmp_path, "memmap", num_envs) as buffer:
        made = step(num_envs)
        buffer.add(
            {
                name: [masked(v) for v in value]
                if name == "tokens" and num_envs > 1
                else masked(value)
                for name, value in made.items()
            }
        )
        rows = buffer.gather_all()
        assert (rows["observation"] == 1).all()
        assert (rows["tokens"].values == 1).all()
        assert rows["count"].tolist() == [1] * num_envs


def finals():
    one = masked(OBSERVATION, 1)
    fine = np.ones(2, np.float32)
    boxed = np.empty(2, object)
    boxed[:] = [one, None]
    return {"an array": np.ma.stack([one, masked(fine)]), "a list": [one, fine], "objects": boxed}


@pytest.mark.parametrize("case", finals())
@pytest.mark.parametrize("block", [False, True])
def test_a_masked_final_observation_is_refused(tmp_path, case, block):
    with make(tmp_path, num_envs=2) as buffer:
        fields = step(2, terminated=np.array([True, False]))
        final = finals()[case]
        if block:
            tokens = [fields.pop("tokens")]
            fields = {name: np.asarray(value)[None] for name, value in fields.items()}
            fields["tokens"] = tokens
            final = [final]
        call = buffer.extend if block else buffer.add
        with pytest.raises(SchemaError, match=r"final_observation.* 1 masked item"):
            call(fields, final_observation=final)
        assert buffer.heads.tolist() == [0, 0]


def test_masked_values_of_a_rewrite_are_refused(tmp_path):
    with make(tmp_path) as buffer:
        buffer.add(step())
        with pytest.raises(SchemaError, match=r"field 'reward' .* got 1 masked item\."):
            buffer.write_field("reward", [0], [0], masked(np.float32([5.0]), 0))
        assert buffer.gather_all()["reward"].tolist() == [1.0]
        buffer.write_field("reward", [0], [0], masked(np.float32([5.0])))
        assert buffer.gather_all()["reward"].tolist() == [5.0]


def test_masked_environments_are_refused(tmp_path):
    with (
        make(tmp_path, num_envs=2) as buffer,
        pytest.raises(SchemaError, match=r"env_ids must have a value .* 1 masked item"),
    ):
        buffer.add(step(2), env_ids=masked([0, 1], 1))


def prioritized(**_):
    schema = mr.Schema(
        {"observation": mr.Field((), "int64"), "next_observation": mr.Field((), "int64")}
    )
    buffer = mr.ReplayBuffer.create(
        None, schema, 8, engine="memory", sampler=mr.PrioritizedSampler(seed=0)
    )
    buffer.extend(observation=np.arange(4), next_observation=np.arange(4))
    return buffer


@pytest.mark.parametrize("joined", [False, True])
def test_masked_priorities_are_refused(joined):
    source = buffer = prioritized()
    if joined:
        source = mr.concat([buffer, prioritized()], by="priority")
    batch = source.sample(2)
    before = source.sample(8).probabilities
    with pytest.raises(SchemaError, match=r"must have a value .* got 1 masked item"):
        source.update_priorities(batch, masked([7.0, 8.0], 0))
    np.testing.assert_array_equal(source.sample(8).probabilities, before)
    assert source.update_priorities(batch, masked([7.0, 8.0])) == 0
    assert not np.array_equal(source.sample(8).probabilities, before)


def test_masked_leaves_of_a_tree_are_refused():
    tree = mr.SumTree(4)
    first = masked([0, 1], 1)
    for call in (
        lambda: tree.set(first, [1.0, 2.0]),
        lambda: tree.get(first),
        lambda: mr.SegmentTree(4, "min").set(first, [1.0, 2.0]),
    ):
        with pytest.raises(SchemaError, match=r"tree indices must .* got 1 masked"):
            call()
    with pytest.raises(SchemaError, match=r"tree values must .* got 1 masked item"):
        tree.set([0, 1], masked([1.0, 2.0], 1))
    assert tree.total == 0
    tree.set([0, 1], masked([1.0, 2.0]))
    assert tree.total == 3
    for find in (tree.find, tree.find_sum_bound):
        with pytest.raises(SchemaError, match=r"prefix sums must .* got 1 masked item"):
            find(masked([0.5, 2.0], 0))


@pytest.mark.parametrize("which", [0, 1])
def test_masked_moments_are_refused(which):
    moments = [{"reward": [1.0]}, {"reward": [1.0]}]
    mr.Normalize(*moments)
    moments[which] = {"reward": masked([1.0], 0)}
    with pytest.raises(SchemaError, match=r"mean or std must have .* got 1 masked"):
        mr.Normalize(*moments)
    with pytest.raises(SchemaError, match=r"'reward' must have .* got 1 masked"):
        mr.Normalize.fit([{"reward": masked([1.0, 2.0], 0)}], "reward")


class Giver:
    """Gives an array to numpy, as those of other libraries do."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "make_value",
    [
        lambda hidden: Giver(masked(np.float32([1, 2]), *hidden)),
        lambda hidden: deque([np.ma.masked if hidden else 1.0, 2.0]),
        lambda hidden: UserList([np.ma.masked if hidden else 1.0, 2.0]),
        lambda hidden: [1.0, deque([np.ma.masked])] if hidden else deque([1.0, 2.0]),
    ],
)
def test_masked_values_in_any_container_are_refused(tmp_path, engine, make_value):
    with make(tmp_path, engine, num_envs=2) as buffer:
        buffer.add(step(2, reward=make_value([])))
        with pytest.raises(SchemaError, match=r"'reward' must have .* got 1 masked"):
            buffer.add(step(2, reward=make_value([0])))
        assert buffer.heads.tolist() == [1, 1]


def test_a_list_within_itself_is_no_array(tmp_path):
    endless = []
    endless.append(endless)
    with make(tmp_path) as buffer, pytest.raises(SchemaError, match="field 'reward' must be"):
        buffer.add(step(reward=endless))


@pytest.mark.parametrize("component", ["values", "offsets"])
def test_masked_values_of_any_length_are_refused(component):
    parts = {"values": np.arange(3), "offsets": np.array([0, 3])}
    with pytest.raises(SchemaError, match=f"{component} of Ragged must have a value"):
        mr.Ragged(**{**parts, component: masked(parts[component], 0)})


def test_masked_blocks_of_a_reader_are_refused(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    rows = np.arange(2)
    block = Block(
        {"reward": masked(np.float32([1, 2]), 1)},
        np.zeros(2, np.int64),
        rows,
        np.array([1, 0], np.uint8),
    )
    with (
        open_writer(tmp_path / "b", plain(schema, 2)) as writer,
        pytest.raises(SchemaError, match="field 'reward' must have a value"),
    ):
        writer.write(block)
    assert not (tmp_path / "b").exists()


def answers(function):
    """What a user's function returns, with its first item masked."""

    def masked_answer(*columns):
        return masked(function(*columns), 0)

    return masked_answer


def rewards_masked(fields):
    return {"reward": masked(fields["reward"], 0)}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (
            lambda: {
                "sampler": mr.EpisodeSampler(
                    where=answers(lambda table: np.ones(len(table.begin), bool))
                )
            },
            "EpisodeSampler where",
        ),
        (
            lambda: {
                "sampler": mr.StalenessSampler(
                    "count", 9, weight=answers(lambda ages: np.ones(len(ages))), seed=0
                )
            },
            "StalenessSampler weight",
        ),
        (
            lambda: {
                "sampler": mr.GroupSampler(
                    "count", where=answers(lambda table: np.ones(len(table), bool))
                )
            },
            "GroupSampler where",
        ),
        (lambda: {"transforms": [mr.Apply(rewards_masked)]}, "Apply: 'reward'"),
    ],
)
def test_what_a_users_function_masks_is_refused(arguments, name):
    with mr.ReplayBuffer.create(
        None, SCHEMA, 16, engine="memory", heap_bytes=8192, **arguments()
    ) as buffer:
        for number in range(8):
            buffer.add(step(terminated=number % 4 == 3))
        with pytest.raises(SchemaError, match=f"{name} must have a value in each"):
            buffer.sample(2)


def test_what_an_environment_masks_is_refused(tmp_path):
    class Masking(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return masked(np.zeros(2, np.float32), 1), 0.0, False, False, {}

    with pytest.raises(SchemaError, match="field 'observation' must have a value in"):
        mr.record(Masking(), tmp_path / "b", steps=4, seed=0)


def test_adapters_refuse_masked_values_by_name():
    from mmreplay.adapters.common.values import array_of

    with pytest.raises(SchemaError, match="action must have a value in each place"):
        array_of(masked([1, 2], 0), "action")
    assert array_of(masked([1, 2]), "action").tolist() == [1, 2]
