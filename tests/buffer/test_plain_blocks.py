"""Steps and blocks that need no conversion are what a list says, at any wrap."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.storage import write_path

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((5,), "float32"),
        "reward": mr.Field((), "float32"),
        "next_observation": mr.Field((5,), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def steps(lead, rng):
    return {
        "observation": rng.random((*lead, 5)).astype("f4"),
        "reward": rng.random((*lead, 1))[..., 0].astype("f4"),
        "next_observation": rng.random((*lead, 5)).astype("f4"),
        "terminated": rng.random((*lead, 1))[..., 0] < 0.1,
        "truncated": rng.random((*lead, 1))[..., 0] < 0.1,
    }


@pytest.mark.parametrize("minimum", [1, 1 << 40], ids=["stored", "written"])
@pytest.mark.parametrize(
    ("num_envs", "layout"), [(1, "env_major"), (3, "time_major"), (3, "env_major")]
)
def test_the_ring_holds_the_newest_of_what_it_was_given(
    tmp_path, rng, monkeypatch, num_envs, layout, minimum
):
    monkeypatch.setattr(write_path, "LEAST_NBYTES", minimum)
    envs = (num_envs,) if num_envs > 1 else ()
    given = {path: [] for path in SCHEMA.paths}
    buffer = mr.ReplayBuffer.create(
        tmp_path / "a",
        SCHEMA,
        200,
        num_envs=num_envs,
        layout=layout,
        commit_every=None,
        autoreset="disabled",
    )
    for number in range(25):
        count = 1 if number % 3 == 0 else int(rng.integers(1, 90))
        data = steps(envs if count == 1 else (count, *envs), rng)
        (buffer.add if count == 1 else buffer.extend)(data)
        for path, values in given.items():
            shape = (count, num_envs, *SCHEMA[path].shape)
            values.append(np.reshape(data[path], shape))
    whole = {path: np.concatenate(values) for path, values in given.items()}
    stop, first = len(whole["reward"]), int(buffer.span.first[0])
    assert buffer.heads.tolist() == [stop] * num_envs
    positions = np.arange(first, stop)
    for env_id in range(num_envs):
        ids = np.full(len(positions), env_id)
        for path, values in whole.items():
            got = buffer.get_field(path, ids, positions)
            assert np.array_equal(got, values[first:, env_id])
    buffer.close()
    assert mr.verify_buffer(tmp_path / "a").ok
