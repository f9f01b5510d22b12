"""Work that threads do ahead comes in order, and not too far ahead."""

import errno
import threading
from itertools import count

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import in_order, read_ahead
from mmreplay.errors import FailedError


def test_results_come_in_the_order_of_the_items():
    first = threading.Event()

    def work(item):
        if item == 0:
            first.wait(10)
        elif item == 1:
            first.set()
        return item * item

    assert list(in_order(work, range(50), ahead=3)) == [n * n for n in range(50)]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_no_more_items_are_read_ahead_than_allowed(ahead):
    taken = []

    def items():
        for number in count():
            taken.append(number)
            yield number

    results = in_order(str, items(), ahead)
    for number in range(20):
        assert next(results) == str(number)
        assert len(taken) <= number + 1 + ahead
    results.close()


def test_an_error_comes_where_its_result_would():
    results = in_order(lambda item: 6 // item, [3, 2, 0, 1], ahead=3)
    assert next(results) == 2
    assert next(results) == 3
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_an_error_of_the_items_is_raised():
    def items():
        yield 1
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        list(in_order(str, items(), ahead=0))


def test_threads_end_when_the_iteration_is_abandoned():
    results = in_order(str, count(), ahead=4)
    next(results)
    results.close()
    names = [each.name for each in threading.enumerate()]
    assert not [name for name in names if name.startswith("mmreplay-convert")]


def test_the_next_item_is_made_while_one_is_used():
    made = [threading.Event() for _ in range(5)]

    def items():
        for number, event in enumerate(made):
            event.set()
            yield number

    found = read_ahead(items())
    for number in range(4):
        assert next(found) == number
        assert made[number + 1].wait(10)
        assert sum(event.is_set() for event in made) == number + 2
    assert list(found) == [4]


def test_an_error_comes_behind_the_items_before_it():
    def items():
        yield 1
        yield 2
        raise OSError("cut")

    found = read_ahead(items())
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(OSError, match="cut"):
        next(found)
    assert list(read_ahead(iter(()))) == []


def test_the_thread_ends_with_who_gives_up():
    found = read_ahead(count())
    next(found)
    found.close()
    names = [each.name for each in threading.enumerate()]
    assert not [name for name in names if name.startswith("mmreplay-convert")]


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".parquet", ".csv"])
def test_a_shortage_of_threads_is_reported_and_leaves_nothing(tmp_path, monkeypatch, suffix):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    told = r"cannot start a thread that converts: can't start .* End other .*\(ulimit -u\)"
    file, schema = tmp_path / f"file{suffix}", mr.Schema({"n": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "buffer", schema, 8) as buffer:
        buffer.extend(n=np.arange(8))
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refuse)
            with pytest.raises(FailedError, match=told) as caught:
                mr.export(buffer, file)
        assert caught.value.errno == errno.EAGAIN
        assert [path.name for path in tmp_path.iterdir()] == ["buffer"]
        mr.export(buffer, file)
    if suffix == ".parquet":
        return  # which pyarrow reads in threads of its own
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        with pytest.raises(FailedError, match=told):
            mr.load(file, tmp_path / "loaded")
    assert not (tmp_path / "loaded").exists()
    mr.load(file, tmp_path / "loaded")
