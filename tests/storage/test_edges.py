"""Pages that two rows share are asked for before a write needs them."""

import mmap

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.files import File
from mmreplay.storage.edges import ASKED_NBYTES, SMALL_ROW_NBYTES, Edges
from mmreplay.storage.pages import Pages

PAGE = mmap.PAGESIZE
ROW = 3 * PAGE + 100
ROWS = 1000


class Spy:
    """A file that only notes what it is asked for, and pages that are there or not."""

    def __init__(self, row_nbytes=ROW, there=()):
        self.asked, self.there = [], there
        self.nbytes = ROWS * row_nbytes

    def will_need(self, offset, nbytes):
        assert nbytes % PAGE == offset % PAGE == 0
        assert 0 <= offset < offset + nbytes < self.nbytes + PAGE
        self.asked.extend(range(offset, offset + nbytes, PAGE))

    def holds(self, offset):
        return offset in self.asked or offset in self.there


def page(row, row_nbytes=ROW):
    """Where the page begins that a row begins in, and the one before it ends."""
    return row * row_nbytes // PAGE * PAGE


SMALL, LARGE = SMALL_ROW_NBYTES - 100, SMALL_ROW_NBYTES + 100


@pytest.mark.parametrize("row_nbytes", [ROW, SMALL, LARGE, ASKED_NBYTES + 100])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_every_page_that_a_write_ends_in_was_asked_for_before(count, row_nbytes):
    spy = Spy(row_nbytes)
    edges = Edges(spy, row_nbytes, spy)
    edges.begin()
    # The first ones are asked for by writes before them, which there are none of.
    begun = 2 * max(count, ASKED_NBYTES // row_nbytes)
    for row in range(0, ROWS - count, count):
        if row >= begun:
            assert page(row + count, row_nbytes) in spy.asked
        edges.written(row, count)
    # Two neighbours share a page, and both ask for it.
    assert len(spy.asked) < 1.1 * len(set(spy.asked)) + 1


def test_of_large_rows_only_the_shared_pages_are_asked_for():
    spy = Spy(LARGE)
    edges = Edges(spy, LARGE, spy)
    edges.begin()
    for row in range(500):
        edges.written(row, 1)
    assert set(spy.asked) <= {page(row, LARGE) for row in range(ROWS + 1)}
    assert len(spy.asked) > 400


def test_small_rows_are_asked_for_many_at_once():
    spy, calls = Spy(), []
    will_need = spy.will_need
    spy.will_need = lambda *range_: (calls.append(range_), will_need(*range_))
    edges = Edges(spy, ROW, spy)
    edges.begin()
    for row in range(900):
        edges.written(row, 1)
    assert len(calls) <= 900 * ROW // ASKED_NBYTES + 2
    assert len(spy.asked) > 600 * ROW // PAGE


def test_writes_in_turn_at_many_places_are_each_served():
    spy = Spy()
    edges = Edges(spy, ROW, spy)
    edges.begin()
    rows = ASKED_NBYTES // ROW
    for at in range(300):
        for begin in (0, 350, 650):
            if at >= 2 * rows:
                assert page(begin + at + 1) in spy.asked
            edges.written(begin + at, 1)


def test_nothing_is_asked_for_where_nothing_is_overwritten():
    for row_nbytes, begun in ((ROW, False), (2 * PAGE, True)):
        spy = Spy()
        edges = Edges(spy, row_nbytes, spy)
        if begun:
            edges.begin()
        for row in range(500):
            edges.written(row, 1)
        assert spy.asked == []


def test_pages_that_are_there_are_not_asked_for_and_seldom_looked_at():
    looks = []
    spy = Spy()
    spy.holds = lambda offset: not looks.append(offset)
    edges = Edges(spy, ROW, spy)
    edges.begin()
    for row in range(500):
        edges.written(row, 1)
    assert spy.asked == []
    assert 0 < len(looks) <= 500 * ROW // ASKED_NBYTES + 1


def test_the_second_lap_of_a_ring_asks(tmp_path, monkeypatch):
    asked, paths = set(), set()

    def note(self, offset, nbytes):
        asked.update(range(offset, offset + nbytes, PAGE))
        paths.add(self.path)

    monkeypatch.setattr(Pages, "holds", lambda self, offset: False)
    monkeypatch.setattr(File, "will_need", note)
    schema = mr.Schema({"pixels": mr.Field((ROW,), "uint8")})
    rows = ASKED_NBYTES // ROW
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 6 * rows) as buffer:
        row = np.zeros(ROW, np.uint8)
        for _ in range(buffer.slots - 1):
            buffer.add(pixels=row)
        # The next limit is a lap further on: what is below it is given up.
        first = len(asked)
        for _ in range(5 * rows):
            buffer.add(pixels=row)
        assert first <= 3 * ASKED_NBYTES // PAGE
        assert {page(row) for row in range(2 * rows, 5 * rows)} <= asked
        assert len(paths) == 1


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
