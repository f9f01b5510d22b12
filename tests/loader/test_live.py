"""A learner draws while a writer in another process wraps the ring again and again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from tests.loader import live_writer
from tests.loader.live_writer import CAPACITY, FIELDS, NUM_ENVS, SMALL, broken, rows

ROOT = Path(__file__).parents[2]
LAPS = 12
FAST = {("uniform", "mmap"), ("prioritized", "pread")}
SAMPLERS = {
    "uniform": lambda: mr.UniformSampler(seed=0),
    "recent": lambda: mr.RecentSampler(100, 0.5, seed=0),
    "prioritized": lambda: mr.PrioritizedSampler(seed=0, name=None),
}


def begun(path, fields, min_laps, seconds):
    """A full ring, and the process that goes on with it."""
    numbers = np.arange(CAPACITY * NUM_ENVS, dtype=np.uint64).reshape(-1, NUM_ENVS)
    with mr.ReplayBuffer.create(
        path, mr.Schema(fields), CAPACITY, NUM_ENVS, autoreset="disabled"
    ) as buffer:
        buffer.extend(rows(numbers, fields is FIELDS))
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.loader.live_writer", str(path), str(min_laps), str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "begun\n"
    return child


def ended(child):
    """How many rows the writer wrote."""
    out, told = child.communicate(timeout=300)
    assert child.returncode == 0, told
    return int(out)


def test_a_broken_row_would_be_noticed(tmp_path):
    ended(begun(tmp_path / "b", SMALL, 2, 0))
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        batch = buffer.sample(64).torch()
    assert broken(batch) == 0
    for path in ("observation/number", "observation/lanes", "action", "check"):
        value = batch[path][9].clone()
        batch[path][9] ^= 4
        assert broken(batch) == 1
        batch[path][9] = value
    batch.positions[3] += 1
    assert broken(batch) == 1


CASES = [
    pytest.param(kind, mode, marks=() if (kind, mode) in FAST else pytest.mark.slow)
    for kind in SAMPLERS
    for mode in ("mmap", "pread")
]


@pytest.mark.parametrize(("kind", "mode"), CASES)
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_loader_sees_whole_rows_of_a_ring_that_wraps(tmp_path, kind, mode):
    child = begun(tmp_path / "b", FIELDS, LAPS, 0)
    buffer = mr.ReplayBuffer.open(tmp_path / "b", sampler=SAMPLERS[kind](), read_mode=mode)
    newest = seen = 0
    with buffer, mr.ReplayLoader(buffer, 128, prefetch=3, num_threads=2) as loader:
        for batch in loader:
            assert broken(batch) == 0
            newest = max(newest, int(batch.positions.max()))
            seen += len(batch)
            if kind == "prioritized":
                loader.update_priorities(batch, np.ones(len(batch)))
            if child.poll() is not None and newest > LAPS // 2 * CAPACITY:
                break
    assert ended(child) >= LAPS * CAPACITY
    assert seen > 1000


@pytest.mark.slow
def test_workers_see_whole_rows_of_a_ring_that_wraps(tmp_path):
    child = begun(tmp_path / "b", FIELDS, LAPS, 0)
    stream = mr.ReplayStream(tmp_path / "b", mr.UniformSampler(seed=0), 128)
    batches = iter(DataLoader(stream, batch_size=None, num_workers=2))
    while child.poll() is None:
        assert broken(next(batches)) == 0
    del batches
    ended(child)


@pytest.mark.slow
def test_ten_million_rows_are_whole(tmp_path):
    child = begun(tmp_path / "b", SMALL, 1, 25)
    buffer, seen = mr.ReplayBuffer.open(tmp_path / "b"), 0
    with buffer, mr.ReplayLoader(buffer, 4096, prefetch=2) as loader:
        for batch in loader:
            assert broken(batch) == 0
            seen += len(batch)
            if seen >= 10_000_000:
                break
            if child.poll() is not None:
                child = begin_again(child, tmp_path / "b")
    ended(child)
    # Each row of the ring was another one many times over.
    assert int(batch.positions.max()) > 100 * CAPACITY


def begin_again(child, path):
    """Another writer where one has ended before the learner."""
    ended(child)
    again = subprocess.Popen(
        [sys.executable, "-m", "tests.loader.live_writer", str(path), "1", "25"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert again.stdout.readline() == "begun\n"
    return again


def test_checked_words_differ_from_row_to_row():
    numbers = np.arange(1000, dtype=np.uint64)
    lanes = live_writer.mixed(numbers, 6)
    assert len(np.unique(lanes)) == lanes.size
