"""A sync that failed is never trusted again, not by the next opening either.

The kernel marks pages clean that it could not write: the next sync succeeds, and
vouches for what is in memory alone.
"""

from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError
from mmreplay.testing.disks import using
from tests.torture.failing import GEOMETRY, ROWS, add, begun, fail, failing, reopen
from tools.torture.powerloss import abandon
from tools.torture.rows import SHARDED, faults


@pytest.mark.parametrize("name", ["records.bin", "flags.bin", "sums.bin", "COMMIT"])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_failed_sync_lost_is_not_committed_by_the_next_opening(tmp_path, name, seed):
    folder, disk = failing(tmp_path)
    with using(disk):
        buffer = begun(folder)
        add(buffer, GEOMETRY.capacity // 2)
        fail(disk, buffer, name)
        buffer = reopen(folder / "a")
        assert (buffer.heads >= ROWS).all()
        starts = [(1, np.zeros(GEOMETRY.num_envs, np.int64)), (2, buffer.heads)]
        add(buffer, 3, lineage=2)
        buffer.commit()
        heads = buffer.heads
        abandon(buffer)
    disk.crash(folder, np.random.default_rng(seed))
    rebooted = mock.patch.object(process, "boot_id", return_value=bytes(range(16)))
    with rebooted, ReplayBuffer.open(folder / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, GEOMETRY, starts) == []
    with rebooted:
        assert mr.verify_buffer(folder / "a").ok


def test_a_reader_follows_a_writer_that_dropped_rows(tmp_path):
    folder, disk = failing(tmp_path)
    with using(disk):
        buffer = begun(folder)
        add(buffer, 4)
        with ReplayBuffer.open(folder / "a") as reader:
            assert (reader.heads == ROWS + 4).all()
            fail(disk, buffer)
            assert (reader.heads == ROWS + 4).all()
            buffer = reopen(folder / "a")
            assert buffer.recovery.how == "failed"
            assert buffer.recovery.cut_rows == 4 * GEOMETRY.num_envs
            assert (buffer.heads == ROWS).all()
            starts = [(1, np.zeros(GEOMETRY.num_envs, np.int64)), (2, buffer.heads)]
            add(buffer, 2, lineage=2)
            assert (reader.heads == buffer.heads).all()
            assert faults(reader, GEOMETRY, starts) == []
            buffer.close()
    with ReplayBuffer.open(folder / "a") as reader:
        assert reader.recovery.how == "clean"


@pytest.mark.parametrize("geometry", SHARDED, ids=lambda g: g.name)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sliced(3)
def test_shard_ranges_that_a_failed_sync_lost_are_written_again(tmp_path, geometry, seed):
    folder, disk = failing(tmp_path, geometry)
    with using(disk):
        buffer = begun(folder, 50, geometry)
        disk.failing = "places.bin"
        # Met by the thread that seals, or by a call that follows.
        with suppress(FailedError):
            add(buffer, geometry.capacity // 2 + seed, geometry=geometry)
            buffer.commit()
        with pytest.raises(FailedError):
            buffer.close()
        buffer = reopen(folder / "a")
        starts = [(1, np.zeros(geometry.num_envs, np.int64)), (2, buffer.heads)]
        add(buffer, geometry.capacity // 2, 2, geometry)
        buffer.commit()
        heads = buffer.heads
        abandon(buffer)
    disk.crash(folder, np.random.default_rng(seed))
    rebooted = mock.patch.object(process, "boot_id", return_value=bytes(range(16)))
    with rebooted, ReplayBuffer.open(folder / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, geometry, starts) == []
