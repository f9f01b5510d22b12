"""``mmreplay snapshot`` and ``mmreplay repair`` at the command line."""

import json
import shutil
import time

import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.verify import verify_buffer
from tests.buffer.test_snapshots import create, extend


@pytest.fixture
def path(tmp_path):
    with create(tmp_path / "b") as buffer:
        extend(buffer, 30)
    return tmp_path / "b"


def test_snapshot_makes_a_whole_buffer_and_says_what_it_holds(path, tmp_path, capsys):
    assert run(["snapshot", str(path), str(tmp_path / "c"), "--pause"]) == 0
    assert "60 rows" in capsys.readouterr().out
    assert run(["snapshot", str(path), str(tmp_path / "d"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["cut_rows"], told["heads"]) == (60, 0, [30, 30])
    assert verify_buffer(tmp_path / "d").findings == ()


def test_a_snapshot_over_something_is_refused(path, capsys):
    assert run(["snapshot", str(path), str(path.parent)]) == 3
    assert "is a folder with other files" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["snapshot", "repair"])
def test_a_target_that_is_a_buffer_is_left_alone(path, tmp_path, capsys, command):
    create(tmp_path / "c").close()
    assert run([command, str(path), str(tmp_path / "c")]) == 3
    told = "c already holds a buffer. Choose another path."
    assert capsys.readouterr().err.endswith(f"{told}\n")


def test_repair_names_the_rows_that_it_dropped(path, tmp_path, capsys):
    with (path / "data-000001" / "f000.bin").open("r+b") as file:
        file.seek(4800 * 5)
        file.write(b"x")
    assert run(["verify", str(path)]) == 1
    capsys.readouterr()
    assert run(["repair", str(path)]) == 0
    told = capsys.readouterr().out
    assert "dropped checksum: environment 0, positions [4, 6)" in told
    assert "58 rows copied, 2 dropped" in told
    assert run(["verify", f"{path}-repaired"]) == 0
    capsys.readouterr()
    assert run(["repair", str(path), str(tmp_path / "e"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cuts"] == [{"env_id": 0, "first": 4, "stop": 6, "why": "checksum"}]
    assert (told["rows"], told["cut_rows"]) == (58, 2)
    assert [each.split(":")[0] for each in told["restored"]] == [
        "episodes that lost their first steps"
    ]


def test_the_working_folder_is_repaired_into_a_sibling(path, capsys, monkeypatch):
    monkeypatch.chdir(path)
    assert run(["repair", "."]) == 0
    assert capsys.readouterr().out.startswith(f"{path}-repaired: ")


@pytest.mark.parametrize("command", ["snapshot", "compact", "repair"])
def test_a_copy_onto_itself_says_what_is_wrong(path, tmp_path, capsys, command):
    assert run([command, str(path), str(path)]) == 3
    assert f"{path} is the buffer itself. Choose a p" in capsys.readouterr().err
    none = str(tmp_path / "none")
    assert run([command, none, none]) == 3
    assert f"{none} does not exist. Check the path" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("options", [(), ("--in-place",)])
def test_the_root_of_all_folders_is_no_buffer_to_repair(capsys, options):
    assert run(["repair", "/", *options]) == 1
    assert "/ is not a replay buffer: it has no metadata" in capsys.readouterr().err


def test_a_folder_that_is_no_buffer_is_not_paused(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    assert run(["snapshot", str(tmp_path / "a"), str(tmp_path / "b"), "--pause"]) == 3
    assert "a is not a replay buffer" in capsys.readouterr().err
    assert not list((tmp_path / "a").iterdir())


def test_a_folder_that_accepts_no_files_is_reported(path, capsys):
    told = "(errno 2). Check the path, or choose another one"
    for command in ("snapshot", "convert"):
        assert run([command, str(path), "/proc/x.npz"]) == 1
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damaged", "way"),
    [
        ("f000.bin", "restore the buffer from a copy\n"),
        ("sums.bin", "folder with --keep-unproven\n"),
    ],
)
def test_a_repair_that_leaves_nothing_exits_1(path, tmp_path, capsys, damaged, way):
    with (path / "data-000001" / damaged).open("r+b") as file:
        file.write(b"x" * (path / "data-000001" / damaged).stat().st_size)
    assert run(["repair", str(path)]) == 1
    told = capsys.readouterr().out
    assert "0 rows copied, 60 dropped" in told
    assert "no row is left: restore the buffer from a copy" in told
    assert told.endswith(way)
    assert verify_buffer(f"{path}-repaired").findings == ()
    assert run(["repair", str(path), str(tmp_path / "e"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["cut_rows"]) == (0, 60)


def test_a_repair_of_a_whole_buffer_without_rows_exits_0(tmp_path):
    create(tmp_path / "b").close()
    assert run(["repair", str(tmp_path / "b")]) == 0


def test_what_cannot_be_repaired_exits_1(path, capsys):
    (path / "metadata.json").write_bytes(b"{")
    assert run(["repair", str(path)]) == 1
    assert "--like" in capsys.readouterr().err


def test_rows_dropped_for_a_lost_checksum_can_be_restored(path, capsys):
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        extend(buffer, 1)
    (path / "data-000001" / "sums.bin").unlink()
    assert run(["repair", str(path)]) == 0
    told = capsys.readouterr().out
    cut = "60 rows dropped only because a checksum is lost: --keep-unproven copies"
    assert cut in told
    assert "2 rows copied, 60 dropped" in told


def test_a_repair_without_a_record_says_what_that_costs(path, capsys):
    (path / "data-000001" / "COMMIT").unlink()
    assert run(["repair", str(path)]) == 0
    told = capsys.readouterr().out
    assert "Newer rows without a checksum (up to 1 committed ones per" in told
    assert "that had been overwritten or cleared may be back" in told


def test_a_repair_of_a_copy_says_what_the_last_commit_lacks(path, tmp_path, capsys):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        extend(buffer, 5)
        shutil.copytree(path, tmp_path / "copy")
    assert run(["repair", str(tmp_path / "copy")]) == 0
    told = capsys.readouterr().out
    assert "note rows above the last commit, at least 10, are discarded" in told
    assert "60 rows copied, 0 dropped" in told


def test_what_a_copy_is_made_with_is_committed_with_it(path, tmp_path, capsys):
    began = int(time.time())
    assert run(["snapshot", str(path), str(tmp_path / "c")]) == 0
    assert run(["repair", str(path), str(tmp_path / "d")]) == 0
    for made in ("c", "d"):
        capsys.readouterr()
        assert run(["info", str(tmp_path / made), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["commit"]["time_ns"] >= began * 10**9


def test_verify_counts_what_was_published_since_the_last_commit(path, capsys):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        extend(buffer, 2)
        assert run(["verify", str(path)]) == 0
    assert "; 4 published since\n" in capsys.readouterr().out
    (path / "data-000001" / "COMMIT").write_bytes(b"")
    assert run(["verify", str(path)]) == 1
    told = "rows       not counted: the file that says which rows there are is"
    assert told in capsys.readouterr().out
