"""How much longer do zarr-python, and raw files less, take than our compressed shards?

256 random rows of u8[84,84,4] out of sealed shards, which zarr-python reads from the
same files, beside the memmap engine's, warm and with all pages dropped; one step of 8
environments written, the caller's median, beside the memmap engine's; and rows written
until they are sealed, beside zarr-python's writing whole shards of the same layout. The
rows are real (ale-py) where that is installed, and otherwise of few levels in large
patches, as Atari's are. Both sides' rows are compared first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.format.metadata import Engine
from mmreplay.format.sharding import CODECS, Codec
from mmreplay.storage.zarr.engine import ZarrStore
from tools.bench import cold, recorded
from tools.bench.turns import OURS, Times, burst, medians_us, race, rounded, run_benchmark, speedups

ZARR, RAW = "zarr-python", "mmreplay_memmap"
SHAPE = (84, 84, 4)
NUM_ENVS = 8
WANTED_ROWS_PER_S = 20_000
MOST_SHARDS = 2
"""Shards that zarr-python is timed on; it takes a second or more for each."""
SCHEMA = mr.Schema({"pixels": mr.Field(SHAPE, "uint8")})


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Of the buffers that are read.
        batch: Rows of a draw.
        turns: Turns of each side.
        steps: Steps of 8 environments that are written, each timed.
        played: Rows that are real, if they can be; the buffers hold them many times.
    """

    rows: int = 20_000
    batch: int = 256
    turns: int = 12
    steps: int = 4000
    played: int = 20_000


QUICK = Sizes(rows=256, batch=16, turns=3, steps=40, played=0)


def frames(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Frames of flat patches over one background, ``[count, *SHAPE]``."""
    found = np.full((count, *SHAPE), 87, np.uint8)
    corners = rng.integers(0, 72, (count, 6, 2))
    for frame, each in zip(found, corners, strict=True):
        for number, (row, column) in enumerate(each):
            frame[row : row + 10, column : column + 4] = 30 * number + 5
    return found


def pixels_of(sizes: Sizes) -> tuple[str, NDArray[np.uint8]]:
    """What the rows are, and the rows, ``[N, *SHAPE]``."""
    if sizes.played and all(find_spec(name) for name in recorded.NEEDED):
        found = recorded.columns(recorded.ATARI, sizes.played)["observation"]
        return recorded.ATARI, np.asarray(found, np.uint8)
    return "patches", frames(np.random.default_rng(1), min(sizes.rows, 2000))


def stream(pixels: NDArray[np.uint8], rows: int, size: int) -> Iterator[Any]:
    """So many rows, a block at a time, from the beginning again where they end."""
    for first in range(0, rows, size):
        last = min(first + size, rows)
        begin = first % len(pixels)
        if begin + last - first <= len(pixels):
            # No copy: it would be timed with the sides.
            yield pixels[begin : begin + last - first]
        else:
            yield pixels[np.arange(first, last) % len(pixels)]


def filled(path: Path, pixels: NDArray[np.uint8], rows: int, **options: Any) -> mr.ReplayBuffer:
    """A closed buffer of rows, opened again to be read."""
    with mr.ReplayBuffer.create(path, SCHEMA, rows, **options) as buffer:
        for block in stream(pixels, rows, 500):
            buffer.extend(pixels=block)
    return mr.ReplayBuffer.open(path)


def reading(folder: Path, pixels: NDArray[np.uint8], sizes: Sizes, codec: str) -> dict[str, object]:
    """Random rows out of shards of one codec, warm and cold."""
    import zarr

    sharded = filled(folder / codec, pixels, sizes.rows, engine="zarr", codec=codec)
    raw = filled(folder / f"{codec}-raw", pixels, sizes.rows)
    assert sharded.zarr_path is not None
    array: Any = zarr.open_group(sharded.zarr_path, mode="r")["pixels"]
    rng = np.random.default_rng(2)

    def positions() -> NDArray[np.int64]:
        return rng.integers(0, sizes.rows, sizes.batch)

    sides: dict[str, Callable[[], Any]] = {
        OURS: lambda: sharded.get_field("pixels", 0, positions()),
        RAW: lambda: raw.get_field("pixels", 0, positions()),
        ZARR: lambda: array.oindex[0, positions()],
    }
    some = positions()
    check(raw.get_field("pixels", 0, some), sharded.get_field("pixels", 0, some))
    check(raw.get_field("pixels", 0, some), array.oindex[0, some])
    times = race(sides, sizes.turns)
    files = {
        OURS: sorted((sharded.zarr_path / "pixels").glob("c.*")),
        RAW: [file.path for file in raw.view.data_files],
    }
    missing = cold_race({name: sides[name] for name in files}, files, sizes.turns)
    packed, whole = sharded.compression["pixels"]
    sharded.close()
    raw.close()
    return {
        "speedup_over": speedups(times),
        "median_us": medians_us(times),
        "cold": {"speedup_over": speedups(missing), "median_us": medians_us(missing)},
        "times_smaller": whole / packed,
    }


def cold_race(
    sides: Mapping[str, Callable[[], Any]], files: Mapping[str, list[Path]], turns: int
) -> Times:
    """Time each side once a turn, none of its pages being in memory."""
    times = {name: np.empty(turns) for name in sides}
    for turn in range(-1, turns):
        for name, side in sides.items():
            for path in files[name]:
                cold.drop(path)
            seconds = burst(side, 1)
            if turn >= 0:
                times[name][turn] = seconds
    return times


def check(expected: NDArray[Any], actual: NDArray[Any]) -> None:
    """Refuse to time a side that reads other rows.

    Raises:
        ValueError: The rows differ.
    """
    if not np.array_equal(expected, actual):
        raise ValueError("The sides must read the same rows, got different ones.")


def writing(folder: Path, sizes: Sizes) -> dict[str, object]:
    """One step of 8 environments, as its caller waits for it."""
    given = frames(np.random.default_rng(3), NUM_ENVS)
    sides = {}
    buffers = []
    engines: tuple[tuple[str, Engine], ...] = ((OURS, "zarr"), (RAW, "memmap"))
    for name, engine in engines:
        buffer = mr.ReplayBuffer.create(
            folder / f"add-{name}",
            SCHEMA,
            max(sizes.steps, 64),
            NUM_ENVS,
            engine=engine,
            autoreset="disabled",
        )
        buffers.append(buffer)
        sides[name] = lambda buffer=buffer: buffer.add(pixels=given)
    times = race(sides, sizes.steps)
    for buffer in buffers:
        buffer.close()
    return {"speedup_over": speedups(times), "median_us": medians_us(times)}


def sealing(
    folder: Path, pixels: NDArray[np.uint8], sizes: Sizes, codec: Codec
) -> dict[str, object]:
    """Rows written until they are sealed, and zarr-python's whole shards."""
    import zarr

    rows = sizes.rows
    began = perf_counter()
    with mr.ReplayBuffer.create(
        folder / f"seal-{codec}", SCHEMA, rows, engine="zarr", codec=codec
    ) as buffer:
        for block in stream(pixels, rows, 250):
            buffer.extend(pixels=block)
        store = buffer._files.store
        assert isinstance(store, ZarrStore)
        store.sealing.seal_now([])
        ours = rows / (perf_counter() - began)
    assert buffer.zarr_path is not None
    theirs: Any = zarr.open_group(buffer.zarr_path, mode="r")["pixels"]
    other: Any = zarr.create_array(
        folder / f"seal-{codec}-zarr",
        shape=theirs.shape,
        dtype=theirs.dtype,
        chunks=theirs.chunks,
        shards=theirs.shards,
        compressors=theirs.compressors,
    )
    size = theirs.shards[1]
    count = min(MOST_SHARDS, -(-rows // size))
    blocks = list(stream(pixels, count * size, size))
    began = perf_counter()
    for number, block in enumerate(blocks):
        other[0, number * size : (number + 1) * size] = block
    speed = count * size / (perf_counter() - began)
    check(other[0, :2], blocks[0][:2])
    return {
        "rows_per_s_over_20000": rounded(ours / WANTED_ROWS_PER_S),
        "speedup_over": {ZARR: rounded(ours / speed)},
    }


def measure(sizes: Sizes, folder: Path) -> dict[str, object]:
    """Reading out of each codec, and writing."""
    name, pixels = pixels_of(sizes)
    found: dict[str, object] = {codec: reading(folder, pixels, sizes, codec) for codec in CODECS}
    seal = {codec: sealing(folder, pixels, sizes, codec) for codec in CODECS}
    return {**found, "add": writing(folder, sizes), "seal": seal, "rows": name}


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__, lambda folder, options: measure(QUICK if options.quick else Sizes(), folder)
    )


if __name__ == "__main__":
    main()
