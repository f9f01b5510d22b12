"""A loader that is closed, or asked, in the middle of what it does."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.loader import replay_loader
from tests.loader.support import fill

CLOSES = """
import faulthandler, signal, sys, threading
import mmreplay as mr
path, priorities = sys.argv[1], sys.argv[2] == "priorities"
faulthandler.dump_traceback_later(40, exit=True)
sampler = mr.PrioritizedSampler(seed=0) if priorities else mr.UniformSampler(seed=0)
buffer = mr.ReplayBuffer.open(path, sampler=sampler)
count = 0


class Ended(Exception):
    pass


def end(*_):
    state = loader.state_dict()
    loader.close()
    raise Ended


signal.signal(signal.SIGALRM, end)
for number in range(20):
    loader = mr.ReplayLoader(buffer, 16)
    try:
        next(loader)
        signal.setitimer(signal.ITIMER_REAL, 0.003 + number * 37 % 11 * 0.001)
        while True:
            batch = next(loader)
            if priorities:
                loader.update_priorities(batch, batch.weights)
    except Ended:
        count += 1
for _ in range(400):
    if threading.active_count() == 1:
        break
    threading.Event().wait(0.01)
print(count, threading.active_count())
"""


@pytest.fixture
def path(tmp_path):
    """A buffer of numbered steps."""
    fill(tmp_path / "b")
    return tmp_path / "b"


@pytest.mark.parametrize("kind", ["uniform", "priorities"])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_signals_handler_may_close_it_in_the_middle_of_a_draw(path, kind):
    found = subprocess.run(
        [sys.executable, "-c", CLOSES, path, kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # As often as it was told to, and nothing is left of its threads.
    assert found.stdout.split() == ["20", "1"], found.stderr[-3000:]


def test_a_signals_handler_is_given_the_state_of_the_next_batch(path):
    seen, taken = [], 0

    def look(*_):
        # Beneath `next` the batch may have been drawn, made or taken out already.
        seen.append((loader.state_dict()["sampler"]["step"], taken))

    before = signal.signal(signal.SIGUSR1, look)
    try:
        with (
            mr.ReplayBuffer.open(path, sampler=mr.UniformSampler(seed=0)) as buffer,
            mr.ReplayLoader(buffer, 16) as loader,
        ):
            next(loader)
            taken = 1
            stopped = threading.Event()

            def strike():
                while not stopped.wait(0.001):
                    os.kill(os.getpid(), signal.SIGUSR1)

            striking = threading.Thread(target=strike)
            striking.start()
            while len(seen) < 50:
                next(loader)
                taken += 1
            stopped.set()
            striking.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all(step in (count, count + 1) for step, count in seen), seen


def test_it_may_be_closed_by_a_collector_in_one_of_its_threads(path, monkeypatch):
    monkeypatch.setattr(replay_loader, "CLOSE_S", 3600.0)
    ended = []

    class Collecting(mr.UniformSampler):
        def draw(self, view, batch_size):
            found = super().draw(view, batch_size)
            if threading.current_thread() is not threading.main_thread():
                begun.wait(20)
                gc.collect()
            return found

    class Learner:
        def __init__(self):
            self.itself = self
            self.loader = mr.ReplayLoader(buffer, 16, prefetch=4, num_threads=2)
            iter(self.loader)

        def __del__(self):
            self.loader.close()
            ended.append(threading.current_thread().name)

    begun = threading.Event()
    with mr.ReplayBuffer.open(path, sampler=Collecting(seed=0)) as buffer:
        gc.disable()
        try:
            Learner()
            begun.set()
            for _ in range(6000):
                if ended and not _loading():
                    break
                threading.Event().wait(0.01)
        finally:
            gc.enable()
        assert ended == ["mmreplay-load"]
        assert not _loading()
        # The sampler is where the learner was: before everything.
        assert buffer.sampler.state_dict()["step"] == 0


def _loading():
    return [t for t in threading.enumerate() if t.name == "mmreplay-load"]


def test_a_state_is_not_loaded_in_the_middle_of_a_draw(path):
    told = []

    class Loading(mr.UniformSampler):
        def draw(self, view, batch_size):
            if not told:
                told.append(None)
                try:
                    loader.load_state_dict(state)
                except FailedError as error:
                    told.append(str(error))
            return super().draw(view, batch_size)

    with (
        mr.ReplayBuffer.open(path, sampler=Loading(seed=0)) as buffer,
        mr.ReplayLoader(buffer, 16) as loader,
    ):
        state = loader.state_dict()
        assert len(next(loader)) == 16
    assert "Load the state between two batches" in told[1]


def test_two_threads_are_not_given_batches_at_once(path):
    gate, inside = threading.Event(), threading.Event()

    def slow(fields):
        inside.set()
        gate.wait(20)
        return fields

    with (
        mr.ReplayBuffer.open(path, transforms=[mr.Apply(slow)]) as buffer,
        mr.ReplayLoader(buffer, 16) as loader,
    ):
        found = []
        other = threading.Thread(target=lambda: found.append(next(loader)))
        other.start()
        inside.wait(20)
        while not loader._work._in_next:
            threading.Event().wait(0.001)
        with pytest.raises(FailedError, match="ReplayLoader: another call of next is in progress"):
            next(loader)
        gate.set()
        other.join()
        # The one that was there goes on, and afterwards this one may.
        assert len(found[0]) == len(next(loader)) == 16


def test_closed_while_it_begins_it_does_not_run(path):
    for number in range(60):
        with mr.ReplayBuffer.open(path) as buffer:
            loader = mr.ReplayLoader(buffer, 16, num_threads=2)

            def close(loader=loader, wait_s=number * 2e-5):
                time.sleep(wait_s)
                loader.close()

            closing = threading.Thread(target=close)
            closing.start()
            with pytest.raises(FailedError, match="closed"):
                deque(loader, 0)
            closing.join()
            assert not _loading()


def test_two_loaders_do_not_share_an_epoch(path):
    with mr.ReplayBuffer.open(path, sampler=mr.ShuffledSampler(seed=0)) as buffer:
        with mr.ReplayLoader(buffer, 16) as one, mr.ReplayLoader(buffer, 16) as two:
            first = len(next(one))
            with pytest.raises(FailedError, match="another loader iterates over"):
                next(two)
            rows = first + sum(len(batch) for batch in one)
            assert rows == len(set(_steps(buffer)))
            # An epoch that is over is in nobody's way, nor is a loader that was closed.
            assert sum(len(batch) for batch in two) == rows
            next(iter(one))
        with mr.ReplayLoader(buffer, 16) as three:
            next(three)


def _steps(buffer):
    view = buffer.view
    return [
        (env, p)
        for env in range(buffer.num_envs)
        for p in range(int(view.starts.first[env]), int(view.starts.stop[env]))
        if view.legal(*_one(env, p))[0]
    ]


def _one(env, position):
    return np.array([env]), np.array([position])
