"""The demo notices lost and changed rows."""

import shlex
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from tools.demo import crash, play
from tools.demo.__main__ import view_command


def written(path, steps=40):
    """A buffer and what its writer would have reported."""
    rng = np.random.default_rng(0)
    schema = mr.Schema(
        {
            "observation": mr.Field((84, 84), "uint8"),
            "action": mr.Field((), "int64"),
            "terminated": mr.Field((), "bool"),
        }
    )
    rows = [
        {
            "observation": rng.integers(0, 256, (play.NUM_ENVS, 84, 84), np.uint8),
            "action": rng.integers(6, size=play.NUM_ENVS),
            "terminated": np.zeros(play.NUM_ENVS, bool),
        }
        for _ in range(steps)
    ]
    with mr.ReplayBuffer.create(path, schema, 100, play.NUM_ENVS, autoreset="disabled") as buffer:
        for row in rows:
            buffer.add(row)
    positions = np.arange(steps)[:, None] + np.zeros(play.NUM_ENVS, np.int64)
    return positions, np.array([crash._crcs(row) for row in rows], np.uint32)


def test_all_reported_rows_are_found(tmp_path):
    reported = crash.Reported(*written(tmp_path / "b"), seconds=1.0)
    comparison = crash.compare(tmp_path / "b", reported)
    assert (comparison.missing, comparison.different, comparison.damage) == (0, 0, 0)
    assert comparison.heads == [40] * play.NUM_ENVS


def test_a_reported_row_that_is_absent_is_missing(tmp_path):
    positions, crcs = written(tmp_path / "b")
    reported = crash.Reported(positions + 1, crcs, 1.0)
    comparison = crash.compare(tmp_path / "b", reported)
    assert comparison.missing == play.NUM_ENVS
    assert comparison.different == 39 * play.NUM_ENVS


def test_a_row_that_holds_something_else_is_different(tmp_path):
    positions, crcs = written(tmp_path / "b")
    crcs[7, 2] ^= 1
    comparison = crash.compare(tmp_path / "b", crash.Reported(positions, crcs, 1.0))
    assert (comparison.missing, comparison.different) == (0, 1)


def test_frames_are_means_of_two_by_two_pixels():
    pytest.importorskip("ale_py")
    env = play.make_pong()
    frame = np.random.default_rng(0).integers(0, 256, (210, 160), np.uint8)
    small = env.observation(frame)
    court = frame[26:194].reshape(84, 2, 80, 2).astype(float).mean(axis=(1, 3))
    np.testing.assert_array_equal(small[:, 2:82], np.floor(court))
    assert (small[:, [0, 1, 82, 83]] == 0).all()
    assert env.observation_space.contains(small)
    env.close()


def test_it_ends_by_the_command_that_opens_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *_, command = view_command(tmp_path / "my demo" / "pong").splitlines()
    program, *arguments = shlex.split(command)
    assert arguments == ["view", "my demo/pong"]
    assert program == "mmreplay" or Path(program).exists()
    recorded = (Path(__file__).parents[2] / "docs" / "demo.md").read_text()
    assert "mmreplay view build/demo/pong\n```" in recorded
