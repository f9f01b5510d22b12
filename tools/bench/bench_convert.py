"""How fast do buffers become files and files buffers, and in how much memory?

A buffer of vectors and one of pixels go to each format (`export`), are read from it
block by block (`read`), and become a new buffer (`load`). Beside each stands what
people use: the library's own call on arrays that are in memory already, its file
synced as ours is, or that reads the same file into memory; and, where bytes go as they
are, a plain synced copy of the file. Every call runs in a process of its own, in
turns, after a small one that pays for imports; its memory is the most of the process's
own (RssAnon) beyond what it had before. No side finds an old target, and memory for
its pages was touched just before (`cold.touch_memory`). Ratios are taken turn by turn:
above 1, ours takes less time. Some 8 GB of disk and 8 GB of memory, for the peers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import mmreplay as mr
from mmreplay.convert import registry
from tools.bench import cold
from tools.bench.convert_peers import COPY, PEERS, Columns, Prepared, copy, sync
from tools.bench.turns import arguments, rounded, run_benchmark

OURS = "ours"
COPIED = ("npz", "pt", "safetensors")
"""Formats that hold the bytes as they are: a copy of them is what is to be reached."""
DIRECTIONS = ("export", "read", "load")
SLOW_S = 6
"""What takes longer is run once: the machine's noise is little beside it."""
Took = dict[str, float]
MIB = 1 << 20
FILLED = 4096
"""Rows of random values that are written over and over."""
SUFFIX = {name: f".{name}" for name in ("npz", "pt", "safetensors", "csv", "parquet")}

SCHEMAS = {
    "vectors": {
        "observation": mr.Field((17,), "float32"),
        "action": mr.Field((6,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    },
    "pixels": {
        "observation": mr.Field((84, 84, 4), "uint8"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    },
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        vectors: Rows of vectors.
        pixels: Rows of pixels.
        turns: Times that each side runs.
    """

    vectors: int = 10_000_000
    pixels: int = 70_000
    turns: int = 3

    def of(self, kind: str) -> int:
        """Rows of a kind."""
        return self.vectors if kind == "vectors" else self.pixels


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure.

    Attributes:
        kinds: Of rows.
        formats: By name.
        peers: Whether others are measured too.
    """

    kinds: tuple[str, ...] = tuple(SCHEMAS)
    formats: tuple[str, ...] = tuple(SUFFIX)
    peers: bool = True


FULL = Sizes()
QUICK = Sizes(20_000, 300, 1)


def fill(path: Path, kind: str, rows: int) -> None:
    """Make a buffer of one environment, full."""
    schema = mr.Schema(SCHEMAS[kind])
    rng = np.random.default_rng(0)
    block: dict[str, Any] = {}
    for name, field in schema.fields.items():
        shape = (FILLED, 1, *field.shape)
        if field.dtype == "float32":
            block[name] = rng.standard_normal(shape, np.float32)
        else:
            block[name] = rng.integers(0, 200, shape).astype(field.dtype)
    block["terminated"] = rng.random((FILLED, 1)) < 0.001
    with mr.ReplayBuffer.create(path, schema, rows, commit_every=None) as buffer:
        for first in range(0, rows, FILLED):
            size = min(FILLED, rows - first)
            buffer.extend({name: value[:size] for name, value in block.items()})


def columns(path: Path) -> Columns:
    """The buffer's fields, in memory."""
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
        paths = buffer.schema.paths
        return {name: np.ascontiguousarray(rows[name]) for name in paths}


def ours(name: str, direction: str, source: Path, target: Path) -> None:
    """Do one conversion."""
    if direction == "export":
        mr.export(source, target, overwrite=True)
    elif direction == "load":
        mr.load(target, target.with_name("loaded"), overwrite=True)
    else:
        with registry.open_reader(registry.named(name), target) as reader:
            for _ in reader.blocks():
                pass


def theirs(side: str, name: str, direction: str, source: Path) -> Prepared:
    """Prepare what a peer does, or a plain copy of a file that ours made."""
    if side == COPY:
        which = OURS if source.name == "buffer" else f"tiny-{OURS}"
        return partial(copy, source.with_name(which + SUFFIX[name]))
    peer = PEERS[name][side]
    if direction == "read":
        assert peer.read is not None
        return peer.read
    assert peer.write is not None
    write = peer.write(columns(source))

    def synced(path: Path) -> None:
        write(path)
        sync(path)

    return synced


def anonymous_nbytes() -> int:
    """Memory of this process alone, that no file stands behind."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


@contextmanager
def watched() -> Iterator[list[int]]:
    """Watch the most anonymous memory taken beyond what there was."""
    before, stop = anonymous_nbytes(), threading.Event()
    peak = [0]

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], anonymous_nbytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak[0] = max(peak[0], anonymous_nbytes() - before)


def child(side: str, name: str, direction: str, folder: Path) -> None:
    """Run one side once, small and then in full, and print what it took."""
    source, small = folder / "buffer", folder / "small"
    target = folder / f"{side}{SUFFIX[name]}"
    tiny = folder / f"tiny-{side}{SUFFIX[name]}"
    call: Callable[[], object]
    if side == OURS:
        ours(name, "export", small, tiny)
        ours(name, direction, small, tiny)
        call = partial(ours, name, direction, source, target)
    else:
        if direction == "read":
            # What ours wrote: both sides read the same file.
            target = folder / f"{OURS}{SUFFIX[name]}"
            tiny = folder / f"tiny-{OURS}{SUFFIX[name]}"
        theirs(side, name, direction, small)(tiny)
        call = partial(theirs(side, name, direction, source), target)
    if direction != "read":
        _make_way(folder, side, direction, target)
    with watched() as peak:
        start = perf_counter()
        call()
        seconds = perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_nbytes": peak[0]}))


def _make_way(folder: Path, side: str, direction: str, target: Path) -> None:
    """Begin every side alike: no old target, and memory that the machine has.

    A target that is replaced keeps its pages until the new one is whole; one that is
    written over, as a plain copy's, gives them back first.
    """
    nbytes = sum(f.stat().st_size for f in (folder / "buffer").rglob("*.bin"))
    old = target
    if side == OURS and direction == "load":
        old = target.with_name("loaded")
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)
    cold.touch_memory(folder, nbytes + nbytes // 8)


def run(side: str, name: str, direction: str, folder: Path) -> Took:
    """Run a side in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.bench_convert",
        "--child",
        side,
        "--format",
        name,
        "--direction",
        direction,
        "--folder",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{side} {name} {direction}: {done.stderr[-2000:]}")
    found: Took = json.loads(done.stdout)
    return found


def sides(kind: str, name: str, direction: str) -> list[str]:
    """Ours, and who does the same here."""
    found = [OURS]
    for side, peer in PEERS[name].items():
        can = {"export": peer.write, "read": peer.read, "load": None}[direction]
        fits = peer.images or kind != "pixels"
        if can is not None and fits and find_spec(peer.module):
            found.append(side)
    if name in COPIED and direction != "read":
        found.append(COPY)
    return found


def compare(
    those: list[str], name: str, direction: str, folder: Path, nbytes: int, turns: int
) -> dict[str, object]:
    """Measure one format in one direction, in turns; the slow run once."""
    took: dict[str, list[Took]] = {side: [] for side in those}
    for turn in range(turns):
        # Ours first at first, as others read or copy what it wrote.
        for side in reversed(those) if turn % 2 else those:
            if not took[side] or took[side][0]["seconds"] < SLOW_S:
                took[side].append(run(side, name, direction, folder))
    seconds = {
        side: np.resize([each["seconds"] for each in found], turns) for side, found in took.items()
    }
    peaks = {side: max(each["peak_nbytes"] for each in found) / MIB for side, found in took.items()}
    mine = seconds.pop(OURS)
    found: dict[str, object] = {
        "mb_per_s": rounded(nbytes / 1e6 / float(np.median(mine))),
        "peak_anon_mib": rounded(peaks.pop(OURS)),
    }
    if seconds:
        found["speedup"] = {
            side: rounded(float(np.median(each / mine))) for side, each in seconds.items()
        }
        found["their_peak_anon_mib"] = {s: rounded(each) for s, each in peaks.items()}
    return found


def measure(
    folder: Path, sizes: Sizes, wanted: Wanted = Wanted(), done: Path | None = None
) -> dict[str, Any]:
    """Measure every format both ways; see the module.

    Args:
        folder: For the files, some 12 GB at full size.
        sizes: How much.
        wanted: Of what.
        done: File of what was measured before, which grows; that is not done again.
    """
    result: dict[str, Any] = {}
    if done is not None and done.exists():
        result = json.loads(done.read_text("utf-8"))
    for kind in wanted.kinds:
        rows, place = sizes.of(kind), folder / kind
        nbytes = rows * mr.Schema(SCHEMAS[kind]).row_nbytes
        told = result.setdefault(kind, {"rows": rows, "mb": rounded(nbytes / 1e6)})
        for name in wanted.formats:
            if (kind, name) == ("pixels", "csv"):
                continue
            each = told.setdefault(name, {})
            left = [d for d in DIRECTIONS if d not in each]
            if left and not place.exists():
                place.mkdir()
                fill(place / "buffer", kind, rows)
                fill(place / "small", kind, 50)
            if left and left[0] != "export":
                run(OURS, name, "export", place)
            for direction in left:
                those = sides(kind, name, direction) if wanted.peers else [OURS]
                each[direction] = compare(those, name, direction, place, nbytes, sizes.turns)
                if done is not None:
                    done.write_text(json.dumps(result), "utf-8")
            _clear(place)
        if place.exists():
            shutil.rmtree(place)
    return result


def _clear(folder: Path) -> None:
    """Remove what a format's sides wrote: disks are not that large."""
    for path in folder.glob("*") if folder.exists() else ():
        if path.name not in ("buffer", "small"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """Measure and print one line, or be a process that is measured."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, help="of vectors; pixels go by bytes")
    parser.add_argument("--formats", default=",".join(SUFFIX), help="some of them")
    parser.add_argument("--kinds", default=",".join(SCHEMAS), help="one of them")
    parser.add_argument(
        "--done", type=Path, help="a file that keeps what was measured: to go on later"
    )
    parser.add_argument("--turns", type=int, help="times that each side runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--format", help=argparse.SUPPRESS)
    parser.add_argument("--direction", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder = Path(options.folder)
        child(options.child, options.format, options.direction, folder)
        return
    sizes = QUICK if options.quick else FULL
    if options.rows:
        sizes = Sizes(options.rows, max(1, options.rows * 97 // 28_237), sizes.turns)
    if options.turns:
        sizes = replace(sizes, turns=options.turns)
    wanted = Wanted(
        tuple(options.kinds.split(",")), tuple(options.formats.split(",")), options.peers != ""
    )
    run_benchmark(
        __doc__, lambda folder, _: measure(folder, sizes, wanted, options.done), options=options
    )


if __name__ == "__main__":
    main()
