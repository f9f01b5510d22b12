"""Rows that are missing in memory are asked for, every time, by whoever draws."""

import mmap
from collections import deque

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import File
from mmreplay.storage import read_ahead as module
from mmreplay.storage.read_ahead import Pages
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.shards import ChunkPages

BATCH = 16
DRAWS = 4 * module.COLD_CALLS
PAGES = 4000


class Memory:
    """Page cache of a machine that holds what was asked for last, and else nothing."""

    def __init__(self, monkeypatch, row_pages):
        self.pages = deque(maxlen=8 * BATCH * max(2, row_pages))
        self.asked = set()
        monkeypatch.setattr(Pages, "holds", lambda _, offset: self.holds(offset))
        monkeypatch.setattr(File, "will_need", lambda _, *range_: self.ask(*range_))

    def holds(self, offset):
        return offset // mmap.PAGESIZE in tuple(self.pages)

    def ask(self, offset, nbytes):
        for at in range(offset, offset + nbytes, mmap.PAGESIZE):
            self.pages.append(at // mmap.PAGESIZE)
            self.asked.add(at // mmap.PAGESIZE)

    def knows(self, batch, row_nbytes):
        """Whether all of a batch was asked for.

        Asked for by chance, for another draw, are half of the pages at most: not all
        of a draw's.
        """
        first = np.asarray(batch.positions) * row_nbytes // mmap.PAGESIZE
        return set(first.tolist()) <= self.asked


@pytest.fixture(params=[128, 8192], ids=["small", "large"])
def row_nbytes(request):
    """Rows that share pages, and rows of some."""
    return request.param


@pytest.fixture
def path(tmp_path, row_nbytes):
    """A ring that was filled."""
    steps = PAGES * mmap.PAGESIZE // row_nbytes
    schema = mr.Schema({"a": mr.Field((row_nbytes,), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, steps) as buffer:
        for _ in range(10):
            buffer.extend(a=np.zeros((steps // 10, row_nbytes), np.uint8))
    return tmp_path / "b"


@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
def test_a_loader_asks_for_every_batch(path, row_nbytes, monkeypatch, read_mode):
    memory = Memory(monkeypatch, row_nbytes // mmap.PAGESIZE)
    options = {"sampler": mr.UniformSampler(seed=1), "read_mode": read_mode}
    with mr.ReplayBuffer.open(path, **options) as buffer:
        with mr.ReplayLoader(buffer, BATCH) as loader:
            for _, batch in zip(range(DRAWS), loader, strict=False):
                assert memory.knows(batch, row_nbytes)
        # Nor is anything left of that for who draws by himself.
        for _ in range(DRAWS // 8):
            assert memory.knows(buffer.sample(BATCH), row_nbytes)


@pytest.mark.parametrize("advise", ["auto", "always"])
def test_draws_next_to_a_loader_read_ahead_too(path, row_nbytes, monkeypatch, advise):
    memory = Memory(monkeypatch, row_nbytes // mmap.PAGESIZE)
    options = {"sampler": mr.UniformSampler(seed=1), "advise": advise}
    with mr.ReplayBuffer.open(path, **options) as buffer, mr.ReplayLoader(buffer, BATCH) as loader:
        for _, batch in zip(range(DRAWS // 4), loader, strict=False):
            assert memory.knows(batch, row_nbytes)
            assert memory.knows(buffer.sample(BATCH), row_nbytes)


def test_a_loader_asks_for_the_chunks_of_every_batch(tmp_path, monkeypatch):
    steps, shape = 4000, (32, 160)
    schema = mr.Schema({"a": mr.Field(shape, "uint8")})
    path, made = tmp_path / "b", {"engine": "zarr", "codec": None}
    noise = np.random.default_rng(0).integers(0, 255, (steps, *shape), np.uint8)
    with mr.ReplayBuffer.create(path, schema, steps, **made) as buffer:
        buffer.extend(a=noise)
    there, asked = deque(maxlen=8 * BATCH), set()
    monkeypatch.setattr(ChunkPages, "cached", lambda self, start: (id(self), start) in tuple(there))

    def ask(self, starts, stops):
        there.extend((id(self), start) for start in starts.tolist())
        return int((stops - starts).sum())

    def prefetch(self, rows, paths, now=False, *, prefetch=ZarrStore.prefetch):
        found = prefetch(self, rows, paths, now)
        if found:
            asked.update(rows.tolist())
        return found

    monkeypatch.setattr(ChunkPages, "ask", ask)
    monkeypatch.setattr(ZarrStore, "prefetch", prefetch)
    with (
        mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=1)) as buffer,
        mr.ReplayLoader(buffer, BATCH) as loader,
    ):
        for _, batch in zip(range(DRAWS), loader, strict=False):
            assert (np.asarray(batch["a"]) == noise[np.asarray(batch.positions)]).all()
            # Asked for by chance, for another draw, are half of the rows at most.
            assert set(np.asarray(batch.positions).tolist()) <= asked
