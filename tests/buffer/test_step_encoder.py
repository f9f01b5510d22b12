"""Steps encoded for another process's buffer are what a buffer here stores of them."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.step_encoder import StepEncoder
from mmreplay.episodes import END, FINAL

AGENTS = 2


def schema_of(agents):
    ends = mr.Field((AGENTS,) if agents else (), "bool")
    return mr.Schema(
        {"observation": mr.Field((2,), "float32"), "terminated": ends, "truncated": ends}
    )


def steps_of(rng, agents, count, num_envs):
    shape = (count, num_envs, AGENTS) if agents else (count, num_envs)
    return {
        "observation": rng.random((count, num_envs, 2), np.float32),
        "terminated": rng.random(shape) < 0.5,
        "truncated": rng.random(shape) < 0.4,
    }


def split(data, call, num_envs):
    """The arguments of each call that adds the steps, as a user may write them."""
    if call == "block":
        return [data]
    some = {} if num_envs > 1 else {"observation": data["observation"].tolist()}
    return [
        {name: (some.get(name, value))[t] for name, value in data.items()}
        for t in range(len(data["observation"]))
    ]


@pytest.mark.parametrize("call", ["step", "block"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("agents", [False, True])
def test_ends_and_final_rows_are_those_that_a_buffer_stores(call, num_envs, agents, rng):
    schema, data = schema_of(agents), steps_of(rng, agents, 12, num_envs)
    encoder = StepEncoder(schema, num_envs, "disabled")
    final = data["observation"] + 10
    finals = [final] if call == "block" else [*final]
    encoded = []
    in_memory = {"engine": "memory", "autoreset": "disabled"}
    with mr.ReplayBuffer.create(None, schema, 50, num_envs, **in_memory) as buffer:
        for given, observation in zip(split(data, call, num_envs), finals, strict=True):
            encode, add = {
                "step": (encoder.encode_step, buffer.add),
                "block": (encoder.encode_block, buffer.extend),
            }[call]
            encoded.append(encode(given, observation))
            add(given, final_observation=observation)
        columns, ended, last = zip(*encoded, strict=True)
        steps = np.concatenate([each["observation"] for each in columns])
        last = np.concatenate([each["observation"] for each in last])
        ended = np.concatenate(ended)
        assert 0 < ended.sum() < ended.size
        for env in range(num_envs):
            positions = np.arange(buffer.heads[env])
            ids = np.full(len(positions), env)
            flags = buffer.flags(ids, positions)
            rows = buffer.view.read(("observation",), ids, positions)["observation"]
            is_final = flags & FINAL != 0
            assert ended[:, env].tolist() == (flags[~is_final] & END != 0).tolist()
            np.testing.assert_array_equal(steps[:, env], rows[~is_final])
            np.testing.assert_array_equal(last[:, env][ended[:, env]], rows[is_final])


def test_a_buffer_with_final_rows_of_its_own_takes_no_final_observation(rng):
    encoder = StepEncoder(schema_of(False), 2, "next_step")
    data = steps_of(rng, False, 3, 2)
    with pytest.raises(mr.SchemaError, match="where the row after an end holds it"):
        encoder.encode_block(data, data["observation"])
    columns, ended, final = encoder.encode_block(data)
    assert final is None
    assert ended.tolist() == (data["terminated"] | data["truncated"]).tolist()
    assert columns.keys() == data.keys()
