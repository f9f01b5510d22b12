"""What a process is: its forks, and threads that Ctrl-C may strike at any line."""

import _thread
import os
import queue
import threading

import pytest

from mmreplay.process import ProcessGuard, Worker, run_both
from tests.ctrl_c import OneCtrlC
from tests.forks import in_child


def refuse(*_):
    raise RuntimeError("can't start new thread")


def collect(worker, into):
    """Take what a worker is given, until the end."""
    while (item := worker.get()) is not None:
        into.append(item)


@pytest.mark.parametrize("threads", [True, False])
def test_both_are_done_and_what_fails_is_raised(monkeypatch, threads):
    def fail():
        raise KeyError("this")

    if not threads:
        monkeypatch.setattr(_thread, "start_new_thread", refuse)
    done = []
    run_both(lambda: done.append(1), lambda: done.append(2))
    assert sorted(done) == [1, 2]
    for one, other in ((fail, list), (list, fail)):
        with pytest.raises(KeyError, match="this"):
            run_both(one, other)


def test_a_guard_refuses_a_forked_child_and_no_one_else():
    guard = ProcessGuard("this file was opened", "Open it again")
    guard.check()
    assert not guard.forked
    assert in_child(lambda: guard.forked) == "True"
    told = in_child(guard.check)
    pid = os.getpid()
    assert told.startswith(f"ForkedError: this file was opened by pid {pid}, and pid ")
    assert told.endswith("is a forked child of it. Open it again.")


def test_a_guard_made_in_a_child_takes_the_child_for_its_own():
    def check():
        guard = ProcessGuard("this file was opened", "Open it again")
        guard.check()
        return guard.pid == os.getpid()

    assert in_child(check) == "True"


def test_forks_are_counted_in_the_child_alone():
    from mmreplay import process

    before = process.num_forks
    assert in_child(lambda: process.num_forks - before) == "1"
    assert process.num_forks == before


def test_a_worker_does_what_it_was_given_before_it_ends():
    done = []
    worker = Worker("test", lambda worker: collect(worker, done))
    for number in range(100):
        worker.put(number)
    assert not worker.running
    worker.start()
    assert worker.running
    worker.put(100)
    worker.stop()
    assert done == [*range(101)]
    assert not worker.running
    assert worker.failure is None


def test_a_worker_that_never_began_is_not_waited_for():
    worker = Worker("test", lambda worker: None)
    assert worker.join()
    worker.stop()
    assert not worker.running


def test_a_worker_waits_for_items_no_longer_than_it_says():
    found, waited = [], threading.Event()

    def run(worker):
        with pytest.raises(queue.Empty):
            worker.get(0.001)
        waited.set()
        found.append(worker.get(20))

    worker = Worker("test", run)
    worker.start()
    assert waited.wait(20)
    worker.put("item")
    assert worker.join(20)
    assert found == ["item"]


def test_the_end_of_a_worker_is_waited_for_no_longer_than_asked():
    worker = Worker("test", lambda worker: worker.get())
    worker.start()
    assert not worker.join(0.001)
    worker.put(None)
    assert worker.join(20)


def test_a_worker_does_not_wait_for_itself():
    found = []
    worker = Worker("test", lambda worker: found.append(worker.join(20)))
    worker.start()
    assert worker.join(20)
    assert found == [False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_a_worker_early_is_its_failure():
    error = KeyError("this")

    def fail(worker):
        raise error

    worker = Worker("test", fail)
    worker.start()
    assert worker.join(20)
    assert worker.failure is error


@pytest.mark.parametrize("starter", ["_thread", "threading"])
def test_a_worker_without_a_thread_may_be_started_later(monkeypatch, starter):
    done = []
    worker = Worker("test", lambda worker: collect(worker, done))
    worker.put(1)
    with monkeypatch.context() as scarce:
        if starter == "_thread":
            scarce.setattr(_thread, "start_new_thread", refuse)
        else:
            scarce.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.start()
    assert not worker.running
    assert worker.join()
    worker.start()
    worker.stop()
    assert done == [1]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_while_a_worker_starts_leaves_it_stopped_or_to_be_stopped(monkeypatch, late):
    begin, done = threading.Thread.start, []
    begun = queue.SimpleQueue()

    def start(self):
        if self.name != "test":
            begin(self)
            return
        if late:
            begin(self)
        ctrl_c.press()
        if not late:
            begin(self)
            begun.put(self)

    def start_and_wait():
        worker.start()
        while True:
            ctrl_c.felt.wait(20)

    monkeypatch.setattr(threading.Thread, "start", start)
    worker = Worker("test", lambda worker: collect(worker, done))
    worker.put(1)
    with OneCtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        start_and_wait()
    if not late:
        # It begins only now, finds that nobody waits for it, and does nothing.
        begun.get(timeout=20).join(20)
        assert not worker.running
    worker.stop()
    assert done == ([1] if late else [])
    assert not [t for t in threading.enumerate() if t.name == "test"]


def test_a_child_finds_no_worker_running():
    worker = Worker("test", lambda worker: worker.get())
    worker.start()
    assert in_child(lambda: (worker.running, worker.join())) == "(False, True)"
    worker.stop()
