"""What a user may get wrong: a named error, and a buffer that is as it was."""

import re

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, SchemaError, StaleError
from tests.buffer.support import Twin

STEP = {
    "observation": np.array([[1, 2], [3, 4]]),
    "action": np.array([1, 2], np.int32),
    "reward": np.array([0.5, 1]),
    "terminated": np.array([False, True]),
    "truncated": np.array([False, False]),
}


def but(**changes):
    """The good step with some fields changed, or taken out by None."""
    return {k: v for k, v in (STEP | changes).items() if v is not None}


def blocks(**changes):
    """Three good steps, with some fields changed."""
    return {k: np.stack([v] * 3) for k, v in STEP.items()} | changes


def snapshot(buffer):
    rows = buffer.gather_all()
    values = {path: np.array(rows[path]) for path in rows}
    return values, rows.positions, rows.env_ids, buffer.span, len(buffer)


def assert_same(before, after):
    for old, new in zip(before[0].items(), after[0].items(), strict=True):
        assert old[0] == new[0]
        np.testing.assert_array_equal(old[1], new[1])
    np.testing.assert_array_equal(before[1], after[1])
    np.testing.assert_array_equal(before[2], after[2])
    np.testing.assert_array_equal(before[3].first, after[3].first)
    np.testing.assert_array_equal(before[3].stop, after[3].stop)
    assert before[4] == after[4]


@pytest.fixture(params=["memmap", "memory"])
def twin(request, tmp_path):
    path = tmp_path / "ring" if request.param == "memmap" else None
    twin = Twin(path, 8, 2)
    for kinds in (["", ""], ["t", ""], ["", "u"], ["", ""]):
        twin.add(kinds)
    yield twin
    twin.buffer.close()


def all_of(*texts):
    """A pattern that finds the parts in this order."""
    return ".*".join(re.escape(part) for part in texts)


ADDS = {
    "wrong shape": (
        {"data": but(observation=np.zeros((2, 3), np.int64))},
        ("field 'observation'", "must be int64[2, 2]", "got int64[2, 3]", "Pass"),
    ),
    "one environment missing": (
        {"data": but(action=np.int32([1]))},
        ("field 'action'", "must be int32[2]", "got int32[1]", "Pass"),
    ),
    "no environment axis": (
        {"data": but(reward=0.5)},
        ("field 'reward'", "must be float32[2]", "got", "axes"),
    ),
    "wrong dtype": (
        {"data": but(action=np.array([1.5, 2]))},
        ("field 'action'", "must be int32[2]", "got float64[2]", "Round it"),
    ),
    "narrowing integers": (
        {"data": but(action=np.array([1, 2**31]))},
        ("field 'action'", "int32 must be", "got 2147483648", "wider dtype"),
    ),
    "complex": (
        {"data": but(reward=np.array([1j, 2]))},
        ("field 'reward'", "must be float32[2]", "got complex128[2]", "real and imag"),
    ),
    "objects": (
        {"data": but(reward=np.array([None, 2]))},
        ("field 'reward'", "must be float32[2]", "got object[2]", "Store numbers"),
    ),
    "ragged": (
        {"data": but(observation=[[1, 2], [3]])},
        ("field 'observation'", "must be an array of numbers", "got list", "Pad"),
    ),
    "text": (
        {"data": but(reward="high")},
        ("field 'reward'", "must be float32[2]", "got str 'high'", "Field.text"),
    ),
    "infinite after the cast": (
        {"data": but(reward=np.array([1e300, 0]))},
        ("field 'reward'", "float32 cannot hold", "too large", "Clip"),
    ),
    "unknown field": (
        {"data": but(rewards=np.zeros(2))},
        ("must be exactly", "got unknown fields ['rewards']", "Fix the names"),
    ),
    "next observation": (
        {"data": but(next_observation=np.zeros(2))},
        ("got unknown fields ['next_observation']", "Leave it out: it is read from"),
    ),
    "missing field": (
        {"data": but(reward=None)},
        ("must be exactly", "got missing fields ['reward']", "Fix the names"),
    ),
    "misspelt field": (
        {"data": but(reward=None, rew=np.zeros(2))},
        ("unknown fields ['rew'] and missing", "Did you mean 'reward'?"),
    ),
    "nothing": ({}, ("must be exactly", "got missing fields", "Fix the names")),
    "mapping and keywords": (
        {"data": but(reward=None), "reward": np.zeros(2)},
        ("takes a mapping or keywords", "got both", "Put ['reward']"),
    ),
    "no mapping": ({"data": [1, 2, 3]}, ("must be a mapping", "got list")),
    "unknown environment": (
        {"data": but(), "env_ids": [0, 2]},
        ("env_ids", "must be in [0, 2)", "got 2"),
    ),
    "negative environment": (
        {"data": but(), "env_ids": [-1, 0]},
        ("env_ids", "must be in [0, 2)", "got -1"),
    ),
    "an environment twice": (
        {"data": but(), "env_ids": [1, 1]},
        ("env_ids", "must name each environment once", "got [1, 1]", "extend"),
    ),
    "environments as floats": (
        {"data": but(), "env_ids": [0.0, 1.0]},
        ("env_ids", "must be one or more integers", "got float64[2]", "Leave it out"),
    ),
    "environments as a mask": (
        {"data": but(), "env_ids": [True, False]},
        ("env_ids", "must be one or more integers", "got bool[2]"),
    ),
    "no environment": (
        {"data": but(), "env_ids": []},
        ("env_ids", "must be one or more integers", "got", "Leave it out"),
    ),
    "more steps than environments": (
        {"data": but(), "env_ids": [1]},
        ("field 'observation'", "must be int64[1, 2]", "got int64[2, 2]"),
    ),
    "final observation of a wrong shape": (
        {"data": but(), "final_observation": np.zeros((2, 3), np.int64)},
        ("final_observation", "must be int64[2, 2]", "got int64[2, 3]"),
    ),
    "final observation of a wrong dtype": (
        {"data": but(), "final_observation": np.zeros((2, 2))},
        ("final_observation", "must be int64[2, 2]", "got float64[2, 2]"),
    ),
    "final observation by unknown names": (
        {"data": but(), "final_observation": {"pixels": np.zeros((2, 2))}},
        ("final_observation", "['observation']", "got ['observation/pixels']"),
    ),
}


@pytest.mark.parametrize("got", [(84, 84, 1), (1, 84, 84, 1), (2, 84, 84)])
def test_an_extra_environment_axis_is_distinguished_from_the_fields_own_axes(got):
    schema = mr.Schema({"pixels": mr.Field((84, 84), "uint8")})
    with mr.ReplayBuffer.create(None, schema, 10, engine="memory") as buffer:
        told = re.escape(f"must be uint8[84, 84], got uint8{list(got)}. Pass the value")
        with pytest.raises(SchemaError, match=told):
            buffer.add(pixels=np.zeros(got, np.uint8))
        for good in ((84, 84), (1, 84, 84)):
            buffer.add(pixels=np.zeros(good, np.uint8))
        assert len(buffer) == 2


@pytest.mark.parametrize("name", ADDS)
def test_a_bad_step_is_refused_and_leaves_no_trace(twin, name):
    options, parts = ADDS[name]
    options = dict(options)
    data = options.pop("data", None)
    before = snapshot(twin.buffer)
    with pytest.raises(SchemaError, match=all_of(*parts)):
        twin.buffer.add(data, **options)
    assert_same(before, snapshot(twin.buffer))
    twin.add(["", "t"])
    twin.check()


EXTENDS = {
    "one step without its axis": (
        but(),
        (
            "field 'observation'",
            "must have shape [T, 2,",
            "got [2, 2]",
            "That is one step: pass it to add.",
        ),
    ),
    "fields of different lengths": (
        blocks(reward=np.zeros((2, 2))),
        ("field 'reward'", "must have T=3 steps", "got 2", "the same T"),
    ),
    "another number of environments": (
        blocks(reward=np.zeros((3, 1))),
        ("field 'reward'", "must be float32[3, 2]", "got float64[3, 1]"),
    ),
    "a bad value at the end": (
        blocks(reward=np.array([[0, 0], [0, 0], [0, 1e300]])),
        ("field 'reward'", "float32 cannot hold", "too large", "Clip"),
    ),
    "unknown and missing": (
        {"reward": np.zeros((3, 2)), "x": np.zeros((3, 2))},
        ("must be exactly", "unknown fields ['x']", "missing fields ['action'"),
    ),
}


@pytest.mark.parametrize("name", EXTENDS)
def test_bad_blocks_are_refused_whole(twin, name):
    data, parts = EXTENDS[name]
    before = snapshot(twin.buffer)
    with pytest.raises(SchemaError, match=all_of(*parts)):
        twin.buffer.extend(data)
    assert_same(before, snapshot(twin.buffer))
    twin.extend([["", "t"]] * 3)
    twin.check()


CALLS = {
    "batch of none": (
        lambda b: b.sample(0),
        SchemaError,
        ("batch_size must be an integer of at least 1", "got 0"),
    ),
    "batch of less": (lambda b: b.sample(-3), SchemaError, ("batch_size", "got -3")),
    "batch of a part": (
        lambda b: b.sample(1.5),
        SchemaError,
        ("batch_size must be an integer", "got 1.5"),
    ),
    "batch of text": (lambda b: b.sample("4"), SchemaError, ("batch_size", "got '4'")),
    "position not written": (
        lambda b: b.take([0, 1], [0, 4]),
        StaleError,
        ("position 4 of environment 1 is not in the buffer", "which holds [0, 4)"),
    ),
    "position below zero": (
        lambda b: b.get_field("reward", 0, -1),
        StaleError,
        ("position -1 of environment 0", "which holds [0, 4)"),
    ),
    "the newest row": (
        lambda b: b.take([0], [3]),
        StaleError,
        ("cannot be drawn as a transition", "its next observation", "get_field"),
    ),
    "environment unknown": (
        lambda b: b.take([2], [0]),
        SchemaError,
        ("env_ids", "must be in [0, 2)", "got values in [2, 2]"),
    ),
    "environment below zero": (
        lambda b: b.get_field("reward", [[-1]], [[0]]),
        SchemaError,
        ("env_ids", "must be in [0, 2)", "got values in [-1, -1]"),
    ),
    "positions as floats": (
        lambda b: b.take([0], [0.0]),
        SchemaError,
        ("positions", "must be integers", "got float64"),
    ),
    "shapes apart": (
        lambda b: b.take([0, 1], [0, 1, 2]),
        SchemaError,
        ("must have shapes that broadcast", "got [2] and [3]"),
    ),
    "unknown field": (
        lambda b: b.get_field("rewards", 0, 0),
        SchemaError,
        ("rewards", "is not in the schema"),
    ),
    "set of a fixed field": (
        lambda b: b.write_field("reward", 0, 0, 1.0),
        SchemaError,
        ("field 'reward' is not mutable", "Declare it with", "mutable=True"),
    ),
    "dequeue of none": (
        lambda b: b.dequeue(0),
        SchemaError,
        ("count must be an integer of at least 1", "got 0"),
    ),
    "dequeue of too many": (
        lambda b: b.dequeue(5, [1]),
        EmptyError,
        ("cannot dequeue 5 rows", "environment 1 holds 4", "a smaller count"),
    ),
    "dequeue of a part": (lambda b: b.dequeue(1.5), SchemaError, ("count", "got 1.5")),
    "clear of an unknown environment": (
        lambda b: b.clear([5]),
        SchemaError,
        ("env_ids", "must be in [0, 2)", "got 5"),
    ),
    "resize to none": (
        lambda b: b.resize(0),
        SchemaError,
        ("capacity must be an integer in [1,", "got 0"),
    ),
    "resize to a part": (lambda b: b.resize(2.5), SchemaError, ("capacity", "got 2.5")),
    "a field that is there": (
        lambda b: b.add_field("reward", mr.Field((), "int8"), 0),
        SchemaError,
        ("already has a field 'reward'",),
    ),
    "a field under a field": (
        lambda b: b.add_field("reward/raw", mr.Field((), "int8"), 0),
        SchemaError,
        ("reward",),
    ),
    "a fill that does not fit": (
        lambda b: b.add_field("more", mr.Field((2,), "int8"), [1, 2, 3]),
        SchemaError,
        ("field 'more'", "must be int8[2]", "got"),
    ),
    "a fill that is too large": (
        lambda b: b.add_field("more", mr.Field((2,), "int8"), 300),
        SchemaError,
        ("field 'more'", "int8 must be", "got 300"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_refused_and_changes_nothing(twin, name):
    call, error, parts = CALLS[name]
    before = snapshot(twin.buffer)
    with pytest.raises(error, match=all_of(*parts)):
        call(twin.buffer)
    assert_same(before, snapshot(twin.buffer))
    twin.add(["", "t"])
    twin.check()


@pytest.mark.parametrize("call", ["add", "extend"])
@pytest.mark.parametrize("count", [2, 5])
def test_fields_by_position_are_refused_with_how_to_pass_them(twin, call, count):
    before = snapshot(twin.buffer)
    told = (
        rf"^{call} takes the fields by name, got {count} positional arguments\. Pass "
        rf"one mapping by path, or for example {call}\(observation=\.\.\., action="
    )
    with pytest.raises(SchemaError, match=told):
        getattr(twin.buffer, call)(*list(STEP.values())[:count])
    with pytest.raises(SchemaError, match="by name, got 2 positional arguments"):
        getattr(twin.buffer, call)(STEP, STEP["action"])
    assert_same(before, snapshot(twin.buffer))


def test_a_step_given_to_extend_is_sent_to_add(twin):
    before = snapshot(twin.buffer)
    told = r"must have shape \[T, 2, 2\], got \[2, 2\]\. That is one step: pass it to add"
    with pytest.raises(SchemaError, match=told):
        twin.buffer.extend(STEP)
    told = r"keywords, got list\. Pass each step to add, or stack them by field for"
    with pytest.raises(SchemaError, match=told):
        twin.buffer.extend([STEP, STEP])
    assert_same(before, snapshot(twin.buffer))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_step_of_one_environment_given_to_extend_is_sent_to_add(shape):
    fields = {"a": mr.Field(shape, "float32"), "mission": mr.Field.text(9)}
    buffer = mr.ReplayBuffer.create(None, mr.Schema(fields), 9, heap_bytes=4096, engine="memory")
    with pytest.raises(SchemaError, match=r"That is one step: pass it to add\.$"):
        buffer.extend(a=np.zeros(shape, np.float32), mission="go")
    assert len(buffer) == 0
