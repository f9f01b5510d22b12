"""Memories of skrl and rofunc as csv, beside what their own code writes."""

import csv

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import SchemaError, SourceError
from tests.convert.test_skrl import SCHEMA, make


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


def save(path, tensors, rows):
    """What skrl's save writes of views ``[rows, size]``: names sorted, bare text."""
    names = sorted(tensors)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f"{name}.{i}" for name in names for i in range(tensors[name].shape[-1])])
        for row in range(rows):
            writer.writerow([value for name in names for value in tensors[name][row].tolist()])


def cells(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(("num_envs", "steps"), [(1, 60), (3, 60), (3, 7), (2, 1)])
def test_cells_are_theirs(tmp_path, num_envs, steps):
    with make(tmp_path / "b", num_envs, steps) as buffer:
        report = mr.export(buffer, tmp_path / "a.csv", layout="skrl")
        assert report.nbytes == (tmp_path / "a.csv").stat().st_size
        rows = buffer.gather_all()
        order = np.lexsort((rows.env_ids, rows.positions))
        tensors = {
            name: np.asarray(rows[name])[order].reshape(len(order), -1) for name in SCHEMA.paths
        }
    save(tmp_path / "theirs.csv", tensors, len(order))
    ours, theirs = cells(tmp_path / "a.csv"), cells(tmp_path / "theirs.csv")
    assert ours[0] == theirs[0]
    ends = [i for i, name in enumerate(ours[0]) if name.startswith(("term", "trun"))]
    assert {row[i] for row in ours[1:] for i in ends} <= {"True", "False"}
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        for a, b in zip(one, other, strict=True):
            assert a == b or float(a) == float(b)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "b", "theirs.csv"]


@pytest.mark.parametrize("cursor", [None, 5])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_theirs_come_in_and_false_stays_false(tmp_path, num_envs, cursor):
    steps = 12
    number = np.arange(steps * num_envs) // num_envs
    env = np.arange(steps * num_envs) % num_envs
    tensors = {
        "states": np.stack([number, env], 1) + 0.5,
        "actions": number[:, None],
        "rewards": number[:, None] / 3,
        "terminated": (number % 5 == 4)[:, None],
    }
    path = tmp_path / "24-01-02_03-04-05-678901_memory_0x7f00ab.csv"
    save(path, tensors, len(number))
    options = {"num_envs": num_envs, "cursor": cursor}
    if cursor is None:
        with pytest.raises(SourceError, match="rows were read as chronological: if the"):
            mr.load(path, tmp_path / "b", strict=True, **options)
    mr.load(path, tmp_path / "b", strict=cursor is not None, **options)
    want = np.roll(np.arange(steps), -(cursor or 0))
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        rows = buffer.gather_all()
        for each in range(num_envs):
            mine = rows.env_ids == each
            np.testing.assert_array_equal(
                np.asarray(rows["states"])[mine], np.stack([want, want * 0 + each], 1) + 0.5
            )
            ends = np.asarray(rows["terminated"])[mine].reshape(-1)
            np.testing.assert_array_equal(ends, want % 5 == 4)
    assert not mr.verify_buffer(tmp_path / "b").findings


def test_a_last_step_of_some_environments_is_preserved(tmp_path):
    path = tmp_path / "a.csv"
    save(path, {"states": np.arange(8.0)[:, None]}, 8)
    mr.load(path, tmp_path / "b", layout="skrl", num_envs=3)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.heads.tolist() == [3, 3, 2]


def test_a_last_step_of_some_environments_is_written_as_theirs(tmp_path):
    schema = mr.Schema({"x": mr.Field((1,), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 8, 3, autoreset="disabled") as buffer:
        buffer.extend(x=np.arange(6.0, dtype=np.float32).reshape(2, 3, 1))
        buffer.add({"x": np.float32([[6], [7]])}, env_ids=[0, 1])
        mr.export(buffer, tmp_path / "a.csv", layout="skrl")
    assert [float(row[0]) for row in cells(tmp_path / "a.csv")[1:]] == [*range(8)]
    mr.load(tmp_path / "a.csv", tmp_path / "c", layout="skrl", num_envs=3)
    with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
        assert loaded.heads.tolist() == [3, 3, 2]


def test_what_was_written_comes_in_again(tmp_path):
    with make(tmp_path / "b", 3, 60) as buffer:
        mr.export(buffer, tmp_path / "a.csv", layout="skrl")
        mr.load(tmp_path / "a.csv", tmp_path / "c", layout="skrl", num_envs=3)
        with mr.ReplayBuffer.open(tmp_path / "c") as loaded:
            one, other = buffer.gather_all(), loaded.gather_all()
            np.testing.assert_array_equal(one.env_ids, other.env_ids)
            for name in SCHEMA.paths:
                a, b = np.asarray(one[name]), np.asarray(other[name])
                np.testing.assert_array_equal(a.reshape(len(a), -1), b.reshape(len(a), -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, r"num_envs must be an integer in \[1, 120\] for 120 rows"),
        ({"num_envs": 121}, "num_envs must be .* got 121"),
        ({"num_envs": 7, "cursor": 1}, "cursor must be .* 120 rows of 7 environments"),
        ({"num_envs": 3, "cursor": 40}, r"cursor must be an integer in \[0"),
        (
            {"layout": None, "num_envs": 3},
            r"num_envs needs layout='skrl', got 3 without a layout\.",
        ),
        ({"layout": "x"}, "layout must be 'skrl', or None for mmreplay's own, got"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, options, message):
    with make(tmp_path / "b", 3, 60) as buffer:
        mr.export(buffer, tmp_path / "a.csv", layout="skrl")
        with pytest.raises(SchemaError, match=r"skrl's layout is not gzipped\. Use a name that"):
            mr.export(buffer, tmp_path / "a.csv.gz", layout="skrl")
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "a.csv", tmp_path / "c", **{"layout": "skrl", **options})
    assert not (tmp_path / "c").exists()
