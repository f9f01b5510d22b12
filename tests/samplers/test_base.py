"""A sampler of a user need not derive from `Sampler`; the same defaults count."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes.starts import num_legal
from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Draw, PrioritySampler, Sampler, Traits, ask, traits_of, unseeded
from tests.buffer.support import Twin


class First:
    """Draws the first legal start, and nothing else."""

    def draw(self, view, batch_size):
        # A draw looks at the starts first, and keeps to what it saw.
        assert num_legal(view) > 0
        env_ids, positions = view.start_at(np.zeros(batch_size, np.int64))
        ones = np.ones(batch_size)
        return Draw(env_ids, positions, ones, ones.astype(np.float32))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Derived(First, Sampler):
    """The same, with the base class."""


class Learning(First):
    """Takes priorities."""

    num_updated = 0

    def update_priorities(self, view, env_ids, positions, values, mask=None):
        self.num_updated += len(positions)
        return 0


class LearningDerived(Learning, Sampler):
    """The same, with the base class."""


BARE = [First, Derived]
LEARNING = [Learning, LearningDerived]


def made(sampler):
    twin = Twin(None, 30, sampler=sampler)
    twin.extend([[kind] for kind in ["", "", "t"] * 5])
    return twin.buffer


@pytest.mark.parametrize("kind", BARE)
def test_the_defaults_are_those_of_a_sampler_of_steps_without_epochs(kind):
    sampler = kind()
    # What it draws, and whether it remembers draws, is not known.
    assert traits_of(sampler) == Traits(form=None, memory=True)
    assert unseeded(sampler) is None
    assert ask(sampler, "form") is None
    assert ask(sampler, "more")(None, 4)
    with pytest.raises(TypeError, match=f"with epochs, got {kind.__name__}"):
        ask(sampler, "num_batches")(None, 4)
    ask(sampler, "close")()


@pytest.mark.parametrize("kind", [*BARE, *LEARNING])
def test_it_draws_alone_and_as_a_part(kind):
    for sampler in (
        kind(),
        mr.MixtureSampler([(kind(), 1), (mr.UniformSampler(0), 1)]),
        mr.RecentSampler(3, 0.5, kind()),
        mr.ignore_earliest(2, kind()),
        mr.SequenceSampler(2, kind()),
        mr.EpisodeSampler(kind()),
    ):
        buffer = made(sampler)
        assert len(buffer.sample(4).positions) == 4
        sampler = buffer.sampler
        ask(sampler, "close")()


@pytest.mark.parametrize("kind", LEARNING)
def test_priorities_reach_it_where_it_takes_some(kind):
    inner = kind()
    assert traits_of(inner).priorities
    assert isinstance(inner, PrioritySampler)
    buffer = made(mr.MixtureSampler([(inner, 1), (mr.UniformSampler(0), 1)]))
    assert buffer.update_priorities(buffer.sample(4), np.ones(4)) == 0
    assert inner.num_updated == 4


@pytest.mark.parametrize("kind", [*BARE, mr.UniformSampler])
def test_priorities_are_refused_where_no_part_takes_some(kind):
    assert not isinstance(kind(), PrioritySampler)
    buffer = made(mr.MixtureSampler([(kind(), 1)]))
    assert not traits_of(buffer.sampler).priorities
    with pytest.raises(SchemaError, match=rf"with priorities, got \['{kind.__name__}'\]"):
        buffer.update_priorities(buffer.sample(4), np.ones(4))


def test_a_counter_named_epoch_makes_no_epochs():
    sampler = First()
    sampler.epoch = 3
    assert traits_of(sampler) == Traits(memory=True)


def test_another_attribute_named_traits_is_no_traits():
    sampler = First()
    sampler.traits = ["bold"]
    assert traits_of(sampler) == Traits(memory=True)


class Counting:
    """Counts its draws, which is a part of its state."""

    num_draws = 0

    def draw(self, view, batch_size):
        self.num_draws += 1
        return super().draw(view, batch_size)

    def state_dict(self, **options):
        return {"num_draws": self.num_draws, "rest": super().state_dict(**options)}

    def load_state_dict(self, state):
        self.num_draws = state["num_draws"]
        super().load_state_dict(state["rest"])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (mr.UniformSampler, {}),
        (mr.PrioritizedSampler, {}),
        (mr.RankPrioritizedSampler, {}),
        (mr.ShuffledSampler, {}),
        (mr.MixtureSampler, {"samplers": [(mr.UniformSampler(seed=1), 1)]}),
        (mr.SequenceSampler, {"length": 2}),
    ],
)
def test_a_sampler_goes_back_to_its_bookmark_whatever_a_class_adds_to_its_state(
    kind, arguments, own
):
    if own:
        kind = type("Own", (Counting, kind), {})
    sampler = kind(**arguments)
    buffer = made(sampler)
    buffer.sample(4)
    bookmark, state = sampler.bookmark(), sampler.state_dict()
    drawn = buffer.sample(4)
    assert sampler.state_dict() != state
    sampler.return_to(bookmark)
    assert sampler.state_dict() == state
    again = buffer.sample(4)
    assert again.positions.tolist() == drawn.positions.tolist()
    assert (sampler.num_draws == 2) if own else (kind.bookmark is not Sampler.bookmark)
