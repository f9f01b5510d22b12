"""How far ahead of other memmaps is a batch of which no row is in memory?

Two kinds of batches from files whose pages were dropped: 256 random rows of
u8[84,84,4] (28 KB), and 32 runs of 50 rows of u8[84,84] (7 KB). Files of a byte or two
a row, which draws look at over and over, stay in memory: our flags, TorchRL's ends of
episodes. Ours is drawn by `sample`; beside it TorchRL's LazyMemmapStorage, cpprb's
mmap_prefix, numpy's memmap, h5py's contiguous dataset and zarr-python, each its own
way, in turns. The disk's side is 32 threads that read the same rows of a plain file, of
runs the better of a call a run and a call a row: `over_the_best_threads` is how many
times as long as theirs ours takes, `speedup_of_the_best_threads` what they, who draw
nothing, are over each side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

from tools.bench import cold, disk_peers
from tools.bench.bench_pixels import Preadv, block, check
from tools.bench.disk_peers import Pixels, RingShape, Side
from tools.bench.turns import OURS, Times, medians_us, rounded, run_benchmark, speedups

BLOCK = 250
COLD = 0.01
REST_S = 0.5
"""Before each batch: a virtual disk that was asked for much is slower for a while, and
what the kernel reads ahead for one side's batch of 11 MB can be hundreds."""
KINDS = {
    "uniform_256_x_28_kb": RingShape((84, 84, 4), 20_000, 256),
    "runs_32_x_50_x_7_kb": RingShape((84, 84), 80_000, 32, 50),
}
THREADS = "preadv_32_threads"
Drawer = Callable[[], Pixels]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        divisor: Rows are a so-manieth of `KINDS`.
        turns: Batches of each side.
    """

    divisor: int = 1
    turns: int = 9


QUICK = Sizes(divisor=10, turns=2)


def measure(folder: Path, sizes: Sizes, names: Sequence[str]) -> dict[str, object]:
    """Measure both kinds; files of one go before those of the other come."""
    found: dict[str, object] = {}
    for kind, shape in KINDS.items():
        shape = replace(shape, rows=shape.rows // sizes.divisor)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            times = race(Path(place), shape, sizes.turns, [OURS, *names])
        found[kind] = figures_of(times, shape)
    return found


def figures_of(times: Times, shape: RingShape) -> dict[str, object]:
    """What is printed of one kind."""
    threads = {name: t for name, t in times.items() if name.startswith(THREADS)}
    others = {name: t for name, t in times.items() if name not in threads}
    best = min(threads, key=lambda name: float(np.median(threads[name])))
    nbytes = shape.batch * shape.length * int(np.prod(shape.row))
    return {
        "speedup": speedups(others),
        "over_the_best_threads": rounded(float(np.median(times[OURS] / threads[best]))),
        "speedup_of_the_best_threads": speedups(others | {best: threads[best]}, best),
        "mb_per_s": {n: rounded(nbytes / us) for n, us in medians_us(times).items()},
    }


def race(folder: Path, shape: RingShape, turns: int, names: Sequence[str]) -> Times:
    """Time cold batches of every side, one of each a turn."""
    with ExitStack() as stack:
        sides = {name: filled(folder / name, name, shape) for name in names}
        drawers: dict[str, Drawer] = {}
        for name, side in sides.items():
            stack.callback(side.close)
            drawers[name] = side.draw
        files = {name: files_of_rows(folder / name, shape) for name in names}
        # A file of plain rows: ours has nothing else in it.
        (plain,) = files[OURS]
        drawers |= stack.enter_context(threads(plain, shape))
        times: Times = {name: np.empty(turns) for name in drawers}
        order = list(drawers)
        # The first turn is not timed: it makes what libraries make once.
        for turn in range(-1, turns):
            for name in order if turn % 2 else reversed(order):
                seconds, got = iced(drawers[name], files.get(name, [plain]))
                refuse_wrong(got, name, shape)
                if turn >= 0:
                    times[name][turn] = seconds
        return times


def filled(folder: Path, name: str, shape: RingShape) -> Side:
    """Make one side, full."""
    cold.touch_memory(folder.parent, 2 * BLOCK * int(np.prod(shape.row)))
    side = disk_peers.make(name, folder, shape)
    for first in range(0, shape.rows, BLOCK):
        side.extend(block(first, BLOCK, shape.row))
    if isinstance(side, disk_peers.Ours):
        # What a later commit would read for its checksums would not stay cold.
        side.buffer.commit()
    return side


def iced(draw: Drawer, files: Sequence[Path]) -> tuple[float, Pixels]:
    """Seconds of a batch of which nothing is in memory, and the batch."""
    for path in files:
        cold.drop(path)
        if cold.resident(path) > COLD:
            raise AssertionError(f"{path} did not leave the page cache")
    sleep(REST_S)
    start = perf_counter()
    got = draw()
    return perf_counter() - start, got


def refuse_wrong(rows: Pixels, side: str, shape: RingShape) -> None:
    """Refuse a batch whose rows are not whole, or do not follow each other in a run."""
    check(rows, side, BLOCK)
    if len(rows) != shape.batch * shape.length:
        raise AssertionError(f"{side}: got {len(rows)} rows")
    begins = np.ascontiguousarray(rows.reshape(len(rows), -1)[:, :8])
    numbers = begins.view(np.int64).reshape(shape.batch, shape.length)
    if (np.diff(numbers) != 1).any():
        raise AssertionError(f"{side}: a run's rows do not follow each other")


@contextmanager
def threads(path: Path, shape: RingShape) -> Iterator[dict[str, Drawer]]:
    """Threads that read what a batch is of, a call a run, and a call a row."""
    rng, nbytes = np.random.default_rng(1), int(np.prod(shape.row))
    whole = shape.row if shape.length == 1 else (shape.length, *shape.row)

    def by_run() -> Pixels:
        got = runs.read(shape.starts(rng), nbytes)
        return got.reshape(-1, *shape.row)

    def by_row() -> Pixels:
        return rows.read(shape.every(shape.starts(rng)), nbytes)

    with (
        Preadv(path, shape.batch, whole) as runs,
        Preadv(path, shape.batch * shape.length, shape.row) as rows,
    ):
        ways: dict[str, Drawer] = {THREADS: by_run}
        if shape.length > 1:
            ways[f"{THREADS}_by_row"] = by_row
        yield ways


def files_of_rows(folder: Path, shape: RingShape) -> list[Path]:
    """Files of a side that hold rows, and not a byte or two of each."""
    least = max(2 * shape.rows, 16 << 10)
    found: list[Path] = [p for p in folder.rglob("*") if p.is_file()]
    return [path for path in found if path.stat().st_size > least]


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: measure(
            folder, QUICK if options.quick else Sizes(), disk_peers.installed(options.peers)
        ),
        one_torch_thread=True,
        numpy_seeded=True,
    )


if __name__ == "__main__":
    main()
