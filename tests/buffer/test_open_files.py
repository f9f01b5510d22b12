"""A process that may open no more files: each call says so and leaves all as it was."""

import gc
import os
import re
import resource
from contextlib import contextmanager

import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.testing.disks import QuickDisk, using
from tests.buffer.support import Twin, schema, step

MESSAGE = r"Too many open files \(errno 24\)\. Close files or buffers"
CAPACITY = 20


def descriptors():
    gc.collect()
    listed = map(int, os.listdir("/proc/self/fd"))
    # All but the one that listed them.
    return {fd for fd in listed if os.path.exists(f"/proc/self/fd/{fd}")}


@contextmanager
def only(count):
    """Have so many descriptors free, of every kind that there is."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = descriptors()
    free = [number for number in range(len(taken) + count + 1) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def reading(path, use, **options):
    with mr.ReplayBuffer.open(path, **options) as buffer:
        use(buffer)


def writing(path, use):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        use(buffer)


def create(path):
    new = path.with_name("new")
    # It is a buffer also where the shortage came when all was made.
    if not (new / "metadata.json").exists():
        mr.ReplayBuffer.create(new, schema(), 9).close()


OPERATIONS = {
    "create": create,
    "create in a folder": lambda path: (path.with_name("new").mkdir(exist_ok=True), create(path)),
    "read": lambda path: reading(path, lambda b: (b.gather_all(), b.statistics)),
    "draw by priority": lambda path: reading(
        path, lambda b: b.sample(4), sampler=mr.PrioritizedSampler(seed=0)
    ),
    "add": lambda path: writing(path, lambda b: b.add(step(5))),
    "commit": lambda path: writing(path, lambda b: b.commit()),
    "resize": lambda path: writing(path, lambda b: b.resize(40)),
    "add a field": lambda path: writing(
        path, lambda b: "more" in b.schema or b.add_field("more", mr.Field((), "int8"), 3)
    ),
    "statistics": lambda path: writing(path, lambda b: b.set_statistics({"a": 1})),
    "memory": lambda path: reading(path, lambda b: b.memory()),
    "snapshot": lambda path: reading(path, lambda b: b.snapshot(path.with_name("s"))),
    "export": lambda path: mr.export(path, path.with_name("a.npz")),
}


@pytest.fixture(autouse=True)
def quick():
    with using(QuickDisk()):
        yield


# Priorities are in RAM where their files cannot be opened.
@pytest.mark.filterwarnings("ignore::mmreplay.DurabilityWarning")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sliced(4)
def test_whatever_runs_out_of_descriptors_says_so_and_can_be_called_again(tmp_path, name):
    operate, met = OPERATIONS[name], 0
    # What is imported on the way is imported before.
    operate(made(tmp_path / "first").path)
    for count in range(100):
        twin = made(tmp_path / f"{count}")
        before = descriptors()
        raised = met_by(count, operate, twin.path)
        assert descriptors() == before
        check(twin.path)
        if raised is None:
            break
        met += 1
        assert re.search(MESSAGE, raised), raised
        operate(twin.path)
    assert met > 1


def met_by(count, operate, path):
    """What the operation raised, without its frames, which keep mappings open."""
    try:
        with only(count):
            operate(path)
    except FailedError as error:
        return str(error)
    return None


def made(folder):
    folder.mkdir()
    twin = Twin(folder / "b", CAPACITY)
    twin.extend([["t" if i % 7 == 6 else ""] for i in range(50)])
    twin.buffer.close()
    return twin


def check(path):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        rows = buffer.gather_all()["action"]
        assert set(range(32, 50)) <= set(rows.tolist())
    assert mr.verify_buffer(path).ok
