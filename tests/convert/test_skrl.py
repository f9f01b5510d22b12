"""skrl's and rofunc's memories, out and in, beside what their own code would do."""

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.adapters.skrl import tensor_file
from mmreplay.disk import files
from mmreplay.errors import SchemaError, SourceError

SUFFIXES = [".pt", ".npz"]
SCHEMA = mr.Schema.from_flat(
    {
        "observation": mr.Field((3,), "float32"),
        "pixels": mr.Field((4, 2), "uint8"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float64"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
        "next_observation": mr.Field((3,), "float32"),
    }
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


def make(path, num_envs, steps, capacity=40, schema=SCHEMA, **options):
    rng = np.random.default_rng(num_envs + steps)
    options.setdefault("autoreset", "disabled")
    buffer = mr.ReplayBuffer.create(path, schema, capacity, num_envs, **options)
    given = {
        name: rng.integers(0, 99, (steps, num_envs, *field.shape)).astype(field.numpy)
        for name, field in schema.fields.items()
    }
    for name in ("terminated", "truncated"):
        given[name] = rng.random((steps, num_envs)) < 0.1
    if num_envs == 1:
        given = {name: column[:, 0] for name, column in given.items()}
    buffer.extend(given)
    return buffer


def read(path):
    if path.suffix == ".pt":
        found = torch.load(path, weights_only=True, mmap=True)
        return {name: tensor.numpy() for name, tensor in found.items()}
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_are_theirs_and_chronological(tmp_path, suffix, num_envs, mapped, monkeypatch):
    if not mapped:
        monkeypatch.setattr(tensor_file, "file_system", lambda path: "btrfs")
    path = tmp_path / f"a{suffix}"
    with make(tmp_path / "b", num_envs, 60) as buffer:
        report = mr.export(buffer, path, layout="skrl")
        assert report.nbytes == path.stat().st_size
        found = read(path)
        assert list(found) == sorted(SCHEMA.paths)
        rows = buffer.gather_all()
        for name, field in SCHEMA.fields.items():
            assert found[name].dtype == field.numpy
            assert found[name].shape == (40, num_envs, *(field.shape or (1,)))
            for env in range(num_envs):
                want = np.asarray(rows[name])[rows.env_ids == env]
                np.testing.assert_array_equal(found[name][:, env].reshape(want.shape), want)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_torch_memory_of_theirs_takes_the_file(tmp_path, suffix):
    """What `Memory.load` does: names that exist, shapes as they were created."""
    with make(tmp_path / "b", 3, 60) as buffer:
        mr.export(buffer, tmp_path / f"a{suffix}", layout="skrl")
    for tensor in read(tmp_path / f"a{suffix}").values():
        memory = torch.zeros(tensor.shape, dtype=torch.from_numpy(tensor).dtype)
        memory.copy_(torch.from_numpy(tensor))
        assert memory.view(-1, *memory.shape[2:]).shape[0] == 40 * 3


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("num_envs", "steps"), [(1, 60), (3, 60), (3, 17), (1, 1)])
def test_what_was_written_comes_in_again(tmp_path, suffix, num_envs, steps):
    path = tmp_path / f"a{suffix}"
    with make(tmp_path / "b", num_envs, steps) as buffer:
        mr.export(buffer, path, layout="skrl")
        report = mr.load(path, tmp_path / "c", layout="skrl", size=min(40, steps))
        assert report.doubts == ()
        with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
            one, other = buffer.gather_all(), loaded.gather_all()
            np.testing.assert_array_equal(one.env_ids, other.env_ids)
            for name in SCHEMA.paths:
                want = np.asarray(one[name])
                got = np.asarray(other[name]).reshape(want.shape)
                np.testing.assert_array_equal(got, want)
            assert loaded.schema.role("reward") == "reward"
    assert not mr.verify_buffer(tmp_path / "c").findings


class Memory:
    """What skrl's memory keeps: NaN where nothing was written, and a cursor."""

    def __init__(self, size, num_envs):
        self.size, self.num_envs, self.cursor, self.history = size, num_envs, 0, []
        lead = (size, num_envs)
        self.tensors = {
            "states": torch.full((*lead, 2), torch.nan),
            "actions": torch.zeros((*lead, 1), dtype=torch.int32),
            "rewards": torch.full((*lead, 1), torch.nan),
            "terminated": torch.zeros((*lead, 1), dtype=torch.bool),
        }

    def add(self, number, num_envs=None):
        """One step, of the first so many environments: theirs can be partial."""
        envs = slice(0, num_envs or self.num_envs)
        for env in range(self.num_envs)[envs]:
            self.tensors["states"][self.cursor, env] = number * 10 + env
            self.tensors["actions"][self.cursor, env] = number
            self.tensors["rewards"][self.cursor, env] = torch.nan if number == 2 else 1
            self.tensors["terminated"][self.cursor, env] = number % 5 == 4
        self.cursor = (self.cursor + 1) % self.size

    def save(self, path):
        found = {name: self.tensors[name] for name in sorted(self.tensors)}
        if path.suffix == ".pt":
            torch.save(found, path)
        else:
            np.savez(path, **{name: each.numpy() for name, each in found.items()})


def numbers(path, env):
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
        mine = rows.env_ids == env
        assert buffer.schema.role("terminated") == "terminated"
        ends = buffer.episodes.episodes(env).end.tolist()
        return (np.asarray(rows["states"])[mine, 0] - env).astype(int) // 10, ends


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_steps_never_written_are_left_out_by_their_nans(tmp_path, suffix):
    memory = Memory(12, 3)
    for number in range(7):
        memory.add(number)
    memory.add(7, 2)
    path = tmp_path / f"24-01-02_03-04-05-678901_memory_0x7f00ab{suffix}"
    memory.save(path)
    report = mr.load(path, tmp_path / "b", strict=True)
    assert "skrl's layout: 3 environments of 12 steps" in report.notes
    assert any("13 steps that were never written were left" in n for n in report.notes)
    for env in range(3):
        got, ends = numbers(tmp_path / "b", env)
        assert got.tolist() == list(range(8 if env < 2 else 7))
        assert ends[0] == 5


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_memory_needs_its_cursor(tmp_path, suffix):
    memory = Memory(12, 2)
    for number in range(17):
        memory.add(number)
    path = tmp_path / f"a{suffix}"
    memory.save(path)
    with pytest.raises(SourceError, match="file does not say which step is the oldest:"):
        mr.load(path, tmp_path / "b", layout="skrl", strict=True)
    mr.load(path, tmp_path / "b", layout="skrl", cursor=memory.cursor, strict=True)
    for env in range(2):
        assert numbers(tmp_path / "b", env)[0].tolist() == list(range(5, 17))
    assert not mr.verify_buffer(tmp_path / "b").findings


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_cursor_brings_back_no_step_that_was_never_written(tmp_path, suffix):
    memory = Memory(12, 2)
    for number in range(7):
        memory.add(number)
    path = tmp_path / f"a{suffix}"
    memory.save(path)
    for cursor in (0, 6, 8):
        with pytest.raises(SchemaError, match=f"cursor must be 7 .*got {cursor}"):
            mr.load(path, tmp_path / "c", layout="skrl", cursor=cursor)
    mr.load(path, tmp_path / "b", layout="skrl", cursor=memory.cursor, strict=True)
    for env in range(2):
        assert numbers(tmp_path / "b", env)[0].tolist() == list(range(7))


def test_ends_that_are_floats_may_be_missing_where_nothing_was_written(tmp_path):
    memory = Memory(12, 2)
    ends = torch.full((12, 2, 1), torch.nan)
    memory.tensors["terminated"] = ends
    for number in range(7):
        memory.add(number)
    memory.save(tmp_path / "a.pt")
    mr.load(tmp_path / "a.pt", tmp_path / "b", layout="skrl", strict=True)
    assert numbers(tmp_path / "b", 0)[1][0] == 5
    ends[3, 1] = torch.nan
    memory.save(tmp_path / "b.pt")
    with pytest.raises(SourceError, match=r"'terminated' .*got NaN or no value in row 7"):
        mr.load(tmp_path / "b.pt", tmp_path / "c", layout="skrl")


def test_final_observations_are_left_out_and_reported(tmp_path):
    schema = mr.Schema.from_flat(
        {k: v for k, v in SCHEMA.fields.items() if k != "next_observation"}
    )
    with make(tmp_path / "b", 2, 10, 60, schema) as buffer:
        ends = np.zeros((4, 2), bool)
        ends[1, 0] = True
        given = {
            name: np.zeros((4, 2, *field.shape), field.numpy)
            for name, field in schema.fields.items()
        }
        buffer.extend(
            given | {"terminated": ends}, final_observation=np.ones((4, 2, 3), np.float32)
        )
        report = mr.export(buffer, tmp_path / "a.npz", layout="skrl")
    assert "1 final observations were left out" in report.notes[0]
    assert read(tmp_path / "a.npz")["reward"].shape == (14, 2, 1)


def test_environments_of_different_length_end_in_nans(tmp_path):
    with make(tmp_path / "b", 2, 10) as buffer:
        given = {
            name: np.ones((5, 1, *field.shape), field.numpy)
            for name, field in SCHEMA.fields.items()
        }
        buffer.extend(given, env_ids=[1])
        report = mr.export(buffer, tmp_path / "a.pt", layout="skrl")
        assert any("different numbers of steps" in note for note in report.notes)
        found = read(tmp_path / "a.pt")
        assert np.isnan(found["observation"][10:, 0]).all()
        assert not found["action"][10:, 0].any()
        mr.load(tmp_path / "a.pt", tmp_path / "c", layout="skrl")
        with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
            assert loaded.heads.tolist() == [10, 15]


def test_bfloat16_goes_to_pt_and_not_to_npz(tmp_path):
    schema = mr.Schema({"a": mr.Field((2,), "bfloat16")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 8, 2, autoreset="disabled") as buffer:
        buffer.extend(a=np.arange(12, dtype=np.uint16).reshape(3, 2, 2) + 0x3F80)
        buffer.extend(a=np.full((1, 1, 2), 0x4000, np.uint16), env_ids=[0])
        with pytest.raises(SchemaError, match="'a': skrl's layout cannot store bfloat16 in"):
            mr.export(buffer, tmp_path / "a.npz", layout="skrl")
        mr.export(buffer, tmp_path / "a.pt", layout="skrl")
    found = torch.load(tmp_path / "a.pt", weights_only=True)["a"]
    assert found.dtype == torch.bfloat16
    assert bool(found[3, 1].isnan().all())
    assert float(found[3, 0, 0]) == 2.0
    mr.load(tmp_path / "a.pt", tmp_path / "c", layout="skrl")
    with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
        assert loaded.heads.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "theirs"}, "layout must be 'skrl', or None for mmreplay's own, got"),
        ({"size": 3}, r"size needs layout='skrl', got 3 without a layout\. Pass"),
        ({"layout": "skrl", "size": 41}, r"size must be an integer in \[0, 40\], since the"),
        ({"layout": "skrl", "cursor": 40}, r"cursor must be an integer in \[0, 39\], since"),
        ({"layout": "skrl", "cursor": 3, "size": 9}, "cursor must be 9 in a memory with that many"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, options, message):
    with make(tmp_path / "b", 3, 60) as buffer:
        mr.export(buffer, tmp_path / "a.npz", layout="skrl")
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "a.npz", tmp_path / "c", **options)


def test_arrays_that_are_no_memory_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros((3, 2, 1)), b=np.zeros((4, 2, 1)))
    np.savez(tmp_path / "b.npz", a=np.zeros(3))
    for name in "ab":
        with pytest.raises(SourceError, match=r"must have shape \[memory_size, num_"):
            mr.load(tmp_path / f"{name}.npz", tmp_path / "c", layout="skrl")


def test_no_row_of_a_memory_without_floats_counts_as_unwritten(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros((3, 2, 1), np.int32))
    report = mr.load(tmp_path / "a.npz", tmp_path / "b", layout="skrl")
    assert report.rows == 6
    assert "no float tensor marks steps that were never written" in "".join(report.doubts)
