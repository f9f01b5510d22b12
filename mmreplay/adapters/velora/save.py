"""The two files of a velora buffer: checks of its metadata against its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmreplay.adapters.common.location import BufferLocation
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert.safetensors import TensorFile, block_rows
from mmreplay.errors import FormatError

METADATA = "velora"
"""Key of the metadata in the file of tensors, to compare the files of two saves."""
SIZE, LOADING = "loads", "loading"
"""Keys of a folder's metadata: the steps of a load, and whether it is incomplete."""


@dataclass(frozen=True)
class BufferConfig:
    """The result of `ReplayBuffer.config` where velora is not installed."""

    type: str
    capacity: int
    state_dim: int
    action_dim: int
    hidden_dim: int


def checked(metadata: Mapping[str, Any], source: Path) -> dict[str, int]:
    """Return the numbers of a buffer's metadata.

    Raises:
        FormatError: One is missing or out of range.
    """
    names = ("capacity", "state_dim", "action_dim", "hidden_dim", "position", "size")
    known = metadata if isinstance(metadata, Mapping) else {}
    values = {name: known.get(name) for name in names}
    numbers = {name: n for name, n in values.items() if type(n) is int and n >= 0}
    if len(numbers) < len(names) or "device" not in known:
        raise FormatError(
            f"metadata of {source} must have {', '.join(names)} as numbers, and a "
            f"device, got {metadata!r}. Pass what metadata() returned."
        )
    if numbers["capacity"] < max(1, numbers["size"], numbers["position"] + 1):
        raise FormatError(
            f"metadata of {source}: size and position must be within the capacity of "
            f"{numbers['capacity']}, got {numbers['size']} and "
            f"{numbers['position']}. Pass what metadata() returned."
        )
    return numbers


def check_pair(file: TensorFile, numbers: Mapping[str, int]) -> None:
    """Refuse tensors and metadata of different saves."""
    if METADATA not in file.texts:
        return
    own = json.loads(file.texts[METADATA])
    theirs = {name: own.get(name) for name in numbers}
    if theirs != numbers:
        raise FormatError(
            f"metadata must be {theirs}, with which the tensors were saved, got "
            f"{dict(numbers)}. Pass the metadata of the same save."
        )


def fill(
    ring: ReplayBuffer,
    file: TensorFile,
    columns: Mapping[str, tuple[str, tuple[int, ...]]],
    oldest: int,
    size: int,
) -> None:
    """Load steps into a new ring, which is marked as incomplete until the end."""
    file.expect(columns, ring.capacity)
    ring.set_statistics({METADATA: {LOADING: True}})
    step = block_rows(columns)
    for first, stop in row_ranges(oldest, size, ring.capacity, step):
        ring.extend({name: file.read(name, first, stop) for name in columns})
    # Not before they would survive a power cut.
    ring.commit()
    ring.set_statistics({})


def check_loaded(location: BufferLocation, ring: ReplayBuffer) -> None:
    """Refuse a ring that lacks steps because its load was killed."""
    size = ring.metadata.user.get(METADATA, {}).get(SIZE, 0)
    loading = ring.statistics.get(METADATA, {}).get(LOADING)
    if not size or not (loading or ring.heads[0] == 0):
        return
    found = len(ring)
    location.close()
    raise FormatError(
        f"{location.path} holds {found} of the {size} steps of a load that was "
        "interrupted. Remove the folder, and load again."
    )


def row_ranges(oldest: int, size: int, capacity: int, step: int) -> list[tuple[int, int]]:
    """Return rows ``[first, stop)`` in the order they were added, at most step each."""
    edges = [(oldest, min(oldest + size, capacity)), (0, oldest + size - capacity)]
    return [
        (first, min(stop, first + step))
        for begin, stop in edges
        for first in range(begin, stop, step)
    ]


def device_of(name: object) -> torch.device:
    """Return a named device; the CPU for None or where this machine lacks it."""
    device = torch.device(str(name or "cpu"))
    gone = device.type == "cuda" and not torch.cuda.is_available()
    return torch.device("cpu") if gone else device
