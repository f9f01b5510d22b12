"""Fields without values, such as those of a zero-size Box."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import Report
from mmreplay.errors import SchemaError, VersionError
from mmreplay.format import metadata as metadata_file
from mmreplay.verify import verify_buffer

EMPTY = {"none": mr.Field((0,), "float32"), "grid": mr.Field((3, 0, 2), "uint8")}
END = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}
FULL = {"x": mr.Field((2,), "float32"), "large": mr.Field((600,), "float64")}


def schema_of(alone):
    observation = EMPTY if alone else EMPTY | FULL
    return mr.Schema({"observation": observation, "action": EMPTY["none"]} | END)


def steps(schema, first, count, num_envs):
    """Steps ``[T, E, *shape]`` whose values, where there are any, are their numbers."""
    lead = (count, num_envs)
    number = np.arange(first, first + count)[:, None] * 10 + np.arange(num_envs)
    made = {}
    for path, field in schema.fields.items():
        flat = number.reshape(*lead, *[1] * len(field.shape))
        made[path] = np.broadcast_to(flat, lead + field.shape).astype(field.numpy)
    made["terminated"] = number // 10 % 9 == 8
    made["truncated"] = np.zeros(lead, bool)
    return made


def nested(flat):
    observation = {p.split("/")[1]: v for p, v in flat.items() if "/" in p}
    return {"observation": observation} | {p: v for p, v in flat.items() if "/" not in p}


def assert_numbered(batch, schema):
    count = len(batch.positions)
    number = (batch.positions * 10 + batch.env_ids)[:, None]
    for path in schema.role_paths("observation"):
        following = path.replace("observation", "next_observation")
        for name, ahead in ((path, 0), (following, 10)):
            assert batch[name].shape == (count, *schema[path].shape)
            assert batch[name].dtype == schema[path].numpy
            if schema[path].nbytes:
                known = ~batch["terminated"] if ahead else np.ones(count, bool)
                assert (batch[name][known] == number[known] + ahead).all()
    assert batch["action"].shape == (count, 0)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with others"])
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("engine", ["memory", "memmap", "zarr"])
def test_empty_fields_are_drawn_with_their_shape_and_dtype(
    tmp_path, engine, num_envs, layout, alone
):
    schema, path = schema_of(alone), None if engine == "memory" else tmp_path / "b"
    sampler = mr.UniformSampler(seed=0)
    with mr.ReplayBuffer.create(
        path,
        schema,
        40,
        num_envs,
        engine=engine,
        layout=layout,
        autoreset="disabled",
        commit_every=None,
        sampler=sampler,
    ) as buffer:
        for t in range(50):
            step = {name: value[0] for name, value in steps(schema, t, 1, num_envs).items()}
            if num_envs == 1:
                step = {name: value[0] for name, value in step.items()}
            buffer.add(nested(step) if t % 2 else step)
        buffer.extend(steps(schema, 50, 30, num_envs))
        for contiguous in (False, True):
            assert_numbered(buffer.sample(64, contiguous=contiguous), schema)
        torch = pytest.importorskip("torch")
        tensors = buffer.sample(8).torch()
        assert tensors["observation/grid"].shape == (8, 3, 0, 2)
        assert tensors["observation/grid"].dtype == torch.uint8
        assert mr.field_moments(buffer, ("action",))["action"].count == 0
        if path is None:
            return
        buffer.snapshot(tmp_path / "snapshot")
        buffer.resize(30)
    with mr.ReplayBuffer.open(path, "r+", sampler=sampler) as buffer:
        assert_numbered(buffer.sample(64), schema)
    for each in (path, tmp_path / "snapshot"):
        assert verify_buffer(each).findings == ()
    with mr.ReplayBuffer.open(path, transforms=[mr.FrameStack(2)]) as buffer:
        assert buffer.sample(4)["observation/grid"].shape == (4, 2, 3, 0, 2)


@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.csv", "a.safetensors"])
def test_empty_fields_go_through_files(tmp_path, name):
    if name.endswith("pt"):
        pytest.importorskip("torch")
    schema = schema_of(False)
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, 40, 2, autoreset="disabled", commit_every=None
    ) as buffer:
        buffer.extend(steps(schema, 0, 40, 2))
    mr.export(tmp_path / "b", tmp_path / name)
    assert isinstance(mr.load(tmp_path / name, tmp_path / "c"), Report)
    with mr.ReplayBuffer.open(tmp_path / "c", sampler=mr.UniformSampler(0)) as again:
        assert again.schema == schema
        assert_numbered(again.sample(64), schema)


def test_parquet_holds_no_empty_field(tmp_path):
    """Arrow divides by the number of a list's values."""
    schema = schema_of(False)
    with mr.ReplayBuffer.create(None, schema, 9, engine="memory") as buffer:
        buffer.extend(steps(schema, 0, 5, 1))
        with pytest.raises(
            SchemaError,
            match=r"field 'observation/none' of shape \[0\] has no values, and parquet "
            r"cannot store empty arrays\. Leave it out with fields=",
        ):
            mr.export(buffer, tmp_path / "a.parquet")


def test_an_older_version_refuses_empty_fields_by_name(tmp_path, monkeypatch):
    mr.ReplayBuffer.create(tmp_path / "b", schema_of(True), 9).close()
    monkeypatch.setattr(metadata_file, "INCOMPAT", frozenset())
    with pytest.raises(VersionError, match=r"needs the features \['empty_fields'\]"):
        mr.ReplayBuffer.open(tmp_path / "b")


def test_an_empty_field_has_nothing_to_rewrite():
    with pytest.raises(SchemaError, match=r"field option mutable must.*has no values to rewrite"):
        mr.Field((2, 0), "int8", mutable=True)


def test_a_gymnasium_environment_with_a_zero_size_box_is_stored():
    spaces = pytest.importorskip("gymnasium").spaces
    goal = spaces.Box(0, 1, (0,))
    seen = spaces.Dict(goal=goal, seen=spaces.Box(0, 1, (4,)))
    schema = mr.Schema.from_spaces(seen, spaces.Discrete(2))
    with mr.ReplayBuffer.create(None, schema, 9, engine="memory") as buffer:
        for _ in range(5):
            buffer.add(
                observation=seen.sample(), action=1, reward=0.0, terminated=False, truncated=False
            )
        assert buffer.sample(3)["observation/goal"].shape == (3, 0)
