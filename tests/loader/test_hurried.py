"""For a learner that would wait, one thread more gathers: the same batches."""

import threading
from collections import Counter
from time import sleep

import pytest
import torch

import mmreplay as mr
from mmreplay.loader import prefetch
from mmreplay.loader import prefetch as pace
from tests.loader.support import fill
from tests.loader.test_loader import SAMPLERS, TRANSFORMS, endless, opened, same


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hurried") / "b"
    fill(path)
    return path


@pytest.fixture
def together(monkeypatch):
    """How many threads gathered at once, and how often; each waits for another."""
    counted, meeting = Counter(), threading.Barrier(2)
    gathering, lock = [], threading.Lock()
    gather = prefetch.Prefetcher._gather

    def slow(self, entry, *caught):
        with lock:
            gathering.append(entry)
            counted[len(gathering)] += 1
        try:
            meeting.wait(0.05)
        except threading.BrokenBarrierError:
            meeting.reset()
        gather(self, entry, *caught)
        with lock:
            gathering.remove(entry)

    monkeypatch.setattr(prefetch, "SMALL_NBYTES", 0)
    monkeypatch.setattr(prefetch.Prefetcher, "_gather", slow)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    return counted


@pytest.fixture
def hurry(monkeypatch):
    """Whoever comes back is in a hurry."""
    monkeypatch.setattr(pace, "HURRIED", 1e9)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_those_of_sample_in_their_order(path, kind, together):
    alone, buffer = (opened(path, SAMPLERS[kind]()) for _ in range(2))
    with alone, buffer, mr.ReplayLoader(buffer, 16, prefetch=4) as loader:
        batches = endless(loader)
        for number in range(2_000):
            same(next(batches), alone.sample(16))
            if number >= 30 and together[2] > 3:
                break
    assert together[2] > 3
    assert set(together) == {1, 2}


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.sliced(1)
def test_of_transforms_that_call_no_function_two_run_at_once(path, kind, together):
    transforms = TRANSFORMS[kind]
    calls = any(isinstance(each, mr.Apply) for each in transforms)
    buffer = opened(path, transforms=transforms)
    with buffer, mr.ReplayLoader(buffer, 16, prefetch=4) as loader:
        for number in range(20 if calls else 2_000):
            next(loader)
            if number >= 20 and together[2]:
                break
    assert (together[2] > 0) != calls


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("kind", ["apply", "own", "concat"])
@pytest.mark.sliced(1)
def test_a_function_of_the_users_is_called_by_one_thread(path, kind, together):
    class Own:
        def __init__(self):
            self.bind = mr.Apply(dict).bind

    transforms = [mr.Apply(dict)] if kind in ("apply", "concat") else [Own()]
    buffer = opened(path, transforms=transforms)
    if kind == "concat":
        buffer = mr.concat([buffer, opened(path)])
    with mr.ReplayLoader(buffer, 16, prefetch=4) as loader:
        for _ in range(10):
            next(loader)
    buffer.close()
    assert set(together) == {1}


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.sliced(1)
def test_a_number_that_was_given_holds(path, num_threads, together):
    buffer, options = opened(path), {"prefetch": 8, "num_threads": num_threads}
    with buffer, mr.ReplayLoader(buffer, 16, **options) as loader:
        for _ in range(20):
            next(loader)
    assert max(together) <= num_threads


def test_for_a_learner_that_takes_its_time_one_thread_gathers(path, together, monkeypatch):
    now = 0.0
    monkeypatch.setattr(pace, "perf_counter", lambda: now)
    with opened(path) as buffer, mr.ReplayLoader(buffer, 16, prefetch=4) as loader:
        for _ in range(10):
            next(loader)
            sleep(0.03)
            now += 0.03
    assert set(together) == {1}


@pytest.mark.parametrize("cores", [1, 2])
def test_one_core_is_not_shared(path, monkeypatch, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    with opened(path) as buffer, mr.ReplayLoader(buffer, 16) as loader:
        next(loader)
        assert len(loader._workers) == cores


@pytest.mark.parametrize("quick", [0.0, 60.0])
def test_batches_can_be_learned_from_whoever_made_them(path, monkeypatch, quick):
    """Also those that a learner made that only looked at them."""
    monkeypatch.setattr(pace, "QUICK_S", quick)
    with opened(path) as buffer, mr.ReplayLoader(buffer, 16) as loader:
        for _ in range(30):
            with torch.inference_mode():
                batch = next(loader)
            weight = torch.ones((), requires_grad=True)
            (weight * batch["action"]).sum().backward()
            assert torch.isfinite(weight.grad)
