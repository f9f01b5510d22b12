"""Faults in the core that the torture found, each once and for ever."""

import errno
import os
from contextlib import suppress
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from mmreplay import process
from mmreplay.buffer import opening
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.episodes import BREAK, START
from mmreplay.errors import FailedError, FullError
from mmreplay.format import commit as records
from mmreplay.storage.commit_state import FILE_NAME as COMMIT
from mmreplay.storage.commit_state import CommitWriter
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from tools.torture.power import PowerCut, SimulatedDisk
from tools.torture.powerloss import abandon
from tools.torture.rows import GEOMETRIES, content, faults, flags_of
from tools.torture.scribe import Notes, Scribe


def make(folder, geometry=GEOMETRIES[2]):
    return ReplayBuffer.create(
        folder,
        geometry.schema,
        geometry.capacity,
        geometry.num_envs,
        layout=geometry.layout,
        autoreset="same_step",
        commit_every=None,
    )


def step(buffer, geometry=GEOMETRIES[2], lineage=1):
    env_ids = np.arange(geometry.num_envs)
    heads = buffer.heads
    return content(geometry, env_ids, heads, np.full_like(heads, lineage))


def test_a_full_disk_while_opening_leaves_the_lock_free(tmp_path):
    make(tmp_path / "a").close()
    fault = FaultyDisk(OSError(errno.ENOSPC, "full"), names=("pwrite",))
    with using(fault), pytest.raises(FullError):
        ReplayBuffer.open(tmp_path / "a", "r+")
    ReplayBuffer.open(tmp_path / "a", "r+").close()


def test_live_slots_damaged_by_a_power_cut_do_not_starve_a_reader(tmp_path, monkeypatch):
    buffer = make(tmp_path / "a")
    for _ in range(5):
        buffer.add(step(buffer))
    buffer.commit()
    heads = buffer.heads
    buffer.add(step(buffer))
    abandon(buffer)
    path = tmp_path / "a" / "data-000001" / "COMMIT"
    size = records.slot_nbytes(2)
    with open(path, "r+b") as file:
        for slot in records.LIVE_SLOTS:
            # Past the sequence number, which stays higher than any whole slot's.
            file.seek(size * slot + 64)
            file.write(os.urandom(64))
    monkeypatch.setattr(process, "boot_id", lambda: b"another boot....")
    with ReplayBuffer.open(tmp_path / "a") as reader:
        assert (reader.heads == heads).all()


def test_the_break_at_a_resume_survives_an_add_that_found_the_disk_full(tmp_path):
    buffer = make(tmp_path / "a")
    buffer.add(step(buffer))
    buffer.close()
    buffer = ReplayBuffer.open(tmp_path / "a", "r+", commit_every=None)
    fault = FaultyDisk(OSError(errno.ENOSPC, "full"), names=("pwrite",))
    with using(fault), pytest.raises(FullError):
        buffer.add(step(buffer))
    assert buffer.heads.tolist() == [1, 1]
    buffer.add(step(buffer))
    flags = flags_of(buffer, np.arange(2), np.ones(2, np.int64))
    assert (flags & (START | BREAK) == START | BREAK).all()
    buffer.close()


def test_publications_take_the_live_slots_strictly_in_turn(tmp_path):
    class Stores(WatchedDisk):
        def store(self, fd, mapping, offset, data):
            if os.readlink(f"/proc/self/fd/{fd}").endswith(COMMIT):
                offsets.append(offset)
            super().store(fd, mapping, offset, data)

    offsets = []
    with using(Stores()):
        buffer = make(tmp_path / "a")
        for number in range(400):
            buffer.add(step(buffer))
            if number % 3 == 0:
                buffer.commit()
        buffer.close()
    opened, published = offsets[:2], offsets[2:]
    assert len(set(opened)) == 2
    assert all(a != b for a, b in pairwise(published))


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("geometry", GEOMETRIES[:3], ids=lambda g: g.name)
@pytest.mark.sliced(2)
def test_a_call_that_raised_left_no_trace_or_is_in_whole(tmp_path, geometry, fault):
    buffer = make(tmp_path / "a", geometry)
    notes = Notes.blank(geometry.num_envs)
    rng = np.random.default_rng(5)
    scribe = Scribe(buffer, geometry, 1, notes, rng)
    # A store into reserved space has no error to raise.
    names = ("pwrite", "allocate", *(() if isinstance(fault, OSError) else ("store",)))
    starts = [(0, np.zeros(geometry.num_envs, np.int64))]
    for number in range(400):
        # A row tells who wrote it, so each call is a lineage of its own.
        scribe.lineage = number
        starts.append((number, buffer.heads))
        at = int(rng.integers(0, 6))
        with using(FaultyDisk(fault, at, names=names)) as disk:
            try:
                (scribe.add if rng.random() < 0.7 else scribe.extend)()
            except (KeyboardInterrupt, FullError):
                assert disk.struck
        assert (buffer.heads <= notes.attempted).all()
        notes.attempted[:] = buffer.heads
    assert faults(buffer, geometry, starts) == []
    heads = buffer.heads
    abandon(buffer)
    with ReplayBuffer.open(tmp_path / "a") as reader:
        assert (reader.heads == heads).all()
        assert faults(reader, geometry, starts) == []


def test_a_commit_that_found_the_disk_full_can_be_made_again(tmp_path):
    buffer = make(tmp_path / "a")
    for _ in range(10):
        buffer.add(step(buffer))
    fault = FaultyDisk(OSError(errno.ENOSPC, "full"), names=("pwrite",))
    with using(fault), pytest.raises(FullError):
        buffer.commit()
    buffer.add(step(buffer))
    buffer.commit()
    assert (buffer.committed == buffer.heads).all()
    buffer.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_failed_is_never_tried_again(tmp_path, number):
    buffer = make(tmp_path / "a")
    buffer.add(step(buffer))
    fault = FaultyDisk(OSError(number, "lost"), names=("datasync",))
    with using(fault), pytest.raises(FailedError, match=r"cannot sync .*: lost"):
        buffer.commit()
    with pytest.raises(FailedError, match="an earlier sync failed"):
        buffer.add(step(buffer))
    with pytest.raises(FailedError, match="an earlier sync failed"):
        buffer.close()
    ReplayBuffer.open(tmp_path / "a", "r+").close()


def test_a_resize_that_cannot_open_what_it_built_leaves_the_writer(tmp_path):
    buffer = make(tmp_path / "a")
    buffer.add(step(buffer))
    interrupted = mock.patch.object(opening, "_open_locked", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        buffer.resize(20)
    capacity = buffer.capacity
    buffer.add(step(buffer))
    buffer.close()
    again = ReplayBuffer.open(tmp_path / "a", "r+", commit_every=None)
    assert again.capacity == capacity != 20
    assert again.heads.tolist() == [2, 2]
    again.close()


def test_nothing_is_added_to_a_generation_that_a_resize_may_have_left(tmp_path):
    buffer = make(tmp_path / "a")
    buffer.add(step(buffer))
    interrupted = mock.patch.object(CommitWriter, "mark_moved", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        buffer.resize(20)
    with pytest.raises(FailedError, match="switch to data-000002 failed"):
        buffer.add(step(buffer))
    with pytest.raises(FailedError):
        buffer.close()
    with ReplayBuffer.open(tmp_path / "a") as reader:
        assert reader.capacity == 20
        assert reader.heads.tolist() == [1, 1]


@pytest.mark.parametrize("calls", range(12, 20))
@pytest.mark.sliced(1)
def test_a_power_cut_in_the_opening_after_a_kill_in_a_commit(tmp_path, calls):
    """A slot that was written and not synced is no reason to overwrite the other."""
    for luck in range(12):
        folder = tmp_path / str(luck)
        folder.mkdir()
        make(folder / "a").close()
        disk = SimulatedDisk(folder)
        with using(disk):
            buffer = ReplayBuffer.open(folder / "a", "r+", commit_every=None)
            buffer.add(step(buffer))
            buffer.commit()
            heads = buffer.heads
            buffer.add(step(buffer))
            # Killed when the slot is written, and not synced.
            with killed_in(COMMIT), pytest.raises(PowerCut):
                buffer.commit()
            abandon(buffer)
            disk.revive()
            disk.calls_left = calls
            with suppress(PowerCut):
                abandon(ReplayBuffer.open(folder / "a", "r+", commit_every=None))
        disk.crash(folder, np.random.default_rng(luck))
        rebooted = mock.patch.object(process, "boot_id", return_value=bytes(range(16)))
        with rebooted, ReplayBuffer.open(folder / "a") as reader:
            assert (reader.heads >= heads).all()


@pytest.mark.parametrize("calls", range(10))
def test_folders_on_the_way_that_a_killed_creation_made(tmp_path, calls):
    """Whoever creates again cannot know that they were never synced."""
    for luck in range(4):
        folder = tmp_path / str(luck)
        folder.mkdir()
        disk = SimulatedDisk(folder, calls_left=calls)
        with using(disk):
            with suppress(PowerCut):
                make(folder / "a" / "b" / "c")
            disk.revive()
            buffer = make(folder / "a" / "b" / "c")
            buffer.add(step(buffer))
            buffer.commit()
            abandon(buffer)
        disk.crash(folder, np.random.default_rng(luck))
        rebooted = mock.patch.object(process, "boot_id", return_value=bytes(range(16)))
        with rebooted, ReplayBuffer.open(folder / "a" / "b" / "c") as reader:
            assert (reader.heads == 1).all()


def test_a_creation_in_a_folder_that_may_not_be_listed(tmp_path):
    """What is above an empty folder is synced where that can be, and only there."""
    (tmp_path / "hidden" / "mine").mkdir(parents=True)
    (tmp_path / "hidden").chmod(0o311)
    readable = os.access
    hidden = mock.patch.object(
        os, "access", lambda path, mode: path.name != "hidden" and readable(path, mode)
    )
    synced = []
    watched = mock.patch.object(files, "sync_folder", synced.append)
    with hidden, watched:
        make(tmp_path / "hidden" / "mine" / "a").close()
    assert tmp_path / "hidden" not in synced
    with watched:
        (tmp_path / "hidden" / "other").mkdir()
        make(tmp_path / "hidden" / "other" / "a").close()
    assert tmp_path / "hidden" in synced


def killed_in(name):
    """Syncs of files of a name never come back."""
    sync = File.sync

    def killed(file):
        if file.path.name == name:
            raise PowerCut(in_flight=True)
        sync(file)

    return mock.patch.object(File, "sync", killed)
