"""What a sampler is, is known when it is made, at any depth of wrappers."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.samplers.base import GROUPS, PADDED, RAGGED, RANKS, SHARES, STEPS, Traits, traits_of

SCHEMA = mr.Schema({"uid": mr.Field((), "int64"), "version": mr.Field((), "int64")})
ONLY_LEARNERS = frozenset(mr.ShuffledSampler().settings())
EPOCH = Traits(
    STEPS, ends=True, epochs=True, once=True, memory=True, divides=RANKS, local=ONLY_LEARNERS
)
HIDDEN = replace(EPOCH, ends=False, divides="alone")
WEIGHED = frozenset({"seed", "beta", "stratified"})


def made(sampler, count=20):
    buffer = mr.ReplayBuffer.create(None, SCHEMA, 100, engine="memory", sampler=sampler)
    buffer.extend(uid=np.arange(count), version=np.zeros(count, int))
    return buffer


def mixed(*samplers):
    return mr.MixtureSampler([(each, 1) for each in samplers], seed=0)


def windows(sampler=None, **options):
    return mr.SequenceSampler(3, sampler or mr.UniformSampler(0), **options)


LEAVES = {
    "uniform": (mr.UniformSampler, Traits(STEPS, divides=SHARES)),
    "distinct": (mr.DistinctSampler, Traits(STEPS, distinct=True)),
    "stratified": (mr.StratifiedSampler, Traits(STEPS, divides=SHARES)),
    "by environment": (lambda: mr.StratifiedSampler(stratified=False), Traits(STEPS)),
    "emphasize": (lambda: mr.EmphasizeRecentSampler(9), Traits(STEPS)),
    "prioritized": (
        lambda: mr.PrioritizedSampler(name=None),
        Traits(STEPS, priorities=True, divides=SHARES, local=WEIGHED),
    ),
    "ranks": (lambda: mr.RankPrioritizedSampler(name=None), Traits(STEPS, priorities=True)),
    "shuffled": (mr.ShuffledSampler, EPOCH),
    "groups": (lambda: mr.GroupSampler("version"), Traits(GROUPS)),
    "stale": (lambda: mr.StalenessSampler("version", 9), Traits(STEPS)),
    "stale groups": (
        lambda: mr.StalenessSampler("version", 9, sampler=mr.GroupSampler("version")),
        Traits(GROUPS),
    ),
    "uses": (
        lambda: mr.UseCounter(1, mr.DistinctSampler(), name=None),
        Traits(STEPS, once=True, memory=True, distinct=True),
    ),
    "windows": (
        lambda: windows(first_only=["version", "uid"], burn_in=2),
        Traits("windows of 5 steps", 5, ("uid", "version"), divides=SHARES, learned=(2, 5)),
    ),
    "epochs of windows": (
        lambda: windows(mr.ShuffledSampler()),
        replace(EPOCH, form="windows of 3 steps", window_length=3, learned=(0, 3)),
    ),
    "padded": (mr.EpisodeSampler, Traits(PADDED)),
    "ragged": (lambda: mr.EpisodeSampler(layout="ragged"), Traits(RAGGED)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_each_sampler_says_what_it_is(name):
    make, traits = LEAVES[name]
    sampler = make()
    assert traits_of(sampler) == traits
    assert sampler.traits == traits
    assert traits_of(pickle.loads(pickle.dumps(sampler))) == traits


NARROWING = {
    "earliest": lambda s: mr.ignore_earliest(2, s),
    "part": lambda s: mr.split(made(None), [0.5, 0.5], by="step")[0].sampler(s),
}
SHARING = {
    "mixture": lambda s: mixed(s),
    "mixture of two": lambda s: mixed(s, mr.UniformSampler(1)),
    "recent": lambda s: mr.RecentSampler(3, 0.5, s),
}


@pytest.mark.parametrize("around", NARROWING)
@pytest.mark.parametrize("name", LEAVES)
def test_a_restriction_is_what_its_part_is(name, around):
    make, traits = LEAVES[name]
    if name.startswith("stale"):
        traits = replace(traits)
    assert traits_of(NARROWING[around](make())) == traits


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_epochs_and_priorities_are_seen_through_any_wrappers(depth):
    wrappers = {**NARROWING, **SHARING}
    for names in itertools.product(wrappers, repeat=depth):
        epochs, priorities = mr.ShuffledSampler(0), mr.PrioritizedSampler(name=None)
        for name in names:
            epochs = wrappers[name](epochs)
            priorities = wrappers[name](priorities)
        shares = any(name in SHARING for name in names)
        mixes = any("mixture" in name for name in names)
        assert traits_of(epochs) == (HIDDEN if shares else EPOCH)
        divides = "alone" if shares else SHARES
        wanted = Traits(STEPS, priorities=True, memory=mixes, divides=divides, local=WEIGHED)
        assert traits_of(priorities) == wanted


class Bare:
    """A wrapper of a user, which names its part alone."""

    def __init__(self, part):
        self.parts = [part]

    def draw(self, view, batch_size):
        return self.parts[0].draw(view, batch_size)

    def state_dict(self):
        return {"kind": "Bare", "part": self.parts[0].state_dict()}

    def load_state_dict(self, state):
        self.parts[0].load_state_dict(state["part"])


HIDING = {
    "mixture": mixed,
    "recent": lambda s: mr.RecentSampler(3, 0.5, s, seed=0),
    "earliest around a mixture": lambda s: mr.ignore_earliest(2, mixed(s)),
    "mixture of a restriction": lambda s: mixed(mr.ignore_earliest(2, s)),
    "mixture of mixtures": lambda s: mixed(mixed(s), mr.UniformSampler(1)),
    "a user's wrapper": Bare,
    "a mixture of a user's wrapper": lambda s: mixed(Bare(s)),
}


@pytest.mark.parametrize("name", HIDING)
def test_an_epoch_inside_is_refused_where_steps_of_it_would_be_lost(name):
    def hidden():
        return HIDING[name](mr.ShuffledSampler(0))

    with pytest.raises(SchemaError, match="inside a UseCounter must have no epochs"):
        mr.UseCounter(1, hidden(), name=None)
    with pytest.raises(SchemaError, match="StalenessSampler must have no epochs"):
        mr.StalenessSampler("version", 9, sampler=hidden())
    for option in ({"max_length": 3}, {"where": np.isfinite}):
        with pytest.raises(SchemaError, match="running must be False with max_length"):
            mr.EpisodeSampler(hidden(), running=True, **option)
    # Nothing leaves such an epoch.
    mr.EpisodeSampler(hidden(), running=True)
    mr.EpisodeSampler(hidden(), max_length=3)


def test_uses_inside_of_running_episodes_are_no_epoch():
    counter = mr.UseCounter(1, mr.DistinctSampler(0), name=None)
    mr.EpisodeSampler(counter, running=True, max_length=3)


@pytest.mark.parametrize("name", HIDING)
def test_priorities_inside_are_refused_where_no_batch_has_any(name):
    inside = HIDING[name](mr.PrioritizedSampler(name=None))
    if type(inside) is Bare:
        # It takes no priorities, and passes none on.
        mr.EpisodeSampler(inside, layout="ragged")
        return
    if name == "a mixture of a user's wrapper":
        assert not traits_of(inside).priorities
        return
    with pytest.raises(SchemaError, match="'padded' with a sampler with priorities"):
        mr.EpisodeSampler(inside, layout="ragged")


OTHERS = {
    "steps": (lambda: mr.UniformSampler(1), r"\['windows of 3 steps', 'single steps'"),
    "a mixture of steps": (lambda: mixed(mr.UniformSampler(1)), "'single steps'"),
    "a longer one": (lambda: mr.SequenceSampler(4), "'windows of 4 steps'"),
    "a burn-in": (lambda: windows(burn_in=1), "'windows of 4 steps'"),
    "first_only": (
        lambda: windows(first_only=["uid"]),
        r"\"windows of 3 steps with first_only=\['uid'\]\"",
    ),
    "padded episodes": (mr.EpisodeSampler, "'padded episodes'"),
    "first_only in a mixture": (
        lambda: mixed(windows(first_only=["uid"])),
        r"first_only=\['uid'\]",
    ),
    "a restriction of steps": (
        lambda: mr.ignore_earliest(2, mr.UniformSampler(1)),
        "'single steps'",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_windows_share_a_batch_with_windows_of_one_shape_alone(name):
    make, got = OTHERS[name]
    for first, second in ((windows(), make()), (make(), windows())):
        with pytest.raises(SchemaError, match="must draw the same form, got") as caught:
            mixed(first, second)
        way_out = "first_only." if "first_only" in name else "in one SequenceSampler"
        assert way_out in str(caught.value)
        buffers = [made(first), made(second)]
        with pytest.raises(SchemaError, match="concat: samplers must all draw the sam"):
            mr.concat(buffers)
    with pytest.raises(SchemaError, match=got):
        mixed(windows(), make())


@pytest.mark.parametrize(
    "part",
    [
        windows,
        mr.EpisodeSampler,
        lambda: mr.EpisodeSampler(layout="ragged"),
        lambda: mr.GroupSampler("version"),
    ],
)
def test_what_a_part_draws_is_what_its_wrapper_draws(part):
    wrapper = Bare(part())
    assert traits_of(wrapper).form == traits_of(part()).form
    with pytest.raises(SchemaError, match="must draw single steps"):
        mr.SequenceSampler(2, wrapper)
    with pytest.raises(SchemaError, match="samplers that share a batch must"):
        mixed(mr.UniformSampler(0), wrapper)
    # Around single steps it may lay windows.
    assert traits_of(Bare(mr.UniformSampler())).form is None


class Silent(Bare):
    """A wrapper of a user, of which nothing is known before it draws."""

    def __init__(self, part):
        self.inner = part

    def draw(self, view, batch_size):
        return self.inner.draw(view, batch_size)

    def state_dict(self):
        return {"kind": "Silent", "part": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["part"])


def test_windows_of_another_first_only_are_in_no_batch():
    first, second = windows(first_only=["uid"]), windows(first_only=["version"])
    with pytest.raises(SchemaError, match="Give all of them the same first_only"):
        mixed(Bare(first), Bare(second))
    sampler = mixed(Silent(first), Silent(second))
    state = sampler.state_dict()
    with pytest.raises(
        SchemaError, match=r"windows of one first_only, got \[\['uid'\], \['version'\]\]"
    ):
        made(sampler).sample(4)
    assert sampler.state_dict() == state


def test_windows_of_one_shape_share_a_batch():
    one = windows(first_only=["uid", "version"])
    two = windows(mr.DistinctSampler(3), first_only=("version", "uid"), boundary="any")
    buffer = made(mixed(one, two))
    batch = buffer.sample(4)
    assert batch["uid"].shape == (4,)
    assert batch["is_first"].shape == (4, 3)


REFUSED = {
    "a number": (5, "sampler must be a sampler such as .*, got 5"),
    "nothing": (None, "sampler must be a sampler such as .*, got None"),
    "a class": (mr.UniformSampler, "sampler must be a sampler such as .*, got <class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sampler_is_refused_before_it_draws(name):
    thing, message = REFUSED[name]
    buffer = made(mr.UniformSampler(0))
    with pytest.raises(SchemaError, match=message):
        buffer.sampler = thing
    with pytest.raises(SchemaError, match=message):
        buffer.sample_by(thing, 2)
    assert len(buffer.sample(2)) == 2


FIELDS = {
    "another name": (lambda: mr.GroupSampler("prompt"), "field 'prompt' is not in the"),
    "a version inside": (
        lambda: mixed(mr.StalenessSampler("age", 3), mr.UniformSampler(0)),
        "field 'age' is not in the schema",
    ),
    "first_only": (lambda: windows(first_only=["x"]), "first_only must name fields of"),
    "first_only inside": (
        lambda: mr.ignore_earliest(2, windows(first_only=["x"])),
        "first_only must name fields of",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_sampler_of_fields_that_are_not_there_is_refused_when_it_is_set(name):
    make, message = FIELDS[name]
    buffer = made(mr.UniformSampler(0))
    before = buffer.sampler
    with pytest.raises(SchemaError, match=message):
        buffer.sampler = make()
    assert buffer.sampler is before
    with pytest.raises(SchemaError, match=message):
        mr.ReplayDataset(buffer).draws(make(), 4)
    with pytest.raises(SchemaError, match=message):
        mr.ReplayStream(buffer, make(), 4)
    with pytest.raises(SchemaError, match=message):
        made(make())


class Ending(Silent):
    """Says that its epochs end, and nothing of when."""

    traits = Traits(ends=True)


class Derived(Ending, mr.samplers.base.Sampler):
    """The same with the defaults of samplers, of which no epoch ends."""

    epoch = 0


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [(Ending, "epoch or more or num_batches"), (Derived, "more or num_batches")],
)
def test_epochs_that_do_not_say_when_they_end_are_refused(kind, lacking):
    message = f"{kind.__name__} has traits with ends=True, and no {lacking} of its own"
    buffer = made(mr.UniformSampler(0))
    sampler = kind(mr.UniformSampler(0))
    state = sampler.state_dict()
    with pytest.raises(SchemaError, match=message):
        buffer.sampler = sampler
    with pytest.raises(SchemaError, match=message):
        mr.ReplayDataset(buffer).draws(sampler, 2)
    with pytest.raises(SchemaError, match=message):
        mr.ReplayStream(buffer, sampler, 2)
    with pytest.raises(SchemaError, match=message):
        buffer.sampler = mr.ignore_earliest(2, sampler)
    assert sampler.state_dict() == state
