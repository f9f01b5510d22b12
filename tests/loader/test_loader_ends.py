"""ReplayLoader raises what failed, ends however it is left, and leaks nothing."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.buffer.reader import GenerationReader
from mmreplay.errors import EmptyError, FailedError, ForkedError
from tests.ctrl_c import CtrlC, OneCtrlC
from tests.forks import in_child
from tests.loader.support import fill, same_as_take, steps
from tests.slices import count
from tests.waits import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("ends") / "b"
    fill(path)
    return path


@pytest.fixture
def buffer(path):
    with mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0)) as buffer:
        yield buffer


def failing(buffer_path, at, error):
    """A buffer whose at-th batch fails to be made."""
    calls = []

    def fail(fields):
        calls.append(1)
        if len(calls) == at:
            raise error
        return fields

    sampler = mr.UniformSampler(seed=0)
    transforms = [mr.Apply(fail)]
    return mr.ReplayBuffer.open(buffer_path, sampler=sampler, transforms=transforms)


class OddError(Exception):
    """One that needs more than a message."""

    def __init__(self, one, other):
        super().__init__(one, other)


def loaders():
    """Names of the threads that load."""
    return [t.name for t in threading.enumerate() if t.name == "mmreplay-load"]


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("error", [KeyError("x"), OddError(1, 2), SystemExit(3)])
def test_an_error_in_a_thread_is_raised_where_its_batch_would_be(path, at, error):
    buffer = failing(path, at, error)
    with buffer, mr.ReplayLoader(buffer, 8, prefetch=4) as loader:
        for _ in range(at - 1):
            next(loader)
        with pytest.raises(type(error)) as caught:
            next(loader)
        assert caught.value is error
        # The next one is as good as ever.
        assert len(next(loader)) == 8


@pytest.mark.parametrize("at", [1, 3, 30])
@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("windows", [False, True])
def test_an_error_takes_no_step_out_of_an_epoch(path, at, prefetch, windows):
    def epochs(buffer):
        buffer.sampler = mr.ShuffledSampler(seed=0)
        if windows:
            buffer.sampler = mr.SequenceSampler(3, sampler=buffer.sampler)
        return buffer

    buffer = epochs(mr.ReplayBuffer.open(path))
    with buffer, mr.ReplayLoader(buffer, 2) as loader:
        expected = [b.positions.tolist() for _ in range(2) for b in loader]
    buffer = epochs(failing(path, at, KeyError("x")))
    with buffer, mr.ReplayLoader(buffer, 2, prefetch=prefetch) as loader:
        found, errors, ends = [], 0, 0
        while ends < 2:
            try:
                found.append(next(loader).positions.tolist())
            except StopIteration:
                ends += 1
                iter(loader)
            except KeyError:
                errors += 1
        assert errors == 1
        assert found == expected


def test_a_transform_does_not_end_the_iteration_in_silence(path):
    buffer = failing(path, 2, StopIteration("x"))
    with buffer, mr.ReplayLoader(buffer, 8) as loader:
        next(loader)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(loader)


def test_an_empty_buffer_is_an_error_until_there_are_steps(tmp_path):
    buffer = fill(tmp_path / "b", count=1, close=False)
    buffer.clear()
    with mr.ReplayLoader(buffer, 8) as loader:
        for _ in range(2):
            with pytest.raises(EmptyError, match="cannot draw 8 steps"):
                next(loader)
        buffer.extend(steps(1, 50))
        same_as_take(buffer, next(loader))
    buffer.close()


def test_what_the_disk_refuses_is_raised_with_its_type(buffer, monkeypatch):
    def refuse(self, rows, paths, now=False):
        raise FailedError("the disk is gone")

    with mr.ReplayLoader(buffer, 8) as loader:
        next(loader)
        for name in ("gather", "prefetch"):
            monkeypatch.setattr(type(buffer._files.store), name, refuse)
            with pytest.raises(FailedError, match="the disk is gone"):
                [next(loader) for _ in range(4)]
            monkeypatch.undo()
            # Those that were being made meanwhile have the error, too.
            for _ in range(loader.prefetch + 1):
                with suppress(FailedError):
                    next(loader)
            next(loader)


def test_a_closed_loader_has_no_threads_and_says_that_it_is_closed(buffer):
    loader = mr.ReplayLoader(buffer, 8, num_threads=3)
    assert loaders() == []
    batch = next(loader)
    assert len(loaders()) == 3
    copy = batch["action"].clone()
    loader.close()
    loader.close()
    assert loader.closed
    assert loaders() == []
    for call in (lambda: next(loader), lambda: iter(loader)):
        with pytest.raises(FailedError, match="ReplayLoader: this loader is closed"):
            call()
    with pytest.raises(FailedError, match="closed"):
        loader.load_state_dict({"kind": "ReplayLoader", "sampler": {}})
    assert (batch["action"] == copy).all()


def test_a_closed_buffer_is_an_error_of_the_next_batch(path):
    buffer = mr.ReplayBuffer.open(path)
    with mr.ReplayLoader(buffer, 8) as loader:
        next(loader)
        buffer.close()
        with pytest.raises(FailedError, match=r"is closed|was closed meanwhile"):
            [next(loader) for _ in range(9)]


def test_a_loader_that_failed_and_was_dropped_ends_its_threads(tmp_path):
    def learn(loader):
        # Whose frame the error's traceback holds, and with it the loader.
        with suppress(EmptyError):
            next(loader)

    with fill(tmp_path / "b", count=1, close=False) as buffer:
        buffer.clear()
        loader = mr.ReplayLoader(buffer, 8)
        learn(loader)
        del loader
        gc.collect()
        # Who drops a loader waits for its threads, but not for long.
        until(lambda: loaders() == [])


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_loader_may_be_closed_after_its_buffer(path, how):
    unraisable = []
    buffer = mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0))
    loader = mr.ReplayLoader(buffer, 8, prefetch=3)
    next(loader)
    before = sys.unraisablehook
    sys.unraisablehook = unraisable.append
    try:
        buffer.close()
        if how == "close":
            loader.close()
        del loader
        gc.collect()
    finally:
        sys.unraisablehook = before
    until(lambda: loaders() == [])
    assert unraisable == []


def test_a_dropped_loader_ends_its_threads(buffer):
    loader = mr.ReplayLoader(buffer, 8, num_threads=2)
    found = iter(loader)
    next(found)
    del loader, found
    gc.collect()
    until(lambda: loaders() == [])


def test_a_loop_that_raises_leaves_nothing_running(buffer):
    with pytest.raises(ZeroDivisionError), mr.ReplayLoader(buffer, 8) as loader:
        [1 / 0 for _ in loader]
    assert loaders() == []


@pytest.mark.slow
def test_many_loaders_leave_nothing_behind(path):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    mr.ReplayLoader(mr.ReplayBuffer.open(path), 4).close()
    gc.collect()
    before, running = descriptors(), threading.active_count()
    most = 0
    for number in range(count(1000, 200)):
        with mr.ReplayBuffer.open(path) as buffer:
            loader = mr.ReplayLoader(buffer, 4, prefetch=1 + number % 3)
            next(loader)
            most = max(most, threading.active_count())
            loader.close()
        assert loader._sender.pool.nbytes == 0
    del buffer, loader
    gc.collect()
    assert threading.active_count() == running
    assert most <= running + 2
    assert descriptors() == before


def test_batches_go_on_where_ctrl_c_struck(buffer, path):
    with mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0)) as alone:
        expected = [alone.sample(8).positions.tolist() for _ in range(4000)]
    found = []
    with mr.ReplayLoader(buffer, 8, prefetch=2) as loader, CtrlC(60) as ctrl_c:
        while len(found) < 200 or ctrl_c.comes():
            with suppress(KeyboardInterrupt):
                found.append(ctrl_c.during(loader.__next__).positions.tolist())
    assert loaders() == []
    assert ctrl_c.strikes > 20
    # Where it struck between two lines a batch may be lost, never changed or moved.
    places = {str(draw): number for number, draw in enumerate(expected)}
    numbers = [places[str(draw)] for draw in found[:3000]]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] + 1 - len(numbers) <= ctrl_c.strikes


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_while_a_thread_starts_leaves_none_behind(buffer, monkeypatch, late):
    begin, struck = threading.Thread.start, []

    def start(self):
        if self.name != "mmreplay-load" or struck:
            begin(self)
            return
        struck.append(self)
        if late:
            begin(self)
        ctrl_c.press()
        if not late:
            begin(self)

    class Waiting(mr.UniformSampler):
        """Draws nothing before Ctrl-C was felt: `next` is under way until then."""

        def draw(self, view, batch_size):
            assert threading.current_thread() is threading.main_thread() or (ctrl_c.felt.wait(20))
            return super().draw(view, batch_size)

    buffer.sampler = Waiting(seed=0)
    monkeypatch.setattr(threading.Thread, "start", start)
    with OneCtrlC() as ctrl_c, mr.ReplayLoader(buffer, 8) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        # The learner asks again, and is not left without a thread either.
        assert len(next(loader)) == 8
        # The thread whose start was struck may begin only now, and ends.
        stop = time.monotonic() + 20
        while len(loaders()) > len(loader._workers) and time.monotonic() < stop:
            time.sleep(0.001)
        assert len(loaders()) == len(loader._workers)
    assert struck
    # A thread that began while its start was struck ends by itself.
    for thread in threading.enumerate():
        if thread.name == "mmreplay-load":
            thread.join(20)
    assert loaders() == []


PROGRAM = """
import mmreplay as mr, sys
buffer = mr.ReplayBuffer.open(sys.argv[1])
loader = mr.ReplayLoader(buffer, 64, prefetch=3, num_threads=2)
for number, batch in enumerate(loader):
    print(len(batch), flush=True)
    if number == 3 and sys.argv[2] == "end":
        break
    if number == 3 and sys.argv[2] == "raise":
        raise ValueError("over")
"""


@pytest.mark.parametrize("how", ["end", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_program_ends_with_its_loader_open(path, how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), how],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == (how == "raise")
    assert done.stdout.split() == ["64"] * 4
    assert ("ValueError: over" in done.stderr) == (how == "raise")
    assert "Fatal" not in done.stderr


@pytest.mark.slow
def test_a_program_ends_at_ctrl_c(path):
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), "never"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout.readline() == "64\n"
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=60)
    assert child.returncode in (1, -signal.SIGINT, 130)
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert "Fatal" not in told


def test_a_loader_in_a_forked_child_is_refused(buffer):
    with mr.ReplayLoader(buffer, 8) as loader:
        next(loader)
        for call in (lambda: next(loader), lambda: iter(loader)):
            assert "ForkedError: this ReplayLoader was made by pid" in in_child(call)
        assert in_child(loader.close) == "None"
        next(loader)


def workers(path, context, count=2):
    dataset = mr.ReplayDataset(path)
    draws = dataset.draws(mr.UniformSampler(seed=0), 8, num_batches=4)
    return DataLoader(
        dataset,
        sampler=draws,
        batch_size=None,
        num_workers=count,
        timeout=60,
        multiprocessing_context=multiprocessing.get_context(context),
    )


def test_workers_are_not_forked_while_a_loader_runs(buffer, path):
    with mr.ReplayLoader(buffer, 8) as loader:
        next(loader)
        with pytest.raises(ForkedError, match=r"multiprocessing_context='spawn'"):
            list(workers(path, "fork"))
        next(loader)
    # Closed, it is in nobody's way.
    assert len(list(workers(path, "fork"))) == 4


@pytest.mark.slow
def test_workers_may_be_spawned_while_a_loader_runs(buffer, path):
    with mr.ReplayLoader(buffer, 8) as loader:
        next(loader)
        assert len(list(workers(path, "spawn", 1))) == 4
        next(loader)


def test_what_is_read_ahead_is_bounded(path, monkeypatch):
    asked, gate = [], threading.Event()
    gather = GenerationReader.gather

    def slow(self, pending, *, skip):
        gate.wait(20)
        return gather(self, pending, skip=skip)

    with mr.ReplayBuffer.open(path) as buffer:
        reading = buffer.view
        drawn = reading.draw(mr.UniformSampler(0), 16)
        nbytes = reading.nbytes(drawn.draw)
        monkeypatch.setattr(GenerationReader, "gather", slow)
        monkeypatch.setattr(
            GenerationReader, "prefetch", lambda self, draw: asked.append(len(draw)) or 1
        )
        with mr.ReplayLoader(buffer, 16, prefetch=6, read_ahead_nbytes=3 * nbytes) as loader:
            found = iter(loader)
            work = loader._work
            while len(work._drawn) < 6:
                threading.Event().wait(0.001)
            with work._lock:
                assert len(asked) == 3
                assert work._budget.under_way(work._drawn) == 3 * nbytes
            gate.set()
            for _ in range(20):
                next(found)
                assert work._budget.under_way(work._drawn) <= 3 * nbytes
            assert len(asked) >= 20
    assert np.all(np.array(asked) == 16)


@pytest.mark.parametrize("limit", [0, 1])
def test_threads_that_cannot_start_are_reported_or_not_needed(path, monkeypatch, limit):
    begun, start = [], threading.Thread.start

    def few(self):
        if len(begun) >= limit:
            raise RuntimeError("can't start new thread")
        begun.append(self)
        start(self)

    with mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0)) as buffer:
        loader = mr.ReplayLoader(buffer, 8, num_threads=3)
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", few)
            if limit:
                assert len(next(loader)) == 8
                assert len(loader._workers) == 1
            else:
                told = "cannot start a thread that gathers batches: can't .*ulimit -u"
                with pytest.raises(FailedError, match=told):
                    next(loader)
        assert len(next(loader)) == 8
        loader.close()
