"""Pages that two rows share are asked for before a write needs them."""

import mmap

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.files import File
from mmreplay.storage.edges import AHEAD, COLD_WRITES, Edges
from mmreplay.storage.pages import Pages

PAGE = mmap.PAGESIZE
ROW = 3 * PAGE + 100
ROWS = 1000


class Spy:
    """A file that only notes what it is asked for, and pages that are there or not."""

    nbytes = ROWS * ROW

    def __init__(self, there=()):
        self.asked, self.there = [], there

    def will_need(self, offset, nbytes):
        assert nbytes == PAGE
        assert offset % PAGE == 0
        self.asked.append(offset)

    def holds(self, offset):
        return offset in self.there


def page(row):
    """Where the page begins that a row begins in, and the one before it ends."""
    return row * ROW // PAGE * PAGE


@pytest.mark.parametrize("count", [1, 7])
def test_every_page_that_a_write_ends_in_was_asked_for_some_writes_before(count):
    spy = Spy()
    edges = Edges(spy, ROW, spy)
    edges.begin()
    for row in range(0, 700, count):
        if row >= AHEAD * count:
            assert page(row + count) in spy.asked
        edges.written(row, count)
    assert len(spy.asked) == len(set(spy.asked))
    assert all(0 <= offset < ROWS * ROW for offset in spy.asked)


def test_nothing_is_asked_for_where_nothing_is_overwritten():
    for row_nbytes, begun in ((ROW, False), (2 * PAGE, True)):
        spy = Spy()
        edges = Edges(spy, row_nbytes, spy)
        if begun:
            edges.begin()
        for row in range(500):
            edges.written(row, 1)
        assert spy.asked == []


def test_looks_grow_rare_where_pages_are_there_and_frequent_where_one_is_not():
    looks = []
    spy = Spy()
    spy.holds = lambda offset: not looks.append(offset)
    edges = Edges(spy, ROW, spy)
    edges.begin()
    for row in range(500):
        edges.written(row, 1)
    assert spy.asked == []
    assert len(looks) < 40
    spy.holds = lambda offset: bool(looks.append(offset))
    before = len(looks)
    for row in range(500, 900):
        edges.written(row, 1)
    assert len(spy.asked) > 350
    assert len(looks) - before < 400 // COLD_WRITES + 2


def test_the_second_lap_of_a_ring_asks(tmp_path, monkeypatch):
    asked = set()
    monkeypatch.setattr(Pages, "holds", lambda self, offset: False)
    monkeypatch.setattr(
        File, "will_need", lambda self, offset, nbytes: asked.add((self.path, offset))
    )
    schema = mr.Schema({"pixels": mr.Field((ROW,), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 300) as buffer:
        row = np.zeros(ROW, np.uint8)
        for _ in range(buffer.slots - 1):
            buffer.add(pixels=row)
        # The next limit is a lap further on: what is below it is given up.
        first = len(asked)
        for _ in range(250):
            buffer.add(pixels=row)
        offsets = {offset for _, offset in asked}
        assert first <= AHEAD + 20
        assert {page(row) for row in range(AHEAD + 20, 250)} <= offsets
        assert len({path for path, _ in asked}) == 1


def test_who_wants_no_reading_ahead_has_none(tmp_path, monkeypatch):
    schema = mr.Schema({"pixels": mr.Field((ROW,), "uint8")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 100).close()
    monkeypatch.setattr(Pages, "holds", lambda self, offset: False)
    asked = []
    monkeypatch.setattr(File, "will_need", lambda *told: asked.append(told))
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", advise="never") as buffer:
        for _ in range(300):
            buffer.add(pixels=np.zeros(ROW, np.uint8))
    assert asked == []
