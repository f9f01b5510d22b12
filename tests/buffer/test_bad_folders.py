"""Folders that are no buffer, or not any more, and disks that refuse."""

import errno
import gc
import json
import os
import re
import subprocess

import google_crc32c
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    FullError,
    LockedError,
    VersionError,
)
from mmreplay.testing.disks import FaultyDisk, using
from tests.buffer.support import Twin, schema, step

MODES = ["r", "r+"]


@pytest.fixture
def ring(tmp_path):
    """Path of a closed buffer with a few steps."""
    twin = Twin(tmp_path / "ring", 8)
    for kind in ("", "t", ""):
        twin.add([kind])
    twin.buffer.close()
    return twin.path


def edit(path, **changes):
    """Change metadata.json as a writer of another version would, checksum included."""
    value = json.loads((path / "metadata.json").read_text())
    del value["crc32c"]
    body = json.dumps(value | changes, indent=1)[: -len("\n}")].encode() + b",\n "
    tail = f'"crc32c": "{google_crc32c.value(body):08x}"\n}}\n'
    (path / "metadata.json").write_bytes(body + tail.encode())


def contents(path):
    return {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("mode", MODES)
def test_a_path_to_nothing(tmp_path, mode):
    told = r"nothing does not exist. Check the path"
    with pytest.raises(FormatError, match=told):
        mr.ReplayBuffer.open(tmp_path / "nothing", mode)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_a_path_to_a_file(tmp_path, mode):
    path = tmp_path / "data.npz"
    path.write_bytes(b"numbers")
    with pytest.raises(FormatError, match=r"must be a buffer's folder, got a file"):
        mr.ReplayBuffer.open(path, mode)
    with pytest.raises(FormatError, match=r".*\.npz is a file, not a folder\. Choose another path"):
        mr.ReplayBuffer.create(path, schema(), 5)
    with pytest.raises((FormatError, FailedError), match=r"data\.npz"):
        mr.ReplayBuffer.create(path / "inner", schema(), 5)
    assert path.read_bytes() == b"numbers"


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_of_something_else(tmp_path, mode):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="is not a replay buffer: it has no"):
        mr.ReplayBuffer.open(tmp_path, mode)
    with pytest.raises(
        FormatError, match=r".* is a folder with other files \('notes\.txt', \.\.\.\)"
    ):
        mr.ReplayBuffer.create(tmp_path, schema(), 5)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_creating_where_a_buffer_is(ring):
    before = contents(ring)
    with pytest.raises(FormatError, match=r"already holds a buffer.*open\(path, 'r\+'\)"):
        mr.ReplayBuffer.create(ring, schema(), 5)
    assert contents(ring) == before


def test_creating_in_an_empty_folder_and_below_missing_ones(tmp_path):
    with mr.ReplayBuffer.create(tmp_path, schema(), 5) as buffer:
        buffer.add(step(1))
    with mr.ReplayBuffer.create(tmp_path / "a" / "b", schema(), 5) as buffer:
        buffer.add(step(1))


@pytest.mark.parametrize("mode", MODES)
def test_modes_and_resumes_that_are_none(ring, mode):
    before = contents(ring)
    with pytest.raises(ValueError, match=r"mode must be 'r' or 'r\+', got 'w'"):
        mr.ReplayBuffer.open(ring, "w")
    with pytest.raises(ValueError, match=r"on_resume must be one of .*, got .go."):
        mr.ReplayBuffer.open(ring, "r+", on_resume="go")
    with pytest.raises(ValueError, match=r"commit_every must be a number above 0"):
        mr.ReplayBuffer.open(ring, "r+", commit_every=-1)
    assert contents(ring) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": [2, 0]}, VersionError, r"has format version 2\.0, but this .* 1\.x\. In"),
        ({"version": "1"}, FormatError, r"version must be \[major, minor\], got '1'"),
        ({"format": "zarr"}, FormatError, r"format must be 'mmreplay', got 'zarr'"),
        (
            {"features": {"incompat": ["stars"], "ro_compat": [], "compat": []}},
            VersionError,
            r"needs the features \['stars'\], which this mmreplay does not know",
        ),
        ({"capacity": 9}, FormatError, r"slots|bytes, but metadata"),
        ({"num_envs": 2}, FormatError, r"COMMIT is damaged|bytes, but metadata"),
        ({"slots": 64}, FormatError, r"bytes, but metadata.json says"),
        ({"generation": 2}, FormatError, r"data-000002.* is missing\."),
        ({"engine": "memory"}, VersionError, r"engine 'memory', and this mmreplay"),
        ({"engine": "tape"}, FormatError, r"engine must be one of .*, got 'tape'"),
        ({"engine": "zarr"}, FormatError, r"zarr must have the keys \['codec'"),
        ({"layout": "row"}, FormatError, r"layout"),
        ({"uuid": "0" * 32}, CorruptError, "COMMIT is damaged: neither"),
        ({"schema": []}, FormatError, r"metadata.json.*field"),
        ({"slots": 1 << 70}, FormatError, r"slots|digits"),
    ],
)
def test_metadata_that_fits_neither_us_nor_the_files(ring, mode, changes, error, message):
    edit(ring, **changes)
    before = contents(ring)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        mr.ReplayBuffer.open(ring, mode)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    data = {p: b for p, b in before.items() if p.name != "LOCK"}
    assert {p: b for p, b in contents(ring).items() if p.name != "LOCK"} == data


def test_features_that_only_a_writer_must_support(ring):
    edit(ring, features={"incompat": [], "ro_compat": ["moon"], "compat": ["x"]})
    with mr.ReplayBuffer.open(ring) as buffer:
        assert len(buffer) == 3
    with pytest.raises(
        VersionError,
        match=r".* uses the features.*mmreplay cannot write\. Open it with mode='r', o",
    ):
        mr.ReplayBuffer.open(ring, "r+")


@pytest.mark.parametrize("mode", MODES)
def test_metadata_edited_by_hand(ring, mode):
    path = ring / "metadata.json"
    path.write_bytes(path.read_bytes().replace(b'"capacity": 8', b'"capacity": 7'))
    with pytest.raises(CorruptError, match=r"has checksum .*, but says .*edited by hand"):
        mr.ReplayBuffer.open(ring, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 99, b"\xff", b'{"format": 1}'])
def test_metadata_that_is_none(ring, mode, data):
    (ring / "metadata.json").write_bytes(data)
    with pytest.raises(FormatError, match=r"metadata\.json"):
        mr.ReplayBuffer.open(ring, mode)


def mounted(path, size):
    """Mount a small disk, or skip where that is not allowed."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    return path


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root only")
    path = mounted(tmp_path / "disk", "8m")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path, nbytes_left):
    """Take the disk's space, but for so many bytes."""
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    with (path / "filler").open("wb") as file:
        file.write(bytes(max(0, free - nbytes_left)))


def test_a_full_disk_is_an_error_and_then_a_buffer(small_disk):
    buffer = mr.ReplayBuffer.create(small_disk / "ring", schema(), 1 << 20)
    until_full(buffer, 500)
    rows = int(buffer.heads[0])
    # Of the call that failed, whole blocks may be in: as many as the buffer says.
    assert rows > 10_000
    until_full(buffer, 7)
    until_full(buffer, 1)
    kept = buffer.gather_all()["action"]
    assert kept.tolist() == (np.arange(len(kept)) % 1000).tolist()
    assert len(kept) >= rows
    assert len(buffer.sample(64)) == 64
    buffer.close()
    with mr.ReplayBuffer.open(small_disk / "ring", "r+") as buffer:
        assert buffer.gather_all()["action"].tolist() == kept.tolist()
        with pytest.raises(FullError, match="no space left"):
            buffer.resize(100_000)
        assert buffer.gather_all()["action"].tolist() == kept.tolist()


def until_full(buffer, steps):
    """Extend by blocks of so many steps until the disk is full."""
    told = r"cannot reserve space in.*written is not published\. Free space"
    with pytest.raises(FullError, match=told):
        extend_for_ever(buffer, steps)


def extend_for_ever(buffer, steps):
    one = step(1)
    data = {name: np.stack([value] * steps) for name, value in one.items()}
    while True:
        numbers = int(buffer.heads[0]) + np.arange(steps)
        data["action"] = (numbers % 1000).astype(np.int32)
        buffer.extend(data)


def test_freed_space_is_used_by_the_same_writer(small_disk):
    twin = Twin(small_disk / "ring", 1 << 20)
    twin.extend([[""]] * 10)
    fill(small_disk, 0)
    until_full(twin.buffer, 5000)
    rows = int(twin.buffer.heads[0])
    (small_disk / "filler").unlink()
    twin.buffer.add(step(9))
    assert twin.buffer.heads[0] == rows + 1
    assert twin.buffer.get_field("action", 0, rows) == 9
    twin.buffer.close()


def test_no_space_to_create(small_disk):
    fill(small_disk, 0)
    with pytest.raises(FullError, match=r"cannot write .*: No space.*written is not published"):
        mr.ReplayBuffer.create(small_disk / "ring", schema(), 100)
    (small_disk / "filler").unlink()
    with mr.ReplayBuffer.create(small_disk / "ring", schema(), 100) as buffer:
        buffer.add(step(1))


def test_no_space_to_resize_leaves_the_buffer_as_it_was(small_disk):
    twin = Twin(small_disk / "ring", 300)
    twin.extend([["t" if i % 7 == 6 else ""] for i in range(300)])
    fill(small_disk, 8192)
    with pytest.raises(FullError, match=r"no space left to copy .*free some space"):
        twin.buffer.resize(100_000)
    twin.check()
    (small_disk / "filler").unlink()
    twin.buffer.resize(400)
    twin.oracle.resize(400)
    twin.add(["u"])
    twin.check()
    twin.buffer.close()
    assert mr.verify_buffer(twin.path).ok


@pytest.fixture
def read_only_ring(small_disk):
    twin = Twin(small_disk / "ring", 8)
    twin.extend([[""], ["t"], [""]])
    twin.buffer.close()
    # A mapping keeps its file open for writing until it goes.
    del twin
    gc.collect()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    return small_disk / "ring"


def test_a_read_only_disk_is_read(read_only_ring):
    with mr.ReplayBuffer.open(read_only_ring) as buffer:
        assert len(buffer) == 3
        assert buffer.sample(4)["action"].shape == (4,)
        assert len(buffer.gather_all()) == 3
        assert buffer.statistics == {}
        assert mr.verify_buffer(read_only_ring).ok


def test_a_read_only_disk_is_not_written(read_only_ring):
    path = read_only_ring
    told = r"cannot .*: Read-only file system.*mode='r'"
    with pytest.raises(FailedError, match=told):
        mr.ReplayBuffer.open(path, "r+")
    with pytest.raises(FailedError, match=r"cannot make folder .*Read-only file syst"):
        mr.ReplayBuffer.create(path.parent / "other", schema(), 5)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_files_that_may_not_be_written(ring, number):
    class Refusing(files.Disk):
        def open(self, path, flags):
            if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_CREAT:
                raise OSError(number, os.strerror(number))
            return super().open(path, flags)

    before = contents(ring)
    with using(Refusing()):
        told = rf"cannot open .*LOCK: {os.strerror(number)}.*mode='r'"
        with pytest.raises(FailedError, match=told):
            mr.ReplayBuffer.open(ring, "r+")
        with mr.ReplayBuffer.open(ring) as buffer:
            assert len(buffer) == 3
    assert contents(ring) == before


def test_a_disk_that_turns_read_only_stops_the_writer_and_not_the_readers(tmp_path):
    twin = Twin(tmp_path / "ring", 8)
    twin.extend([[""], ["t"], [""]])
    fault = OSError(errno.EROFS, "Read-only file system")
    with using(FaultyDisk(fault, count=99, names=("pwrite", "datasync"))):
        with pytest.raises(FailedError, match="Read-only file system"):
            twin.buffer.add(step(9))
        twin.check()
        with pytest.raises(FailedError, match="Read-only file system"):
            twin.buffer.commit()
        with pytest.raises(FailedError, match=r"an earlier sync failed .*open it again"):
            twin.buffer.add(step(9))
        with mr.ReplayBuffer.open(twin.path) as reader:
            assert len(reader) == 3
        twin.check()
        with pytest.raises(FailedError, match=r"an earlier sync failed"):
            twin.buffer.close()
    assert twin.buffer.closed
    twin.buffer = mr.ReplayBuffer.open(twin.path, "r+", commit_every=None)
    twin.oracle.resume("break")
    twin.add([""])
    twin.check()
    twin.buffer.close()


def test_a_lock_that_is_held_names_the_holder(ring):
    with mr.ReplayBuffer.open(ring, "r+") as buffer:
        told = rf"already open for writing in this process \(pid {os.getpid()}\)"
        with pytest.raises(LockedError, match=re.compile(told)):
            mr.ReplayBuffer.open(ring, "r+")
        with pytest.raises(FormatError, match="already holds a buffer"):
            mr.ReplayBuffer.create(ring, schema(), 5)
        buffer.add(step(1))
    with mr.ReplayBuffer.open(ring, "r+") as buffer:
        assert np.array(buffer.heads).tolist() == [4]
