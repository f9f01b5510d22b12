"""A sync that failed is never trusted again, not by the next opening either.

The kernel marks pages clean that it could not write: the next sync succeeds, and
vouches for what is in memory alone.
"""

import errno
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import boot
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError
from tools.torture.disks import using
from tools.torture.power import SimulatedDisk
from tools.torture.powerloss import abandon
from tools.torture.rows import GEOMETRIES, SHARDED, content, faults

GEOMETRY = GEOMETRIES[2]
ROWS = 5


class FailingDisk(SimulatedDisk):
    """Syncs of one file fail once: its pages are clean, and not on the device."""

    failing = ""

    def datasync(self, fd):
        if self.failing and self._paths.get(fd) == self.failing:
            self.failing = ""
            self._file(fd).ops.clear()
            raise OSError(errno.EIO, "Input/output error")
        super().datasync(fd)

    def open(self, path, flags):
        fd = super().open(path, flags)
        self._paths[fd] = path.name
        return fd

    @property
    def _paths(self):
        return self.__dict__.setdefault("_names", {})


def make(folder, geometry=GEOMETRY):
    ReplayBuffer.create(
        folder / "a", geometry.schema, geometry.capacity, geometry.num_envs,
        engine=geometry.engine, layout=geometry.layout, autoreset="same_step",
        commit_every=None,
    ).close()  # fmt: skip


def reopen(folder):
    return ReplayBuffer.open(folder, "r+", commit_every=None)


def add(buffer, count, lineage=1, geometry=GEOMETRY):
    env_ids = np.arange(geometry.num_envs)
    for _ in range(count):
        heads = buffer.heads
        lineages = np.full_like(heads, lineage)
        buffer.add(content(geometry, env_ids, heads, lineages))


@pytest.mark.parametrize("name", ["records.bin", "flags.bin", "sums.bin", "COMMIT"])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_failed_sync_lost_is_not_committed_by_the_next_opening(
    tmp_path, name, seed
):
    folder = tmp_path / "disk"
    folder.mkdir()
    make(folder)
    disk = FailingDisk(folder)
    with using(disk):
        buffer = reopen(folder / "a")
        add(buffer, ROWS)
        buffer.commit()
        add(buffer, GEOMETRY.capacity // 2)
        disk.failing = name
        with pytest.raises(FailedError, match="cannot sync"):
            buffer.commit()
        with pytest.raises(FailedError, match="an earlier sync failed"):
            buffer.close()
        buffer = reopen(folder / "a")
        assert (buffer.heads >= ROWS).all()
        starts = [(1, np.zeros(GEOMETRY.num_envs, np.int64)), (2, buffer.heads)]
        add(buffer, 3, lineage=2)
        buffer.commit()
        heads = buffer.heads
        abandon(buffer)
    disk.crash(folder, np.random.default_rng(seed))
    rebooted = mock.patch.object(boot, "boot_id", return_value=bytes(range(16)))
    with rebooted, ReplayBuffer.open(folder / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, GEOMETRY, starts) == []
    with rebooted:
        assert mr.verify_buffer(folder / "a").ok


def test_a_reader_follows_a_writer_that_had_to_cut(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    make(folder)
    disk = FailingDisk(folder)
    with using(disk):
        buffer = reopen(folder / "a")
        add(buffer, ROWS)
        buffer.commit()
        add(buffer, 4)
        with ReplayBuffer.open(folder / "a") as reader:
            assert (reader.heads == ROWS + 4).all()
            disk.failing = "records.bin"
            with pytest.raises(FailedError, match="cannot sync"):
                buffer.commit()
            assert (reader.heads == ROWS + 4).all()
            with pytest.raises(FailedError, match="an earlier sync failed"):
                buffer.close()
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
def test_places_that_a_failed_sync_lost_are_written_again(tmp_path, geometry, seed):
    folder = tmp_path / "disk"
    folder.mkdir()
    make(folder, geometry)
    disk = FailingDisk(folder)
    with using(disk):
        buffer = reopen(folder / "a")
        add(buffer, 50, geometry=geometry)
        buffer.commit()
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
    rebooted = mock.patch.object(boot, "boot_id", return_value=bytes(range(16)))
    with rebooted, ReplayBuffer.open(folder / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, geometry, starts) == []
