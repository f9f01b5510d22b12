"""Every public name of the originals is here, with its arguments; devices are obeyed.

Where an original is installed it is asked itself; `NAMES` are those of its documents.
"""

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch

from mmreplay.adapters import alf, pytorchrl, rofunc, skrl, tmrl, velora
from mmreplay.adapters.alf import ReplayBuffer
from tests.adapters.pytorchrl_steps import ALGORITHM, actor, transition

MEMORY = (
    "add_samples create_tensor get_sampling_indexes get_tensor_by_name "
    "get_tensor_names load reset sample sample_all sample_by_index save "
    "set_tensor_by_name share_memory __len__"
)
STORAGE = (
    "create_factory init_tensors insert_transition get_data_slice insert_data_slice "
    "insert_single_tensor_slice get_all_buffer_data reset generate_batches "
    "before_gradients after_gradients update_storage_parameter storage_tensors"
)
NAMES = {
    rofunc.Memory: MEMORY,
    rofunc.RandomMemory: MEMORY,
    skrl.Memory: MEMORY,
    skrl.RandomMemory: MEMORY,
    alf.ReplayBuffer: "ONE_MINUS add_batch dequeue gather_all get_batch get_field "
    "get_disc_0_begin_position get_episode_begin_position steps_to_episode_end "
    "initial_priority total_size update_priority clear stop revive state_dict "
    "load_state_dict num_environments current_size current_pos circular "
    "check_convert_env_ids",
    alf.RingBuffer: "enqueue dequeue remove_up_to clear stop revive has_space has_data "
    "num_environments get_earliest_position get_current_position circular "
    "check_convert_env_ids",
    alf.DataBuffer: "add_batch get_batch get_batch_by_indices get_all is_full clear "
    "current_size current_pos enqueue dequeue has_space has_data remove_up_to stop "
    "revive num_environments get_earliest_position get_current_position circular "
    "check_convert_env_ids",
    alf.SegmentTree: "summary __getitem__ __setitem__",
    alf.MaxSegmentTree: "summary",
    alf.MinSegmentTree: "summary",
    alf.SumSegmentTree: "summary find_sum_bound nnz",
    tmrl.Memory: "append append_buffer collate get_transition sample sample_indices "
    "__iter__ __getitem__ __len__",
    tmrl.TorchMemory: "collate",
    tmrl.GenericTorchMemory: "append append_buffer collate get_transition sample",
    velora.BufferBase: "add add_multi load metadata sample save state_dict __len__",
    velora.ReplayBuffer: "config sample warm",
    velora.BatchExperience: "__dataclass_fields__",
    pytorchrl.MBReplayBuffer: STORAGE,
    pytorchrl.ReplayBuffer: STORAGE,
    pytorchrl.NStepReplayBuffer: STORAGE,
    pytorchrl.PERBuffer: STORAGE,
    pytorchrl.EREBuffer: f"{STORAGE} update_eta",
    pytorchrl.HERBuffer: f"{STORAGE} update_eta handle_end_of_episode",
}


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: f"{kind.__module__}.{kind}")
def test_every_public_name_of_the_documents_is_here(kind):
    assert [name for name in NAMES[kind].split() if not hasattr(kind, name)] == []


def test_tuples_and_dataclasses_have_the_fields_of_the_originals():
    assert alf.BatchInfo._fields == (
        "env_ids",
        "positions",
        "importance_weights",
        "replay_buffer",
        "discounted_return",
    )
    assert list(velora.BatchExperience.__dataclass_fields__) == [
        "states",
        "actions",
        "rewards",
        "next_states",
        "dones",
        "hiddens",
    ]
    assert pytorchrl.MBReplayBuffer.storage_tensors == (
        "Observation",
        "RecurrentHiddenStates",
        "Done",
        "Action",
        "Reward",
        "NextObservation",
        "NextRecurrentHiddenStates",
        "NextDone",
    )


def without_its_top(patch):
    """Import tmrl's modules without its top package, which wants a folder at home."""
    top = ModuleType("tmrl")
    top.__path__ = list(find_spec("tmrl").submodule_search_locations)
    patch.setitem(sys.modules, "tmrl", top)
    for name in [name for name in sys.modules if name.startswith("tmrl.")]:
        patch.delitem(sys.modules, name)


PAIRS = [
    (skrl.Memory, "skrl.memories.torch", "Memory"),
    (skrl.RandomMemory, "skrl.memories.torch", "RandomMemory"),
    (velora.BufferBase, "velora.buffer", "BufferBase"),
    (velora.ReplayBuffer, "velora.buffer", "ReplayBuffer"),
    (tmrl.Memory, "tmrl.memory", "Memory"),
    (tmrl.TorchMemory, "tmrl.memory", "TorchMemory"),
    (tmrl.GenericTorchMemory, "tmrl.custom.custom_memories", "GenericTorchMemory"),
    *(
        (getattr(pytorchrl, name), "pytorchrl.agent.storages", name)
        for name in (
            "MBReplayBuffer",
            "ReplayBuffer",
            "NStepReplayBuffer",
            "PERBuffer",
            "EREBuffer",
            "HERBuffer",
        )
    ),
]
INSIDE = {"get_priority", "get_sequence_priority", "copy_single_tensor"}
"""What pytorchrl's priorities and relabelled steps are made by; ours are made
otherwise."""


def arguments(call):
    kinds = inspect.Parameter
    return [
        (p.name, p.default)
        for p in inspect.signature(call).parameters.values()
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mine", "module", "name"), PAIRS)
def test_calls_take_what_the_originals_take(mine, module, name, monkeypatch):
    library = module.split(".")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "tmrl":
        without_its_top(monkeypatch)
    if library == "velora":
        import_module("velora.models")  # first: its imports are circular
    original = getattr(import_module(module), name)
    for label, member in inspect.getmembers(original, callable):
        if label in INSIDE or (label.startswith("_") and label != "__init__"):
            continue
        ours = getattr(mine, label)
        given = inspect.signature(ours).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in given):
            continue  # passed on to a class that is compared
        wanted = arguments(member)
        assert [each[0] for each in arguments(ours)][: len(wanted)] == [
            each[0] for each in wanted
        ], label
        # An option of theirs has the same default, None where it is an enumeration.
        for one, other in zip(arguments(ours), wanted, strict=False):
            plain = isinstance(other[1], int | float | str | bool | None.__class__)
            assert not plain or one[1] == other[1], (label, one, other)


def devices(nest):
    if isinstance(nest, torch.Tensor):
        return {nest.device.type}
    if isinstance(nest, dict):
        nest = list(nest.values())
    parts = nest if isinstance(nest, list | tuple) else []
    return set().union(*map(devices, parts))


def test_results_go_to_the_device_that_was_named(tmp_path):
    # Of the devices that are everywhere, meta is the one that is not the CPU.
    memory = skrl.RandomMemory(4, 1, "meta", path=tmp_path / "skrl")
    memory.create_tensor("a", 2)
    memory.add_samples(a=torch.ones(4, 2))
    assert devices(memory.sample(["a"], 2)) == {"meta"}
    assert devices([memory.get_tensor_by_name("a"), memory.sample_all(["a"])]) == {"meta"}
    memory.home.close()
    kept = velora.ReplayBuffer(4, 2, 1, 3, device="meta", path=tmp_path / "velora")
    kept.add_multi(*(np.ones((4, n), np.float32) for n in (2, 1, 1, 2, 1, 3)))
    assert devices(list(vars(kept.sample(2)).values())) == {"meta"}
    assert devices(kept.state_dict()) == {"meta"}
    kept.close()
    storage = pytorchrl.ReplayBuffer(
        4, "meta", actor(), ALGORITHM, None, path=tmp_path / "pytorchrl"
    )
    storage.insert_transition(transition(0))
    assert devices(next(storage.generate_batches(1, 2))) == {"meta"}
    storage.close()
    spec = {"a": torch.zeros(2)}
    buffer = ReplayBuffer(spec, 1, 4, device="meta", path=tmp_path / "alf")
    buffer.add_batch({"a": torch.ones(1, 2)})
    batch, info = buffer.get_batch(1, 1)
    assert devices([batch, info.env_ids, info.positions]) == {"meta"}
    buffer.close()


def test_values_of_one_tensor_tell_how_many_they_are():
    storage = pytorchrl.ReplayBuffer(4, "cpu", actor(), ALGORITHM, None)
    rows = {}
    values = torch.ones(3, 1, 2, dtype=torch.float64)
    assert storage.insert_single_tensor_slice(rows, "Action", values) == 3
    assert rows["Action"].dtype == np.float32
    assert (storage.algo, storage.device) == (ALGORITHM, "cpu")
