"""A buffer to look at, and the command line to look at it with."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run


def fields():
    return mr.Schema(
        {
            "observation": {"pixels": mr.Field((8, 8), "uint8"), "speed": mr.Field((), "float32")},
            "action": mr.Field((2,), "float32"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )


def fill(buffer, rng, count):
    lead = (count, buffer.num_envs)
    ends = np.zeros(lead, bool)
    ends[9::10] = True
    buffer.extend(
        {
            "observation": {
                "pixels": rng.integers(0, 256, (*lead, 8, 8), np.uint8),
                "speed": rng.random(lead, np.float32),
            },
            "action": rng.random((*lead, 2), np.float32),
            "reward": np.ones(lead, np.float32),
            "terminated": ends & (np.arange(count) < 20)[:, None],
            "truncated": ends & (np.arange(count) >= 20)[:, None],
        }
    )


@pytest.fixture
def path(tmp_path, rng):
    """45 steps of 2 environments: four episodes of ten each, and a running one."""
    where = tmp_path / "runs" / "a"
    with mr.ReplayBuffer.create(
        where, fields(), 100, 2, commit_every=None, autoreset="disabled"
    ) as buffer:
        fill(buffer, rng, 45)
    return where


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run a command; return its exit code, stdout and stderr."""

    def call(*args):
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def facts(cli):
    """Run a command with --json that goes well; return the object it prints."""

    def call(*args):
        code, out, err = cli(*args, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call
