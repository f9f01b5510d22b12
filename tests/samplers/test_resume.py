"""States with priorities go on exactly, through whatever wraps the sampler."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError
from tests.buffer.support import Twin
from tests.contracts.sampler import steps_of

KINDS = [mr.PrioritizedSampler, mr.RankPrioritizedSampler]


@pytest.fixture(scope="module")
def view():
    """Two environments of 30 steps, which nobody writes any more."""
    twin = Twin(None, 40, 2)
    twin.extend([["", ""]] * 30)
    yield twin.buffer.view
    twin.buffer.close()


def learn(sampler, view, draws):
    """Draw, and give what was drawn priorities of its own."""
    for _ in range(draws):
        draw = sampler.draw(view, 8)
        values = np.abs(np.sin(7.0 * draw.positions + draw.env_ids))
        sampler.update_priorities(view, draw.env_ids, draw.positions, values)


def goes_on(sampler, view, make):
    """Whether a sampler that takes its state over draws what it draws."""
    state = sampler.state_dict(priorities=True)
    again = make()
    again.load_state_dict(state)
    return all(steps_of(sampler.draw(view, 8)) == steps_of(again.draw(view, 8)) for _ in range(4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "alpha", [0.7, mr.LinearSchedule(0.3, 0.7, 2), mr.LinearSchedule(0.3, 0.7, 50)]
)
@pytest.mark.parametrize("draws", [1, 5])
def test_a_run_goes_on_whatever_alpha_was(view, kind, alpha, draws):
    def make():
        return kind(alpha=alpha, seed=3, name=None)

    sampler = make()
    learn(sampler, view, draws)
    assert goes_on(sampler, view, make)


@pytest.mark.parametrize("kind", KINDS)
def test_priorities_that_were_set_before_the_first_draw_are_sorted_after_it(view, kind):
    def make():
        return kind(seed=3, name=None)

    sampler, positions = make(), np.arange(20)
    values = np.abs(np.sin(7.0 * positions))
    sampler.update_priorities(view, positions * 0, positions, values)
    assert goes_on(sampler, view, make)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_loaded_is_saved_again_before_a_draw(view, kind):
    sampler = kind(seed=3, name=None)
    learn(sampler, view, 5)
    state = sampler.state_dict(priorities=True)
    again = kind(name=None)
    again.load_state_dict(state)
    saved = again.state_dict(priorities=True)
    assert saved.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(saved[name], value)
    third = kind(name=None)
    third.load_state_dict(saved)
    assert steps_of(third.draw(view, 8)) == steps_of(sampler.draw(view, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda s: mr.MixtureSampler([(s, 3), (mr.UniformSampler(0), 1)], seed=0),
        lambda s: mr.RecentSampler(2, 0.5, s, seed=0),
        lambda s: mr.ignore_earliest(2, s),
        lambda s: mr.ignore_earliest(2, mr.MixtureSampler([(s, 1)], seed=0)),
        lambda s: mr.SequenceSampler(2, mr.ignore_earliest(2, s)),
    ],
)
def test_what_wraps_a_sampler_saves_its_priorities(view, kind, wrapped):
    def make():
        return wrapped(kind(seed=3, name=None))

    sampler = make()
    learn(sampler, view, 5)
    assert "priorities" not in str(sampler.state_dict())
    assert goes_on(sampler, view, make)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_that_refuses_a_state_keeps_its_priorities(view, kind):
    def make():
        parts = [(kind(seed=3, name=None), 1), (mr.UniformSampler(0), 1)]
        return mr.MixtureSampler(parts, seed=0)

    sampler, twin = make(), make()
    for each in (sampler, twin):
        learn(each, view, 2)
    other = sampler.state_dict(priorities=True)
    for each in (sampler, twin):
        learn(each, view, 3)
    other["parts"][1] = {"kind": "of nothing"}
    with pytest.raises(FormatError, match=r"sampler state: kind must.*got 'of nothing'"):
        sampler.load_state_dict(other)
    for _ in range(3):
        assert steps_of(sampler.draw(view, 8)) == steps_of(twin.draw(view, 8))
