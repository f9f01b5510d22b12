"""Prioritized samplers: arguments, states, exact resumption and memory."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError
from mmreplay.samplers.prioritized import PrioritizedSampler, RankPrioritizedSampler
from tests.buffer.support import Twin
from tests.contracts.sampler import ListedView, steps_of
from tests.samplers.prioritized import KINDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, r"alpha must be a number in \[0, 4\] or.*got -1"),
        ({"alpha": "x"}, r"alpha must be a number in \[0, 4\] or.*got 'x'"),
        ({"beta": 1.5}, r"beta must be a number in \[0, 1\] or.*got 1\.5"),
        ({"beta": float("nan")}, r"beta must be a number in \[0, 1\] or.*got nan"),
        ({"normalize": "max"}, r"normalize must be one of \('batch'.*got 'max'"),
        ({"stratified": "no"}, "stratified must be True or False, got 'no'"),
        ({"eta": 2}, r"eta must be a number in \[0, 1\], got 2"),
        ({"initial_priority": 0}, "initial_priority must be a number in.*got 0"),
        ({"name": "a/b"}, "name must be 1 to 64 letters, digits, '_'.*got 'a/b'"),
        ({"name": ".."}, r"name must be 1 to 64 letters, digits, '_'.*got '\.\.'"),
    ],
)
@pytest.mark.parametrize("make", KINDS)
def test_arguments_out_of_range_are_refused(make, options, message):
    with pytest.raises(SchemaError, match=message):
        make(**options)


def test_arguments_of_one_kind_out_of_range_are_refused():
    with pytest.raises(SchemaError, match="eps must be a finite number of at least 0"):
        PrioritizedSampler(eps=-1)
    with pytest.raises(SchemaError, match=r"alpha_every must be an integer.*got 0"):
        PrioritizedSampler(alpha_every=0)
    with pytest.raises(SchemaError, match=r"resort_every must be an integer.*got 0\.5"):
        RankPrioritizedSampler(resort_every=0.5)


@pytest.mark.parametrize("make", KINDS)
def test_a_schedule_out_of_range_is_refused_when_it_gets_there(make):
    sampler = make(beta=lambda step: 0.5 + step, seed=0)
    view = ListedView(["sss"])
    sampler.draw(view, 2)
    with pytest.raises(SchemaError, match=r"beta must be a number in \[0.*got 1\.5"):
        sampler.draw(view, 2)


# Exact resume.


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_run_stopped_after_any_batch_goes_on_exactly(make, stop, rng):
    view = ListedView(["s" * 30, "sxsx" * 5, "ss-"], [4, 0, 7])

    def go_on(sampler, number):
        draw = sampler.draw(view, 16)
        errors = np.random.default_rng(number).random(16)
        sampler.update_priorities(view, draw.env_ids, draw.positions, errors)
        return steps_of(draw), draw.probabilities.tolist(), draw.weights.tolist()

    sampler = make(seed=3, name=None, **({"resort_every": 40} if make is KINDS[1] else {}))
    for number in range(stop):
        go_on(sampler, number)
    state = sampler.state_dict(priorities=True)
    expected = [go_on(sampler, stop + n) for n in range(6)]
    other = make(seed=9, name=None, **({"resort_every": 40} if make is KINDS[1] else {}))
    other.draw(view, 16)
    other.load_state_dict(state)
    assert [go_on(other, stop + n) for n in range(6)] == expected


@pytest.mark.parametrize("make", KINDS)
def test_priorities_of_another_buffer_are_refused(make):
    twins = [Twin(None, 6, stored=True, sampler=make(seed=0)) for _ in range(2)]
    for twin in twins:
        twin.extend([[""]] * 4)
        twin.buffer.sample(3)
    state = twins[0].buffer.sampler.state_dict(priorities=True)
    twins[1].buffer.sampler.load_state_dict(state)
    with pytest.raises(FormatError, match="sampler state: priorities must be of the"):
        twins[1].buffer.sample(3)


@pytest.mark.parametrize(
    "damage",
    [
        {"uuid": "zz"},
        {"uuid": None},
        {"seen": [-1]},
        {"seen": [9]},
        {"first": "x"},
        {"priorities": np.full(4, np.nan)},
        {"priorities": np.full(4, -1.0)},
        {"priorities": "abc"},
        {"priorities": np.ones((2, 2))},
        {"first": [5], "seen": [1]},
    ],
)
def test_damaged_priorities_are_refused_and_nothing_is_loaded(damage):
    twin = Twin(None, 6, stored=True, sampler=mr.PrioritizedSampler(seed=0))
    twin.extend([[""]] * 4)
    twin.buffer.sample(3)
    sampler = twin.buffer.sampler
    state = sampler.state_dict(priorities=True)
    with pytest.raises(FormatError, match="sampler state: "):
        sampler.load_state_dict(state | {"seed": 77} | damage)
    assert sampler.state_dict()["seed"] == 0
    twin.buffer.sample(3)


def test_the_sampler_says_what_it_is():
    sampler = mr.PrioritizedSampler(seed=0)
    assert repr(sampler) == "PrioritizedSampler(alpha=0.6, beta=0.4, seed=0)"
    assert sampler.where is None
    sampler.draw(ListedView(["ss"]), 2)
    assert sampler.where == "RAM, as the data"


def test_it_takes_at_most_10_bytes_a_row_more_than_the_column():
    view = ListedView(["s" * 100_000])
    sampler = PrioritizedSampler(normalize="buffer", seed=0)
    draw = sampler.draw(view, 64)
    sampler.update_priorities(view, draw.env_ids, draw.positions, np.arange(64.0))
    sampler.draw(view, 64)
    rows = sampler.priorities
    rows.highest()
    held = rows.distribution._tree.nbytes
    for found in (rows.distribution._low, rows._highest):
        held += found._blocks.nbytes + found._above._blocks.nbytes
    assert held <= 10 * len(rows.column.values)
