"""Rows that storages of tmrl and pytorchrl hold; what they read is the oracle."""

import pickle

import numpy as np
import pytest
import torch

import mmreplay as mr
from tests.adapters.test_tmrl_peers import buffer_of, episodes, theirs
from tests.convert.foreign.oracle import drawn

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
__all__ = ["theirs"]


def test_transitions_of_tmrl_are_the_ones_it_draws(theirs, tmp_path, rng):
    memory = theirs.GenericTorchMemory(60, 8, dataset_path=str(tmp_path), nb_steps=1)
    for count in (30, 20, 40):
        memory.append(buffer_of(episodes(rng, count)))
    (tmp_path / "data.pkl").write_bytes(pickle.dumps(memory.data))
    mr.load(tmp_path / "data.pkl", tmp_path / "buffer", allow_pickle=True)
    found, left = drawn(tmp_path / "buffer", ["observation/0", "observation/1"])
    assert left == 0
    # From a row that ended something it would draw another one instead.
    starts = [i for i in range(len(memory)) if not memory.data[6][i]]
    assert len(found["action"]) == len(starts)
    for row, start in enumerate(starts):
        seen, action, reward, after, terminated, truncated, _ = memory.get_transition(start)
        for part in (0, 1):
            np.testing.assert_array_equal(found[f"observation/{part}"][row], seen[part])
            np.testing.assert_array_equal(found[f"next_observation/{part}"][row], after[part])
        np.testing.assert_array_equal(found["action"][row], action)
        assert found["reward"][row] == reward
        assert found["terminated"][row] == terminated
        # The newest step is cut off where it does not end.
        assert found["truncated"][row] == truncated or row == len(starts) - 1


def test_rows_of_pytorchrl_are_what_its_storage_holds(tmp_path):
    pytest.importorskip("pytorchrl", reason="pytorchrl is not installed")
    from tests.adapters import test_pytorchrl_peers as peers

    storage = peers.theirs.ReplayBuffer.create_factory(16)(
        "cpu", peers.actor(), peers.algorithm(), None
    )
    for number in range(21):
        storage.insert_transition(peers.transition(number, done=number % 5 == 4))
    tensors = {
        key: torch.from_numpy(value)
        for key, value in storage.data.items()
        if isinstance(value, np.ndarray)
    }
    path = tmp_path / "storage.pt"
    torch.save(tensors | {"size": storage.size, "step": storage.step}, path)
    mr.load(path, tmp_path / "buffer", done="terminated", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
        steps = (buffer.view.flags(rows.env_ids, rows.positions) & 8) == 0
    order = (storage.step + np.arange(16)) % 16
    for name, path_ in (("Observation", "observation"), ("Action", "action")):
        held = np.concatenate(np.moveaxis(storage.data[name][order], 1, 0))
        np.testing.assert_array_equal(rows[path_][steps], held)
