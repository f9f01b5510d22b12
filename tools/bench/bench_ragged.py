"""What do token sequences of 40 to 8,000 items cost, stored as long as they are?

Log-normal lengths, 660 int32 on average: added one by one and in blocks of 256, drawn
256 at a time, and their size on disk. Beside our ring the same rows padded to the
longest in a field of one shape, LMDB and SQLite with a value a row, TorchRL's buffer
over a list of tensors, and TransferQueue's default store, in turns. What is on disk is
made durable once a second. The bare write joins the same blocks and writes each with
one call into a file of as many bytes, without lengths, checksums or commits. The bare
gather is a loop of memcpy in C over as many rows of as many bytes, found beforehand, to
one array. Cold draws are raced against rows of
uint8[2640], as large as the average sequence; files of values were dropped, and the
references of 16 bytes a row are in memory, as flags are, or dropped too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from mmreplay import Field, ReplayBuffer, Schema, UniformSampler
from tools.bench import cold, ragged_peers, token_rows
from tools.bench.bench_cold import COLD, REST_S
from tools.bench.ragged_peers import BATCH, MAKERS, ON_DISK, PADDED, SLOW, Ours
from tools.bench.token_rows import Tokens
from tools.bench.turns import OURS, Side, Times, medians_us, race, rounded, run_benchmark, speedups

BARE_WRITE = "bare_write"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        rows: Of each ring, filled once before anything is timed.
        turns: Of each race.
        calls: Adds and draws of a turn.
        slow_calls: The same of sides whose calls take milliseconds.
        cold_turns: Batches of each cold side.
    """

    rows: int = 49_152
    turns: int = 21
    calls: int = 1024
    slow_calls: int = 16
    cold_turns: int = 15


QUICK = Sizes(rows=2048, turns=2, calls=64, slow_calls=2, cold_turns=2)


def measure(folder: Path, sizes: Sizes, names: Sequence[str]) -> dict[str, Any]:
    """Measure all sides."""
    found: dict[str, Any] = {"bytes_a_row": rounded(token_rows.nbytes(sizes.rows) / sizes.rows)}
    # One after another: each ring is filled, and given back, by itself where it can be.
    fast = [OURS, *(name for name in names if name not in SLOW)]
    found |= race_sides(folder / "fast", fast, sizes, sizes.calls)
    for name in SLOW:
        if name in names:
            slow = race_sides(folder / name, [OURS, name], sizes, sizes.slow_calls)
            for kind in ("add_1", "add_256", "draw_256"):
                for figure in ("speedup", "median_us"):
                    found[kind][figure][name] = slow[kind][figure][name]
        else:
            found.setdefault("not_installed", []).append(name)
    found["cold"] = race_cold(folder / "cold", sizes)
    return found


def race_sides(folder: Path, names: Sequence[str], sizes: Sizes, calls: int) -> dict[str, Any]:
    """Race sides at adding and drawing, once their rings are full."""
    folder.mkdir()
    with ExitStack() as stack:
        sides: dict[str, Any] = {}
        for name in names:
            side = sides[name] = MAKERS[name](folder / name, sizes.rows)
            stack.callback(side.close)
            for first in range(0, sizes.rows, BATCH):
                side.extend(first, token_rows.rows(first, BATCH))
        for name, side in sides.items():
            check_draw(side, name)
        found = {
            "add_1": figures_of(race_adds(sides, sizes, calls)),
            "add_256": race_blocks(sides, folder / "bare", sizes, max(2, calls // BATCH)),
            "draw_256": race_draws(sides, folder, sizes, max(2, calls // 16)),
        }
        for name, side in sides.items():
            check_draw(side, name)
    found["disk_over_values"] = {
        name: rounded(disk_nbytes(folder / name) / token_rows.nbytes(sizes.rows))
        for name in names
        if name in ON_DISK
    }
    return found


def check_draw(side: Any, name: str) -> None:
    """Refuse a batch that does not hold rows as they were added."""
    values, lengths = side.draw()
    values, lengths = np.asarray(values), np.asarray(lengths)
    if name == PADDED:
        rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    else:
        rows = np.split(values, np.cumsum(lengths)[:-1])
    token_rows.check(rows, name)


def race_adds(sides: Mapping[str, Any], sizes: Sizes, calls: int) -> Times:
    """Add single rows, over the oldest ones."""
    rows = token_rows.rows(0, token_rows.TABLE)
    numbers = dict.fromkeys(sides, sizes.rows)

    def adder(name: str, side: Any) -> Any:
        def add() -> None:
            number = numbers[name]
            numbers[name] = number + 1
            row = rows[number % token_rows.TABLE]
            row[0] = number
            side.add(number, row)

        return add

    return race({n: adder(n, s) for n, s in sides.items()}, sizes.turns, calls)


def race_blocks(sides: Mapping[str, Any], file: Path, sizes: Sizes, calls: int) -> dict[str, Any]:
    """Add blocks of 256 rows, over the oldest ones, beside the bare write."""
    blocks = [token_rows.rows(at, BATCH) for at in range(0, token_rows.TABLE, BATCH)]
    numbers = dict.fromkeys(sides, 2 * sizes.rows)

    def adder(name: str, side: Any) -> Any:
        def add() -> None:
            # Rows have the numbers of the table: no side stores numbers of its own, and
            # to write them into 256 arrays would be timed with each.
            first = numbers[name]
            numbers[name] = first + BATCH
            side.extend(first, blocks[first // BATCH % len(blocks)])

        return add

    adders = {name: adder(name, side) for name, side in sides.items()}
    with bare_writer(file, sizes, blocks) as write:
        times = race({BARE_WRITE: write, **adders}, sizes.turns, calls)
    over = speedups(times, BARE_WRITE)
    times.pop(BARE_WRITE)
    return {**figures_of(times), "over_the_bare_write": over}


@contextmanager
def bare_writer(path: Path, sizes: Sizes, blocks: Sequence[list[Tokens]]) -> Iterator[Side]:
    """Join a block's rows and write them in one call, over the oldest bytes."""
    out = np.zeros(BATCH * token_rows.LONGEST, np.int32)
    nbytes, turn, offset = token_rows.nbytes(sizes.rows), 0, 0
    with path.open("wb", buffering=0) as file:
        while file.tell() < nbytes:
            file.write(out.data)

        def write() -> None:
            nonlocal turn, offset
            rows = blocks[turn % len(blocks)]
            joined = out[: sum(map(len, rows))]
            np.concatenate(rows, out=joined)
            if offset + joined.nbytes > nbytes:
                offset = 0
            os.pwrite(file.fileno(), joined.data, offset)
            turn, offset = turn + 1, offset + joined.nbytes

        yield write
    path.unlink()


def race_draws(sides: Mapping[str, Any], folder: Path, sizes: Sizes, calls: int) -> dict[str, Any]:
    """Draw batches, beside the bare gather."""
    drawers = {name: side.draw for name, side in sides.items()}
    times = race({"bare_gather": bare(sizes, folder), **drawers}, sizes.turns, calls)
    over = float(np.median(times[OURS] / times.pop("bare_gather")))
    return {**figures_of(times), "over_the_bare_gather": rounded(over)}


GATHER = """
#include <string.h>
void gather(const char *from, const long long *begin, const long long *nbytes,
            const long long *target, char *to, long long count)
{
    for (long long i = 0; i < count; i++)
        memcpy(to + target[i], from + begin[i], (size_t)nbytes[i]);
}
"""


def compiled_gather(folder: Path) -> Any:
    """The loop in C, built with the compiler that builds kernels."""
    source, library = folder / "gather.c", folder / "gather.so"
    source.write_text(GATHER, "ascii")
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O3", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    gather = ctypes.CDLL(str(library)).gather
    gather.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_longlong]
    gather.restype = None
    return gather


def bare(sizes: Sizes, folder: Path) -> Side:
    """Copy as many rows of as many bytes out of one array, found beforehand."""
    gather = compiled_gather(folder)
    lengths = 4 * token_rows.LENGTHS[np.arange(sizes.rows) % token_rows.TABLE]
    begins = np.cumsum(lengths) - lengths
    source = np.ones(int(lengths.sum()), np.uint8)
    rng, turn, batches = np.random.default_rng(0), [0], []
    for _ in range(64):
        rows = rng.integers(sizes.rows, size=BATCH)
        nbytes = lengths[rows]
        batches.append((begins[rows], nbytes, np.cumsum(nbytes) - nbytes))
    out = np.empty(4 * BATCH * token_rows.LONGEST, np.uint8)
    places = [[array.ctypes.data for array in batch] for batch in batches]
    from_, to = source.ctypes.data, out.ctypes.data

    # The arrays are held by the function, which passes their addresses.
    def side(_arrays: object = (source, batches, out)) -> None:
        turn[0] = (turn[0] + 1) % len(places)
        gather(from_, *places[turn[0]], to, BATCH)

    return side


def figures_of(times: Times) -> dict[str, Any]:
    """Speedups over the other sides, and the times of all."""
    return {"speedup": speedups(times), "median_us": medians_us(times)}


def disk_nbytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(512 * path.stat().st_blocks for path in files)


def race_cold(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Race batches that are read from the disk against those of pixels."""
    folder.mkdir()
    nbytes = int(token_rows.LENGTHS.mean()) * 4
    pixels = Schema({"pixels": Field((nbytes,), "uint8")})
    with ExitStack() as stack:
        tokens = Ours(folder / "tokens", sizes.rows)
        stack.callback(tokens.close)
        frames = stack.enter_context(
            ReplayBuffer.create(
                folder / "pixels", pixels, sizes.rows, sampler=UniformSampler(seed=0)
            )
        )
        block = np.ones((BATCH, nbytes), np.uint8)
        for first in range(0, sizes.rows, BATCH):
            tokens.extend(first, token_rows.rows(first, BATCH))
            frames.extend(pixels=block)
        for buffer in (tokens.buffer, frames):
            # What a later commit would read for its checksums would not stay cold.
            buffer.commit()
        heap, references = ((folder / "tokens").rglob(n) for n in ("heap.bin", "rec*"))
        (rows,) = (folder / "pixels").rglob("rec*")
        values = [*heap]
        pixels_side = (lambda: frames.sample(BATCH), [rows])
        found: dict[str, Any] = {"over_pixels": {}, "median_us": {}}
        # One after the other: batches after one that lacked references are asked for
        # without a look, references too.
        for name, files in (
            ("tokens", values),
            ("tokens_without_references", [*values, *references]),
        ):
            sides = {"pixels": pixels_side, name: (tokens.draw, files)}
            times: Times = {side: np.empty(sizes.cold_turns) for side in sides}
            for turn in range(-1, sizes.cold_turns):
                for side in list(sides) if turn % 2 else reversed(sides):
                    seconds = iced(*sides[side])
                    if turn >= 0:
                        times[side][turn] = seconds
            found["over_pixels"] |= speedups(times, "pixels")
            found["median_us"] = medians_us(times) | found["median_us"]
    return found


def iced(draw: Any, files: Sequence[Path]) -> float:
    """Seconds of a batch without a value in memory."""
    for path in files:
        cold.drop(path)
        if cold.resident(path) > COLD:
            raise AssertionError(f"{path} did not leave the page cache")
    sleep(REST_S)
    start = perf_counter()
    draw()
    return perf_counter() - start


def main() -> None:
    """Measure and print one line of JSON."""

    def all_of(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
        names = ragged_peers.installed(options.peers)
        return measure(folder, QUICK if options.quick else Sizes(), names)

    run_benchmark(__doc__, all_of, one_torch_thread=True)


if __name__ == "__main__":
    main()
