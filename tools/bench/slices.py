"""Libraries that draw sequences, behind one face; see `peers` for single steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from tools.bench import transitions
from tools.bench.peers import PATHS
from tools.bench.transitions import BLOCK
from tools.bench.turns import chosen

Slicer = Callable[[], dict[str, Any]]
"""Draws sequences as torch tensors by our paths, ``[B * T, *shape]``."""


def torchrl(blocks: int, count: int, length: int) -> Slicer:
    """TorchRL's SliceSampler, of whole slices within episodes, its index cached."""
    data = import_module("torchrl.data")
    samplers = import_module("torchrl.data.replay_buffers.samplers")
    torch, tensordict = import_module("torch"), import_module("tensordict")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(blocks * BLOCK),
        sampler=samplers.SliceSampler(
            num_slices=count, end_key="end", strict_length=True, cache_values=True
        ),
        batch_size=count * length,
    )
    for number in range(blocks):
        rows = transitions.block(number * BLOCK)
        rows["end"] = rows["terminated"] | rows["truncated"]
        tensors = {path: torch.from_numpy(array) for path, array in rows.items()}
        buffer.extend(tensordict.TensorDict(tensors, batch_size=[BLOCK]))

    def draw() -> dict[str, Any]:
        drawn = buffer.sample()
        return {path: drawn[path] for path in PATHS}

    return draw


def skrl(blocks: int, count: int, length: int) -> Slicer:
    """Sequences of skrl's RandomMemory, which know neither episodes nor the cursor.

    One environment, whose rows are put into its tensors directly: its own way of
    adding blocks to one environment moves the cursor once for each field.
    """
    torch = import_module("torch")
    memory = import_module("skrl.memories.torch").RandomMemory(
        memory_size=blocks * BLOCK, num_envs=1, replacement=True, device="cpu"
    )
    for name in PATHS:
        column = transitions.block(0, 1)[name]
        dtype = torch.bool if column.dtype == np.bool_ else torch.float32
        memory.create_tensor(name, size=int(np.prod(column.shape[1:])), dtype=dtype)
    for first in range(0, blocks * BLOCK, BLOCK):
        for name, column in transitions.block(first).items():
            values = torch.from_numpy(column.reshape(BLOCK, 1, -1))
            memory.tensors[name][first : first + BLOCK] = values
    memory.filled = True

    def draw() -> dict[str, Any]:
        found = memory.sample(PATHS, batch_size=count, sequence_length=length)[0]
        return dict(zip(PATHS, found, strict=True))

    return draw


MAKERS: dict[str, Callable[[int, int, int], Slicer]] = {"torchrl": torchrl, "skrl": skrl}


def installed(wanted: str | None = None) -> list[str]:
    """Names of the libraries that can be imported, of those wanted; see `chosen`."""
    return chosen({name: name for name in MAKERS}, wanted)
