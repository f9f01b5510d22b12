"""What do draws and adds give when the ring is four times larger than the memory?

Each side fills a ring of u8[84,84,4] (28 KB; `--row-nbytes` takes small rows instead)
in a process of its own, under a memory limit of its own (a cgroup, where one can be
made; what the libraries take is outside of it). Then they take turns: random batches of
256, and all the while 500 adds of one row a second over the oldest, 64 at a time.
Printed are the rates of both, ours over each other side's turn by turn, and of ours
what it took of the limit, what went to swap, and how the last quarter of turns compares
with the first. A loader draws while its process adds, which the others do one after the
other. Where no cgroup can be made, the files' pages are dropped before each batch
instead, and `enforced_by` says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from tools.bench import cold, disk_peers
from tools.bench.bench_memory import MIB, Group, limited
from tools.bench.bench_pixels import SHAPE, block, check
from tools.bench.disk_peers import LOADER, RINGS, Pixels, RingShape, Side
from tools.bench.turns import OURS, Times, arguments, report, rounded, run_benchmark, speedups

BATCH = 256
ADDS = 64
ADDS_PER_S = 500
"""Adds a second of every side, 14 MB: whoever draws fast would else write more than
the disk takes, and be held against who hardly writes."""
MAX_ADDS = 4
"""Times 64 adds between two batches: what is not written yet counts for the limit."""
FILL_NBYTES = 1 << 20
"""Of small rows filled in at once."""
DROPPED = "dropping pages"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        limit_mib: Of memory, for each side.
        times: How often it goes into a ring.
        turns: Of each side.
        seconds: Of a turn; it has one batch at least.
        row: Shape of a row of bytes.
    """

    limit_mib: int = 512
    times: int = 4
    turns: int = 24
    seconds: float = 2.0
    row: tuple[int, ...] = SHAPE

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.row))

    @property
    def rows(self) -> int:
        """Of a ring, in whole blocks."""
        return self.times * self.limit_mib * MIB // self.row_nbytes // ADDS * ADDS


QUICK = Sizes(limit_mib=64, turns=2, seconds=0.2)


class Contestant:
    """One side in a process and under a limit of its own."""

    def __init__(self, name: str, folder: Path, sizes: Sizes, group: Group | None):
        """Start it; `wait` says when it is full."""
        self.group = group
        self._name = name
        join = "" if group is None else str(group.folder / "cgroup.procs")
        command = [
            sys.executable,
            "-m",
            "tools.bench.bench_beyond",
            "--child",
            name,
            "--folder",
            str(folder),
            "--rows",
            str(sizes.rows),
            "--join",
            join,
            "--row-nbytes",
            "0" if sizes.row == SHAPE else str(sizes.row_nbytes),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            RuntimeError: It ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self._name}: its process ended with {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, seconds: float) -> dict[str, Any]:
        """Let it draw and add for a while."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """End it, before its group can be removed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def measure(folder: Path, sizes: Sizes, names: Sequence[str]) -> dict[str, object]:
    """Fill one after another, let them take turns, and return what is printed."""
    order = [OURS, LOADER, *names]
    with ExitStack() as stack:
        sides: dict[str, Contestant] = {}
        for name in order:
            group = stack.enter_context(
                limited(sizes.limit_mib * MIB, f"-{name.replace('_', '-')}")
            )
            sides[name] = Contestant(name, folder, sizes, group)
            stack.callback(sides[name].close)
            sides[name].wait()
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in order}
        # The first turn waits for what filling left to be written, and is not reported.
        for turn in range(-1, sizes.turns):
            for name in order if turn % 2 else reversed(order):
                found = sides[name].turn(sizes.seconds)
                if turn >= 0:
                    turns[name].append(found)
        return figures_of(turns, sizes, {name: side.group for name, side in sides.items()})


def figures_of(
    turns: Mapping[str, list[dict[str, Any]]], sizes: Sizes, groups: Mapping[str, Group | None]
) -> dict[str, object]:
    """What is printed."""
    draws: Times = {n: np.array([t["draw_s"] for t in ts]) for n, ts in turns.items()}
    adds: Times = {n: np.array([t["add_s"] for t in ts]) for n, ts in turns.items()}
    ours = groups[OURS]
    found: dict[str, object] = {
        "enforced_by": DROPPED if ours is None else str(ours.limit),
        "limit_mib": sizes.limit_mib,
        "ring_over_limit": sizes.times,
        "row_nbytes": sizes.row_nbytes,
    }
    for what, times in (("draw", draws), ("add", adds)):
        theirs = {n: t for n, t in times.items() if not n.startswith(OURS)}
        for way in (OURS, LOADER):
            over = speedups({way: times[way], **theirs}, way)
            found[f"{what}_speedup_of_{way}"] = over
    found["draw_mb_per_s"] = _rates(draws, BATCH * sizes.row_nbytes / 1e6)
    found["adds_per_s"] = _rates(adds, 1)
    found["memory"] = {name: _memory(turns[name], groups[name], sizes) for name in turns}
    return found


def _rates(times: Times, amount: float) -> dict[str, float]:
    """Medians over the turns."""
    return {n: rounded(amount / float(np.median(t))) for n, t in times.items()}


def _memory(turns: list[dict[str, Any]], group: Group | None, sizes: Sizes) -> dict[str, float]:
    """What a side took, and whether it slowed down."""
    quarter = max(1, len(turns) // 4)
    seconds = [turn["draw_s"] for turn in turns]
    slower = float(np.median(seconds[-quarter:]) / np.median(seconds[:quarter]))
    found = {
        "anonymous_growth_mib": rounded((turns[-1]["anon"] - turns[0]["anon"]) / MIB),
        "swapped_mib": rounded(max(turn["swap"] for turn in turns) / MIB),
        "last_quarter_takes_times_the_first": rounded(slower),
    }
    peak = None if group is None else group.peak_nbytes()
    if peak is not None:
        found["peak_over_limit"] = rounded(peak / (sizes.limit_mib * MIB))
    return found


def child(name: str, folder: Path, shape: RingShape, join: str) -> None:
    """Be one side: fill, then a turn for each line that comes."""
    folder, rows = folder / name, shape.rows
    _warm(name, folder.with_name(f"{name}-small"), shape.row)
    if join:
        # Only now: what the libraries take is not what is compared.
        Path(join).write_text(str(os.getpid()), "ascii")
    side = disk_peers.make(name, folder, shape)
    room = max(1, FILL_NBYTES // int(np.prod(shape.row)) // ADDS) * ADDS
    for first in range(0, rows, room):
        begins = range(first, min(first + room, rows), ADDS)
        side.extend(np.concatenate([block(each, ADDS, shape.row) for each in begins]))
    files = [] if join else [p for p in folder.rglob("*") if p.is_file()]
    report({"rows": rows})
    head = rows
    for line in sys.stdin:
        head, found = turn(name, side, head, shape, float(line), files)
        report(found)
    side.close()


def _warm(name: str, folder: Path, row: tuple[int, ...]) -> None:
    """Fill and draw from a small one, for which libraries load all that they need."""
    side = disk_peers.make(name, folder, RingShape(row, BATCH, BATCH))
    for first in range(0, BATCH, ADDS):
        side.extend(block(first, ADDS, row))
    side.draw()
    side.close()


def turn(
    name: str, side: Side, head: int, shape: RingShape, seconds: float, files: Sequence[Path] = ()
) -> tuple[int, dict[str, Any]]:
    """Draw and add for a while.

    Returns:
        Rows ever added, and seconds of a batch and of an add, with the memory.
    """
    drawing = adding = 0.0
    batches, first, begun = 0, head, perf_counter()
    while not batches or drawing + adding < seconds:
        for path in files:
            cold.drop(path)
        start = perf_counter()
        got = side.draw()
        drawing += perf_counter() - start
        if not batches:
            refuse_wrong(got, name, head, shape.rows)
        batches += 1
        due = first + max(ADDS, int(ADDS_PER_S * (perf_counter() - begun)))
        due = min(due, head + MAX_ADDS * ADDS)
        while head + ADDS <= due:
            rows = block(head, ADDS, shape.row)
            start = perf_counter()
            for row in rows:
                side.add(row)
            adding += perf_counter() - start
            head += ADDS
    found = {"draw_s": drawing / batches, "add_s": adding / (head - first)}
    return head, found | memory()


def refuse_wrong(got: Pixels, name: str, head: int, capacity: int) -> None:
    """Refuse rows that are not whole, or were not there when they were drawn."""
    check(got, name, ADDS)
    begins = np.ascontiguousarray(got.reshape(len(got), -1)[:, :8])
    numbers = begins.view(np.int64)[:, 0]
    # A loader draws ahead: what it copied may have been overwritten since.
    oldest = head - capacity - (8 * MAX_ADDS * ADDS if name == LOADER else 0)
    if (numbers < oldest).any() or (numbers >= head).any():
        raise AssertionError(f"{name}: drew a row that is not in the ring")


def memory() -> dict[str, int]:
    """Bytes of this process: its own, and of those in swap."""
    found = {}
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        for key, title in (("anon", "RssAnon:"), ("swap", "VmSwap:")):
            if line.startswith(title):
                found[key] = int(line.split()[1]) * 1024
    return found


def main() -> None:
    """Measure and print one line of JSON, or be a process that is measured."""
    parser = arguments(__doc__)
    parser.add_argument("--limit-mib", type=int, help="of each side; default: 512")
    parser.add_argument("--times", type=int, default=4, help="a ring over its limit")
    parser.add_argument("--row-nbytes", type=int, default=0, help="default: 28 KB")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--join", help=argparse.SUPPRESS)
    options = parser.parse_args()
    row = (options.row_nbytes,) if options.row_nbytes else SHAPE
    if options.child:
        np.random.seed(0)  # noqa: NPY002  what cpprb draws with
        shape = RingShape(row, options.rows, BATCH)
        child(options.child, Path(options.folder), shape, options.join)
        return
    base = QUICK if options.quick else Sizes()
    limit_mib = options.limit_mib or base.limit_mib
    sizes = Sizes(limit_mib, options.times, base.turns, base.seconds, row)
    names = disk_peers.installed(options.peers, RINGS)
    run_benchmark(__doc__, lambda folder, _: measure(folder, sizes, names), options=options)


if __name__ == "__main__":
    main()
