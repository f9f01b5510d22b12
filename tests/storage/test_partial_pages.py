"""Pages that rows share are written whole before a write would have to read them."""

import errno
import mmap
import os

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.append import Appender
from mmreplay.disk.files import File
from mmreplay.errors import FullError
from mmreplay.ring import Ring
from mmreplay.storage import write_path
from mmreplay.storage.read_ahead import Pages
from mmreplay.storage.write_path import LOOK_NBYTES, LOOKS, RESTS, MappedWriter, PartialPageFiller
from mmreplay.storage.zarr.sealing import Sealing
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from mmreplay.verify import verify_buffer
from tools.torture.powerloss import abandon
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

    def lacks(self, offset):
        assert 0 <= offset < self.nbytes
        self.looks.append(offset)
        return not self.there


def limits(*positions):
    return np.array(positions, np.int64)


def test_every_page_that_a_write_ends_in_is_written_before():
    ring = Ring.sized(1000, 1)
    spy = Spy(ring, ROW)
    found = PartialPageFiller(spy, spy, ring)
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


class ZerosDisk(WatchedDisk):
    """A disk that notes where zeros are written, whole pages of them.

    What is written else is not all zeros.
    """

    def __init__(self):
        super().__init__()
        self.zeros = []

    def pwrite(self, fd, data, offset):
        if len(data) >= PAGE and not any(data):
            assert len(data) % PAGE == offset % PAGE == 0
            self.zeros.append(offset)
        return super().pwrite(fd, data, offset)


class Twin:
    """A file written as a ring is, and what each position was written with."""

    def __init__(self, path, ring, row_nbytes, rng):
        self.ring, self.row_nbytes, self.rng = ring, row_nbytes, rng
        self.file = File.create(path, ring.num_rows * row_nbytes)
        self.edges = PartialPageFiller(self.file, Spy(ring, row_nbytes), ring)
        self.heads, self.limits = np.zeros((2, ring.num_envs), np.int64)
        self.rows = [{} for _ in range(ring.num_envs)]

    def turn(self, together):
        """Write some steps, of all environments or of one."""
        heads, ring, rng = self.heads, self.ring, self.rng
        some, count = [int(rng.integers(ring.num_envs))], int(rng.integers(1, 6))
        if together and (heads < heads.max()).any():
            some, count = [int(heads.argmin())], int(heads.max() - heads.min())
        elif together:
            some = list(range(ring.num_envs))
        needed = self.limits.copy()
        needed[some] = heads[some] + count
        if (needed > self.limits).any():
            ahead = np.maximum(needed, heads + rng.integers(1, ring.reserve + 1))
            self.limits = np.maximum(ahead, self.limits)
            self.edges.free(self.limits)
        for _ in range(count):
            self.put(some)

    def put(self, envs):
        """One step of environments that follow each other in the file."""
        row = self.ring.row(envs[0], int(self.heads[envs[0]]))
        data = self.rng.bytes(len(envs) * self.row_nbytes)
        offset = row * self.row_nbytes
        self.edges.make(offset, offset + len(data))
        if len(data) >= self.edges.step_nbytes and self.rng.random() < 0.3:
            first = -(-offset // 32) * 32
            self.edges.clear(offset, first, first + 32 * int(self.rng.integers(1, 9)))
        os.pwrite(self.file.fd, data, offset)
        for at, env in enumerate(envs):
            piece = data[at * self.row_nbytes : (at + 1) * self.row_nbytes]
            self.rows[env][int(self.heads[env])] = piece
        self.heads[envs] += 1

    def check(self):
        held = self.file.pread(self.file.nbytes, 0)
        for env, rows in enumerate(self.rows):
            first = max(0, int(self.limits[env]) - self.ring.slots)
            for position in range(first, int(self.heads[env])):
                offset = self.ring.row(env, position) * self.row_nbytes
                assert held[offset : offset + self.row_nbytes] == rows[position]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize(("num_envs", "row_nbytes"), [(1, 7), (3, 7), (1, 50), (4, 50)])
@pytest.mark.sliced(2)
def test_no_row_that_may_be_asked_for_changes(
    tmp_path, monkeypatch, seed, layout, num_envs, row_nbytes
):
    monkeypatch.setattr(write_path, "PAGE", 32)
    monkeypatch.setattr(write_path, "LOOK_NBYTES", 128)
    ring = Ring.sized(200, num_envs, layout)
    twin = Twin(tmp_path / "rows", ring, row_nbytes, np.random.default_rng(seed))
    with using(WatchedDisk()) as disk:
        for number in range(1500):
            twin.turn(together=layout == "time_major" and number // 100 % 3 < 2)
            twin.check()
    assert disk.calls["pwrite"] > 20
    twin.file.close()


@pytest.mark.parametrize("row_nbytes", [8, 168, 4095, ROW])
def test_zeroed_pages_hold_only_rows_below_the_limit(row_nbytes):
    ring = Ring.sized(20_000, 2, "env_major")
    spy = Spy(ring, row_nbytes)
    found = PartialPageFiller(spy, spy, ring)
    stop = ring.slots * row_nbytes
    assert found.clear(row_nbytes, PAGE, 9 * PAGE) == PAGE, "no limit is known"
    found.free(limits(2 * ring.slots + 5, 2 * ring.slots - 5))
    # The second environment's first row is not the first one's to come.
    for row in (0, ring.slots):
        assert found.clear(row * row_nbytes, PAGE, 9 * PAGE) == PAGE
    end = found.clear(stop - 3 * row_nbytes, stop // PAGE * PAGE - PAGE, stop + PAGE)
    assert end == stop // PAGE * PAGE
    base = (ring.slots + 9) * row_nbytes
    first = -(-base // PAGE) * PAGE
    last = (2 * ring.slots - 5) * row_nbytes // PAGE * PAGE
    most = write_path.CLEARED_NBYTES
    assert found.clear(base, first, 1 << 60) == min(last, first + most)
    assert spy.written[-1] == (first, min(last, first + most))


def test_pages_that_are_there_are_left_and_seldom_looked_at():
    ring = Ring.sized(1000, 1)
    spy = Spy(ring, ROW, there=True)
    found = PartialPageFiller(spy, spy, ring)
    found.free(limits(2 * ring.slots))
    for row in range(ring.slots - 1):
        found.make(row * ROW, (row + 1) * ROW)
    assert spy.written == []
    assert 0 < len(spy.looks) <= LOOKS * (spy.nbytes // LOOK_NBYTES + 2)


def test_pages_are_looked_at_again_in_a_file_of_any_size():
    ring = Ring.sized(100, 2, "env_major")
    spy = Spy(ring, ROW)
    found, row = PartialPageFiller(spy, spy, ring), 0
    found.free(limits(2 * ring.slots, 2 * ring.slots))
    assert spy.nbytes < 2 * LOOK_NBYTES
    until = LOOK_NBYTES // ROW + 2
    for spy.there in (False, True, False, True):
        for number in range(2 * until):
            before, row = len(spy.written), (row + 1) % (ring.slots - 5)
            found.make(row * ROW, (row + 1) * ROW)
            if number > until:
                assert (len(spy.written) == before) == spy.there
    # Those of the other environment are looked at for itself.
    spy.looks.clear()
    found.make(ring.slots * ROW, (ring.slots + 1) * ROW)
    assert len(spy.looks) == LOOKS
    assert min(spy.looks) >= ring.slots * ROW


@pytest.mark.parametrize(
    ("row_nbytes", "ring", "laps"),
    [
        pytest.param(2 * PAGE, Ring.sized(1000, 1), 2, id="whole pages"),
        pytest.param(ROW, Ring.sized(1000, 1), 1, id="first lap"),
    ],
)
def test_nothing_is_written_where_nothing_is_read(row_nbytes, ring, laps):
    spy = Spy(ring, row_nbytes)
    found = PartialPageFiller(spy, spy, ring)
    found.free(np.full(ring.num_envs, laps * ring.slots))
    for row in range(ring.num_rows - 1):
        found.make(row * row_nbytes, (row + 1) * row_nbytes)
    assert spy.written == spy.looks == []


def test_side_by_side_whole_steps_are_made_and_no_single_rows():
    ring = Ring.sized(1000, 3, "time_major")
    spy = Spy(ring, ROW)
    found, step = PartialPageFiller(spy, spy, ring), 3 * ROW
    apart, level = limits(*[2 * ring.slots] * 2, 2 * ring.slots - 1), 2 * ring.slots
    for told, expected in ((apart, 0), (np.full(3, level), ring.slots - 5)):
        found.free(told)
        for row in range(0, ring.num_rows, 3):
            for one in range(row, row + 3):
                found.make(one * ROW, (one + 1) * ROW)
            assert len(spy.written) <= row // 3
            found.make(row // 3 * step, (row // 3 + 1) * step)
        assert len(spy.written) >= expected
        assert (not expected) == (not spy.written)
    spy.written.clear()
    # As many rows, of two steps: the others of the second are not known.
    found.make(ROW, 4 * ROW)
    assert spy.written == []


def filled(folder, schema, capacity, **row):
    """A buffer in its second lap, all of whose pages are missing to look at."""
    buffer = mr.ReplayBuffer.create(folder, schema, capacity, commit_every=None)
    for _ in range(buffer.slots + 3):
        buffer.add(**row)
    return buffer


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(Pages, "lacks", lambda self, offset: True)


@pytest.mark.parametrize("block", [1, 7])
@pytest.mark.parametrize("row_nbytes", [ROW, 500])
def test_a_ring_fills_every_page_that_it_writes_partly(
    tmp_path, missing, monkeypatch, row_nbytes, block
):
    # Stored, small rows would end within no page.
    monkeypatch.setattr(MappedWriter, "_approach", lambda *args: False)
    schema = mr.Schema({"bytes": mr.Field((row_nbytes,), "uint8")})
    row = np.ones(row_nbytes, np.uint8)
    with filled(tmp_path / "b", schema, 1200, bytes=row) as buffer:
        lap, first = buffer.slots, int(buffer.span.stop[0])
        values = np.arange(490) % 251 + 1
        with using(ZerosDisk()) as disk:
            for at in range(0, 490, block):
                rows = np.repeat(values[at : at + block, None], row_nbytes, axis=1)
                rows = rows.astype(np.uint8)
                if block == 1:
                    buffer.add(bytes=rows[0])
                else:
                    buffer.extend(bytes=rows)
        positions = np.arange(first, first + 490)
        got = buffer.get_field("bytes", np.zeros(490, np.int64), positions)
        assert (got == values[:, None]).all()
        stride = (row_nbytes + 7) // 8 * 8 if row_nbytes < PAGE else row_nbytes
    heads = range(first - lap, first - lap + 491, block)
    ends = {stop * stride // PAGE * PAGE for stop in heads[1:]}
    begun = first % lap * stride // PAGE * PAGE
    made = set(disk.zeros)
    assert made <= ends
    # But for what was made before, whole pages, and where a limit ends.
    assert len(ends - made - {begun}) <= 6
    assert verify_buffer(tmp_path / "b").ok


def test_small_rows_are_stored_where_their_pages_were_missing(tmp_path, monkeypatch):
    """As fast as where they are there: a stretch of pages is cleared, and stored to."""
    asked, there = set(), MappedWriter._in_memory

    def second(self, first, nbytes):
        if first in asked:
            return there(self, first, nbytes)
        asked.add(first)
        return False

    monkeypatch.setattr(MappedWriter, "_in_memory", second)
    schema = mr.Schema({"obs": mr.Field((40,), "float32")})
    row = np.ones(40, np.float32)
    with filled(tmp_path / "b", schema, 60_000, obs=row) as buffer:
        if not asked:
            pytest.skip("the file system is written, never stored into")
        first = int(buffer.span.stop[0])
        with using(ZerosDisk()) as disk:
            for value in range(1, 5001):
                buffer.add(obs=np.full(40, value, np.float32))
        assert disk.zeros
        # Two stores of a step, of the record and its flags; three to publish it.
        assert disk.calls["pwrite"] < 700
        positions = np.arange(first, first + 5000)
        got = buffer.get_field("obs", np.zeros(5000, np.int64), positions)
        assert (got == np.arange(1, 5001)[:, None]).all()
        tail = int(buffer.span.first[0])
        old = buffer.get_field("obs", np.zeros(100, np.int64), np.arange(tail, tail + 100))
        assert (old == 1).all()
    assert verify_buffer(tmp_path / "b").ok


class Cleared:
    """Edges that clear a number of bytes, whatever they are asked for."""

    def __init__(self, nbytes, step_nbytes=100):
        self.nbytes, self.step_nbytes, self.asked = nbytes, step_nbytes, []

    def make(self, offset, stop):
        pass

    def clear(self, row, first, stop):
        self.asked.append((row, first))
        return first + self.nbytes


@pytest.fixture
def way(tmp_path, monkeypatch):
    """A way into a file, of which a fifth page was begun, and what it looked at."""
    file = File.create(tmp_path / "a", 1 << 20)
    way, looked = MappedWriter(file), []
    way.write(memoryview(bytes(5 * PAGE - 10)), 0)
    monkeypatch.setattr(way, "_in_memory", lambda *at: looked.append(at) or len(looked) > 1)
    yield way, looked
    file.close()


@pytest.mark.parametrize("cleared", [0, PAGE, 9 * PAGE])
def test_a_step_is_stored_only_into_pages_that_are_there(way, cleared):
    """Of a step that begins in one page and ends in the next, both have to be."""
    way, looked = way
    way._filler = Cleared(cleared)
    with using(WatchedDisk()) as disk:
        way.put(bytes(100), PAGE - 50, 100)
        if not looked:
            pytest.skip("the file system is written, never stored into")
    assert disk.calls["store"] == (cleared > 0)
    assert way._filler.asked == [(PAGE - 50, PAGE)]
    assert way.far == min(cleared + PAGE, 5 * PAGE - 10) * (cleared > 0)


def test_a_step_whose_pages_are_gone_again_is_written(way, monkeypatch):
    way, looked = way
    way._filler = Cleared(PAGE)
    monkeypatch.setattr(way, "_in_memory", lambda *at: looked.append(at) or False)
    with using(WatchedDisk()) as disk:
        way.put(bytes(100), PAGE - 50, 100)
    assert disk.calls["store"] == 0
    assert not looked or looked[1] == (0, 2 * PAGE)


def test_for_one_environment_of_a_step_nothing_is_cleared(way):
    way, _ = way
    way._filler = Cleared(PAGE, step_nbytes=200)
    with using(WatchedDisk()) as disk:
        way.put(bytes(100), PAGE - 50, 100)
    assert way._filler.asked == []
    assert disk.calls["store"] == 0


def test_pages_of_many_rows_are_asked_for(way, monkeypatch):
    way, looked = way
    asked = []
    monkeypatch.setattr(File, "will_need", lambda self, *at: asked.append(at))
    with using(WatchedDisk()) as disk:
        way.put(bytes(100), PAGE - 50, 100)
        assert disk.calls["store"] == 0
        assert asked == [looked[0]] * len(looked)
        for number in range(1, 2 * RESTS):
            way.put(bytes(100), PAGE - 50 + 100 * number, 100)
    assert not looked or disk.calls["store"] > 0


@pytest.mark.parametrize("advise", ["never", "kernel"])
def test_who_wants_no_reading_ahead_has_none(tmp_path, missing, monkeypatch, advise):
    schema = mr.Schema({"pixels": mr.Field((ROW,), "uint8")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 100).close()
    monkeypatch.setattr(MappedWriter, "_in_memory", lambda self, first, nbytes: False)
    asked = []
    monkeypatch.setattr(File, "will_need", lambda *args: asked.append(args))
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", advise=advise) as buffer:
        for _ in range(500):
            buffer.add(pixels=np.zeros(ROW, np.uint8))
    assert asked == []


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


def test_limits_of_an_interrupted_call_hold_for_what_is_written_next(tmp_path, monkeypatch):
    schema = mr.Schema({"obs": mr.Field((3,), "float32")})
    know, struck = Appender._set_published, []

    def strike(self, heads, limits, tails):
        if limits is not self._limits and len(struck) % 2:
            struck.append(limits)
            raise KeyboardInterrupt
        struck.append(limits)
        know(self, heads, limits, tails)

    with scarce(), mr.ReplayBuffer.create(tmp_path / "b", schema, 200) as buffer:
        monkeypatch.setattr(Appender, "_set_published", strike)
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


def test_rows_that_a_shard_gives_back_leave_those_after_them(tmp_path, missing, monkeypatch):
    """Those are in the tail, where a writer died before they were sealed."""
    schema, seal = mr.Schema({"obs": mr.Field((6,), "float32")}), Sealing._seal

    def values(first, stop):
        return np.repeat(np.arange(first, stop, dtype=np.float32)[:, None], 6, axis=1)

    def lagging(self, unit):
        if unit != 3:
            seal(self, unit)

    monkeypatch.setattr(Sealing, "_seal", lagging)
    options = {"commit_every": None, "engine": "zarr"}
    buffer = mr.ReplayBuffer.create(tmp_path / "b", schema, 930, **options)
    buffer.extend(obs=values(0, 512))
    buffer.commit()
    abandon(buffer)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as buffer:
        # Of limits no further than they have to be, one lies within a place.
        buffer.hold_rows(lambda heads, tails, needed, target: needed)
        for position in range(512, 1440):
            buffer.extend(obs=values(position, position + 1))
            tail, head = int(buffer.span.first[0]), int(buffer.span.stop[0])
            if head > 1380:
                positions = np.arange(tail, head)
                got = buffer.get_field("obs", np.zeros(head - tail, np.int64), positions)
                assert (got == positions[:, None]).all()
        buffer.commit()
        assert verify_buffer(tmp_path / "b").ok
        monkeypatch.setattr(Sealing, "_seal", seal)
