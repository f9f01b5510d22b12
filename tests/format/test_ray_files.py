"""The optional folder ``ray/``: strict, bounded, durable, and left out of copies."""

import json
import os
import shutil

import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import CorruptError, FormatError, FullError
from mmreplay.format import ray_files
from mmreplay.format.ray_files import FrozenEpoch, Lease, Leases
from mmreplay.testing.disks import using
from mmreplay.verify import verify_buffer
from tests.format.support import fill, schema_of
from tests.security.test_hostile_folders import HUGE
from tools.torture.forged import bounded

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
WRITERS = (Lease(A, (0,), (5,), (9,)), Lease(B, (1, 0), (3, 9)), Lease(C, (2,), (0,)))
EPOCHS = [FrozenEpoch("x", 0, (5, 0, 1), (3, 0, 1), (A, B)), FrozenEpoch("x", 1, (7,), (7,), (A,))]


@pytest.fixture
def folder(tmp_path):
    """A closed buffer of two environments that was served."""
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema_of(), 12, 2, autoreset="disabled") as buffer:
        fill(buffer, 0, 30)
    ray_files.write_leases(path, Leases(WRITERS[:2]))
    ray_files.write_epochs(path, [FrozenEpoch("x", 0, (5, 0), (3, 0), (A, C))])
    return path


def test_what_is_written_is_read(tmp_path):
    assert ray_files.read_leases(tmp_path) == Leases((), 600.0)
    assert ray_files.read_epochs(tmp_path) == []
    written = Leases(WRITERS, 2.5)
    assert ray_files.write_leases(tmp_path, written) == written
    ray_files.write_epochs(tmp_path, EPOCHS)
    assert ray_files.read_leases(tmp_path) == written
    assert ray_files.read_epochs(tmp_path) == EPOCHS
    assert sorted(files.names(tmp_path / "ray")) == ["epochs.json", "writers.json"]


def test_the_bytes_of_the_files(tmp_path):
    ray_files.write_leases(tmp_path, Leases(WRITERS[:2], 60.0))
    assert json.loads((tmp_path / "ray" / "writers.json").read_bytes()) == {
        "version": 1,
        "idle_s": 60.0,
        "leases": [
            {"writer": A, "env_ids": [0], "first": [5], "stop": [9]},
            {"writer": B, "env_ids": [1, 0], "first": [3, 9], "stop": None},
        ],
    }
    ray_files.write_epochs(tmp_path, EPOCHS[1:])
    assert json.loads((tmp_path / "ray" / "epochs.json").read_bytes()) == {
        "version": 1,
        "epochs": [{"name": "x", "epoch": 1, "stops": [7], "counts": [7], "buffers": [A]}],
    }


def test_only_the_newest_leases_that_ended_are_remembered(tmp_path):
    count = ray_files.MAX_ENDED
    ended = [Lease(f"{n:032x}", (n,), (0,), (n,)) for n in range(count + 10)]
    holding = Lease(A, (3,), (1,))
    written = ray_files.write_leases(tmp_path, Leases((holding, *ended)))
    assert written.leases == (holding, *ended[10:])
    assert ray_files.read_leases(tmp_path) == written


WRITER = WRITERS[0].to_json()
EPOCH = EPOCHS[1].to_json()
WRONG_WRITERS = {
    "no list": ({"leases": {}}, r"leases must be a list, got \{\}"),
    "no object": ({"leases": [3]}, r"leases\[0\] must be an object with"),
    "a member missing": ({"leases": [{"writer": A}]}, r"leases\[0\] must be an object"),
    "writer": ({"leases": [WRITER | {"writer": "x"}]}, "32 hexadecimal digits, got 'x'"),
    "no environment": ({"leases": [WRITER | {"env_ids": []}]}, "one or more, each once"),
    "twice": ({"leases": [WRITER | {"env_ids": [1, 1]}]}, "one or more, each once"),
    "negative": ({"leases": [WRITER | {"env_ids": [-1]}]}, r"integers in \[0, 10"),
    "a float": ({"leases": [WRITER | {"first": [1.0]}]}, r"integers in \[0, 46"),
    "a bool": ({"leases": [WRITER | {"first": [True]}]}, "got True"),
    "a position": ({"leases": [WRITER | {"first": [1 << 62]}]}, r"first must be"),
    "other lengths": ({"leases": [WRITER | {"stop": [1, 2]}]}, "a list of 1 integers"),
    "two of a writer": ({"leases": [WRITER, WRITER]}, f"names the writer {A} twice"),
    "two holders": (
        {"leases": [WRITER | {"stop": None}, WRITER | {"stop": None, "writer": B}]},
        "environment 0 is held by two writers",
    ),
    "idle for ever": ({"leases": [], "idle_s": 0}, "idle_s must be a number above 0"),
    "idle": ({"leases": [], "idle_s": "1"}, "idle_s must be a number above 0, got"),
    "another version": ({"version": 2, "leases": []}, "version must be 1, got 2"),
    "no version": ({"version": None, "leases": []}, "version must be 1, got None"),
}
WRONG_EPOCHS = {
    "no list": ({"epochs": 1}, "epochs must be a list, got 1"),
    "no object": ({"epochs": [[]]}, r"epochs\[0\] must be an object with"),
    "name": ({"epochs": [EPOCH | {"name": ""}]}, "1 to 256 characters, got ''"),
    "long name": ({"epochs": [EPOCH | {"name": "x" * 300}]}, "1 to 256 characters"),
    "epoch": ({"epochs": [EPOCH | {"epoch": -1}]}, r"epoch must be integers in"),
    "lengths": ({"epochs": [EPOCH | {"counts": []}]}, "a list of 1 integers"),
    "buffers": ({"epochs": [EPOCH | {"buffers": A}]}, "buffers must be a list"),
    "a buffer": ({"epochs": [EPOCH | {"buffers": ["x"]}]}, "digits each, got 'x'"),
    "a buffer twice": ({"epochs": [EPOCH | {"buffers": [A, A]}]}, "each once"),
    "twice": ({"epochs": [EPOCH, EPOCH]}, "has epoch 1 of 'x' twice"),
}


@pytest.mark.parametrize("kind", WRONG_WRITERS)
def test_leases_that_no_server_wrote_are_refused(folder, kind):
    value, message = WRONG_WRITERS[kind]
    put(folder / "ray" / "writers.json", value)
    with pytest.raises(FormatError, match=message):
        ray_files.read_leases(folder)
    assert noted(folder) == [("beside", "ray/writers.json")]


@pytest.mark.parametrize("kind", WRONG_EPOCHS)
def test_epochs_that_no_server_wrote_are_refused(folder, kind):
    value, message = WRONG_EPOCHS[kind]
    put(folder / "ray" / "epochs.json", value)
    with pytest.raises(FormatError, match=message):
        ray_files.read_epochs(folder)
    assert noted(folder) == [("beside", "ray/epochs.json")]


def put(path, value):
    path.write_text(json.dumps({"version": 1, "idle_s": 1.0} | value))


def noted(folder):
    report = verify_buffer(folder)
    assert report.ok
    return [(finding.kind, finding.file) for finding in report.findings]


def test_unknown_members_are_ignored(folder):
    path = folder / "ray" / "writers.json"
    put(path, {"leases": [WRITER | {"more": 1}], "more": 1})
    assert ray_files.read_leases(folder).leases == WRITERS[:1]


def test_a_buffer_that_was_served_is_whole(folder):
    assert noted(folder) == []
    (folder / "ray" / "tmp-writers.json").touch()
    assert noted(folder) == []


def test_verify_compares_with_the_buffers_environments(folder):
    ray_files.write_leases(folder, Leases(WRITERS))
    ray_files.write_epochs(folder, EPOCHS[1:])
    messages = [finding.message for finding in verify_buffer(folder).findings]
    assert "environments must be below 2, got 2" in messages[1]
    assert "an epoch must have 2 environments, got 1" in messages[0]


def test_verify_notes_a_strange_name(folder):
    (folder / "ray" / "notes").touch()
    assert noted(folder) == [("unknown", "ray/notes")]


@pytest.mark.parametrize("name", ["writers.json", "epochs.json"])
@pytest.mark.parametrize("kind", HUGE)
def test_json_of_any_size_and_depth_is_refused(folder, name, kind):
    (folder / "ray" / name).write_bytes(HUGE[kind])
    read = ray_files.read_leases if name == "writers.json" else ray_files.read_epochs
    with bounded(256 << 20):
        with pytest.raises(FormatError, match=name):
            read(folder)
        assert noted(folder) == [("beside", f"ray/{name}")]


def test_damaged_bytes_are_refused(folder):
    (folder / "ray" / "writers.json").write_bytes(b"\xff{")
    with pytest.raises(CorruptError, match=r"writers\.json is not JSON"):
        ray_files.read_leases(folder)


def linked(path, elsewhere):
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def dangling(path, elsewhere):
    path.unlink()
    path.symlink_to(elsewhere)


def pipe(path, elsewhere):
    path.unlink()
    os.mkfifo(path)


def device(path, elsewhere):
    path.unlink()
    path.symlink_to("/dev/zero")


def a_folder(path, elsewhere):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("kind", [linked, dangling, pipe, device, a_folder])
@pytest.mark.parametrize("name", ["writers.json", "epochs.json"])
def test_what_is_no_regular_file_is_refused(folder, tmp_path, name, kind):
    kind(folder / "ray" / name, tmp_path / "elsewhere")
    read = ray_files.read_leases if name == "writers.json" else ray_files.read_epochs
    with pytest.raises(FormatError, match="not a regular file"):
        read(folder)
    assert noted(folder) == [("beside", f"ray/{name}")]


def test_a_folder_that_leads_outside_is_neither_read_nor_written(folder, tmp_path):
    shutil.move(folder / "ray", tmp_path / "elsewhere")
    (folder / "ray").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere" / "writers.json").read_bytes()
    for call in (
        lambda: ray_files.read_leases(folder),
        lambda: ray_files.read_epochs(folder),
        lambda: ray_files.write_leases(folder, Leases()),
        lambda: ray_files.write_epochs(folder, []),
    ):
        with pytest.raises(FormatError, match="must be a folder, got a link"):
            call()
    assert (tmp_path / "elsewhere" / "writers.json").read_bytes() == before
    assert noted(folder) == [("unknown", "ray")]


class NoSpace(files.Disk):
    """A disk without space for another byte."""

    def pwrite(self, fd, data, offset):
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_leases(folder):
    with using(NoSpace()), pytest.raises(FullError):
        ray_files.write_leases(folder, Leases(WRITERS[2:]))
    assert ray_files.read_leases(folder).leases == WRITERS[:2]
    ray_files.write_leases(folder, Leases(WRITERS[2:]))
    assert ray_files.read_leases(folder).leases == WRITERS[2:]


def test_too_many_leases_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_files, "MAX_NBYTES", 300)
    ray_files.write_leases(tmp_path, Leases(WRITERS[:1]))
    with pytest.raises(FormatError, match=r"at most 300 bytes, got.*fewer environ"):
        ray_files.write_leases(tmp_path, Leases(WRITERS))
    assert ray_files.read_leases(tmp_path).leases == WRITERS[:1]


def test_copies_leave_the_folder_out_and_a_resize_keeps_it(folder, tmp_path):
    before = ray_files.read_leases(folder)
    with mr.ReplayBuffer.open(folder, "r+") as buffer:
        buffer.snapshot(tmp_path / "snapshot")
        buffer.resize(20)
        buffer.add_field("more", mr.Field((), "float32"), 1.0)
    assert ray_files.read_leases(folder) == before
    mr.compact(folder, tmp_path / "compact")
    mr.repair(folder, tmp_path / "repaired")
    mr.export(folder, tmp_path / "a.npz")
    mr.load(tmp_path / "a.npz", tmp_path / "loaded")
    for name in ("snapshot", "compact", "repaired", "loaded"):
        assert not (tmp_path / name / "ray").exists()
        assert noted(tmp_path / name) == []


def test_a_writer_may_open_a_buffer_whose_files_are_damaged(folder):
    (folder / "ray" / "writers.json").write_bytes(b"{")
    with mr.ReplayBuffer.open(folder, "r+") as buffer:
        assert len(buffer) == 24
