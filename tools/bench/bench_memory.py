"""Does memory stay bounded while a ring four times larger than it is filled and drawn?

A process under an enforced limit (a cgroup, v1 or v2, where one can be made) fills
a ring of pixels four times larger, goes on for a quarter of a lap, and draws
batches throughout. Printed are the most memory it took of the limit and the most
that was its own (anonymous; page cache of the files is the kernel's to take back).
Where no cgroup can be made, RLIMIT_DATA limits what it may add of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from mmreplay import Field, ReplayBuffer, Schema
from tools.bench.turns import report, rounded, run_benchmark

SHAPE = (84, 84, 4)
ROW = 84 * 84 * 4
BATCH = 256
BLOCK = 64
TIMES_LARGER = 4
LAPS = 1.25
MIB = 1 << 20
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    """A cgroup with a memory limit, and where its kernel writes what it took.

    Attributes:
        folder: The cgroup.
        limit: File that takes the limit in bytes.
        peak: File with the most bytes ever taken, page cache included.
    """

    folder: Path
    limit: Path
    peak: Path

    def peak_nbytes(self) -> int | None:
        """Return the most bytes taken; None where the kernel does not tell."""
        return int(self.peak.read_text("ascii")) if self.peak.exists() else None


def candidates(name: str) -> Iterator[Group]:
    """Places where a cgroup might be made: version 1's, then version 2's."""
    first = ROOT / "memory" / name
    yield Group(first, first / "memory.limit_in_bytes", first / "memory.max_usage_in_bytes")
    for root in (ROOT, ROOT / "unified"):
        second = root / name
        yield Group(second, second / "memory.max", second / "memory.peak")


@contextmanager
def limited(nbytes: int, name: str = "") -> Iterator[Group | None]:
    """Make a cgroup of so much memory, or tell that none can be made.

    Args:
        nbytes: Of memory.
        name: Tells several of one process apart.
    """
    for group in candidates(f"mmreplay-bench-{os.getpid()}{name}"):
        if not group.folder.parent.is_dir():
            continue
        try:
            group.folder.mkdir()
        except OSError:
            continue
        try:
            # A controller that is off here leaves its files out.
            usable = group.limit.exists()
            if usable:
                group.limit.write_text(str(nbytes), "ascii")
                yield group
                return
        finally:
            group.folder.rmdir()
    yield None


def measure(folder: Path, limit_nbytes: int, *, cgroup: bool = True) -> dict[str, object]:
    """Run a child under the limit and return what is printed.

    Args:
        folder: Where the ring goes; it takes four times the limit.
        limit_nbytes: The memory that the child may take.
        cgroup: Try for a cgroup first.
    """
    with limited(limit_nbytes) if cgroup else _none() as group:
        command = [
            sys.executable,
            "-m",
            "tools.bench.bench_memory",
            "--child",
            str(folder),
            "--limit-mib",
            str(limit_nbytes // MIB),
        ]
        if group is not None:
            command += ["--join", str(group.folder / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(
                f"the child ended with {done.returncode} under {limit_nbytes} bytes: "
                f"{done.stderr[-2000:]}"
            )
        found: dict[str, object] = json.loads(done.stdout)
        peak = None if group is None else group.peak_nbytes()
    if peak is not None:
        found["peak_over_limit"] = rounded(peak / limit_nbytes)
    return {
        "enforced_by": "RLIMIT_DATA" if group is None else str(group.limit),
        "limit_mib": limit_nbytes // MIB,
        **found,
    }


@contextmanager
def _none() -> Iterator[None]:
    yield None


def child(folder: Path, limit_nbytes: int, join: str | None) -> None:
    """Fill and draw under the limit, and print what it took."""
    if join is not None:
        Path(join).write_text(str(os.getpid()), "ascii")
    capacity = TIMES_LARGER * limit_nbytes // ROW
    schema = Schema({"pixels": Field(SHAPE, "uint8")})
    blocks = int(LAPS * capacity) // BLOCK
    with ReplayBuffer.create(folder / "ring", schema, capacity) as buffer:
        begin = resident()
        if join is None:
            # Counted are addresses, of which the libraries take many and use few.
            most_data = begin["VmData"] + limit_nbytes
            resource.setrlimit(resource.RLIMIT_DATA, (most_data, most_data))
        first = _run(buffer, range(blocks // 10))
        early = resident()
        rest = _run(buffer, range(blocks // 10, blocks))
        steady = [_draw(buffer) for _ in range(30)]
        end = resident()
    most = max(first["anonymous"], rest["anonymous"], end["RssAnon"])
    report(
        {
            "ring_over_limit": rounded(capacity * ROW / limit_nbytes),
            "anonymous_mib": {
                "created": rounded(begin["RssAnon"] / MIB),
                "after_a_tenth": rounded(early["RssAnon"] / MIB),
                "most": rounded(most / MIB),
                "end": rounded(end["RssAnon"] / MIB),
            },
            "anonymous_growth_mib": rounded((end["RssAnon"] - early["RssAnon"]) / MIB),
            "mapped_files_mib": rounded(end["RssFile"] / MIB),
            "steps": blocks * BLOCK,
            "fill_mb_per_s": rounded(
                blocks * BLOCK * ROW / 1e6 / (first["seconds"] + rest["seconds"])
            ),
            "draw_mb_per_s": rounded(BATCH * ROW / 1e6 / float(np.median(steady))),
        }
    )


def _run(buffer: ReplayBuffer, blocks: range) -> dict[str, float]:
    """Add blocks, and draw a batch every sixteen; what it took at most."""
    noise = np.random.default_rng(0).integers(0, 256, (BLOCK, *SHAPE), np.uint8)
    seconds, anonymous = 0.0, 0
    for number in blocks:
        noise[:, 0, 0, 0] = number % 256
        start = perf_counter()
        buffer.extend(pixels=noise)
        seconds += perf_counter() - start
        if number % 16 == 0:
            _draw(buffer)
            anonymous = max(anonymous, resident()["RssAnon"])
    return {"seconds": seconds, "anonymous": anonymous}


def _draw(buffer: ReplayBuffer) -> float:
    """Seconds of one batch, whose rows are checked by the number they begin with."""
    start = perf_counter()
    batch = buffer.sample(BATCH)
    seconds = perf_counter() - start
    expected = batch.positions // BLOCK % 256
    if not np.array_equal(batch["pixels"][:, 0, 0, 0], expected):
        raise AssertionError("a drawn row is not the row of its position")
    return seconds


def resident() -> dict[str, int]:
    """Bytes of this process in memory: RssAnon its own, RssFile of mapped files.

    VmData is what RLIMIT_DATA limits: private addresses, used or not.
    """
    found = {}
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "RssFile", "VmData"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a limit of 96 MiB")
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--folder", help="where to put the ring; default: TMPDIR")
    parser.add_argument("--no-cgroup", action="store_true", help="use RLIMIT_DATA")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--join", help=argparse.SUPPRESS)
    options = parser.parse_args()
    limit = (96 if options.quick else options.limit_mib) * MIB
    if options.child:
        child(Path(options.child), limit, options.join)
        return
    run_benchmark(
        __doc__,
        lambda folder, _: measure(folder, limit, cgroup=not options.no_cgroup),
        options=options,
    )


if __name__ == "__main__":
    main()
