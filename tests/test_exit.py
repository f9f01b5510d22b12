"""Whole interpreters that use the package and end: none prints a word of its own.

The programs run in every Python at hand that can import the package: this one, those
on the PATH, and those that MMREPLAY_PYTHONS names (separated like PATH).
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAIT_S = 120

BUFFER = """
import sys
import numpy as np
import mmreplay as mr

FIELDS = {
    "observation": mr.Field((2,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}

def made(path, **options):
    buffer = mr.ReplayBuffer.create(path, mr.Schema(FIELDS), capacity=64, **options)
    for number in range(40):
        buffer.add(
            observation=np.full(2, number, np.float32), reward=1.0,
            terminated=number % 10 == 9,
        )
    return buffer
"""

# Modules that something outside of Python still refers to are emptied: every global
# name in them becomes None, and only then is what an earlier module holds destroyed.
EMPTIED = """
import ctypes
import json

def outlive(*held):
    json.held = held
    for name, module in list(sys.modules.items()):
        if name == "json" or name.startswith("mmreplay"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""

LEFT_OPEN = """
buffer = made(sys.argv[1] + "/a", sampler=mr.PrioritizedSampler(seed=0))
buffer.sample(4)
reader = mr.ReplayBuffer.open(sys.argv[1] + "/a")
reader.sample(4)
zarr = made(sys.argv[1] + "/z", engine="zarr")
memory = made(None, engine="memory")
limiter = mr.RateLimiter(4.0, min_size=4, error_buffer=1e6)
limited = made(sys.argv[1] + "/l", limiter=limiter)
kept = [buffer, reader, zarr, memory, limited]
"""

LOADER = """
import torch
buffer = made(sys.argv[1] + "/b")
loader = mr.ReplayLoader(buffer, batch_size=8)
batch = next(iter(loader))
stream = iter(mr.ReplayStream(buffer.path, mr.UniformSampler(seed=0), batch_size=8))
next(stream)
both = mr.concat([buffer, mr.ReplayBuffer.open(buffer.path)])
both.sample(8)
"""

WORKERS = """
import torch
from torch.utils.data import DataLoader

def main():
    made(sys.argv[1] + "/w").close()
    dataset = mr.ReplayDataset(sys.argv[1] + "/w")
    stream = mr.ReplayStream(
        sys.argv[1] + "/w", mr.UniformSampler(seed=0), batch_size=8
    )
    draws = dataset.draws(mr.ShuffledSampler(seed=0), batch_size=8)
    for how in ("fork", "spawn"):
        options = dict(batch_size=None, num_workers=2, multiprocessing_context=how)
        for _ in zip(range(3), DataLoader(dataset, sampler=draws, **options)):
            pass
        for _ in zip(range(3), DataLoader(stream, **options)):
            pass
    global kept
    kept = [dataset, stream, dataset[next(iter(draws))]]

if __name__ == "__main__":
    main()
"""

CHILDREN = """
import multiprocessing, os

def child(path):
    buffer = mr.ReplayBuffer.open(path)
    buffer.sample(4)
    globals()["kept"] = [buffer]

def main():
    buffer = made(sys.argv[1] + "/c", sampler=mr.PrioritizedSampler(seed=0))
    buffer.sample(4)
    for how in ("fork", "spawn"):
        process = multiprocessing.get_context(how).Process(
            target=child, args=(sys.argv[1] + "/c",)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
    globals()["kept"] = buffer
    pid = os.fork()
    if pid == 0:
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0

if __name__ == "__main__":
    main()
"""


def run(python, tmp_path, code):
    """A program's exit code and what it wrote to stderr."""
    script = tmp_path / "program.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [python, "-W", "ignore::DeprecationWarning", script, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stderr


@functools.cache
def others():
    """Other Pythons that can import the package and torch."""
    named = os.environ.get("MMREPLAY_PYTHONS", "").split(os.pathsep)
    found = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    usable = {}
    for python in filter(None, named + found):
        done = subprocess.run(
            [python, "-c", "import sys, torch, mmreplay.buffer.replay_buffer\nprint(sys.version)"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip() != sys.version:
            usable[done.stdout.strip()] = python
    return tuple(usable.values())


def test_objects_that_outlive_the_modules_of_the_package_end_in_silence(tmp_path):
    code = BUFFER + EMPTIED + LEFT_OPEN + "outlive(*kept)\nimport os\nos.fork()\n"
    assert run(sys.executable, tmp_path, code) == (0, "")


def test_buffers_left_open_at_an_exception_add_nothing_to_its_traceback(tmp_path):
    code = BUFFER + EMPTIED + LEFT_OPEN + "outlive(*kept)\nraise ValueError('own')\n"
    status, text = run(sys.executable, tmp_path, code)
    assert status == 1
    assert text.endswith("ValueError: own\n")
    assert text.count("Traceback") == 1
    assert "ignored" not in text


@pytest.mark.parametrize("end", ["kept.append(kept)\n", "sys.exit()\n"])
@pytest.mark.sliced(1)
def test_what_is_left_open_at_an_end_is_closed_all_the_same(tmp_path, end):
    code = BUFFER + EMPTIED + LEFT_OPEN + end
    assert run(sys.executable, tmp_path, code) == (0, "")
    import mmreplay as mr

    for name in ("a", "z", "l"):
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            assert len(buffer) == 40
            assert buffer.recovery.how == "clean"


def test_a_buffer_opened_when_nothing_closes_it_any_more_ends_in_silence(tmp_path):
    # Registered first, so that it runs after everything that closes what is open.
    late = 'import atexit\natexit.register(lambda: outlive(made(sys.argv[1] + "/late")))'
    code = f"{late}\n{BUFFER}{EMPTIED}buffer = made(sys.argv[1] + '/early')\n"
    assert run(sys.executable, tmp_path, code) == (0, "")
    import mmreplay as mr

    with mr.ReplayBuffer.open(tmp_path / "late") as buffer:
        assert len(buffer) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import torch\n" + BUFFER + EMPTIED + LEFT_OPEN + "outlive(*kept)\n",
        BUFFER + EMPTIED + LOADER + "outlive(loader, buffer, batch, stream, both)\n",
        BUFFER + LOADER,
        BUFFER + LOADER + "sys.exit()\n",
        BUFFER + WORKERS,
        BUFFER + CHILDREN,
        "import torch\n" + BUFFER + CHILDREN,
    ],
    ids=[
        "torch",
        "loader-outlives",
        "loader",
        "loader-exit",
        "workers",
        "children",
        "children-torch",
    ],
)
def test_programs_end_in_silence_in_every_installed_python(tmp_path, code):
    for number, python in enumerate([sys.executable, *others()]):
        place = tmp_path / str(number)
        place.mkdir()
        assert run(python, place, code) == (0, ""), python
