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
    assert "observation" in batch
    assert "obs" not in batch
    assert 0 not in batch
    assert len(batch) == 3


def test_an_unknown_path_is_reported(batch):
    told = r"batch has no field 'rewards', only \['observation/state', 'rew"
    with pytest.raises(SchemaError, match=told):
        batch["rewards"]


def test_a_batch_is_a_mapping_from_paths_to_arrays(batch):
    def keywords(**fields):
        return fields

    for each in (batch, batch.torch()):
        paths = ["observation/state", "reward", "brain", "done"]
        assert list(each.keys()) == list(each) == paths
        assert [path for path, _ in each.items()] == paths
        for made in (dict(each), keywords(**each), {**each}, dict(each.items())):
            assert list(made) == paths
            assert all(made[path] is each[path] for path in paths)
            assert all(a is b for a, b in zip(made.values(), each.values(), strict=True))
        assert each.get("reward") is each["reward"]
        assert each.get("rewards") is None
        assert each.get("rewards", 7) == 7


def test_a_branch_gives_the_nested_dict_of_its_arrays():
    one = np.zeros((2, 3), np.float32)
    fields = {
        "observation/camera/left": one,
        "observation/camera/right": one + 1,
        "observation/joints": one + 2,
        "observer": one + 3,
        "next_observation/joints": one + 4,
    }
    batch = Batch(fields, *np.zeros((4, 2), int))
    for each in (batch, batch.torch()):
        found = each["observation"]
        assert list(found) == ["camera", "joints"]
        assert found["joints"] is each["observation/joints"]
        assert found["camera"]["right"] is each["observation/camera/right"]
        assert each["observation/camera"].keys() == {"left", "right"}
        assert each["next_observation"].keys() == {"joints"}
        assert each.get("observation").keys() == {"camera", "joints"}
        assert "observation/camera" in each
        assert "observation/cam" not in each
        for path in ("observation/", "", "/joints", "observation/joints/x"):
            with pytest.raises(SchemaError, match="batch has no field"):
                each[path]


def test_names_of_fields_and_branches_are_completed():
    one = np.zeros(2)
    fields = {"observation/camera/left": one, "observation/joints": one, "reward": one}
    batch = Batch(fields, *np.zeros((4, 2), int))
    offered = batch._ipython_key_completions_()
    assert offered == [
        "observation",
        "observation/camera",
        "observation/camera/left",
        "observation/joints",
        "reward",
    ]
    assert all(name in batch for name in offered)


def test_the_batch_of_one_buffer_is_written_to_another():
    plain = {"x": mr.Field((2,), "float32"), "terminated": mr.Field((), "bool")}
    one = mr.ReplayBuffer.create(None, mr.Schema(plain), 10, engine="memory")
    two = mr.ReplayBuffer.create(None, mr.Schema(plain), 10, engine="memory")
    one.extend(x=np.arange(6.0).reshape(3, 2), terminated=np.array([False, True, False]))
    two.extend(one.take(0, [2, 0]))
    assert two.gather_all()["x"].tolist() == [[4, 5], [0, 1]]


def test_a_dataloader_that_pins_or_collates_keeps_a_batch_whole(batch):
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned = []

    class Pinned(Batch):
        def pin_memory(self):
            pinned.append(self)
            return self

    tensors = batch.torch()
    own = Pinned(
        tensors.fields, tensors.env_ids, tensors.positions, tensors.probabilities, tensors.weights
    )
    assert pin_memory(own) is own
    assert pinned == [own]
    assert mr.collate(tensors) is tensors
    with pytest.raises(SchemaError, match=r"collate needs.*got a list of 2 batches"):
        mr.collate([tensors, tensors])


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


def test_an_invalid_name_is_reported(batch):
    for each in (batch, batch.torch()):
        with pytest.raises(AttributeError, match=r"no attribute 'rewards'; .*\['rewards'\]"):
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


def test_a_column_of_the_draw_is_what_it_was_set_to(batch):
    torch = pytest.importorskip("torch")
    assert batch.drawn("positions") is batch.positions
    tensors = batch.torch()
    # No tensor is made of what nobody asked for, and one that was asked for is it.
    assert tensors.drawn("positions") is batch.positions
    assert isinstance(tensors.positions, torch.Tensor)
    assert tensors.drawn("positions") is tensors.positions
    other = torch.arange(3)
    tensors.env_ids = other
    assert tensors.drawn("env_ids") is other
