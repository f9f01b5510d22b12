"""Schemas that lack roles, name them otherwise, or gain fields later."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError, StaleError

FLAG = mr.Field((), "bool")
NUMBER = mr.Field((), "float32")


@pytest.fixture(params=["memmap", "memory"])
def make(request, tmp_path):
    """Makes a buffer of capacity 6 with these fields."""
    made = []

    def create(fields, **options):
        path = tmp_path / f"{len(made)}" if request.param == "memmap" else None
        schema = mr.Schema(fields, **options)
        made.append(mr.ReplayBuffer.create(path, schema, 6, engine=request.param))
        return made[-1]

    yield create
    for buffer in made:
        buffer.close()


def test_without_an_observation_every_row_is_drawn(make):
    buffer = make({"value": NUMBER})
    for number in range(8):
        buffer.add(value=number)
    assert buffer.take(0, np.arange(2, 8))["value"].tolist() == [2, 3, 4, 5, 6, 7]
    assert set(buffer.sample(5)) == {"value"}
    assert buffer.sample(1).probabilities[0] == 1 / 6


def test_without_ends_all_is_one_episode(make):
    buffer = make({"observation": NUMBER})
    for number in range(8):
        buffer.add(observation=number)
    batch = buffer.take(0, np.arange(2, 7))
    assert batch["next_observation"].tolist() == [3, 4, 5, 6, 7]
    with pytest.raises(StaleError, match="the newest row"):
        buffer.take(0, 7)
    episodes = buffer.episodes.episodes(0)
    assert (episodes.begin, episodes.end) == ([2], [8])
    assert episodes.headless.all()
    assert episodes.running.all()


def test_ends_alone_are_a_schema(make):
    buffer = make({"terminated": FLAG, "truncated": FLAG})
    for number in range(5):
        buffer.add(terminated=number % 2 == 0, truncated=number == 3)
    batch = buffer.take(0, np.arange(5))
    assert batch["terminated"].tolist() == [True, False, True, False, True]
    assert batch["truncated"].tolist() == [False, False, False, True, False]


def test_roles_under_other_names(make):
    observation = {"x": NUMBER, "y": mr.Field((2,), "int8")}
    roles = {"observation": "obs", "terminated": "done"}
    buffer = make({"obs": observation, "done": FLAG}, roles=roles)
    for number in range(4):
        buffer.add(obs={"x": number, "y": [number, 0]}, done=number == 2)
    batch = buffer.take(0, [1, 2])
    assert batch["done"].tolist() == [False, True]
    assert batch["next_observation/x"].tolist() == [2, 2]
    assert batch["next_observation/y"].tolist() == [[2, 0], [2, 0]]


def test_a_final_field_of_the_users_own_stays_the_users(make):
    buffer = make({"observation": NUMBER, "final": mr.Field((), "int8")})
    for number in range(3):
        buffer.add(observation=number, final=number + 3)
    assert buffer.gather_all()["final"].tolist() == [3, 4, 5]
    buffer.resize(9)
    assert buffer.gather_all()["final"].tolist() == [3, 4, 5]


def test_one_environment_takes_steps_with_and_without_its_axis(make):
    buffer = make({"observation": mr.Field((3,), "int32"), "action": NUMBER})
    rows = np.arange(18, dtype=np.int32).reshape(6, 3)
    buffer.add(observation=rows[0], action=0)
    buffer.add(observation=rows[1:2], action=[1])
    buffer.extend(observation=rows[2:4], action=[2, 3])
    buffer.extend(observation=rows[4:, None], action=[[4], [5]])
    everything = buffer.gather_all()
    assert everything["observation"].tolist() == rows.tolist()
    assert everything["action"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(), (2, 3), (80, 80)])
def test_a_new_field_reads_as_its_fill_and_is_then_written(make, shape):
    buffer = make({"observation": NUMBER, "terminated": FLAG})
    for number in range(8):
        buffer.add(observation=number, terminated=number == 4)
    fill = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    buffer.add_field("more/new", mr.Field(shape, "int16", mutable=True), fill)
    buffer.add(observation=8, terminated=False, more={"new": fill + 1})
    found = buffer.gather_all()
    assert found["observation"].tolist() == [3, 4, 5, 6, 7, 8]
    expected = np.stack([fill] * 5 + [fill + 1])
    np.testing.assert_array_equal(found["more/new"], expected)
    assert buffer.take(0, 4)["next_observation"].tolist() == [4]
    buffer.write_field("more/new", 0, 4, fill + 2)
    assert (buffer.get_field("more/new", 0, 4) == fill + 2).all()


def test_a_new_field_cannot_speak_for_old_rows(make):
    buffer = make({"observation": NUMBER})
    for number in range(3):
        buffer.add(observation=number)
    for role in ("terminated", "truncated"):
        with pytest.raises(
            SchemaError, match=f"the fill of the role '{role}' must be False, got True"
        ):
            buffer.add_field(role, FLAG, True)
        buffer.add_field(role, FLAG, False)
    with pytest.raises(
        SchemaError, match="add_field: a field cannot get the role 'next_observation'"
    ):
        buffer.add_field("next_observation", NUMBER, 0)
    buffer.add(observation=3, terminated=True, truncated=False)
    batch = buffer.take(0, np.arange(4))
    assert batch["terminated"].tolist() == [False, False, False, True]
    assert batch["next_observation"].tolist() == [1, 2, 3, 3]


def test_set_takes_scalars_and_whatever_broadcasts(make):
    buffer = make({"value": NUMBER, "note": mr.Field((2,), "int8", mutable=True)})
    for number in range(4):
        buffer.add(value=number, note=[0, 0])
    buffer.write_field("note", 0, 1, [1, 2])
    buffer.write_field("note", 0, [[2], [3]], np.full((2, 1, 2), 9, np.int8))
    assert buffer.gather_all()["note"].tolist() == [[0, 0], [1, 2], [9, 9], [9, 9]]
    buffer.write_field("note", [], [], np.empty((0, 2), np.int8))
    with pytest.raises(SchemaError, match=r"field 'note' must be int8\[2, 2\], got int64\[2\]"):
        buffer.write_field("note", 0, [0, 1], [1, 2])
    with pytest.raises(StaleError, match="position 9 of environment 0"):
        buffer.write_field("note", 0, [0, 9], np.ones((2, 2), np.int8))
    assert buffer.get_field("note", 0, 0).tolist() == [0, 0]


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("engine", ["memmap", "memory"])
def test_blocks_wrap_alike_in_small_large_and_mutable_fields(tmp_path, engine, num_envs, layout):
    schema = mr.Schema(
        {
            "small": mr.Field((2,), "int64"),
            "large": mr.Field((600,), "int64"),
            "mutable": mr.Field((), "int64", mutable=True),
        }
    )
    path = tmp_path / "b" if engine == "memmap" else None
    options = {"engine": engine, "layout": layout, "autoreset": "disabled"}
    with mr.ReplayBuffer.create(path, schema, 7, num_envs, **options) as buffer:
        written = 0
        for steps in (3, 4, 1, 5, 2, 8, 3, 30, 6, 5):
            numbers = np.arange(written, written + steps)[:, None]
            numbers = 100 * numbers + np.arange(num_envs)
            wide = numbers[..., None]
            buffer.extend(
                small=np.repeat(wide, 2, 2), large=np.repeat(wide, 600, 2), mutable=numbers
            )
            written += steps
            rows = buffer.gather_all()
            expected = 100 * rows.positions + rows.env_ids
            assert len(expected) == num_envs * min(7, written)
            for name in schema:
                found = rows[name].reshape(len(expected), -1)
                assert (found == expected[:, None]).all(), name
