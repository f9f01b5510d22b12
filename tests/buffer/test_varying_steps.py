"""Steps and blocks with fields that vary, as users pass them to add and extend."""

import warnings

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.buffer.validation import StepValidator
from mmreplay.errors import SchemaError
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.layout import packer, record_layout

SCHEMA = mr.Schema(
    {
        "observation": {
            "mission": mr.Field.text(max_bytes=20),
            "cloud": mr.Field((None, 3), "float32", max_length=4),
        },
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
)
CLOUDS = [np.ones((2, 3), np.float32), np.zeros((0, 3), np.float32)]


def step(mission, cloud, reward=0.5, terminated=False):
    return {
        "observation": {"mission": mission, "cloud": cloud},
        "reward": reward,
        "terminated": terminated,
    }


def checked(num_envs, data, schema=SCHEMA):
    validator = StepValidator(schema, num_envs)
    assert validator.plain_block(data) is None
    return validator.step(validator.flat(data), num_envs)


@pytest.mark.parametrize("axis", [False, True])
def test_a_step_of_one_environment_needs_no_axis(axis):
    data = step("go", CLOUDS[0], 0.5, False)
    if axis:
        data = step(["go"], CLOUDS[0][None], [0.5], [False])
    columns = checked(1, data)
    mission = columns["observation/mission"]
    assert isinstance(mission, mr.Ragged)
    assert mission.shape == (1,)
    assert mission.text() == ["go"]
    assert columns["observation/cloud"][0].tolist() == CLOUDS[0].tolist()


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_step_of_several_environments_has_a_value_for_each(kind):
    # A tuple is what Gymnasium's vector environments give for Text.
    data = step(kind(["go", "stop"]), tuple(CLOUDS), np.ones(2), np.zeros(2, bool))
    columns = checked(2, data)
    assert columns["observation/mission"].text() == ["go", "stop"]
    assert columns["observation/cloud"].lengths.tolist() == [2, 0]
    assert columns["reward"].shape == (2,)


def test_some_environments_have_a_value_each():
    validator = StepValidator(SCHEMA, 3)
    data = step(["go", "stop"], CLOUDS, np.ones(2), np.zeros(2, bool))
    columns = validator.step(validator.flat(data), 2)
    assert columns["observation/mission"].shape == (2,)


@pytest.mark.parametrize("tensors", [False, True])
def test_the_batch_of_one_buffer_is_a_block_of_another(tensors):
    fields = {
        "observation/mission": mr.Ragged(
            np.frombuffer(b"gostop", np.uint8).copy(), np.array([0, 2, 6])
        ),
        "observation/cloud": mr.Ragged(CLOUDS[0], np.array([0, 2, 2])),
        "reward": np.ones(2, np.float32),
        "terminated": np.zeros(2, bool),
    }
    batch = mr.Batch(fields, *np.zeros((4, 2), int))
    validator = StepValidator(SCHEMA, 1)
    flat = validator.flat(batch.torch() if tensors else batch)
    columns, steps = validator.block(flat, 1)
    assert steps == 2
    assert columns["observation/mission"].shape == (2, 1)
    assert columns["observation/mission"].text() == [["go"], ["stop"]]


def test_a_block_has_steps_and_environments():
    validator = StepValidator(SCHEMA, 2)
    cloud = CLOUDS[0]
    data = step(
        [["a", "b"], ["c", ""], ["d", "e"]],
        [[cloud, cloud[:1]]] * 3,
        np.ones((3, 2)),
        np.zeros((3, 2), bool),
    )
    columns, steps = validator.block(validator.flat(data), 2)
    assert steps == 3
    assert columns["observation/mission"].text() == [["a", "b"], ["c", ""], ["d", "e"]]
    assert columns["observation/cloud"].lengths.tolist() == [[2, 1]] * 3


@pytest.mark.parametrize("envs", [1, 2])
def test_blocks_of_empty_values_and_of_no_steps_are_blocks(envs):
    validator = StepValidator(SCHEMA, envs)
    for steps in (0, 2):
        texts, clouds = [[""] * envs] * steps, [[[]] * envs] * steps
        data = step(texts, clouds, np.ones((steps, envs)), np.zeros((steps, envs), bool))
        columns, count = validator.block(validator.flat(data), envs)
        assert count == steps
        assert columns["observation/mission"].shape == (steps, envs)
        assert columns["observation/cloud"].shape == (steps, envs)
        assert columns["observation/cloud"].values.shape == (0, 3)
    if envs == 1:
        data = step([""] * 2, [[]] * 2, np.ones(2), np.zeros(2, bool))
        columns, count = validator.block(validator.flat(data), 1)
        assert columns["observation/cloud"].shape == (2, 1)


@pytest.mark.parametrize(
    ("envs", "data", "message"),
    [
        (
            1,
            step("go", CLOUDS, np.ones(2), np.zeros(2, bool)),
            r"'observation/mission' must be a list of values \[T\], got 'go'\. extend",
        ),
        (
            1,
            step(["go"] * 2, CLOUDS[0], np.ones(2), np.zeros(2, bool)),
            r"'observation/cloud' must be a list of values \[T\], got shape \[2, 3\]",
        ),
        (
            2,
            step(np.array(["go"] * 2), CLOUDS, np.ones(2), np.zeros(2, bool)),
            r"'observation/mission' must be a list of values \[T, 2\], got shape \[2\]",
        ),
        (
            1,
            step(["go"] * 3, CLOUDS, np.ones(2), np.zeros(2, bool)),
            "'observation/cloud' must have T=3 steps as the fields before it, got 2",
        ),
        (
            2,
            step([["a", "b"], ["c"]], CLOUDS, np.ones(2), np.zeros(2, bool)),
            "'observation/mission', step 1 must have 2 values, got 1",
        ),
        (
            2,
            step([["a", "b"], ["c", "x" * 21]], CLOUDS, [], []),
            "'observation/mission', step 1, value 1 must have at most 20 bytes, got 21",
        ),
        (
            1,
            step(["a", "x" * 21], CLOUDS, [], []),
            "'observation/mission', value 1 must have at most 20 bytes, got 21",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused_by_name(envs, data, message):
    validator = StepValidator(SCHEMA, envs)
    with pytest.raises(SchemaError, match=f"field {message}"):
        validator.block(validator.flat(data), envs)


def test_a_step_that_does_not_fit_is_refused_by_name():
    with pytest.raises(SchemaError, match="field 'observation/mission' must have at m"):
        checked(1, step("x" * 21, CLOUDS[0]))
    with pytest.raises(SchemaError, match="'observation/mission' must have 2 values, "):
        checked(2, step("xy", CLOUDS, np.ones(2), np.zeros(2, bool)))
    other = StepValidator(mr.Schema({"observation": {"a": mr.Field.text(9)}}), 2)
    data = {"observation": {"mission": ("a", "b"), "a": ("c", "d")}}
    with pytest.raises(SchemaError, match=r"unknown fields .*'observation/mission/0'"):
        other.flat(data)


FLOATS = mr.Schema({"x": mr.Field((None,), "float32", max_length=4)})


@pytest.mark.parametrize(
    "value",
    [
        np.array([0.1, 0.2]),
        [np.array([0.25, 0.1])],
        mr.Ragged(np.array([0.1]), np.array([0, 1])),
        torch.tensor([0.1], dtype=torch.float64),
    ],
    ids=["array", "list of arrays", "ragged", "tensor"],
)
def test_rounding_warns_once_as_for_fields_of_one_shape(value):
    validator = StepValidator(FLOATS, 1)
    with pytest.warns(RuntimeWarning, match="'x': float32 does not hold float64 .*0.1"):
        validator.step({"x": value}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validator.step({"x": value}, 1)


def test_what_is_not_rounded_warns_of_nothing():
    validator = StepValidator(FLOATS, 1)
    for value in (np.array([0.5]), [0.1], [np.array([0.5]), np.array([2.0])]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps = [value, value] if len(value) < 2 else value
            validator.block({"x": steps}, 1)


# Final observations.

ENDED = np.array([True, False])


@pytest.mark.parametrize(
    "final",
    [
        {"mission": ["end", "none"], "cloud": CLOUDS},
        {"mission": ("end", "none"), "cloud": tuple(CLOUDS)},
        np.array([{"mission": "end", "cloud": CLOUDS[0]}, None]),
        [{"mission": "end", "cloud": CLOUDS[0].tolist()}, None],
    ],
    ids=["columns", "tuples", "objects", "list"],
)
def test_final_observations_vary_too(final):
    columns = StepValidator(SCHEMA, 2).final(final, ENDED)
    mission, cloud = columns["observation/mission"], columns["observation/cloud"]
    assert mission.shape == cloud.shape == (2,)
    assert mission[:1].text() == ["end"]
    assert cloud[0].tolist() == CLOUDS[0].tolist()


def test_final_observations_of_blocks_and_of_one_environment_vary_too():
    ended = np.array([[False], [True]])
    one = {"mission": "end", "cloud": CLOUDS[0]}
    columns = StepValidator(SCHEMA, 1).final([None, one], ended)
    assert columns["observation/mission"].shape == (2, 1)
    assert columns["observation/mission"].text() == [[""], ["end"]]
    columns = StepValidator(SCHEMA, 1).final(one, np.array([True]))
    assert columns["observation/mission"].text() == ["end"]
    text = mr.Schema({"observation": mr.Field.text(9)})
    for final, envs in (("end", 1), (["end", None], 2), (("end", "x"), 2)):
        columns = StepValidator(text, envs).final(final, ENDED[:envs])
        assert columns["observation"][:1].text() == ["end"]


def test_final_observations_that_do_not_fit_are_refused_by_name():
    with pytest.raises(
        SchemaError, match="field 'final_observation/observation/mission of environment 0' must"
    ):
        StepValidator(SCHEMA, 2).final([{"mission": "x" * 21, "cloud": CLOUDS[0]}, None], ENDED)


# The packer packs references, never values.


def test_steps_of_references_are_packed():
    schema = mr.Schema({"x": mr.Field.text(9), "y": mr.Field((), "int32")})
    placement = record_layout(schema)
    kernel = packer(schema, placement, 1)
    for value in ("text", b"text", np.zeros(4, np.uint8), np.zeros(2, np.int64)):
        assert kernel.prepare({"x": value, "y": np.int32(1)}) == -1
        assert kernel.block({"x": [value], "y": np.zeros(1, np.int32)}) is None
    reference = np.zeros(1, REFERENCE)
    reference["position"], reference["length"], reference["crc"] = 8, 2, 3
    assert kernel.prepare({"x": reference, "y": np.int32(7)}) == 0
    row = np.frombuffer(kernel.rows, placement.record)[0]
    assert row["x"] == reference[0]
    assert row["y"] == 7
    rows = np.zeros(3 * placement.stride, np.uint8)
    columns = {"x": np.repeat(reference, 3), "y": np.arange(3, dtype=np.int32)}
    kernel.pack(rows, columns, 0, 3)
    packed = rows.view(placement.record)
    assert packed["x"].tolist() == [(8, 2, 3)] * 3
    assert packed["y"].tolist() == [0, 1, 2]


def test_a_published_value_that_varies_is_not_rewritten():
    with mr.ReplayBuffer.create(None, FLOATS, 9, engine="memory", heap_bytes=4096) as buffer:
        buffer.add(x=[1.0])
        with pytest.raises(SchemaError, match=r"field .x. varies .* Keep what is rew"):
            buffer.write_field("x", 0, 0, [[2.0]])
        assert buffer.get_field("x", 0, 0).values.tolist() == [1.0]
