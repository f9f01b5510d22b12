"""What a compressed buffer's group tells a reader of Zarr, by docs/zarr.md alone.

No code of mmreplay's: numcodecs unpacks, as any Zarr reader's codecs do; the rest is
done by hand. `assert` stands for "MUST", and a shard that is not there reads as zeros.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import google_crc32c
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Bytes = NDArray[np.uint8]

MISSING = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What a group says of its rows, and what its arrays hold there.

    Attributes:
        first: int64 ``[E]``, oldest positions.
        stop: int64 ``[E]``, the next positions.
        sealed: int64 ``[E]``, the first positions in no shard.
        env_ids: int64 ``[N]``, of every row from ``first`` to ``sealed``.
        positions: int64 ``[N]``.
        columns: Per path ``[N, *shape]``.
        flags: uint8 ``[N]``.
    """

    first: Array
    stop: Array
    sealed: Array
    env_ids: Array
    positions: Array
    columns: dict[str, NDArray[Any]]
    flags: Bytes


def group_of(folder: Path) -> Path:
    """Where a buffer's group lies."""
    said = json.loads((folder / "metadata.json").read_bytes())
    return folder / f"data-{said['generation']:06d}" / "zarr"


def read_group(root: Path) -> GroupRows | None:
    """Read every row that a group tells of; None where it tells of none.

    Args:
        root: The group's folder; nobody writes to it meanwhile.

    Raises:
        AssertionError: It is not as the page says.
        ValueError: A chunk cannot be unpacked.
    """
    about = json.loads((root / "zarr.json").read_bytes())["attributes"]["mmreplay"]
    members = {"first", "stop", "sealed"}
    if not members & about.keys():
        return None
    assert members <= about.keys(), sorted(about)
    first, stop, sealed = (np.array(about[name], np.int64) for name in ("first", "stop", "sealed"))
    assert (first <= sealed).all(), about
    assert (sealed <= stop).all(), about
    env_ids = np.repeat(np.arange(about["num_envs"]), sealed - first)
    positions = np.concatenate([np.arange(*each) for each in zip(first, sealed, strict=True)])
    slots = positions % about["slots"]
    columns = {
        field["name"]: read_array(root / folder_of(field["name"]), env_ids, slots)
        for field in about["schema"]
        if not field["mutable"]
    }
    flags = read_array(root / "%flags", env_ids, slots)
    return GroupRows(first, stop, sealed, env_ids, positions, columns, flags)


def read_array(folder: Path, env_ids: Array, slots: Array) -> NDArray[Any]:
    """Rows of an array: ``[N, *shape]``.

    Args:
        folder: The array's.
        env_ids: int64 ``[N]``.
        slots: int64 ``[N]``.
    """
    about = json.loads((folder / "zarr.json").read_bytes())
    if about["data_type"] in ("string", "variable_length_bytes"):
        return read_values(folder, about, env_ids, slots)
    shape = tuple(about["shape"][2:])
    dtype = np.dtype(about["data_type"]).newbyteorder("<")
    nbytes = dtype.itemsize * math.prod(shape)
    wide, size = about["chunk_grid"]["configuration"]["chunk_shape"][:2]
    (codec,) = about["codecs"]
    assert codec["name"] == "sharding_indexed"
    rows = np.zeros((len(slots), nbytes), np.uint8)
    keys = np.stack([env_ids // wide, slots // size], 1)
    for env, step in np.unique(keys, axis=0).tolist():
        path = folder / shard_name(env, step, len(shape))
        if not path.exists():
            continue
        shard = read_shard(path, codec["configuration"], (wide, size), nbytes)
        here = (keys == [env, step]).all(axis=1)
        rows[here] = shard[slots[here] % size * wide + env_ids[here] % wide]
    found: NDArray[Any] = rows.view(dtype).reshape(len(slots), *shape)
    return found


def read_values(folder: Path, about: dict[str, Any], env_ids: Array, slots: Array) -> NDArray[Any]:
    """Rows of an array of values that vary: ``[N]`` arrays.

    Args:
        folder: The array's.
        about: Its metadata.
        env_ids: int64 ``[N]``.
        slots: int64 ``[N]``.
    """
    said = about["attributes"]["mmreplay"]
    dtype = np.dtype(said["dtype"]).newbyteorder("<")
    wide, size = about["chunk_grid"]["configuration"]["chunk_shape"]
    assert wide == 1
    (codec,) = about["codecs"]
    (first, *others) = codec["configuration"]["codecs"]
    text = about["data_type"] == "string"
    assert first["name"] == ("vlen-utf8" if text else "vlen-bytes")
    shards: dict[tuple[int, int], list[bytes]] = {}
    found = np.empty(len(slots), object)
    rows = zip(env_ids.tolist(), slots.tolist(), strict=True)
    for row, (env, slot) in enumerate(rows):
        key = env, slot // size
        if key not in shards:
            path = folder / shard_name(*key, 0)
            shards[key] = [b""] * size
            if path.exists():
                inner = codec["configuration"] | {"codecs": others}
                shards[key] = values_of_shard(path, inner, size)
        value = shards[key][slot % size]
        if text:
            value.decode()
        found[row] = np.frombuffer(value, dtype).reshape(-1, *said["inner_shape"])
    return found


def values_of_shard(path: Path, inner: dict[str, Any], size: int) -> list[bytes]:
    """The values of a shard's rows."""
    steps = inner["chunk_shape"][1]
    data = path.read_bytes()
    count = size // steps
    index = data[-16 * count - 4 : -4]
    assert int.from_bytes(data[-4:], "little") == google_crc32c.value(index), path
    values: list[bytes] = []
    for offset, nbytes in struct.iter_unpack("<QQ", index):
        chunk = unpack(data[offset : offset + nbytes], inner["codecs"])
        assert int.from_bytes(chunk[:4], "little") == steps, path
        at = 4
        for _ in range(steps):
            length = int.from_bytes(chunk[at : at + 4], "little")
            values.append(chunk[at + 4 : at + 4 + length])
            at += 4 + length
        assert at == len(chunk), path
    return values


def folder_of(name: str) -> str:
    """The folder of a field's array, below the group's."""
    parts = [quote(part, safe="").replace(".", "%2E") for part in name.split("/")]
    found = "/".join(part.replace("__", "%5F%5F") for part in parts)
    return f"tmp%2D{found[4:]}" if found.startswith("tmp-") else found


def shard_name(env: int, step: int, axes: int) -> str:
    """A shard's file, by its coordinates and the axes of a row."""
    return f"c.{env}.{step}{'.0' * axes}"


def read_shard(path: Path, inner: dict[str, Any], shard: tuple[int, int], nbytes: int) -> Bytes:
    """Rows of a place, in the order of the ring's rows: uint8 ``[rows, nbytes]``.

    Args:
        path: The file.
        inner: Configuration of its codec.
        shard: Environments and steps of it.
        nbytes: Of a row.

    Raises:
        AssertionError: A checksum disagrees.
        ValueError: A chunk cannot be unpacked.
    """
    assert inner["index_location"] == "end"
    envs, steps = inner["chunk_shape"][:2]
    grid = (shard[0] // envs, shard[1] // steps)
    count = grid[0] * grid[1]
    data = path.read_bytes()
    index = data[-16 * count - 4 : -4]
    assert len(index) == 16 * count, path
    assert int.from_bytes(data[-4:], "little") == google_crc32c.value(index), path
    rows = np.zeros((shard[1], shard[0], nbytes), np.uint8)
    for number, (offset, size) in enumerate(struct.iter_unpack("<QQ", index)):
        if offset == MISSING:
            continue
        chunk = unpack(data[offset : offset + size], inner["codecs"])
        block = np.frombuffer(chunk, np.uint8).reshape(envs, steps, nbytes)
        env, step = number // grid[1] * envs, number % grid[1] * steps
        rows[step : step + steps, env : env + envs] = block.swapaxes(0, 1)
    return rows.reshape(-1, nbytes)


def unpack(data: bytes, codecs: list[dict[str, Any]]) -> bytes:
    """The bytes of one chunk."""
    for codec in reversed(codecs):
        if codec["name"] == "crc32c":
            data, stored = data[:-4], data[-4:]
            assert int.from_bytes(stored, "little") == google_crc32c.value(data)
        elif codec["name"] in ("blosc", "zstd"):
            library: Any = import_module(f"numcodecs.{codec['name']}")
            try:
                data = library.decompress(data)
            except RuntimeError as error:
                raise ValueError(f"a chunk that {codec['name']} refuses") from error
        else:
            assert codec["name"] == "bytes"
    return data
