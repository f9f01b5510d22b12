"""What a refusal advises: every message ends with what to do instead."""

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from tests.buffer.support import Twin, schema


@pytest.fixture
def buffer(tmp_path):
    twin = Twin(tmp_path / "ring", 5, 2)
    twin.add(["", ""])
    twin.add(["", ""])
    yield twin.buffer
    twin.buffer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 1e6}, r"capacity .* got 1000000.0\. Give the rows .*int\(1e6\)"),
        ({"num_envs": 0}, r"num_envs .* got 0\. Give the number of environments"),
        ({"engine": "disk"}, r"engine .* got 'disk'\. Leave it out for memory-"),
        ({"layout": "row"}, r"layout .* got 'row'\. Leave it out to choose it"),
        ({"autoreset": True}, r"autoreset .* got True\. Say what your environments"),
    ],
)
def test_creating_says_what_to_give(tmp_path, changes, message):
    options = {"schema": schema(), "capacity": 5, "num_envs": 1} | changes
    with pytest.raises(SchemaError, match=message):
        mr.ReplayBuffer.create(tmp_path / "made", **options)


def test_a_path_and_an_engine_that_do_not_go_together():
    with pytest.raises(SchemaError, match=r"path must.*got None with engine='memmap'"):
        mr.ReplayBuffer.create(None, schema(), 5)


def test_opening_says_which_mode_is_for_what(buffer):
    with pytest.raises(SchemaError, match=r"mode must be 'r' or 'r\+', got 'w'"):
        mr.ReplayBuffer.open(buffer.path, "w")
    with pytest.raises(SchemaError, match=r"on_resume .* got 'go'\. 'break' is right un"):
        mr.ReplayBuffer.open(buffer.path, "r+", on_resume="go")


def test_resizing_says_what_a_capacity_is(buffer):
    with pytest.raises(SchemaError, match=r"capacity .* got '9'\. Give the rows to ke"):
        buffer.resize("9")


def test_environments_are_counted_from_0(buffer):
    with pytest.raises(SchemaError, match=r"env_ids must be.*got values in \[2, 2\]"):
        buffer.take(2, 0)


def test_an_unknown_path_is_answered_with_the_one_that_was_meant(buffer):
    with pytest.raises(
        SchemaError, match=r"'rewards' is not in the schema.* Did you mean 'reward'\?"
    ):
        buffer.get_field("rewards", 0, 0)
    with pytest.raises(SchemaError, match=r"Did you mean 'truncated'\?"):
        buffer.sample(1)["truncate"]
    with pytest.raises(SchemaError, match=r"'next_observation'.*\. Use one of these"):
        buffer.sample(1)["zebra"]
    rows = {path: buffer.gather_all()[path][:2] for path in buffer.schema.paths}
    rows["rewards"] = rows.pop("reward")
    with pytest.raises(SchemaError, match=r"\['rewards'\].*\. Did you mean 'reward'\?"):
        buffer.add(rows)


def test_a_nested_path_is_found_by_its_last_segment():
    nested = mr.Schema({"observation": {"pixels": mr.Field((4,), "uint8")}})
    with pytest.raises(SchemaError, match=r"Did you mean 'observation/pixels'\?"):
        nested["pixels"]


def test_a_batch_beyond_the_memory_says_how_large_it_is(buffer, monkeypatch):
    # Asked for in earnest, it might be given: memory is promised before it is there.
    def refuse(*_):
        raise MemoryError("Unable to allocate 7.11 EiB")

    monkeypatch.setattr(type(buffer.sampler), "draw", refuse)
    nbytes = 10**15 * buffer.schema.row_nbytes
    told = f"batch_size: .* of {10**15} need {nbytes:,} bytes.*several smaller"
    with pytest.raises(MemoryError, match=told):
        buffer.sample(10**15)


@pytest.mark.parametrize("size", [2.5, True, "8", None])
def test_draws_are_of_whole_steps(buffer, size):
    dataset = mr.ReplayDataset(buffer.path)
    with pytest.raises(SchemaError, match="batch_size must be an integer of at"):
        dataset.draws(mr.UniformSampler(), batch_size=size)
    with pytest.raises(SchemaError, match="batch_size must be an integer of at"):
        buffer.sample(size)
    assert len(next(iter(dataset.draws(mr.UniformSampler(), np.int64(2)))).positions) == 2
