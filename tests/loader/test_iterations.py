"""Workers of one iteration agree on its number, whichever of them were ended before."""

import copy
import itertools
import multiprocessing
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, _utils

import mmreplay as mr
from mmreplay.loader import iterations
from mmreplay.loader.iterations import MAX_BEGUN, Iterations
from tests.contracts.sampler import steps_of
from tests.loader.support import fill, legal
from tests.loader.test_workers import options

FORK = pytest.param("fork")
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)


class Processes:
    """Workers that are played by this process."""

    def __init__(self, counted, monkeypatch):
        self._counted, self._made = counted, itertools.count(1)
        self._now = None
        told = SimpleNamespace(current_process=lambda: self._now.process)
        monkeypatch.setattr(iterations, "multiprocessing", told)
        monkeypatch.setattr(iterations, "get_worker_info", lambda: self._now.info)

    def workers(self, seed, count, others=0):
        """A DataLoader's; another thread starts processes between them."""
        found = []
        for worker in range(count):
            made = next(self._made)
            for _ in range(others):
                next(self._made)
            found.append(
                SimpleNamespace(
                    info=SimpleNamespace(id=worker, num_workers=count, seed=seed + worker),
                    process=SimpleNamespace(_identity=(made,)),
                    counted=copy.copy(self._counted),
                )
            )
        return found

    def begins(self, worker):
        self._now = worker
        return worker.counted.begin()


@pytest.fixture
def counted():
    return Iterations()


@pytest.fixture
def processes(counted, monkeypatch):
    return Processes(counted, monkeypatch)


@pytest.mark.parametrize("alike", [False, True], ids=["seeds", "one_seed"])
@pytest.mark.parametrize("persistent", [False, True])
def test_all_that_begin_get_the_number_whoever_was_ended(processes, rng, alike, persistent):
    kept = processes.workers(77, 3)
    for number in range(3 * MAX_BEGUN):
        if persistent:
            # Resumed ones all begin, in any order.
            begun = [kept[at] for at in rng.permutation(3)]
        else:
            seed = 5 if alike else int(rng.integers(1 << 62))
            begun = rng.permutation(processes.workers(seed, 3))[: rng.integers(1, 4)]
        assert [processes.begins(worker) for worker in begun] == [number] * len(begun)


def test_persistent_workers_may_lag(processes):
    fast, slow = processes.workers(77, 2)
    assert [processes.begins(fast) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [processes.begins(slow) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    assert processes.begins(fast) == 5


def test_processes_of_others_in_between_change_nothing(processes):
    for number in range(4):
        workers = processes.workers(5, 3)
        late = processes.workers(6, 2, others=1)
        assert [processes.begins(worker) for worker in workers] == [2 * number] * 3
        assert [processes.begins(worker) for worker in late] == [2 * number + 1] * 2


def test_a_worker_that_comes_late_is_of_the_iteration_that_it_was_made_for(counted, processes):
    early, late = processes.workers(1, 2)
    assert processes.begins(early) == 0
    counted.choose(7)
    others = processes.workers(2, 2)
    assert [processes.begins(worker) for worker in others] == [7, 7]
    assert processes.begins(late) == 0
    assert counted.last == 7
    assert [processes.begins(worker) for worker in processes.workers(3, 2)] == [8, 8]


def test_a_copy_counts_by_itself_and_for_its_workers(counted):
    assert counted.begin() == 0
    again = pickle.loads(pickle.dumps(counted))
    assert [again.begin(), again.begin()] == [1, 2]
    assert again._numbers.is_shared()
    assert again._begun.is_shared()
    assert counted.begin() == 1


class Blocked:
    """A worker_init_fn in which a worker stays until it is ended, if it is told to."""

    def __init__(self, context):
        context = multiprocessing.get_context(context)
        self.worker, self._never = context.Value("i", -1), context.Event()

    def __call__(self, worker):
        if worker == self.worker.value:
            self._never.wait()


@pytest.mark.parametrize("context", [FORK, SPAWN])
@pytest.mark.parametrize("alike", [False, True], ids=["seeds", "one_seed"])
@pytest.mark.slow
def test_an_epoch_is_whole_where_a_worker_never_began_the_one_before(
    tmp_path, monkeypatch, context, alike
):
    # How long torch waits for a worker before it ends it, 5 s.
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    path, blocked = tmp_path / "b", Blocked(context)
    fill(path)
    stream = mr.ReplayStream(path, mr.ShuffledSampler(seed=0), 8)
    alone = mr.ReplayStream(path, mr.ShuffledSampler(seed=0), 8)
    loader = DataLoader(stream, batch_size=None, worker_init_fn=blocked, **options(2, context))
    with mr.ReplayBuffer.open(path) as buffer:
        every = legal(buffer)
    for number in range(4):
        if alike:
            torch.manual_seed(0)
        expected = [steps_of(batch) for batch in alone]
        if number == 0:
            blocked.worker.value = 1
            assert steps_of(next(iter(loader))) == expected[0]
            assert stream.state_after(1)["epoch"] == 0
            blocked.worker.value = -1
            continue
        found = [steps_of(batch) for batch in loader]
        assert found == expected
        assert sorted(itertools.chain(*found)) == every
        assert stream.state_after(2)["epoch"] == number


def test_dataloaders_of_any_numbers_of_workers_take_turns(tmp_path):
    fill(tmp_path / "b")
    stream, alone = (
        mr.ReplayStream(tmp_path / "b", mr.ShuffledSampler(seed=0), 32) for _ in range(2)
    )
    two = DataLoader(stream, batch_size=None, persistent_workers=True, **options(2, "fork"))
    for loader in (two, DataLoader(stream, batch_size=None), two, two):
        assert [steps_of(b) for b in loader] == [steps_of(b) for b in alone]
    one = DataLoader(stream, batch_size=None, **options(1, "fork"))
    assert [steps_of(b) for b in one] == [steps_of(b) for b in alone]


def test_a_state_is_of_the_iteration_begun_whichever_is_chosen_next(tmp_path):
    fill(tmp_path / "b")
    stream = mr.ReplayStream(tmp_path / "b", mr.UniformSampler(seed=0), 8, 5)
    next(iter(stream))
    stream.set_epoch(6)
    assert stream.state_after(1)["epoch"] == 0
    next(iter(stream))
    assert stream.state_after(1)["epoch"] == 6
