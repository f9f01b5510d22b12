"""Samplers and transforms as class name and arguments."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.ray.descriptions import describe_sampler, describe_transforms, make, text_of
from tests.combinations.own_sampler import ThirdsSampler
from tests.on_ray.rings import SCHEMA


@pytest.mark.parametrize(
    "sampler",
    [
        mr.UniformSampler(block=4),
        mr.PrioritizedSampler(0.7, eps=0.5, normalize="buffer", name="x"),
        mr.PrioritizedSampler(mr.LinearSchedule(0.1, 1.0, 9), alpha_every=1),
        mr.SequenceSampler(4, mr.PrioritizedSampler(name=None), burn_in=2),
        mr.SequenceSampler(4, boundary="pad", first_only=("state",)),
        mr.ShuffledSampler(),
        mr.StratifiedSampler(),
        mr.ignore_earliest(3, mr.PrioritizedSampler(name=None)),
        mr.SequenceSampler(4, mr.ignore_earliest(3, mr.UniformSampler())),
    ],
    ids=repr,
)
def test_what_is_made_of_a_description_is_the_sampler(sampler):
    assert repr(make(describe_sampler(sampler))) == repr(sampler)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_numbers_of_numpy_are_plain_ones(kind):
    number, plain = kind(0.6), float(kind(0.6))
    for one, other in (
        (
            mr.PrioritizedSampler(number, number, eps=number, seed=np.int64(3)),
            mr.PrioritizedSampler(plain, plain, eps=plain, seed=3),
        ),
        (
            mr.PrioritizedSampler(mr.LinearSchedule(number, kind(1), 9)),
            mr.PrioritizedSampler(mr.LinearSchedule(plain, 1.0, 9)),
        ),
        (
            mr.SequenceSampler(np.int64(4), mr.PrioritizedSampler(number)),
            mr.SequenceSampler(4, mr.PrioritizedSampler(plain)),
        ),
    ):
        described = describe_sampler(one)
        assert text_of(described) == text_of(describe_sampler(other))
        assert repr(make(described)) == repr(make(describe_sampler(other)))


def test_learners_that_differ_on_their_own_side_share_a_description():
    one = mr.PrioritizedSampler(0.6, 0.4, seed=1, stratified=False)
    other = mr.PrioritizedSampler(0.6, mr.LinearSchedule(0.4, 1, 100), seed=2)
    assert text_of(describe_sampler(one)) == text_of(describe_sampler(other))
    third = mr.PrioritizedSampler(0.7, 0.4, seed=1)
    assert text_of(describe_sampler(one)) != text_of(describe_sampler(third))


def test_a_beta_that_is_a_function_is_the_learner_s_own():
    one = mr.PrioritizedSampler(0.6, lambda step: 0.4 + step, seed=1)
    other = mr.PrioritizedSampler(0.6, 0.4, seed=2)
    for of_one, of_other in (
        (one, other),
        (mr.SequenceSampler(4, one), mr.SequenceSampler(4, other)),
    ):
        described = describe_sampler(of_one)
        assert text_of(described) == text_of(describe_sampler(of_other))
        assert type(make(described)) is type(of_one)


@pytest.mark.parametrize(
    "sampler",
    [
        mr.RankPrioritizedSampler(),
        mr.DistinctSampler(),
        mr.StratifiedSampler(stratified=False),
        mr.EpisodeSampler(),
        mr.MixtureSampler([(mr.UniformSampler(), 1)]),
        mr.EmphasizeRecentSampler(10),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_other_samplers_are_refused_by_name(sampler):
    with pytest.raises(SchemaError, match=rf"^{type(sampler).__name__} cannot draw"):
        describe_sampler(sampler)


def test_a_window_around_another_sampler_is_refused_by_name():
    sampler = mr.SequenceSampler(4, mr.RankPrioritizedSampler())
    name = "SequenceSampler around RankPrioritizedSampler"
    with pytest.raises(SchemaError, match=f"^{name} cannot draw"):
        describe_sampler(sampler)


def test_functions_do_not_travel():
    with pytest.raises(
        SchemaError,
        match=r"alpha of PrioritizedSampler must be a number, .* Functions do not travel",
    ):
        describe_sampler(mr.PrioritizedSampler(alpha=lambda step: 0.5))
    with pytest.raises(SchemaError, match="got Apply"):
        describe_transforms([mr.Apply(dict)])
    with pytest.raises(SchemaError, match="value of GAE must be a number"):
        describe_transforms([mr.GAE(0.99, value=len)])


@pytest.mark.parametrize(
    "transform",
    [
        mr.NStep(3, gamma=0.99),
        mr.FrameStack(4),
        mr.ActionHistory(2),
        mr.Cast("float32", scale=1 / 255),
        mr.OneHot(5, path="action"),
        mr.Delta(),
        mr.DiscountedReturn(0.9, clip=(-1.0, 1.0)),
        mr.GAE(0.9),
        mr.LambdaReturn(0.9),
        mr.WithoutNext(),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_what_is_made_of_a_description_is_the_transform(transform):
    (description,) = describe_transforms([transform])
    assert repr(make(description)) == repr(transform)


def test_arrays_travel_as_they_are():
    mean, std = np.arange(3.0), np.ones(3)
    normalize = mr.Normalize({"observation": mean}, {"observation": std}, clip=5.0)
    (description,) = describe_transforms([normalize])
    made = make(description)
    np.testing.assert_array_equal(made.means["observation"], mean)
    assert made.clip == 5.0
    assert text_of(description) != text_of({})


def test_the_text_of_arrays_is_short_and_their_own():
    arrays = [np.zeros(4000), np.zeros((40, 100)), np.zeros(4000, np.float32), np.ones(4000)]
    texts = {text_of({"mean": array}) for array in (*arrays, np.zeros(4000))}
    assert len(texts) == len(arrays)
    assert max(len(text) for text in texts) < 200


@pytest.mark.parametrize(
    "name", ["subprocess:Popen", "Popen", "", ":", "os:system", "no.such:Thing", "os:no.such", None]
)
def test_only_classes_that_say_so_are_made(name):
    with pytest.raises(SchemaError, match="class must be one that this node can import and that"):
        make({"class": name, "arguments": {"args": ["true"]}})


def test_a_sampler_of_others_travels_by_its_module():
    sampler = ThirdsSampler(3, heavy=np.float64(2.0))
    described = describe_sampler(sampler)
    assert described["class"] == "tests.combinations.own_sampler:ThirdsSampler"
    assert described["arguments"] == {"heavy": 2.0}
    made = make(described)
    assert type(made) is ThirdsSampler
    assert made.heavy == 2.0
    assert text_of(described) == text_of(describe_sampler(ThirdsSampler(4, heavy=2.0)))


def test_a_class_that_no_other_process_can_import_is_refused():
    class Here(ThirdsSampler):
        pass

    with pytest.raises(SchemaError, match="Here must be a class that the nodes of a run can"):
        describe_sampler(Here(0))
    main = type("Main", (ThirdsSampler,), {"__module__": "__main__"})
    with pytest.raises(SchemaError, match=r"got one of __main__\. Put it into a module"):
        describe_sampler(main(0))


class Alike:
    """No subclass of `Sampler`, which says that it can be divided."""

    divides, described = "shares", True
    draw = mass = draw_at = ThirdsSampler.mass
    state_dict = load_state_dict = ThirdsSampler.state_dict


class Extra(mr.PrioritizedSampler):
    """Has an argument of its own, and passes the others on."""

    def __init__(self, extra=3, **options):
        super().__init__(**options)
        self.extra = extra


class Newest(mr.UniformSampler):
    """Keeps the argument of its own."""

    def __init__(self, seed=None, *, window=100):
        super().__init__(seed)
        self.window = window


class SaysBoth(mr.PrioritizedSampler):
    """Says with which arguments it is made."""

    def __init__(self, extra=3, **options):
        super().__init__(**options)
        self.extra = extra

    def settings(self):
        return {**super().settings(), "extra": self.extra}


class OwnDraw(mr.PrioritizedSampler):
    """Draws otherwise than shards would."""

    def draw(self, view, batch_size):
        return super().draw(view, batch_size)


class OwnSteps(mr.NStep):
    """A transform with a constructor of its own."""

    def __init__(self):
        super().__init__(3, gamma=0.5)


def test_arguments_of_a_class_of_others_travel_or_it_is_refused():
    made = make(describe_sampler(Newest(1, window=7)))
    assert (type(made), made.window) == (Newest, 7)
    made = make(describe_sampler(SaysBoth(9, alpha=0.7)))
    assert (made.extra, made.settings()["alpha"]) == (9, 0.7)
    for sampler in (Extra(9), mr.SequenceSampler(4, Extra(9))):
        with pytest.raises(
            SchemaError, match=r"Extra must say with which options it was made, .* Define settings"
        ):
            describe_sampler(sampler)
    assert repr(Extra(9, alpha=0.7)) == "Extra(alpha=0.7, beta=0.4)"


def test_what_a_class_of_others_replaces_is_not_left_out():
    for sampler in (OwnDraw(), mr.SequenceSampler(4, OwnDraw())):
        with pytest.raises(SchemaError, match="OwnDraw cannot draw a batch in parts"):
            describe_sampler(sampler)
    with pytest.raises(SchemaError, match=r"OwnSteps must be made by its fields .* Make the"):
        describe_transforms([OwnSteps()])


def test_a_sampler_of_a_run_derives_from_the_base_class():
    with pytest.raises(SchemaError, match=r"Alike must derive from mmreplay\.samplers\.base\.S"):
        describe_sampler(Alike())


def test_a_split_buffer_is_of_one_ring():
    buffer = mr.ReplayBuffer.create(None, SCHEMA, 9, engine="memory")
    buffer.extend(n=np.arange(9))
    part, _ = mr.split(buffer, [0.5, 0.5], by="step", seed=0)
    with pytest.raises(SchemaError, match="restriction of RestrictedSampler must be a number"):
        describe_sampler(part.sampler(mr.UniformSampler(0)))
