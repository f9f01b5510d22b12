"""A snapshot is the buffer as it was when asked for, whatever goes on meanwhile."""

import os
import shutil
import signal
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import copy_files
from mmreplay.buffer.copy_files import snapshot
from mmreplay.disk import pause as pausing
from mmreplay.disk.files import Disk
from mmreplay.disk.pause import Pause
from mmreplay.errors import CorruptError, FailedError, FormatError, LockedError
from mmreplay.testing.disks import using
from mmreplay.verify import verify_buffer

SCHEMA = mr.Schema(
    {
        "number": mr.Field((), "int64"),
        "large": mr.Field((600,), "int64"),
        "note": mr.Field((), "int64", mutable=True),
        "terminated": mr.Field((), "bool"),
    }
)
LAYOUTS = ("env_major", "time_major")


class SharingDisk(Disk):
    """A disk whose file system shares blocks; between clones the writer goes on."""

    def __init__(self, write_more=lambda: None):
        self.write_more = write_more
        self.clones = 0

    def clone(self, fd, source):
        self.clones += 1
        os.pwrite(fd, os.pread(source, os.fstat(source).st_size, 0), 0)
        self.write_more()


def create(path, capacity=40, num_envs=2, layout="env_major"):
    return mr.ReplayBuffer.create(
        path, SCHEMA, capacity, num_envs, layout=layout, commit_every=None, autoreset="disabled"
    )


def extend(buffer, count, env_ids=None):
    heads = buffer.heads if env_ids is None else buffer.heads[env_ids]
    numbers = heads + np.arange(count)[:, None]
    wide = np.broadcast_to(numbers[..., None], (*numbers.shape, 600))
    buffer.extend(
        number=numbers, large=wide, note=-numbers, terminated=numbers % 7 == 3, env_ids=env_ids
    )


def assert_right(buffer):
    """Every row says its position, as `extend` wrote it."""
    rows = buffer.gather_all()
    assert (rows["number"] == rows.positions).all()
    assert (rows["large"] == rows.positions[:, None]).all()
    assert (rows["note"] == -rows.positions).all()
    assert (rows["terminated"] == (rows.positions % 7 == 3)).all()
    return rows


def assert_whole(path):
    assert verify_buffer(path).findings == ()
    with mr.ReplayBuffer.open(path) as buffer:
        return assert_right(buffer)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True], ids=["copy", "reflink"])
@pytest.mark.parametrize("count", [0, 1, 13, 40, 41, 97, 333])
def test_a_snapshot_holds_what_the_buffer_holds(tmp_path, layout, shared, count):
    with create(tmp_path / "a", layout=layout) as buffer:
        for first in range(0, count, 10):
            extend(buffer, min(10, count - first))
            if first == 50:
                buffer.commit()
        if count > 41:
            extend(buffer, 5, [1])
        before = buffer.gather_all()
        with using(SharingDisk() if shared else Disk()):
            made = buffer.snapshot(tmp_path / "b")
        assert made.how == ("reflink" if shared else "copy")
        assert made.cut_rows == 0
        assert made.rows == len(before.positions)
        heads = buffer.heads
    rows = assert_whole(tmp_path / "b")
    assert (rows.positions == before.positions).all()
    assert (rows.env_ids == before.env_ids).all()
    assert (made.heads == heads).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True], ids=["copy", "reflink"])
@pytest.mark.sliced(1)
def test_rows_overwritten_during_the_copy_are_dropped_and_counted(
    tmp_path, rng, monkeypatch, layout, shared
):
    """Whatever is overwritten between any two files or pieces, no wrong row is in."""
    monkeypatch.setattr(copy_files, "CHUNK_NBYTES", 9000)
    cuts = []
    for turn in range(8):
        source, target = tmp_path / f"a{turn}", tmp_path / f"b{turn}"
        with create(source, layout=layout) as buffer:
            extend(buffer, 95)
            buffer.commit()
            extend(buffer, int(rng.integers(1, 9)))
            before = buffer.gather_all()
            pace = float(rng.choice([0.1, 0.3, 0.9]))

            def write_more():
                if shared or rng.random() < pace:  # noqa: B023
                    extend(buffer, int(rng.integers(1, 5)))
                if rng.random() < 0.3:
                    buffer.commit()

            disk = SharingDisk(write_more) if shared else BusyDisk(write_more)
            with using(disk):
                made = buffer.snapshot(target)
        rows = assert_whole(target)
        assert made.cut_rows + len(rows.positions) == len(before.positions)
        assert (made.heads == before.positions.reshape(2, -1)[:, -1] + 1).all()
        cuts.append(made.cut_rows)
    # A tenth of the ring is overwritten between files: these rows have to be dropped.
    assert max(cuts) > 0


class BusyDisk(Disk):
    """A disk beside which the writer goes on after each large write of somebody's."""

    def __init__(self, write_more):
        self.write_more = write_more
        self.inside = False

    def clone(self, fd, source):
        raise OSError(95, os.strerror(95))

    def pwrite(self, fd, data, offset):
        done = super().pwrite(fd, data, offset)
        if memoryview(data).nbytes > 4000 and not self.inside:
            self.inside = True
            self.write_more()
            self.inside = False
        return done


@pytest.mark.parametrize("shared", [False, True], ids=["copy", "reflink"])
def test_a_snapshot_is_continued_from(tmp_path, shared):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 77)
        buffer.set_statistics({"mean": 1})
        with using(SharingDisk() if shared else Disk()):
            buffer.snapshot(tmp_path / "b")
        extend(buffer, 30)
        uuid = buffer.metadata.uuid
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as other:
        assert other.metadata.uuid == uuid
        assert other.statistics == {"mean": 1}
        assert other.heads.tolist() == [77, 77]
        extend(other, 100)
        assert_right(other)
    assert_whole(tmp_path / "b")
    assert assert_whole(tmp_path / "a").positions.max() == 106


def test_a_damaged_block_is_damaged_in_the_snapshot_too(tmp_path):
    """Sums come along; to make them anew would vouch for what nobody wrote."""
    with create(tmp_path / "a") as buffer:
        extend(buffer, 30)
    data = tmp_path / "a" / "data-000001" / "f000.bin"
    with data.open("r+b") as file:
        file.seek(5 * 4800 + 17)
        file.write(b"x")
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        buffer.snapshot(tmp_path / "b")
    assert [f.kind for f in verify_buffer(tmp_path / "b").findings] == ["sum"]


def test_a_reader_takes_a_snapshot_of_what_is_published(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 20)
        with mr.ReplayBuffer.open(tmp_path / "a") as reader:
            extend(buffer, 3)
            made = reader.snapshot(tmp_path / "b")
    assert made.heads.tolist() == [23, 23]
    assert len(assert_whole(tmp_path / "b").positions) == 46


def test_an_emptied_environment_goes_on_at_its_head(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 20)
        buffer.clear([0])
        made = buffer.snapshot(tmp_path / "b")
    assert made.firsts.tolist() == [20, 0]
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as other:
        assert other.heads.tolist() == [20, 20]
        extend(other, 4)
        assert_right(other)


def test_a_paused_writer_waits_at_its_reserve_and_goes_on_after(tmp_path):
    with create(tmp_path / "a", capacity=64) as buffer:
        extend(buffer, 100)
        buffer.commit()
    told, tell = os.pipe()
    go, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        with mr.ReplayBuffer.open(tmp_path / "a", "r+", commit_every=None) as buffer:
            extend(buffer, 1)
            os.write(tell, b".")
            os.read(go, 1)
            for _ in range(60):
                extend(buffer, 1)
        os._exit(0)
    os.close(tell)
    assert os.read(told, 1) == b"."
    held = Pause(tmp_path / "a")
    reader = mr.ReplayBuffer.open(tmp_path / "a")
    first, ring = reader.span.first.copy(), reader.metadata.ring
    os.write(start, b".")
    while (reader.heads < 100 + ring.reserve).any():
        time.sleep(0.001)
    # It has no more room: whatever it does now, no row of ours is overwritten.
    for _ in range(40):
        assert (reader.heads == 100 + ring.reserve).all()
        assert (reader._files.commit.limits - ring.slots <= first).all()
        time.sleep(0.002)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    held.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reader.heads.tolist() == [161, 161]
    reader.close()


def assert_nothing_is_dropped(folder, turns, rows):
    """Take paused snapshots of a buffer that another process writes all along."""
    pid = os.fork()
    if pid == 0:
        buffer = mr.ReplayBuffer.open(folder / "a", "r+", commit_every=0.01)
        while True:
            extend(buffer, 5)
    try:
        with mr.ReplayBuffer.open(folder / "a") as reader:
            made = [reader.snapshot(folder / f"b{turn}", pause=True) for turn in range(turns)]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [each.cut_rows for each in made] == [0] * turns
    for turn in range(turns):
        assert len(assert_whole(folder / f"b{turn}").positions) == rows


def test_with_a_pause_no_row_is_dropped(tmp_path):
    with create(tmp_path / "a", capacity=512) as buffer:
        extend(buffer, 900)
    assert_nothing_is_dropped(tmp_path, turns=5, rows=1024)


def test_a_pause_dies_with_its_owner(tmp_path):
    with create(tmp_path / "a", capacity=64) as buffer:
        extend(buffer, 100)
        pid = os.fork()
        if pid == 0:
            held = Pause(tmp_path / "a")
            os.kill(os.getpid(), signal.SIGKILL)
            held.release()
        os.waitpid(pid, 0)
        extend(buffer, 200)
        assert_right(buffer)


def test_a_second_pause_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pausing, "PATIENCE_S", 0.01)
    with create(tmp_path / "a") as buffer:
        held = Pause(tmp_path / "a")
        with pytest.raises(LockedError, match="already paused by another snapshot"):
            buffer.snapshot(tmp_path / "b", pause=True)
        held.release()
        buffer.snapshot(tmp_path / "b", pause=True)


def test_a_forked_child_holds_no_pause(tmp_path):
    with create(tmp_path / "a", capacity=64) as buffer:
        extend(buffer, 100)
        held = Pause(tmp_path / "a")
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(read, 1)
            os._exit(0)
        held.release()
        extend(buffer, 200)
        os.write(write, b".")
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("a/inner", r".* is inside the buffer .*\..*path outside the buffer\."),
        ("link/inner", r".* is inside the buffer .*\..*path outside the buffer\."),
        ("c", "already holds a buffer"),
        ("d", "is a folder with other files"),
    ],
)
def test_a_target_that_is_not_empty_is_refused(tmp_path, where, message):
    create(tmp_path / "c").close()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").touch()
    with create(tmp_path / "a") as buffer, pytest.raises(FormatError, match=message):
        buffer.snapshot(tmp_path / where)
    assert (tmp_path / "d" / "thesis.tex").exists()


def test_a_buffer_in_ram_is_refused():
    with (
        mr.ReplayBuffer.create(None, SCHEMA, 8, engine="memory") as buffer,
        pytest.raises(FailedError, match=r"is in RAM.*mmreplay\.export"),
    ):
        buffer.snapshot("b")


def test_half_a_snapshot_is_no_buffer_and_is_repeated(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 33)
        buffer.snapshot(tmp_path / "b")
        # As a kill before the last renames leaves it.
        (tmp_path / "b" / "metadata.json").unlink()
        (tmp_path / "b" / "tmp-snapshot").touch()
        (tmp_path / "b" / "statistics.json").write_text("{")
        with pytest.raises(FormatError, match="is not a replay buffer"):
            mr.ReplayBuffer.open(tmp_path / "b")
        shutil.copytree(tmp_path / "b", tmp_path / "c")
        buffer.snapshot(tmp_path / "b")
    assert len(assert_whole(tmp_path / "b").positions) == 66
    create(tmp_path / "c").close()
    assert verify_buffer(tmp_path / "c").findings == ()


def test_a_truncated_source_is_reported(tmp_path):
    with create(tmp_path / "a") as buffer:
        extend(buffer, 20)
    path = tmp_path / "a" / "data-000001" / "f000.bin"
    os.truncate(path, 100)
    with pytest.raises(CorruptError, match=r"f000\.bin has 100 bytes"):
        snapshot(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
