"""Large files go past the page cache: to the last byte what goes through it."""

import contextlib
import errno
import os
import tracemalloc

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import Field, ReplayBuffer, Schema
from mmreplay.buffer import bulk_writer
from mmreplay.disk.files import Disk, File
from mmreplay.errors import FailedError, FullError
from mmreplay.testing.disks import FaultyDisk, using

PAGE = 4096


class PastCache(Disk):
    """Counts what goes past the cache, and fails it with an error if given one."""

    def __init__(self, fault=None, *, at_open=False):
        self.fault, self.at_open = fault, at_open
        self.nbytes = 0
        self._direct = set()

    def open(self, path, flags):
        """Remember which descriptors pass it by."""
        if flags & os.O_DIRECT and self.at_open and self.fault is not None:
            raise self.fault
        fd = super().open(path, flags)
        (self._direct.add if flags & os.O_DIRECT else self._direct.discard)(fd)
        return fd

    def pwrite(self, fd, data, offset):
        """Fail, or count."""
        if fd in self._direct:
            if self.fault is not None:
                raise self.fault
            self.nbytes += len(data)
            assert offset % PAGE == 0
            assert len(data) % PAGE == 0
        return super().pwrite(fd, data, offset)


def write(path, chunks, size, disk, number=8):
    """Write a file's streams in turns.

    Args:
        path: Where.
        pieces: (offset, bytes) in the order of the calls.
        size: Of the file.
        disk: Through which.
        number: Of the streams, at most.
    """
    with using(disk):
        file = File.create(path, size)
        way = bulk_writer.open_output(file, number)
        try:
            for offset, data in chunks:
                way.write(memoryview(data), offset)
            way.finish()
        finally:
            way.close()
            file.close()


def written(path, *args):
    """What a file holds then; see `write`."""
    write(path, *args)
    return path.read_bytes()


def streams(rng, size, number):
    """Calls that fill a file in streams which take turns, and what it then holds."""
    content = rng.integers(0, 256, size, np.uint8).tobytes()
    cuts = [0, *sorted(rng.integers(0, size, number - 1).tolist()), size]
    at, ends = cuts[:-1], cuts[1:]
    calls = []
    while left := [n for n in range(number) if at[n] < ends[n]]:
        which = int(rng.choice(left))
        most = int(rng.choice([1, 100, PAGE, 3 * PAGE + 1, 100_000]))
        stop = min(ends[which], at[which] + most)
        calls.append((at[which], content[at[which] : stop]))
        at[which] = stop
    return calls, content


def goes_past(folder):
    """Whether the file system has such a way."""
    file = File.create(folder / "probe", 0)
    try:
        file.past_cache().close()
    except FailedError:
        return False
    finally:
        file.close()
    return True


@pytest.mark.parametrize("seed", range(12))
def test_streams_that_take_turns_end_where_they_belong(tmp_path, small, seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 600_000))
    calls, content = streams(rng, size, 1 + seed % 8)
    disk = PastCache()
    assert written(tmp_path / "file", calls, size, disk) == content
    if size > 100 * PAGE and goes_past(tmp_path):
        assert disk.nbytes > size // 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
@pytest.mark.parametrize("at_open", [True, False])
def test_where_it_cannot_be_it_goes_through_the_cache(tmp_path, small, number, at_open):
    calls, content = streams(np.random.default_rng(1), 300_000, 3)
    disk = PastCache(OSError(number, "no"), at_open=at_open)
    assert written(tmp_path / "file", calls, len(content), disk) == content
    assert disk.nbytes == 0


def test_a_full_disk_is_reported(tmp_path, small):
    if not goes_past(tmp_path):
        pytest.skip("the file system has no way past the cache")
    calls, content = streams(np.random.default_rng(1), 300_000, 3)
    disk = PastCache(OSError(errno.ENOSPC, "full"))
    with pytest.raises(FullError, match="full"):
        written(tmp_path / "file", calls, len(content), disk)


class FullDisk(PastCache):
    """A disk without room for a whole file."""

    def allocate(self, fd, offset, nbytes):
        """Say so."""
        raise OSError(errno.ENOSPC, "No space left", None)


def test_a_large_file_that_does_not_fit_is_refused_before_it_is_written(
    tmp_path, small, monkeypatch
):
    monkeypatch.setattr(bulk_writer, "file_system", lambda folder: "ext4")
    calls, content = streams(np.random.default_rng(1), 300_000, 3)
    disk = FullDisk()
    with pytest.raises(FullError, match=r"reserve space in .*file.*No space left"):
        written(tmp_path / "file", calls, len(content), disk)
    assert disk.nbytes == 0
    assert not any((tmp_path / "file").read_bytes())
    # Where space cannot be promised, none is asked for.
    monkeypatch.setattr(bulk_writer, "file_system", lambda folder: "btrfs")
    assert written(tmp_path / "other", calls, len(content), disk) == content


def opened(folder):
    """Files of a folder that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [place for place in found if place.startswith(str(folder))]


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_an_export_that_does_not_fit_leaves_nothing(tmp_path, small, monkeypatch, suffix):
    monkeypatch.setattr(bulk_writer, "file_system", lambda folder: "ext4")
    schema = Schema({"pixels": Field((64, 64), "uint8")})
    with ReplayBuffer.create(tmp_path / "buffer", schema, 100) as buffer:
        buffer.extend(pixels=np.ones((100, 64, 64), np.uint8))
        with using(FullDisk()), pytest.raises(FullError, match="No space left"):
            mr.export(buffer, tmp_path / f"out{suffix}")
        # Of the folder nothing is open but the buffer, not even what has no name now.
        assert all("/buffer/" in place for place in opened(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["buffer"]


@pytest.mark.parametrize("at", range(0, 24, 3))
def test_a_short_write_is_made_good(tmp_path, small, at):
    calls, content = streams(np.random.default_rng(2), 300_000, 2)
    disk = FaultyDisk("short", at, 2, names=("pwrite",))
    assert written(tmp_path / "file", calls, len(content), disk) == content
    assert disk.struck


def test_a_small_file_stays_in_the_cache(tmp_path):
    calls, content = streams(np.random.default_rng(3), 100_000, 2)
    disk = PastCache()
    assert written(tmp_path / "file", calls, len(content), disk) == content
    assert disk.nbytes == 0


def test_more_columns_than_there_is_memory_for_go_through_the_cache(tmp_path, small):
    calls, content = streams(np.random.default_rng(3), 100_000, 2)
    disk, many = PastCache(), bulk_writer.MAX_STREAMS + 1
    found = written(tmp_path / "file", calls, len(content), disk, many)
    assert found == content
    assert disk.nbytes == 0


@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
def test_exports_are_the_same_either_way(tmp_path, monkeypatch, suffix):
    schema = Schema({"observation": Field((33,), "uint8"), "reward": Field((), "float32")})
    rng = np.random.default_rng(0)
    with ReplayBuffer.create(tmp_path / "buffer", schema, 30_000) as buffer:
        for _ in range(3):
            pixels = rng.integers(0, 256, (9000, 33), np.uint8)
            buffer.extend(observation=pixels, reward=rng.random(9000, np.float32))
        mr.export(buffer, tmp_path / f"cached.{suffix}")
        monkeypatch.setattr(bulk_writer, "DIRECT_NBYTES", 0)
        monkeypatch.setattr(bulk_writer, "SLAB_NBYTES", 64 << 10)
        disk = PastCache()
        with using(disk):
            mr.export(buffer, tmp_path / f"past.{suffix}")
    assert disk.nbytes > 0 or not goes_past(tmp_path)
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("cached", "past"))
    assert first == second


def test_many_columns_stay_within_the_memory(tmp_path, small, monkeypatch):
    monkeypatch.setattr(bulk_writer, "SLABS_NBYTES", 100 * PAGE)
    monkeypatch.setattr(bulk_writer, "SLAB_NBYTES", 1 << 30)
    monkeypatch.setattr(bulk_writer, "MIN_SLAB_NBYTES", PAGE)
    calls, content = streams(np.random.default_rng(4), 900_000, 30)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    write(tmp_path / "file", calls, len(content), Disk(), 30)
    taken, whole = tracemalloc.get_traced_memory()[1] - before, 100 * PAGE
    tracemalloc.stop()
    assert whole // 2 < taken < 3 * whole
    assert (tmp_path / "file").read_bytes() == content
