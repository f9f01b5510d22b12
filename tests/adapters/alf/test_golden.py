"""What alf itself gives: values that were read off the original."""

import pytest
import torch

from mmreplay.adapters.alf import (
    MaxSegmentTree,
    MinSegmentTree,
    ReplayBuffer,
    SegmentTree,
    SumSegmentTree,
)
from tests.adapters.alf.support import MID, SPEC, counted, episodic, returns, rows_of, story
from tests.adapters.alf.support import rows as make_rows

UNKNOWN = -7.0

STORIES = {
    "two episodes": (
        10,
        "F1/0 M1/1 L0/2 F1/10 M1/20 M1/30 L0/40",
        [2, 2, UNKNOWN, 45, 50, 40, UNKNOWN],
        [0, 0, 0, 3, 3, 3, 3],
        [2, 1, 0, 3, 2, 1, 0],
        [0, 0, 2, 3, 3, 3, 6],
    ),
    "truncated": (
        10,
        "F1/0 M1/1 L1/2 F1/3",
        [UNKNOWN] * 4,
        [0, 0, 0, 3],
        [2, 1, 0, 0],
        [0, 0, 0, 3],
    ),
    # alf gives row 2 the return 2; the product of discounts is 0.
    "a life lost": (
        10,
        "F1/0 M1/1 M0/2 M1/3 L0/4",
        [2, 2, 0, 4, UNKNOWN],
        [0] * 5,
        [4, 3, 2, 1, 0],
        [0, 0, 2, 2, 4],
    ),
    "headless": (
        4,
        "F1/0 M1/1 M1/2 M1/3 M1/4 L0/5",
        [6.25, 6.5, 5, UNKNOWN],
        [0] * 4,
        [3, 2, 1, 0],
        [0, 0, 0, 5],
    ),
    # alf gives 1.575, 1.35 and .9; discounts are multiplied here.
    "fractional": (
        10,
        "F.9/0 M.9/1 M.9/1 L0/1",
        [1.48725, 1.305, 0.9, UNKNOWN],
        [0] * 4,
        [3, 2, 1, 0],
        [0, 0, 0, 3],
    ),
    "unfinished": (10, "F1/0 M1/1 M1/2", [UNKNOWN] * 3, [0] * 3, [2, 1, 0], [0] * 3),
}


@pytest.mark.parametrize("name", STORIES)
def test_episodes_and_returns_are_reported_as_alf_reports_them(name):
    length, text, wanted, begins, left, zeros = STORIES[name]
    buffer = episodic(length=length)
    story(buffer, text)
    env_ids, positions = rows_of(buffer)
    assert returns(buffer) == pytest.approx(wanted)
    found = buffer.get_episode_begin_position(positions, env_ids)
    assert found.tolist() == begins
    assert buffer.steps_to_episode_end(positions, env_ids).tolist() == left
    found = buffer.get_disc_0_begin_position(positions, env_ids)
    assert (found.tolist(), found.dtype) == (zeros, torch.int64)


def test_rewards_are_clipped_in_returns_alone():
    buffer = episodic(reward_clip=(-1, 1))
    story(buffer, "F1/0 M1/5 L0/-5")
    assert returns(buffer) == [0.5, -1, UNKNOWN]
    assert buffer.gather_all()[0].reward.tolist() == [[0, 5, -5]]


def filled(leaves):
    tree = SumSegmentTree(len(leaves))
    tree[torch.arange(len(leaves))] = torch.tensor(leaves)
    return tree


@pytest.mark.parametrize(
    ("leaves", "thresholds", "indices"),
    [
        (
            [1.0, 0, 2, 0, 3, 4, 0],
            [0, 0.99, 1, 2.99, 3, 5.99, 6, 9.99, 10],
            [0, 0, 2, 2, 4, 4, 5, 5, 5],
        ),
        ([0.0, 1, 0, 2, 0], [0, 0.5, 1, 2.9, 3], [1, 1, 3, 3, 3]),
    ],
)
def test_sums_fall_on_the_leaves_that_alf_finds(leaves, thresholds, indices):
    tree = filled(leaves)
    assert tree.find_sum_bound(torch.tensor(thresholds)).tolist() == indices
    assert (float(tree.summary()), tree.nnz) == (sum(leaves), sum(x > 0 for x in leaves))


def test_the_sum_itself_falls_on_the_last_leaf_that_is_not_zero():
    tree = filled([0.1] * 9 + [0])
    assert tree.find_sum_bound(tree.summary()).tolist() == 8


def test_leaves_are_laid_out_as_in_alfs_checkpoints():
    tree = filled([0.0, 1, 0, 2, 0])
    state = tree.state_dict()
    assert state["_values"].tolist() == [0, 3, 1, 2, 1, 0, 2, 0, 0, 1]
    other = SumSegmentTree(5)
    other.load_state_dict(state)
    assert other[torch.arange(5)].tolist() == [0, 1, 0, 2, 0]
    assert other.nnz == 2


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 9])
def test_a_state_of_any_capacity_is_read_as_it_was_written(capacity):
    leaves = torch.arange(1.0, capacity + 1)
    for kind in (SumSegmentTree, MinSegmentTree, MaxSegmentTree):
        tree, other = kind(capacity), kind(capacity)
        tree[torch.arange(capacity)] = leaves
        other.load_state_dict(tree.state_dict())
        assert other[torch.arange(capacity)].tolist() == leaves.tolist()
        assert float(tree.state_dict()["_values"][1]) == float(tree.summary())


def test_leaves_that_were_never_set_are_zero_in_minima_and_maxima():
    least, most = MinSegmentTree(3), SegmentTree(3, torch.max)
    least[torch.tensor([0, 1])] = torch.tensor([4.0, 5.0])
    most[torch.tensor([0])] = torch.tensor([4.0])
    assert (float(least.summary()), float(most.summary())) == (0, 4)
    least[torch.tensor([2])] = torch.tensor([6.0])
    assert float(least.summary()) == 4


def frequencies(buffer, size):
    _, info = buffer.get_batch(size, 1)
    pairs = list(zip(info.env_ids.tolist(), info.positions.tolist(), strict=True))
    weights = dict(zip(pairs, info.importance_weights.tolist(), strict=True))
    return {pair: (pairs.count(pair), weights[pair]) for pair in sorted(weights)}


def add_to(buffer, *env_ids):
    for env_id in env_ids:
        batch = make_rows([MID], [1.0], [0.0])
        buffer.add_batch(batch, torch.tensor([env_id]))


def test_steps_are_drawn_by_priority_as_often_as_by_alf():
    buffer = ReplayBuffer(SPEC, 3, 4, prioritized_sampling=True)
    add_to(buffer, 1, 1)
    assert frequencies(buffer, 1000) == {(1, 0): (500, 1), (1, 1): (500, 1)}
    ones = torch.tensor([1, 1])
    buffer.update_priority(ones, torch.tensor([0, 1]), torch.tensor([0.5, 1.5]))
    found = frequencies(buffer, 1000)
    assert [n for n, _ in found.values()] == [250, 750]
    add_to(buffer, 0, 2)
    found = frequencies(buffer, 1000)
    # Before: env 0 and 2 entered at 1.5, the highest.
    pairs = {(0, 0): 300, (1, 0): 100, (1, 1): 300, (2, 0): 300}
    assert {pair: n for pair, (n, _) in found.items()} == pytest.approx(pairs, abs=1)
    weights = [weight for _, weight in found.values()]
    assert weights == pytest.approx([1.2, 0.4, 1.2, 1.2])
    buffer.update_priority(torch.tensor([1, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 1.0]))
    found = frequencies(buffer, 1000)
    assert [n for n, _ in found.values()] == pytest.approx([375, 125, 250, 250], abs=1)
    weights = [weight for _, weight in found.values()]
    assert weights == pytest.approx([1.5, 0.5, 1, 1])


def test_weights_are_over_the_mean_of_priorities_above_zero():
    buffer = ReplayBuffer(SPEC, 2, 4, prioritized_sampling=True)
    for _ in range(6):
        add_to(buffer, 0, 1)
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([3, 5]), torch.tensor([3.0, 5.0]))
    _, info = buffer.get_batch(1400, 1)
    wanted = [8 / 14, 24 / 14, 40 / 14]
    weights = sorted(set(info.importance_weights.tolist()))
    assert weights == pytest.approx(wanted)
    assert float(buffer.initial_priority) == 5
    # A priority of 0 is no part of the mean.
    buffer.update_priority(torch.tensor([0]), torch.tensor([2]), torch.tensor([0.0]))
    _, info = buffer.get_batch(1300, 1)
    assert float(info.importance_weights.min()) == pytest.approx(7 / 13)


def test_environments_take_turns_in_a_batch():
    buffer = ReplayBuffer(SPEC, 2, 10)
    counted(buffer, 10, 2)
    data, info = buffer.get_batch(5, 3)
    assert info.env_ids[:4].tolist() == [0, 1, 0, 1]
    assert data.reward.tolist() == [[p, p + 1, p + 2] for p in info.positions.tolist()]
    assert max(info.positions.tolist()) <= 7
    assert info.importance_weights == ()
    assert info.replay_buffer is buffer


def test_recent_steps_come_first_and_in_alfs_order():
    buffer = ReplayBuffer(SPEC, 4, 32, recent_data_ratio=0.5, recent_data_steps=4)
    counted(buffer, 32, 4)
    _, info = buffer.get_batch(32, 1)
    newest = [28] * 4 + [29] * 4 + [30] * 4 + [31] * 4
    assert info.positions[:16].tolist() == newest
    assert info.env_ids[:16].tolist() == [0, 1, 2, 3] * 4


def test_everything_is_gathered_but_the_frames_ignored():
    buffer = ReplayBuffer(SPEC, 2, 9, num_earliest_frames_ignored=2)
    for steps, times, position in ((8, range(2, 8), 2), (14, range(7, 14), 7)):
        for step in range(int(buffer.current_pos[0]), steps):
            buffer.add_batch(make_rows([MID] * 2, [1.0] * 2, [step] * 2))
        data, info = buffer.gather_all(ignore_earliest_frames=True)
        assert data.reward.tolist() == [list(times)] * 2
        assert info.positions.tolist() == [position] * 2
        assert info.env_ids.tolist() == [0, 1]


def test_draws_without_replacement_are_spread_and_not_unique():
    buffer = ReplayBuffer(SPEC, 1, 100)
    counted(buffer, 100, 1)
    _, info = buffer.get_batch(50, 1)
    # Each of 50 draws is from two steps of its own.
    assert (info.positions // 2).tolist() == list(range(50))
