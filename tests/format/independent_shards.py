"""What `places.bin` says is in shards, by docs/zarr.md alone; see `independent_reader`.

The shards themselves are read by `tools.torture.groups`, which has no code of
mmreplay's either.
"""

import json

import numpy as np

from tools.torture.groups import folder_of, read_shard, shard_name


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
            path = folder / shard_name(env, step, len(about["shape"]) - 2)
            first = place * size * wide
            rows[first : first + size * wide] = read_shard(
                path, codec["configuration"], (wide, size), rows.shape[1]
            )
