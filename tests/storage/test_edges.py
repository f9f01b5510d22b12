"""Pages that rows share are written whole before a write would have to read them."""

import errno
import mmap

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.writer import Writer
from mmreplay.errors import FullError
from mmreplay.files import File
from mmreplay.ring import Ring
from mmreplay.storage import edges
from mmreplay.storage.edges import LOOKS, STRETCH_NBYTES, Edges
from mmreplay.storage.inlet import Inlet
from mmreplay.storage.pages import Pages
from mmreplay.verify import verify_buffer
from tools.torture.disks import FaultyDisk, WatchedDisk, using
from tools.torture.scarce import scarce

PAGE = mmap.PAGESIZE
ROW = 3 * PAGE + 100


class Spy:
    """A file that notes what is written, and pages that are there or not."""

    def __init__(self, ring, row_nbytes, there=False):
        self.nbytes = ring.num_rows * row_nbytes
        self.written, self.looks, self.there = [], [], there

    def pwrite(self, data, offset):
        assert bytes(data) == bytes(len(data))
        assert len(data) % PAGE == offset % PAGE == 0
        assert 0 <= offset < offset + len(data) <= self.nbytes
        self.written.append((offset, offset + len(data)))

    def holds(self, offset):
        assert 0 <= offset < self.nbytes
        self.looks.append(offset)
        return self.there


def limits(*positions):
    return np.array(positions, np.int64)


def test_every_page_that_a_write_ends_in_is_written_before():
    ring = Ring.sized(1000, 1)
    spy = Spy(ring, ROW)
    found = Edges(spy, spy, ring)
    head, missed = ring.slots, []
    while head < 3 * ring.slots:
        limit = head + ring.reserve
        found.free(limits(limit))
        while head < limit:
            count = min(limit - head, 1 + head % 7, ring.slots - head % ring.slots)
            offset = head % ring.slots * ROW
            stop = offset + count * ROW
            spy.written.clear()
            found.make(offset, stop)
            head += count
            page = stop // PAGE * PAGE
            if spy.written != [(page, page + PAGE)]:
                assert spy.written == []
                missed.append(head)
    # At the limit the row after is not given up, and at the end there is none.
    for head in missed:
        at_end = head % ring.slots * ROW % PAGE == 0
        assert at_end or (head - ring.slots) % ring.reserve == 0
    assert len(missed) < 2 * ring.slots // ring.reserve + 6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_envs", "row_nbytes"), [(1, 7), (3, 7), (1, 50), (4, 50)])
def test_no_row_that_may_be_asked_for_changes(
    tmp_path, monkeypatch, seed, num_envs, row_nbytes
):
    """Twin: per environment, what each position was written with."""
    monkeypatch.setattr(edges, "PAGE", 32)
    monkeypatch.setattr(edges, "STRETCH_NBYTES", 128)
    rng = np.random.default_rng(seed)
    ring = Ring.sized(200, num_envs, "env_major")
    file = File.create(tmp_path / "rows", ring.num_rows * row_nbytes)
    found = Edges(file, Spy(ring, row_nbytes), ring)
    cleared, pwrite = [], file.pwrite
    monkeypatch.setattr(
        File, "pwrite", lambda self, *a: (cleared.append(a), pwrite(*a))
    )
    heads, given = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
    rows = [{} for _ in range(num_envs)]
    for _ in range(1500):
        env = int(rng.integers(num_envs))
        if heads[env] == given[env]:
            given[env] += rng.integers(1, ring.reserve + 1)
            found.free(given)
        count = int(rng.integers(1, given[env] - heads[env] + 1))
        for row, _, part in ring.stretch(env, int(heads[env]), int(heads[env]) + count):
            data = rng.bytes(part * row_nbytes)
            offset = row * row_nbytes
            found.make(offset, offset + len(data))
            ahead = -(-offset // 32) * 32
            if rng.random() < 0.3:
                found.clear(offset, ahead, ahead + 32 * int(rng.integers(1, 9)))
            pwrite(data, offset)
            for at in range(part):
                piece = data[at * row_nbytes : (at + 1) * row_nbytes]
                rows[env][int(heads[env]) + at] = piece
            heads[env] += part
        held = file.pread(file.nbytes, 0)
        for e in range(num_envs):
            for position in range(max(0, given[e] - ring.slots), heads[e]):
                offset = ring.row(e, position) * row_nbytes
                assert held[offset : offset + row_nbytes] == rows[e][position]
    assert len(cleared) > 100
    file.close()


@pytest.mark.parametrize("row_nbytes", [8, 168, 4095, ROW])
def test_what_is_cleared_are_whole_pages_of_rows_given_up(row_nbytes):
    ring = Ring.sized(20_000, 2, "env_major")
    spy = Spy(ring, row_nbytes)
    found = Edges(spy, spy, ring)
    stop = ring.slots * row_nbytes
    assert found.clear(row_nbytes, PAGE, 9 * PAGE) == PAGE, "no limit is known"
    found.free(limits(2 * ring.slots, 2 * ring.slots - 5))
    # The second environment's first row is not the first one's to come.
    for row in (0, ring.slots):
        assert found.clear(row * row_nbytes, PAGE, 9 * PAGE) == PAGE
    end = found.clear(stop - 3 * row_nbytes, stop // PAGE * PAGE - PAGE, stop + PAGE)
    assert end <= stop
    base = (ring.slots + 9) * row_nbytes
    first = -(-base // PAGE) * PAGE
    last = (2 * ring.slots - 5) * row_nbytes // PAGE * PAGE
    most = edges.CLEARED_NBYTES
    assert found.clear(base, first, 1 << 60) == min(last, first + most)
    assert spy.written[-1] == (first, min(last, first + most))


def test_pages_that_are_there_are_left_and_seldom_looked_at():
    ring = Ring.sized(1000, 1)
    spy = Spy(ring, ROW, there=True)
    found = Edges(spy, spy, ring)
    found.free(limits(2 * ring.slots))
    for row in range(ring.slots - 1):
        found.make(row * ROW, (row + 1) * ROW)
    assert spy.written == []
    assert 0 < len(spy.looks) <= LOOKS * (spy.nbytes // STRETCH_NBYTES + 2)


@pytest.mark.parametrize(
    ("row_nbytes", "ring", "laps"),
    [
        pytest.param(2 * PAGE, Ring.sized(1000, 1), 2, id="whole pages"),
        pytest.param(ROW, Ring.sized(1000, 1), 1, id="first lap"),
        pytest.param(ROW, Ring.sized(1000, 2, "time_major"), 2, id="step by step"),
    ],
)
def test_nothing_is_written_where_nothing_is_read_or_rows_to_come_are_not_known(
    row_nbytes, ring, laps
):
    spy = Spy(ring, row_nbytes)
    found = Edges(spy, spy, ring)
    found.free(np.full(ring.num_envs, laps * ring.slots))
    for row in range(ring.num_rows - 1):
        found.make(row * row_nbytes, (row + 1) * row_nbytes)
    assert spy.written == spy.looks == []


def filled(folder, schema, capacity, **row):
    """A buffer in its second lap, all of whose pages are missing to look at."""
    buffer = mr.ReplayBuffer.create(folder, schema, capacity, commit_every=None)
    for _ in range(buffer.slots + 3):
        buffer.add(**row)
    return buffer


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(Pages, "holds", lambda self, offset: False)


def test_a_ring_writes_large_rows_whole_and_reads_nothing(tmp_path, missing):
    schema = mr.Schema({"pixels": mr.Field((ROW,), "uint8")})
    calls = []

    class Told(WatchedDisk):
        def pwrite(self, fd, data, offset):
            calls.append((offset, bytes(data)))
            return super().pwrite(fd, data, offset)

    with filled(tmp_path / "b", schema, 1200, pixels=np.ones(ROW, np.uint8)) as buffer:
        lap, first = buffer.slots, int(buffer.span.stop[0])
        for value in range(500):
            with using(Told()):
                buffer.add(pixels=np.full(ROW, value % 251, np.uint8))
        positions = np.arange(first, first + 500)
        got = buffer.get_field("pixels", np.zeros(500, np.int64), positions)
        assert (got == (np.arange(500) % 251)[:, None]).all()
    zeros = [offset for offset, data in calls if data == bytes(PAGE)]
    rows = range(first - lap + 1, first - lap + 501)
    made = set(zeros) & {row * ROW // PAGE * PAGE for row in rows}
    # None where a limit or the ring ends.
    assert len(made) == len(zeros) > 490
    assert verify_buffer(tmp_path / "b").ok


def test_small_rows_are_stored_where_their_pages_were_missing(tmp_path, monkeypatch):
    """As fast as where they are there: a stretch of pages is cleared, and stored to."""
    asked, there = set(), Inlet._there

    def second(self, first, nbytes):
        if first in asked:
            return there(self, first, nbytes)
        asked.add(first)
        return False

    monkeypatch.setattr(Inlet, "_there", second)
    schema = mr.Schema({"obs": mr.Field((40,), "float32")})
    row = np.ones(40, np.float32)
    with filled(tmp_path / "b", schema, 60_000, obs=row) as buffer:
        if not asked:
            pytest.skip("the file system is written, never stored into")
        first = int(buffer.span.stop[0])
        with using(WatchedDisk()) as disk:
            for value in range(5000):
                buffer.add(obs=np.full(40, value, np.float32))
        # Two stores of a step, of the record and its flags; three to publish it.
        assert disk.calls["pwrite"] < 700
        positions = np.arange(first, first + 5000)
        got = buffer.get_field("obs", np.zeros(5000, np.int64), positions)
        assert (got == np.arange(5000)[:, None]).all()
        tail = int(buffer.span.first[0])
        old = buffer.get_field(
            "obs", np.zeros(100, np.int64), np.arange(tail, tail + 100)
        )
        assert (old == 1).all()
    assert verify_buffer(tmp_path / "b").ok


def test_a_disk_that_takes_no_page_refuses_the_row(tmp_path, missing):
    schema = mr.Schema({"pixels": mr.Field((ROW,), "uint8")})
    row = np.ones(ROW, np.uint8)
    with filled(tmp_path / "b", schema, 1200, pixels=row) as buffer:
        head = int(buffer.span.stop[0])
        full = FaultyDisk(OSError(errno.ENOSPC, "full"), at=1, names=("pwrite",))
        with using(full), pytest.raises(FullError, match="cannot write"):
            buffer.add(pixels=row)
        assert int(buffer.span.stop[0]) == head
        buffer.add(pixels=row)
        assert int(buffer.span.stop[0]) == head + 1


def test_limits_of_an_interrupted_call_hold_for_what_is_written_next(
    tmp_path, monkeypatch
):
    schema = mr.Schema({"obs": mr.Field((3,), "float32")})
    know, struck = Writer._know, []

    def strike(self, heads, limits, tails):
        if limits is not self._limits and len(struck) % 2:
            struck.append(limits)
            raise KeyboardInterrupt
        struck.append(limits)
        know(self, heads, limits, tails)

    with (
        scarce(),
        mr.ReplayBuffer.create(tmp_path / "b", schema, 200) as buffer,
    ):
        monkeypatch.setattr(Writer, "_know", strike)
        value = 0
        while value < 5 * buffer.slots:
            try:
                buffer.add(obs=np.full(3, value, np.float32))
            except KeyboardInterrupt:
                continue
            value += 1
        monkeypatch.undo()
        tail, head = int(buffer.span.first[0]), int(buffer.span.stop[0])
        assert (head, head - tail) == (value, 200)
        positions = np.arange(tail, head)
        got = buffer.get_field("obs", np.zeros(200, np.int64), positions)
        assert (got == positions[:, None]).all()
    assert len(struck) > 50
    assert verify_buffer(tmp_path / "b").ok
