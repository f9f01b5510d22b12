"""``mmreplay convert`` that is interrupted: what it says, and what is there."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.exits import INTERRUPTED
from mmreplay.cli.run import run
from mmreplay.convert import transfer
from mmreplay.convert.staging import Staging
from tests.convert.support import every_kind

TARGETS = ("a.npz", "a.pt", "a.safetensors", "a.csv", "a.csv.gz", "a.parquet", "again")


@pytest.fixture
def source(tmp_path):
    every_kind(tmp_path / "source").close()
    return tmp_path / "source"


def interrupt(monkeypatch, before=True):
    """Press Ctrl-C just before a target appears, or just after."""
    publish = Staging.publish

    def pressed(self):
        nbytes = 0 if before else publish(self)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return nbytes

    monkeypatch.setattr(Staging, "publish", pressed)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_left_and_the_same_command_begins_anew(
    tmp_path, source, monkeypatch, capsys, name
):
    fields = "observation,single/int8,terminated,truncated"
    command = ["convert", str(source), str(tmp_path / name), "--fields", fields]
    with monkeypatch.context() as pressed:
        interrupt(pressed)
        assert run(command) == INTERRUPTED
    out, err = capsys.readouterr()
    assert re.fullmatch(
        rf"mmreplay: interrupted; \S+/{name} was not made, the source was only read, "
        r"and nothing else is kept\. Run the same command again to start from the "
        "beginning\n",
        err,
    )
    assert not out
    assert names(tmp_path) == ["source"]
    assert run(command) == 0
    assert name in names(tmp_path)


def test_a_source_that_is_still_looked_at_is_said_to_be_as_it_was(
    tmp_path, source, monkeypatch, capsys
):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "open_source", pressed)
    assert run(["convert", str(source), str(tmp_path / "a.csv")]) == INTERRUPTED
    assert "a.csv was not made, the source was only read" in capsys.readouterr().err


def test_an_old_target_stays_as_it_was(tmp_path, source, monkeypatch, capsys):
    target = tmp_path / "a.npz"
    mr.export(source, target, fields=["terminated"])
    whole = target.read_bytes()
    interrupt(monkeypatch)
    command = ["convert", str(source), str(target), "--overwrite"]
    assert run(command) == INTERRUPTED
    assert "a.npz is as it was, the source" in capsys.readouterr().err
    assert target.read_bytes() == whole
    assert names(tmp_path) == ["a.npz", "source"]


def test_a_target_that_was_finished_is_said_to_be(tmp_path, source, monkeypatch, capsys):
    target = tmp_path / "a.npz"
    with monkeypatch.context() as pressed:
        interrupt(pressed, before=False)
        assert run(["convert", str(source), str(target)]) == INTERRUPTED
    assert "a.npz is complete, it was finished already" in capsys.readouterr().err
    assert mr.load(target, tmp_path / "back").rows == 48


@pytest.mark.slow
def test_a_signal_from_outside_ends_a_process_with_one_line(tmp_path):
    schema = mr.Schema.from_flat({"x": mr.Field((64,), "float64")})
    with mr.ReplayBuffer.create(tmp_path / "source", schema, 60_000) as buffer:
        for _ in range(12):
            buffer.extend(x=np.random.default_rng(0).random((5000, 1, 64)))
    program = "import sys; from mmreplay.cli.run import run; sys.exit(run())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "convert", "source", "a.csv"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        staged = tmp_path / "tmp-mmreplay-new-a.csv"
        while not staged.exists() or not staged.stat().st_size:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    assert process.returncode == INTERRUPTED
    assert "interrupted; a.csv was not made" in err
    assert "Traceback" not in err
    assert names(tmp_path) == ["source"]


def test_a_second_interrupt_reports_what_it_leaves(tmp_path, source, monkeypatch, capsys):
    def pressed_again(self):
        self._unlock()  # as the end of the process would
        raise KeyboardInterrupt

    command = ["convert", str(source), str(tmp_path / "a.npz")]
    with monkeypatch.context() as pressed:
        interrupt(pressed)
        pressed.setattr(Staging, "abort", pressed_again)
        assert run(command) == INTERRUPTED
    err = capsys.readouterr().err
    assert "only read, and tmp-mmreplay-new-a.npz is left. Run the same" in err
    assert names(tmp_path) == ["source", "tmp-mmreplay-new-a.npz"]
    assert run(command) == 0
    assert names(tmp_path) == ["a.npz", "source"]
