"""Epochs stopped and resumed, over buffers that move on meanwhile, and their states."""

import json
from itertools import pairwise

import numpy as np
import pytest

from mmreplay.errors import EmptyError, FormatError
from mmreplay.samplers.shuffled import ShuffledSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import VIEWS, ListedView, steps_of
from tests.samplers.epochs import epoch, flat
from tests.samplers.moving import MovingView

OPTIONS = [
    {},
    {"shuffle": False},
    {"shuffle": False, "layout": "time_major"},
    {"batches": 4},
    {"drop_last": True},
    {"rank": 1, "num_ranks": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_stopped_after_any_batch_goes_on_as_if_it_was_not(options, chunk):
    view = ListedView(["sxsxs-", "sssssss", "", "ssssxx"], [1 << 40, 3, 0, 11])
    whole = ShuffledSampler(7, **options)
    states, expected = [], []
    for _ in range(20):
        states.append(json.dumps(whole.state_dict()))
        draw = whole.draw(view, 3)
        expected.append((whole.epoch, steps_of(draw), draw.key))
    for stopped, state in enumerate(states):
        other = ShuffledSampler(1234, **options)
        other.load_state_dict(json.loads(state))
        found = []
        for _ in range(stopped, 20):
            draw = other.draw(view, 3)
            found.append((other.epoch, steps_of(draw), draw.key))
        assert found == expected[stopped:]


def moved(view, rng):
    """Let a buffer move on by a random amount."""
    for env_id in range(len(view.rows)):
        fresh = "".join(rng.choice(["s", "x"], int(rng.integers(0, 4)), p=[0.7, 0.3]))
        view.add(env_id, fresh)
        view.give_up(env_id, view.first[env_id] + int(rng.integers(0, 4)))


def begun(rng, num_envs=3):
    view = MovingView(num_envs)
    for env_id in range(num_envs):
        size = int(rng.integers(5, 25))
        view.add(env_id, "".join(rng.choice(["s", "x"], size, p=[0.7, 0.3])))
    return view


@pytest.mark.parametrize("seed", range(25))
def test_overwritten_starts_are_skipped_and_counted_and_new_ones_wait(seed, chunk):
    rng = np.random.default_rng(seed)
    view, sampler = begun(rng), ShuffledSampler(seed)
    for _ in range(4):
        frozen, drawn, skipped = set(view.legal_starts()), [], 0
        if not frozen:
            view.add(0, "ssss")
            continue
        number = sampler.epoch
        while sampler.epoch == number:
            alive = set(view.legal_starts())
            if not sampler.more(view, 3):
                break
            batch = steps_of(sampler.draw(view, 3))
            assert set(batch) <= alive & frozen
            drawn += batch
            if sampler.epoch == number:
                # Of those passed so far, drawn or not.
                skipped = sampler.skipped
                assert skipped == sampler.state_dict()["done"] - len(drawn)
            moved(view, rng)
        assert len(set(drawn)) == len(drawn)
        # Whoever was not drawn is gone.
        assert not (frozen - set(drawn)) & alive
        assert sampler.epoch == number + 1


@pytest.mark.parametrize("seed", range(10))
def test_a_run_resumes_exactly_when_the_buffer_has_moved_on(seed):
    rng = np.random.default_rng(100 + seed)
    view, sampler = begun(rng), ShuffledSampler(seed)
    other = ShuffledSampler(99)
    for _ in range(30):
        # The other one is made anew from the state before every draw.
        other = ShuffledSampler(99)
        other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        if not view.legal_starts():
            view.add(1, "sss")
        expected = steps_of(sampler.draw(view, 2))
        assert steps_of(other.draw(view, 2)) == expected
        assert other.state_dict() == sampler.state_dict()
        moved(view, rng)


def test_minibatches_of_a_moving_buffer_leave_out_what_is_gone():
    view = MovingView(1)
    view.add(0, "s" * 13)
    sampler = ShuffledSampler(2, batches=4)
    drawn = steps_of(sampler.draw(view, 1))
    assert len(drawn) == 3
    view.give_up(0, 6)
    later = epoch(sampler, view, 1)
    assert len(later) <= 3
    expected = [place for place in view.legal_starts() if place not in drawn]
    assert sorted(flat(later)) == expected


def test_clearing_ends_the_epoch():
    view = MovingView(2)
    view.add(0, "s" * 50)
    sampler = ShuffledSampler(0)
    sampler.draw(view, 4)
    view.give_up(0, 50)
    with pytest.raises(EmptyError, match="is a legal start"):
        sampler.draw(view, 4)
    view.add(0, "sss")
    view.add(1, "ss")
    # The draw that failed ended no epoch, of which nothing is left.
    assert (sampler.epoch, sampler.more(view, 2)) == (0, False)
    first = steps_of(sampler.draw(view, 2))
    assert sampler.epoch == 1
    rest = flat(epoch(sampler, view, 2))
    assert sorted([*first, *rest]) == view.legal_starts()


def test_rows_that_become_legal_later_do_not_shift_the_epoch():
    class Late(MovingView):
        """The last three rows of an environment are starts later, all at once."""

        late = True

        def legal_starts(self):
            stop = len(self.rows[0]) - 3
            return [p for p in super().legal_starts() if not self.late or p[1] < stop]

    view = Late(1)
    view.add(0, "s" * 20)
    sampler = ShuffledSampler(0)
    frozen, drawn = view.legal_starts(), steps_of(sampler.draw(view, 5))
    view.late = False
    view.add(0, "s")
    drawn += flat(epoch(sampler, view, 5))
    assert sorted(drawn) == frozen


def test_a_huge_overwritten_range_is_skipped():
    view = MovingView(1)
    view.add(0, "s" * 20_001)
    sampler = ShuffledSampler(0)
    sampler.draw(view, 1)
    view.give_up(0, 19_990)
    found = flat(epoch(sampler, view, 4))
    assert 9 <= len(found) <= 10


def test_another_buffer_in_the_middle_of_an_epoch_is_refused():
    view, other = MovingView(1), MovingView(1, uuid=b"another buffer's")
    wide = MovingView(2)
    for each in (view, other, wide):
        each.add(0, "s" * 9)
    sampler = ShuffledSampler(0)
    sampler.draw(view, 2)
    for wrong in (other, wide):
        with pytest.raises(FormatError, match="sampler: its unfinished epoch is over"):
            sampler.draw(wrong, 2)
    sampler.restart()
    assert len(sampler.draw(other, 2)) == 2


def test_a_buffer_that_lost_rows_of_the_epoch_is_refused():
    view, cut = MovingView(1), MovingView(1)
    view.add(0, "s" * 9)
    cut.add(0, "s" * 5)
    sampler = ShuffledSampler(0)
    sampler.draw(view, 2)
    with pytest.raises(FormatError, match="sampler: environment 0 ends at 4, but the"):
        sampler.draw(cut, 2)


def test_the_state_of_one_rank_serves_the_others():
    view = ListedView(["s" * 20])
    ranks = [ShuffledSampler(0, rank=rank, num_ranks=2) for rank in range(2)]
    drawn = [steps_of(sampler.draw(view, 3)) for sampler in ranks]
    state = ranks[0].state_dict()
    fresh = [ShuffledSampler(9, rank=rank, num_ranks=2) for rank in range(2)]
    for sampler in fresh:
        sampler.load_state_dict(state)
        drawn += epoch(sampler, view, 3)
    assert sorted(flat(drawn)) == view.legal_starts()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kind": "UniformSampler"}, "kind must be.*got 'UniformSampler'"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*63\), got -1"),
        ({"step": "1"}, r"step must be an integer in \[0, 2\*\*63\), got '1'"),
        ({"epoch": None}, r"epoch must be an integer in \[0, 2\*\*63\), got None"),
        ({"done": True}, r"done must be an integer in \[0, 2\*\*63\), got True"),
        ({"done": 99}, "done must be at most 7, the steps of its epoch, got 99"),
        ({"skipped": 99}, r"skipped must be an integer in \[0, 4\), got 99"),
        ({"num_ranks": 2}, "num_ranks must be 1 as in this sampler, got 2"),
        ({"shuffle": 1}, "shuffle must be True as in this sampler, got 1"),
        ({"layout": "time_major"}, "layout must be 'env_major' as.*got 'time_major'"),
        ({"batches": 3}, "batches must be None as in this sampler, got 3"),
        ({"drop_last": True}, "drop_last must be False as in this sampler, got True"),
        ({"began": 3}, "began must describe the start of an epoch, got 3"),
        ({"began": {"buffer": "a"}}, "stops must be a list of integers, got None"),
        (
            {"began": {"buffer": "a", "stops": [1.5], "counts": [1]}},
            r"stops must be a list of integers, got \[1\.5\]",
        ),
        (
            {"began": {"buffer": "a", "stops": [5], "counts": [-1]}},
            r"counts must be in \[0, 2\*\*63\), got values in \[-1, -1\]",
        ),
        (
            {"began": {"buffer": "a", "stops": [5, 6], "counts": [1]}},
            "stops and counts must have one value for each.*got 2 stops and 1 counts",
        ),
        (
            {"began": {"buffer": "a", "stops": [5], "counts": [6]}},
            "stops and counts must have one value for each.*got 1 stops and 1 counts",
        ),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(damage, message):
    sampler = ShuffledSampler(4)
    sampler.draw(VIEWS[3], 3)
    before = sampler.state_dict()
    with pytest.raises(FormatError, match=f"sampler state: .*{message}"):
        sampler.load_state_dict(before | damage)
    assert sampler.state_dict() == before


@pytest.mark.parametrize("state", [None, [], "state", {}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(FormatError, match="sampler state: kind must be"):
        ShuffledSampler(0).load_state_dict(state)


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
def test_epochs_of_a_live_ring_are_the_oracles_legal_starts(tmp_path, autoreset, rng):
    sampler = ShuffledSampler(1)
    twin = Twin(tmp_path / "b", 12, 3, autoreset=autoreset, sampler=sampler)
    for turn in range(25):
        kinds = rng.choice(["", "t", "u"], (int(rng.integers(1, 9)), 3), p=[0.5, 0.2, 0.3])
        twin.extend(kinds.tolist())
        if turn % 7 == 6:
            twin.buffer.clear([turn % 3])
            twin.oracle.clear([turn % 3])
        frozen = list(twin.oracle.legal())
        if not frozen:
            continue
        number, drawn = sampler.epoch, []
        while sampler.epoch == number and sampler.more(twin.buffer.view, 5):
            batch = twin.buffer.sample(5)
            drawn += steps_of(batch)
            if turn % 2:
                twin.add([str(rng.choice(["", "t"])) for _ in range(3)])
        assert len(drawn) == len(set(drawn))
        assert set(drawn) <= set(frozen)
        if turn % 2 == 0:
            assert sorted(drawn) == sorted(frozen)
        else:
            assert not (set(frozen) - set(drawn)) & set(twin.oracle.legal())
    twin.buffer.close()


def test_orders_do_not_depend_on_batch_sizes(tmp_path):
    view = ListedView(["s" * 50, "sx" * 20])
    whole = flat(epoch(ShuffledSampler(0), view, 500))
    for sizes in ([1] * 70, [7] * 10, [3, 20, 9, 38]):
        sampler = ShuffledSampler(0)
        drawn = [steps_of(sampler.draw(view, size)) for size in sizes]
        assert flat(drawn) == whole
    assert all(a != b for a, b in pairwise(whole))


def test_a_batch_larger_than_the_epoch_leaves_it_running():
    view, sampler = ListedView(["sssssss-"]), ShuffledSampler(1, drop_last=True)
    drawn = [steps_of(sampler.draw(view, 1))[0] for _ in range(5)]
    before = sampler.state_dict()
    for ask in (sampler.draw, sampler.more):
        with pytest.raises(EmptyError, match=r"cannot draw 8 steps without.*got 7"):
            ask(view, 8)
        assert sampler.state_dict() == before
    ShuffledSampler(1, drop_last=True).load_state_dict(before)
    drawn += steps_of(sampler.draw(view, 2))
    assert sorted(drawn) == view.legal_starts()
    assert sampler.epoch == 1


def test_a_batch_larger_than_the_epoch_begins_the_next_where_that_has_as_many():
    view, sampler = MovingView(1), ShuffledSampler(1, drop_last=True)
    view.add(0, "sssssss")
    sampler.draw(view, 5)
    view.add(0, "ssssssssss")
    drawn = steps_of(sampler.draw(view, 8)) + steps_of(sampler.draw(view, 8))
    assert len(set(drawn)) == 16
    assert sampler.epoch == 2


def test_what_the_last_batch_skipped_can_be_read_until_the_next_draw():
    view, sampler = MovingView(1), ShuffledSampler(0, shuffle=False)
    view.add(0, "sssss")
    sampler.draw(view, 1)
    view.give_up(0, 3)
    assert steps_of(sampler.draw(view, 3)) == [(0, 3)]
    assert (sampler.epoch, sampler.skipped) == (1, 2)
    other = ShuffledSampler(0, shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert other.skipped == 2
    view.add(0, "s")
    other.draw(view, 1)
    assert other.skipped == 0
