"""Threads of one process that write and draw wait for each other, not for ever."""

import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, StarvedError
from mmreplay.limiter.bound import BoundLimit
from tests.limiter.support import add, child, create, rate_limiter, reader, until_starved

# Never reached but where a test fails: none waits for a clock.
LONG_S = 60.0


class Thread:
    """Work in a thread of its own, begun at once, and what came of it."""

    def __init__(self, work):
        self._work = work
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def end(self):
        """Wait until it is done."""
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@pytest.fixture
def asked(monkeypatch):
    """Set once a thread that has no patience left asked whether it is alone."""
    event, helped = threading.Event(), BoundLimit._helped

    def helped_and_set(limit, side):
        found = helped(limit, side)
        event.set()
        return found

    monkeypatch.setattr(BoundLimit, "_helped", helped_and_set)
    return event


@contextmanager
def idle_learner(path):
    """Another process that drew once and does no more."""
    told, tell = os.pipe()

    def live():
        with reader(path, rate_limiter()) as buffer:
            buffer.limit.count(0)
            os.write(tell, b".")
            signal.pause()

    pid = child(live)
    assert os.read(told, 1) == b"."
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)


@pytest.mark.crash
@pytest.mark.parametrize("first", ["writer", "learner"])
@pytest.mark.parametrize("company", [False, True])
def test_a_writer_and_a_learner_share_one_buffer(tmp_path, first, company):
    with ExitStack() as stack:
        buffer = stack.enter_context(create(tmp_path / "b", rate_limiter(patience=LONG_S)))
        if company:
            stack.enter_context(idle_learner(tmp_path / "b"))
        # 4 * 200 - 20 items may be drawn, of which the last row needs 4 * 200 - 60.
        work = {
            "writer": lambda: add(buffer, 200),
            "learner": lambda: [buffer.sample(1) for _ in range(760)],
        }
        threads = [Thread(work.pop(first)), *map(Thread, work.values())]
        for thread in threads:
            thread.end()
        assert buffer.heads.tolist() == [200]


@pytest.mark.crash
def test_many_threads_share_one_buffer(tmp_path):
    with create(tmp_path / "b", rate_limiter(patience=LONG_S)) as buffer:
        lock = threading.Lock()

        def write():
            for _ in range(50):
                with lock:
                    add(buffer)

        def learn():
            for _ in range(190):
                buffer.sample(1)

        threads = [Thread(work) for work in (write, learn) * 4]
        for thread in threads:
            thread.end()
        path = tmp_path / "b" / "limiter" / "learner-000"
        assert int.from_bytes(path.read_bytes()[:8], "little") == 760


@pytest.mark.parametrize("own", [True, False])
def test_a_loader_draws_from_the_writers_process(tmp_path, own):
    pytest.importorskip("torch")
    limiter = rate_limiter(patience=LONG_S)
    with create(tmp_path / "b", limiter) as buffer, ExitStack() as stack:
        read = buffer
        if not own:
            read = stack.enter_context(reader(tmp_path / "b", limiter))
        writer = Thread(lambda: add(buffer, 200))
        with mr.ReplayLoader(read, batch_size=1) as loader:
            for _ in range(760):
                next(loader)
        writer.end()


def test_a_thread_that_may_draw_keeps_a_writer_waiting(tmp_path, asked):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        add(buffer, 15)
        drawn = threading.Event()

        def learn():
            buffer.sample(1)
            drawn.set()
            # As one that learns for longer than anybody's patience.
            assert asked.wait(LONG_S)
            for _ in range(8):
                buffer.sample(1)

        learner = Thread(learn)
        assert drawn.wait(LONG_S)
        add(buffer, 2)
        learner.end()
        assert len(buffer) == 17


def test_what_a_learner_draws_as_it_ends_lets_a_writer_go_on(tmp_path, monkeypatch):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        add(buffer, 15)

        def last_draws(*_):
            # After the writer read the counts, and before it finds that it is alone.
            for _ in range(9):
                buffer.sample(1)
            return False

        monkeypatch.setattr(BoundLimit, "_helped", last_draws)
        add(buffer, 2)
        assert len(buffer) == 17


@pytest.mark.parametrize("own", [True, False])
def test_a_thread_that_may_write_keeps_a_learner_waiting(tmp_path, asked, own):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer, ExitStack() as stack:
        read = buffer
        if not own:
            # By another path it is the same buffer.
            (tmp_path / "link").symlink_to(tmp_path / "b")
            read = stack.enter_context(reader(tmp_path / "link", rate_limiter(patience=0)))
        add(buffer, 5)
        learner = Thread(lambda: read.sample(1))
        assert asked.wait(LONG_S)
        add(buffer, 5)
        learner.end()


def test_a_thread_that_ended_helps_nobody(tmp_path):
    with create(tmp_path / "b", rate_limiter(patience=0, timeout=LONG_S)) as buffer:
        ended = [Thread(lambda: add(buffer, 10))]
        ended[0].end()
        ended.append(Thread(lambda: buffer.sample(1)))
        ended[1].end()
        # 4 * inserts <= 4 * 10 + 20 + 1, 4 * 15 - samples >= 20.
        assert until_starved(lambda: add(buffer), "none is running") == 5
        assert until_starved(lambda: buffer.sample(1), "none is running") == 39
        assert len(ended) == 2


def test_threads_that_all_wait_for_the_same_are_alone(tmp_path, asked, monkeypatch):
    # Whichever looks first is told: the other thread looks no more until it may go on.
    me, sleep, goes_on = threading.current_thread(), time.sleep, threading.Event()

    def rest(seconds):
        if threading.current_thread() is me:
            sleep(seconds)
        else:
            assert goes_on.wait(LONG_S)

    monkeypatch.setattr(time, "sleep", rest)
    with create(tmp_path / "b", rate_limiter(patience=0, timeout=LONG_S)) as buffer:
        add(buffer, 10)
        buffer.sample(1)

        def both():
            buffer.sample(1)
            # 4 * inserts <= 4 * 10 + 20 + 2; the thread before it may draw.
            add(buffer, 6)

        other = Thread(both)
        assert asked.wait(LONG_S)
        assert until_starved(lambda: add(buffer), "none is running") == 0
        for _ in range(8):
            buffer.sample(1)
        goes_on.set()
        other.end()


def test_a_single_thread_is_refused_with_the_reason(tmp_path):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        assert until_starved(lambda: buffer.sample(1), "none is running") == 0
        assert until_starved(lambda: add(buffer), "none is running") == 15
        assert until_starved(lambda: buffer.sample(1), "none is running") == 40


def test_a_single_thread_is_refused_whatever_path_it_opened(tmp_path):
    limiter = rate_limiter(patience=0, timeout=LONG_S)
    with create(tmp_path / "b", limiter) as buffer:
        (tmp_path / "link").symlink_to(tmp_path / "b")
        with reader(tmp_path / "link", limiter) as read:
            assert until_starved(lambda: add(buffer), "none is running") == 15
            assert until_starved(lambda: read.sample(1), "none is running") == 40
            assert until_starved(lambda: add(buffer), "none is running") == 10


@pytest.mark.crash
def test_another_learner_does_not_help_a_learner(tmp_path):
    create(tmp_path / "b", rate_limiter()).close()
    limiter = rate_limiter(timeout=LONG_S)
    with idle_learner(tmp_path / "b"), reader(tmp_path / "b", limiter) as buffer:
        assert until_starved(lambda: buffer.sample(1), "none is running") == 0


def test_to_close_ends_the_waits_of_other_threads(tmp_path, asked):
    with create(tmp_path / "b", rate_limiter(patience=0)) as buffer:
        add(buffer, 5)
        limit = buffer.limit
        learner = Thread(lambda: buffer.sample(1))
        assert asked.wait(LONG_S)
    with pytest.raises(FailedError, match=r"b is closed\."):
        learner.end()
    with pytest.raises(FailedError, match=r"b is closed.*after all threads have finished"):
        limit.count(1)


def test_a_limiter_that_a_close_takes_away_meanwhile_is_not_asked(tmp_path, monkeypatch):
    """As a thread does that closes it between the look for one and the wait."""
    with create(tmp_path / "b", rate_limiter()) as buffer:
        looks = [buffer.limit]
        seen = property(lambda self: looks.pop() if looks else None, lambda *_: None)
        with monkeypatch.context() as closing:
            closing.setattr(type(buffer), "limit", seen, raising=False)
            add(buffer, 1)
        assert not looks
        assert buffer.heads.tolist() == [1]


def test_a_wait_that_is_over_is_no_wait_any_more(tmp_path):
    with create(tmp_path / "b", rate_limiter(timeout=0, patience=LONG_S)) as buffer:
        for _ in range(2):
            with pytest.raises(StarvedError, match="0 s have passed"):
                buffer.sample(1)
        add(buffer, 10)
        buffer.sample(1)
