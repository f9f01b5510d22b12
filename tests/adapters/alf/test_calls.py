"""Every call's shapes, types and refusals."""

import inspect
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from mmreplay.adapters.alf import (
    DataBuffer,
    MaxSegmentTree,
    ReplayBuffer,
    RingBuffer,
    SegmentTree,
    SumSegmentTree,
)
from mmreplay.errors import FormatError, ReplayError, SchemaError
from tests.adapters.alf.support import (
    FIRST,
    MID,
    SPEC,
    Spec,
    counted,
    episodic,
    equal,
    rows,
    rows_of,
    story,
)


def refused(message, kind=AssertionError):
    return pytest.raises(kind, match=re.escape(message))


def test_nests_come_back_as_they_went_in():
    buffer = RingBuffer(SPEC, 2, 4)
    batch = rows([0, 1], [1.0, 0.5], [3.0, 4.0])
    buffer.enqueue(batch)
    out = buffer.dequeue()
    back = type(out)(*(squeezed(part) for part in out))
    assert equal(back, batch)
    assert back.observation["rest"][1][0].dtype == torch.bfloat16


def squeezed(nest):
    if isinstance(nest, dict):
        return {key: squeezed(part) for key, part in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(map(squeezed, nest))
    return nest[:, 0]


def test_dicts_keep_their_kind_and_names_may_hold_separators():
    spec = OrderedDict([("a/b%", Spec()), ("c", Spec((2,), torch.int64))])
    buffer = RingBuffer(spec, 1, 4)
    buffer.enqueue({"a/b%": torch.ones(1), "c": torch.ones(1, 2, dtype=torch.int64)})
    out = buffer.dequeue()
    assert type(out) is OrderedDict
    assert (out["a/b%"].tolist(), out["c"].tolist()) == ([[1]], [[[1, 1]]])


def test_a_spec_may_be_one_tensor_and_of_numpy():
    buffer = ReplayBuffer(np.zeros((2,), np.float32), 1, 4)
    buffer.add_batch(np.array([[1, 2]], np.float32))
    data, _ = buffer.get_batch(1, 1)
    assert data.tolist() == [[[1, 2]]]


def test_gradients_end_at_the_buffer():
    buffer = RingBuffer(Spec(), 1, 4)
    buffer.enqueue(torch.ones(1, requires_grad=True))
    assert not buffer.dequeue().requires_grad


def test_fields_are_read_by_names_of_any_nest():
    buffer = episodic()
    story(buffer, "F1/0 M1/1 L0/2")
    zero = torch.zeros((), dtype=torch.int64)
    found = buffer.get_field("observation.rest.0", zero, torch.arange(3))
    assert found.tolist() == [0, 1, 2]
    grid = torch.zeros((2, 1), dtype=torch.int64)
    found = buffer.get_field("observation.image", grid, torch.arange(3)[None])
    assert found.shape == (2, 3, 2, 2)
    found = buffer.get_field({"r": "reward", "s": ["step_type"]}, zero, zero)
    assert (found["r"].tolist(), found["s"][0].tolist()) == (0, 0)
    for whole in (None, ""):
        found = buffer.get_field(whole, zero, zero)
        assert type(found) is type(SPEC)
    with refused("field 'observation.none': 'none' must be one of", LookupError):
        buffer.get_field("observation.none", zero, zero)
    for stale in (-1, 3):
        with refused(f"position {stale} of environment 0 is not in the buffer"):
            buffer.get_field("reward", zero, torch.tensor(stale))


def test_the_oldest_rows_are_removed_in_order():
    buffer = RingBuffer(SPEC, 3, 4)
    counted(buffer, 6, 3)
    out = buffer.dequeue(torch.tensor([2, 0]), n=3)
    assert out.reward.tolist() == [[2, 3, 4]] * 2
    assert buffer.current_size.tolist() == [1, 4, 1]
    assert buffer.get_earliest_position().tolist() == [5, 2, 5]
    assert buffer.get_current_position().tolist() == [6, 6, 6]
    assert (buffer.has_data(n=2), buffer.has_data(torch.tensor([1]), 4)) == (False, True)
    assert (buffer.has_space(), buffer.has_space(torch.tensor([0]))) == (False, True)
    with refused("cannot dequeue 2 rows: environment 0 holds 1"):
        buffer.dequeue(n=2)
    with refused("n must be in [1, 4], got 5. Ask for fewer"):
        buffer.dequeue(n=5)
    buffer.remove_up_to(2, torch.tensor([0, 1]))
    assert buffer.current_size.tolist() == [0, 2, 1]
    assert int(buffer.total_size) == 3
    with refused("dequeue needs a RingBuffer", NotImplementedError):
        ReplayBuffer(SPEC, 1).dequeue()


def test_a_cleared_environment_goes_on_with_fresh_positions_and_episodes():
    buffer = episodic()
    story(buffer, "F1/0 M1/1")
    buffer.clear()
    assert buffer.current_size.tolist() == [0]
    story(buffer, "M1/2 M1/3")
    env_ids, positions = rows_of(buffer)
    assert positions.tolist() == [2, 3]
    begins = buffer.get_episode_begin_position(positions, env_ids)
    assert begins.tolist() == [2, 2]
    buffer.clear(torch.tensor([], dtype=torch.int64))
    assert buffer.current_size.tolist() == [2]


def test_batches_that_do_not_fit_are_refused_whole():
    buffer = ReplayBuffer(SPEC, 3, 4)
    two = rows([1] * 2, [1.0] * 2, [1.0] * 2)
    with refused("batch: 'step/step_type' of shape [2] must"):
        buffer.add_batch(two)
    with refused("env_ids must be different environments in one axis, got [1, 1]"):
        buffer.add_batch(two, torch.tensor([1, 1]))
    with refused("env_ids must be in [0, 3), got values in [1, 3]", IndexError):
        buffer.add_batch(two, torch.tensor([1, 3]))
    with refused("nest at 'step/observation' must have", RuntimeError):
        buffer.add_batch(two._replace(observation=torch.ones(2)), torch.tensor([0, 1]))
    wide = two._replace(reward=torch.ones(2, 5))
    with refused("field 'step/reward'", RuntimeError):
        buffer.add_batch(wide, torch.tensor([0, 1]))
    half = two._replace(step_type=torch.ones(2))
    with refused("field 'step/step_type'", RuntimeError):
        buffer.add_batch(half, torch.tensor([0, 1]))
    with refused("a buffer that other threads or processes may"):
        buffer.add_batch(two, torch.tensor([0, 1]), blocking=True)
    with refused("blocking must be False with keep_episodic_info"):
        episodic().add_batch(rows([0], [1.0], [0.0]), blocking=True)
    assert buffer.current_pos.tolist() == [0, 0, 0]
    buffer.add_batch(two, torch.tensor([2, 0]))
    assert buffer.current_pos.tolist() == [1, 0, 1]


def test_draws_that_cannot_be_are_refused():
    buffer = ReplayBuffer(SPEC, 2, 9, num_earliest_frames_ignored=2)
    with refused("draw windows of 1 steps: an environment has"):
        buffer.get_batch(1, 1)
    counted(buffer, 4, 2)
    buffer.get_batch(1, 2)
    with refused("cannot draw windows of 3 steps: an environment has only 2"):
        buffer.get_batch(1, 3)
    with refused("batch_length must be at least 1, got 0"):
        buffer.get_batch(1, 0)
    with refused("update_priority needs a buffer with priorities"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([2]), torch.ones(1))
    with refused("episodes: this buffer does not store 'episode/begin'"):
        ReplayBuffer(SPEC, 1).get_episode_begin_position(0, 0)


def test_priorities_that_cannot_be_are_refused_and_late_ones_left_out():
    buffer = ReplayBuffer(SPEC, 1, 4, prioritized_sampling=True)
    with refused("begins one"):
        buffer.get_batch(1, 2)
    counted(buffer, 6, 1)
    zero = torch.tensor([0])
    with refused("priorities must be finite float32 numbers of at least 0, got -1.0 at 0"):
        buffer.update_priority(zero, torch.tensor([3]), torch.tensor([-1.0]))
    with refused("was never written: positions must be"):
        buffer.update_priority(zero, torch.tensor([6]), torch.ones(1))
    buffer.update_priority(zero, zero, torch.tensor([100.0]))
    buffer.update_priority(zero[:0], zero[:0], torch.ones(0))
    assert float(buffer.initial_priority) == 1
    _, info = buffer.get_batch(4, 1)
    assert sorted(info.positions.tolist()) == [2, 3, 4, 5]


def test_windows_of_another_length_leave_priorities_as_they_are():
    buffer = ReplayBuffer(SPEC, 1, 8, prioritized_sampling=True)
    counted(buffer, 8, 1)
    ids, positions = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    buffer.update_priority(ids, positions, positions + 1.0)
    for length in (1, 3, 1, 2):
        _, info = buffer.get_batch(2000, length)
        assert int(info.positions.max()) == 8 - length
        ratio = info.importance_weights / (info.positions + 1)
        assert ratio.numpy() == pytest.approx(float(ratio[0]))


def test_gathering_needs_environments_in_step():
    buffer = ReplayBuffer(SPEC, 2, 4)
    data, info = buffer.gather_all()
    assert data.reward.shape == (2, 0)
    counted(buffer, 2, 2)
    data, _ = buffer.gather_all()
    kept = data.reward.clone()
    counted(buffer, 4, 2)
    assert torch.equal(data.reward, kept)
    buffer.add_batch(rows([MID], [1.0], [0.0]), torch.tensor([1]))
    with refused("same rows, got rows from [2, 3] to [6, 7]."):
        buffer.gather_all()
    assert info.positions.tolist() == [0, 0]
    ignoring = ReplayBuffer(SPEC, 1, 4, num_earliest_frames_ignored=2)
    counted(ignoring, 2, 1)
    with refused("gather_all ignores 2 rows and needs more, got 2"):
        ignoring.gather_all(ignore_earliest_frames=True)


def test_returns_need_episodes_and_the_leaves_that_tell_them():
    with refused("needs keep_episodic_info=True. Pass both."):
        ReplayBuffer(SPEC, 1, record_episodic_return=True)
    with refused("data_spec has no scalar named 'step_type'"):
        ReplayBuffer(Spec(), 1, keep_episodic_info=True)
    with refused("data_spec: 'step/x' must have a shape and a dtype", RuntimeError):
        ReplayBuffer({"x": 3}, 1)
    with refused("data_spec has no leaf, got ()", RuntimeError):
        ReplayBuffer((), 1)
    for kind in (ReplayBuffer, RingBuffer, DataBuffer):
        with refused("complex64", RuntimeError):
            kind(Spec((), torch.complex64), 1)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_recent_steps_and_priorities_go_together(ratio):
    buffer = ReplayBuffer(
        SPEC, 1, 64, prioritized_sampling=True, recent_data_ratio=ratio, recent_data_steps=4
    )
    counted(buffer, 64, 1)
    _, info = buffer.get_batch(int(4 / ratio), 1)
    assert sorted(set(info.positions[:4].tolist())) == [60, 61, 62, 63]
    assert info.importance_weights.tolist() == [1] * int(4 / ratio)
    buffer.update_priority(info.env_ids, info.positions, info.importance_weights)


def test_recent_steps_keep_their_weight_with_priorities():
    buffer = ReplayBuffer(
        SPEC, 1, 64, prioritized_sampling=True, recent_data_ratio=0.5, recent_data_steps=4
    )
    counted(buffer, 64, 1)
    _, info = buffer.get_batch(8, 1)
    assert info.positions[:4].tolist() == [60, 61, 62, 63]
    assert info.importance_weights.tolist() == [1] * 8
    # Also where half of the rows cannot be drawn by their priority.
    half = torch.arange(32)
    buffer.update_priority(torch.zeros_like(half), half, torch.zeros(32))
    _, info = buffer.get_batch(8, 1)
    assert info.positions[:4].tolist() == [60, 61, 62, 63]
    assert info.importance_weights.tolist() == [1] * 8


@pytest.mark.parametrize("envs", [1, 2])
def test_rows_that_are_refused_end_no_episode(envs):
    buffer = ReplayBuffer(SPEC, envs, 8, keep_episodic_info=True)
    one, last = [1.0] * envs, torch.tensor([envs - 1])
    for kind in (FIRST, MID):
        buffer.add_batch(rows([kind] * envs, one, one))
    wrong = rows([FIRST] * envs, one, one)._replace(reward=torch.ones(envs, 5))
    with refused("field 'step/reward'", RuntimeError):
        buffer.add_batch(wrong)
    with refused("field 'step/reward'", RuntimeError):
        buffer.add_batch(rows([FIRST], [1.0], [1.0])._replace(reward=torch.ones(1, 5)), last)
    buffer.add_batch(rows([MID] * envs, one, one))
    ring = buffer._core.buffer
    for env_id in range(envs):
        assert not ring.get_field("truncated", env_id, range(3)).any()
        assert ring.episodes.episodes(env_id).lengths.tolist() == [3]


def test_a_data_buffer_keeps_the_newest_rows():
    buffer = DataBuffer(SPEC, 4)
    with refused("cannot draw 2 rows from a buffer without"):
        buffer.get_batch(2)
    for start, stop in ((0, 3), (3, 3), (3, 12)):
        times = range(start, stop)
        buffer.add_batch(rows([MID] * len(times), [1.0] * len(times), list(times)))
    assert (int(buffer.current_size), buffer.is_full) == (4, True)
    # As in alf, of a batch longer than the buffer only what is kept is counted.
    assert int(buffer.current_pos) == 3 + 4
    assert buffer.get_all().reward.tolist() == [8, 9, 10, 11]
    assert buffer.get_batch_by_indices(torch.tensor([0, 3, 0])).reward.tolist() == [8, 11, 8]
    assert set(buffer.get_batch(100).reward.tolist()) == {8, 9, 10, 11}
    with refused("is not in the buffer"):
        buffer.get_batch_by_indices(torch.tensor([4]))
    buffer.clear()
    assert int(buffer.current_size) == 0


def test_trees_refuse_what_alf_asserts_and_what_corrupted_it():
    tree = SumSegmentTree(4)
    one = torch.tensor([1])
    with refused("tree: indices and values must have one axis"):
        tree[one] = torch.ones(2)
    for index in (-1, 4):
        with refused(f"tree index must be in [0, 3], got {index}"):
            tree[torch.tensor([index])] = torch.ones(1)
        with refused(f"tree index must be in [0, 3], got {index}"):
            tree[torch.tensor([[index]])]
    for value in (-1.0, float("nan")):
        with refused("tree leaf 1 must be at least 0"):
            tree[one] = torch.tensor([value])
    tree[torch.tensor([2, 2])] = torch.tensor([5.0, 3.0])
    tree[torch.tensor([], dtype=torch.int64)] = torch.tensor([])
    assert (tree.nnz, float(tree.summary()), tree.capacity) == (1, 3, 4)
    assert tree[torch.tensor([[2], [0]])].tolist() == [[3], [0]]
    for threshold in (-0.5, 3.5, float("nan")):
        with pytest.raises(ValueError, match="prefix sum must be in"):
            tree.find_sum_bound(torch.tensor([threshold]))
    with refused("op must be torch.add, torch.max or torch.min, got 'or'"):
        SegmentTree(4, "or")
    with refused("tree state must have [6] values, got [8]"):
        MaxSegmentTree(3).load_state_dict(tree.state_dict())


def test_a_folder_is_reported_retained_and_not_overwritten(tmp_path, monkeypatch):
    assert "temporary folder, removed at exit" in repr(ReplayBuffer(SPEC, 1))
    buffer = ReplayBuffer(SPEC, 1, path=tmp_path / "a")
    assert repr(buffer) == f"<ReplayBuffer 'ReplayBuffer', {tmp_path / 'a'}>"
    with refused("already holds a buffer", FormatError):
        ReplayBuffer(SPEC, 1, path=tmp_path / "a")
    buffer.close()
    with refused("must hold 1 x 5 rows of", SchemaError):
        ReplayBuffer(SPEC, 1, 5, path=tmp_path / "a", resume=True)
    monkeypatch.setenv("MMREPLAY_DIR", str(tmp_path))
    assert str(tmp_path / "alf-mine-0") in repr(DataBuffer(SPEC, 3, name="mine"))


def test_arguments_are_alfs_in_its_order_and_two_of_our_own_by_name():
    parameters = inspect.signature(ReplayBuffer).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    empty = inspect.Parameter.empty
    assert list(positional.items()) == [
        ("data_spec", empty),
        ("num_environments", empty),
        ("max_length", 1024),
        ("num_earliest_frames_ignored", 0),
        ("prioritized_sampling", False),
        ("initial_priority", 1.0),
        ("recent_data_steps", 1),
        ("recent_data_ratio", 0.0),
        ("with_replacement", False),
        ("device", "cpu"),
        ("allow_multiprocess", False),
        ("keep_episodic_info", None),
        ("record_episodic_return", False),
        ("default_return", -1000.0),
        ("gamma", 0.99),
        ("reward_clip", None),
        ("enable_checkpoint", False),
        ("name", "ReplayBuffer"),
    ]
    named = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert named == {"path": None, "resume": False}
    assert float(ReplayBuffer.ONE_MINUS) == 0.9999998807907104
    assert ReplayBuffer(SPEC, 1, enable_checkpoint=True)._alf_checkpoint_enabled


def test_wider_floats_are_cast_and_results_are_of_the_spec():
    buffer = ReplayBuffer(SPEC, 1, 4)
    batch = rows([MID], [1.0], [2.0])
    buffer.add_batch(batch._replace(reward=torch.tensor([2.5], dtype=torch.float64)))
    data, _ = buffer.get_batch(1, 1)
    assert (data.reward.dtype, data.reward.tolist()) == (torch.float32, [[2.5]])


def test_errors_are_also_the_projects_own():
    with pytest.raises(ReplayError):
        ReplayBuffer(SPEC, 1).get_batch(1, 1)
