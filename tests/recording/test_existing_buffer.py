"""Recording into a buffer that is there: with the environments that it was made for."""

import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.recording.test_recorder import LoggedEnv, vector


def test_a_buffer_of_other_num_envs_is_refused(tmp_path):
    mr.record(vector("next_step", 2), tmp_path / "b", steps=3)
    told = r"num_envs must be .*got 3"
    with pytest.raises(SchemaError, match=told):
        mr.record(vector("next_step", 3), tmp_path / "b", steps=3)


def test_an_id_is_gone_on_with_by_as_many_environments(tmp_path):
    for num_envs in (2, None):
        mr.record("CartPole-v1", tmp_path / "b", steps=6, num_envs=num_envs)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert (buffer.num_envs, len(buffer)) == (2, 12)
    with pytest.raises(SchemaError, match=r"num_envs must be .*got 1"):
        mr.record("CartPole-v1", tmp_path / "b", steps=6, num_envs=1)


def test_a_buffer_of_another_autoreset_is_refused(tmp_path):
    mr.record(vector("next_step"), tmp_path / "b", steps=3)
    with pytest.raises(SchemaError, match=r"autoreset must be .*got 'same_step'"):
        mr.record(vector("same_step"), tmp_path / "b", steps=3)


def test_another_capacity_is_refused(tmp_path):
    mr.record(LoggedEnv(), tmp_path / "b", steps=3, capacity=10)
    with pytest.raises(SchemaError, match=r"capacity must be .*got 11"):
        mr.record(LoggedEnv(), tmp_path / "b", steps=3, capacity=11)
