"""Composition: what may follow what, windows, identity, and values that travel."""

import pickle
import sys

import numpy as np
import numpy.ma  # Masked arrays are looked for where it was imported.
import pytest

import mmreplay as mr
from mmreplay import kernels
from mmreplay.errors import SchemaError
from mmreplay.transforms.base import Bound
from mmreplay.transforms.pipeline import Pipeline
from tests.transforms.world import FIELDS, OBSERVATION, World, distance

HER = mr.HER("future", 0.8, distance)
STACK = mr.FrameStack(4)
GOALS = "observation/desired_goal"
PLAIN = mr.Schema(FIELDS)
STORED = mr.Schema(FIELDS | {"next_observation": OBSERVATION})


def double(fields):
    return {path: array * 2 for path, array in fields.items()}


def noise(fields, generator):
    return fields | {"noise": generator.random(len(fields["action"]))}


class Nothing:
    """A transform of the user's own that changes nothing."""

    def bind(self, outline):
        return Bound(outline, lambda below, base_steps: below)


def calls_of(function):
    """Functions that are called meanwhile, those of C included."""
    count = [0]

    def count_calls(frame, event, argument):
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count[0]


@pytest.mark.skipif(
    not kernels.load("steps").__name__.endswith("_steps"), reason="numpy's twins call more"
)
@pytest.mark.parametrize(
    ("transforms", "limit"),
    [
        ([], 64),
        ([mr.NStep(3, gamma=0.9)], 66),
        ([STACK], 66),
        ([mr.NStep(3, gamma=0.9), STACK], 66),
        ([HER], 218),
        ([HER, mr.NStep(3, gamma=0.9), mr.FrameStack(4, "observation/frame")], 256),
    ],
)
def test_a_batch_takes_few_calls(tmp_path, transforms, limit):
    """Time of small batches is that of calls; their number is alike on any machine."""
    schema = mr.Schema({path: FIELDS[path] for path in FIELDS if path != "life"})
    count = 500
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, count, transforms=transforms, commit_every=None
    ) as buffer:
        numbers = np.arange(count)
        goals = np.zeros((count, 2))
        buffer.extend(
            {
                "observation": {
                    "frame": np.stack([numbers, numbers], 1),
                    "achieved_goal": goals,
                    "desired_goal": goals,
                },
                "action": numbers.astype(np.int32),
                "reward": numbers.astype(np.float32),
                "terminated": numbers % 50 == 49,
                "truncated": np.zeros(count, bool),
            }
        )
        # What a plan lacks is added by the first draws, and pages are looked at then.
        for _ in range(3):
            buffer.sample(64)
        assert min(calls_of(lambda: buffer.sample(64)) for _ in range(3)) <= limit


@pytest.mark.parametrize("stored", [False, True])
def test_every_engine_folds_and_stacks_alike(stored, tmp_path):
    """Records are summed as they are read; engines without any sum columns."""
    schema = mr.Schema(
        {
            "observation": mr.Field((3,), "float32"),
            "action": mr.Field((), "int32"),
            "reward": mr.Field((2,), "float64"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
        | ({"next_observation": mr.Field((3,), "float32")} if stored else {})
    )
    numbers, rng = np.arange(60), np.random.default_rng(0)
    data = {
        "observation": rng.random((60, 3), np.float32),
        "action": numbers,
        "reward": rng.random((60, 2)),
        "terminated": numbers % 7 == 6,
        "truncated": numbers % 11 == 10,
    }
    if stored:
        data["next_observation"] = rng.random((60, 3), np.float32)
    batches = []
    for engine in ("memmap", "memory", "zarr"):
        folder = None if engine == "memory" else tmp_path / engine
        with mr.ReplayBuffer.create(
            folder,
            schema,
            50,
            engine=engine,
            commit_every=None,
            sampler=mr.UniformSampler(3),
            transforms=[mr.NStep(3, 0.9), mr.FrameStack(4)],
        ) as buffer:
            buffer.extend(data)
            batches += [(engine, buffer.sample(100)) for _ in range(3)]
    for at, (engine, batch) in enumerate(batches):
        expected = batches[at % 3][1]
        assert list(batch) == list(expected)
        for path, array in expected.items():
            assert np.array_equal(batch[path], array), (engine, path)
    assert batches[0][1]["observation"].shape == (100, 4, 3)


@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_pipeline_without_effect_gives_what_none_gives(autoreset, stored, tmp_path):
    plain = World(12, 2, autoreset, stored, [], tmp_path / "plain")
    through = World(12, 2, autoreset, stored, [Nothing()], tmp_path / "through")
    for world in (plain, through):
        for number in range(20):
            kinds = ["t" if number % 7 == 3 else "", "u" if number % 5 == 2 else ""]
            final = number % 2 == 0 and autoreset == "disabled" and not stored
            world.add(kinds, final=final)
    ids, positions = np.array([row[:2] for row in plain.legal()]).T
    one = plain.buffer.take(ids, positions)
    other = through.buffer.take(ids, positions)
    assert len(ids) > 10
    assert one.fields.keys() == other.fields.keys()
    for path in one.fields:
        assert one[path].dtype == other[path].dtype
        assert one[path].tobytes() == other[path].tobytes()


@pytest.mark.parametrize(
    ("transforms", "schema", "window"),
    [
        ([], PLAIN, (0, 1)),
        ([], STORED, (0, 0)),
        ([mr.NStep(3, 0.9)], PLAIN, (0, 3)),
        ([mr.NStep(3, 0.9)], STORED, (0, 2)),
        ([STACK, mr.NStep(3, 0.9)], PLAIN, (3, 3)),
        ([mr.ActionHistory(2), mr.FrameStack(2, "action_history")], PLAIN, (3, 1)),
        ([STACK, mr.ActionHistory(2)], PLAIN, (3, 1)),
        ([STACK, mr.ActionHistory(5)], PLAIN, (5, 1)),
        ([mr.DiscountedReturn(0.9)], PLAIN, (0, 1)),
    ],
)
def test_windows_add_where_one_transform_reads_what_another_made(transforms, schema, window):
    pipeline = Pipeline(transforms, schema)
    assert (pipeline.before, pipeline.after) == window


ILLEGAL = [
    ([mr.NStep(2, 0.9), mr.NStep(2, 0.9)], "NStep must not follow another NStep"),
    ([mr.NStep(2, 0.9, rewards="missing")], "NStep: 'missing' must be one of the"),
    ([mr.NStep(2, 0.9, rewards="terminated")], "NStep: 'terminated' must be a field"),
    ([mr.NStep(2, 0.9, discount="action")], "NStep: the name 'action' must be new"),
    ([STACK, STACK], "FrameStack: 'observation/frame' is already a stack"),
    ([mr.NStep(2, 0.9), mr.FrameStack(2, "reward")], "made from several rows"),
    ([mr.FrameStack(2, axis=1)], r"FrameStack: axis must be an axis of \[2\].*got 1"),
    ([mr.FrameStack(2, "next_observation")], "FrameStack: 'next_observation' must be"),
    ([mr.NStep(2, 0.9), HER], "'reward' must be.*but it is changed by NStep"),
    ([mr.Cast("float32", GOALS), HER], r"_goal'.*changed by Cast"),
    ([STACK, HER], "'observation/achieved_goal'.*changed by FrameStack"),
    ([HER, HER], "HER must not follow HER in transforms, which has other goals and"),
    ([mr.DiscountedReturn(0.9), HER], "HER must not follow DiscountedReturn in"),
    ([HER, mr.DiscountedReturn(0.9)], "put DiscountedReturn before"),
    ([mr.HER("future", 1, distance, "observation/x")], "HER: the achieved goal must"),
    ([mr.HER("future", 1, distance, desired="x")], r"HER: the desired goal.*got 'x'"),
    ([mr.HER("future", 1, distance, desired="action")], r"shape \[2\] and 'action' of shape \[\]"),
    ([mr.HER("future", 1, distance, info=["x"])], "HER: 'x' must be a stored field"),
    ([mr.DiscountedReturn(0.9, discount="x")], r"DiscountedReturn: discount.*got 'x'"),
    ([mr.DiscountedReturn(0.9, discount=GOALS)], r"DiscountedReturn:.*got shape \[2\]"),
    ([mr.DiscountedReturn(0.9, name="observation")], "'observation' must be new, but"),
    ([mr.DiscountedReturn(0.9, name="reward/x")], "'reward/x' must be new, but"),
    ([mr.ActionHistory(2, path="observation")], "ActionHistory: 'observation' must be"),
    ([mr.ActionHistory(2, fill=[1, 2])], "field 'fill'"),
    ([mr.Cast("int32", GOALS)], "Cast: int32 cannot hold all values of"),
    ([mr.OneHot(3, "reward")], "OneHot: 'reward' must be of integers, got float32"),
    ([mr.Delta("action")], r"Delta: 'action' must be a field of numbers in.*got int32"),
    ([mr.Normalize({"observation": 0.0}, {"observation": 1.0})], "must be a leaf, got a subtree"),
    ([mr.Normalize({GOALS: [0.0] * 3}, {GOALS: 1.0})], r"Normalize:.*got \[3\]"),
    ([mr.Apply(double), mr.NStep(2, 0.9)], "transforms: NStep must not follow Apply"),
    ([double], r"transforms must be transforms such as NStep\(3.*got function"),
]


@pytest.mark.parametrize(("transforms", "reason"), ILLEGAL)
def test_what_cannot_stand_together_is_refused_with_the_reason(transforms, reason):
    with pytest.raises(SchemaError, match=reason):
        mr.ReplayBuffer.create(None, PLAIN, 8, engine="memory", transforms=transforms)


@pytest.mark.parametrize(
    ("transform", "missing"),
    [
        (mr.NStep(2, 0.9), "NStep: the schema names no reward"),
        (STACK, "FrameStack: the schema names no observation"),
        (HER, "HER: the achieved goal must"),
        (mr.DiscountedReturn(0.9), r"DiscountedReturn: the reward must be.*got None"),
        (mr.ActionHistory(2), "the schema names no action"),
        (mr.OneHot(2), "the schema names no action"),
    ],
)
def test_roles_that_nothing_plays_are_named(transform, missing):
    with pytest.raises(SchemaError, match=missing):
        Pipeline([transform], mr.Schema({"number": mr.Field((), "int64")}))


NEAR = mr.Schema.from_flat(
    {
        "observation": mr.Field((2,), "float32"),
        "goal": mr.Field((2,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "discount_of": mr.Field((), "float32"),
        "value_of": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
)


@pytest.mark.parametrize(
    ("transform", "near"),
    [
        (mr.NStep(2, 0.9, "rewrad"), "reward"),
        (mr.FrameStack(2, "observatoin"), "observation"),
        (mr.ActionHistory(2, "actoin"), "action"),
        (mr.OneHot(2, "actoin"), "action"),
        (mr.Delta("observatoin"), "observation"),
        (mr.Normalize({"observatoin": 0.0}, {"observatoin": 1.0}), "observation"),
        (mr.GAE(0.9, value="valeu_of"), "value_of"),
        (mr.LambdaReturn(0.9, bootstrap="valeu_of", value="value_of"), "value_of"),
        (mr.DiscountedReturn(0.9, discount="discuont_of"), "discount_of"),
        (mr.HER("final", 1, distance, "observatoin", "goal"), "observation"),
        (mr.HER("final", 1, distance, "observation", "gaol"), "goal"),
        (mr.HER("final", 1, distance, "observation", "goal", ["actoin"]), "action"),
    ],
)
def test_paths_of_transforms_get_the_field_that_is_near(transform, near):
    with pytest.raises(SchemaError, match=rf"Did you mean '{near}'\?$"):
        Pipeline([transform], NEAR)


@pytest.mark.parametrize(
    ("transform", "reported"),
    [
        (mr.NStep(2, 0.9, "q"), r"Name one of them, or put the transform that adds it"),
        (mr.GAE(0.9, value="q"), r"got 'q'\. Add it to the schema, or pass a function"),
        (mr.DiscountedReturn(0.9, discount="q"), r"discount must .*\. Use one of these"),
    ],
)
def test_paths_of_transforms_that_are_near_no_field_get_the_other_way_out(transform, reported):
    with pytest.raises(SchemaError, match=reported):
        Pipeline([transform], NEAR)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: mr.NStep(0, 0.9), "NStep n must be an integer of at least 1, got 0"),
        (lambda: mr.NStep(True, 0.9), "NStep n must be an integer.*got True"),
        (lambda: mr.NStep(1, 1.1), r"NStep gamma must be .* \[0, 1\], got 1.1"),
        (lambda: mr.NStep(1, "x"), r"NStep gamma must be .*, got 'x'"),
        (lambda: mr.NStep(1, float("nan")), r"NStep gamma must be .*, got nan"),
        (lambda: mr.FrameStack(0), r"FrameStack k must be .*, got 0"),
        (lambda: mr.ActionHistory(0), r"ActionHistory k must be .*, got 0"),
        (lambda: mr.HER("past", 0.5, distance), r"HER strategy must be .*, got 'past'"),
        (lambda: mr.HER("final", 2, distance), r"HER ratio must be .*, got 2"),
        (lambda: mr.HER("final", 1, None), r"HER reward_fn must be a.*got None"),
        (lambda: mr.DiscountedReturn(2), r"DiscountedReturn gamma must be .*, got 2"),
        (lambda: mr.DiscountedReturn(1, time_limit="x"), r"time_limit must .* got 'x'"),
        (lambda: mr.DiscountedReturn(1, discount_with="x"), r"discount_with .* got 'x'"),
        (lambda: mr.DiscountedReturn(1, time_limit="bootstrap"), "value_fn None"),
        (lambda: mr.DiscountedReturn(1, value_fn=double), "time_limit 'default' with"),
        (lambda: mr.DiscountedReturn(1, clip=(1, 0)), "lower bound first"),
        (lambda: mr.Cast("bfloat16"), "Cast: numpy has no bfloat16"),
        (lambda: mr.Cast("int32", scale=2), r"Cast: scale and offset.*got scale 2 and"),
        (lambda: mr.OneHot(0), r"OneHot num_classes must be .*, got 0"),
        (lambda: mr.Apply(3), "Apply needs a function of a batch's fields, got 3"),
        (lambda: mr.Normalize({}, {}), r"got means of \[\]"),
        (lambda: mr.Normalize({"a": 0}, {"a": -1}), r"Normalize:.*got mean 0\.0 and"),
        (lambda: mr.Normalize({"a": np.nan}, {"a": 1}), r"Normalize:.*got mean nan"),
        (lambda: mr.Normalize({"a": 0}, {"a": 1}, clip=0), "clip must be a number above 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, reason):
    with pytest.raises(SchemaError, match=reason):
        make()


EVERY = [
    HER,
    mr.FrameStack(2, "observation/frame"),
    mr.ActionHistory(2),
    mr.NStep(2, 0.9),
    mr.Delta("observation/frame"),
    mr.OneHot(100),
    mr.Cast("float32", "observation/achieved_goal", scale=0.5),
    mr.Normalize({"reward": 1.0}, {"reward": 2.0}),
    mr.Apply(double),
    mr.Apply(noise, random=True),
]


def test_transforms_travel_as_values_and_give_the_same():
    copies = pickle.loads(pickle.dumps(EVERY))
    worlds = [World(16, 1, "disabled", False, some) for some in (EVERY, copies)]
    batches = []
    for world in worlds:
        for _ in range(12):
            world.add([""])
        batches.append(world.draw([0] * 6, range(3, 9), key=7))
    assert list(batches[0].fields) == list(batches[1].fields)
    for path, array in batches[0].fields.items():
        assert (array == batches[1][path]).all(), path


def test_a_batch_holds_the_fields_that_were_announced():
    world = World(16, 1, "disabled", False, EVERY[:-2])
    for _ in range(12):
        world.add([""])
    batch = world.draw([0] * 6, range(3, 9))
    announced = Pipeline(EVERY[:-2], PLAIN).fields
    assert list(batch.fields) == list(announced)
    for path, field in announced.items():
        assert batch[path].shape == (6, *field.shape), path
        assert batch[path].dtype == field.numpy, path


def test_the_key_alone_decides_what_is_drawn():
    world = World(16, 1, "disabled", False, EVERY)
    for _ in range(12):
        world.add([""])
    batches = [world.draw([0] * 6, range(3, 9), key=key) for key in (1, 1, 2)]
    same = [np.array_equal(batches[0]["noise"], other["noise"]) for other in batches]
    assert same == [True, True, False]
    goals = [batch["observation/desired_goal"] for batch in batches]
    assert np.array_equal(goals[0], goals[1])
    assert not np.array_equal(goals[0], goals[2])


def test_bfloat16_is_named_where_a_field_still_is():
    brain = mr.Field((2,), "bfloat16")
    schema = mr.Schema({"observation": {"a": brain, "b": brain}, "reward": brain})
    plain = {"observation/a", "next_observation/a"}
    pipeline = Pipeline([mr.NStep(2, 0.5), mr.Cast("float32", "observation/b")], schema)
    assert pipeline.bfloat16 == plain
    assert pipeline.fields["reward"].dtype == "float32"
