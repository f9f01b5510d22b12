"""Small buffers whose every byte follows from their arguments.

`fixed_uuids` gives buffers known uuids by replacing `secrets.token_bytes` of the
standard library; states of priorities and of parts name the buffer by its uuid.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from unittest import mock

import numpy as np

import mmreplay as mr
from tests.frozen.frozen_files import described, packed

NUM_ENVS = 3
CAPACITY = 64
NUM_STEPS = 150
SCHEMA = {
    "observation": ((3,), "float32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}


@contextmanager
def fixed_uuids(first=0xA0):
    """Give buffers made inside the uuids of 16 equal bytes, counted from `first`."""
    numbers = count(first)
    make = mock.patch("secrets.token_bytes", side_effect=lambda n=32: bytes([next(numbers)]) * n)
    with make:
        yield


def schema():
    """The fields of `buffer`."""
    return mr.Schema.from_flat(
        {path: mr.Field(shape, dtype) for path, (shape, dtype) in SCHEMA.items()}
    )


def step(number, env_ids):
    """One step of some environments: a function of its number."""
    ids = np.asarray(env_ids)
    values = np.float32(number) + ids.astype(np.float32) * 1000
    return {
        "observation": values[:, None] + np.arange(3, dtype=np.float32) / 8,
        "action": ids * 7 + number,
        "reward": np.sin(values.astype(np.float64)).astype(np.float32),
        "terminated": (number + 3 * ids) % 11 == 10,
        "truncated": (number + ids) % 17 == 16,
    }


def write(buffer, first, stop):
    """Add steps; environment 2 misses each fourth of them."""
    for number in range(first, stop):
        env_ids = [0, 1] if number % 4 == 3 else [0, 1, 2]
        buffer.add(step(number, env_ids), env_ids=env_ids)


def buffer(folder, engine="memmap", layout="env_major", num_steps=NUM_STEPS):
    """A buffer in its third lap, open for writing."""
    # Time-major rings take steps of all environments at once.
    add = write_together if layout == "time_major" else write
    made = mr.ReplayBuffer.create(
        None if engine == "memory" else folder,
        schema(),
        CAPACITY,
        NUM_ENVS,
        engine=engine,
        layout=layout,
        autoreset="disabled",
        commit_every=None,
    )
    add(made, 0, num_steps)
    return made


def write_together(buffer, first, stop):
    """Add steps of all environments."""
    for number in range(first, stop):
        buffer.add(step(number, range(NUM_ENVS)))


def drawn(batch):
    """Everything that a batch says, bit by bit; of its fields the digests."""
    found = {
        name: packed(np.asarray(getattr(batch, name)))
        for name in ("env_ids", "positions", "probabilities", "weights")
    }
    for name in ("mask", "window_positions", "offsets", "buffer_ids"):
        value = getattr(batch, name)
        found[name] = None if value is None else described(value)
    found["key"] = batch.key
    found["fields"] = {path: described(batch[path]) for path in sorted(batch.keys())}
    return found


def drawn_steps(draw):
    """The same of a draw, which has no fields."""
    found = {
        name: packed(np.asarray(getattr(draw, name)))
        for name in ("env_ids", "positions", "probabilities", "weights")
    }
    return found | {"key": draw.key, "buffer": draw.buffer.hex()}
