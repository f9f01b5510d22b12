"""Arguments, states and modes that do not go: said by name, and nothing changes."""

from enum import Enum

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import mmreplay as mr
from mmreplay.errors import EmptyError, FailedError, FormatError, SchemaError, StaleError
from tests.buffer.support import FIELDS, Twin, schema
from tests.buffer.test_bad_input import all_of, assert_same, but, snapshot


def test_an_empty_buffer_says_what_to_do(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "ring", schema(), 5) as buffer:
        with pytest.raises(EmptyError, match=r"none of 0 published rows.*Add steps first"):
            buffer.sample(4)
        with pytest.raises(StaleError, match="position 0 of environment 0 is not in"):
            buffer.take([0], [0])
        with pytest.raises(EmptyError, match=r"cannot dequeue 1 rows.*holds 0"):
            buffer.dequeue(1)
        assert len(buffer.gather_all()) == len(buffer) == 0
        assert buffer.take([], []).fields.keys() >= FIELDS.keys()


def test_final_observations_are_refused_where_there_are_none(tmp_path):
    final = np.zeros((2, 2), np.int64)
    following = Twin(None, 5, 2, autoreset="next_step")
    with pytest.raises(SchemaError, match="final_observation must be None in a buffer"):
        following.buffer.add(but(), final_observation=final)
    stored = Twin(None, 5, 2, stored=True)
    step = but(next_observation=np.zeros((2, 2), np.int64))
    with pytest.raises(
        SchemaError, match=r"final_observation: the.*so none can be stored\. Leave it out"
    ):
        stored.buffer.add(step, final_observation=final)
    bare = mr.Schema({"reward": mr.Field((), "float32")})
    buffer = mr.ReplayBuffer.create(None, bare, 4, engine="memory")
    with pytest.raises(SchemaError, match="schema has no observation field, so"):
        buffer.add(reward=1.0, final_observation=[1])
    assert len(following.buffer) == len(stored.buffer) == len(buffer) == 0


CREATES = {
    "capacity 0": ({"capacity": 0}, ("capacity must be an integer in [1,", "got 0")),
    "capacity below": ({"capacity": -4}, ("capacity must be an integer in", "got -4")),
    "capacity of a part": ({"capacity": 2.5}, ("capacity", "got 2.5")),
    "capacity as text": ({"capacity": "1e6"}, ("capacity", "got '1e6'")),
    "capacity true": ({"capacity": True}, ("capacity", "got True")),
    "capacity beyond": ({"capacity": 1 << 60}, ("capacity must be", "in [1,", "got 11")),
    "no environment": ({"num_envs": 0}, ("num_envs must be an integer in", "got 0")),
    "unknown engine": (
        {"engine": "sqlite"},
        ("engine must be one of 'memmap', 'zarr', 'memory'", "got 'sqlite'"),
    ),
    "memory with a path": (
        {"engine": "memory"},
        ("path must be a folder, or None", "engine='memory'"),
    ),
    "unknown layout": (
        {"layout": "row"},
        ("layout must be one of 'env_major', 'time_major'", "got 'row'"),
    ),
    "unknown autoreset": (
        {"autoreset": "yes"},
        ("autoreset must be one of 'disabled', 'same_step',", "got 'yes'"),
    ),
    "no schema": (
        {"schema": {"a": mr.Field((), "int8")}},
        ("schema must be a Schema", "got dict", "mmreplay.Schema(...)"),
    ),
    "an interval of none": (
        {"commit_every": 0},
        ("commit_every must be a number above 0", "got 0", "None"),
    ),
    "an interval as text": ({"commit_every": "10"}, ("commit_every", "got '10'")),
}


@pytest.mark.parametrize("name", CREATES)
def test_nothing_is_made_of_bad_arguments(tmp_path, name):
    changes, parts = CREATES[name]
    options = {"schema": schema(), "capacity": 5, "num_envs": 1} | changes
    with pytest.raises(SchemaError, match=all_of(*parts)):
        mr.ReplayBuffer.create(tmp_path / "ring", **options)
    assert not (tmp_path / "ring").exists()


@pytest.mark.parametrize("options", [{}, {"num_envs": 1}])
def test_one_environment_is_refused_where_the_schema_was_made_of_several(tmp_path, options):
    vector = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    schema = mr.Schema.from_env(vector)
    vector.close()
    what = r"num_envs is 1, but the schema was made of 3 environments\. Pass num_envs=3"
    with pytest.raises(SchemaError, match=what):
        mr.ReplayBuffer.create(tmp_path / "b", schema, 10, **options)
    with pytest.raises(SchemaError, match=what):
        mr.ReplayBuffer.create(None, schema, 10, engine="memory", **options)
    assert not any(tmp_path.iterdir())
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10, num_envs=3).close()


@pytest.mark.parametrize("user", [{"a": object()}, {"a": float("nan")}, {1: 2}, [1]])
def test_metadata_that_is_no_json_is_refused(tmp_path, user):
    with pytest.raises((FormatError, SchemaError), match=r"user|metadata"):
        mr.ReplayBuffer.create(tmp_path / "ring", schema(), 5, user_metadata=user)
    assert not (tmp_path / "ring").exists()


def test_a_closed_buffer_says_so(tmp_path):
    twin = Twin(tmp_path / "ring", 5)
    twin.add([""])
    buffer = twin.buffer
    buffer.close()
    buffer.close()
    for call in (
        lambda: buffer.add(),
        lambda: buffer.extend(),
        lambda: buffer.commit(),
        lambda: buffer.clear(),
        lambda: buffer.resize(9),
        lambda: buffer.dequeue(1),
        lambda: buffer.write_field("reward", 0, 0, 0),
        lambda: buffer.set_statistics({}),
    ):
        with pytest.raises(FailedError, match=r".* is closed"):
            call()
    for call in (
        lambda: buffer.sample(1),
        lambda: buffer.take([0], [0]),
        lambda: buffer.gather_all(),
        lambda: buffer.get_field("reward", 0, 0),
        lambda: len(buffer),
        lambda: buffer.span,
        lambda: buffer.episodes,
        lambda: buffer.nbytes,
    ):
        with pytest.raises(FailedError, match=r"is closed\. Use ReplayBuffer"):
            call()
    assert "closed" in repr(buffer)


def test_a_reader_cannot_write(tmp_path):
    twin = Twin(tmp_path / "ring", 5)
    twin.add([""])
    with mr.ReplayBuffer.open(twin.path) as reader:
        before = snapshot(reader)
        for call in (
            lambda: reader.add(),
            lambda: reader.extend(),
            lambda: reader.commit(),
            lambda: reader.clear(),
            lambda: reader.resize(9),
            lambda: reader.add_field("x", mr.Field((), "int8"), 0),
            lambda: reader.dequeue(1),
            lambda: reader.write_field("reward", 0, 0, 0),
            lambda: reader.set_statistics({}),
        ):
            with pytest.raises(FailedError, match=r"open with mode='r'.*'r\+'"):
                call()
        assert_same(before, snapshot(reader))
    twin.buffer.close()


@pytest.mark.parametrize("value", [{"a": object()}, {"a": float("inf")}, {1: 2}, [1]])
def test_statistics_that_are_no_json_leave_the_old_ones(tmp_path, value):
    twin = Twin(tmp_path / "ring", 5)
    twin.buffer.set_statistics({"mean": 1.5})
    with pytest.raises((FormatError, SchemaError), match="statistics"):
        twin.buffer.set_statistics(value)
    assert twin.buffer.statistics == {"mean": 1.5}
    twin.buffer.close()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_autoreset_mode_of_a_vector_environment_is_used(tmp_path, mode):
    schema = mr.Schema({"a": mr.Field((), "int8")})
    made = {"autoreset": mode, "num_envs": 2}
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 10, **made) as buffer:
        assert buffer.autoreset == mode.name.lower()
    assert mr.ReplayBuffer.open(tmp_path / "b").autoreset == mode.name.lower()


def test_another_enum_is_refused_by_its_name(tmp_path):
    class Mode(Enum):
        LATER = 1

    schema = mr.Schema({"a": mr.Field((), "int8")})
    with pytest.raises(SchemaError, match=r"autoreset must be one of .*, got 'later'"):
        mr.ReplayBuffer.create(tmp_path / "b", schema, 10, autoreset=Mode.LATER)


def test_priorities_of_indices_are_refused_with_the_expected_arguments():
    sampler = mr.PrioritizedSampler(seed=0)
    made = {"engine": "memory", "sampler": sampler}
    schema = mr.Schema({"a": mr.Field((), "int8")})
    with mr.ReplayBuffer.create(None, schema, 10, **made) as buffer:
        buffer.extend(a=np.zeros(5, np.int8))
        batch = buffer.sample(3)
        with pytest.raises(
            SchemaError,
            match="update_priorities needs the batch that sample returned, got "
            r"ndarray\. Pass update_priorities\(batch, values\)",
        ):
            buffer.update_priorities(batch.positions, np.ones(3))
        assert buffer.update_priorities(batch, np.ones(3)) == 0


def test_a_buffer_that_is_indexed_or_iterated_over_says_what_to_call(tmp_path):
    buffer = Twin(None, 5).buffer
    told = r"buffer\['reward'\].*buffer.sample\(256\)\['reward'\].*gather_all\(\)\["
    with pytest.raises(TypeError, match=told):
        buffer["reward"]
    told = r"buffer\[{}\].*buffer.take\(env_ids, positions\).*ReplayDataset\(buffer\)"
    for key, text in ((0, "0"), (slice(2), r"slice\(None, 2, None\)")):
        with pytest.raises(TypeError, match=told.format(text)):
            buffer[key]
    told = r"iter\(buffer\).*mmreplay.ReplayLoader\(buffer.*buffer.gather_all\(\)"
    for call in (iter, list):
        with pytest.raises(TypeError, match=told):
            call(buffer)
    told = r"'reward' in buffer.*'reward' in buffer\.schema"
    with pytest.raises(TypeError, match=told):
        assert "reward" in buffer
    both = mr.concat([buffer])
    with pytest.raises(TypeError, match=r"concat\(...\)\['a'\].*batch\['a'\]"):
        both["a"]
    with pytest.raises(TypeError, match=r"iter\(concat\(...\)\).*ReplayLoader\(both"):
        iter(both)


def test_the_class_called_by_itself_names_create_and_open(tmp_path):
    told = r"cannot be called.*\.create\(path.*\.open\(path\)"
    calls = [(), (tmp_path,), (str(tmp_path), schema()), (tmp_path, schema(), 100)]
    for arguments in calls:
        with pytest.raises(TypeError, match=told):
            mr.ReplayBuffer(*arguments)
        with pytest.raises(TypeError, match=told):
            mr.ReplayBuffer(*arguments, capacity=5, num_envs=1)
