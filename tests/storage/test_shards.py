"""Chunks are unpacked by one thread or two, and asked for where they are missing."""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError
from mmreplay.storage import read_ahead
from mmreplay.storage.read_ahead import COLD_CALLS
from mmreplay.storage.zarr import shards
from mmreplay.storage.zarr.shards import AHEAD_NBYTES, GAP_NBYTES, ChunkPages, ChunksAhead
from mmreplay.testing.disks import QuickDisk, using

SHAPE = (64, 80, 4)
SCHEMA = mr.Schema({"pixels": mr.Field(SHAPE, "uint8"), "n": mr.Field((), "int64")})
ROWS = 120


@pytest.fixture
def made(tmp_path, rng):
    """A closed buffer whose chunks of 20 KiB two threads unpack; and its rows."""
    path = tmp_path / "b"
    pixels = rng.integers(0, 9, (ROWS, *SHAPE)).astype(np.uint8)
    with (
        using(QuickDisk()),
        mr.ReplayBuffer.create(path, SCHEMA, ROWS, engine="zarr", codec="zstd") as buffer,
    ):
        buffer.extend(pixels=pixels, n=np.arange(ROWS))
    return path, pixels


def test_two_threads_unpack_what_one_does(made, rng, monkeypatch):
    path, pixels = made
    positions = rng.integers(0, ROWS, 101)
    with mr.ReplayBuffer.open(path) as buffer:
        started = []
        begin = process._thread.start_new_thread
        monkeypatch.setattr(
            process._thread, "start_new_thread", lambda *args: started.append(args) or begin(*args)
        )
        for count in (1, 15, 16, 101):
            some = positions[:count]
            found = buffer.get_field("pixels", 0, some)
            assert (found == pixels[some]).all()
            assert bool(started) == (count >= 2 * shards.FEW)


@pytest.mark.parametrize("which", [0, -1])
def test_an_error_of_either_decoding_thread_is_raised(made, which):
    path, _ = made
    folder = path / "data-000001" / "zarr" / "pixels"
    files = sorted(folder.glob("c.*"), key=lambda file: int(file.name.split(".")[2]))
    shard = files[which]
    data = bytearray(shard.read_bytes())
    data[:4] = b"\0\0\0\0"
    shard.write_bytes(data)
    with (
        mr.ReplayBuffer.open(path) as buffer,
        pytest.raises(CorruptError, match=f"{shard.name} is damaged: the chunk at"),
    ):
        buffer.get_field("pixels", 0, np.arange(ROWS))


def test_unmapped_shards_are_read_by_the_chunk_and_not_cached(made, monkeypatch):
    path, pixels = made
    read_into, noted_take = File.pread_into, []

    def pread_into(self, target, offset):
        if self.path.name.startswith("c."):
            noted_take.append(target.nbytes)
        read_into(self, target, offset)

    with mr.ReplayBuffer.open(path, read_mode="pread") as buffer:
        size = buffer.metadata.sharding.shard_rows
        buffer.get_field("pixels", 0, np.arange(ROWS))
        monkeypatch.setattr(File, "pread_into", pread_into)
        assert (buffer.get_field("pixels", 0, [3, 50]) == pixels[[3, 50]]).all()
        shards_held = buffer._files.store._reader._open.values()
        assert all(not shard._data for _, shard in shards_held)
    # Both shards are open still, and their indices known.
    assert len(noted_take) == 2
    packed = (path / f"data-000001/zarr/pixels/c.0.{3 // size}.0.0.0").stat().st_size
    assert max(noted_take) < packed / 4


def shards_open():
    """How many descriptors are of shards."""
    held = Path("/proc/self/fd").iterdir()
    return sum("/c.0." in os.readlink(each) for each in held if each.is_symlink())


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_shards_that_are_let_go_give_their_files_back(made, mode):
    path, _ = made
    assert shards_open() == 0
    with mr.ReplayBuffer.open(path, read_mode=mode) as buffer:
        buffer.get_field("pixels", 0, np.arange(ROWS))
        assert shards_open() > 0
    assert shards_open() == 0


class Mapping:
    """Stands for a mapping, and notes which pages it is asked for."""

    def __init__(self):
        self.asked = []

    def madvise(self, advice, at, nbytes):
        assert advice == mmap.MADV_WILLNEED
        assert at % mmap.PAGESIZE == 0
        assert nbytes <= AHEAD_NBYTES
        self.asked.append((at, at + nbytes))


def test_every_byte_is_asked_for_and_none_far_from_any(rng):
    for _ in range(50):
        count = int(rng.integers(1, 30))
        starts = rng.integers(0, 4 << 20, count)
        stops = starts + rng.integers(1, 300_000, count)
        pages = ChunkPages.__new__(ChunkPages)
        pages._mapping = Mapping()
        told = pages.ask(starts, stops)
        asked = pages._mapping.asked
        assert told == sum(last - first for first, last in asked)
        inside = np.zeros(5 << 20, bool)
        for first, last in asked:
            assert not inside[first:last].any()
            inside[first:last] = True
        wanted = np.zeros(len(inside), bool)
        for start, stop in zip(starts, stops, strict=True):
            assert inside[start:stop].all()
            low = max(0, start - mmap.PAGESIZE)
            wanted[low : stop + GAP_NBYTES] = True
        assert wanted[inside].all()


def drop(path):
    """Have the shards leave the page cache, as far as the file system does that."""
    for file in (path / "data-000001" / "zarr" / "pixels").glob("c.*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@pytest.mark.parametrize("advise", ["auto", "always", "never", "kernel"])
def test_missing_chunks_are_asked_for_as_the_policy_says(made, advise, rng):
    path, pixels = made
    drop(path)
    rows = rng.permutation(ROWS)
    with mr.ReplayBuffer.open(path, advise=advise) as buffer:
        store = buffer._files.store
        asked = store.prefetch(rows, ["pixels"])
        if advise == "auto" and asked == 0:
            pytest.skip("this file system keeps its pages")
        assert (asked > 0) == (advise in ("auto", "always"))
        assert (buffer.get_field("pixels", 0, rows) == pixels[rows]).all()
        again = [store.prefetch(rows, ["pixels"]) for _ in range(60)]
        # What is there is asked for no more, but for some calls after a miss.
        assert (again[-1] > 0) == (advise == "always")


def test_chunks_asked_for_when_drawn_tell_of_themselves_alone():
    there, asked = set(), []
    pages = SimpleNamespace(
        cached=lambda start: start in there,
        ask=lambda starts, stops: asked.append(starts) or int((stops - starts).sum()),
    )
    ahead = ChunksAhead("auto")

    def extents(rows):
        yield pages, 100 * rows, 100 * rows + 50

    for draw in range(3 * COLD_CALLS):
        rows = np.arange(draw, 1000, 100)
        assert ahead.ask(rows, extents) == 500, draw
        # In memory before anybody takes them; of the next draw nothing is.
        there, count = set((100 * rows).tolist()), len(asked)
        with read_ahead.Gathering(True):
            assert ahead.ask(rows, extents) == 0
            assert len(asked) == count
            assert ahead.ask(rows + 1, extents) == 500


def test_rows_that_go_back_to_the_tail_are_asked_for_before_they_are_read(tmp_path, monkeypatch):
    """All of a place is read by the first add after it was sealed half full."""
    schema = mr.Schema({"pixels": mr.Field(SHAPE, "uint8")})
    made = {"engine": "zarr"}
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 100, **made) as buffer:
        buffer.extend(pixels=np.ones((20, *SHAPE), np.uint8))
    asked, read = [], []
    take = shards.ShardReader.take

    def noted_take(self, *args):
        read.append(len(asked))
        return take(self, *args)

    monkeypatch.setattr(shards.ShardReader, "take", noted_take)
    monkeypatch.setattr(ChunkPages, "cached", lambda *_: False)
    monkeypatch.setattr(ChunkPages, "ask", lambda *ranges: asked.append(ranges) or 1)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        assert not asked
        buffer.add(pixels=np.zeros(SHAPE, np.uint8))
        assert read[0] > 0
        assert (buffer.get_field("pixels", 0, np.arange(20)) == 1).all()
