"""Memories of velora, tmrl and pytorchrl, and ours in their place, as faces to time."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

OBSERVATION, ACTION, HIDDEN, BLOCK = 17, 6, 64, 1000

Array = NDArray[Any]


def numbered(first: int, count: int) -> Array:
    """Observations that tell the number of their step, float32 ``[count, 17]``."""
    numbers = np.arange(first, first + count, dtype=np.float32)
    return numbers[:, None] + np.zeros(OBSERVATION, np.float32)


def rounds(ring: Any) -> bool:
    """Whether a ring has come round: what is added overwrites, as in a long run."""
    return ring is None or int(ring.heads.min()) > ring.slots + BLOCK


class Velora:
    """velora: single steps with hidden states, as NeuroFlow adds and draws."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self._torch = torch = import_module("torch")
        dims = (steps, OBSERVATION, ACTION, HIDDEN)
        if path is None:
            import_module("velora.models")  # first: its imports are circular
            self.buffer = import_module("velora.buffer").ReplayBuffer(*dims)
        else:
            adapter = import_module("mmreplay.adapters.velora")
            self.buffer = adapter.ReplayBuffer(*dims, path=path)
        self._action = torch.zeros(1, ACTION)
        self._hidden = torch.zeros(1, HIDDEN)
        self._next = 0
        for first in range(0, steps, BLOCK):
            self._fill(first, min(BLOCK, steps - first))
        while not rounds(getattr(self.buffer, "_ring", None)):
            self._fill(self._next, BLOCK)

    def _fill(self, first: int, count: int) -> None:
        states = self._torch.from_numpy(numbered(first, count))
        zeros = self._torch.zeros(count, 1)
        self.buffer.add_multi(
            states,
            zeros.repeat(1, ACTION),
            states[:, 0],
            states + 1,
            zeros,
            zeros.repeat(1, HIDDEN),
        )
        self._next = first + count

    def add(self) -> None:
        """See `Face`."""
        state = self._torch.from_numpy(numbered(self._next, 1)[0])
        reward, self._next = float(self._next), self._next + 1
        self.buffer.add(state, self._action, reward, state + 1, False, self._hidden)

    def sample(self, batch: int) -> Any:
        """See `Face`."""
        return self.buffer.sample(batch)

    def drawn(self, batch: int) -> tuple[Array, Array]:
        """See `Face`."""
        found = self.sample(batch)
        assert (found.next_states == found.states + 1).all()
        return found.states.numpy(), found.rewards.numpy()


class Tmrl:
    """tmrl: samples appended in buffers of ten, drawn a batch at a time."""

    SENT = 10

    def __init__(self, path: Path | None, steps: int) -> None:
        given = {"memory_size": steps, "batch_size": 256}
        if path is None:
            self.memory = _tmrl().GenericTorchMemory(**given)
        else:
            adapter = import_module("mmreplay.adapters.tmrl")
            self.memory = adapter.GenericTorchMemory(**given, path=path)
        self._action = np.zeros(ACTION, np.float32)
        self._next = 0
        for first in range(0, steps + 1, BLOCK):
            self._append(min(BLOCK, steps + 1 - first))

    def _append(self, count: int) -> None:
        """Append samples; an observation is the action's outcome, and so the reward."""
        rows = numbered(self._next, count)
        self._next += count
        samples: list[tuple[object, ...]] = [
            (self._action, row, float(row[0]) - 1, False, False, {}) for row in rows
        ]
        stats = dict.fromkeys(
            (f"stat_{run}_{what}" for run in ("train", "test") for what in ("return", "steps")), 0.0
        )
        self.memory.append(_Buffer(memory=samples, **stats))

    def add(self) -> None:
        """See `Face`."""
        self._append(self.SENT)

    def sample(self, batch: int) -> Any:
        """See `Face`."""
        self.memory.batch_size = batch
        return self.memory.sample()

    def drawn(self, batch: int) -> tuple[Array, Array]:
        """See `Face`."""
        old, _, reward, new, *_ = self.sample(batch)
        assert (new == old + 1).all()
        return old.numpy(), reward.numpy()[:, None]


class _Buffer(SimpleNamespace):
    """tmrl's Buffer, as far as memories look at it."""

    memory: list[Any]

    def __len__(self) -> int:
        return len(self.memory)


def _tmrl() -> Any:
    """Import tmrl's memories, without its top package, which fills the home folder."""
    if "tmrl" not in sys.modules:
        found = find_spec("tmrl")
        assert found is not None
        assert found.submodule_search_locations is not None
        top = sys.modules["tmrl"] = ModuleType("tmrl")
        top.__path__ = list(found.submodule_search_locations)
    return import_module("tmrl.custom.custom_memories")


class Pytorchrl:
    """pytorchrl: prioritized draws with their updates, of one environment."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self._torch = torch = import_module("torch")
        given: dict[str, Any] = {"size": steps, "epsilon": 0.01, "alpha": 0.6}
        if path is None:
            storages = import_module("pytorchrl.agent.storages")
        else:
            storages = import_module("mmreplay.adapters.pytorchrl")
            given["path"] = path
        actor = SimpleNamespace(is_recurrent=False)
        algorithm = SimpleNamespace(gamma=0.99, update_every=50, _update_every=50)
        make = storages.PERBuffer.create_factory(**given)
        self.storage = make("cpu", actor, algorithm, None)
        self._zeros = torch.zeros(1, 1)
        self._next = 0
        self.add()
        for first in range(1, steps, BLOCK):
            self._fill(first, min(BLOCK, steps - first))
            if first % (50 * BLOCK) == 1:
                self.sample(1)  # learners draw while the memory grows
        while not rounds(getattr(self.storage, "_ring", None)):
            self._fill(self._next, BLOCK)

    def _fill(self, first: int, count: int) -> None:
        rows = numbered(first, count)[:, None]
        zeros = np.zeros((count, 1, 1), np.float32)
        self.storage.insert_data_slice(
            {
                "Observation": rows,
                "Done": zeros,
                "Action": zeros.repeat(ACTION, 2),
                "Reward": rows[..., :1],
                "NextObservation": rows + 1,
                "NextDone": zeros,
            }
        )
        self._next = first + count

    def add(self) -> None:
        """See `Face`."""
        row, zeros = self._torch.from_numpy(numbered(self._next, 1)), self._zeros
        self._next += 1
        self.storage.insert_transition(
            {
                "Observation": row,
                "RecurrentHiddenStates": zeros,
                "Done": zeros,
                "Action": zeros.repeat(1, ACTION),
                "Reward": row[:, :1],
                "NextObservation": row + 1,
                "NextRecurrentHiddenStates": zeros,
                "NextDone": zeros,
            }
        )

    def sample(self, batch: int) -> Any:
        """See `Face`; errors go back, as they do after each draw."""
        self.storage.before_gradients()
        (found,) = self.storage.generate_batches(1, batch)
        errors = self._torch.ones(batch, 1)
        self.storage.after_gradients(found, {"Algorithm": {"errors": errors}})
        return found

    def drawn(self, batch: int) -> tuple[Array, Array]:
        """See `Face`."""
        found = self.sample(batch)
        assert (found["NextObservation"] == found["Observation"] + 1).all()
        return found["Observation"].numpy(), found["Reward"].numpy()
