"""Mistakes end in one clear line and an exit code, never in a traceback."""

import json
import re
import subprocess
import sys

import pytest

import mmreplay as mr
from mmreplay import errors
from mmreplay.cli import exits
from mmreplay.cli.app import build
from mmreplay.cli.options import parse_count

READING = ["info", "head", "stats", "verify", "plot", "clear"]


def one_line(err):
    assert err.startswith("mmreplay: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", READING)
def test_a_path_that_is_not_there_is_refused(cli, tmp_path, command):
    code, out, err = cli(command, tmp_path / "typo")
    assert (code, out) == (3, "")
    assert "does not exist. Check the path" in one_line(err)


@pytest.mark.parametrize("command", READING)
def test_a_file_instead_of_a_folder_is_refused(cli, tmp_path, command):
    (tmp_path / "file").write_text("")
    code, _, err = cli(command, tmp_path / "file")
    assert code == 3
    assert "must be a buffer's folder, got a file" in one_line(err)


@pytest.mark.parametrize("command", READING)
def test_a_folder_that_is_no_buffer_is_refused(cli, tmp_path, command):
    code, _, err = cli(command, tmp_path)
    assert code == 3
    assert "is not a replay buffer" in one_line(err)


def test_verify_reports_in_json_also_what_cannot_be_opened(cli, tmp_path, path):
    for where, told, status in (
        (tmp_path / "typo", "does not exist", 3),
        (tmp_path, "is not a replay buffer", 3),
        (path, "Install a newer mmreplay", 3),
    ):
        if where == path:
            file = path / "metadata.json"
            file.write_text(file.read_text().replace("  1,\n  0", "  7,\n  0"))
        code, out, err = cli("verify", where, "--json")
        assert code == status
        report = json.loads(out)
        assert told in report["error"]
        assert report == {
            "path": str(where),
            "ok": False,
            "findings": [],
            "deep": True,
            "error": one_line(err).removeprefix("mmreplay: ").rstrip("\n"),
        }


def test_a_damaged_buffer_fails(cli, path):
    (path / "data-000001" / "COMMIT").write_bytes(b"")
    code, _, err = cli("info", path)
    assert code == 1
    assert "COMMIT has 0 bytes" in one_line(err)


@pytest.mark.parametrize("command", READING)
def test_metadata_that_is_no_json_is_damage(cli, path, command):
    (path / "metadata.json").write_text("{no json")
    code, out, err = cli(command, path)
    assert code == 1
    assert "is not JSON" in out + err
    if command != "verify":
        assert "restore it from a copy" in one_line(err)


def test_a_newer_version_is_refused(cli, path):
    file = path / "metadata.json"
    file.write_text(file.read_text().replace("  1,\n  0", "  7,\n  0"))
    code, _, err = cli("info", path)
    assert code == 3
    assert "Install a newer mmreplay" in one_line(err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["info"], "Missing argument 'PATH'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["info", "x", "--nonsense"], "No such option"),
        (["head", "x", "-n", "-3"], "must be at least 1, got -3"),
        (["head", "x", "-n", "many"], "must be an integer such as 1e6, got 'many'"),
        (["load", "a.npz", "b"], "No such command 'load': mmreplay convert SRC DST"),
        (["export"], "No such command 'export': mmreplay convert SRC DST"),
        (["help", "export"], "No such command 'export': mmreplay convert SRC DST"),
        (["help", "nonsense"], "No such command 'nonsense'"),
        (["resize", "x", "1e20"], "at most 9,223,372,036,854,775,807, got 1e20"),
        (["record", "E", "x", "--steps", "1e19"], "'--steps': must be at most 9,22"),
        (
            ["record", "CartPole-v1", "x", "--steps", "9", "--num-envs", "1e9"],
            "'--num-envs': must be at most 1,048,576, got 1e9",
        ),
        (["resize", "x", "0"], "must be at least 1, got 0"),
        (["resize", "x", "1.5"], "must be an integer such as 1e6, got '1.5'"),
        (["resize", "x", "inf"], "must be an integer such as 1e6, got 'inf'"),
        (["record", "E", "x"], "Missing option '--steps'"),
        (["record", "E", "", "--steps", "9"], "the path is empty"),
        (["info", ""], "the path is empty"),
        (["record", "E", "x", "--steps", "0"], "must be at least 1, got 0"),
        (["record", "E", "x", "--steps", "9", "--seed", "-1"], "--seed must be at"),
        (["record", "E", "x", "--steps", "9", "--seed", "y"], "must be an integer, got 'y'"),
        (["head", "x", "--env", "y"], "must be an integer, got 'y'"),
        (["clear", "x", "--env", "1.5"], "must be an integer, got '1.5'"),
        (["convert", "x", "y.npz", "--env", "y"], "must be an integer, got 'y'"),
        (["record", "E", "x", "--steps", "9", "--on-resume", "no"], "must be one of"),
        (["record", "E", "x", "--steps", "9", "--policy", "a"], "must be MODULE:NAME"),
        (["record", "E", "x", "--steps", "9", "--policy", "no_such:f"], "no_such"),
        (["record", "E", "x", "--steps", "9", "--policy", "os:no_such"], "no_such"),
        (["record", "E", "x", "--steps", "9", "--policy", "os:sep"], "not callable"),
        (["plan", "--capacity", "9"], "pass either"),
        (["plan", "x", "--field", "a:bool", "--capacity", "9"], "pass either"),
        (["plan", "--field", "a:bool"], "--capacity is missing. Give the rows"),
        (["plan", "--field", "a", "--capacity", "9"], "must be NAME:DTYPE"),
        (["plan", "--field", "a:bool:3xx-1", "--capacity", "9"], "must be NAME:DTYPE"),
        (["plan", "--field", "a:floot", "--capacity", "9"], "bfloat16, got 'floot'"),
        *(
            (
                ["plan", "--field", f"a:uint8:{shape}", "--capacity", "9"],
                "must be NAME:DTYPE or NAME:DTYPE:SHAPE, such as reward:float32, "
                "observation:uint8:84x84, tokens:int32:0-4096 or mission:text:200, "
                f"got 'a:uint8:{shape}'",
            )
            for shape in ("3x", "x3", "3xx4", "3,", "x", "", "0-4x")
        ),
        (
            [
                "plan",
                "--field",
                "a:bool",
                "--field",
                "b:bool",
                "--field",
                "a:int8:3",
                "--capacity",
                "9",
            ],
            "--field must name each field once, got 'a' twice, now by 'a:int8:3'",
        ),
        (
            ["plan", "a:float32:3", "--capacity", "9"],
            "must be a Gymnasium id or a folder, got 'a:float32:3'. Give a field with "
            "--field a:float32:3.",
        ),
        (
            ["plan", "--field", "a:text:9", "--length", "a=3,a=4", "--capacity", "9"],
            "--length must name each field once, got 'a=3,a=4'",
        ),
        (
            ["convert", "x", "y.npz", "-o", "b-c=1", "-o", "b_c=1"],
            "--option must give 'b_c' once, got 'b_c=1' too",
        ),
        (["plan", "--field", "a:text", "--capacity", "9"], "such as a:text:200"),
        (["plan", "--field", "a:str:9", "--capacity", "9"], "such as a:text:200"),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_line(cli, args, message):
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    assert message in one_line(err)
    assert "--help" in err


def test_an_unknown_environment_is_refused(cli, tmp_path):
    pytest.importorskip("gymnasium")
    code, _, err = cli("record", "Nonsense-v9", tmp_path / "b", "--steps", "9")
    assert code == 3
    assert "Nonsense" in one_line(err)
    code, _, err = cli("plan", "Nonsense-v9", "--capacity", "9")
    assert code == 3
    assert "A folder Nonsense-v9 does not exist either" in one_line(err)


def test_an_environment_of_the_buffer_that_is_not_there_is_refused(cli, path):
    for command in (["head"], ["clear", "--yes"]):
        code, _, err = cli(*command, path, "--env", "7")
        assert code == 3
        told = "--env must be in [0, 2), got 7. The buffer has 2 environments, "
        assert told in one_line(err)


def test_rows_of_an_empty_buffer_are_refused(cli, tmp_path):
    schema = mr.Schema({"x": mr.Field((), "int64")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10).close()
    code, _, err = cli("head", tmp_path / "b")
    assert code == 3
    assert "holds no rows. Record some" in one_line(err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CorruptError("x"), 1),
        (errors.FailedError("x"), 1),
        (errors.FullError("x"), 1),
        (errors.LockedError("x"), 1),
        (errors.StarvedError("x"), 1),
        (errors.ForkedError("x"), 1),
        (errors.FormatError("x"), 3),
        (errors.VersionError("x"), 3),
        (errors.SchemaError("x"), 3),
        (errors.SourceError("x"), 3),
        (errors.EmptyError("x"), 3),
        (errors.StaleError("x"), 3),
        (PermissionError(13, "Permission denied", "f"), 1),
        (ModuleNotFoundError("x"), 1),
        (KeyError("a bug of ours"), None),
    ],
)
def test_each_error_has_its_code(error, code):
    assert exits.code_of(error) == code


def test_every_error_of_ours_has_a_code():
    for thing in vars(errors).values():
        if isinstance(thing, type) and issubclass(thing, errors.ReplayError):
            assert exits.code_of(thing("x")) in (1, 3)


def test_a_system_error_is_reported_with_its_file():
    told = exits.message_of(PermissionError(13, "Permission denied", "a/b"))
    assert told == "a/b: Permission denied. Check the path and its permissions."
    told = exits.message_of(FileNotFoundError(2, "No such file", "a/b"))
    assert told == "a/b does not exist. Check the path."


def test_a_message_of_many_lines_becomes_one_with_its_notes():
    error = errors.SchemaError("one\n  two")
    error.add_note("three")
    assert exits.message_of(error) == "one two; three"


def test_a_bug_of_ours_is_not_hidden(monkeypatch, cli, path):
    def broken(*_):
        raise KeyError("a bug")

    monkeypatch.setattr("mmreplay.cli.info.gather", broken)
    with pytest.raises(KeyError, match="a bug"):
        cli("info", path)


def test_an_interruption_of_what_writes_no_rows_speaks_of_none(monkeypatch, cli, path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mmreplay.cli.info.gather", interrupted)
    code, _, err = cli("info", path)
    assert (code, err) == (130, "mmreplay: interrupted\n")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("written", [0, 3])
def test_an_interrupted_recording_says_whether_rows_were_written(
    monkeypatch, cli, tmp_path, there, written
):
    pytest.importorskip("gymnasium")
    where, schema = tmp_path / "cart", mr.Schema({"reward": mr.Field((), "float32")})
    if there:
        with mr.ReplayBuffer.create(where, schema, 10) as buffer:
            buffer.add(reward=1.0)

    def interrupted(*_, **__):
        if written:
            make = mr.ReplayBuffer.open if there else mr.ReplayBuffer.create
            more = ("r+",) if there else (schema, 10)
            with make(where, *more) as buffer:
                for _ in range(written):
                    buffer.add(reward=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("mmreplay.recording.record", interrupted)
    code, _, err = cli("record", "CartPole-v1", where, "--steps", 9)
    what = "rows written before are committed" if written else "no row was written"
    assert (code, err) == (130, f"mmreplay: interrupted; {what}\n")


@pytest.mark.parametrize("function", ["make_page", "make_server"])
def test_an_interruption_before_the_page_is_served_changed_nothing(
    monkeypatch, cli, path, function
):
    pytest.importorskip("starlette")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mmreplay.page.launch.{function}", interrupted)
    code, _, err = cli("view", path, "--no-open")
    assert code == 130
    assert "interrupted; buffers were only read" in one_line(err)


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("snapshot", "mmreplay.buffer.copy_files.snapshot"),
        ("compact", "mmreplay.buffer.copy_rows.compact"),
        ("repair", "mmreplay.repairing.repair"),
    ],
)
def test_an_interrupted_copy_is_called_none(monkeypatch, cli, path, tmp_path, command, function):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(function, interrupted)
    code, _, err = cli(command, path, tmp_path / "copy")
    assert code == 130
    assert f"interrupted; {tmp_path / 'copy'} is not a buffer yet" in one_line(err)
    assert "Run the same command again" in one_line(err)
    code, _, err = cli(command, path, path)
    assert code == 130
    assert f"interrupted; {path} is already complete" in one_line(err)


LOADED = """
import sys
class Struck:
    def find_spec(self, name, *_):
        if name == "{name}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Struck())
from mmreplay.cli import main
main(["info", "x"])
"""


@pytest.mark.parametrize("name", ["mmreplay.cli.exits", "typer", "mmreplay.cli.app"])
@pytest.mark.sliced(2)
def test_an_interruption_while_commands_are_loaded_is_reported_in_one_line(name):
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(name=name)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == exits.INTERRUPTED
    assert done.stderr == "mmreplay: interrupted\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command(cli, flag):
    code, out, _ = cli(flag)
    assert code == 0
    for name in (*READING, "record", "plan", "resize"):
        assert name in out


def test_every_command_explains_itself(cli):
    for name in (*READING, "record", "plan", "resize"):
        code, out, _ = cli(name, "--help")
        assert code == 0
        assert "--json" in out


@pytest.mark.parametrize("words", ["--version", "version"])
def test_the_version_is_printed(cli, words):
    assert cli(words) == (0, f"mmreplay {mr.__version__}\n", "")


def test_help_is_a_command_too(cli):
    assert cli("help") == cli("--help")
    assert cli("help", "record") == cli("record", "--help")


def test_brackets_in_help_texts_are_printed(cli):
    root = build()
    found = 0
    for name, command in root.commands.items():
        out = re.sub(r"[\s│]", "", cli(name, "--help")[1])
        for param in command.params:
            for text in re.findall(r"\[[^\]]*\]", param.help or ""):
                assert re.sub(r"[\s\\]", "", text) in out
                found += 1
    assert found >= 2  # at least record's policy


def closed(path, redirections):
    """Run info with some of its streams closed."""
    command = f"{sys.executable} -m mmreplay info {path} --json {redirections}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)


def test_a_closed_stdout_is_one_line(path):
    done = closed(path, ">&-")
    assert done.returncode == exits.FAILED
    assert "stdout is closed. Redirect it" in one_line(done.stderr)


def test_a_closed_stdout_prints_nothing_elsewhere(path):
    done = closed(path, ">&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (exits.FAILED, "", "")


def test_other_closed_streams_are_no_error(path):
    done = closed(path, "<&- 2>&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["path"] == str(path)


def test_no_file_takes_the_number_of_a_closed_stream(path):
    """What a C library prints to number 2 would be written into that file."""
    code = (
        "import os, sys\n"
        "from mmreplay.cli import info\n"
        "from mmreplay.cli.run import run\n"
        "def gather(buffer):\n"
        "    print([os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 2)])\n"
        "    sys.exit(0)\n"
        "info.gather = gather\n"
        "run(['info', sys.argv[1]])\n"
    )
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" "$2" <&- 2>&-', sys.executable, code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "['/dev/null', '/dev/null']\n"


@pytest.mark.parametrize(
    "words",
    [
        *([command, "~/no"] for command in READING),
        ["resize", "~/no", "9"],
        ["plan", "~/no"],
        ["convert", "~/no", "x.npz"],
        ["snapshot", "~/no", "x"],
        ["compact", "~/no", "x"],
        ["repair", "~/no"],
        ["repair", "~/a", "--like=~/no"],
    ],
    ids=" ".join,
)
def test_a_tilde_that_the_shell_left_is_expanded(words, path, monkeypatch, cli):
    """Shells expand ``~`` only where it begins a word: not in ``--like=~/no``."""
    monkeypatch.setenv("HOME", str(path.parent))
    _, out, err = cli(*words)
    assert f"{path.parent}/no" in out + err
    assert "~" not in out + err


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["convert", "~/a", "~/b.npz"], "b.npz"),
        (["snapshot", "~/a", "~/b"], "b/metadata.json"),
        (["compact", "~/a", "~/b"], "b/metadata.json"),
        (["repair", "~/a", "~/b"], "b/metadata.json"),
        (["plot", "~/a", "--output=~/b.png"], "b.png"),
        (["record", "CartPole-v1", "~/b", "--steps", "9"], "b/metadata.json"),
        (["plan", "--field", "a:bool", "--capacity", "9", "--at=~"], "."),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_target_is_made_in_the_users_folder(words, made, path, monkeypatch, cli):
    for module in ("matplotlib", "gymnasium"):
        pytest.importorskip(module)
    monkeypatch.setenv("HOME", str(path.parent))
    assert cli(*words)[0] == 0
    assert (path.parent / made).exists()


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "mmreplay", "info", "/no/such/buffer"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    one_line(done.stderr)


def test_a_reader_that_has_seen_enough_is_no_error(path):
    command = f"{sys.executable} -m mmreplay info {path} --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e6", 1_000_000),
        ("1_000", 1000),
        ("1,000", 1000),
        (5, 5),
        ("+7", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_counts_are_read_as_people_write_them(text, number):
    assert parse_count(text) == number
