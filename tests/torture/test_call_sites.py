"""Each operation fails, is killed and loses its power at each of its disk calls."""

import errno
import gc
import os
import re
import shutil
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process
from mmreplay.buffer.copy_rows import compact
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk.files import Disk
from mmreplay.errors import FailedError, FormatError, ReplayError
from mmreplay.schema import Field
from mmreplay.testing.disks import PRIMITIVES, FaultyDisk, WatchedDisk, using
from tools.torture.power import PowerCut, SimulatedDisk
from tools.torture.powerloss import abandon
from tools.torture.rows import Geometry, content, faults

GEOMETRY = Geometry("two", 16, 2, "env_major", large=False)
ZEROS = np.zeros(2, np.int64)
STARTS = [(1, ZEROS)]
IMAGES = 3
STRIDE = 1


def create(path):
    return ReplayBuffer.create(
        path,
        GEOMETRY.schema,
        GEOMETRY.capacity,
        GEOMETRY.num_envs,
        engine=GEOMETRY.engine,
        autoreset="same_step",
        commit_every=None,
    )


def reopen(path):
    return ReplayBuffer.open(path, "r+", commit_every=None)


def add(buffer, steps=1):
    for _ in range(steps):
        heads = buffer.heads
        ones = np.ones(2, np.int64)
        buffer.add(content(GEOMETRY, np.arange(2), heads, ones))


def used(path, do):
    """Open, do, and close; a crash leaves the buffer as a dead process does."""
    buffer = reopen(path)
    try:
        do(buffer)
        buffer.close()
    finally:
        # `close` gave all back, or was never reached.
        if not buffer.closed:
            abandon(buffer)


OPERATIONS = {
    "create": lambda path: create(path).close(),
    "open and close": lambda path: used(path, lambda buffer: None),
    "add over the wrap": lambda path: used(path, lambda buffer: add(buffer, 9)),
    "commit": lambda path: used(path, lambda b: (add(b), b.commit(), add(b))),
    "clear": lambda path: used(path, lambda buffer: buffer.clear([1])),
    "shrink": lambda path: used(path, lambda buffer: buffer.resize(10)),
    "grow": lambda path: used(path, lambda buffer: buffer.resize(40)),
    "add a field": lambda path: used(
        path, lambda buffer: buffer.add_field("extra", Field((), "int8"), 7)
    ),
    "statistics": lambda path: used(path, lambda b: b.set_statistics({"mean": 1})),
    "export": lambda path: mr.export(path, path.with_name(EXPORTED)),
}
EXPORTED = "out.npz"
NUM_ROWS = 30


class Unsynced(Disk):
    """A disk for checks, which nothing will crash: syncs take no time."""

    def datasync(self, fd):
        pass

    def sync_folder(self, fd):
        pass


def num_descriptors():
    """Open descriptors; mappings have their own, until their arrays are gone."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def prepared(tmp_path):
    """A closed buffer in its second lap."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    buffer = create(folder / "buffer")
    add(buffer, NUM_ROWS)
    buffer.close()
    return folder


def fresh(prepared, tmp_path, name):
    """A folder to work in, with the prepared buffer unless it is to be made."""
    work = tmp_path / "work"
    shutil.rmtree(work, ignore_errors=True)
    if name == "create":
        work.mkdir()
    else:
        shutil.copytree(prepared, work)
    return work


def num_calls(name, prepared, tmp_path, names=PRIMITIVES):
    work = fresh(prepared, tmp_path, name)
    with using(WatchedDisk()) as disk:
        OPERATIONS[name](work / "buffer")
    return sum(disk.calls[name] for name in names)


def chosen(total):
    """Which calls to attack: all, unless they are told to be fewer."""
    return range(0, total, STRIDE)


def check(path, name):
    """The buffer opens, twice, with every row that was committed, and goes on."""
    if name == "create" and not (path / "metadata.json").exists():
        with pytest.raises(FormatError):
            reopen(path)
        create(path).close()
    check_exported(path.with_name(EXPORTED))
    least = 0 if name == "create" else NUM_ROWS
    for mode in ("r", "r+"):
        buffer = ReplayBuffer.open(path, mode, commit_every=None)
        assert (buffer.heads >= least).all()
        # Clearing, shrinking and writing give up what they say, and no more.
        floor = {"clear": 0, "shrink": 8, "add over the wrap": 8}.get(name, 14)
        assert (buffer.span.lengths >= min(floor, least)).all()
        assert faults(buffer, GEOMETRY, STARTS) == []
        assert buffer.statistics in ({}, {"mean": 1})
        buffer.close()
    buffer = reopen(path)
    add_more = "extra" not in buffer.schema.paths
    if add_more:
        add(buffer, 3)
        assert faults(buffer, GEOMETRY, STARTS) == []
    buffer.close()


def check_exported(target):
    """There is no file, or the whole one."""
    if target.exists():
        with np.load(target) as found:
            assert len(found["reward"]) == 2 * GEOMETRY.capacity


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_power_cut_or_kill_at_any_call_leaves_a_whole_buffer(name, prepared, tmp_path):
    for at in chosen(num_calls(name, prepared, tmp_path) + 1):
        for seed in range(IMAGES + 1):
            work = fresh(prepared, tmp_path, name)
            disk = SimulatedDisk(work, calls_left=at)
            with using(disk), suppress(PowerCut):
                OPERATIONS[name](work / "buffer")
            known = process.boot_id()
            if seed < IMAGES:
                disk.crash(work, np.random.default_rng(100 * at + seed))
                known = b"another boot...."
            else:
                disk.lose_power()
            boots = mock.patch.object(process, "boot_id", return_value=known)
            with boots, using(Unsynced()):
                check(work / "buffer", name)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("name", ["create", "shrink", "grow", "add a field"])
def test_what_goes_on_after_a_kill_survives_a_power_cut(name, prepared, tmp_path):
    """A killed process may leave renames and new entries that nobody synced."""
    for at in chosen(num_calls(name, prepared, tmp_path) + 1):
        for seed in range(2 * IMAGES):
            work = fresh(prepared, tmp_path, name)
            disk = SimulatedDisk(work, calls_left=at)
            with using(disk), suppress(PowerCut):
                OPERATIONS[name](work / "buffer")
            disk.revive()
            with using(disk):
                again = work / "buffer"
                make = create if not (again / "metadata.json").exists() else reopen
                buffer = make(again)
                heads = buffer.heads
                buffer.commit()
                abandon(buffer)
            disk.crash(work, np.random.default_rng(100 * at + seed))
            boots = mock.patch.object(process, "boot_id", return_value=bytes(16))
            with boots, using(Unsynced()):
                buffer = reopen(again)
                assert (buffer.heads == heads).all()
                assert faults(buffer, GEOMETRY, STARTS) == []
                buffer.close()


def expected_error(fault):
    """It is raised, but for two of which a compressed buffer makes the best.

    A shard range that did not fit on the disk stays in the staging rows, and an open
    shard is closed for the next one.
    """
    helped = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE)
    found = isinstance(fault, OSError) and fault.errno in helped
    if GEOMETRY.engine == "zarr" and found:
        return suppress(ReplayError)
    return pytest.raises((KeyboardInterrupt, ReplayError))


def raising(fault):
    """The calls that may raise it."""
    if not isinstance(fault, OSError):
        return PRIMITIVES
    if fault.errno == errno.EMFILE:
        return ("open",)
    # A store into reserved space has no error to raise.
    return tuple(name for name in PRIMITIVES if name != "store")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        *(OSError(n, os.strerror(n)) for n in (errno.EIO, errno.EDQUOT, errno.EINTR)),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
    ids=["interrupt", "full", "failing", "quota", "interrupted call", "open files"],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_at_any_call_is_reported_and_releases_everything(name, prepared, tmp_path, fault):
    names = raising(fault)
    # What is old is left out of the collections, which then take no time.
    gc.freeze()
    for at in chosen(num_calls(name, prepared, tmp_path, names)):
        work = fresh(prepared, tmp_path, name)
        before = num_descriptors()
        # A new one each time: it remembers the frames that it went through.
        again = type(fault)(*fault.args)
        disk = FaultyDisk(again, at, names=names)
        with using(disk), expected_error(again):
            OPERATIONS[name](work / "buffer")
        assert disk.struck == 1
        del again, disk
        assert num_descriptors() == before
        with using(Unsynced()):
            check(work / "buffer", name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_short_write_at_any_call_is_carried_on(name, prepared, tmp_path):
    for at in chosen(num_calls(name, prepared, tmp_path, ("pwrite",))):
        work = fresh(prepared, tmp_path, name)
        disk = FaultyDisk("short", at, names=("pwrite",))
        with using(disk):
            OPERATIONS[name](work / "buffer")
        assert disk.struck == 1
        with using(Unsynced()):
            check(work / "buffer", name)


# The writer that met the fault goes on.

CONCURRENT = {
    "shrink": lambda buffer, work: buffer.resize(10),
    "grow": lambda buffer, work: buffer.resize(40),
    "add a field": lambda buffer, work: buffer.add_field("extra", Field((), "int8"), 7),
    "snapshot": lambda buffer, work: buffer.snapshot(work / "copy", pause=True),
    "compact": lambda buffer, work: compact(buffer.path, work / "copy"),
    "unpack": lambda buffer, work: compact(buffer.path, work / "copy", codec=None),
}
SOME = 8
# What a writer does not go on after: a write or sync of its own files that failed, and
# a switch of which nobody knows whether it is on the disk.
ENDING = re.compile(r"(write|sync) \S*/data-000001/|rename \S*/tmp-metadata.json:|sync \S*/buffer:")


def begun(work):
    """An open buffer with steps that are published and not committed."""
    with using(Unsynced()):
        buffer = reopen(work / "buffer")
        add(buffer, 2)
    return buffer


def assert_goes_on(buffer, work):
    """The same writer adds and commits, and what it wrote is read by the next one."""
    heads = buffer.heads + 3
    if "extra" in buffer.schema.paths:
        for _ in range(3):
            ones = np.ones(2, np.int64)
            row = content(GEOMETRY, np.arange(2), buffer.heads, ones)
            buffer.add({**row, "extra": np.full(2, 7)})
    else:
        add(buffer, 3)
    buffer.commit()
    assert (buffer.committed == heads).all()
    buffer.close()
    for mode in ("r", "r+"):
        with ReplayBuffer.open(work / "buffer", mode, commit_every=None) as again:
            assert again.recovery.how == "clean"
            assert (again.heads == heads).all()
            assert faults(again, GEOMETRY, STARTS) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize("name", CONCURRENT)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.sliced(1)
def test_the_writer_goes_on_after_a_fault_at_any_call_or_says_why_it_cannot(
    prepared, tmp_path, name, number, every
):
    names = raising(OSError(number, ""))
    work = fresh(prepared, tmp_path, name)
    buffer = begun(work)
    with using(WatchedDisk()) as disk:
        CONCURRENT[name](buffer, work)
    total = sum(disk.calls[name] for name in names)
    buffer.close()
    rng = np.random.default_rng(total + number)
    sites = set(range(total))
    if not every:
        # With the last ones, among which the switch is.
        sites = {*rng.choice(total, SOME, replace=False).tolist()}
        sites |= set(range(total - 6, total))
    went_on = 0
    for at in sorted(sites):
        work = fresh(prepared, tmp_path, name)
        buffer = begun(work)
        disk = FaultyDisk(OSError(number, os.strerror(number)), at, names=names)
        told = None
        try:
            with using(disk):
                CONCURRENT[name](buffer, work)
        except ReplayError as error:
            told = error
        assert disk.struck == 1
        with using(Unsynced()):
            if buffer._files.committer.failure is not None:
                # Each call says what failed, and not that the buffer is closed.
                assert ENDING.search(str(told)), told
                again = f"an earlier sync failed .*{re.escape(str(told))}"
                for call in (add, ReplayBuffer.commit, ReplayBuffer.close):
                    with pytest.raises(FailedError, match=again):
                        call(buffer)
                check(work / "buffer", name)
                continue
            went_on += 1
            capacity = buffer.capacity
            assert_goes_on(buffer, work)
            assert ReplayBuffer.open(work / "buffer").capacity == capacity
            copies = name in ("snapshot", "compact", "unpack")
            if copies and not (work / "copy" / "metadata.json").exists():
                again = reopen(work / "buffer")
                CONCURRENT[name](again, work)
                again.close()
    assert went_on > len(sites) // 2


class ClosesWithErrors(Disk):
    """A disk on which each close frees the descriptor and reports an error."""

    def __init__(self, number):
        self.number, self.closed = number, 0

    def close(self, fd):
        super().close(fd)
        self.closed += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize("name", CONCURRENT)
def test_an_error_of_close_stops_no_operation(prepared, tmp_path, name, number):
    work = fresh(prepared, tmp_path, name)
    buffer = begun(work)
    with using(ClosesWithErrors(number)) as disk:
        CONCURRENT[name](buffer, work)
    assert disk.closed
    assert_goes_on(buffer, work)
