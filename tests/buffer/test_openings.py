"""A disk that fails at each call of creating and opening: the next try succeeds."""

import functools
import gc
import os

import pytest

import mmreplay as mr
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
def test_a_creation_that_fails_can_be_tried_again(tmp_path, fault):
    names = EVERY + (CHANGES if fault == "interrupted" else FAILING)
    for at in range(300):
        path = tmp_path / f"{at}"
        before = descriptors()
        create = functools.partial(
            mr.ReplayBuffer.create, path, schema(), 5, commit_every=None
        )
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
