"""Do agents learn alike from a ring on disk and from RAM, and if they are killed?

Small agents of four libraries are trained from several seeds with the library's own
memory, with ours, and with ours by a process that is killed by SIGKILL half way and
another one that goes on: the rows that it finds must be those that were added. Draws
differ, so returns agree in distribution only: a run's score is the mean return of its
last quarter of steps, and the p-value is the share of all ways to deal the scores to
two sides whose means are as far apart (Fisher's exact permutation test; above 10 seeds
of 100,000 random ways, and the table says so). Libraries that
are not installed are left out, so run it in each one's environment:

    python -m tools.curves --seeds 5 --keep skrl.json
    python -m tools.curves --draw skrl.json sb3.json --plot docs/figures/curves.svg
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from tools.curve_agents import AGENTS, TASKS, Notes

Curve = NDArray[np.float64]
"""float64 ``[2, N]``: step at which each episode ended, and its return."""

MAX_EXACT, DEALS = 10, 100_000
"""Scores of a side up to which all deals are made; and random ones above."""
SIDES = ("RAM", "disk", "killed")
COLOURS = ("tab:gray", "tab:blue", "tab:orange")
MODULES = {"sb3": "stable_baselines3", "skrl": "skrl", "velora": "velora", "pytorchrl": "pytorchrl"}


def run(name: str, side: str, seed: int, steps: int, folder: Path) -> Curve:
    """Train one agent and return its curve."""
    folder = folder / f"{name}-{side}-{seed}".replace(" ", "-")
    folder.mkdir()
    halves = [steps // 2, steps - steps // 2]
    if side == "killed":
        for number in range(2):
            given = [name, str(seed), str(steps), str(folder), str(number)]
            done = subprocess.run(
                [sys.executable, "-m", "tools.curves", "--half", *given],
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode != (-signal.SIGKILL, 0)[number]:
                raise RuntimeError(
                    f"{name}: the first half must be killed and the second must "
                    f"end, got exit {done.returncode} of half {number}: "
                    f"{done.stderr[-2000:]}"
                )
        return sorted_curve(json.loads((folder / "notes.json").read_text()))
    notes: Notes = []
    task = TASKS[name] | {"done": 0, "saved": None}
    ring = folder / "ring" if side == "disk" else None
    with contextlib.chdir(folder):  # some libraries write where they stand
        agent = AGENTS[task["library"]](task, seed, ring, notes)
        for half in halves:
            agent.learn(half)
    return sorted_curve(notes)


def run_half(name: str, seed: int, steps: int, folder: Path, number: int) -> None:
    """Train for one half; the first one ends by SIGKILL, the second finds its rows."""
    notes: Notes = []
    kept, ring = folder / "notes.json", folder / "ring"
    task = TASKS[name] | {"done": 0, "saved": None}
    if number:
        told = json.loads((folder / "told.json").read_text())
        assert told == rows_of(ring), "the rows are not those that were added"
        notes += [tuple(each) for each in json.loads(kept.read_text())]
        task |= {"done": steps // 2, "saved": folder}
        if task["library"] == "velora":
            task["done"] = max(end for end, _ in notes)
    with contextlib.chdir(folder):
        agent = AGENTS[task["library"]](task, seed + 1000 * number, ring, notes)
        agent.learn(steps - steps // 2 if number else steps // 2)
    kept.write_text(json.dumps(notes))
    if number == 0:
        agent.save(folder)
        (folder / "told.json").write_text(json.dumps(rows_of(ring)))
        os.kill(os.getpid(), signal.SIGKILL)


def rows_of(ring: Path) -> list[int]:
    """How many rows a folder holds, and a checksum of all that is in them."""
    with mr.ReplayBuffer.open(ring) as buffer:
        found, total = buffer.gather_all(), 0
        for path in sorted(found.fields):
            total = zlib.crc32(np.ascontiguousarray(found.fields[path]).data, total)
        return [int(buffer.span.lengths.sum()), total]


def sorted_curve(notes: Notes) -> Curve:
    """Episodes of all environments by the step at which they ended."""
    return np.array(sorted(map(tuple, notes)), np.float64).reshape(-1, 2).T


def score(curve: Curve) -> float:
    """Mean return of the episodes that ended in the last quarter of the steps."""
    return float(curve[1][curve[0] > 0.75 * curve[0].max()].mean())


def p_value(one: list[float], other: list[float]) -> float:
    """How likely means so far apart are, were both of one law.

    Above MAX_EXACT scores a side, of DEALS random deals and the one that was: 20 of 40
    scores can be dealt in 10^11 ways.
    """
    scores = np.array(one + other)
    apart = abs(np.mean(one) - np.mean(other))
    total, count = scores.sum(), len(one)
    if max(len(one), len(other)) > MAX_EXACT:
        rng = np.random.default_rng(0)
        some = rng.permuted(np.tile(scores, (DEALS, 1)), axis=1)
        sums = np.append(some[:, :count].sum(axis=1), sum(one))
    else:
        deals = combinations(range(len(scores)), count)
        sums = np.array([scores[list(deal)].sum() for deal in deals])
    means, others = sums / count, (total - sums) / len(other)
    # Sums in another order differ in their last digits.
    return float((np.abs(means - others) >= apart * (1 - 1e-9)).mean())


def plot(curves: dict[str, dict[str, list[Curve]]], path: Path) -> None:
    """Draw every run's returns, smoothed over a twentieth of its episodes."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "curves"
    pyplot = import_module("matplotlib.pyplot")
    rows = -(-len(curves) // 4)
    figure, axes = pyplot.subplots(rows, min(4, len(curves)), figsize=(12, 3 * rows), squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (name, sides) in zip(axes.flat, curves.items(), strict=False):
        for side, colour in zip(SIDES, COLOURS, strict=True):
            for number, (ends, returns) in enumerate(sides.get(side, [])):
                width = max(1, len(returns) // 20)
                smooth = np.convolve(returns, np.full(width, 1 / width), "valid")
                label = side if number == 0 else None
                axis.plot(ends[width - 1 :], smooth, color=colour, alpha=0.7, label=label)
        task = TASKS[name]
        axis.set(title=f"{task['library']} {task['kind']}\n{task['env']}", xlabel="steps")
    axes[0][0].legend(frameon=False)
    for line in axes:
        line[0].set_ylabel("return")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def scores_of(curves: dict[str, dict[str, list[Curve]]]) -> dict[str, object]:
    """Scores, and how likely they are, were the sides of one law."""
    told: dict[str, object] = {}
    for name, sides in curves.items():
        scores = {side: [score(curve) for curve in some] for side, some in sides.items()}
        told[name] = {
            "scores": {s: [round(x, 1) for x in some] for s, some in scores.items()},
            "p_value": {
                side: round(p_value(scores[SIDES[0]], scores[side]), 3)
                for side in SIDES[1:]
                if side in scores
            },
            "deals": (f"{DEALS:,} random" if max(map(len, scores.values())) > MAX_EXACT else "all"),
        }
    return told


def trained(names: list[str], seeds: int, steps: int | None) -> dict[str, Any]:
    """Curves by task and side."""
    found: dict[str, dict[str, list[Curve]]] = {}
    for name in names:
        if find_spec(MODULES[TASKS[name]["library"]]) is None:
            continue
        count = steps or TASKS[name]["steps"]
        with tempfile.TemporaryDirectory() as folder:
            found[name] = {
                side: [run(name, side, seed, count, Path(folder)) for seed in range(seeds)]
                for side in SIDES
            }
    return found


def read(paths: list[Path]) -> dict[str, Any]:
    """Curves that were kept, of several files."""
    found = {}
    for path in paths:
        for name, sides in json.loads(path.read_text()).items():
            found[name] = {
                side: [np.array(curve) for curve in some] for side, some in sides.items()
            }
    return {name: found[name] for name in TASKS if name in found}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each run; for a quick look")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--keep", type=Path, help="write the curves to this file")
    parser.add_argument("--draw", nargs="+", type=Path, help="curves kept, to plot")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--half", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import_module("torch").set_num_threads(1)
    if options.half:
        name, seed, steps, folder, number = options.half
        run_half(name, int(seed), int(steps), Path(folder), int(number))
        return
    if options.draw:
        curves = read(options.draw)
    else:
        curves = trained(options.only, options.seeds, options.steps)
    if options.keep:
        kept = {
            name: {
                side: [curve.round(3).tolist() for curve in some] for side, some in sides.items()
            }
            for name, sides in curves.items()
        }
        options.keep.write_text(json.dumps(kept))
    print(json.dumps({"curves": scores_of(curves)}), flush=True)
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
