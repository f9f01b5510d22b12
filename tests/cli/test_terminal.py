"""Nothing that a file says reaches a terminal as anything but text."""

import json
import os
import subprocess
import sys

import google_crc32c
import pytest

import mmreplay as mr
from mmreplay.cli import show
from mmreplay.disk.lock import WriterLock

EVIL = "\x1b]0;pwned\x07"
SEEN = r"\x1b]0;pwned\x07"


def assert_text(*printed):
    for text in printed:
        assert all(line.isprintable() for line in text.splitlines()), text
        assert "\x1b" not in text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("runs/pong: Größe 1,000", "runs/pong: Größe 1,000"),
        (EVIL, SEEN),
        ("a\nDAMAGE", r"a\nDAMAGE"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_is_not_seen_is_spelled_out(text, seen):
    assert show.printable(text) == seen


def test_names_of_files_are_printed_without_their_escapes(cli, path):
    os.close(os.open(os.fsencode(path) + b"/half\xff", os.O_CREAT))
    for folder in (path, path / "data-000001"):
        (folder / EVIL).touch()
        (folder / "a\nDAMAGE sum: nothing").touch()
    code, out, err = cli("verify", path)
    assert (code, err) == (0, "")
    assert_text(out)
    assert SEEN in out
    assert r"half\udcff" in out
    assert "\nDAMAGE" not in out
    code, out, _ = cli("verify", path, "--json")
    assert EVIL in {finding["file"] for finding in json.loads(out)["findings"]}
    assert "\x1b" not in out


@pytest.mark.parametrize("command", ["info", "head", "stats", "verify", "repair"])
def test_the_buffers_own_name_is_printed_without_its_escapes(cli, path, command):
    strange = path.with_name(f"b{EVIL}")
    path.rename(strange)
    _, out, err = cli(command, strange)
    assert_text(out, err)
    assert SEEN in out or command == "head"
    (strange / "metadata.json").write_text("{")
    _, out, err = cli(command, strange)
    assert_text(out, err)
    assert SEEN in out + err


@pytest.mark.parametrize("key", ["pid", "host"])
@pytest.mark.sliced(1)
def test_the_text_of_a_lock_is_printed_without_its_escapes(cli, path, key):
    text = {"pid": 12, "host": "here", "start": 1.0}
    lock = WriterLock(path)
    try:
        (path / "LOCK").write_text(json.dumps(text | {key: EVIL}).ljust(512))
        code, out, err = cli("info", path)
        assert (code, err) == (0, "")
        assert_text(out)
        other = "import mmreplay as mr, sys; mr.ReplayBuffer.open(sys.argv[1], 'r+')"
        found = subprocess.run(
            [sys.executable, "-c", other, str(path)], capture_output=True, text=True
        )
        assert "is being written by another process. Wait" in found.stderr
        assert_text(found.stderr)
    finally:
        lock.release()


@pytest.mark.parametrize("command", ["info", "head", "verify", "repair"])
def test_metadata_that_name_a_field_so_are_refused_by_name(cli, path, command):
    file = path / "metadata.json"
    body = file.read_bytes()[:-23].replace(b'"action"', b'"act\\u001b]0;x"')
    file.write_bytes(body + b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body))
    code, out, err = cli(command, path)
    assert code == (1 if command in ("verify", "repair") else 3)
    assert_text(out, err)
    message = r"must be one without control characters, got 'act\x1b]0;x'"
    assert message in out + err


def test_a_question_is_asked_without_escapes(path, monkeypatch):
    from mmreplay.cli import options

    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    confirm = lambda text, err: asked.append(text) or True  # noqa: E731
    monkeypatch.setattr(options.typer, "confirm", confirm)
    options.confirm(f"Give up {EVIL}?", False)
    assert asked == [f"Give up {SEEN}?"]


def test_a_column_of_such_a_name_is_left_out_and_reported(tmp_path):
    import numpy as np

    np.savez(tmp_path / "a.npz", **{"x": np.arange(4.0), f"y{EVIL}": np.arange(4.0)})
    report = mr.load(tmp_path / "a.npz", tmp_path / "b")
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.schema.paths == ("x",)
    assert any("was left out: field path" in note for note in report.doubts)
