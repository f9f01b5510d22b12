"""Other replay libraries behind one face, each given its data in its own form.

None of them is needed to run mmreplay's side; tools/bench/peers.txt pins them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from tools.bench.transitions import Columns
from tools.bench.turns import chosen


class Peer(Protocol):
    """One library's buffer of vector transitions.

    `prepare` turns rows into the form that the library takes fastest, and is not
    timed; `add` takes one prepared row, `extend` a prepared block, `sample` returns
    torch tensors by our paths.
    """

    def prepare(self, rows: Columns) -> Any:
        """Put rows ``[N, *shape]``, or one row ``[1, *shape]``, in its own form."""

    def add(self, prepared: Any) -> None:
        """Store one row."""

    def extend(self, prepared: Any) -> None:
        """Store a block."""

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw uniformly, as torch tensors."""


class Cpprb:
    """cpprb's ReplayBuffer, in RAM; its arrays are turned into tensors."""

    def __init__(self, capacity: int, block: int) -> None:
        self._from_numpy = import_module("torch").from_numpy
        fields = {
            "observation": {"shape": 17, "dtype": np.float32},
            "action": {"shape": 6, "dtype": np.float32},
            "reward": {"dtype": np.float32},
            "next_observation": {"shape": 17, "dtype": np.float32},
            "terminated": {"dtype": np.bool_},
            "truncated": {"dtype": np.bool_},
        }
        self._buffer = import_module("cpprb").ReplayBuffer(capacity, fields)

    def prepare(self, rows: Columns) -> Any:
        """See `Peer`."""
        return rows

    def add(self, prepared: Any) -> None:
        """See `Peer`."""
        self._buffer.add(**prepared)

    extend = add

    def sample(self, batch_size: int) -> dict[str, Any]:
        """See `Peer`."""
        drawn = self._buffer.sample(batch_size)
        return {path: self._from_numpy(array) for path, array in drawn.items()}


class StableBaselines3:
    """Stable-Baselines3's ReplayBuffer, in RAM; a block is one step of its envs."""

    def __init__(self, capacity: int, block: int) -> None:
        buffers = import_module("stable_baselines3.common.buffers")
        box = import_module("gymnasium").spaces.Box
        self._buffer = buffers.ReplayBuffer(
            capacity,
            box(-np.inf, np.inf, (17,), np.float32),
            box(-1, 1, (6,), np.float32),
            device="cpu",
            n_envs=block,
        )

    def prepare(self, rows: Columns) -> Any:
        """See `Peer`."""
        ended = rows["terminated"] | rows["truncated"]
        infos = [{"TimeLimit.truncated": t} for t in rows["truncated"].tolist()]
        return (
            rows["observation"],
            rows["next_observation"],
            rows["action"],
            rows["reward"],
            ended,
            infos,
        )

    def add(self, prepared: Any) -> None:
        """See `Peer`."""
        self._buffer.add(*prepared)

    extend = add

    def sample(self, batch_size: int) -> dict[str, Any]:
        """See `Peer`."""
        drawn = self._buffer.sample(batch_size)
        return {
            "observation": drawn.observations,
            "action": drawn.actions,
            "next_observation": drawn.next_observations,
            "terminated": drawn.dones,
            "reward": drawn.rewards,
        }


class Skrl:
    """skrl's RandomMemory, in RAM, drawing with replacement (its fast way).

    A block is one step of its environments: blocks for a single one go astray in
    skrl 2.1.1, whose cursor moves on with each field of a block instead of once.
    """

    def __init__(self, capacity: int, block: int) -> None:
        self._torch = torch = import_module("torch")
        memory = import_module("skrl.memories.torch").RandomMemory
        self._memory = memory(
            memory_size=capacity // block, num_envs=block, replacement=True, device="cpu"
        )
        self._sizes = {
            "observation": (17, torch.float32),
            "action": (6, torch.float32),
            "reward": (1, torch.float32),
            "next_observation": (17, torch.float32),
            "terminated": (1, torch.bool),
            "truncated": (1, torch.bool),
        }
        for name, (size, dtype) in self._sizes.items():
            self._memory.create_tensor(name, size=size, dtype=dtype)
        self._names = list(self._sizes)

    def prepare(self, rows: Columns) -> Any:
        """See `Peer`."""
        tensors = {path: self._torch.from_numpy(rows[path]) for path in self._names}
        return {p: t.reshape(len(t), -1) for p, t in tensors.items()}

    def add(self, prepared: Any) -> None:
        """See `Peer`."""
        self._memory.add_samples(**prepared)

    extend = add

    def sample(self, batch_size: int) -> dict[str, Any]:
        """See `Peer`."""
        drawn = self._memory.sample(self._names, batch_size=batch_size)[0]
        return dict(zip(self._names, drawn, strict=True))


class TorchRL:
    """TorchRL's ReplayBuffer over LazyTensorStorage, in RAM.

    TensorDictReplayBuffer adds an index to every batch, and takes longer.
    """

    def __init__(self, capacity: int, block: int) -> None:
        self._torch = import_module("torch")
        self._dict = import_module("tensordict").TensorDict
        data = import_module("torchrl.data")
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self._buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(capacity))

    def prepare(self, rows: Columns) -> Any:
        """See `Peer`."""
        tensors = {path: self._torch.from_numpy(array) for path, array in rows.items()}
        return self._dict(tensors, batch_size=[len(rows["reward"])])

    def add(self, prepared: Any) -> None:
        """See `Peer`."""
        self._buffer.add(prepared[0])

    def extend(self, prepared: Any) -> None:
        """See `Peer`."""
        self._buffer.extend(prepared)

    def sample(self, batch_size: int) -> dict[str, Any]:
        """See `Peer`."""
        drawn = self._buffer.sample(batch_size)
        return {path: drawn[path] for path in PATHS}


PATHS = ("observation", "action", "reward", "next_observation", "terminated", "truncated")
MODULES: dict[str, tuple[str, Callable[[int, int], Peer]]] = {
    "cpprb": ("cpprb", Cpprb),
    "skrl": ("skrl", Skrl),
    "stable_baselines3": ("stable_baselines3", StableBaselines3),
    "torchrl": ("torchrl", TorchRL),
}


def installed(wanted: str | None = None) -> list[str]:
    """Names of the peers that can be imported, of those wanted.

    Args:
        wanted: Comma-separated names; None for all, ``""`` for none.

    Raises:
        SystemExit: A name is unknown, or a peer asked for by name is missing.
    """
    return chosen({n: module for n, (module, _) in MODULES.items()}, wanted)


def build(name: str, capacity: int, block: int) -> Peer:
    """Make one peer's buffer.

    Args:
        name: As in `MODULES`.
        capacity: Rows.
        block: Rows that `extend` will be given at a time; 1 where only `add` is used.
    """
    return MODULES[name][1](capacity, block)
