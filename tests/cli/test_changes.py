"""record, clear, resize, verify and plot, and what they leave."""

import io
import shutil
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

import mmreplay as mr


def test_clear_gives_up_the_rows_and_positions_go_on(facts, path):
    found = facts("clear", path, "--yes")
    assert (found["rows_given_up"], found["steps"]) == (90, 0)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.heads.tolist() == [45, 45]


def test_clear_of_one_environment_leaves_the_others(facts, path):
    assert facts("clear", path, "--env", 1, "-y")["steps"] == 45


def test_clear_does_nothing_where_nobody_says_yes(cli, path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = cli("clear", path)
    assert code == 2
    assert "There is no terminal to ask on" in err
    assert "Add --yes" in err
    with mr.ReplayBuffer.open(path) as buffer:
        assert len(buffer) == 90


@pytest.mark.parametrize(("answer", "left"), [("n", 90), ("y", 0)])
def test_clear_asks(cli, path, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin", FakeTerminal())
    monkeypatch.setattr("typer.confirm", lambda *_, **__: answer == "y")
    code, _, err = cli("clear", path)
    assert (code, err) == ((0, "") if answer == "y" else (1, NO))
    with mr.ReplayBuffer.open(path) as buffer:
        assert len(buffer) == left


class FakeTerminal:
    def isatty(self):
        return True


NO = "mmreplay: nothing was changed\n"


def test_clear_of_an_unknown_environment_is_refused(cli, path):
    code, _, err = cli("clear", path, "--env", 2, "--yes")
    assert code == 3
    assert "--env must be in [0, 2), got 2" in err


def test_clear_of_a_buffer_in_use_names_who_uses_it(cli, path):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None):
        code, _, err = cli("clear", path, "--yes")
    assert code == 1
    assert "already open for writing" in err


def test_resize_keeps_the_newest_rows_and_gives_the_space_back(facts, path):
    found = facts("resize", path, "20", "--yes")
    assert (found["capacity"], found["capacity_before"]) == (20, 100)
    assert (found["rows_given_up"], found["steps"]) == (50, 40)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.span.first.tolist() == [25, 25]
    assert [p.name for p in path.glob("data-*")] == ["data-000002"]


def test_resize_asks_only_where_rows_would_go(cli, path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli("resize", path, "1e3")[0] == 0
    code, _, err = cli("resize", path, "20")
    assert code == 2
    assert "Remove the 50 oldest rows" in err


def test_verify_of_a_whole_buffer_exits_0(cli, facts, path):
    found = facts("verify", path)
    assert found["ok"] is True
    assert found["findings"] == []
    assert found["rows"] == 90
    code, out, _ = cli("verify", path)
    assert code == 0
    assert ": whole" in out
    assert "way out" not in out


def test_verify_of_a_damaged_buffer_exits_1_and_says_where(cli, path):
    # Longer than a line: what is to be typed is not folded.
    path = path.rename(path.with_name("a" * 160))
    with (path / "data-000001" / "flags.bin").open("r+b") as file:
        file.write(b"\xff")
    (path / "mine").write_text("")
    code, out, _ = cli("verify", path)
    assert code == 1
    assert "DAMAGED" in out
    assert "DAMAGE flags: data-000001/flags.bin byte 0: environment 0, position 0" in out
    assert "note unknown: mine" in out
    way = f"copy its intact rows with mmreplay repair {path} TARGET"
    assert out.splitlines()[-1].endswith(f"restore it from a copy, or {way}")
    code, out, _ = cli("verify", path, "--json")
    assert code == 1
    assert '"ok": false' in out


def test_verify_lists_the_first_of_many_findings(cli, path):
    with (path / "data-000001" / "flags.bin").open("r+b") as file:
        file.write(b"\xff" * 200)
    assert "more findings" in cli("verify", path)[1]


def test_looking_works_on_a_copy_that_cannot_be_written(cli, path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    for folder in (tmp_path / "copy", tmp_path / "copy" / "data-000001"):
        folder.chmod(0o500)
    try:
        for command in ("info", "head", "stats", "verify"):
            assert cli(command, tmp_path / "copy")[0] == 0
    finally:
        for folder in (tmp_path / "copy", tmp_path / "copy" / "data-000001"):
            folder.chmod(0o700)


def test_record_adds_exactly_so_many_steps_and_goes_on(facts, tmp_path):
    pytest.importorskip("gymnasium")
    where = tmp_path / "cart"
    args = ("record", "CartPole-v1", where, "--steps", "101", "--num-envs", "2")
    found = facts(*args, "--capacity", "1e3", "--seed", "0")
    assert found["steps"] == 101
    assert found["seconds"] > 0
    assert facts("info", where)["steps"] == 101
    assert facts(*args)["steps"] == 101
    assert facts("info", where)["steps"] == 202
    assert facts("verify", where)["ok"]


def test_record_plays_a_policy_of_the_users(facts, tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    (tmp_path / "my_policy_of_ones.py").write_text(
        "import numpy as np\ndef act(observation):\n"
        "    return np.ones(len(observation), np.int64)\n"
    )
    monkeypatch.chdir(tmp_path)
    policy = ("--policy", "my_policy_of_ones:act")
    facts("record", "CartPole-v1", "cart", "--steps", "30", *policy)
    sys.modules.pop("my_policy_of_ones")
    found = facts("stats", "cart")["fields"]["action"]
    assert (found["min"], found["max"]) == (1, 1)


def test_record_says_before_it_begins_that_a_ring_keeps_fewer(cli, tmp_path):
    path = tmp_path / "cart"
    for steps in (50, 40):
        assert cli("record", "CartPole-v1", path, "--steps", steps)[::2] == (0, "")
    assert cli("record", "CartPole-v1", path, "--steps", 2000)[::2] == (
        0,
        f"mmreplay: {path} holds 102 rows: only the newest of these 2,000 steps will "
        "stay; mmreplay resize enlarges it\n",
    )


def test_record_says_where_the_ring_keeps_fewer(cli, facts, tmp_path):
    pytest.importorskip("gymnasium")
    told = [
        cli("record", "CartPole-v1", tmp_path / "b", "--steps", steps)[1] for steps in (30, 300)
    ]
    assert "is full" not in told[0]
    held = facts("info", tmp_path / "b")["steps"]
    assert f"the ring is full and holds the newest {held} of them" in told[1]
    assert "mmreplay resize" in told[1]


@pytest.mark.slow
@pytest.mark.crash
def test_an_interrupted_recording_keeps_what_it_has(facts, tmp_path):
    pytest.importorskip("gymnasium")
    where = tmp_path / "cart"
    args = ["record", "CartPole-v1", where, "--steps", "1e8", "--capacity", "1e4"]
    recording = subprocess.Popen(
        [sys.executable, "-m", "mmreplay", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job is started with Ctrl-C ignored, and passes it on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (where / "metadata.json").exists() or facts("info", where)["steps"] < 9:
            assert recording.poll() is None
        recording.send_signal(signal.SIGINT)
        out, err = recording.communicate(timeout=120)
    finally:
        recording.kill()
        recording.wait()
    assert (recording.returncode, out) == (130, "")
    assert err == "mmreplay: interrupted; rows written before are committed\n"
    assert facts("info", where)["recovery"]["how"] == "clean"
    assert facts("verify", where)["ok"]


@pytest.fixture
def png(path, tmp_path):
    pytest.importorskip("matplotlib")
    return tmp_path / "out.png"


def test_plot_writes_a_png(facts, path, png):
    assert facts("plot", path, "-o", png)["episodes"] == 10
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = np.frombuffer(data[16:24], ">u4").tolist()
    assert (width, height) == (1200, 800)


def test_plot_goes_here_under_the_buffers_name(cli, path, png, monkeypatch):
    monkeypatch.chdir(png.parent)
    assert cli("plot", path)[0] == 0
    assert (png.parent / "a.png").exists()


def test_plot_of_a_buffer_without_rewards_or_ends(cli, tmp_path, png):
    schema = mr.Schema({"observation": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 10) as buffer:
        buffer.extend(observation=np.arange(5))
    assert cli("plot", tmp_path / "b", "-o", png)[0] == 0


def test_plot_of_nothing_is_refused(cli, tmp_path, png, monkeypatch):
    # Of all that is missing, this is told first: to install a library would not help.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = cli("plot", tmp_path / "b", "-o", png)
    assert code == 3
    assert f"{tmp_path / 'b'}" in err
    assert "matplotlib" not in err
    schema = mr.Schema({"observation": mr.Field((), "int64")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10).close()
    code, _, err = cli("plot", tmp_path / "b", "-o", png)
    assert code == 3
    assert "holds no steps" in err


def test_plot_without_matplotlib_says_what_to_install(cli, path, png, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = cli("plot", path, "-o", png)
    assert code == 1
    assert "pip install 'mmreplay[plot]'" in err


def test_plot_to_a_file_that_is_no_png_is_refused(cli, path, png):
    code, _, err = cli("plot", path, "-o", png.parent / "out.pdf")
    assert code == 2
    assert "--output must be" in err


def test_resize_warns_once_of_a_disk_that_is_too_small(cli, path, monkeypatch):
    usage = shutil.disk_usage(path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = cli("resize", path, 50_000)
    assert code == 0
    assert err.count("adds will raise FullError") == 1


def test_a_large_recording_says_its_size_before_it_begins(cli, tmp_path, monkeypatch):
    def begun(*args, **kwargs):
        raise mr.errors.FailedError("the recording begins")

    monkeypatch.setattr("mmreplay.recording.record", begun)
    _, _, err = cli("record", "CartPole-v1", tmp_path / "a", "--steps", 100_000_000)
    assert "a: 100,000,000 rows take about" in err
    assert err.index("take about") < err.index("the recording begins")
    _, _, err = cli("record", "CartPole-v1", tmp_path / "a", "--steps", 1000)
    assert "take about" not in err
