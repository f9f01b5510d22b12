"""How fast do buffers become files and files buffers, and in how much memory?

A buffer of vectors and one of pixels go to each format (`export`), are read from it
block by block (`read`), and become a new buffer (`load`). Beside each stands what
people use: the library's own call on arrays that are in memory already, its file
synced as ours is. Every call runs in a process of its own, in turns, after a small one
that pays for imports; its memory is the most of the process's own (RssAnon) beyond
what it had before. Ratios are taken turn by turn: above 1, ours takes less time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.schema.dtypes import storage_dtype
from tools.bench.turns import arguments, report, rounded

Columns = dict[str, NDArray[np.generic]]
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


def frame(held: Columns) -> Any:
    """A data frame with a column a value, as csv has them."""
    import pandas

    found = {}
    for name, column in held.items():
        flat = column.reshape(len(column), -1)
        for number in range(flat.shape[1]):
            label = f"{name}.{number}" if column.ndim > 1 else name
            found[label] = flat[:, number].copy()
    return pandas.DataFrame(found)


def rows_frame(held: Columns) -> Any:
    """A data frame with a column a field: vectors in cells, images as bytes."""
    import pandas

    found: dict[str, object] = {}
    for name, column in held.items():
        if column.dtype == np.uint8 and column.ndim > 1:
            found[name] = [row.tobytes() for row in column]
        else:
            found[name] = list(column) if column.ndim > 1 else column
    return pandas.DataFrame(found)


Prepared = Callable[[Path], object]
"""What is timed: writes the path, or reads it."""


def _savez(held: Columns) -> Prepared:
    return lambda path: np.savez(path, allow_pickle=False, **dict(held))


def _torch_save(held: Columns) -> Prepared:
    import torch

    tensors = {name: torch.from_numpy(column) for name, column in held.items()}
    return lambda path: torch.save(tensors, path)


def _save_file(held: Columns) -> Prepared:
    from safetensors.numpy import save_file

    return lambda path: save_file(held, path)


def _to_csv(held: Columns) -> Prepared:
    made = frame(held)
    return lambda path: made.to_csv(path, index=False)


def _to_parquet(held: Columns) -> Prepared:
    made = rows_frame(held)
    return lambda path: made.to_parquet(path, compression="zstd")


def _load_npz(path: Path) -> object:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found}


def _torch_load(path: Path) -> object:
    import torch

    return torch.load(path, weights_only=True)


def _load_file(path: Path) -> object:
    from safetensors.numpy import load_file

    return load_file(path)


def _read_csv(path: Path) -> object:
    import pandas

    return pandas.read_csv(path)


def _read_parquet(path: Path) -> object:
    import pandas

    return pandas.read_parquet(path)


@dataclass(frozen=True, slots=True)
class Peer:
    """What people use instead.

    Attributes:
        module: That it needs.
        write: Prepares a call that writes columns.
        read: Reads a file whole.
    """

    module: str
    write: Callable[[Columns], Prepared]
    read: Prepared


PEERS = {
    "npz": Peer("numpy", _savez, _load_npz),
    "pt": Peer("torch", _torch_save, _torch_load),
    "safetensors": Peer("safetensors", _save_file, _load_file),
    "csv": Peer("pandas", _to_csv, _read_csv),
    "parquet": Peer("pandas", _to_parquet, _read_parquet),
}


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


def theirs(name: str, direction: str, source: Path, target: Path) -> Prepared:
    """Prepare what a peer does."""
    if direction == "read":
        return PEERS[name].read
    write = PEERS[name].write(columns(source))

    def synced(path: Path) -> None:
        write(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)

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
    if side == "ours":
        ours(name, "export", small, tiny)
        ours(name, direction, small, tiny)
        call = partial(ours, name, direction, source, target)
    else:
        theirs(name, "export", small, tiny)(tiny)
        theirs(name, direction, small, tiny)(tiny)
        call = partial(theirs(name, direction, source, target), target)
    with watched() as peak:
        start = perf_counter()
        call()
        seconds = perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_nbytes": peak[0]}))


def run(side: str, name: str, direction: str, folder: Path) -> dict[str, float]:
    """Run a side in a process of its own."""
    command = [
        sys.executable, "-m", "tools.bench.bench_convert", "--child", side,
        "--format", name, "--direction", direction, "--folder", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{side} {name} {direction}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(
    name: str, direction: str, folder: Path, nbytes: int, turns: int, peers: bool
) -> dict[str, object]:
    """Measure one format in one direction, in turns."""
    sides = ["ours"]
    if peers and direction != "load" and find_spec(PEERS[name].module):
        sides.append("theirs")
    took: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(turns):
        for side in sides if turn % 2 else reversed(sides):
            took[side].append(run(side, name, direction, folder))
    seconds = {side: np.array([t["seconds"] for t in took[side]]) for side in sides}
    found: dict[str, object] = {
        "mb_per_s": rounded(nbytes / 1e6 / float(np.median(seconds["ours"]))),
        "peak_anon_mib": rounded(max(t["peak_nbytes"] for t in took["ours"]) / MIB),
    }
    if "theirs" in sides:
        ratio = np.median(seconds["theirs"] / seconds["ours"])
        found["speedup"] = rounded(float(ratio))
        most = max(t["peak_nbytes"] for t in took["theirs"])
        found["their_peak_anon_mib"] = rounded(most / MIB)
    return found


def measure(
    folder: Path, sizes: Sizes, formats: list[str], peers: bool = True
) -> dict[str, object]:
    """Measure every format both ways; see the module."""
    result: dict[str, object] = {}
    for kind, schema in SCHEMAS.items():
        rows = sizes.of(kind)
        place = folder / kind
        place.mkdir()
        fill(place / "buffer", kind, rows)
        fill(place / "small", kind, 50)
        fields = schema.values()
        nbytes = rows * sum(
            storage_dtype(each.dtype).itemsize * int(np.prod(each.shape))
            for each in fields
        )
        told: dict[str, object] = {"rows": rows, "mb": rounded(nbytes / 1e6)}
        for name in formats:
            if (kind, name) != ("pixels", "csv"):
                told[name] = {
                    direction: compare(
                        name, direction, place, nbytes, sizes.turns, peers
                    )
                    for direction in ("export", "read", "load")
                }
        result[kind] = told
    return result


def main() -> None:
    """Measure and print one line, or be a process that is measured."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, help="of vectors; pixels go by bytes")
    parser.add_argument("--formats", default=",".join(SUFFIX), help="some of them")
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
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(
            Path(folder), sizes, options.formats.split(","), options.peers != ""
        )
    report(found)


if __name__ == "__main__":
    main()
