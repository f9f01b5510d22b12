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
from mmreplay.buffer.snapshot import snapshot
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


def failing(tmp_path, geometry=GEOMETRY):
    """A buffer, closed, on a disk whose syncs can fail."""
    folder = tmp_path / "disk"
    folder.mkdir()
    make(folder, geometry)
    return folder, FailingDisk(folder)


def begun(folder, count=ROWS, geometry=GEOMETRY):
    """That buffer, open, with steps that are committed."""
    buffer = reopen(folder / "a")
    add(buffer, count, geometry=geometry)
    buffer.commit()
    return buffer


def fail(disk, buffer, name="records.bin"):
    """Let a sync fail, and the writer end there."""
    disk.failing = name
    with pytest.raises(FailedError, match="cannot sync"):
        buffer.commit()
    with pytest.raises(FailedError, match="an earlier sync failed"):
        buffer.close()


@pytest.mark.parametrize("name", ["records.bin", "flags.bin", "sums.bin", "COMMIT"])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_failed_sync_lost_is_not_committed_by_the_next_opening(
    tmp_path, name, seed
):
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
    rebooted = mock.patch.object(boot, "boot_id", return_value=bytes(range(16)))
    with rebooted, ReplayBuffer.open(folder / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, GEOMETRY, starts) == []
    with rebooted:
        assert mr.verify_buffer(folder / "a").ok


def test_a_reader_follows_a_writer_that_had_to_cut(tmp_path):
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


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_reader_that_looks_late_knows_no_step_that_was_cut(tmp_path, restarts):
    folder, disk = failing(tmp_path)
    with using(disk):
        buffer = begun(folder)
        add(buffer, 4)
        with ReplayBuffer.open(folder / "a") as reader:
            assert reader.view.starts.stop.min() >= ROWS
            fail(disk, buffer)
            buffer = reopen(folder / "a")
            starts = [(1, np.zeros(GEOMETRY.num_envs, np.int64)), (2, buffer.heads)]
            add(buffer, 2, lineage=2)
            if restarts == 2:
                buffer.close()
                buffer = reopen(folder / "a")
                starts.append((3, buffer.heads))
            add(buffer, 4, lineage=restarts + 1)
            assert (reader.heads == ROWS + 6).all()
            assert faults(reader, GEOMETRY, starts) == []
            with ReplayBuffer.open(folder / "a") as fresh:
                positions = np.arange(ROWS - 1, ROWS + 6)
                for env_id in range(GEOMETRY.num_envs):
                    env_ids = np.full_like(positions, env_id)
                    known = reader.view.locate(env_ids, positions)
                    for mine, other in zip(
                        known, fresh.view.locate(env_ids, positions), strict=True
                    ):
                        assert mine.tolist() == other.tolist()
            buffer.close()


@pytest.mark.parametrize("geometry", [GEOMETRY, SHARDED[0]], ids=lambda g: g.name)
def test_a_snapshot_of_rows_that_were_cut_meanwhile_is_refused(tmp_path, geometry):
    folder, disk = failing(tmp_path, geometry)
    done = []

    def restart(*_):
        if not done:
            fail(disk, buffer)
            done.append(reopen(folder / "a"))
            add(done[0], 9, 2, geometry)

    with using(disk):
        buffer = begun(folder, 50, geometry)
        add(buffer, 4, geometry=geometry)
        with pytest.raises(FailedError, match="make the snapshot again"):
            snapshot(folder / "a", folder / "b", progress=restart)
        again = done[0].snapshot(folder / "b")
        assert (again.heads == done[0].heads).all()
        done[0].close()
    assert mr.verify_buffer(folder / "b").ok


@pytest.mark.parametrize("geometry", SHARDED, ids=lambda g: g.name)
@pytest.mark.parametrize("seed", range(6))
def test_places_that_a_failed_sync_lost_are_written_again(tmp_path, geometry, seed):
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
    rebooted = mock.patch.object(boot, "boot_id", return_value=bytes(range(16)))
    with rebooted, ReplayBuffer.open(folder / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, geometry, starts) == []
