"""A DataBuffer has all calls of a ring of one environment, and alf's own semantics."""

import re

import numpy as np
import pytest
import torch

from mmreplay.adapters.alf import DataBuffer, RingBuffer
from tests.adapters.alf.support import Spec

LENGTH = 5
SPEC = {"n": Spec((), torch.int64), "x": Spec((2,))}


def refused(message, kind=AssertionError):
    return pytest.raises(kind, match=re.escape(message))


def batch(numbers):
    """Rows told apart by a number."""
    n = torch.as_tensor(list(numbers), dtype=torch.int64)
    return {"n": n, "x": n[:, None] + torch.tensor([0.25, 0.5])}


class Lists:
    """What alf's source says of each call, over one list.

    `_current_pos` counts rows that were stored, of a batch longer than the capacity
    its last ones only; `_current_size` those that are there. The earliest row is at
    position pos - size. `clear` alone is ours: positions go on.
    """

    def __init__(self, length):
        self.rows, self.pos, self.length = [], 0, length

    def add_batch(self, numbers):
        kept = list(numbers)[-self.length :]
        self.rows = (self.rows + kept)[-self.length :]
        self.pos += len(kept)

    def dequeue(self, n):
        taken, self.rows = self.rows[:n], self.rows[n:]
        return taken

    def remove_up_to(self, n):
        self.rows = self.rows[n:]

    def clear(self):
        self.rows = []


def compare(buffer, lists):
    size = len(lists.rows)
    assert (int(buffer.current_size), int(buffer.current_pos)) == (size, lists.pos)
    assert buffer.current_size.shape == buffer.current_pos.shape == ()
    assert int(buffer.total_size) == size
    assert buffer.num_environments == 1
    assert buffer.get_current_position().tolist() == [lists.pos]
    for ids in (None, torch.tensor([0])):
        assert buffer.get_earliest_position(ids).tolist() == [lists.pos - size]
        assert buffer.has_space(ids) == (size < lists.length)
        for n in range(lists.length + 2):
            assert buffer.has_data(ids, n) == (size >= n)
    assert buffer.is_full() == buffer.is_full == (size == lists.length)
    assert bool(buffer.is_full) is (size == lists.length)
    found = buffer.get_all()
    assert found["n"].tolist() == lists.rows
    assert torch.equal(found["x"], batch(lists.rows)["x"])
    if size:
        ages = torch.arange(size).flip(0)
        assert buffer.get_batch_by_indices(ages)["n"].tolist() == lists.rows[::-1]
        assert set(buffer.get_batch(64)["n"].tolist()) <= set(lists.rows)


@pytest.mark.parametrize("seed", range(3))
def test_any_calls_leave_the_rows_that_alf_would(seed):
    rng = np.random.default_rng(seed)
    buffer, lists = DataBuffer(SPEC, LENGTH), Lists(LENGTH)
    number = 0
    for _ in range(120):
        what, n = rng.integers(6), int(rng.integers(0, 2 * LENGTH + 2))
        if what == 0:
            buffer.add_batch(batch(range(number, number + n)))
            lists.add_batch(range(number, number + n))
            number += n
        elif what < 3:
            ids = None if what == 1 else torch.tensor([0])
            assert buffer.enqueue(batch([number]), ids) is True
            lists.add_batch([number])
            number += 1
        elif what == 3:
            n = min(n, LENGTH)
            if 1 <= n <= len(lists.rows):
                taken = buffer.dequeue(n=n)
                assert taken["x"].shape == (1, n, 2)
                assert taken["n"].tolist() == [lists.dequeue(n)]
            else:
                with pytest.raises(AssertionError):
                    buffer.dequeue(n=n)
        elif what == 4:
            buffer.remove_up_to(n)
            lists.remove_up_to(n)
        elif rng.random() < 0.3:
            buffer.clear(None if rng.random() < 0.5 else torch.tensor([0]))
            lists.clear()
        compare(buffer, lists)


def test_it_is_a_ring_of_one_environment_that_nothing_waits_for():
    buffer = DataBuffer(SPEC, LENGTH, name="mine")
    assert isinstance(buffer, RingBuffer)
    assert (buffer._name, buffer.circular(LENGTH + 1)) == ("mine", 1)
    assert buffer.check_convert_env_ids(None).tolist() == [0]
    # Only what waits looks at it, and nothing may wait here.
    buffer.stop()
    assert buffer.enqueue(batch([1])) is True
    for call in (buffer.enqueue, lambda _, **options: buffer.dequeue(**options)):
        with refused("a buffer that other threads or processes may"):
            call(batch([1]), blocking=True)
    buffer.revive()
    assert buffer.dequeue()["n"].tolist() == [[1]]


def test_leaves_of_one_value_are_repeated_and_of_other_counts_refused():
    buffer = DataBuffer(SPEC, LENGTH)
    numbers = torch.arange(12)
    buffer.add_batch({"n": numbers, "x": numbers[:, None].float()})
    assert buffer.get_all()["x"].tolist() == [[n, n] for n in range(7, 12)]
    # Both are as long as the buffer once their last rows are taken.
    for other in (9, 1, 0):
        short = {"n": numbers, "x": numbers[:other, None].float()}
        with refused(f"'step/x': [{other}]"):
            buffer.add_batch(short)
    with refused("of rows, got {'step/n': [], 'step/x': [12]}."):
        buffer.add_batch({"n": numbers[0], "x": numbers[:, None].float()})
    assert int(buffer.current_pos) == LENGTH


def test_a_resumed_buffer_goes_on_where_it_was(tmp_path):
    buffer = DataBuffer(SPEC, LENGTH, path=tmp_path / "b")
    buffer.add_batch(batch(range(7)))
    buffer.dequeue(n=2)
    buffer.close()
    again, lists = (DataBuffer(SPEC, LENGTH, path=tmp_path / "b", resume=True), Lists(LENGTH))
    lists.add_batch(range(7))
    lists.dequeue(2)
    compare(again, lists)
