"""Missing pages are requested at once, and no page if none is missing."""

import errno
import os
import threading
import time

import numpy as np
import pytest

from mmreplay.disk.files import AHEAD_NBYTES, File
from mmreplay.errors import FailedError
from mmreplay.storage import read_ahead
from mmreplay.storage import read_ahead as module
from mmreplay.storage.read_ahead import COLD_CALLS, LOOK_NBYTES, SAMPLED_ROWS, WARM_CALLS, Pages

ROW = 3 * 4096 + 100


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(200 * ROW))
    file = File.open(path, None)
    yield file
    file.close()


def asked(file, monkeypatch):
    """Ranges that a file is asked for from now on."""
    found = []
    monkeypatch.setattr(File, "will_need", lambda self, *range_: found.append(range_))
    return found


def pages_of(rows, row_nbytes=ROW):
    """Numbers of all pages that hold some rows, by looking at every byte's end."""
    found = set()
    for row in rows:
        first, last = row * row_nbytes, (row + 1) * row_nbytes - 1
        found |= set(range(first // 4096, last // 4096 + 1))
    return found


@pytest.mark.parametrize("row_nbytes", [7, 4096, ROW])
def test_what_is_asked_for_is_sorted_whole_and_asked_for_once(file, monkeypatch, rng, row_nbytes):
    found = asked(file, monkeypatch)
    pages = Pages(file, row_nbytes, "always")
    for size in (1, 5, 100):
        rows = rng.integers(200, size=size)
        found.clear()
        total = pages.prefetch(rows)
        numbers = [
            page
            for offset, nbytes in found
            for page in range(offset // 4096, (offset + nbytes) // 4096)
        ]
        assert numbers == sorted(pages_of(rows.tolist(), row_nbytes))
        assert total == 4096 * len(numbers)
        # Those that touch are one range.
        ends = [offset + nbytes for offset, nbytes in found]
        assert all(a < b for a, (b, _) in zip(ends, found[1:], strict=False))


def test_a_sequence_is_one_range(file, monkeypatch):
    found = asked(file, monkeypatch)
    Pages(file, ROW, "always").prefetch(np.arange(20, 70))
    assert len(found) == 1


def test_nothing_is_asked_for_where_all_is_there(file, monkeypatch):
    # The file was written a moment ago, and is in the page cache.
    found = asked(file, monkeypatch)
    pages = Pages(file, ROW)
    for _ in range(50):
        assert pages.prefetch(np.arange(0, 200, 3)) == 0
    assert found == []


def looks(pages, monkeypatch, there):
    """Offsets that are looked at; those above `there` are missing."""
    found = []

    def cached(offset):
        found.append(offset)
        return offset < there

    monkeypatch.setattr(pages, "holds", cached)
    return found


def test_one_missing_page_has_batches_asked_for_without_a_look(file, monkeypatch):
    found = asked(file, monkeypatch)
    pages = Pages(file, ROW)
    looked = looks(pages, monkeypatch, there=0)
    rows = np.arange(0, 200, 20)
    assert pages.prefetch(rows) > 0
    assert len(looked) == 1
    for _ in range(COLD_CALLS):
        assert pages.prefetch(rows) > 0
    assert len(looked) == 1
    monkeypatch.setattr(pages, "holds", lambda offset: True)
    count = len(found)
    assert pages.prefetch(rows) == 0
    assert len(found) == count


def test_what_was_asked_for_when_drawn_tells_of_itself_alone(file, monkeypatch):
    found, there = asked(file, monkeypatch), set()
    pages = Pages(file, 100)
    monkeypatch.setattr(pages, "holds", lambda offset: offset // 4096 in there)
    for draw in range(3 * COLD_CALLS):
        # Pages of no other draw; they are in memory before anybody takes them.
        rows = np.arange(41 * draw, 20_000, 4000)
        assert pages.prefetch(rows) > 0, draw
        there, count = pages_of(rows.tolist(), 100), len(found)
        with read_ahead.Gathering(True):
            assert pages.prefetch(rows, now=True) == 0
            assert len(found) == count
            # What nobody asked for is asked for, also by who gathers.
            assert pages.prefetch(rows + 2000, now=True) > 0
    assert not read_ahead.gathers()
    there = set(range(1000))
    left = [pages.prefetch(rows, now=True) for _ in range(COLD_CALLS + 1)]
    assert left[-1] == 0


def test_the_rest_of_a_gather_is_asked_for_once_some_of_it_was_missing(file, monkeypatch):
    asked(file, monkeypatch)
    pages, there = Pages(file, 100), set(range(100))
    monkeypatch.setattr(pages, "holds", lambda offset: offset // 4096 in there)
    some = np.arange(0, 4000, 400)
    with read_ahead.Gathering(True):
        assert pages.prefetch(some) == 0
        assert pages.prefetch(some + 10_000) > 0
        # A few missing ones among many are seldom among those looked at.
        assert pages.prefetch(some) > 0
    with read_ahead.Gathering(True):
        assert pages.prefetch(some) == 0


def test_who_gathers_what_was_asked_for_is_known_by_thread_and_by_call():
    found = []
    with read_ahead.Gathering(True):
        assert read_ahead.lacks(lambda: False)
        # A transform may draw from another loader, which looks for itself.
        with read_ahead.Gathering(False):
            assert not read_ahead.gathers()
        with read_ahead.Gathering(True):
            assert not read_ahead.lacks(lambda: True)
        assert read_ahead.gathers()
        assert read_ahead.lacks(lambda: True)
        other = threading.Thread(target=lambda: found.append(read_ahead.gathers()))
        other.start()
        other.join()
    assert found == [False]
    with pytest.raises(KeyboardInterrupt), read_ahead.Gathering(True):
        raise KeyboardInterrupt
    assert not read_ahead.gathers()


def test_small_rows_that_are_there_are_looked_at_now_and_then(file, monkeypatch):
    pages = Pages(file, 100)
    looked = looks(pages, monkeypatch, there=1 << 40)
    for _ in range(3 * (WARM_CALLS + 1)):
        pages.prefetch(np.arange(40))
    assert len(looked) == 3 * 4


@pytest.mark.parametrize("advise", ["never", "kernel"])
def test_read_ahead_can_be_turned_off(file, monkeypatch, advise):
    found = asked(file, monkeypatch)
    pages = Pages(file, ROW, advise)
    looked = looks(pages, monkeypatch, there=0)
    assert pages.prefetch(np.arange(100)) == 0
    assert found == looked == []


def test_no_rows_are_no_pages(file, monkeypatch):
    found = asked(file, monkeypatch)
    for advise in ("auto", "always"):
        assert Pages(file, ROW, advise).prefetch(np.empty(0, np.int64)) == 0
    assert found == []


def test_a_look_tells_what_is_there(file):
    mapping = file.map_readonly()
    assert Pages(file, ROW, "auto", mapping).holds(5 * ROW)
    assert Pages(file, ROW, "auto").holds(5 * ROW)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_system_that_cannot_tell_is_looked_at_through_the_mapping(file, monkeypatch, mapped):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    mapping = file.map_readonly() if mapped else None
    pages = Pages(file, ROW, "auto", mapping)
    monkeypatch.setattr(module.os, "preadv", refuse)
    # Without a mapping nothing tells: what is not known to be there is asked for.
    assert pages.holds(0) is mapped
    monkeypatch.undo()
    assert pages.holds(0) is mapped
    assert not pages._reads


def test_what_would_have_to_be_waited_for_is_missing(file, monkeypatch):
    def wait(*_):
        raise BlockingIOError(errno.EAGAIN, "wait")

    pages = Pages(file, ROW)
    monkeypatch.setattr(module.os, "preadv", wait)
    assert not pages.holds(0)
    assert pages._reads


def test_a_file_that_another_thread_closed_is_for_the_gather_to_tell(file):
    pages = Pages(file, ROW)
    file.close()
    assert pages.prefetch(np.arange(9)) == 0
    Pages(file, ROW, "always").prefetch(np.arange(9))
    with pytest.raises(FailedError, match="it was closed meanwhile"):
        file.pread(4, 0)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system has none")
def test_pages_that_were_dropped_are_missing_until_they_are_read(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(os.urandom(64 * 4096))
    file = File.open(path, None, writable=True)
    file.sync()
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = Pages(file, 4096)
    if pages.holds(40 * 4096):
        pytest.skip("this file system does not drop pages")
    assert pages.prefetch(np.array([40, 9])) == 2 * 4096
    file.pread(4096, 40 * 4096)
    assert pages.holds(40 * 4096)
    file.close()


def test_a_long_range_is_requested_in_chunks_that_the_kernel_reads(tmp_path):
    """Of more than a device takes at a time, it reads the beginning alone."""
    path, nbytes = tmp_path / "f", 32 << 20
    path.write_bytes(bytes(nbytes))
    file = File.open(path, None)
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    mapping = file.map_readonly()
    pages = Pages(file, 4096, mapping=mapping)
    pages._reads = False  # a read that does not wait has the page read all the same
    places = range(0, nbytes, 1 << 18)
    if any(pages.holds(at) for at in places):
        mapping.close()
        file.close()
        pytest.skip("pages of this file system stay where they are")
    deadline = time.monotonic() + 20
    while not all(pages.holds(at) for at in places) and time.monotonic() < deadline:
        # A hint, which a busy disk's queue may drop in part: of a long range asked for
        # at once the same beginning would come again.
        file.will_need(0, nbytes)
        time.sleep(0.1)
    missing = [at for at in places if not pages.holds(at)]
    mapping.close()
    file.close()
    assert not missing


def test_chunks_of_a_range_are_bounded_and_complete(file, monkeypatch):
    found = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, first, size, how: found.append((first, size))
    )
    file.will_need(4096, 300_000)
    assert [first for first, _ in found] == list(range(4096, 304_096, AHEAD_NBYTES))
    assert sum(size for _, size in found) == 300_000
    assert max(size for _, size in found) <= AHEAD_NBYTES


def test_each_chunk_of_very_many_small_rows_is_checked_every_time(file, monkeypatch):
    """A block of a file of which every other stretch is in memory, after a warm one."""
    looked = []
    missing = set()

    def holds(self, offset):
        looked.append(offset)
        return offset // LOOK_NBYTES not in missing

    found = asked(file, monkeypatch)
    monkeypatch.setattr(Pages, "holds", holds)
    pages = Pages(file, 64)
    rows = np.arange(4 * LOOK_NBYTES // 64)
    assert pages.prefetch(rows) == 0
    assert {at // LOOK_NBYTES for at in looked} == {0, 1, 2, 3}
    for part in range(4):
        missing = {part}
        pages._cold_calls = 0
        assert pages.prefetch(rows) == 4 * LOOK_NBYTES
        assert found.pop() == (0, 4 * LOOK_NBYTES)
    few = rows[:1000]
    pages._cold_calls = pages._warm_calls = 0
    missing, looked[:] = set(), []
    assert pages.prefetch(few) == 0
    assert len(looked) == SAMPLED_ROWS
    assert pages.prefetch(few) == 0
    assert len(looked) == SAMPLED_ROWS
