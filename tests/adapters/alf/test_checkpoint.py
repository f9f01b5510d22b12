"""States that alf wrote are read in: rows in order, and their priorities."""

import re

import pytest
import torch

from mmreplay.adapters.alf import ReplayBuffer, RingBuffer, SumSegmentTree
from mmreplay.errors import FormatError
from tests.adapters.alf.support import LAST, SPEC, counted, rows

NUM_ENVS, LENGTH = 2, 4


def written(heads, sizes, masses=None):
    """What alf's buffer would save: row of position p in slot p % LENGTH."""
    names = ["step_type", "discount", "reward", "observation|image"]
    names += ["observation|rest|0", "observation|rest|1|0"]
    state = {"_current_pos": torch.tensor(heads), "_current_size": torch.tensor(sizes)}
    whole = {name: [] for name in names}
    for head in heads:
        # The newest row of each slot; what was never written is 99.
        told = [max((p for p in range(head) if p % LENGTH == s), default=99) for s in range(LENGTH)]
        batch = rows([1] * LENGTH, [1.0] * LENGTH, told)
        seen = batch.observation
        leaves = [*batch[:3], seen["image"], seen["rest"][0], seen["rest"][1][0]]
        for name, leaf in zip(names, leaves, strict=True):
            whole[name].append(leaf)
    state |= {name: torch.stack(parts) for name, parts in whole.items()}
    if masses is not None:
        tree = SumSegmentTree(NUM_ENVS * LENGTH)
        tree[torch.arange(NUM_ENVS * LENGTH)] = torch.tensor(masses)
        state["_sum_tree._values"] = tree.state_dict()["_values"]
    return state


def test_rows_come_in_oldest_first_and_no_other():
    buffer = ReplayBuffer(SPEC, NUM_ENVS, LENGTH, keep_episodic_info=True)
    buffer.load_state_dict(written([7, 3], [4, 2]))
    assert buffer.current_size.tolist() == [4, 2]
    ids, positions = torch.tensor([0] * 4 + [1] * 2), torch.tensor([0, 1, 2, 3, 0, 1])
    found = buffer.get_field(None, ids, positions)
    assert found.reward.tolist() == [3, 4, 5, 6, 1, 2]
    assert found.observation["rest"][0].tolist() == [3, 4, 5, 6, 1, 2]
    assert found.step_type.tolist() == [1, 1, 1, LAST, 1, LAST]


def test_priorities_follow_their_rows():
    # Environment 0 holds positions 3 to 6 in slots 3, 0, 1, 2; the newest is closed.
    masses = [4.0, 5.0, 0.0, 3.0, 7.0, 0.0, 0.0, 0.0]
    buffer = ReplayBuffer(SPEC, NUM_ENVS, LENGTH, prioritized_sampling=True)
    buffer.load_state_dict(written([7, 1], [4, 1], masses))
    _, info = buffer.get_batch(400, 1)
    weights = {
        (e, p): round(w / float(info.importance_weights.min()), 3)
        for e, p, w in zip(
            info.env_ids.tolist(),
            info.positions.tolist(),
            info.importance_weights.tolist(),
            strict=True,
        )
    }
    ratios = {(0, 0): 3, (0, 1): 4, (0, 2): 5, (0, 3): 1, (1, 0): 7}
    assert weights == pytest.approx(ratios)


def test_an_empty_state_gives_an_empty_buffer():
    buffer = RingBuffer(SPEC, NUM_ENVS, LENGTH)
    buffer.load_state_dict(written([0, 0], [0, 0]))
    assert buffer.current_size.tolist() == [0, 0]


def refused(message):
    return pytest.raises(FormatError, match=re.escape(message))


def test_states_that_do_not_fit_are_refused_and_nothing_is_read():
    buffer = ReplayBuffer(SPEC, NUM_ENVS, LENGTH)
    state = written([7, 3], [4, 2])
    with refused("state of alf has no 'observation|image', only"):
        buffer.load_state_dict(
            {name: v for name, v in state.items() if name != "observation|image"}
        )
    with refused("state of alf: 'reward' must have shape [2, 4], got [2, 3]"):
        buffer.load_state_dict(state | {"reward": torch.zeros(2, 3)})
    with refused("state of alf: '_current_pos' must have shape [2], got [1]"):
        buffer.load_state_dict(state | {"_current_pos": torch.tensor([3])})
    with refused("in [0, 4] and at most the positions [7, 3], got [4, 5]"):
        buffer.load_state_dict(state | {"_current_size": torch.tensor([4, 5])})
    assert buffer.current_pos.tolist() == [0, 0]
    counted(buffer, 1, NUM_ENVS)
    with refused("already has rows. Choose another path."):
        buffer.load_state_dict(state)
