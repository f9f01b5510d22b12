"""How many times smaller than raw is a real recording, in shards and in other files?

Atari (ale-py, four frames of 84 x 84 a row) and MuJoCo (HalfCheetah), of random
actions: the bytes that the files take, ours beside a deflated npz, HDF5 of gzip and
parquet of zstd, each as its own library writes it, of the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import mmreplay as mr
from mmreplay.format.sharding import CODECS, Codec
from tools.bench import recorded
from tools.bench.turns import rounded, run_benchmark

KINDS = {"atari": recorded.ATARI, "mujoco": recorded.MUJOCO}
ROWS = {"atari": 20_000, "mujoco": 100_000}
QUICK = {"atari": 400, "mujoco": 2000}


def shards(path: Path, rows: recorded.Rows, name: str, codec: Codec) -> int:
    """Bytes of the shards of a closed buffer."""
    count = len(rows["reward"])
    with mr.ReplayBuffer.create(
        path, recorded.SCHEMAS[name], count, engine="zarr", codec=codec
    ) as buffer:
        for first in range(0, count, 1000):
            buffer.extend({p: each[first : first + 1000] for p, each in rows.items()})
        where = buffer.zarr_path
    assert where is not None
    return sum(each.stat().st_size for each in where.rglob("*") if each.is_file())


def npz(path: Path, rows: recorded.Rows) -> int:
    """Bytes of what numpy deflates."""
    columns: dict[str, Any] = dict(rows)
    np.savez_compressed(path, **columns)
    return path.stat().st_size


def hdf5(path: Path, rows: recorded.Rows) -> int:
    """Bytes of gzipped datasets, in chunks as h5py guesses them."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, column in rows.items():
            file.create_dataset(name, data=column, compression="gzip", chunks=True)
    return path.stat().st_size


def parquet(path: Path, rows: recorded.Rows) -> int:
    """Bytes of a table, fields of a shape as bytes of one length."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name, column in rows.items():
        if column.ndim == 1:
            columns[name] = pa.array(column)
            continue
        kind = pa.binary(column[0].nbytes)
        data = pa.py_buffer(np.ascontiguousarray(column))
        columns[name] = pa.Array.from_buffers(kind, len(column), [None, data])
    pq.write_table(pa.table(columns), path, compression="zstd")
    return path.stat().st_size


WRITERS: Mapping[str, Callable[[Path, recorded.Rows], int]] = {
    "npz_deflate": npz,
    "hdf5_gzip": hdf5,
    "parquet_zstd": parquet,
}


def measure(sizes: Mapping[str, int], folder: Path) -> dict[str, object]:
    """Every way of both recordings."""
    result: dict[str, object] = {}
    for kind, name in KINDS.items():
        rows = recorded.columns(name, sizes[kind])
        raw = sum(column.nbytes for column in rows.values())
        taken = {
            f"mmreplay_{codec}": shards(folder / f"{kind}-{codec}", rows, name, codec)
            for codec in CODECS
        }
        for way, write in WRITERS.items():
            suffix = way.partition("_")[0]
            taken[way] = write(folder / f"{kind}.{suffix}", rows)
        result[kind] = {
            "times_smaller": {way: rounded(raw / each) for way, each in taken.items()},
            "bytes": {"raw": raw, **taken},
        }
    return result


def main() -> None:
    """Measure and print."""
    missing = [each for each in (*recorded.NEEDED, "h5py") if find_spec(each) is None]
    if missing:
        raise SystemExit(
            f"bench_bytes: real recordings need {missing[0]}, which is not installed. "
            "Make the environment of tools/bench/peers.txt."
        )
    run_benchmark(
        __doc__, lambda folder, options: measure(QUICK if options.quick else ROWS, folder)
    )


if __name__ == "__main__":
    main()
