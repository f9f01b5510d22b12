"""Buffers that are pickled: by path where they are read, refused where they are not."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, FormatError
from tests.buffer.support import schema, step

SPAWN = multiprocessing.get_context("spawn")


def filled(path, steps=60, **options):
    buffer = mr.ReplayBuffer.create(path, schema(), 100, commit_every=None, **options)
    for number in range(steps):
        buffer.add(step(number, "t" if number % 9 == 8 else ""))
    return buffer


def draw(buffer, pipe):
    """Draw in a child what its parent draws."""
    try:
        batch = buffer.sample(16)
        pipe.send((batch.positions, batch["reward"], buffer.read_policy.read_mode))
    except Exception as error:
        pipe.send(repr(error))
    finally:
        buffer.close()


def in_child(buffer):
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=draw, args=(buffer, there))
    child.start()
    there.close()
    found = here.recv()
    child.join()
    assert child.exitcode == 0
    return found


def test_a_reader_goes_to_a_spawned_process_with_sampler_and_transforms(tmp_path):
    filled(tmp_path / "ring").close()
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(
        tmp_path / "ring", sampler=sampler, transforms=[mr.NStep(3, gamma=0.5)], read_mode="pread"
    ) as buffer:
        batch = buffer.sample(16)
        buffer.update_priorities(batch, np.arange(16) + 0.5)
        positions, rewards, mode = in_child(buffer)
        batch = buffer.sample(16)
        assert mode == "pread"
        np.testing.assert_array_equal(positions, batch.positions)
        np.testing.assert_array_equal(rewards, batch["reward"])


def test_a_sampler_without_a_seed_is_refused_in_the_process_it_goes_to(tmp_path):
    filled(tmp_path / "ring").close()
    with mr.ReplayBuffer.open(tmp_path / "ring", sampler=mr.UniformSampler()) as buffer:
        told = in_child(buffer)
        assert "ForkedError" in told
        assert "would draw the same in a process that it was" in told


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, None])
def test_a_copy_in_this_process_is_another_opening(tmp_path, change):
    writer = filled(tmp_path / "ring")
    change = change or (lambda value: pickle.loads(pickle.dumps(value)))
    with mr.ReplayBuffer.open(tmp_path / "ring", advise="never") as buffer:
        with change(buffer) as copied:
            assert copied is not buffer
            assert copied.path == buffer.path
            assert copied.read_policy == buffer.read_policy
            assert copied.sampler is not buffer.sampler
            writer.add(step(1))
            assert len(copied) == len(buffer) == 61
            copied.sample(4)
        assert not buffer.closed
    writer.close()


def test_a_reader_takes_its_limiter_along(tmp_path):
    limiter = mr.RateLimiter(1.0, min_size=10, error_buffer=1000.0)
    with (
        filled(tmp_path / "ring", limiter=limiter),
        mr.ReplayBuffer.open(tmp_path / "ring", limiter=limiter) as buffer,
        pickle.loads(pickle.dumps(buffer)) as copied,
    ):
        assert copied.limit is not None
        copied.sample(4)


def test_what_is_not_open_to_read_from_a_folder_says_the_way_out(tmp_path):
    writer = filled(tmp_path / "ring")
    told = "ring needs a buffer opened with mode='r', but this one is open for writing"
    for change in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(FailedError, match=rf"{told}\. Pass the path"):
            change(writer)
    writer.add(step(1))
    writer.close()
    with pytest.raises(FailedError, match="but this one is closed"):
        pickle.dumps(writer)
    memory = mr.ReplayBuffer.create(None, schema(), 100, engine="memory")
    told = r"in the RAM of this process\. Create it with a path"
    with pytest.raises(FailedError, match=told):
        pickle.dumps(memory)


def test_a_missing_buffer_is_reported_where_it_is_unpickled(tmp_path):
    filled(tmp_path / "ring").close()
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        data = pickle.dumps(buffer)
    (tmp_path / "ring").rename(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="ring"):
        pickle.loads(data)


def test_several_buffers_are_pickled_together(tmp_path):
    for name in "ab":
        filled(tmp_path / name).close()
    readers = [
        mr.ReplayBuffer.open(tmp_path / name, sampler=mr.UniformSampler(seed))
        for seed, name in enumerate("ab")
    ]
    both = mr.concat(readers, shares=[0.5, 0.5], seed=3)
    both.sample(8)
    copied = pickle.loads(pickle.dumps(both))
    for _ in range(3):
        one, other = both.sample(8), copied.sample(8)
        np.testing.assert_array_equal(one.positions, other.positions)
        np.testing.assert_array_equal(one.buffer_ids, other.buffer_ids)
    copied.close()
    assert all(buffer.closed for buffer in copied.buffers)
    assert not any(buffer.closed for buffer in readers)
