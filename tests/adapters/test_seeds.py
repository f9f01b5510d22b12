"""Seeds of draws: each memory its own, and a program that is run again the same."""

from collections import Counter

import numpy as np
import pytest
import torch

from mmreplay.adapters import pytorchrl, tmrl, velora
from mmreplay.adapters.common import values
from mmreplay.adapters.tmrl.memory import STATS
from tests.adapters.pytorchrl_steps import ALGORITHM, actor, transition


def of_velora(path):
    buffer = velora.ReplayBuffer(50, 1, 1, 1, path=path)
    one = torch.arange(50.0)[:, None]
    buffer.add_multi(one, one, one, one, one > 99, one)
    return buffer, buffer.sample(10).states.flatten().tolist()


def of_tmrl(path):
    memory = tmrl.GenericTorchMemory(50, 10, path=path)
    rows = [(np.float32([n]), np.float32([n]), 0.0, False, False, {}) for n in range(50)]
    stats = dict.fromkeys(STATS, 0.0)
    memory.append(type("Buffer", (), {"__len__": lambda _: 50, "memory": rows} | stats)())
    return memory, memory.sample()[0].flatten().tolist()


def of_pytorchrl(path):
    storage = pytorchrl.ReplayBuffer(50, "cpu", actor(), ALGORITHM, None, path=path)
    for number in range(50):
        storage.insert_transition(transition(number))
    (batch,) = storage.generate_batches(1, 10)
    return storage, batch["Observation"].flatten().tolist()


def test_a_seed_gives_a_row_of_seeds_that_begins_with_itself(monkeypatch):
    monkeypatch.setattr(values, "_seeded", Counter())
    torch.manual_seed(7)
    seeds = [values.seed_of_draws() for _ in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 1 << 62 for seed in seeds)
    torch.manual_seed(8)
    others = [values.seed_of_draws() for _ in range(50)]
    assert not set(seeds) & set(others)
    # As a new process.
    monkeypatch.setattr(values, "_seeded", Counter())
    torch.manual_seed(7)
    assert [values.seed_of_draws() for _ in range(50)] == seeds


@pytest.mark.parametrize("make", [of_velora, of_tmrl, of_pytorchrl])
def test_memories_of_one_seed_draw_other_rows(tmp_path, make):
    torch.manual_seed(0)
    made = [make(tmp_path / name) for name in "ab"]
    # Ten draws of fifty rows agree once in 50**10.
    assert made[0][1] != made[1][1]
    for memory, _ in made:
        memory.close()
