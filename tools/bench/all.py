"""Run all benchmarks, and write docs/benchmarks.md, plots and README's table from them.

``python -m tools.bench.all`` runs every script, one after another, in the environment
of the peers (`make_peers`) if it is there, keeps what each printed in
docs/figures/benchmarks.json, and writes from it docs/benchmarks.md (`page`), the plots
beside the figures and README's table. Names run some scripts, whose results replace
theirs and leave the others'. With --quick, everything goes to
build/bench, so that figures of small runs never stand in the docs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from tools.bench import (
    bench_adapters,
    bench_zarr_peers,
    disk_peers,
    make_peers,
    page,
    peers,
    plots,
    prioritized_peers,
    ragged_peers,
    slices,
    transform_peers,
)
from tools.bench.turns import rounded

OTHERWISE = {
    "bench_beyond_8": ("bench_beyond", "--times", "8"),
    "bench_beyond_small": ("bench_beyond", "--row-nbytes", "168"),
}
"""Other ways to run a script: its name, and options."""
_FILES = [path.stem for path in Path(__file__).parent.glob("bench_*.py")]
SCRIPTS = tuple(sorted([*_FILES, *OTHERWISE]))
PEERS_OF: dict[str, Collection[str]] = {
    "bench_adapters": bench_adapters.MODULES,
    "bench_adapters_beyond": bench_adapters.MODULES,
    "bench_add": peers.MODULES,
    "bench_beyond": disk_peers.RINGS,
    "bench_beyond_8": disk_peers.RINGS,
    "bench_beyond_small": disk_peers.RINGS,
    "bench_cold": disk_peers.MAKERS,
    "bench_convert": (),
    "bench_pixels": ("torchrl",),
    "bench_prioritized": prioritized_peers.MODULES,
    "bench_ragged": ragged_peers.MODULES,
    "bench_sample": peers.MODULES,
    "bench_sequences": slices.MAKERS,
    "bench_transforms": transform_peers.MODULES,
    "bench_tree": peers.MODULES,
    "bench_zarr_peers": bench_zarr_peers.PEERS,
}
"""Scripts that measure others too, and the names that each knows them by."""
LEROBOT = make_peers.ROOT / "build/peers-lerobot"
ENVIRONMENTS = {
    "bench_curate": LEROBOT,
    "bench_images": LEROBOT,
    "bench_ray": make_peers.ROOT / "build/ray",
}
"""Scripts that run in an environment of their own, of `make peers` or `make ray`."""
LIBRARIES = (
    "cpprb",
    "flashbax",
    "h5py",
    "jax",
    "lerobot",
    "lmdb",
    "numpy",
    "pandas",
    "pyarrow",
    "pylance",
    "ray",
    "safetensors",
    "simplejpeg",
    "skrl",
    "stable-baselines3",
    "tensorstore",
    "tianshou",
    "torch",
    "torchrl",
    "transferqueue",
    "zarr",
)
RAW = page.RAW


def run(script: str, python: Path, options: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run one benchmark and return its record.

    Args:
        script: One of `SCRIPTS`.
        python: Interpreter of the environment that it runs in.
        options: After the script's name.
        timeout_s: When it is given up.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    start, load = perf_counter(), os.getloadavg()[0]
    module, *given = OTHERWISE.get(script, (script,))
    command = [str(python), "-m", f"tools.bench.{module}", *given, *options]
    try:
        done = subprocess.run(
            command,
            cwd=make_peers.ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script}: took more than {timeout_s:g} s") from error
    if done.returncode:
        raise RuntimeError(f"{script}: ended with {done.returncode}: {_end(done)}")
    return {
        "result": json.loads(done.stdout.splitlines()[-1]),
        "day": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": rounded(perf_counter() - start),
        "load_before": rounded(load),
        "machine": machine(),
        "versions": versions(python),
    }


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip()[-1000:]


def machine() -> str:
    """What is measured on, in words."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    kernel = platform.release().partition("-")[0]
    return f"{cores} cores ({model}), {pages / 1e9:.0f} GB, Linux {kernel}"


def versions(python: Path) -> str:
    """What of the libraries is installed in an environment, in words."""
    program = (
        "import platform\nfrom importlib import metadata\n"
        "print('Python', platform.python_version())\n"
        f"for name in {LIBRARIES!r}:\n"
        "    try: print(name, metadata.version(name))\n"
        "    except metadata.PackageNotFoundError: pass\n"
    )
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.split("\n")[:-1])


def publish(
    results: Mapping[str, Any], document: Path, figures: Path, readme: Path | None = None
) -> list[Path]:
    """Write the raw results, the plots, the page and README's table.

    Args:
        results: Records by script.
        document: The page, written as a whole.
        figures: Folder of the plots and of the raw results.
        readme: Gets the table of ratios, where one is given.

    Returns:
        What was written.
    """
    figures.mkdir(parents=True, exist_ok=True)
    raw = figures / page.RAW
    recorded = json.dumps(results, indent=1, sort_keys=True)
    raw.write_text(recorded + "\n", "utf-8")
    # In the order of the file, as when they are drawn from it later.
    results = json.loads(recorded)
    drawn = plots.draw_all(results, figures)
    return [raw, *drawn, *page.write(results, document, figures, drawn, readme)]


def main() -> int:
    """Run, write, and say what failed."""
    options = _options()
    docs = make_peers.ROOT / ("build/bench" if options.quick else "docs")
    docs = options.docs or docs
    docs.mkdir(parents=True, exist_ok=True)
    figures = docs / "figures"
    raw = figures / RAW
    results = json.loads(raw.read_text("utf-8")) if raw.exists() else {}
    failed = []
    for script in [] if options.redraw else options.scripts or SCRIPTS:
        try:
            results[script] = run(
                script, _python(script, options), _passed(script, options), options.timeout
            )
        except RuntimeError as error:
            failed.append(str(error))
            print(error, file=sys.stderr, flush=True)
            continue
        print(f"{script}: {results[script]['seconds']:g} s", flush=True)
    readme = make_peers.ROOT / "README.md" if docs == make_peers.ROOT / "docs" else None
    for path in publish(results, docs / "benchmarks.md", figures, readme):
        print(path)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "scripts",
        nargs="*",
        choices=[[], *SCRIPTS],
        metavar="SCRIPT",
        help="such as bench_cold; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="small, to build/bench")
    parser.add_argument("--peers", help="comma-separated; default: all installed")
    parser.add_argument("--folder", help="where scripts put files; default: TMPDIR")
    parser.add_argument("--docs", type=Path, help="where results go instead of docs")
    parser.add_argument("--redraw", action="store_true", help="run nothing, write anew")
    parser.add_argument("--timeout", type=float, default=3600, help="of a script, s")
    found = make_peers.python_of(make_peers.FOLDER)
    python = found if found.exists() else Path(sys.executable)
    parser.add_argument("--python", type=Path, default=python, help="runs the scripts")
    return parser.parse_args()


def _python(script: str, options: argparse.Namespace) -> Path:
    """Interpreter that runs one script."""
    own = ENVIRONMENTS.get(script)
    python: Path = options.python
    return python if own is None else make_peers.python_of(own)


def _passed(script: str, options: argparse.Namespace) -> list[str]:
    """Options of one script."""
    passed = ["--quick"] if options.quick else []
    if options.folder is not None:
        passed += ["--folder", options.folder]
    if options.peers is not None and script in PEERS_OF:
        known = [name for name in options.peers.split(",") if name in PEERS_OF[script]]
        passed += ["--peers", ",".join(known)]
    return passed


if __name__ == "__main__":
    sys.exit(main())
