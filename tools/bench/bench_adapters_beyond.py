"""Does each adapter run at four times a memory limit, where the original cannot?

Every memory runs in a process of its own under a limit (a cgroup, page cache included,
where one can be made; else RLIMIT_DATA), joined once its libraries are loaded. Ours, in
files, is filled with four times as much as the limit, and draws; the original, in RAM,
is filled alike until it is killed or refused memory, and must be: if it can do that
too, the run fails. In place of alf, which does not install, stand tensors (bench_alf).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from tools.bench import bench_alf
from tools.bench.bench_adapters import FACES, MODULES, NEEDED, THEIRS, Face, check
from tools.bench.bench_memory import MIB, TIMES_LARGER, limited, resident
from tools.bench.turns import OURS, arguments, chosen, one_thread, report, rounded, run_benchmark

ROW_NBYTES = {"sb3": 172, "skrl": 165, "velora": 424, "tmrl": 106, "pytorchrl": 172, "alf": 108}
"""Of one transition, as arrays of its numbers; Python's objects take more."""
LIMIT_MIB, QUICK_MIB = 128, 24
BATCH, DRAWS = 256, 50


class Alf:
    """alf: sixteen environments, two steps a draw."""

    def __init__(self, path: Path | None, steps: int) -> None:
        length = steps // bench_alf.ENVS
        self._memory: Any
        if path is None:
            self._memory = bench_alf.Tensors(False, length)
        else:
            from mmreplay.adapters.alf import ReplayBuffer

            spec = bench_alf.Row(*(leaf[0] for leaf in bench_alf.row(0)))
            self._memory = ReplayBuffer(spec, bench_alf.ENVS, length, path=path)
        bench_alf.filled(self._memory, length)

    def add(self) -> None:
        """See `Face`."""
        self._memory.add_batch(bench_alf.row(0))

    def sample(self, batch: int) -> Any:
        """See `Face`."""
        return self._memory.get_batch(batch, bench_alf.WINDOW)[0]

    def drawn(self, batch: int) -> tuple[Any, Any]:
        """See `Face`."""
        found = self.sample(batch)
        observations, rewards = found.observation.numpy(), found.reward.numpy()
        return observations[:, 0], rewards[:, 0, None]


def child(system: str, side: str, folder: Path, limit_nbytes: int, join: str) -> None:
    """Fill one memory under the limit, draw from it, and print how that went."""
    one_thread()
    makers: dict[str, Any] = {**FACES, "alf": Alf}
    small = makers[system](folder / "small" if side == OURS else None, 3000)
    small.sample(BATCH)  # everything is loaded now
    if join:
        Path(join).write_text(str(os.getpid()), "ascii")
    else:
        most = resident()["VmData"] + limit_nbytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    steps = TIMES_LARGER * limit_nbytes // ROW_NBYTES[system]
    before = resident()["RssAnon"]
    start = perf_counter()
    face: Face = makers[system](folder / "ring" if side == OURS else None, steps)
    filled = perf_counter()
    check(face, system, steps)
    times = []
    for _ in range(DRAWS):
        begin = perf_counter()
        face.sample(BATCH)
        times.append(perf_counter() - begin)
    face.add()
    report(
        {
            "steps": steps,
            "fill_steps_per_s": rounded(steps / (filled - start)),
            "draw_ms": rounded(1e3 * float(np.median(times))),
            "anonymous_mib": rounded((resident()["RssAnon"] - before) / MIB),
        }
    )


def outcome(system: str, side: str, folder: Path, limit_nbytes: int) -> dict[str, Any]:
    """Run one side under the limit; what it printed, or how it ended."""
    with limited(limit_nbytes, f"-{system}-{side}") as group:
        join = "" if group is None else str(group.folder / "cgroup.procs")
        command = [
            sys.executable,
            "-m",
            "tools.bench.bench_adapters_beyond",
            "--child",
            system,
            side,
            str(folder),
            str(limit_nbytes),
            join,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    by = "RLIMIT_DATA" if group is None else "cgroup"
    if done.returncode == 0:
        return {"enforced_by": by, **json.loads(done.stdout.splitlines()[-1])}
    if done.returncode < 0:
        return {"enforced_by": by, "failed": f"signal {-done.returncode}"}
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {"enforced_by": by, "failed": lines[-1][:200]}


def measure(folder: Path, limit_nbytes: int, originals: list[str]) -> dict[str, Any]:
    """Run both sides of every system that can run.

    Args:
        folder: Where the rings go; each takes four times the limit, and is removed.
        limit_nbytes: What each process may take beyond its libraries.
        originals: Systems whose own memories are tried.

    Raises:
        AssertionError: Ours failed, or an original did not.
    """
    told: dict[str, Any] = {}
    for system in [*chosen(NEEDED, None), "alf"]:
        sides = [OURS, THEIRS] if system in [*originals, "alf"] else [OURS]
        told[system] = {}
        for side in sides:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found = outcome(system, side, Path(place), limit_nbytes)
            told[system][side] = found
            if ("failed" in found) != (side == THEIRS):
                raise AssertionError(f"{system}, {side}: got {found}")
    return {"limit_mib": limit_nbytes // MIB, "times_larger": TIMES_LARGER, **told}


def main() -> None:
    """Print one line of JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--child", nargs=5, help="run one side; used by itself")
    options = parser.parse_args()
    if options.child:
        system, side, folder, limit, join = options.child
        child(system, side, Path(folder), int(limit), join)
        return
    limit = (QUICK_MIB if options.quick else LIMIT_MIB) * MIB
    originals = chosen(MODULES, options.peers)
    run_benchmark(
        __doc__,
        lambda folder, _: {"adapters_beyond": measure(folder, limit, originals)},
        options=options,
    )


if __name__ == "__main__":
    main()
