"""Nests of tmrl's samples: their structure as JSON, their leaves, and their CRCs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.common.values import array_of
from mmreplay.errors import SchemaError

COMPONENTS = ("previous observation", "action", "observation", "reward", "terminated", "truncated")
"""The parts of a sample that have CRCs, in order."""
REWARD = COMPONENTS.index("reward")

Arrays = Mapping[str, NDArray[Any]]


def components_of(nest: Any) -> dict[str, Any] | None:
    """Parts of a mapping, tuple or list by name or number; None of a leaf.

    Raises:
        SchemaError: Keys of a mapping are written alike.
    """
    if isinstance(nest, Mapping):
        parts = {str(key): part for key, part in nest.items()}
        if len(parts) != len(nest):
            raise SchemaError(f"sample: keys must differ as text, got {list(nest)}. Rename one.")
        return parts
    if isinstance(nest, tuple | list):
        return {str(number): part for number, part in enumerate(nest)}
    return None


def structure(nest: Any) -> Any:
    """Return the structure of a nest as JSON values; None for a leaf."""
    parts = components_of(nest)
    if parts is None:
        return None
    kind = "dict" if isinstance(nest, Mapping) else "list"
    kind = "tuple" if isinstance(nest, tuple) else kind
    return {"kind": kind, "parts": {key: structure(p) for key, p in parts.items()}}


def leaves(nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a nest by path, in order."""
    parts = components_of(nest)
    if parts is None:
        yield path, nest
        return
    for key, part in parts.items():
        yield from leaves(part, f"{path}/{key}")


def built(made: Any, arrays: Arrays, path: str) -> Any:
    """The nest of a structure, of the arrays at its leaves' paths."""
    if made is None:
        return arrays[path]
    parts = {k: built(p, arrays, f"{path}/{k}") for k, p in made["parts"].items()}
    if made["kind"] == "dict":
        return parts
    return tuple(parts.values()) if made["kind"] == "tuple" else list(parts.values())


def mapped(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest with each leaf changed."""
    if isinstance(nest, Mapping):
        return {key: mapped(part, change) for key, part in nest.items()}
    if isinstance(nest, tuple | list):
        return type(nest)([mapped(part, change) for part in nest])
    return change(nest)


def collate_torch(batch: Sequence[Any], device: Any = None) -> Any:
    """Stack nests of one structure into one nest of tensors ``[B, *shape]``.

    Arrays, tensors and numpy scalars keep their dtype, but that a float, Python's or
    float64, becomes torch's default dtype. Mappings, tuples, named ones too, and lists
    stay what they are.

    Args:
        batch: At least one.
        device: Where to.

    Raises:
        SchemaError: There is none, or a leaf is no number.
    """
    if not batch:
        raise SchemaError("collate needs at least one sample. Use a batch_size of at least 1.")
    first = batch[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(batch)).to(device)
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.stack(list(batch))).to(device)
    if isinstance(first, Mapping):
        made = {key: collate_torch([b[key] for b in batch], device) for key in first}
        return made if type(first) is dict else type(first)(made)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        columns = [collate_torch(column, device) for column in zip(*batch, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    array = np.asarray(batch)
    if array.dtype.kind not in "biuf":
        raise SchemaError(
            "collate takes arrays, tensors and numbers, got a "
            f"{type(first).__name__}. Remove it in sample_preprocessor."
        )
    tensor = torch.from_numpy(array)
    if isinstance(first, float):
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.to(device)


def crcs_of(sample: Sequence[Any]) -> NDArray[np.uint32]:
    """CRC32 of the dtypes and raw bytes of each part of a sample.

    Args:
        sample: Previous observation, action, observation, reward, terminated and
            truncated, as rollout workers keep it; the first is None after a reset. A
            reward that is a whole number counts as the float that is stored.

    Returns:
        uint32 ``[6]``; 0 of None.
    """
    parts = list(sample)
    if isinstance(parts[REWARD], int | np.integer | np.bool_):
        parts[REWARD] = float(parts[REWARD])
    return np.array([_crc(part) for part in parts], np.uint32)


def _crc(nest: Any) -> int:
    if nest is None:
        return 0
    crc = 0
    for _, leaf in leaves(nest, ""):
        array = np.ascontiguousarray(array_of(leaf))
        crc = zlib.crc32(array.dtype.str.encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc


def check_crcs(expected: NDArray[np.uint32], rebuilt: Sequence[Any], when: Any) -> None:
    """Refuse a transition that is not what the worker had.

    Args:
        expected: uint32 ``[6]``, of what it had; see `crcs_of`.
        rebuilt: The transition, in the same order.
        when: The worker's time step, and that since its reset.

    Raises:
        AssertionError: A part differs by a single bit, or by its dtype.
    """
    got = crcs_of(rebuilt)
    for part, theirs, ours in zip(COMPONENTS, expected, got, strict=True):
        if theirs != ours and not (part == COMPONENTS[0] and theirs == 0):
            raise AssertionError(
                f"CRC failed: {part} has {ours:08x}, but the worker's sample had "
                f"{theirs:08x} at time step {when[0]}, {when[1]} since its reset. The "
                "sample compressor and get_transition do not invert each other."
            )
