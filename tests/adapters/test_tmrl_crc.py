"""Samples are compared with what their workers had, to the bit; pickles are refused."""

import pickle

import numpy as np
import pytest

from mmreplay.adapters.tmrl import GenericTorchMemory, TorchMemory
from mmreplay.errors import FormatError, SchemaError


class Buffer:
    def __init__(self, memory):
        self.memory = memory
        self.stat_train_return = self.stat_test_return = 0.0
        self.stat_train_steps = self.stat_test_steps = 0

    def __len__(self):
        return len(self.memory)


def worker(count, rng, stack=3):
    """What a rollout worker sends: single images, and in info its own samples."""
    frames, rows, old = [], [], None
    for n in range(count):
        image = rng.integers(0, 255, 4096, dtype=np.uint8)
        begun = n == 0 or rows[-1][3]
        frames = [image] * stack if begun else [*frames[1:], image]
        obs = (np.float32([n]), np.stack(frames))
        act = rng.random(2).astype(np.float32)
        end = not begun and bool(rng.random() < 0.3)
        reward = 0.0 if begun else float(rng.random())
        sent = (None if begun else old, act, obs, reward, end, False)
        info = {"crc_sample": sent, "crc_sample_ts": (n, n)}
        rows.append((act, (obs[0], image), reward, end, False, info))
        old = obs
    return rows


@pytest.fixture
def memory(tmp_path):
    memory = GenericTorchMemory(100, 32, crc_debug=True, imgs_obs=3, path=tmp_path / "ring")
    yield memory
    memory.close()


def test_what_workers_had_is_rebuilt_to_the_bit(memory):
    memory.append(Buffer(worker(40, np.random.default_rng(0))))
    assert len(memory) > 20
    for item in range(len(memory)):
        memory[item]
    assert memory.sample()[0][1].shape == (32, 3, 4096)


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_reward_that_is_a_whole_number_is_no_difference(memory, kind):
    rows = worker(20, np.random.default_rng(0))
    for n, row in enumerate(rows):
        sent, reward = row[5]["crc_sample"], kind(n) if n else 0.0
        row[5]["crc_sample"] = (*sent[:3], reward, *sent[4:])
        rows[n] = (*row[:2], reward, *row[3:])
    memory.append(Buffer(rows))
    assert memory.sample()[2].max() > 1


def change_pixel(row):
    row[1][1][2000] += 1


def change_reward(row):
    return (*row[:2], np.nextafter(row[2], 9), *row[3:])


def narrow_reward(row):
    return (*row[:2], float(np.float32(row[2])), *row[3:])


def change_action(row):
    row[0][1] = np.nextafter(row[0][1], np.float32(9))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_pixel, "observation"),
        (change_reward, "reward"),
        (narrow_reward, "reward"),
        (change_action, "action"),
    ],
)
def test_one_bit_in_the_middle_is_found(memory, change, name):
    rows = worker(3, np.random.default_rng(1))
    # What a worker had must not change with what it sends.
    sent = pickle.loads(pickle.dumps(rows[2]))
    rows[2] = (*(change(sent) or sent)[:5], rows[2][5])
    memory.append(Buffer(rows))
    memory[0]
    with pytest.raises(AssertionError, match=rf"CRC failed: {name} has .* step 2, 2"):
        memory[1]
    with pytest.raises(AssertionError, match="CRC failed"):
        memory.sample()


def test_samples_of_a_worker_without_crcs_are_refused(memory):
    rows = [(*row[:5], {}) for row in worker(3, np.random.default_rng(1))]
    with pytest.raises(SchemaError, match=r"Set crc_debug in the RolloutWorker as well\."):
        memory.append(Buffer(rows))


class Listed(TorchMemory):
    def append_buffer(self, buffer):
        self.data += buffer.memory

    def __len__(self):
        return max(0, len(self.data) - 1)

    def get_transition(self, item):
        (_, old, *_), (act, new, reward, *ends, info) = self.data[item : item + 2]
        return old, act, reward, new, *ends, info


def test_memories_of_ones_own_are_checked_as_well():
    memory = Listed("cpu", 1, crc_debug=True)
    rows = worker(5, np.random.default_rng(2), stack=1)
    memory.append(Buffer(rows))
    first = next(n for n in range(4) if not rows[n][3])
    memory[first]
    rows[first + 1][1][1][2000] += 1
    with pytest.raises(AssertionError, match="CRC failed: observation"):
        memory[first]


def columns():
    rows = [(np.float32([n]), np.float32([n]), float(n), n == 2, False) for n in range(6)]
    act, obs, reward, terminated, truncated = (list(c) for c in zip(*rows, strict=True))
    return [act, obs, reward, terminated, truncated, [{}] * 6, terminated]


def test_a_pickle_is_loaded_only_where_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(columns()))
    with pytest.raises(SchemaError, match=r"memory is not limited\. Pass allow_pickle=True"):
        GenericTorchMemory(dataset_path=tmp_path, path=tmp_path / "a")
    memory = GenericTorchMemory(3, dataset_path=tmp_path, path=tmp_path / "b", allow_pickle=True)
    # Rows 2 to 5 are kept, of which 2 is an end.
    assert [memory[n][2] for n in range(len(memory))] == [4.0, 5.0]
    memory.close()
    monkeypatch.chdir(tmp_path)
    memory = GenericTorchMemory(path=tmp_path / "c")
    assert len(memory) == 0
    memory.close()


def test_a_pickle_of_another_memory_is_refused(tmp_path):
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(columns() + [[0]] * 2))
    with pytest.raises(FormatError, match="must hold the 7 columns of"):
        GenericTorchMemory(dataset_path=tmp_path, path=tmp_path / "a", allow_pickle=True)
