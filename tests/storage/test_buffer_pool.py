"""Arrays come back only when the last view of them is gone."""

import threading
from collections import deque

import numpy as np
import pytest

from mmreplay.storage import gather
from mmreplay.storage.gather import MAX_ARRAYS, MAX_NBYTES, MAX_SHAPES, BufferPool

UINT8 = np.dtype(np.uint8)


@pytest.mark.parametrize(
    "view_of", [lambda a: a, lambda a: a[2:5], lambda a: memoryview(a), lambda a: a.T]
)
def test_an_array_that_is_seen_by_somebody_is_not_handed_out_again(view_of):
    recycler = BufferPool()
    held = [view_of(recycler.empty((8, 3), UINT8)) for _ in range(3)]
    for view in held:
        np.asarray(view)[...] = 7
    for _ in range(10):
        recycler.empty((8, 3), UINT8)[...] = 0
    assert all((np.asarray(view) == 7).all() for view in held)


def test_a_tensor_counts_as_somebody():
    torch = pytest.importorskip("torch")
    recycler = BufferPool()
    tensor = torch.from_numpy(recycler.empty((8,), UINT8))[1:]
    tensor[...] = 7
    recycler.empty((8,), UINT8)[...] = 0
    assert (tensor == 7).all()


def test_a_dropped_array_is_used_again():
    recycler = BufferPool()
    first = recycler.empty((8,), UINT8)
    address = first.ctypes.data
    del first
    assert recycler.empty((8,), UINT8).ctypes.data == address


def test_the_pool_is_bounded():
    recycler = BufferPool()
    for count in range(1, 40):
        held = [recycler.empty((count,), UINT8) for _ in range(9)]
        assert len({id(array) for array in held}) == 9
    kept = [array for pool in recycler._pools.values() for array in pool]
    assert len(kept) <= MAX_SHAPES * MAX_ARRAYS
    recycler.empty((MAX_NBYTES + 1,), UINT8)
    assert all(array.nbytes <= MAX_NBYTES for pool in recycler._pools.values() for array in pool)


def test_shapes_that_never_come_again_do_not_add_up(monkeypatch, rng):
    monkeypatch.setattr(gather, "LITTLE_NBYTES", 1000)
    recycler, most = BufferPool(5, 256, 1 << 40), 0
    held: deque[np.ndarray] = deque(maxlen=3)
    for count in rng.integers(100, 2000, 400).tolist():
        fresh = recycler.empty((count,), UINT8)
        most = max(most, fresh.nbytes + sum(array.nbytes for array in held))
        held.append(fresh)
        assert recycler.nbytes <= max(1000, 2 * most)
    # What is in use is kept, and what one shape needs is not let go of.
    assert recycler.nbytes >= sum(array.nbytes for array in held)
    addresses = set()
    for _ in range(20):
        held.append(recycler.empty((5000,), UINT8))
        addresses.add(held[-1].ctypes.data)
    assert len(addresses) <= 4


def test_another_pool_may_serve_a_thread():
    made = []

    def make(shape, dtype):
        made.append(shape)
        return np.empty(shape, dtype)

    asked, other = BufferPool(), BufferPool(max_arrays=2, make=make)
    with other:
        held = [asked.empty((8,), UINT8) for _ in range(3)]
        assert other.nbytes == 2 * 8
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(asked.empty((8,), UINT8)))
        thread.start()
        thread.join()
    assert made == [(8,)] * 3
    assert asked.nbytes == 8
    held.append(asked.empty((8,), UINT8))
    assert len(made) == 3
    other.clear()
    assert other.nbytes == 0
    assert [array.shape for array in held] == [(8,)] * 4
