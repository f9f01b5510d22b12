"""Buffers that lived: whatever a writer did and however it ended, they are whole."""

import os
import shutil
import signal

import pytest

import mmreplay as mr
from mmreplay.verify import verify_buffer
from tests.verify.support import make, schema, steps


def test_a_buffer_killed_before_its_first_commit_is_whole(tmp_path, rng):
    path = tmp_path / "b"
    pid = os.fork()
    if pid == 0:
        buffer = mr.ReplayBuffer.create(
            path, schema(), 64, 2, commit_every=None, autoreset="disabled"
        )
        buffer.extend(steps(rng, 30, 2))
        os._exit(9)
    os.waitpid(pid, 0)
    report = verify_buffer(path)
    assert report.ok
    assert report.rows == 0


@pytest.mark.crash
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.sliced(1)
def test_a_busy_writer_and_what_its_death_leaves_are_whole(tmp_path, rng, layout):
    path = tmp_path / "b"
    make(path, rng, 16, layout=layout)
    pid = os.fork()
    if pid == 0:
        buffer = mr.ReplayBuffer.open(path, "r+", commit_every=0.01)
        while True:
            buffer.extend(steps(rng, 5, 2))
    try:
        reports = [verify_buffer(path) for _ in range(100)]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    reports.append(verify_buffer(path))
    assert [r.findings for r in reports if not r.ok] == []
    assert any(report.blocks for report in reports)


def test_a_live_writer_is_verified_up_to_its_last_commit(tmp_path, rng):
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema(), 64, 2, commit_every=None, autoreset="disabled"
    ) as buffer:
        buffer.extend(steps(rng, 32, 2))
        buffer.commit()
        buffer.extend(steps(rng, 7, 2))
        report = verify_buffer(tmp_path / "b")
        assert report.ok
        assert report.rows == 64


def test_a_buffer_that_lost_power_is_whole(tmp_path, rng):
    """A copy of a live folder: no live slot of it is trusted."""
    buffer = mr.ReplayBuffer.create(
        tmp_path / "b", schema(), 64, 2, commit_every=None, autoreset="disabled"
    )
    for _ in range(10):
        buffer.extend(steps(rng, 16, 2))
    buffer.commit()
    buffer.extend(steps(rng, 9, 2))
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    buffer.close()
    report = verify_buffer(tmp_path / "c")
    assert report.ok, report.findings
    assert report.blocks > 0


def test_what_clear_dequeue_resize_and_more_steps_than_capacity_leave_is_whole(tmp_path, rng):
    path = make(tmp_path / "b", rng, 96)
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        buffer.extend(steps(rng, 5, 2))
        buffer.commit()
        assert verify_buffer(path).ok
        buffer.dequeue(11)
        buffer.extend(steps(rng, 200, 2))
        buffer.commit()
        assert verify_buffer(path).findings == ()
        buffer.clear([1])
        buffer.extend(steps(rng, 9, 2))
        buffer.commit()
        assert verify_buffer(path).findings == ()
        buffer.resize(100)
        (finding,) = verify_buffer(path).findings
        assert finding.kind == "left_over"
        assert "is left over from a resize or from a writer that was" in finding.message
        buffer.extend(steps(rng, 150, 2))
    with mr.ReplayBuffer.open(path, "r+", on_resume="truncate") as buffer:
        buffer.extend(steps(rng, 10, 2))
    assert verify_buffer(path).findings == ()
