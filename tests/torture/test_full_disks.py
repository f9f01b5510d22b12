"""A disk that is full at each page of a script: an error, and a whole buffer."""

import os
import shutil
import subprocess
import warnings
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import append
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.cli.run import run
from mmreplay.disk.files import Disk
from mmreplay.errors import FailedError, FormatError, FullError
from mmreplay.storage import write_path
from mmreplay.storage.zarr.shards import ShardStates
from mmreplay.verify import verify_buffer
from tools.torture.powerloss import abandon
from tools.torture.rows import Geometry, content, faults

GEOMETRY = Geometry("two", 16, 2, "env_major", large=True)
STARTS = [(1, np.zeros(2, np.int64))]
PAGE = 4096
SIZE = 2 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root only")
    path, image = tmp_path / "disk", tmp_path / "image"
    path.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]]
    else:
        image.write_bytes(b"")
        os.truncate(image, SIZE)
        commands = [
            ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image)],
            ["mount", "-o", "loop", str(image), str(path)],
        ]
    for command in commands:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not here")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def leave(path, num_pages):
    """Fill the disk but for so many pages."""
    filler = os.open(path / "filler", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize // PAGE
    os.posix_fallocate(filler, 0, PAGE * max(1, free - num_pages))
    os.close(filler)


def fill(path):
    """Leave not a page."""
    filler = os.open(path / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(filler, bytes(PAGE)):
            pass
    os.close(filler)


class Script:
    """What a run does, a step at a time, and what it was told."""

    def __init__(self, folder):
        self.path = folder / "buffer"
        self.target = folder / "out.npz"
        self.buffer = None
        self.exported = False
        self.acked = np.zeros(2, np.int64)

    def run(self):
        """Do all of it, until something is refused."""
        for do in (
            *(self.create, self.add, self.extend, self.commit, self.statistics),
            *(self.grow, self.extend, self.export, self.shrink, self.add, self.close),
        ):
            do()
            if self.buffer is not None and not self.buffer.closed:
                self.acked = self.buffer.heads

    def create(self):
        self.buffer = ReplayBuffer.create(
            self.path,
            GEOMETRY.schema,
            GEOMETRY.capacity,
            GEOMETRY.num_envs,
            autoreset="same_step",
            commit_every=None,
        )

    def add(self):
        heads, ones = self.buffer.heads, np.ones(2, np.int64)
        self.buffer.add(content(GEOMETRY, np.arange(2), heads, ones))

    def extend(self):
        numbers = self.buffer.heads[0] + np.repeat(np.arange(20), 2)
        env_ids, ones = np.tile([0, 1], 20), np.ones(40, np.int64)
        found = content(GEOMETRY, env_ids, numbers, ones)
        self.buffer.extend({p: c.reshape(20, 2, *c.shape[1:]) for p, c in found.items()})

    def commit(self):
        self.buffer.commit()

    def statistics(self):
        self.buffer.set_statistics({"mean": list(range(2000))})

    def grow(self):
        self.buffer.resize(40)

    def shrink(self):
        self.buffer.resize(12)

    def export(self):
        mr.export(self.path, self.target)
        self.exported = True

    def close(self):
        self.buffer.close()


def check_whole(script):
    """Check what is there, and that it goes on where there is space again."""
    try:
        buffer = ReplayBuffer.open(script.path, "r+", commit_every=None)
    except FormatError:
        assert script.buffer is None
        return
    with buffer:
        assert (buffer.heads >= script.acked).all()
        assert faults(buffer, GEOMETRY, STARTS) == []
        script.buffer = buffer
        script.extend()
        assert faults(buffer, GEOMETRY, STARTS) == []
    assert verify_buffer(script.path).ok


class Unsynced(Disk):
    """A disk for the runs that nothing will crash."""

    def datasync(self, fd):
        pass

    def sync_folder(self, fd):
        pass


def until_it_fits(disk, first, step):
    """Run the script with more and more pages; how often it was refused."""
    refused, pages = 0, first
    while True:
        leave(disk, pages)
        script = Script(disk)
        try:
            script.run()
            fits = True
        except FullError:
            fits = False
            refused += 1
            # No file, or the whole one.
            assert script.target.exists() == script.exported
        buffer = script.buffer
        if buffer is not None and not buffer.closed:
            # What was published stays readable on the full disk.
            assert faults(buffer, GEOMETRY, STARTS) == []
            script.acked = buffer.heads
            # A switch to another generation that failed is told again at close.
            with suppress(FullError, FailedError):
                buffer.close()
            if not buffer.closed:
                abandon(buffer)
        (disk / "filler").unlink()
        check_whole(script)
        for path in disk.iterdir():
            if path.name != "lost+found":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if fits:
            return refused
        pages += step


@pytest.mark.sliced(1)
def test_a_disk_that_is_full_at_some_pages_of_a_script_loses_nothing(disk):
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        assert until_it_fits(disk, 3, 13) > 10


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_page_of_a_script_loses_nothing(disk):
    refused = until_it_fits(disk, 0, 1)
    assert refused > 150


def test_a_shard_range_with_holes_is_sealed_on_a_full_disk(disk):
    schema = mr.Schema({"n": mr.Field((), "int64"), "x": mr.Field((96,), "uint8")})
    path = disk / "b"
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        buffer = ReplayBuffer.create(path, schema, 120_000, engine="zarr", commit_every=None)
        buffer.extend(n=np.arange(20), x=np.zeros((20, 96), np.uint8))
        buffer.commit()
        fill(disk)
        # A page that is not there yet kills whoever reads it through a mapping.
        with pytest.raises(FullError, match="cannot seal the newest rows"):
            buffer.close()
        (disk / "filler").unlink()
        ReplayBuffer.open(path, "r+").close()
        with ReplayBuffer.open(path) as buffer:
            group = buffer.zarr_path
        with ReplayBuffer.open(group) as buffer:
            assert buffer.gather_all()["n"].tolist() == list(range(20))


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.sliced(1)
def test_a_conversion_whose_first_block_begins_with_a_hole(disk, engine, layout):
    schema = mr.Schema({"n": mr.Field((16,), "int64")})
    source = ReplayBuffer.create(None, schema, 2048, 2, engine="memory", autoreset="disabled")
    source.extend(n=np.arange(32 * 2424).reshape(2424, 2, 16))
    # The oldest row is no block's first: the sum of its block is of a hole, too.
    assert source.span.first[0] % source.metadata.ring.block_rows > 80
    refused = 0
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        for pages in range(40, 400, 3):
            leave(disk, pages)
            try:
                mr.export(source, disk / "b", format="buffer", engine=engine, ring_layout=layout)
            except FullError:
                refused += 1
            else:
                break
    assert refused > 3
    assert verify_buffer(disk / "b").findings == ()


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_a_repair_whose_first_block_begins_with_a_hole(disk, layout):
    schema = mr.Schema({"n": mr.Field((16,), "int64")})
    refused = 0
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        with ReplayBuffer.create(
            disk / "a", schema, 1024, 2, layout=layout, autoreset="disabled"
        ) as buffer:
            buffer.extend(n=np.arange(32 * 1215).reshape(1215, 2, 16))
            # As above: rows before the oldest are summed with it.
            assert buffer.span.first[0] % buffer.metadata.ring.block_rows > 60
        for pages in range(66, 200, 2):
            # What a try that failed has left is space for the next one.
            shutil.rmtree(disk / "b", ignore_errors=True)
            leave(disk, pages)
            try:
                mr.repair(disk / "a", disk / "b")
            except FullError:
                refused += 1
            else:
                break
    assert refused > 1
    assert verify_buffer(disk / "b").findings == ()


def test_a_shard_range_with_holes_is_restored_on_a_nearly_full_disk(disk):
    mutable = mr.Field((2048,), "float32", mutable=True)
    schema = mr.Schema({"n": mr.Field((), "int64"), "value": mutable})

    def rows(first, count):
        values = np.arange(first, first + count, dtype=np.float32)
        return {
            "n": np.arange(first, first + count),
            "value": np.repeat(values[:, None], 2048, axis=1),
        }

    path = disk / "b"
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        with ReplayBuffer.create(path, schema, 1024, engine="zarr") as buffer:
            buffer.extend(rows(0, 20))
        leave(disk, 40)
        # A place takes more pages than are left, most of which no row lives in.
        buffer = ReplayBuffer.open(path, "r+", commit_every=None)
        buffer.extend(rows(20, 20))
        (disk / "filler").unlink()
        buffer.close()
        with ReplayBuffer.open(path) as buffer:
            found = buffer.gather_all()
            assert found["n"].tolist() == list(range(40))
            assert (found["value"] == rows(0, 40)["value"]).all()


def test_the_shard_index_has_no_hole_that_kills_a_reader(disk):
    file = ShardStates.create(disk, 64).file
    assert file.disk_nbytes()[1] >= file.nbytes > 0
    file.close()


@pytest.mark.parametrize("count", [20, 4096])
def test_a_copy_is_read_where_not_a_page_is_left(disk, count):
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    numbers, none = np.arange(count), np.zeros(count, bool)
    with (
        mock.patch("mmreplay.disk.files.disk", Unsynced()),
        ReplayBuffer.create(disk / "b", schema, 6000) as buffer,
    ):
        buffer.extend(observation=numbers, terminated=none, truncated=none)
        buffer.snapshot(disk / "c")
    fill(disk)
    # Slots of COMMIT that nobody wrote, and flags behind the newest row, were holes.
    with ReplayBuffer.open(disk / "c", sampler=mr.UniformSampler(seed=0)) as buffer:
        batch = buffer.sample(100)
        assert (batch["next_observation"] == batch["observation"] + 1).all()
        assert buffer.gather_all()["observation"].tolist() == numbers.tolist()


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_rows_that_have_space_are_committed_though_nothing_else_has(disk, engine):
    schema = mr.Schema({"n": mr.Field((), "int64")})
    numbers = np.arange(4000)
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        buffer = ReplayBuffer.create(disk / "b", schema, 20_000, engine=engine, commit_every=None)
        assert buffer.metadata.ring.block_rows < 2000
        buffer.extend(n=numbers[:2000])
        fill(disk)
        # Checksums had no space yet, and without them nothing is committed.
        buffer.commit()
        assert buffer.committed.tolist() == [2000]
        buffer.extend(n=numbers[2000:])
        # Shards may find no room; rows are committed before that is told.
        with suppress(FullError):
            buffer.close(seal=False)
    with ReplayBuffer.open(disk / "b") as buffer:
        assert buffer.recovery.how == "clean"
        assert buffer.committed.tolist() == [4000]
        assert buffer.gather_all()["n"].tolist() == numbers.tolist()
    # The group's new metadata found no room.
    found = {each.kind for each in verify_buffer(disk / "b").findings}
    assert found <= {"left_over"}


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("copy", ["snapshot", "compact", "load", "repair", "resize"])
def test_a_newest_row_that_ends_a_page_is_drawn_where_not_a_page_is_left(disk, copy, layout):
    schema = mr.Schema(
        {
            "observation": mr.Field((), "int64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    steps, made = PAGE // 2 if layout == "time_major" else PAGE, disk / "c"
    numbers = np.repeat(np.arange(steps)[:, None], 2, axis=1)
    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        with ReplayBuffer.create(
            disk / "b", schema, 6000, 2, layout=layout, autoreset="same_step"
        ) as buffer:
            end = numbers == steps - 1
            buffer.extend(observation=numbers, terminated=end, truncated=end & False)
            if copy == "snapshot":
                buffer.snapshot(made)
            if copy == "resize":
                buffer.resize(5000)
        if copy == "compact":
            mr.compact(disk / "b", made, codec=None)
        if copy == "load":
            mr.load(disk / "b", made)
        if copy == "repair":
            mr.repair(disk / "b", made)
    fill(disk)
    # A step's end is judged with the flags behind it, which nobody wrote.
    path = disk / "b" if copy == "resize" else made
    with ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0)) as buffer:
        newest = buffer.take([0, 1], [steps - 1, steps - 1])
        assert newest["terminated"].all()
        assert newest["next_observation"].tolist() == [steps - 1, steps - 1]
        buffer.sample(100)


def copied(copy, source, target):
    """Make another buffer of one."""
    if copy == "snapshot":
        with ReplayBuffer.open(source) as buffer:
            buffer.snapshot(target)
    elif copy == "compact":
        mr.compact(source, target, codec=None)
    else:
        mr.repair(source, target)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("copy", ["snapshot", "compact", "repair"])
def test_a_copy_that_does_not_fit_leaves_the_disk_as_it_was(disk, tmp_path, copy, there):
    schema = mr.Schema({"pixels": mr.Field((PAGE,), "uint8")})
    source, target, tried = tmp_path / "source", disk / "copy", 0
    with ReplayBuffer.create(source, schema, 40) as buffer:
        buffer.extend(pixels=np.ones((40, PAGE), np.uint8))
    if there:
        target.mkdir()

    with mock.patch("mmreplay.disk.files.disk", Unsynced()):
        for pages in (0, 1, 2, 5, 20, 35):
            leave(disk, pages)
            before = os.statvfs(disk).f_bfree
            with pytest.raises((FullError, FailedError), match="space"):
                copied(copy, source, target)
            tried += 1
            # A lock that found no room has made its file, and nobody knows whose it is.
            assert target.exists() == there or pages <= 2
            assert {p.name for p in target.glob("*")} <= {"LOCK"}
            # A lock, and what a folder grew by, may stay.
            assert os.statvfs(disk).f_bfree >= before - 2
            if not there:
                shutil.rmtree(target, ignore_errors=True)
        os.remove(disk / "filler")
        copied(copy, source, target)
    with ReplayBuffer.open(target) as buffer:
        assert len(buffer) == 40
    assert tried == 6


@pytest.mark.parametrize("copy", ["snapshot", "compact", "repair"])
def test_a_copy_that_fails_removes_nothing_that_was_there(disk, tmp_path, copy):
    """Such names are a buffer's own, or that of one which lost its metadata.json."""
    schema = mr.Schema({"pixels": mr.Field((PAGE,), "uint8")})
    source, target = tmp_path / "source", disk / "copy"
    with ReplayBuffer.create(source, schema, 40) as buffer:
        buffer.extend(pixels=np.ones((40, PAGE), np.uint8))
    (target / "data-000007").mkdir(parents=True)
    (target / "data-000007" / "f000.bin").write_bytes(b"rows")
    (target / "data-2024.csv").write_bytes(b"a,b")
    leave(disk, 8)
    with pytest.raises((FullError, FailedError), match="space"):
        copied(copy, source, target)
    assert (target / "data-000007" / "f000.bin").read_bytes() == b"rows"
    assert (target / "data-2024.csv").read_bytes() == b"a,b"
    assert {p.name for p in target.iterdir()} <= {"LOCK", "data-000007", "data-2024.csv"}


def test_a_resize_names_the_missing_disk_space_and_changes_nothing(disk):
    schema = mr.Schema({"pixels": mr.Field((PAGE,), "uint8")})
    with (
        mock.patch("mmreplay.disk.files.disk", Unsynced()),
        ReplayBuffer.create(disk / "b", schema, 100) as buffer,
    ):
        buffer.extend(pixels=np.ones((100, PAGE), np.uint8))
        leave(disk, 50)
        with pytest.raises(
            FullError,
            match=r"b: no space left to copy the remaining rows .*: 3\d\d\.\d\d KiB is "
            r"needed, \d+\.\d\d KiB is free\. Nothing was changed: free some space",
        ):
            buffer.resize(90)
        assert (buffer.capacity, len(buffer)) == (100, 100)
        buffer.resize(20)
        assert (buffer.capacity, len(buffer)) == (20, 20)


@pytest.mark.parametrize("pages", [40, 300])
@pytest.mark.sliced(1)
def test_a_recording_that_filled_the_disk_names_the_saved_rows(disk, capsys, monkeypatch, pages):
    # Some for locks and folders; space for steps is taken so much at once, if at all.
    monkeypatch.setattr(append, "ALLOCATE_AHEAD_NBYTES", 1 << 17)
    monkeypatch.setattr(write_path, "ALLOCATION_NBYTES", 1 << 17)
    leave(disk, pages)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = run(["record", "CartPole-v1", str(disk / "b"), "--steps", "300000"])
    assert code == 1
    told = capsys.readouterr().err
    kept = f"earlier steps are stored; mmreplay info {disk / 'b'} counts them"
    assert (kept in told) == (pages == 300)
    assert (disk / "b").exists() == (pages == 300)
    if pages == 300:
        with ReplayBuffer.open(disk / "b") as buffer:
            assert len(buffer) > 10_000
