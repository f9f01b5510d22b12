"""Epochs drawn by rank, as parts of an epoch over several buffers."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError
from mmreplay.samplers.base import RANKS, traits_of
from mmreplay.samplers.shuffled import ShuffledSampler, share_of_rank
from tests.contracts.sampler import VIEWS, ListedView, steps_of
from tests.samplers.moving import MovingView


@pytest.mark.parametrize("view", VIEWS)
def test_each_rank_is_a_legal_start_and_all_ranks_are_all_of_them(view):
    sampler = ShuffledSampler(0)
    assert traits_of(sampler).divides == RANKS
    mass = sampler.mass(view, 0)
    legal = view.legal_starts()
    assert (mass.total, mass.num_legal) == (len(legal), len(legal))
    assert (mass.lowest, mass.highest) == (1.0, 0.0)
    if not legal:
        return
    ranks = np.random.default_rng(1).permutation(len(legal))
    draw = sampler.draw_at(view, share_of_rank(ranks, len(legal)))
    assert steps_of(draw) == [legal[rank] for rank in ranks]
    assert draw.probabilities.tolist() == [1 / len(legal)] * len(legal)
    assert draw.weights.dtype == np.float32
    assert (draw.weights == 1).all()


@pytest.mark.parametrize("total", [1, 3, 10**6 + 3, 2**40 + 1, 2**51])
def test_the_share_of_a_rank_is_that_rank_for_any_number_of_starts(rng, total):
    ranks = np.unique(np.clip([0, 1, total // 3, total - 2, total - 1], 0, total - 1))
    ranks = np.append(ranks, rng.integers(total, size=1000))
    shares = share_of_rank(ranks, total)
    assert ((shares >= 0) & (shares < 1)).all()
    assert ((shares * total).astype(np.int64) == ranks).all()


@pytest.mark.parametrize("seed", range(20))
def test_a_buffer_that_moves_on_draws_the_starts_of_then_or_leaves_them_out(seed):
    rng = np.random.default_rng(seed)
    view, sampler = MovingView(3), ShuffledSampler(0)
    for env_id in range(3):
        view.add(env_id, "".join(rng.choice(["s", "x"], 20, p=[0.7, 0.3])))
    legal = view.legal_starts()
    assert sampler.mass(view, 0).num_legal == len(legal)
    for _ in range(12):
        for env_id in range(3):
            view.add(env_id, "".join(rng.choice(["s", "x"], 2)))
            view.give_up(env_id, view.first[env_id] + int(rng.integers(0, 4)))
        assert sampler.mass(view, 0).num_legal == len(legal)
        ranks = rng.integers(len(legal), size=15)
        draw = sampler.draw_at(view, share_of_rank(ranks, len(legal)))
        alive = set(view.legal_starts())
        drawn = [legal[rank] for rank in ranks]
        assert steps_of(draw) == [step for step in drawn if step in alive]
        assert (draw.probabilities == 1 / len(legal)).all()


def test_draws_by_rank_do_not_move_the_epoch():
    view = ListedView(["sssssss", "sxs"])
    one, other = ShuffledSampler(3), ShuffledSampler(3)
    for sampler in (one, other):
        sampler.draw(view, 2)
    one.draw_at(view, share_of_rank(np.arange(9), 9))
    assert one.state_dict() == other.state_dict()
    assert steps_of(one.draw(view, 3)) == steps_of(other.draw(view, 3))


def test_a_state_of_an_epoch_draws_its_ranks_elsewhere():
    view = MovingView(1)
    view.add(0, "sssss")
    sampler, other = ShuffledSampler(3), ShuffledSampler(4)
    total = sampler.mass(view, 0).num_legal
    other.load_state_dict(sampler.state_dict())
    view.add(0, "ssss")
    assert other.mass(view, 0).num_legal == total
    draw = other.draw_at(view, share_of_rank(np.arange(total), total))
    assert draw.positions.tolist() == list(range(total))


def test_an_empty_buffer_has_no_mass_and_begins_no_epoch():
    view, sampler = MovingView(1), ShuffledSampler(0)
    assert sampler.mass(view, 0).total == 0
    with pytest.raises(EmptyError):
        sampler.draw_at(view, np.array([0.5]))
    view.add(0, "sss")
    assert sampler.mass(view, 0).total == 2


def test_windows_are_drawn_by_the_rank_of_their_starts(tmp_path):
    schema = mr.Schema({"number": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 200) as buffer:
        buffer.extend(number=np.arange(100), terminated=np.arange(100) % 10 == 9)
        sampler = mr.SequenceSampler(4, ShuffledSampler(0))
        total = sampler.mass(buffer.view, 0).num_legal
        draw = sampler.draw_at(buffer.view, share_of_rank(np.arange(total), total))
        batch = buffer.gather(draw)
        assert len(set(steps_of(draw))) == len(batch) == total
        number = batch["number"]
        assert (np.diff(number, axis=1)[batch.mask[:, 1:]] == 1).all()
