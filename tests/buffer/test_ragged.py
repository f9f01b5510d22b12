"""Lists that make no array are refused by the name of what they are for."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError

SCHEMA = mr.Schema(
    {
        "observation": {"pixels": mr.Field((2,), "int64")},
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)
RAGGED = [[1], [2, 3]]
ENDS = {"terminated": True, "truncated": False}


def row(pixels):
    return {"observation": {"pixels": pixels}, **ENDS}


def rows(pixels):
    ends = {"terminated": [True, False], "truncated": [False, False]}
    return {"observation": {"pixels": pixels}, **ends}


CALLS = {
    "add": (lambda b: b.add(row(RAGGED)), "field 'observation/pixels'"),
    "extend": (lambda b: b.extend(rows(RAGGED)), "field 'observation/pixels'"),
    "final_observation": (
        lambda b: b.add(row([1, 2]), final_observation={"pixels": RAGGED}),
        "field 'final_observation/observation/pixels'",
    ),
    "final observations": (
        lambda b: b.extend(rows([[1, 2]] * 2), final_observation={"pixels": RAGGED}),
        "field 'final_observation/observation/pixels'",
    ),
    "env_ids": (lambda b: b.clear(RAGGED), "env_ids"),
    "environments of rows": (lambda b: b.get_field("terminated", RAGGED, 0), "env_ids"),
    "positions": (lambda b: b.get_field("terminated", 0, RAGGED), "positions"),
    "taken": (lambda b: b.take(0, RAGGED), "positions"),
    "fill": (lambda b: b.add_field("more", mr.Field((2,), "int8"), RAGGED), "field 'more'"),
    "priorities": (lambda b: b.update_priorities(b.sample(2), RAGGED), "values"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_ragged_list_is_refused_by_name(name):
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.create(None, SCHEMA, 9, engine="memory", sampler=sampler) as buffer:
        for number in range(4):
            buffer.add(row(np.array([number, number])))
        call, told = CALLS[name]
        with pytest.raises(
            SchemaError, match=rf"^{told} must be .*, got list that makes none\. Pad"
        ):
            call(buffer)
        assert buffer.heads.tolist() == [4]


def test_a_ragged_list_is_refused_of_many_environments():
    with mr.ReplayBuffer.create(
        None, SCHEMA, 9, 2, engine="memory", autoreset="disabled"
    ) as buffer:
        ends = {"terminated": [True] * 2, "truncated": [False] * 2}
        data = {"observation": {"pixels": RAGGED}, **ends}
        with pytest.raises(SchemaError, match=r"field.*got list that makes none"):
            buffer.add(data)


def test_a_position_beyond_int64_is_quoted_unchanged():
    with mr.ReplayBuffer.create(None, SCHEMA, 9, engine="memory") as buffer:
        buffer.add(row([1, 2]))
        with pytest.raises(SchemaError, match=rf"positions must be at most .*, got {2**63}"):
            buffer.get_field("terminated", 0, 2**63)
