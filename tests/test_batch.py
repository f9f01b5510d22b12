"""A batch: fields by path, nested on request, tensors without a copy."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.batch import Batch
from mmreplay.errors import SchemaError


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.fixture
def batch():
    packed = np.zeros(3, np.dtype([("r", "<f4"), ("b", "<u2"), ("pad", "<u2")]))
    packed["r"] = [1, 2, 3]
    packed["b"] = [0x3F80, 0x4000, 0xC000]
    return Batch(
        {
            "observation/state": np.arange(6, dtype=np.float32).reshape(3, 2),
            "reward": packed["r"],
            "brain": packed["b"],
            "done": np.array([True, False, True]),
        },
        np.array([0, 1, 0]),
        np.array([5, 6, 7]),
        np.full(3, 0.25),
        np.ones(3, np.float32),
        None,
        frozenset({"brain"}),
    )


def test_fields_are_found_by_path_and_nested(batch):
    assert batch["reward"].tolist() == [1, 2, 3]
    assert list(batch) == ["observation/state", "reward", "brain", "done"]
    assert set(batch.data) == {"observation", "reward", "brain", "done"}
    assert batch.data["observation"]["state"] is batch["observation/state"]
    assert "reward" in batch
    assert "observation" not in batch
    assert len(batch) == 3


def test_an_unknown_path_is_told(batch):
    told = r"batch has no field 'rewards', expected one of \['observation/state', 'rew"
    with pytest.raises(SchemaError, match=told):
        batch["rewards"]


def test_tensors_share_the_memory_and_name_bfloat16(batch):
    import torch

    tensors = batch.torch()
    assert tensors["brain"].dtype == torch.bfloat16
    assert tensors["brain"].tolist() == [1.0, 2.0, -2.0]
    assert tensors["done"].dtype == torch.bool
    assert tensors.env_ids.dtype == tensors.positions.dtype == torch.int64
    assert tensors.mask is None
    batch["reward"][1] = 9
    batch["observation/state"][0, 0] = 8
    assert tensors["reward"].tolist() == [1, 9, 3]
    assert tensors["observation/state"][0, 0] == 8
    assert tensors.to("cpu")["brain"].dtype == torch.bfloat16


COLUMNS = ["env_ids", "positions", "probabilities", "weights"]


def test_columns_of_the_draw_are_tensors_of_the_same_memory(batch):
    import torch

    tensors = batch.torch()
    for name in COLUMNS:
        column = getattr(tensors, name)
        assert isinstance(column, torch.Tensor)
        assert column is getattr(tensors, name)
        assert column.data_ptr() == getattr(batch, name).ctypes.data
    assert len(tensors) == 3
    assert tensors.torch() is tensors


@pytest.mark.parametrize("looked", [False, True])
def test_a_column_is_what_it_was_set_to(batch, looked):
    import torch

    tensors = batch.torch()
    if looked:
        assert tensors.weights.tolist() == [1, 1, 1]
    tensors.weights = torch.arange(3.0)
    assert tensors.weights.tolist() == [0, 1, 2]
    assert tensors.to("cpu").weights.tolist() == [0, 1, 2]


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, pickled, replace])
def test_what_is_copied_has_tensors_for_columns(batch, change):
    import torch

    copied = change(batch.torch())
    assert copied._drawn is None
    for name in COLUMNS:
        assert isinstance(getattr(copied, name), torch.Tensor)
        assert getattr(copied, name).tolist() == getattr(batch, name).tolist()
    assert copied["brain"].tolist() == [1.0, 2.0, -2.0]
    assert copied.key == batch.key
    assert change(batch).weights.tolist() == [1, 1, 1]


def test_a_name_that_is_none_is_told(batch):
    for each in (batch, batch.torch()):
        with pytest.raises(
            AttributeError, match=r"no attribute 'rewards'; .*\['rewards'\]"
        ):
            _ = each.rewards


def test_a_mask_travels_along(batch):
    import torch

    masked = Batch(
        batch.fields,
        batch.env_ids,
        batch.positions,
        batch.probabilities,
        batch.weights,
        np.array([[True, False]] * 3),
    )
    assert masked.torch("cpu").mask.dtype == torch.bool


@pytest.mark.parametrize("engine", ["memmap", "memory"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_batches_of_a_buffer_become_tensors(tmp_path, engine, contiguous):
    import torch

    schema = mr.Schema(
        {
            "observation": {
                "big": mr.Field((64, 32), "bfloat16"),
                "small": mr.Field((3,), "uint8"),
            },
            "action": mr.Field((), "int16"),
            "reward": mr.Field((), "float64"),
            "brain": mr.Field((), "bfloat16"),
            "terminated": mr.Field((), "bool"),
        }
    )
    path = tmp_path / "ring" if engine == "memmap" else None
    with mr.ReplayBuffer.create(path, schema, 9, engine=engine) as buffer:
        for number in range(6):
            buffer.add(
                observation={
                    "big": torch.full((64, 32), float(number)).bfloat16(),
                    "small": np.full(3, number, np.uint8),
                },
                action=number,
                reward=number / 3,
                brain=float(number),
                terminated=False,
            )
        batch = buffer.sample(16, contiguous=contiguous)
        tensors = batch.torch()
        for path in batch:
            flags = batch[path].flags
            assert flags.writeable
            assert flags.c_contiguous or not contiguous
            assert tensors[path].shape == batch[path].shape
        nexts = tensors["next_observation/big"]
        assert nexts.dtype == tensors["brain"].dtype == torch.bfloat16
        assert (nexts[:, 0, 0].float() == tensors["action"] + 1).all()
        assert (tensors["brain"].float() == tensors["action"]).all()
        assert (tensors["next_observation/small"][:, 0] == tensors["action"] + 1).all()
        everything = buffer.gather_all().torch()
        assert everything["observation/big"].dtype == torch.bfloat16
        assert everything["final"].dtype == torch.bool


def test_a_batch_shows_its_fields_not_their_values(batch):
    shown = "observation/state float32[3, 2], reward float32[3], brain uint16[3]"
    assert repr(batch) == f"<Batch of 3 steps: {shown}, done bool[3]>"
    assert "brain bfloat16[3]" in repr(batch.torch())
