"""Snapshots and repairs fail, are killed and lose power at each of their disk calls."""

import errno
import os
import shutil
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

from mmreplay import process
from mmreplay.buffer.copy_files import snapshot
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FormatError, ReplayError
from mmreplay.repairing import repair
from mmreplay.testing.disks import PRIMITIVES, FaultyDisk, using
from mmreplay.verify import verify_buffer
from tests.torture.test_call_sites import (
    GEOMETRY,
    NUM_ROWS,
    STARTS,
    Unsynced,
    add,
    create,
    num_descriptors,
)
from tools.torture.power import PowerCut, SimulatedDisk
from tools.torture.rows import faults

IMAGES = 2


@pytest.fixture
def prepared(tmp_path):
    """A closed buffer in its second lap."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    buffer = create(folder / "buffer")
    add(buffer, NUM_ROWS)
    buffer.set_statistics({"mean": 1})
    buffer.close()
    return folder


def fresh(prepared, tmp_path):
    work = tmp_path / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(prepared, work)
    return work


def take(work):
    snapshot(work / "buffer", work / "copy", pause=True)


def mend(work):
    repair(work / "buffer", work / "copy")


def simulated(work, shared, calls_left=None):
    disk = SimulatedDisk(work, calls_left=calls_left)
    disk.shares = shared
    return disk


def num_calls(prepared, tmp_path, shared, make):
    work = fresh(prepared, tmp_path)
    with using(simulated(work, shared)) as disk:
        make(work)
    return disk.calls.total()


def assert_equal(path):
    """The buffer at path is whole, and holds all that was prepared."""
    assert [f for f in verify_buffer(path).findings if f.kind != "left_over"] == []
    with ReplayBuffer.open(path) as buffer:
        assert (buffer.heads >= NUM_ROWS).all()
        assert (buffer.span.lengths == GEOMETRY.capacity).all()
        assert buffer.statistics == {"mean": 1}
        assert faults(buffer, GEOMETRY, STARTS) == []


def check(work, make):
    """The original is untouched; the copy is whole, or no buffer and made again."""
    assert_equal(work / "buffer")
    copy = work / "copy"
    if not (copy / "metadata.json").exists():
        with pytest.raises(FormatError):
            ReplayBuffer.open(copy)
        make(work)
    assert_equal(copy)
    with ReplayBuffer.open(copy, "r+", commit_every=None) as buffer:
        add(buffer, 3)
        assert faults(buffer, GEOMETRY, STARTS) == []
    assert verify_buffer(copy).findings == ()


def sites(total, every):
    """All calls, or a slice of them with the last ones, where the switch is."""
    return range(total + 1) if every else [*range(0, total, 43), total - 1, total]


@pytest.mark.crash
@pytest.mark.parametrize(
    ("make", "shared"),
    [(take, False), (take, True), (mend, False)],
    ids=["copy", "reflink", "repair"],
)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.sliced(2)
def test_a_power_cut_or_kill_at_a_call_leaves_a_copy_whole_or_marked(
    prepared, tmp_path, make, shared, every
):
    for at in sites(num_calls(prepared, tmp_path, shared, make), every):
        for seed in range(IMAGES + 1 if every else 2):
            work = fresh(prepared, tmp_path)
            disk = simulated(work, shared, at)
            with using(disk), suppress(PowerCut):
                make(work)
            now = process.boot_id()
            if seed:
                disk.crash(work, np.random.default_rng(100 * at + seed))
                now = b"another boot...."
            else:
                disk.lose_power()
            boots = mock.patch.object(process, "boot_id", return_value=now)
            with boots, using(Unsynced()):
                check(work, make)


@pytest.mark.parametrize("make", [take, mend], ids=["snapshot", "repair"])
@pytest.mark.parametrize(
    "fault",
    [
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EIO, os.strerror(errno.EIO)),
    ],
    ids=["interrupt", "full", "failing"],
)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.sliced(1)
def test_a_fault_at_a_call_is_reported_and_releases_everything(
    prepared, tmp_path, fault, make, every
):
    for at in sites(num_calls(prepared, tmp_path, False, make), every)[:-1]:
        work = fresh(prepared, tmp_path)
        before = num_descriptors()
        disk = FaultyDisk(type(fault)(*fault.args), at, names=PRIMITIVES)
        with using(disk), pytest.raises((KeyboardInterrupt, ReplayError)):
            make(work)
        del disk
        assert num_descriptors() == before
        with using(Unsynced()):
            check(work, make)
