"""How much longer do zarr-python, and raw files less, take than our compressed shards?

256 random rows of u8[84,84,4] out of sealed shards, which zarr-python reads from the
same files, beside the memmap engine's; and one step of 8 environments written, the
caller's median, beside the memmap engine's. Frames are of few levels in large patches,
as Atari's are: the bytes on disk are told too. Both sides' rows are compared first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.format.metadata import Engine
from mmreplay.format.sharding import CODECS
from tools.bench.turns import OURS, arguments, medians_us, race, report, speedups

ZARR, RAW = "zarr-python", "mmreplay_memmap"
SHAPE = (84, 84, 4)
NUM_ENVS = 8
SCHEMA = mr.Schema({"pixels": mr.Field(SHAPE, "uint8")})


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Of the buffers that are read.
        batch: Rows of a draw.
        turns: Turns of each side.
        steps: Steps of 8 environments that are written, each timed.
    """

    rows: int = 20_000
    batch: int = 256
    turns: int = 12
    steps: int = 4000


QUICK = Sizes(rows=256, batch=16, turns=3, steps=40)


def frames(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Frames of flat patches over one background, ``[count, *SHAPE]``."""
    found = np.full((count, *SHAPE), 87, np.uint8)
    corners = rng.integers(0, 72, (count, 6, 2))
    for frame, each in zip(found, corners, strict=True):
        for number, (row, column) in enumerate(each):
            frame[row : row + 10, column : column + 4] = 30 * number + 5
    return found


def filled(path: Path, rows: int, **options: Any) -> mr.ReplayBuffer:
    """A closed buffer of frames, opened again to be read."""
    rng = np.random.default_rng(1)
    with mr.ReplayBuffer.create(path, SCHEMA, rows, **options) as buffer:
        for first in range(0, rows, 500):
            buffer.extend(pixels=frames(rng, min(500, rows - first)))
    return mr.ReplayBuffer.open(path)


def reading(folder: Path, sizes: Sizes, codec: str) -> dict[str, object]:
    """Random rows out of shards of one codec."""
    import zarr

    sharded = filled(folder / codec, sizes.rows, engine="zarr", codec=codec)
    raw = filled(folder / f"{codec}-raw", sizes.rows)
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
    packed, whole = sharded.compression["pixels"]
    sharded.close()
    raw.close()
    return {
        "speedup_over": speedups(times), "median_us": medians_us(times),
        "times_smaller": whole / packed,
    }  # fmt: skip


def check(expected: NDArray[Any], found: NDArray[Any]) -> None:
    """Refuse to time a side that reads other rows.

    Raises:
        ValueError: The rows differ.
    """
    if not np.array_equal(expected, found):
        raise ValueError("the sides read different rows, expected the same")


def writing(folder: Path, sizes: Sizes) -> dict[str, object]:
    """One step of 8 environments, as its caller waits for it."""
    given = frames(np.random.default_rng(3), NUM_ENVS)
    sides = {}
    buffers = []
    engines: tuple[tuple[str, Engine], ...] = ((OURS, "zarr"), (RAW, "memmap"))
    for name, engine in engines:
        buffer = mr.ReplayBuffer.create(
            folder / f"add-{name}", SCHEMA, max(sizes.steps, 64), NUM_ENVS,
            engine=engine,
        )  # fmt: skip
        buffers.append(buffer)
        sides[name] = lambda buffer=buffer: buffer.add(pixels=given)
    times = race(sides, sizes.steps)
    for buffer in buffers:
        buffer.close()
    return {"speedup_over": speedups(times), "median_us": medians_us(times)}


def measure(sizes: Sizes, folder: Path) -> dict[str, object]:
    """Reading out of each codec, and writing."""
    found: dict[str, object] = {
        codec: reading(folder, sizes, codec) for codec in CODECS
    }
    return {**found, "add": writing(folder, sizes)}


def main() -> None:
    """Measure and print."""
    given = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report(measure(QUICK if given.quick else Sizes(), Path(folder)))


if __name__ == "__main__":
    main()
