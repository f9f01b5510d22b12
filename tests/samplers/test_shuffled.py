"""Draws without replacement: exact coverage, orders, ranks, batches of a share."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers import permutation
from mmreplay.samplers.shuffled import ShuffledSampler
from tests.contracts.sampler import VIEWS, ListedView, steps_of
from tests.samplers.epochs import epoch, flat
from tests.samplers.frequencies import assert_distribution


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
@pytest.mark.parametrize("view", VIEWS)
def test_an_epoch_is_every_legal_start_once(view, batch_size, chunk):
    sampler = ShuffledSampler(0)
    for number in range(3):
        assert sampler.epoch == number
        count = sampler.num_batches(view, batch_size)
        batches = epoch(sampler, view, batch_size)
        assert sorted(flat(batches)) == view.legal_starts()
        assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len(batches) == count


@pytest.mark.parametrize("view", VIEWS)
def test_an_order_that_is_computed_covers_as_well(view, monkeypatch):
    monkeypatch.setattr(permutation, "TABLE", 0)
    assert sorted(flat(epoch(ShuffledSampler(3), view, 2))) == view.legal_starts()


def test_draws_alone_go_on_with_the_next_epoch():
    sampler, view = ShuffledSampler(1), VIEWS[3]
    total = len(view.legal_starts())
    assert total == 7
    lengths, numbers = [], []
    for _ in range(6):
        numbers.append(sampler.epoch)
        lengths.append(len(sampler.draw(view, 3)))
    assert lengths == [3, 3, 1] * 2
    assert numbers == [0, 0, 0, 1, 1, 1]
    assert sampler.epoch == 2


def test_a_draw_has_the_promised_columns():
    draw = ShuffledSampler(0).draw(VIEWS[3], 4)
    assert (draw.env_ids.dtype, draw.positions.dtype) == (np.int64, np.int64)
    assert draw.probabilities.tolist() == [1 / 7] * 4
    assert draw.weights.dtype == np.float32
    assert draw.weights.tolist() == [1] * 4


def test_keys_differ_between_draws_epochs_and_ranks():
    ranks = [ShuffledSampler(0, rank=rank, num_ranks=2) for rank in range(2)]
    keys = {s.draw(VIEWS[3], 2).key for s in ranks for _ in range(10)}
    assert len(keys) == 20


def test_epochs_and_seeds_have_orders_of_their_own():
    view = ListedView(["s" * 30])
    sampler = ShuffledSampler(0)
    orders = [tuple(flat(epoch(sampler, view, 7))) for _ in range(10)]
    orders += [tuple(flat(epoch(ShuffledSampler(s), view, 7))) for s in range(1, 10)]
    assert len(set(orders)) == 19
    again = ShuffledSampler(0)
    assert [tuple(flat(epoch(again, view, 7))) for _ in range(10)] == orders[:10]


def test_every_start_is_as_likely_at_every_index():
    view, sampler = VIEWS[3], ShuffledSampler(0)
    orders = [flat(epoch(sampler, view, 3)) for _ in range(1000)]
    law = dict.fromkeys(view.legal_starts(), 1 / 7)
    for index in range(7):
        assert_distribution([order[index] for order in orders], law)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("view", VIEWS[2:])
def test_ranks_are_disjoint_and_complete(view, num_ranks, chunk):
    for seed in range(3):
        found = []
        for rank in range(num_ranks):
            sampler = ShuffledSampler(seed, rank=rank, num_ranks=num_ranks)
            if rank < len(view.legal_starts()):
                found.append(flat(epoch(sampler, view, 2)))
            else:
                with pytest.raises(EmptyError, match=f"rank {rank} of .*, got 0"):
                    sampler.draw(view, 2)
        assert sorted(flat(found)) == view.legal_starts()
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_a_last_batch_all_ranks_draw_as_many_and_all_full(batch_size, num_ranks, chunk):
    view = ListedView(["sxs-", "ssssx", "ss"])  # 8 legal starts
    found = []
    for rank in range(num_ranks):
        sampler = ShuffledSampler(5, rank=rank, num_ranks=num_ranks, drop_last=True)
        if 8 // num_ranks < batch_size:
            with pytest.raises(EmptyError, match=r"cannot draw 3 steps without.*got 2"):
                sampler.draw(view, batch_size)
            assert sampler.epoch == 0
            continue
        count = sampler.num_batches(view, batch_size)
        assert count == 8 // num_ranks // batch_size
        batches = epoch(sampler, view, batch_size)
        assert [len(b) for b in batches] == [batch_size] * count
        assert sampler.epoch == 1
        found += flat(batches)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("rows", "batches", "sizes"),
    [
        (12, 5, [2, 2, 3, 2, 3]),
        (12, 7, [1, 2, 2, 1, 2, 2, 2]),
        (12, 13, [1] * 12),
        (12, 4, [3] * 4),
        (12, 1, [12]),
        (1, 3, [1]),
    ],
)
def test_minibatches_differ_by_one_at_most_and_none_is_empty(rows, batches, sizes):
    view = ListedView(["s" * rows])
    sampler = ShuffledSampler(0, batches=batches)
    assert sampler.num_batches(view, 99) == len(sizes)
    for _ in range(2):
        found = epoch(sampler, view, 99)
        assert [len(batch) for batch in found] == sizes
        assert sorted(flat(found)) == view.legal_starts()


@pytest.mark.parametrize("rows", range(1, 40))
def test_minibatches_of_ranks_of_any_number_of_rows(rows):
    view = ListedView(["s" * rows])
    for num_ranks in (1, 3):
        if rows < num_ranks:
            continue
        found = []
        for rank in range(num_ranks):
            sampler = ShuffledSampler(0, rank=rank, num_ranks=num_ranks, batches=6)
            batches = epoch(sampler, view, 1)
            sizes = {len(batch) for batch in batches}
            assert max(sizes) - min(sizes) <= 1
            assert len(batches) <= 6
            found += flat(batches)
        assert sorted(found) == view.legal_starts()


@pytest.mark.parametrize("view", VIEWS)
def test_unshuffled_env_major_is_oldest_first_in_each_environment(view, chunk):
    sampler = ShuffledSampler(shuffle=False)
    for _ in range(2):
        assert flat(epoch(sampler, view, 3)) == view.legal_starts()


@pytest.mark.parametrize("view", VIEWS)
def test_unshuffled_time_major_takes_environments_in_turn(view, chunk):
    turns = {}
    expected = []
    for env_id, position in view.legal_starts():
        turns[env_id] = turns.get(env_id, -1) + 1
        expected.append((turns[env_id], env_id, position))
    sampler = ShuffledSampler(shuffle=False, layout="time_major")
    found = flat(epoch(sampler, view, 3))
    assert found == [(env_id, position) for _, env_id, position in sorted(expected)]


def test_nothing_to_draw_is_said_and_does_not_count():
    sampler, fresh = ShuffledSampler(3), ShuffledSampler(3)
    for rows in ([""], ["-"], ["x", "xx-", ""]):
        with pytest.raises(EmptyError, match=r"is a legal start.*Add steps first"):
            sampler.draw(ListedView(rows), 4)
        with pytest.raises(EmptyError, match=r"is a legal start.*Add steps first"):
            sampler.more(ListedView(rows), 4)
    assert sampler.state_dict() == fresh.state_dict()
    assert steps_of(sampler.draw(VIEWS[3], 4)) == steps_of(fresh.draw(VIEWS[3], 4))


def test_too_few_for_a_batch_are_said_until_there_are_more():
    sampler = ShuffledSampler(0, drop_last=True)
    for ask in (sampler.draw, sampler.more):
        with pytest.raises(
            EmptyError, match=r"cannot draw 3 steps without replacement: rank 0.*got 2"
        ):
            ask(ListedView(["ss-"]), 3)
    assert len(sampler.draw(ListedView(["sss-"]), 3)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "num_ranks": 2}, r"rank must be in \[0, num_ranks\), got 2 of 2"),
        ({"rank": -1}, "rank must be an integer of at least 0, got -1"),
        ({"num_ranks": 0}, "num_ranks must be an integer of at least 1, got 0"),
        ({"rank": "a"}, "rank must be an integer of at least 0, got 'a'"),
        ({"batches": 2.5}, "batches must be an integer of at least 1, got 2.5"),
        ({"layout": "time"}, "layout must be one of.*got 'time'"),
        ({"batches": 0}, "batches must be an integer of at least 1, got 0"),
        ({"drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"shuffle": 0}, "shuffle must be True or False, got 0"),
        ({"batches": 2, "drop_last": True}, "drop_last must.*got True with batches=2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message):
    with pytest.raises(SchemaError, match=message):
        ShuffledSampler(0, **options)


def test_public_names():
    assert mr.ShuffledSampler is ShuffledSampler
