"""Snapshots of compressed buffers link what is sealed; priorities come along."""

import errno
import os
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import copy_files
from mmreplay.disk.files import Disk
from mmreplay.errors import CorruptError, FailedError, StarvedError
from mmreplay.testing.disks import using
from mmreplay.verify import verify_buffer
from tests.buffer.test_snapshots import (
    SCHEMA,
    assert_nothing_is_dropped,
    assert_right,
    assert_whole,
    extend,
)

LAYOUTS = ("env_major", "time_major")


class UnlinkingDisk(Disk):
    """A disk whose file system has no hard links."""

    def link(self, source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class BusyDisk(Disk):
    """A disk beside which the writer goes on after each second name."""

    def __init__(self, write_more):
        self.write_more = write_more
        self.inside = False

    def link(self, source, target):
        super().link(source, target)
        self._go_on()

    def pwrite(self, fd, data, offset):
        done = super().pwrite(fd, data, offset)
        if memoryview(data).nbytes > 4000:
            self._go_on()
        return done

    def _go_on(self):
        # Not in the thread that seals, which would wait for itself.
        main = threading.current_thread() is threading.main_thread()
        if main and not self.inside:
            self.inside = True
            self.write_more()
            self.inside = False


def create(path, capacity=64, layout="env_major", **options):
    return mr.ReplayBuffer.create(
        path,
        SCHEMA,
        capacity,
        2,
        layout=layout,
        commit_every=None,
        engine="zarr",
        autoreset="disabled",
        **options,
    )


def shards(path):
    return sorted((path / "data-000001" / "zarr").rglob("c.*"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("disk", [Disk, UnlinkingDisk])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("count", [0, 13, 333])
def test_a_snapshot_holds_what_the_buffer_holds(tmp_path, layout, disk, closed, count):
    buffer = create(tmp_path / "a", layout=layout)
    for first in range(0, count, 10):
        extend(buffer, min(10, count - first))
    if closed:
        buffer.close()
        buffer = mr.ReplayBuffer.open(tmp_path / "a")
    with buffer:
        if not closed:
            # What a thread seals meanwhile is there, however busy the machine.
            buffer._files.store.sealing.seal_now([])
        before = buffer.gather_all()
        with using(disk()):
            made = buffer.snapshot(tmp_path / "b")
    assert (made.how == "link") == (disk is Disk and bool(shards(tmp_path / "b")))
    assert (made.cut_rows, made.rows) == (0, len(before.positions))
    rows = assert_whole(tmp_path / "b")
    assert (rows.positions == before.positions).all()
    assert bool(shards(tmp_path / "b")) == (count > (0 if closed else 13))


def test_links_outlive_the_original_and_the_snapshot_is_continued_from(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 150)
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        assert buffer.snapshot(tmp_path / "b").how == "link"
    names = [path.relative_to(tmp_path / "b") for path in shards(tmp_path / "b")]
    for name in names:
        assert (tmp_path / "a" / name).samefile(tmp_path / "b" / name)
    with mr.ReplayBuffer.open(tmp_path / "a", "r+", commit_every=None) as buffer:
        extend(buffer, 200)
    rows = assert_whole(tmp_path / "b")
    assert rows.positions.max() == 149
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as buffer:
        extend(buffer, 91)
    assert assert_whole(tmp_path / "b").positions.max() == 240
    assert assert_whole(tmp_path / "a").positions.max() == 349


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sliced(1)
def test_shard_files_that_are_reused_during_the_copy_cost_no_row_that_is_alive(
    tmp_path, rng, layout
):
    cuts = []
    for turn in range(3):
        path = tmp_path / f"a{turn}"
        with create(path, layout=layout) as buffer:
            extend(buffer, 150)
        # Sealed by the close, and put back as the writer comes round.
        with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
            extend(buffer, int(rng.integers(1, 9)))
            before = buffer.gather_all()
            pace = float(rng.choice([0.2, 0.9]))

            def write_more():
                if rng.random() < pace:  # noqa: B023
                    extend(buffer, int(rng.integers(5, 20)))
                if rng.random() < 0.3:
                    buffer.commit()

            with using(BusyDisk(write_more)):
                made = buffer.snapshot(tmp_path / f"b{turn}")
        rows = assert_whole(tmp_path / f"b{turn}")
        assert made.cut_rows + len(rows.positions) == len(before.positions)
        cuts.append(made.cut_rows)
    assert max(cuts) > 0


def test_with_a_pause_no_row_of_a_live_writer_is_dropped(tmp_path):
    with create(tmp_path / "a", capacity=256) as buffer:
        extend(buffer, 300)
    assert_nothing_is_dropped(tmp_path, turns=3, rows=512)


def test_a_missing_shard_is_reported(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 150)
    gone = shards(tmp_path / "a")[3]
    gone.unlink()
    with (
        mr.ReplayBuffer.open(tmp_path / "a") as buffer,
        pytest.raises(CorruptError, match=r"the shard .*c\..* is missing"),
    ):
        buffer.snapshot(tmp_path / "b")


def test_a_link_that_the_file_system_refuses_for_another_reason_is_reported(tmp_path):
    class FailingDisk(Disk):
        def link(self, source, target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with create(tmp_path / "a") as buffer:
        extend(buffer, 150)
    with (
        mr.ReplayBuffer.open(tmp_path / "a") as buffer,
        using(FailingDisk()),
        pytest.raises(FailedError, match="cannot link"),
    ):
        buffer.snapshot(tmp_path / "b")


def test_a_shard_range_that_changes_all_the_time_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(copy_files, "TRIES", 3)
    turns = iter(range(1000))
    get = copy_files.ShardStates.get
    monkeypatch.setattr(copy_files.ShardStates, "get", lambda *a: get(*a) + 2 * next(turns))
    with create(tmp_path / "a") as buffer:
        extend(buffer, 5)
        with pytest.raises(StarvedError, match="Take the snapshot again"):
            buffer.snapshot(tmp_path / "b")


def test_a_damaged_shard_is_damaged_in_the_snapshot_too(tmp_path):
    with create(tmp_path / "a", codec="none") as buffer:
        extend(buffer, 150)
    path = tmp_path / "a" / "data-000001" / "zarr" / "large" / "c.0.0.0"
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        buffer.snapshot(tmp_path / "b")
    assert {f.kind for f in verify_buffer(tmp_path / "b").findings} == {"sum"}


def learned(path):
    """Positions of the rows alive, and what the column says of each after a draw."""
    sampler = mr.PrioritizedSampler(seed=0, name="learner")
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(1)
        span, ring = buffer.span, buffer.metadata.ring
    env_ids = np.repeat(np.arange(2), span.lengths)
    positions = np.concatenate(
        [np.arange(f, s) for f, s in zip(span.first, span.stop, strict=True)]
    )
    numbers = np.fromfile(path / "samplers" / "learner" / "priorities.bin", "<f4")
    return positions, numbers[ring.rows(env_ids, positions)]


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("count", [20, 150])
def test_priorities_come_along(tmp_path, engine, count):
    sampler = mr.PrioritizedSampler(seed=0, name="learner")
    with mr.ReplayBuffer.create(
        tmp_path / "a",
        SCHEMA,
        64,
        2,
        commit_every=None,
        engine=engine,
        sampler=sampler,
        autoreset="disabled",
    ) as buffer:
        extend(buffer, count)
        for _ in range(5):
            batch = buffer.sample(32)
            buffer.update_priorities(batch, 1 + batch.positions % 50)
        extend(buffer, 3)
        buffer.snapshot(tmp_path / "b")
        extend(buffer, 9)
    positions, theirs = learned(tmp_path / "b")
    own = np.isin(theirs, 1 + positions % 50) & (theirs < 51)
    assert own.sum() > 40
    entry = theirs[positions >= count]
    assert (entry == theirs.max()).all()
    assert verify_buffer(tmp_path / "b").findings == ()


def test_a_column_knows_no_row_that_the_snapshot_has_not(tmp_path):
    """A row that takes the place of one that was not taken begins as a new one."""
    sampler = mr.PrioritizedSampler(seed=0, name="learner")
    with mr.ReplayBuffer.create(
        tmp_path / "a", SCHEMA, 64, 2, commit_every=None, sampler=sampler, autoreset="disabled"
    ) as buffer:
        extend(buffer, 20)
        heads = []

        def write_more():
            if not heads:
                heads.append(buffer.heads.copy())
                extend(buffer, 10)
                batch = buffer.sample(256)
                buffer.update_priorities(batch, np.full(256, 99.0))

        with using(BusyDisk(write_more)):
            made = buffer.snapshot(tmp_path / "b")
    assert made.heads.tolist() == [20, 20]
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as other:
        extend(other, 5)
    positions, theirs = learned(tmp_path / "b")
    # New rows enter at the highest of the rows alive, not at what others had there.
    assert (theirs[positions >= 20] == theirs[positions < 20].max()).all()


def test_a_column_that_is_damaged_is_left_out(tmp_path):
    sampler = mr.PrioritizedSampler(seed=0, name="learner")
    with mr.ReplayBuffer.create(
        tmp_path / "a", SCHEMA, 64, 2, commit_every=None, sampler=sampler, autoreset="disabled"
    ) as buffer:
        extend(buffer, 20)
        buffer.sample(8)
    (tmp_path / "a" / "samplers" / "odd").symlink_to(tmp_path)
    (tmp_path / "a" / "samplers" / "learner" / "STATE").write_bytes(b"x" * 8192)
    with mr.ReplayBuffer.open(tmp_path / "a") as reader:
        reader.snapshot(tmp_path / "b")
    assert not (tmp_path / "b" / "samplers").exists()
    assert_right(mr.ReplayBuffer.open(tmp_path / "b"))
