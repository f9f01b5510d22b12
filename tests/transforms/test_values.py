"""Values changed one by one, measured, subtracted, and handed to the user."""

import json
import operator
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError
from tests.transforms.world import World

FRAME = "observation/frame"


def buffer_of(fields, values, transforms, capacity=32):
    """A buffer of one environment with the steps given, as arrays ``[T, ...]``."""
    buffer = mr.ReplayBuffer.create(
        None, mr.Schema(fields), capacity, engine="memory", transforms=transforms
    )
    for number in range(len(next(iter(values.values())))):
        buffer.add({path: array[number] for path, array in values.items()})
    return buffer


def test_a_cast_changes_observation_and_next_alike():
    pixels = np.arange(60, dtype=np.uint8).reshape(5, 3, 4)
    cast = mr.Cast("float32", scale=1 / 255, offset=-0.5)
    fields = {"observation": mr.Field((3, 4), "uint8")}
    batch = buffer_of(fields, {"observation": pixels}, [cast]).take(0, range(4))
    wanted = pixels.astype(np.float32) * np.float32(1 / 255) - np.float32(0.5)
    assert (batch["observation"] == wanted[:4]).all()
    assert (batch["next_observation"] == wanted[1:]).all()
    assert batch["observation"].dtype == np.float32


def test_ends_are_cast_to_numbers_with_n_steps_before_or_after():
    for order in (1, -1):
        transforms = [mr.NStep(2, 0.5), mr.Cast("float32", ["terminated", "truncated"])]
        world = World(8, 1, "disabled", False, transforms[::order])
        for number in range(3):
            world.add(["t" if number == 2 else ""])
        batch = world.draw([0] * 3, range(3))
        assert batch["terminated"].tolist() == [0.0, 1.0, 1.0]
        assert batch["terminated"].dtype == np.float32


def test_rewards_are_scaled_before_they_are_summed_or_after():
    for order in (1, -1):
        transforms = [mr.Cast("float64", "reward", scale=2.0), mr.NStep(2, 0.5)]
        world = World(8, 1, "disabled", False, transforms[::order])
        for _ in range(4):
            world.add([""])
        assert world.draw([0], [1])["reward"].tolist() == [2 * (0.5 + 0.5 * 0.75)]


def test_n_steps_are_discounted_by_products_which_no_processor_rounds_differently():
    fields = {"observation": mr.Field((), "int64"), "reward": mr.Field((), "float64")}
    rewards = np.zeros(80)
    rewards[39] = 1.0
    values = {"observation": np.arange(80), "reward": rewards}
    batch = buffer_of(fields, values, [mr.NStep(40, 0.97)], 80).take(0, range(40))
    products = list(accumulate([0.97] * 39, initial=1.0, func=operator.mul))
    assert batch["reward"].tolist() == products[::-1]


def test_integers_that_do_not_fit_are_refused():
    fields = {"number": mr.Field((), "int64")}
    values = {"number": np.array([1, 300])}
    buffer = buffer_of(fields, values, [mr.Cast("int8", "number")])
    assert buffer.take(0, [0])["number"].dtype == np.int8
    with pytest.raises(SchemaError, match=r"Cast: values of.*got values in \[1, 300\]"):
        buffer.take(0, [0, 1])


def test_one_hot_vectors_are_rows_of_the_identity():
    fields = {"observation": mr.Field((), "int64"), "action": mr.Field((2,), "int64")}
    actions = np.array([[3, 5], [4, 3], [5, 5]])
    values = {"observation": np.arange(3), "action": actions}
    batch = buffer_of(fields, values, [mr.OneHot(4, start=3)]).take(0, [0, 1])
    assert (batch["action"] == np.eye(4)[actions[:2] - 3]).all()
    assert batch["action"].dtype == np.float32
    buffer = buffer_of(fields, values, [mr.OneHot(2, start=3)])
    with pytest.raises(SchemaError, match=r"OneHot: values of.*got values in \[3, 5\]"):
        buffer.take(0, [0, 1])


def test_many_classes_take_no_more_memory_than_their_vectors():
    fields = {"observation": mr.Field((), "int64"), "action": mr.Field((), "int64")}
    values = {"observation": np.arange(3), "action": np.array([0, 199_999, 7])}
    # A matrix of the classes would take 40 GB.
    one_hot = mr.OneHot(200_000, dtype="uint8")
    batch = buffer_of(fields, values, [one_hot]).take(0, [0, 1])
    assert batch["action"].argmax(-1).tolist() == [0, 199_999]
    assert batch["action"].sum(-1, dtype=int).tolist() == [1, 1]


def test_deltas_are_next_less_now_and_keep_their_sign():
    pixels = np.array([[250], [3], [255]], np.uint8)
    fields = {"observation": {"pixels": mr.Field((1,), "uint8")}}
    buffer = buffer_of(fields, {"observation": [{"pixels": p} for p in pixels]}, [])
    batch = mr.ReplayBuffer.create(
        None, mr.Schema(fields), 8, engine="memory", transforms=[mr.Delta()]
    )
    for frame in pixels:
        batch.add(observation={"pixels": frame})
    assert batch.take(0, [0, 1])["delta/pixels"].tolist() == [[-247], [252]]
    assert "delta/pixels" not in buffer.take(0, [0]).fields


@pytest.mark.parametrize("stored", [False, True])
def test_deltas_reach_over_n_steps(stored):
    transforms = [mr.NStep(3, 0.5), mr.Delta(FRAME, "change")]
    world = World(16, 1, "disabled", stored, transforms)
    for _ in range(8):
        world.add([""])
    reach = 102 if stored else 3
    assert world.draw([0], [2])["change/frame"].tolist() == [[reach, -reach]]


MATRICES = st.lists(st.integers(-50, 50), min_size=6, max_size=60)


@settings(max_examples=50, deadline=None)
@given(MATRICES, st.integers(1, 5), st.sampled_from([0.0, 1e6]))
def test_moments_merged_batch_by_batch_are_those_of_all(numbers, count, shift):
    values = np.array(numbers[: len(numbers) // 2 * 2], float).reshape(-1, 2) + shift
    batches = [{"x": part} for part in np.array_split(values, count)]
    found = mr.Normalize.fit(batches, ["x"])
    np.testing.assert_allclose(found.means["x"], values.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(found.stds["x"], values.std(0), rtol=1e-9, atol=1e-9)


def test_normalized_values_have_mean_0_and_deviation_1():
    world = World(32, 1, "disabled", False, [])
    for _ in range(20):
        world.add([""])
    batch = world.draw([0] * 19, range(19))
    fitted = mr.Normalize.fit([batch], [FRAME])
    again = mr.Normalize.from_json(json.loads(json.dumps(fitted.to_json())))
    for normalize in (fitted, again):
        other = World(32, 1, "disabled", False, [normalize])
        for _ in range(20):
            other.add([""])
        now = other.draw([0] * 19, range(19))
        np.testing.assert_allclose(now[FRAME].mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(now[FRAME].std(0), 1, rtol=1e-6)
        assert (now["next_" + FRAME][:-1] == now[FRAME][1:]).all()
        assert now[FRAME].dtype == np.float32


def test_a_constant_field_is_divided_by_1():
    fields = {"number": mr.Field((), "float64")}
    normalize = mr.Normalize({"number": 3.0}, {"number": 9e-9}, clip=2.0)
    buffer = buffer_of(fields, {"number": np.array([4.0, 3.5, 9.0])}, [normalize])
    assert buffer.take(0, range(3))["number"].tolist() == [1.0, 0.5, 2.0]


def test_moments_of_a_buffer_normalize_it():
    world = World(32, 1, "disabled", False, [])
    for _ in range(20):
        world.add([""])
    normalize = mr.Normalize.of(mr.field_moments(world.buffer, ("reward",)))
    rewards = np.arange(1, 21) / 4
    assert normalize.means["reward"] == pytest.approx(rewards.mean())
    assert normalize.stds["reward"] == pytest.approx(rewards.std())


def test_bfloat16_is_measured_as_the_numbers_it_holds():
    fields = {"number": mr.Field((2,), "bfloat16")}
    numbers = np.array([[1, -2], [2, 4], [3, 0.5]], np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype("<u2")
    buffer = buffer_of(fields, {"number": bits}, [])
    normalize = mr.Normalize.fit([buffer.take(0, range(3))], ["number"])
    np.testing.assert_allclose(normalize.means["number"], numbers.mean(0))
    np.testing.assert_allclose(normalize.stds["number"], numbers.std(0), rtol=1e-6)


def test_what_cannot_be_measured_or_read_back_is_refused():
    with pytest.raises(SchemaError, match=r"Normalize\.fit: the batches have no value"):
        mr.Normalize.fit([], ["x"])
    with pytest.raises(FormatError, match="Normalize: the state does not fit"):
        mr.Normalize.from_json({"means": {}})


def noise(fields, generator):
    lead = fields["action"].shape
    return {"noise": generator.random(lead), "action": fields["action"]}


def test_a_function_sees_windows_as_the_batch_has_them():
    world = World(16, 1, "disabled", False, [mr.Apply(noise, random=True)])
    for _ in range(8):
        world.add([""])
    batch = world.draw([0, 0], [0, 2], windows=[[0, 1, 2], [2, 3, 4]])
    assert batch["noise"].shape == (2, 3)
    assert batch["action"].tolist() == [[1, 2, 3], [3, 4, 5]]
    assert set(batch.fields) == {"noise", "action"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda fields: None, r"Apply: <function <lambda> at.*got NoneType"),
        (lambda fields: {"x": np.zeros(3)}, r"Apply: the shape of 'x' must.*got \[3\]"),
    ],
)
def test_the_required_result_of_a_function_is_reported(function, reason):
    world = World(16, 1, "disabled", False, [mr.Apply(function)])
    for _ in range(8):
        world.add([""])
    with pytest.raises(SchemaError, match=reason):
        world.draw([0, 0], [0, 2])


def test_functions_are_applied_in_their_order():
    def plus(fields):
        return fields | {"reward": fields["reward"] + 1}

    def times(fields):
        return fields | {"reward": fields["reward"] * 2}

    world = World(16, 1, "disabled", False, [mr.Apply(plus), mr.Apply(times)])
    world.add([""])
    world.add([""])
    assert world.draw([0], [0])["reward"].tolist() == [2.5]


def test_bfloat16_rewards_are_summed_as_numbers():
    fields = {"observation": mr.Field((), "int64"), "reward": mr.Field((), "bfloat16")}
    bits = (np.array([1.5, 2.0, -4.0], np.float32).view(np.uint32) >> 16).astype("<u2")
    values = {"observation": np.arange(3), "reward": bits}
    buffer = buffer_of(fields, values, [mr.NStep(2, 0.5)])
    batch = buffer.take(0, [0])
    assert batch["reward"].tolist() == [2.5]
    assert batch.bfloat16 == frozenset()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mr.Delta(3), "Delta: paths must be paths of fields, got 3"),
        (lambda: mr.Cast("float32", 3), "Cast: paths must be paths of fields, got 3"),
        (lambda: mr.Delta(name=3), "Delta name must be the name of a field, got 3"),
        (lambda: mr.Normalize(3, 4), "Normalize means must be a mapping, got 3"),
        (
            lambda: mr.Normalize({"observation": "a"}, {"observation": 1}),
            "Normalize: a mean or std must be a number or an array of numbers, got 'a'",
        ),
        (
            lambda: mr.Normalize({"observation": 0}, {"observation": 1}, clip="a"),
            "Normalize clip must be a number above 0, got 'a'",
        ),
        (lambda: mr.Cast("float32", scale="a"), "Cast scale must be a finite number, got 'a'"),
        (lambda: mr.Cast("float32", offset=np.nan), "Cast offset must be a finite number, got nan"),
        (lambda: mr.FrameStack(2, axis="a"), "FrameStack axis must be an integer.*got 'a'"),
        (lambda: mr.OneHot(2, start=0.5), "OneHot start must be an integer.*got 0.5"),
        (
            lambda: mr.DiscountedReturn(0.5, default="a"),
            "DiscountedReturn default must be a number.*got 'a'",
        ),
        (
            lambda: mr.DiscountedReturn(0.5, name=3),
            "DiscountedReturn name must be the name of a field, got 3",
        ),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(make, message):
    values = {"observation": np.zeros((3, 2), np.float32)}
    with pytest.raises(SchemaError, match=message):
        buffer_of({"observation": mr.Field((2,), "float32")}, values, [make()])
