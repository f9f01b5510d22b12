"""A disk that fails at each call of creating and opening: the next try succeeds."""

import functools
import gc
import os

import pytest

import mmreplay as mr
from mmreplay.buffer.opening import remove_empty
from mmreplay.errors import ReplayError
from mmreplay.testing.disks import using
from tests.buffer.support import Twin, check_rows, schema, step
from tests.buffer.test_faults import CHANGES, FAILING, FAULTS, Faulty, abandon, fault_of

EVERY = ("open", "lock")


def tried(call, fault, at, names):
    """What the call returned while the at-th call to the disk failed, or None."""
    with using(Faulty(fault_of(fault), at=at, names=names)) as disk:
        try:
            return call()
        except (ReplayError, KeyboardInterrupt):
            assert disk.struck
    return None


@pytest.fixture(autouse=True)
def few_objects():
    """Leave what was there before out of each collection: there are many of both."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def descriptors():
    # Errors hold frames, and those mappings, until they are collected.
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sliced(1)
def test_a_creation_that_fails_can_be_tried_again(tmp_path, fault):
    names = EVERY + (CHANGES if fault == "interrupted" else FAILING)
    for at in range(300):
        path = tmp_path / f"{at}"
        before = descriptors()
        create = functools.partial(mr.ReplayBuffer.create, path, schema(), 5, commit_every=None)
        buffer = tried(create, fault, at, names)
        if buffer is not None:
            buffer.close()
            return
        assert descriptors() == before
        with using(Faulty(fault_of(fault), at=10**9)):
            if (path / "metadata.json").exists():
                buffer = mr.ReplayBuffer.open(path, "r+", commit_every=None)
            else:
                buffer = mr.ReplayBuffer.create(path, schema(), 5, commit_every=None)
            buffer.add(step(1))
            buffer.close()
            buffer = None
            assert mr.verify_buffer(path).ok
    pytest.fail("the disk failed 300 times, and more calls were made")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("left", ["closed", "killed", "killed while it grew"])
@pytest.mark.sliced(1)
def test_an_opening_that_fails_loses_nothing(tmp_path, fault, mode, left):
    names = EVERY + (CHANGES if fault == "interrupted" else FAILING)
    with using(Faulty(fault_of(fault), at=10**9)):
        twin = Twin(tmp_path / "ring", 5, 2)
        twin.extend([["", "t"], ["", ""], ["t", ""], ["", "u"]] * 4)
        if left == "closed":
            twin.buffer.close()
        else:
            abandon(twin.buffer)
    for at in range(300):
        if left == "killed while it grew":
            (twin.path / "data-000002").mkdir(exist_ok=True)
            (twin.path / "data-000002" / "flags.bin").write_bytes(b"half")
            (twin.path / "tmp-metadata.json").write_bytes(b"half")
        before = descriptors()
        open_it = functools.partial(mr.ReplayBuffer.open, twin.path, mode)
        buffer = tried(open_it, fault, at, names)
        if buffer is not None:
            check_rows(buffer, twin.oracle)
            buffer.close()
            assert mr.verify_buffer(twin.path).ok
            return
        assert descriptors() == before
        with mr.ReplayBuffer.open(twin.path) as reader:
            check_rows(reader, twin.oracle)
    pytest.fail("the disk failed 300 times, and more calls were made")


def left_in(path):
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.slow
def test_a_buffer_made_for_nothing_is_removed_with_all_that_is_its_own(tmp_path, engine):
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema(), 5, engine=engine, limiter=mr.RateLimiter(1.0, 1, 9.0)
    ) as buffer:
        assert "limiter" in left_in(tmp_path / "b")
        uuid = buffer.metadata.uuid
    (tmp_path / "b" / "notes.txt").write_text("mine")
    remove_empty(tmp_path / "b", uuid)
    assert left_in(tmp_path / "b") == ["notes.txt"]
    # There is nothing to remove, or nothing at all.
    remove_empty(tmp_path / "b", uuid)
    remove_empty(tmp_path / "c")
    assert left_in(tmp_path) == ["b"]
    assert left_in(tmp_path / "b") == ["notes.txt"]


def test_a_buffer_that_others_use_is_not_removed(tmp_path):
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema(), 5) as buffer:
        uuid = buffer.metadata.uuid
        # It has a writer.
        remove_empty(path, uuid)
    before = left_in(path)
    # Another one was made in its place.
    remove_empty(path, bytes(16))
    assert left_in(path) == before
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        buffer.add(step(1))
    # Its writer is gone, and its rows are not.
    remove_empty(path, uuid)
    with mr.ReplayBuffer.open(path) as buffer:
        assert len(buffer) == 1


@pytest.mark.slow
def test_a_removal_that_fails_in_the_middle_can_be_done_again(tmp_path):
    path = tmp_path / "b"
    for at in range(100):
        mr.ReplayBuffer.create(path, schema(), 5, commit_every=None).close()
        with using(Faulty(fault_of("full"), at=at, names=("remove", "rmdir"))) as disk:
            remove_empty(path)
        if not disk.struck:
            assert left_in(path) == []
            return
        # It is a buffer, or a folder in which one can be made.
        remove_empty(path)
    pytest.fail("the disk failed 100 times, and more calls were made")
