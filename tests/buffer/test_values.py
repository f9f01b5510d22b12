"""What add and extend make of values that are not of the field's dtype."""

import warnings

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "float32"),
        "action": mr.Field((), "int32"),
        "reward": mr.Field((), "float32"),
        "value": mr.Field((), "float32"),
        "half": mr.Field((), "float16"),
        "brain": mr.Field((), "bfloat16"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)
STEP = {
    "observation": np.float32([1, 2]),
    "action": np.int32(1),
    "reward": 0.5,
    "value": 0.5,
    "half": 0.5,
    "brain": 0.5,
    "terminated": False,
    "truncated": False,
}


def made(tmp_path=None, **options):
    options = {"engine": "memory"} if tmp_path is None else options
    path = None if tmp_path is None else tmp_path / "ring"
    return mr.ReplayBuffer.create(path, SCHEMA, 100, **options)


def wrapped(values):
    """The same numbers in every wrapping that a user may have."""
    import torch

    return [
        values,
        tuple(values),
        np.array(values),
        np.array(values)[None],
        torch.tensor(values),
        np.array(values, ">i8"),
        np.array(values, "i2"),
    ]


def test_lossless_values_are_accepted_in_any_container():
    with made() as buffer:
        for observation in wrapped([3, 4]):
            buffer.add(STEP | {"observation": observation})
        count = len(wrapped([3, 4]))
        for ended in (1, True, np.int64(1), np.array(1), np.array([1]), [1]):
            for action in (7, np.int64(7), np.array(7), np.array([7]), np.uint64(7)):
                buffer.add(STEP | {"terminated": ended, "action": action})
        rows = buffer.gather_all()
        assert (rows["observation"][:count] == [3, 4]).all()
        assert rows["observation"].dtype == np.float32
        assert rows["terminated"][count:].all()
        assert (rows["action"][count:] == 7).all()
        assert len(buffer.episodes.begins(0)) == 30


def test_of_many_environments_and_steps_values_decide_too(tmp_path):
    envs = {key: np.stack([np.asarray(value)] * 3) for key, value in STEP.items()} | {
        "terminated": [0, 1, 0],
        "action": np.array([1, 2, 3]),
        "reward": [1, 2, 3],
    }
    with made(tmp_path, num_envs=3, autoreset="disabled") as buffer:
        buffer.add(envs)
        buffer.extend({key: np.stack([value] * 2) for key, value in envs.items()})
        buffer.add({key: value[:1] for key, value in envs.items()}, env_ids=[1])
        rows = buffer.gather_all()
        assert rows["action"].tolist() == [1] * 3 + [2] * 3 + [1] + [3] * 3
        assert rows["terminated"].tolist() == [0] * 3 + [1] * 3 + [0] * 4
        wrong = envs | {"terminated": [0, 2, 0]}
        told = r"field 'terminated' must.*int64\[3\] with the value 2"
        with pytest.raises(SchemaError, match=told):
            buffer.add(wrong)
        assert len(buffer.gather_all()) == len(rows)


def test_an_extend_of_no_step_adds_nothing(tmp_path):
    for number in (1, 3):
        with made(tmp_path / str(number), num_envs=number, autoreset="disabled") as it:
            lead = (0,) if number == 1 else (0, 3)
            block = {
                key: np.zeros((*lead, *np.shape(value)), np.asarray(value).dtype)
                for key, value in STEP.items()
            }
            it.extend(block)
            it.extend({key: [] for key in STEP})
            it.extend(block, final_observation=block["observation"])
            assert len(it) == 0
            some = block | {"reward": np.zeros((2, *lead[1:]))}
            with pytest.raises(
                SchemaError, match=r"field 'reward' must have.*fields before it, got 2"
            ):
                it.extend(some)
            with pytest.raises(SchemaError, match="missing fields"):
                it.extend(observation=block["observation"])
            lone = {
                key: np.stack([np.asarray(value)] * number).reshape(1, *lead[1:], *np.shape(value))
                for key, value in STEP.items()
            }
            it.extend(lone)
            it.extend(block)
            assert len(it) == number


ROUNDED = [
    ("observation", np.array([0.1, 0.5]), "float64", "float32", "0.1"),
    ("value", np.float64(0.1), "float64", "float32", "0.1"),
    ("half", np.float32(0.1), "float32", "float16", "0.1"),
]


@pytest.mark.parametrize(("path", "value", "got", "dtype", "number"), ROUNDED)
def test_rounding_is_said_once_for_each_field(tmp_path, path, value, got, dtype, number):
    message = (
        rf"field '{path}': {dtype} does not hold {got} values such as {number} "
        rf"exactly, so they are rounded .*\. Pass .astype\('{dtype}'\)"
    )
    with made(tmp_path) as buffer:
        exact = np.array(value, got) * 0 + 0.5
        buffer.add(STEP | {path: exact})
        with pytest.warns(RuntimeWarning, match=message) as raised:
            buffer.add(STEP | {path: value})
        assert [each.filename for each in raised] == [__file__]
        buffer.add(STEP | {path: value})
        buffer.resize(50)
        buffer.add(STEP | {path: value})
        stored = buffer.gather_all()[path]
        np.testing.assert_array_equal(stored[-1], np.asarray(value).astype(dtype))
    with made() as buffer, pytest.warns(RuntimeWarning, match=message) as raised:
        buffer.extend({key: np.stack([v]) for key, v in (STEP | {path: value}).items()})
    assert [each.filename for each in raised] == [__file__]


def test_rounding_of_a_tensor_is_said_too():
    import torch

    with made() as buffer:
        tensor = torch.tensor([0.1, 0.2], dtype=torch.float64)
        with pytest.warns(
            RuntimeWarning, match="field 'observation': float32 does not hold float64"
        ):
            buffer.add(STEP | {"observation": tensor})


def test_rewards_python_numbers_and_values_that_fit_are_accepted_without_a_warning():
    with made() as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            buffer.add(STEP | {"reward": 0.1, "value": 0.1, "half": 0.1})
            buffer.add(STEP | {"reward": np.float64(0.1)})
            buffer.add(STEP | {"reward": np.array([0.1])})
            buffer.add(STEP | {"observation": [0.1, 0.2]})
            buffer.add(STEP | {"observation": np.array([0.5, np.nan])})
            buffer.add(STEP | {"observation": np.array([np.inf, -0.0])})
            buffer.add(STEP | {"brain": np.float32(0.1)})


def test_a_warning_that_is_an_error_leaves_no_trace():
    with made() as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        step = STEP | {"observation": np.array([0.1, 0.2])}
        with pytest.raises(RuntimeWarning, match="field 'observation'"):
            buffer.add(step)
        assert len(buffer) == 0
        buffer.add(step)
        assert len(buffer.gather_all()) == 1
