"""Readers beside a writer that began after a failed sync, and cut what they know."""

from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process
from mmreplay.buffer.copy_files import snapshot
from mmreplay.buffer.reader import GenerationReader
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.errors import FailedError, StaleError
from mmreplay.storage import recovery
from mmreplay.testing.disks import using
from tests.torture.failing import GEOMETRY, ROWS, add, begun, fail, failing, reopen
from tools.torture.power import PowerCut
from tools.torture.powerloss import abandon
from tools.torture.rows import SHARDED, faults


def lost(folder, disk, buffer, count, geometry=GEOMETRY):
    """Cut what was not committed; the next writer writes so many other rows."""
    fail(disk, buffer)
    fresh = reopen(folder / "a")
    assert fresh.recovery.how == "failed"
    add(fresh, count, 2, geometry)
    return fresh


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_late_reader_sees_no_dropped_step(tmp_path, restarts):
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
def test_a_snapshot_of_rows_that_were_dropped_is_refused(tmp_path, geometry):
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
        with pytest.raises(FailedError, match="Start again from"):
            snapshot(folder / "a", folder / "b", progress=restart)
        again = done[0].snapshot(folder / "b")
        assert (again.heads == done[0].heads).all()
        done[0].close()
    assert mr.verify_buffer(folder / "b").ok


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_snapshot_goes_on_while_writers_come_and_go(tmp_path, restarts):
    folder, disk = failing(tmp_path)
    writers = []

    def restart(*_):
        for _ in range(restarts - len(writers) + 1):
            writers[-1].close()
            writers.append(reopen(folder / "a"))

    with using(disk):
        writers.append(begun(folder, 30))
        heads = writers[0].heads
        made = snapshot(folder / "a", folder / "b", progress=restart)
        writers[-1].close()
    assert (made.heads == heads).all()
    assert len(writers) > restarts


def test_a_compressed_copy_of_rows_that_were_dropped_is_refused(tmp_path):
    folder, disk = failing(tmp_path)
    done = []

    def restart(*_):
        if not done:
            done.append(lost(folder, disk, buffer, 9))

    with using(disk):
        buffer = begun(folder, 30)
        add(buffer, 4)
        with pytest.raises(FailedError, match="these rows were discarded: a writer"):
            mr.compact(folder / "a", folder / "b", codec=None, progress=restart)
        assert not (folder / "b" / "metadata.json").exists()
        done[0].close()


@pytest.mark.parametrize("late", [False, True])
def test_an_export_of_rows_that_were_dropped_is_refused(tmp_path, late):
    folder, disk = failing(tmp_path)
    with using(disk):
        buffer = begun(folder, 30)
        add(buffer, 4)
        with ReplayBuffer.open(folder / "a") as reader, BufferReader(reader) as source:
            done, read_values = [], GenerationReader.read_values

            def read(*args):
                columns = read_values(*args)
                if not done:
                    done.append(lost(folder, disk, buffer, 9))
                return columns

            blocks = source.blocks(8)
            if not late:
                # The thread that reads ahead may be anywhere in the next block.
                next(blocks)
                done.append(lost(folder, disk, buffer, 9))
            with (
                mock.patch.object(GenerationReader, "read_values", read),
                pytest.raises(StaleError, match="these rows were discarded: a writer"),
            ):
                list(blocks)
        done[0].close()


SAMPLERS = {
    "steps": (lambda: mr.UniformSampler(seed=0), ()),
    "n-step": (lambda: mr.UniformSampler(seed=0), (mr.NStep(3, 0.9),)),
    "windows": (lambda: mr.SequenceSampler(4, mr.UniformSampler(seed=0)), ()),
    "prioritized": (lambda: mr.PrioritizedSampler(seed=0, name=None), ()),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("late", [False, True])
def test_a_draw_of_rows_that_were_dropped_is_repeated(tmp_path, kind, late):
    folder, disk = failing(tmp_path)
    make, transforms = SAMPLERS[kind]
    with using(disk):
        buffer = begun(folder, 8)
        add(buffer, 20)
        sampler = make()
        with ReplayBuffer.open(folder / "a", sampler=sampler, transforms=transforms) as reader:
            drawn = reader.view.draw(sampler, 64)
            assert drawn.draw.positions.max() > 12
            done, store = [], reader._files.store

            def read(rows, paths):
                found = type(store).gather(store, rows, paths)
                if not done:
                    done.append(lost(folder, disk, buffer, 4))
                return found

            if late:
                done.append(lost(folder, disk, buffer, 4))
                batch = reader.view.gather(drawn)
            else:
                with mock.patch.object(store, "gather", read):
                    batch = reader.sample(64)
            assert done
            assert len(batch) == 64
            assert batch.positions.max() < 12
            again = reader.take(batch.env_ids, batch.positions, key=batch.key)
            for path in again:
                if batch[path].shape == again[path].shape:
                    assert (batch[path] == again[path]).all(), path
            assert faults(reader, GEOMETRY, starts_of(done[0], 8)) == []
        done[0].close()


def starts_of(buffer, heads):
    zeros = np.zeros(GEOMETRY.num_envs, np.int64)
    return [(1, zeros), (2, zeros + heads)]


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("again", [False, True])
def test_rows_that_replace_dropped_rows_have_none_of_their_priorities(tmp_path, name, again):
    folder, disk = failing(tmp_path)
    with using(disk):
        buffer = begun(folder, 8)
        add(buffer, 8)

        def opened():
            sampler = mr.PrioritizedSampler(seed=0, name=name)
            return ReplayBuffer.open(folder / "a", sampler=sampler)

        reader = opened()
        batch = reader.sample(512)
        assert set(batch.positions.tolist()) >= set(range(15))
        values = np.where(batch.positions < 4, 3.0, 0.0)
        reader.update_priorities(batch, values)
        if again:
            reader.close()
        fresh = lost(folder, disk, buffer, 12)
        reader = opened() if again else reader
        counts = np.bincount(reader.sample(4096).positions, minlength=20)
        if not (again and name is None):
            # Those that stay keep theirs.
            assert not counts[4:7].any()
        # New rows enter at the highest; the newest has no next one yet.
        assert (counts[8:19] > 60).all()
        reader.close()
        fresh.close()


@pytest.mark.parametrize("how", ["failed", "power_cut"])
def test_rows_dropped_by_a_killed_opening_are_reported_by_the_next_one(tmp_path, how):
    folder, disk = failing(tmp_path)
    with using(disk):
        buffer = begun(folder)
        add(buffer, 7)
        if how == "failed":
            fail(disk, buffer)
            known = process.boot_id()
        else:
            abandon(buffer)
            known = bytes(range(16))
    with mock.patch.object(process, "boot_id", return_value=known):
        # Live slots are written first, then COMMIT is synced.
        killed = mock.patch.object(
            recovery, "_sync_inherited", side_effect=PowerCut(in_flight=True)
        )
        with killed, pytest.raises(PowerCut):
            reopen(folder / "a")
        with ReplayBuffer.open(folder / "a") as reader:
            assert reader.recovery.how == how
            assert reader.recovery.cut_rows == 7 * GEOMETRY.num_envs
        buffer = reopen(folder / "a")
        assert buffer.recovery.how == how
        assert buffer.recovery.cut_rows == 7 * GEOMETRY.num_envs
        assert (buffer.heads == ROWS).all()
        buffer.close()
        with ReplayBuffer.open(folder / "a") as reader:
            assert reader.recovery.how == "clean"


@pytest.mark.parametrize("now", [9_300_000_000, 10**12, -5])
def test_a_clock_that_is_wrong_stops_no_commit(tmp_path, now):
    folder, disk = failing(tmp_path)
    with using(disk), mock.patch("time.time_ns", return_value=now * 10**9):
        buffer = begun(folder)
        buffer.close()
    with ReplayBuffer.open(folder / "a") as reader:
        assert reader.recovery.how == "clean"
        assert (reader.committed == ROWS).all()
