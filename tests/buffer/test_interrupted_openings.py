"""Ctrl-C at every moment of opening, closing and rebuilding: the buffer opens again.

In the same process, where a lock that was taken and given to nobody would be held for
as long as the process lives.
"""

import gc
import os
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from tests.buffer.interrupting import Striker

SCHEMA = mr.Schema({"number": mr.Field((), "int64"), "large": mr.Field((512,), "int64")})
WITHIN = {
    "buffer/opening.py",
    "buffer/open_files.py",
    "storage/committer.py",
    "buffer/replay_buffer.py",
    "buffer/copy_rows.py",
    "buffer/new_generation.py",
    "disk/lock.py",
    "storage/recovery.py",
}
OPENING = WITHIN | {
    "disk/files.py",
    "buffer/reader.py",
    "samplers/priority_file.py",
    "samplers/priority_store.py",
    "storage/commit_state.py",
    "storage/memmap.py",
    "format/metadata.py",
}
MAX_POINTS = 3000


def row(number):
    return {"number": number, "large": np.full(512, number)}


def opened(path, every=60.0):
    return mr.ReplayBuffer.open(path, "r+", commit_every=every)


def closed(buffer):
    """Close, in a thread that may be left behind where it hangs."""
    raised = []

    def run():
        try:
            buffer.close()
        except FailedError as error:
            raised.append(error)

    closing = threading.Thread(target=run, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "close hangs"
    return not raised


def strikes(path, act, expected, stride=1):
    """Strike every moment of an act on a fresh buffer; its rows must all be there."""
    struck, threads = 0, threading.active_count()
    for moment in range(0, MAX_POINTS, stride):
        folder = path / str(moment)
        with mr.ReplayBuffer.create(folder, SCHEMA, 8, commit_every=None) as buffer:
            for number in range(5):
                buffer.add(row(number))
        striker = Striker(moment, WITHIN)
        try:
            whole = act(folder, striker)
            gc.collect()
            assert threading.active_count() <= threads
            with opened(folder, None) as again:
                again.add(row(99))
                assert again.gather_all()["number"].tolist() == [*expected, 99]
            assert mr.verify_buffer(folder).ok
        except BaseException as error:
            error.add_note(f"struck at {striker.where}, moment {moment}")
            raise
        if whole:
            break
        struck += 1
    assert struck * stride > 20


def open_and_drop(path, striker):
    held = []
    return not striker.call(lambda: held.append(opened(path)))


def close(path, striker):
    buffer = opened(path)
    buffer.add(row(5))
    return not striker.call(buffer.close)


def resize(path, striker):
    buffer = opened(path)
    buffer.add(row(5))
    whole = not striker.call(lambda: buffer.resize(20))
    # Which folder is in force may be unknown then: it takes nothing more, and says so.
    assert closed(buffer) or not whole
    return whole


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("act", "rows"), [(open_and_drop, 5), (close, 6), (resize, 6)], ids=["open", "close", "resize"]
)
@pytest.mark.sliced(1)
def test_a_buffer_opens_again_after_a_strike(tmp_path, act, rows, stride):
    strikes(tmp_path, act, range(rows), stride)


def test_a_commit_thread_whose_start_was_struck_begins_and_ends(tmp_path):
    for moment in range(MAX_POINTS):
        buffer = mr.ReplayBuffer.create(tmp_path / str(moment), SCHEMA, 8, commit_every=None)
        committer = buffer._files.committer
        struck = Striker(moment, {"storage/committer.py"}).call(
            lambda committer=committer: committer.start(60.0)
        )
        assert closed(buffer)
        if not struck:
            break
    assert moment > 2


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def read_and_close(path):
    mr.ReplayBuffer.open(path).close()


def write_and_close(path):
    with opened(path, None) as buffer:
        buffer.add(row(5))


def draw_by_priorities(path):
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(3)


def create_and_close(path):
    mr.ReplayBuffer.create(path / "more", SCHEMA, 8, commit_every=None).close()


@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "act", [read_and_close, write_and_close, draw_by_priorities, create_and_close]
)
@pytest.mark.sliced(2)
def test_no_descriptor_outlives_a_strike(tmp_path, act, stride):
    struck = 0
    for moment in range(0, MAX_POINTS, stride):
        folder = tmp_path / str(moment)
        with mr.ReplayBuffer.create(folder, SCHEMA, 8, commit_every=None) as buffer:
            for number in range(5):
                buffer.add(row(number))
        if act is draw_by_priorities:
            # What is made where there is none yet is made by handling errors, and an
            # error that is struck meanwhile is kept by the interpreter with its frames.
            act(folder)
        gc.collect()
        before = descriptors()
        striker = Striker(moment, OPENING)
        whole = not striker.call(lambda folder=folder: act(folder))
        gc.collect()
        # Between the system's own open or close and the line that notes it there is
        # a moment at which nobody else knows the number.
        allowed = 1 if (striker.where or "").startswith("disk/files.py") else 0
        assert descriptors() <= before + allowed, striker.where
        if whole:
            break
        struck += 1
    assert struck * stride > 100
