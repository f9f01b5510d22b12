"""What arguments of alf's ReplayBuffer do that no other test turns."""

import numpy as np
import pytest
import torch

from mmreplay.adapters.alf import DataBuffer, ReplayBuffer, RingBuffer, SumSegmentTree
from tests.adapters.alf.support import FIRST, MID, SPEC, Spec, rows

ROWS = 10
BF16 = torch.bfloat16


def filled(**options):
    """A full ring of one environment whose positions are 0 to 9."""
    buffer = ReplayBuffer(SPEC, 1, ROWS, **options)
    for number in range(ROWS):
        buffer.add_batch(rows([FIRST if number == 0 else MID], [1.0], [float(number)]))
    return buffer


def test_bfloat16_is_stored_by_value_and_other_numbers_become_bfloat16():
    ring = DataBuffer({"f": torch.zeros(2), "b": torch.zeros((), dtype=BF16)}, 5)
    ring.add_batch({"f": torch.full((2, 2), 1.5, dtype=BF16), "b": torch.ones(2)})
    three = torch.full((1,), 3, dtype=torch.uint16)
    ring.add_batch({"f": -torch.full((1, 2), 2.5, dtype=BF16), "b": three})
    found = ring.get_all()
    assert found["f"].tolist() == [[1.5, 1.5], [1.5, 1.5], [-2.5, -2.5]]
    assert found["b"].dtype == BF16
    assert found["b"].tolist() == [1, 1, 3]
    whole = DataBuffer(torch.zeros(1, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match="float32"):
        whole.add_batch(torch.ones(2, 1, dtype=BF16))


def test_numbers_are_no_bits_of_bfloat16():
    ring = RingBuffer({"f": Spec(), "b": Spec((), BF16)}, 2, 5)
    for _ in range(5):
        three = torch.full((2,), 3, dtype=torch.uint16)
        ring.enqueue({"f": torch.ones(2), "b": three})
    assert ring.dequeue(n=5)["b"].tolist() == [[3] * 5] * 2


def test_priorities_and_environments_may_be_bfloat16():
    buffer = filled(prioritized_sampling=True)
    where = torch.zeros(1, dtype=BF16), torch.full((1,), 3, dtype=BF16)
    buffer.update_priority(*where, torch.full((1,), 2.0, dtype=BF16))
    assert float(buffer.initial_priority) == 2
    tree = SumSegmentTree(4)
    tree[torch.arange(2)] = torch.tensor([1.5, 2], dtype=BF16)
    assert float(tree.summary()) == 3.5


def test_keys_that_are_written_alike_are_refused():
    with pytest.raises(ValueError, match="data_spec: two leaves are named 'step/1',"):
        DataBuffer({1: torch.zeros(2), "1": torch.zeros(2)}, 5)


@pytest.mark.parametrize("replacement", [False, True])
def test_draws_with_replacement_are_each_for_itself(replacement):
    buffer = filled(with_replacement=replacement)
    counts = np.zeros((200, ROWS))
    for batch in counts:
        _, info = buffer.get_batch(ROWS, 1)
        np.add.at(batch, info.positions.numpy(), 1)
    # Spread, each of ten steps is in a batch of ten once; else 1 - 0.9**10 of them.
    assert (counts == 1).all() == (not replacement)
    if replacement:
        # 2,000 draws; the deviation of a share of 0.65 is 0.011, and of a count 13.
        assert abs((counts > 0).mean() - (1 - 0.9**10)) < 0.055
        assert np.abs(counts.sum(0) - 200).max() < 65


@pytest.mark.parametrize("initial", [0.5, 3.0])
def test_new_rows_enter_at_the_initial_priority_or_the_highest(initial):
    buffer = filled(prioritized_sampling=True, initial_priority=initial)
    assert float(buffer.initial_priority) == initial
    every = torch.arange(ROWS)
    buffer.update_priority(torch.zeros_like(every), every, torch.ones(ROWS))
    highest = max(initial, 1.0)
    assert float(buffer.initial_priority) == highest
    buffer.add_batch(rows([MID], [1.0], [10.0]))
    _, info = buffer.get_batch(1000 * (ROWS - 1), 1)
    total = ROWS - 1 + highest
    share = float((info.positions == ROWS).double().mean())
    # Draws are stratified: a share is exact but for one draw at each end.
    assert abs(share - highest / total) < 2 / 9000


def test_episodes_are_stored_by_default_where_frames_are_ignored():
    zeros = torch.zeros(1, dtype=torch.int64)
    kept = filled(num_earliest_frames_ignored=2)
    assert kept.get_episode_begin_position(zeros + 5, zeros).tolist() == [0]
    for options in ({}, {"num_earliest_frames_ignored": 2, "keep_episodic_info": False}):
        with pytest.raises(AssertionError, match="keep_episodic_info"):
            filled(**options).get_episode_begin_position(zeros + 5, zeros)


def test_all_arguments_may_be_positional(tmp_path):
    buffer = ReplayBuffer(
        SPEC,
        1,
        ROWS,
        1,
        True,
        2.0,
        3,
        0.5,
        True,
        "cpu",
        True,
        True,
        True,
        -3.0,
        0.5,
        (-1.0, 1.0),
        True,
        "mine",
        path=tmp_path / "ring",
    )
    for number in range(ROWS):
        buffer.add_batch(rows([FIRST if number == 0 else MID], [1.0], [9.0]))
    batch, info = buffer.get_batch(8, 2)
    assert batch.reward.shape == (8, 2)
    # One oldest row starts no window, and half a batch is of the newest three starts.
    assert int(info.positions.min()) >= 1
    assert int(info.positions[:4].min()) >= 6
    assert (info.discounted_return == -3).all()
    assert float(buffer.initial_priority) == 2
    assert "mine" in repr(buffer)
    assert buffer.enqueue(rows([MID], [1.0], [0.0]), None, False)
    buffer.close()
