"""How much longer does tensorstore take than our reader on the same sealed shards?

256 random rows of u8[84,84,4], a row a chunk, and of f64[17], many rows a chunk, out of
20,000 real ones (ale-py, MuJoCo), by codec. tensorstore reads the very files, once as
it comes and once with a cache as large as ours. Nothing is forked, which it would not
survive. Both sides' rows are compared first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.format.sharding import CODECS, Codec
from mmreplay.storage.zarr.shards import CACHE_NBYTES
from tools.bench import recorded
from tools.bench.bench_zarr import check
from tools.bench.turns import OURS, Side, chosen, medians_us, race, run_benchmark, speedups

PEERS = {"tensorstore": "tensorstore"}
CACHED = "tensorstore_cached"
KINDS = {"one_row_a_chunk": recorded.ATARI, "blocks": recorded.MUJOCO}
ROWS, BATCH, TURNS = 20_000, 256, 30
QUICK = (400, 32, 3)


def filled(path: Path, rows: recorded.Rows, name: str, codec: Codec) -> mr.ReplayBuffer:
    """A closed buffer of rows, opened again to be read."""
    count = len(rows["reward"])
    with mr.ReplayBuffer.create(
        path, recorded.SCHEMAS[name], count, engine="zarr", codec=codec
    ) as buffer:
        for first in range(0, count, 500):
            buffer.extend({p: each[first : first + 500] for p, each in rows.items()})
    return mr.ReplayBuffer.open(path)


def opened(path: Path, cache_nbytes: int) -> Any:
    """The observations as tensorstore has them, ``[1, slots, *shape]``."""
    tensorstore: Any = import_module("tensorstore")
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/observation/"},
        "context": {"cache_pool": {"total_bytes_limit": cache_nbytes}},
    }
    return tensorstore.open(spec, read=True, open=True).result()


def tensorstore_rows(array: Any, positions: Callable[[], NDArray[np.int64]]) -> object:
    """Rows of the only environment."""
    return array[0, positions()].read().result()


def reading(buffer: mr.ReplayBuffer, batch: int, turns: int, named: list[str]) -> dict[str, object]:
    """Random rows out of one buffer's shards."""
    count = len(buffer)
    rng = np.random.default_rng(2)

    def positions() -> NDArray[np.int64]:
        return rng.integers(0, count, batch)

    sides: dict[str, Side] = {OURS: lambda: buffer.get_field("observation", 0, positions())}
    some = positions()
    assert buffer.zarr_path is not None
    for name, nbytes in (("tensorstore", 0), (CACHED, CACHE_NBYTES)):
        if "tensorstore" in named:
            array = opened(buffer.zarr_path, nbytes)
            found = np.asarray(array[0, some].read().result())
            check(buffer.get_field("observation", 0, some), found)
            sides[name] = partial(tensorstore_rows, array, positions)
    times = race(sides, turns, calls=2)
    return {"speedup_over": speedups(times), "median_us": medians_us(times)}


def measure(rows: int, batch: int, turns: int, folder: Path, named: list[str]) -> dict[str, object]:
    """Each codec, for large rows and for small ones."""
    result: dict[str, object] = {}
    for kind, name in KINDS.items():
        held = recorded.columns(name, rows)
        told: dict[str, object] = {}
        for codec in CODECS:
            with filled(folder / f"{kind}-{codec}", held, name, codec) as buffer:
                told[codec] = reading(buffer, batch, turns, named)
        result[kind] = told
    return result


def main() -> None:
    """Measure and print."""
    missing = [name for name in recorded.NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"bench_zarr_peers: real rows need {missing[0]}, which is not installed. "
            "Make the environment of tools/bench/peers.txt."
        )
    full = (ROWS, BATCH, TURNS)
    run_benchmark(
        __doc__,
        lambda folder, options: measure(
            *(QUICK if options.quick else full), folder, chosen(PEERS, options.peers)
        ),
    )


if __name__ == "__main__":
    main()
