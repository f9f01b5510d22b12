"""A reader of shards written from docs/zarr.md alone; see `independent_reader`.

numcodecs unpacks, as any Zarr reader's codecs do; the rest is done by hand.
"""

import json
import struct
from urllib.parse import quote

import google_crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np

MISSING = 2**64 - 1


def folder_of(name):
    parts = [quote(part, safe="").replace(".", "%2E") for part in name.split("/")]
    return "/".join(part.replace("__", "%5F%5F") for part in parts)


def unpack(data, codecs):
    """The bytes of one chunk."""
    for codec in reversed(codecs):
        if codec["name"] == "crc32c":
            (stored,) = struct.unpack("<I", data[-4:])
            data = data[:-4]
            assert stored == google_crc32c.value(data)
        elif codec["name"] == "blosc":
            data = numcodecs.blosc.decompress(data)
        elif codec["name"] == "zstd":
            data = numcodecs.zstd.decompress(data)
        else:
            assert codec["name"] == "bytes"
    return data


def read_shard(path, inner, shard, nbytes):
    """Rows of a place, in the order of the ring's rows, uint8 ``[rows, nbytes]``.

    Args:
        path: The file.
        inner: Configuration of its codec.
        shard: Environments and steps of it.
        nbytes: Of a row.
    """
    assert inner["index_location"] == "end"
    envs, steps = inner["chunk_shape"][:2]
    grid = (shard[0] // envs, shard[1] // steps)
    count = grid[0] * grid[1]
    data = path.read_bytes()
    index = data[-16 * count - 4 : -4]
    assert struct.unpack("<I", data[-4:])[0] == google_crc32c.value(index)
    rows = np.zeros((shard[1], shard[0], nbytes), "u1")
    for number, (offset, size) in enumerate(struct.iter_unpack("<QQ", index)):
        if offset == MISSING:
            continue
        chunk = unpack(data[offset : offset + size], inner["codecs"])
        block = np.frombuffer(chunk, "u1").reshape(envs, steps, nbytes)
        env, step = number // grid[1] * envs, number % grid[1] * steps
        rows[step : step + steps, env : env + envs] = block.swapaxes(0, 1)
    return rows.reshape(-1, nbytes)


def fill(said, data, targets):
    """Put the rows that shards hold into what the tail's files hold.

    Args:
        said: metadata.json.
        data: The data folder.
        targets: By field, uint8 ``[slots * num_envs, nbytes]``.
    """
    size, slots = said["zarr"]["shard_rows"], said["slots"]
    assert slots % size == 0
    wide = said["num_envs"] if said["layout"] == "time_major" else 1
    numbers = np.fromfile(data / "places.bin", "<u4")
    assert len(numbers) == slots * said["num_envs"] // (size * wide)
    for name, rows in targets.items():
        folder = data / "zarr" / folder_of(name)
        about = json.loads((folder / "zarr.json").read_text())
        assert about["shape"][:2] == [said["num_envs"], slots]
        assert about["chunk_grid"]["configuration"]["chunk_shape"][:2] == [wide, size]
        (codec,) = about["codecs"]
        assert codec["name"] == "sharding_indexed"
        for place in np.flatnonzero(numbers % 2).tolist():
            env, step = divmod(place, slots // size)
            tail = ".0" * (len(about["shape"]) - 2)
            path = folder / f"c.{env}.{step}{tail}"
            first = place * size * wide
            rows[first : first + size * wide] = read_shard(
                path, codec["configuration"], (wide, size), rows.shape[1]
            )
