"""A disk that fails at each call in turn: all of an operation is visible, or nothing.

Whatever was interrupted, the buffer goes on or says that it must be opened again,
and both a reader that was open and a later opening see the same rows.
"""

import copy
import errno
import functools
import os

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import Disk
from mmreplay.errors import FailedError, FullError, ReplayError
from mmreplay.testing.disks import PRIMITIVES, FaultyDisk, using
from tests.buffer.support import Twin, check_rows, step

CHANGES = tuple(name for name in PRIMITIVES if name not in ("lock", "open"))
# A store into space that was reserved is an assignment: it cannot fail, and it can
# be interrupted.
FAILING = tuple(name for name in CHANGES if name != "store")
FAULTS = ("full", "broken", "interrupted")


def fault_of(name):
    if name == "interrupted":
        return KeyboardInterrupt()
    number = errno.ENOSPC if name == "full" else errno.EIO
    return OSError(number, os.strerror(number))


def names_of(fault):
    return CHANGES if fault == "interrupted" else FAILING


class Faulty(FaultyDisk):
    """The n-th call fails, before it is made or, when late, after; syncs are free."""

    late = False

    def datasync(self, fd):
        self.watch("datasync")

    def sync_folder(self, fd):
        self.watch("sync_folder")

    def store(self, fd, mapping, offset, data):
        if not self.late:
            super().store(fd, mapping, offset, data)
            return
        Disk.store(self, fd, mapping, offset, data)
        self.watch("store")


def steps_of(kinds, number=700):
    """T steps of two environments, as extend takes them and by environment."""
    made = [
        {e: step(number + 10 * t + e, kind) for e, kind in enumerate(some)}
        for t, some in enumerate(kinds)
    ]
    data = {name: np.array([[s[e][name] for e in s] for s in made]) for name in step(0)}
    return made, data


ONE, ONE_DATA = steps_of([["t", ""]])
SOME, SOME_DATA = steps_of([["", "t"], ["u", ""]])
FINALS = [{0: [5, 5], 1: [6, 6]}]


def add(buffer):
    buffer.add({name: column[0] for name, column in ONE_DATA.items()})


def add_final(buffer):
    data = {name: column[0] for name, column in ONE_DATA.items()}
    buffer.add(data, final_observation=list(FINALS[0].values()))


def add_field(buffer):
    buffer.add_field("more", mr.Field((), "int8"), 3)


OPERATIONS = {
    "add": (add, lambda o: o.extend(ONE)),
    "add with a final row": (add_final, lambda o: o.extend(ONE, FINALS)),
    "extend by a block": (lambda b: b.extend(SOME_DATA), lambda o: o.extend(SOME)),
    "clear": (lambda b: b.clear([1]), lambda o: o.clear([1])),
    "dequeue": (lambda b: b.dequeue(2, [0]), lambda o: o.dequeue(2, [0])),
    "commit": (lambda b: b.commit(), lambda o: None),
    "grow": (lambda b: b.resize(20), lambda o: o.resize(20)),
    "shrink": (lambda b: b.resize(3), lambda o: o.resize(3)),
    "close": (lambda b: b.close(), lambda o: None),
}


def shows(buffer, oracle):
    # A reader follows to another generation when it reads.
    if (len(buffer), buffer.capacity)[1] != oracle.capacity:
        return False
    try:
        check_rows(buffer, oracle)
    except AssertionError:
        return False
    return True


def abandon(buffer):
    """Lose the writer as a kill does."""
    parts = buffer._files
    buffer._finalizer.detach()
    if not parts.closed:
        parts.committer.stop()
        parts.commit.close()
        parts.store.close()
        parts.closed = True
    parts.lock.release()


def go_on(twin, *others):
    """Add a step, in a new opening where this one takes no more.

    Args:
        twin: The buffer and what it shows.
        others: Oracles of what a new opening may show as well: a failed switch to
            another generation is in force or not, and a failed sync undoes what was
            not committed.
    """
    try:
        twin.add(["u", "t"])
    except FailedError:
        abandon(twin.buffer)
        twin.buffer = mr.ReplayBuffer.open(twin.path, "r+", commit_every=None)
        twin.oracle = next(o for o in (twin.oracle, *others) if shows(twin.buffer, o))
        twin.oracle.resume("break")
        twin.add(["u", "t"])
    check_rows(twin.buffer, twin.oracle)


@pytest.mark.parametrize(
    ("fault", "late"),
    [("full", False), ("broken", False), ("interrupted", False), ("interrupted", True)],
)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sliced(3)
def test_a_failing_call_leaves_all_or_nothing(tmp_path, name, fault, late):
    operate, told = OPERATIONS[name]
    names = ("store",) if late else names_of(fault)
    for at in range(200):
        with using(Faulty(fault_of(fault), at=10**9)):
            twin = Twin(tmp_path / f"{at}", 5, 2)
            twin.extend([["", "t"], ["", ""], ["t", ""], ["", "u"]] * 4)
            # What a failed sync leaves: no more is believed by the next opening.
            twin.buffer.commit()
            reader = mr.ReplayBuffer.open(twin.path)
            check_rows(reader, twin.oracle)
        disk = Faulty(fault_of(fault), at=at, names=names)
        disk.late = late
        with using(disk):
            raised = struck(operate, twin.buffer)
        after = copy.deepcopy(twin.oracle)
        told(after)
        with using(Faulty(fault_of(fault), at=10**9)):
            settle(twin, reader, after, raised, name)
        reader.close()
        if not disk.struck:
            assert raised is None
            return
    pytest.fail("the disk failed 200 times, and more calls were made")


def struck(operate, subject):
    """What the operation raised."""
    try:
        operate(subject)
    except (ReplayError, KeyboardInterrupt) as error:
        return error
    return None


def settle(twin, reader, after, raised, name):
    """Find out which of two states is shown, everywhere alike, and go on from it."""
    before = twin.oracle
    if twin.buffer.closed:
        abandon(twin.buffer)
        twin.buffer = mr.ReplayBuffer.open(twin.path, "r+", commit_every=None)
        for oracle in (twin.oracle, after):
            oracle.resume("break")
    if raised is None or not shows(twin.buffer, twin.oracle):
        assert shows(twin.buffer, after), f"neither before nor after: {raised!r}"
        twin.oracle = after
    if isinstance(raised, ReplayError) and name.startswith(("add", "extend")):
        assert twin.oracle is not after
    assert shows(reader, twin.oracle) or shows(reader, after)
    go_on(twin, before, after)
    check_rows(reader, twin.oracle)
    abandon(twin.buffer)
    with mr.ReplayBuffer.open(twin.path, "r+", commit_every=None) as again:
        twin.oracle.resume("break")
        check_rows(again, twin.oracle)
    report = mr.verify_buffer(twin.path)
    assert report.ok, report.findings


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sliced(1)
def test_of_many_blocks_whole_ones_are_in_and_the_error_says_how_many(tmp_path, fault):
    kinds = [["", "t"], ["u", ""], ["t", "t"], ["", ""], ["", "u"]] * 2
    seen = set()
    for at in range(200):
        with using(Faulty(fault_of(fault), at=10**9)):
            twin = Twin(tmp_path / f"{at}", 20, 2)
            twin.extend([["", "t"], ["", ""], ["t", ""]] * 9)
        made, data = steps_of(kinds)
        with using(Faulty(fault_of(fault), at=at, names=names_of(fault))) as disk:
            raised = struck(functools.partial(mr.ReplayBuffer.extend, twin.buffer), data)
        if raised is None:
            assert not disk.struck
            break
        steps = int(twin.buffer.heads[0]) - len(twin.oracle.envs[0].rows)
        if isinstance(raised, ReplayError):
            assert raised.__notes__ == [f"{steps} of 10 steps of this call are in"]
        seen.add(steps)
        twin.oracle.extend(made[:steps])
        check_rows(twin.buffer, twin.oracle)
        with using(Faulty(fault_of(fault), at=10**9)):
            go_on(twin)
        abandon(twin.buffer)
    # A block is at most two steps here.
    assert seen == {0, 2, 4, 6, 8}


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.sliced(1)
def test_of_more_than_the_capacity_whole_blocks_are_in_or_nothing(tmp_path, fault):
    kinds = [["", "t"], ["u", ""]] * 9
    for at in range(200):
        with using(Faulty(fault_of(fault), at=10**9)):
            twin = Twin(tmp_path / f"{at}", 5, 2)
            twin.extend([["", "t"], ["", ""], ["t", ""]] * 5)
        made, data = steps_of(kinds)
        with using(Faulty(fault_of(fault), at=at, names=names_of(fault))) as disk:
            raised = struck(functools.partial(mr.ReplayBuffer.extend, twin.buffer), data)
        steps = int(twin.buffer.heads[0]) - len(twin.oracle.envs[0].rows)
        if steps:
            twin.oracle.extend(made)
            for stream in twin.oracle.envs:
                del stream.rows[len(stream.rows) - len(made) + steps :]
            # Whole blocks of the reserve, two rows here, are in.
            assert steps == len(made) or steps % 2 == 0
        check_rows(twin.buffer, twin.oracle)
        abandon(twin.buffer)
        assert mr.verify_buffer(twin.path).ok
        if raised is None:
            assert not disk.struck
            assert steps == len(made)
            return
    pytest.fail("the disk failed 200 times, and more calls were made")


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_ring_that_was_enlarged_has_space_reserved_ahead(tmp_path, layout, reopened):
    twin = Twin(tmp_path / "b", 20, 2, layout=layout)
    # Heads beyond the larger ring's slots as well, as after many laps.
    twin.extend([["", ""]] * 700)
    twin.buffer.resize(400)
    twin.oracle.resize(400)
    if reopened:
        twin.reopen("continue")
    full = FaultyDisk(fault_of("full"), names=("allocate",))
    with using(full), pytest.raises(FullError):
        add(twin.buffer)
    check_rows(twin.buffer, twin.oracle)
    twin.add(["", ""])
    check_rows(twin.buffer, twin.oracle)
