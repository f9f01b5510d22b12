"""Groups of our own opened without their buffer: their sealed rows, and no others."""

import json
import shutil

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import CorruptError, FormatError
from tests.storage.zarr_groups import policy_store

SCHEMA = mr.Schema(
    {
        "observation": {
            "pixels": mr.Field((84, 84), "uint8"),
            "joint.angles": mr.Field((3,), "float64"),
            "half": mr.Field((2,), "bfloat16"),
        },
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
        "score": mr.Field((), "float32", mutable=True),
    }
)


def record(path, rng, steps=90, num_envs=2, **options):
    """A closed buffer that has come round; return what it holds, and its group."""
    options.setdefault("codec", "zstd")
    options.setdefault("autoreset", "disabled")
    with mr.ReplayBuffer.create(path, SCHEMA, 40, num_envs, engine="zarr", **options) as buffer:
        lead = (steps, num_envs) if num_envs > 1 else (steps,)
        buffer.extend(
            observation={
                "pixels": rng.integers(0, 256, (*lead, 84, 84), np.uint8),
                "joint.angles": rng.random((*lead, 3)),
                "half": rng.random((*lead, 2)).astype(np.float32),
            },
            action=rng.integers(0, 9, lead),
            reward=rng.random(lead).astype(np.float32),
            terminated=rng.random(lead) < 0.1,
            truncated=rng.random(lead) < 0.1,
            score=np.zeros(lead, np.float32),
            final_observation={
                "pixels": np.zeros((*lead, 84, 84), np.uint8),
                "joint.angles": np.ones((*lead, 3)),
                "half": np.ones((*lead, 2), np.float32),
            },
        )
        return buffer.gather_all(), buffer.zarr_path


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("codec", ["blosc-lz4", "zstd", "none"])
@pytest.mark.sliced(2)
def test_every_row_of_a_closed_buffer_is_in_its_group(tmp_path, rng, layout, codec):
    wanted, path = record(tmp_path / "b", rng, layout=layout, codec=codec)
    with mr.ReplayBuffer.open(path) as group, mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        found = group.gather_all()
        assert group.mapping.ours
        assert "field 'score' is mutable" in group.mapping.notes[0]
        assert group.metadata.uuid == buffer.metadata.uuid
        assert group.view.starts.lengths.sum() == buffer.view.starts.lengths.sum()
        positions = group.sample(20)
        again = buffer.take(positions.env_ids, positions.positions)
    for each in ("env_ids", "positions"):
        assert np.array_equal(getattr(found, each), getattr(wanted, each))
    for name, values in found.fields.items():
        assert values.tobytes() == wanted[name].tobytes(), name
    assert set(wanted.fields) - set(found.fields) == {"score"}
    for name, values in positions.fields.items():
        assert values.tobytes() == again[name].tobytes(), name


def test_a_group_alone_converts_to_the_buffer_it_was(tmp_path, rng):
    wanted, path = record(tmp_path / "b", rng)
    shutil.copytree(path, tmp_path / "alone")
    report = mr.load(tmp_path / "alone", tmp_path / "again", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "again") as again:
        found = again.gather_all()
    assert report.rows == len(wanted)
    assert np.array_equal(found.positions, wanted.positions)
    assert np.array_equal(found["final"], wanted["final"])
    assert np.array_equal(found["observation/pixels"], wanted["observation/pixels"])


def test_rows_that_are_in_no_shard_are_left_out(tmp_path, rng):
    fields = {"observation": mr.Field((3,), "float64"), "reward": mr.Field((), "int8")}
    seen = rng.random((500, 3))
    buffer = mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema(fields), 1000, engine="zarr", chunk_crc32c=True
    )
    buffer.extend(observation=seen, reward=np.zeros(500, np.int8))
    path = buffer.zarr_path
    buffer.close(seal=False)
    with mr.ReplayBuffer.open(path) as group:
        rows = group.gather_all()
    # Shards are a quarter of the capacity at most, in powers of two.
    assert len(rows) == 384 or len(rows) == 256
    assert 0 < len(rows) < 500
    assert np.array_equal(rows["observation"], seen[: len(rows)])


def test_a_shard_of_living_rows_that_is_missing_is_damage(tmp_path, rng):
    _, path = record(tmp_path / "b", rng)
    for each in (path / "observation/pixels").glob("c.*"):
        each.unlink()
    with (
        mr.ReplayBuffer.open(path) as group,
        pytest.raises(CorruptError, match="is damaged: it is missing"),
    ):
        group.gather_all()


def change(path, **members):
    """Change what the group's attributes say."""
    told = json.loads((path / "zarr.json").read_text())
    about = told["attributes"]["mmreplay"]
    for name, value in members.items():
        about.pop(name) if value is None else about.update({name: value})
    (path / "zarr.json").write_text(json.dumps(told))


def test_a_group_whose_buffer_was_never_closed_is_refused(tmp_path, rng):
    _, path = record(tmp_path / "b", rng)
    change(path, stop=None)
    with pytest.raises(FormatError, match="does not say which of its rows are sealed"):
        mr.ReplayBuffer.open(path)


LIES = {
    "capacity": [0, 1 << 40, "a", 20, True],
    "num_envs": [3, -1],
    "slots": [1, 1 << 29, 2.5],
    "layout": ["other", 3],
    "autoreset": ["never"],
    "uuid": ["zz", 3],
    "generation": [0],
    "first": [[0], [0, -1], "a", [1 << 61, 1 << 61]],
    "sealed": [[0], [1 << 61, 1 << 61], [0.5, 1]],
    "schema": [[], [{"name": "a"}], "a"],
    "roles": [{"observation": "none"}, []],
}


def test_attributes_that_lie_are_refused(tmp_path, rng):
    _, path = record(tmp_path / "b", rng, steps=20)
    truth = (path / "zarr.json").read_text()
    for key, value in ((k, each) for k, values in LIES.items() for each in values):
        (path / "zarr.json").write_text(truth)
        change(path, **{key: value})
        with pytest.raises(FormatError, match=r"must be .*, got "):
            mr.ReplayBuffer.open(path)
    (path / "zarr.json").write_text(truth)
    mr.ReplayBuffer.open(path).close()


def test_a_group_with_nested_names_is_read_as_arrays_of_environments(tmp_path, rng):
    # Somebody else's names for a group that happens to be ours.
    held = policy_store(tmp_path / "a.zarr", rng, 3)
    told = json.loads((tmp_path / "a.zarr/zarr.json").read_text())
    told["attributes"]["mmreplay"] = "not an object"
    (tmp_path / "a.zarr/zarr.json").write_text(json.dumps(told))
    with mr.ReplayBuffer.open(tmp_path / "a.zarr") as buffer:
        assert np.array_equal(buffer.gather_all()["img"], held["img"])
