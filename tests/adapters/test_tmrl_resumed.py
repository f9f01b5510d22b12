"""tmrl's memories on disk: in checkpoints, resized, and begun from a dataset."""

import pickle

import numpy as np
import pytest

from mmreplay.adapters.tmrl import GenericTorchMemory, TorchMemory
from mmreplay.errors import FormatError, SchemaError


class Buffer:
    """tmrl's, as far as memories look at it."""

    stat_train_return = stat_test_return = stat_train_steps = stat_test_steps = 0.0

    def __init__(self, numbers):
        self.memory = [
            (np.float32([n]), (np.float32([n]),), float(n), False, False, {}) for n in numbers
        ]

    def __len__(self):
        return len(self.memory)


class Listed(TorchMemory):
    """A memory of one's own, which keeps its samples in `data`."""

    def append_buffer(self, buffer):
        self.data += buffer.memory

    def __len__(self):
        return len(self.data)

    def get_transition(self, item):
        return self.data[item]


def rewards(memory):
    return [memory[i][2] for i in range(len(memory))]


@pytest.mark.parametrize("count", [0, 5])
def test_a_memory_without_a_path_refuses_the_first_checkpoint(monkeypatch, count):
    # tmrl pickles its trainer, memory and all, before the first epoch too.
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    memory = GenericTorchMemory(10, 2)
    memory.append(Buffer(range(count)))
    with pytest.raises(FormatError, match="exit; tmrl pickles it for a checkpoint after"):
        pickle.dumps(memory)
    memory.close()


def test_a_memory_under_the_folder_named_is_in_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("MMREPLAY_DIR", str(tmp_path))
    memory = GenericTorchMemory(10, 2)
    empty = pickle.dumps(memory)
    memory.append(Buffer(range(5)))
    memory.close()
    again = pickle.loads(empty)
    # That of before the first epoch finds the rows that came since.
    assert (again.home.path, len(again)) == (memory.home.path, 4)
    again.close()


def test_a_new_size_resizes_the_ring_and_stays_in_checkpoints(tmp_path):
    memory = GenericTorchMemory(10, 2, path=tmp_path / "ring")
    memory.append(Buffer(range(8)))
    before = pickle.dumps(memory)
    memory.memory_size = 20.0
    memory.append(Buffer(range(8, 30)))
    assert (memory.memory_size, len(memory)) == (20.0, 20)
    assert rewards(memory) == [*range(10, 30)]
    assert len(pickle.loads(pickle.dumps(memory))) == 20
    memory.close()
    # A checkpoint of before that finds the ring of now.
    memory = pickle.loads(before)
    assert (memory.memory_size, rewards(memory)) == (20, [*range(10, 30)])
    memory.memory_size = 5
    assert rewards(memory) == [*range(25, 30)]
    with pytest.raises(SchemaError, match=r"must be an integer of at least 1, got 0\."):
        memory.memory_size = 0
    memory.close()
    resumed = GenericTorchMemory(5, 2, path=tmp_path / "ring", resume=True)
    assert len(resumed) == 5
    resumed.close()


def test_a_new_size_before_the_first_sample_is_that_of_the_ring(tmp_path):
    memory = GenericTorchMemory(10, 2, path=tmp_path / "ring")
    memory.memory_size = 3
    memory.append(Buffer(range(8)))
    assert rewards(memory) == [5, 6, 7]
    memory.close()


def test_a_memory_of_ones_own_begins_with_the_dataset(tmp_path):
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(Buffer(range(3)).memory))
    with pytest.raises(SchemaError, match="allow_pickle=True"):
        Listed("cpu", 1, dataset_path=tmp_path)
    memory = Listed("cpu", 1, dataset_path=tmp_path, allow_pickle=True)
    assert [sample[2] for sample in memory.data] == [0, 1, 2]
    assert Listed("cpu", 1, dataset_path="").data == []
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({1: 2}))
    with pytest.raises(FormatError, match=r"must hold the list that a memory of tmrl"):
        Listed("cpu", 1, dataset_path=tmp_path, allow_pickle=True)
