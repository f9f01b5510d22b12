"""Results of a shown buffer: made once a version, and again after a while."""

import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page import shown as module
from mmreplay.page.requests import Refusal
from mmreplay.page.shown import BackgroundReader, ShownBuffer


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def writer(tmp_path):
    """A buffer that is open to write."""
    fields = {"observation": mr.Field((), "float32")}
    with mr.ReplayBuffer.create(tmp_path / "live", mr.Schema(fields), 100) as buffer:
        buffer.add(observation=np.float32(0))
        yield buffer


@pytest.fixture
def shown(writer):
    made = ShownBuffer(writer.path)
    yield made
    made.close()


def test_a_result_is_made_once_a_version(shown, writer, clock):
    made = []

    def make(buffer):
        made.append(len(buffer))
        return made[-1]

    assert [shown.result("x", make).value for _ in range(3)] == [1, 1, 1]
    clock.now += 100
    assert shown.result("x", make).value == 1
    writer.add(observation=np.float32(1))
    assert shown.result("x", make).value == 2
    writer.add(observation=np.float32(2))
    # Of a buffer that grows, a result may be a second old.
    assert shown.result("x", make).value == 2
    clock.now += 1
    assert shown.result("x", make).value == 3
    assert made == [1, 2, 3]


def test_what_took_long_is_made_again_later(shown, writer, clock):
    def make(buffer):
        clock.now += 3
        return len(buffer)

    assert shown.result("x", make).value == 1
    writer.add(observation=np.float32(1))
    clock.now += 8
    assert shown.result("x", make).value == 1
    clock.now += 2
    assert shown.result("x", make).value == 2
    writer.add(observation=np.float32(2))
    clock.now += 29
    assert shown.result("x", make, max_age_s=60).value == 2
    clock.now += 40
    assert shown.result("x", make, max_age_s=60).value == 3


def test_a_result_may_need_another_one(shown):
    def outer(_):
        return shown.result("inner", lambda _: 2).value + 1

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(shown.result("outer", outer)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result.value for result in found] == [3, 3, 3, 3]


def test_the_oldest_results_are_dropped(shown):
    made = []
    for key in range(module.MAX_RESULTS + 1):
        shown.result(key, lambda _: made.append(1))
    shown.result(1, lambda _: made.append(1))
    assert len(made) == module.MAX_RESULTS + 1
    shown.result(0, lambda _: made.append(1))
    assert len(made) == module.MAX_RESULTS + 2


def test_a_buffer_that_is_not_there_is_looked_for_each_second(tmp_path, clock):
    shown = ShownBuffer(tmp_path / "later")
    with pytest.raises(Refusal, match="does not exist"):
        shown.buffer()
    fields = {"observation": mr.Field((), "float32")}
    with mr.ReplayBuffer.create(tmp_path / "later", mr.Schema(fields), 100):
        with pytest.raises(Refusal, match="does not exist"):
            shown.buffer()
        clock.now += 1
        assert len(shown.buffer()) == 0
        shown.close()


@pytest.mark.slow
def test_jobs_of_the_background_take_turns():
    reader, order, done = BackgroundReader(), [], threading.Event()
    counts = {"a": 0, "b": 0}
    begun = threading.Event()

    def job(name):
        def run():
            begun.wait(20)
            order.append(name)
            counts[name] += 1
            if counts == {"a": 3, "b": 3}:
                done.set()
            return counts[name] < 3

        return run

    def fail():
        raise ValueError("a buffer that became unreadable")

    reader.submit("a", job("a"))
    reader.submit("b", job("b"))
    reader.submit("a", job("a"))
    reader.submit("c", fail)
    begun.set()
    assert done.wait(20)
    reader.close()
    assert order == ["a", "b", "a", "b", "a", "b"]
    reader.submit("a", job("a"))
    assert len(order) == 6
