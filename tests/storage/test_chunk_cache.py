"""What is kept counts once, however many threads put it."""

import sys
import threading

import numpy as np
import pytest

from mmreplay.storage.zarr.chunk_cache import ChunkCache


def test_the_oldest_go_first_and_the_newest_stays():
    kept = ChunkCache(100)
    for key in range(5):
        kept.put(key, np.zeros(40, np.uint8))
    assert [kept.get(key) is not None for key in range(5)] == [0, 0, 0, 1, 1]
    kept.put("large", np.zeros(1000, np.uint8))
    assert kept.nbytes == 1000
    assert kept.get(4) is None


def test_what_is_put_twice_counts_once():
    kept = ChunkCache(100)
    for _ in range(3):
        kept.put("same", np.zeros(40, np.uint8))
    kept.put("other", np.zeros(40, np.uint8))
    assert kept.get("same") is not None
    assert kept.nbytes == 80


@pytest.fixture
def hasty():
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_leave_the_count_right(hasty):
    kept = ChunkCache(4000)

    def put(seed):
        for key in np.random.default_rng(seed).integers(0, 200, 5000).tolist():
            if kept.get(key) is None:
                kept.put(key, np.zeros(40, np.uint8))

    # Of each seed two, which unpack the same.
    threads = [threading.Thread(target=put, args=(n // 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.nbytes == sum(each.nbytes for each in kept._arrays.values())
    assert kept.nbytes == 4000


def test_a_lock_that_a_fork_took_along_keeps_nobody():
    kept = ChunkCache(100)
    with kept._lock:
        kept.put("a", np.zeros(40, np.uint8))
    assert kept.get("a") is None
    assert kept.nbytes == 0
