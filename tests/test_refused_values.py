"""Arguments that are refused: by their type or a short value, never printed whole."""

import inspect
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import ReplayError, SchemaError, shown
from mmreplay.stats import episode_table
from tests.buffer.support import schema, step


class Large:
    """Something that nobody wants to see printed."""

    def __repr__(self):
        return "x" * 10_000

    __str__ = __repr__


class Kind(Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("runs", "'runs'"),
        ("y" * 500, f"'{'y' * 57}'..."),
        (b"ab", "b'ab'"),
        (5, "5"),
        (2.5, "2.5"),
        (True, "True"),
        (None, "None"),
        (10**100, "int"),
        (np.float32(0.5), "np.float32(0.5)"),
        (Path("a"), "PosixPath('a')"),
        (Kind.ONE, "<Kind.ONE: 1>"),
        (int, "<class 'int'>"),
        ([1, "a"], "[1, 'a']"),
        ((1, 2), "(1, 2)"),
        ((2.0,), "(2.0,)"),
        ((), "()"),
        ([Large()], "[Large]"),
        (Large(), "Large"),
        (list(range(500)), "list"),
        ({"a": Large()}, "dict"),
        (["y" * 50] * 3, "list"),
        (np.arange(3), "array([0, 1, 2])"),
        (np.zeros((50, 50)), "ndarray"),
        (len, "builtin_function_or_method"),
        (slice(2), "slice(None, 2, None)"),
    ],
)
def test_a_value_is_shown_if_it_is_short_and_plain(value, expected):
    assert shown(value) == expected


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Public calls, with arguments of which one is then replaced by what is refused."""
    folder = tmp_path_factory.mktemp("shown")
    with mr.ReplayBuffer.create(folder / "ring", schema(), 100) as writer:
        for number in range(60):
            writer.add(step(number, "t" if number % 9 == 8 else ""))
    buffer = mr.ReplayBuffer.open(folder / "ring")
    batch = buffer.sample(4)
    ram = mr.ReplayBuffer.create(None, schema(), 100, engine="memory")
    uniform = mr.UniformSampler(0)
    yield [
        (
            mr.ReplayBuffer.create,
            {"path": folder / "a", "schema": schema(), "capacity": 10, "num_envs": 0},
        ),
        (mr.ReplayBuffer.open, {"path": folder / "none"}),
        (buffer.sample, {"batch_size": 4}),
        (buffer.take, {"env_ids": 0, "positions": 1}),
        (buffer.get_field, {"path": "reward", "env_ids": 0, "positions": 1}),
        (buffer.update_priorities, {"batch": batch, "values": [1.0] * 4}),
        (ram.dequeue, {"count": 1}),
        (ram.resize, {"capacity": 100}),
        (ram.clear, {"env_ids": None}),
        (ram.add_field, {"path": "reward", "field": None, "fill": 1}),
        (lambda reward: ram.add(step(1) | {"reward": reward}), {"reward": 1.0}),
        (lambda path: batch[path], {"path": "reward"}),
        (mr.Field, {"shape": (), "dtype": "int8"}),
        (mr.Schema, {"fields": {"a": mr.Field((), "int8")}}),
        (mr.UniformSampler, {}),
        (mr.PrioritizedSampler, {}),
        (mr.RankPrioritizedSampler, {}),
        (mr.SequenceSampler, {"length": 4}),
        (mr.EpisodeSampler, {}),
        (mr.RecentSampler, {"steps": 4, "ratio": 0.5}),
        (mr.EmphasizeRecentSampler, {"num_updates": 4}),
        (mr.ShuffledSampler, {}),
        (mr.StratifiedSampler, {}),
        (mr.DistinctSampler, {}),
        (mr.MixtureSampler, {"samplers": [(uniform, 1.0)]}),
        (mr.ignore_earliest, {"count": 3}),
        (mr.LinearSchedule, {"start": 0.0, "stop": 1.0, "steps": 4}),
        (mr.NStep, {"n": 3, "gamma": 0.9}),
        (mr.Apply, {"function": len}),
        (mr.HER, {"strategy": "future", "ratio": 0.5, "reward_fn": len}),
        (mr.DiscountedReturn, {"gamma": 0.9}),
        (mr.ReplayLoader, {"buffer": buffer, "batch_size": 0}),
        (mr.ReplayStream, {"source": buffer.path, "sampler": uniform, "batch_size": 4}),
        (mr.RateLimiter, {"samples_per_insert": 1.0, "min_size": 4, "error_buffer": 10.0}),
        (mr.export, {"buffer": buffer, "target": folder / "a.none"}),
        (mr.load, {"source": buffer.path, "target": folder / "ring"}),
        (mr.compact, {"source": buffer.path, "target": folder / "ring"}),
        (mr.split, {"buffer": buffer, "fractions": [0.5, 0.5]}),
        (mr.histogram, {"buffer": buffer, "path": "reward", "bins": 3}),
        (mr.plan_buffer, {"schema": schema(), "capacity": 10}),
        (mr.ZarrSource, {"location": "r"}),
    ]
    buffer.close()


@pytest.mark.parametrize(
    "value",
    [Large(), [Large()], {"k": Large()}, list(range(20_000))],
    ids=["object", "list", "dict", "numbers"],
)
@pytest.mark.sliced(2)
def test_no_argument_that_is_refused_is_printed_whole(calls, value):
    refused, printed = 0, []
    for call, arguments in calls:
        for name in list(inspect.signature(call).parameters):
            if name in ("options", "progress"):
                continue
            try:
                call(**(arguments | {name: value}))
            except Exception as error:
                refused += isinstance(error, ReplayError)
                printed.append((len(str(error)), name, str(error)[:200]))
    assert refused > 100
    assert max(printed)[0] < 600, max(printed)


def test_a_dtype_of_torch_or_a_python_type_leads_to_the_name():
    import torch

    for dtype, name in [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.bool, "bool"),
        (torch.uint8, "uint8"),
        (torch.int64, "int64"),
        (torch.float16, "float16"),
        (bool, "bool"),
        (int, "int64"),
        (float, "float64"),
        (np.float32, "float32"),
    ]:
        assert mr.Field((3,), dtype).dtype == name
        assert mr.Field((3,), dtype) == mr.Field((3,), name)
    told = r"field dtype must be one.*got torch\.complex64"
    with pytest.raises(SchemaError, match=told):
        mr.Field((3,), torch.complex64)
    with pytest.raises(SchemaError, match=r"got torch\.float8_e5m2\. Use one of them"):
        mr.Field((3,), torch.float8_e5m2)
    for dtype, told in [
        (str, "Store text in a field declared by Field.text"),
        (complex, "axis of 2"),
    ]:
        with pytest.raises(SchemaError, match=told):
            mr.Field((3,), dtype)
    with pytest.raises(SchemaError, match=r"field dtype must be .*, got Large"):
        mr.Field((3,), Large())


def test_a_large_array_is_shown_as_its_type():
    assert shown(np.zeros(9)) == "ndarray"
    assert shown(np.zeros(2)) == "array([0., 0.])"


def test_a_refused_argument_of_many_lines_is_one_line_of_a_message():
    with pytest.raises(mr.SchemaError, match=r"samplers must be a list of.*got ndarray"):
        mr.MixtureSampler(np.zeros((99, 2)))


@pytest.mark.parametrize(
    "call",
    [
        episode_table,
        lambda value: mr.field_moments(value, ("reward",)),
        lambda value: mr.histogram(value, "reward", 3),
        lambda value: mr.split(value, [0.5, 0.5]),
        lambda value: mr.AutoExport(value, "files"),
    ],
)
@pytest.mark.parametrize(
    ("value", "shown"), [("runs/a", "'runs/a'"), (np.zeros((99, 9)), "ndarray")]
)
def test_what_is_no_open_buffer_is_refused_by_name(call, value, shown):
    with pytest.raises(mr.SchemaError, match=rf"buffer must be an open.*, got {shown}"):
        call(value)


def test_episodes_without_returns_are_refused():
    with pytest.raises(mr.SchemaError, match="table must be an episode table, got 5"):
        mr.return_within(5)
