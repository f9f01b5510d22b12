"""What `places.bin` says is in shards, by docs/zarr.md alone; see `independent_reader`.

The shards themselves are read by `tools.torture.groups`, which has no code of
mmreplay's either.
"""

import json

import numpy as np

from tools.torture.groups import folder_of, read_shard, shard_name, values_of_shard


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
    varying = {f["name"] for f in said["schema"] if f["shape"][:1] == [None]}
    for name, rows in targets.items():
        parent = "zarr/%references" if name in varying else "zarr"
        folder = data / parent / folder_of(name)
        about = json.loads((folder / "zarr.json").read_text())
        assert about["shape"][:2] == [said["num_envs"], slots]
        assert about["chunk_grid"]["configuration"]["chunk_shape"][:2] == [wide, size]
        (codec,) = about["codecs"]
        assert codec["name"] == "sharding_indexed"
        for place in np.flatnonzero(numbers % 2).tolist():
            env, step = divmod(place, slots // size)
            path = folder / shard_name(env, step, len(about["shape"]) - 2)
            first = place * size * wide
            rows[first : first + size * wide] = read_shard(
                path, codec["configuration"], (wide, size), rows.shape[1]
            )


def values(said, data, rows):
    """What shards hold of some rows' values, by field that varies.

    Args:
        said: metadata.json.
        data: The data folder.
        rows: The rows.

    Returns:
        By field, for each row its bytes, or None where no shard holds it.
    """
    size, slots = said["zarr"]["shard_rows"], said["slots"]
    numbers = np.fromfile(data / "places.bin", "<u4")
    found = {}
    for field in said["schema"]:
        if field["shape"][:1] != [None]:
            continue
        folder = data / "zarr" / folder_of(field["name"])
        about = json.loads((folder / "zarr.json").read_text())
        text = field["kind"] == "text"
        assert about["data_type"] == ("string" if text else "variable_length_bytes")
        kept = about["attributes"]["mmreplay"]
        assert kept["dtype"] == field["dtype"]
        assert kept["inner_shape"] == field["shape"][1:]
        inner = about["codecs"][0]["configuration"]
        assert inner["codecs"][0]["name"] == ("vlen-utf8" if text else "vlen-bytes")
        inner = inner | {"codecs": inner["codecs"][1:]}
        shards = {}
        column = found[field["name"]] = []
        for place, within in zip(*np.divmod(rows, size), strict=True):
            if numbers[place] % 2 and place not in shards:
                path = folder / shard_name(*divmod(int(place), slots // size), 0)
                shards[place] = values_of_shard(path, inner, size)
            column.append(shards[place][within] if place in shards else None)
    return found
