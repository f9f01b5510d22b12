"""docs/examples/grpo.py learns, and is killed without skipping or repeating a group."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mmreplay as mr

EXAMPLE = Path(__file__).parents[1] / "docs/examples/grpo.py"
DRIVER = """
import os, signal, sys
from pathlib import Path
import numpy, torch
import mmreplay as mr
example, folder, groups, function, number = sys.argv[1:]
sys.path.insert(0, str(Path(example).parent))
import grpo
ours, left = (example, str(Path(mr.__file__).parent)), int(number)

def count():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def line(frame, event, argument):
    if event == "line":
        count()
    return line

def call(frame, event, argument):
    if frame.f_code.co_filename.startswith(ours):
        if not function:
            return line
        if frame.f_code.co_name == function:
            count()

torch.set_num_threads(1)
sys.settrace(call)
grpo.train(Path(folder), int(groups))
"""


def killed_at(folder, groups, function, number):
    """Run the example until it calls a function, or without one so many lines.

    Returns:
        Whether it was killed before its end.
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, EXAMPLE, folder, str(groups), function, str(number)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


def finished(folder, groups):
    """Run the example to its end, as its page says; what it printed, and to stderr."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), folder, "--groups", str(groups)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def example():
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_each_group_once(folder, groups):
    """No group was skipped, none trained on twice, and the buffer says the same."""
    trained = torch.load(folder / "learner.pt")["trained"]
    assert sorted(group for _, some in trained for group in some) == list(range(groups))
    grpo = example()
    sampler = mr.UseCounter(1, mr.GroupSampler("group", grpo.GROUP), lease_s=60)
    with mr.ReplayBuffer.open(folder / "replay", "r+", sampler=sampler) as buffer:
        with pytest.raises(mr.EmptyError, match="was used once"):
            buffer.sample(1)
        rows = buffer.gather_all()
        view = buffer.view
        uses = sampler.uses(view, rows.env_ids, rows.positions)
    assert (uses == 1).all()
    counts = np.unique(rows["group"], return_counts=True)[1]
    # The oldest group alive may have lost rows to the ring.
    assert (counts[1:] == grpo.GROUP).all()
    assert np.isfinite(rows["reward"]).all()
    # A policy only learns from what it, or one not much older, said.
    assert (rows["tokens"].lengths == rows["logp"].lengths).all()
    return rows


@pytest.mark.slow
def test_killed_around_its_checkpoint_it_trains_on_each_group_once(tmp_path):
    groups = 24
    # After the checkpoint that knows the batch, before the batch is acknowledged.
    assert killed_at(tmp_path, groups, "acknowledge", 3)
    known = torch.load(tmp_path / "learner.pt")
    assert known["ticket"]["positions"]
    # After a batch was learned, before the checkpoint that knows it.
    assert killed_at(tmp_path, groups, "save", 2)
    assert len(torch.load(tmp_path / "learner.pt")["trained"]) == 2
    _, progress = finished(tmp_path, groups)
    assert progress == "goes on after 8 of 24 groups\n"
    check_each_group_once(tmp_path, groups)


@pytest.mark.slow
def test_killed_20_times_it_trains_on_each_group_once_and_learns(tmp_path):
    groups, rng, kills = 400, random.Random(7), 0
    while kills < 20:
        # To open the ring takes some 26,000 lines, and a round 16,000.
        assert killed_at(tmp_path, groups, "", rng.randrange(1, 90_000))
        kills += 1
    found, progress = finished(tmp_path, groups)
    assert "400 of 400 groups, mean reward" in progress
    check_each_group_once(tmp_path, groups)
    # The first answers are right in a ninth of their letters.
    assert found["first_return"] < 0.3
    assert found["last_return"] > 0.7
