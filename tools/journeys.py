"""In how many files of mmreplay does one call pass?

Prints, for each journey (a call that a user makes), how many source files of the
package run Python code for it: a reader who follows that call opens as many.

The rule of counting: a file counts if at least one function, method, lambda or
comprehension that is defined in it is called while the journey's call runs, in the
calling thread or in a thread that is started meanwhile (`sys.setprofile` and
`threading.setprofile`). Bodies of modules do not count: all modules are imported
before. C kernels are no Python code and do not count. Of the loader the learner's
thread alone counts.

Calls that are made over and over (add, sample, update, the loader's next) are
repeated, and the files are those of the most frequent route. The others (open,
export, load, snapshot) are the first such call of the process.

Two buffers serve most journeys, each of one environment and in the first lap of its
ring: a small one with flat fields (vectors of 17 and 6 floats), and one whose
observation is nested and has an image. Export and load are of parquet files. The
export's own part is what lies in mmreplay/convert.

``python -m tools.journeys`` prints the table, ``--files`` each journey's files in the
order of their first call, ``--markdown`` the table of docs/architecture.md (journeys
and files), ``--json`` all of it. ``--timing`` also times `add` of nested steps beside
`add` of the same fields, flat.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any

import numpy as np

import mmreplay as mr
from tools.bench.turns import medians_us, race, rounded

PACKAGE = Path(mr.__file__).parent
CAPACITY = 2_000
FILLED = 300
"""Steps before the first measured call: no page or committer is new any more."""
REPEATED = 40
"""Calls of which the most frequent route is taken."""
BATCH = 256

VECTORS: dict[str, mr.Field] = {
    "position": mr.Field((9,), "float32"),
    "velocity": mr.Field((8,), "float32"),
}
REST: dict[str, mr.Field] = {
    "action": mr.Field((6,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
IMAGE: dict[str, mr.Field] = {"pixels": mr.Field((84, 84, 4), "uint8")}
FLAT = mr.Schema({**VECTORS, **REST})
NESTED_SMALL = mr.Schema({"observation": VECTORS, **REST})
NESTED = mr.Schema({"observation": {**IMAGE, **VECTORS}, **REST})

WRITER = """
import sys
from tools.journeys import FLAT, step_of
from mmreplay import ReplayBuffer
buffer = ReplayBuffer.open(sys.argv[1], "r+")
step = step_of(FLAT)
while True:
    for _ in range(100):
        buffer.add(step)
    print(int(buffer.heads[0]), flush=True)
"""
"""Adds steps until it is killed."""


@dataclass(frozen=True, slots=True)
class Journey:
    """One call and the files that it passes through.

    Attributes:
        name: What is called.
        files: Of mmreplay, in the order of their first call.
        goal: How many there are to be at most; None where none is set.
        before: How many they were before the layout was redone; None where not counted.
    """

    name: str
    files: tuple[str, ...]
    goal: int | None = None
    before: int | None = None


def step_of(schema: mr.Schema) -> dict[str, Any]:
    """One step of a schema, as an environment returns it: arrays, floats, bools."""
    step: dict[str, Any] = {}
    for path, field in schema.fields.items():
        *groups, name = path.split("/")
        inner = step
        for group in groups:
            inner = inner.setdefault(group, {})
        if field.shape:
            inner[name] = np.ones(field.shape, field.dtype)
        else:
            inner[name] = False if field.dtype == "bool" else 1.0
    return step


def files_of(call: Callable[[], Any], thread: int | None = None) -> tuple[tuple[str, ...], Any]:
    """Call once; return the package's files that it passed through, and its result.

    Args:
        call: What is called.
        thread: Identifier of the only thread that counts; None for all.
    """
    folder = f"{PACKAGE}/"
    # A dict keeps the order of the first calls. Threads share it: setting a key that
    # is there already changes nothing.
    files: dict[str, None] = {}
    running = True

    def profile(frame: FrameType, event: str, _: object) -> None:
        if not running or event != "call" or frame.f_code.co_name == "<module>":
            return
        name = frame.f_code.co_filename
        if name.startswith(folder) and thread in (None, threading.get_ident()):
            files[name.removeprefix(folder)] = None

    former = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(former)
        threading.setprofile(None)
        running = False
    return tuple(files), result


def most_frequent(routes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The route that most calls took; routes with the same files are one."""
    counts = Counter(frozenset(route) for route in routes)
    # Ties are broken by the names, so that the count is the same in each run.
    chosen = max(counts, key=lambda files: (counts[files], sorted(files)))
    return next(route for route in routes if frozenset(route) == chosen)


def import_all() -> None:
    """Import every module of the package whose library is installed."""
    for module in pkgutil.walk_packages(mr.__path__, "mmreplay."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                # An adapter says itself which library it needs; any other module
                # of ours that is missing is a mistake.
                name = error.name or ""
                if name.startswith("mmreplay") and "needs" not in str(error):
                    raise


def filled(path: Path, schema: mr.Schema, steps: int = FILLED, **options: Any) -> Any:
    """Create a buffer of one environment and add steps."""
    buffer = mr.ReplayBuffer.create(path, schema, CAPACITY, **options)
    step = step_of(schema)
    for _ in range(steps):
        buffer.add(step)
    return buffer


def kill_a_writer(path: Path) -> None:
    """Kill a process with SIGKILL while it adds to a buffer."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PACKAGE.parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()


def measure(folder: Path) -> list[Journey]:
    """Make every journey once, over buffers in an empty folder."""
    import_all()
    # Names load on first use: what finds them is no part of a call.
    open_buffer = mr.ReplayBuffer.open
    export, load = mr.export, mr.load
    journeys = []

    source = folder / "source"
    filled(source, FLAT).close()
    kill_a_writer(source)
    route, buffer = files_of(lambda: open_buffer(source, "r+"))
    assert buffer.recovery.how == "killed"
    buffer.close()
    journeys.append(Journey("open r+ after a kill", route, 34, 60))
    route, buffer = files_of(lambda: open_buffer(source))
    journeys.append(Journey("open r", route, 28, 53))
    route, _ = files_of(lambda: buffer.snapshot(folder / "snapshot"))
    snapshot = Journey("snapshot", route)
    buffer.close()

    parquet = folder / "file.parquet"
    route, _ = files_of(lambda: export(source, parquet))
    own = tuple(name for name in route if name.startswith("convert/"))
    journeys.append(Journey("export to parquet", route, 38, 72))
    journeys.append(Journey("export to parquet: its own part", own, 9, 24))
    route, _ = files_of(lambda: load(parquet, folder / "loaded"))
    journeys.append(Journey("load of a small parquet", route, 36, 61))
    journeys.append(snapshot)

    calls = [*_adds_and_samples(folder), *_prioritized(folder), *_loader(folder)]
    return calls + journeys


def _adds_and_samples(folder: Path) -> list[Journey]:
    with (
        filled(folder / "flat", FLAT) as flat,
        filled(folder / "nested", NESTED) as nested,
        filled(folder / "nested_small", NESTED_SMALL) as nested_small,
    ):
        image_sample = _repeated(lambda: nested.sample(BATCH))
        journeys = [
            Journey("add, nested", _repeated_add(nested), 8, 13),
            Journey("add, flat small", _repeated_add(flat), 5, 12),
            Journey("add, nested small", _repeated_add(nested_small)),
        ]
        small_sample = _repeated(lambda: flat.sample(BATCH))
        for buffer, name in ((nested_small, "nested small"), (flat, "flat small")):
            # Pages are prepared for stores in the lap after the first.
            for _ in range(2 * CAPACITY):
                buffer.add(step_of(buffer.schema))
            name = f"add, {name}, full ring"
            journeys.append(Journey(name, _repeated_add(buffer)))
    return [
        *journeys,
        Journey("sample, small", small_sample, 9, 13),
        Journey("sample, image", image_sample, 11, 16),
    ]


def _repeated(call: Callable[[], Any]) -> tuple[str, ...]:
    call()
    return most_frequent([files_of(call)[0] for _ in range(REPEATED)])


def _repeated_add(buffer: Any) -> tuple[str, ...]:
    step = step_of(buffer.schema)
    return _repeated(lambda: buffer.add(step))


def _prioritized(folder: Path) -> list[Journey]:
    sampler = mr.PrioritizedSampler(seed=0)
    values = np.linspace(1, 2, BATCH)
    sample, update = [], []
    with filled(folder / "prioritized", FLAT, sampler=sampler) as buffer:
        for _ in range(REPEATED):
            route, batch = files_of(lambda: buffer.sample(BATCH))
            sample.append(route)
            route, _ = files_of(lambda b=batch: buffer.update_priorities(b, values))  # type: ignore[misc]  # a lambda's default
            update.append(route)
    return [
        Journey("prioritized sample", most_frequent(sample), 12, 20),
        Journey("update priorities", most_frequent(update), 9, 15),
    ]


def _loader(folder: Path) -> list[Journey]:
    """Next of a loader, in the learner's thread.

    A learner that comes back at once draws and gathers the batch itself, as that is
    sooner than a hand-over. One that works meanwhile takes a batch that the workers
    (threads of the loader) made. Which of the two a call was is seen from whether
    it passed the file of the sampler.
    """
    drawn: list[tuple[str, ...]] = []
    taken: list[tuple[str, ...]] = []
    sampler = mr.UniformSampler(seed=0)
    drawing = inspect.getsourcefile(type(sampler))
    assert drawing is not None
    drawing = drawing.removeprefix(f"{PACKAGE}/")
    with (
        filled(folder / "loaded_from", FLAT, sampler=sampler) as buffer,
        mr.ReplayLoader(buffer, BATCH, device="cpu") as loader,
    ):
        batches = iter(loader)
        learner = threading.get_ident()
        for call in range(20 * REPEATED):
            if call % 20 == 0:
                sleep(0.005)
            route, _ = files_of(lambda: next(batches), learner)
            (drawn if drawing in route else taken).append(route)
            if min(len(drawn), len(taken)) >= REPEATED:
                break
    return [
        Journey("loader, learner's thread: route that draws", most_frequent(drawn), 13, 21),
        Journey("loader, learner's thread: route of workers", most_frequent(taken), 4, 6),
    ]


def timing(folder: Path, turns: int = 60, calls: int = 200) -> dict[str, Any]:
    """Time `add` of nested steps and of the same fields, flat, in turns.

    Over a full ring, and in the first lap of a new one.
    """
    result: dict[str, Any] = {}
    for name, steps in (("full_ring", 2 * CAPACITY), ("first_lap", FILLED)):
        capacity = CAPACITY if name == "full_ring" else 2 * turns * calls
        schemas = {"flat": FLAT, "nested": NESTED_SMALL}
        buffers = {
            side: mr.ReplayBuffer.create(folder / f"{name}_{side}", schema, capacity)
            for side, schema in schemas.items()
        }
        sides = {}
        for side, buffer in buffers.items():
            step = step_of(buffer.schema)
            for _ in range(steps):
                buffer.add(step)
            sides[side] = lambda b=buffer, s=step: b.add(s)
        times = race(sides, turns, calls)
        for buffer in buffers.values():
            buffer.close()
        ratio = float(np.median(times["nested"] / times["flat"]))
        result[name] = {"nested_over_flat": rounded(ratio), **medians_us(times)}
    return result


def table(journeys: Sequence[Journey], markdown: bool = False) -> list[str]:
    """The lines of the table; in Markdown only names and files."""
    if markdown:
        lines = [f"| {journey.name} | {len(journey.files)} |" for journey in journeys]
        return ["| journey | files |", "|---|---:|", *lines]
    rows: list[tuple[str, ...]] = [("journey", "files", "before", "goal")]
    for journey in journeys:
        numbers = (len(journey.files), journey.before, journey.goal)
        rows.append((journey.name, *("" if n is None else str(n) for n in numbers)))
    widths = [max(len(row[n]) for row in rows) for n in range(4)]
    return [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def main() -> int:
    """Make the journeys and print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="of each journey")
    parser.add_argument("--markdown", action="store_true", help="the docs' table")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--timing", action="store_true", help="nested and flat add")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journeys = measure(folder)
        times = timing(folder) if options.timing else None
    if options.json:
        result = {"journeys": [asdict(journey) for journey in journeys]}
        print(json.dumps(result if times is None else {**result, "timing": times}))
        return 0
    print("\n".join(table(journeys, options.markdown)))
    if options.files:
        for journey in journeys:
            print(f"\n{journey.name}: {len(journey.files)}")
            print("\n".join(f"  {name}" for name in journey.files))
    for ring, values in (times or {}).items():
        print(f"\nadd, nested and flat, {ring.replace('_', ' ')}:", end=" ")
        print(json.dumps(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
