"""Time several sides in turns, so that a noisy machine moves them alike."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

Side = Callable[[], object]
Times = dict[str, NDArray[np.float64]]
"""Seconds of one call, float64 ``[turns]``, by side."""

OURS = "mmreplay"


def race(
    sides: Mapping[str, Side], turns: int, calls: int = 1, warm: int = 1, ahead: int = 0
) -> Times:
    """Time each side once a turn, a burst of calls at a time.

    Args:
        sides: What to call, by name.
        turns: Bursts of each side.
        calls: Calls in a burst; the time of one call is the burst's mean.
        warm: Bursts of each side before any is timed.
        ahead: Calls before each burst, which take what a side made beforehand.
    """
    names = list(sides)
    times = {name: np.empty(turns) for name in names}
    for turn in range(-warm, turns):
        # The second side finds the caches as the first one left them: swap.
        for name in names if turn % 2 else reversed(names):
            for _ in range(ahead):
                sides[name]()
            seconds = burst(sides[name], calls)
            if turn >= 0:
                times[name][turn] = seconds
    return times


def burst(side: Side, calls: int) -> float:
    """Mean seconds of one of several calls in a row."""
    start = perf_counter()
    for _ in range(calls):
        side()
    return (perf_counter() - start) / calls


def medians_us(times: Times) -> dict[str, float]:
    """Median microseconds of a call, by side."""
    return {name: rounded(1e6 * float(np.median(t))) for name, t in times.items()}


def speedups(times: Times, over: str = OURS) -> dict[str, float]:
    """How many times as long as one side each other side takes, turn by turn."""
    ours = times[over]
    return {name: rounded(float(np.median(t / ours))) for name, t in times.items() if name != over}


def over_each(times: Times, ways: Sequence[str]) -> dict[str, object]:
    """Speedups of each way of ours over every other side, and over the fastest one.

    Args:
        times: Of all sides.
        ways: Ours, by name.
    """
    result: dict[str, object] = {}
    theirs = {name: t for name, t in times.items() if name not in ways}
    for name in ways:
        over = speedups({name: times[name], **theirs}, name)
        if theirs:
            over["fastest"] = min(over.values())
        result[f"speedup_of_{name}"] = over
    result["median_us"] = medians_us(times)
    return result


def chosen(modules: Mapping[str, str], wanted: str | None) -> list[str]:
    """Names of the peers that can be imported, of those wanted.

    Args:
        modules: The module that each needs, by name.
        wanted: Comma-separated names; None for all, ``""`` for none.

    Raises:
        SystemExit: A name is unknown, or a peer asked for by name is missing.
    """
    here = [name for name, module in modules.items() if find_spec(module) is not None]
    if wanted is None:
        return here
    names = [name for name in wanted.split(",") if name]
    absent = [name for name in names if name not in here]
    if absent:
        raise SystemExit(
            f"Peers must be among the installed {here}, got {absent}. Make the "
            "environment of tools/bench/peers.txt, as docs/benchmarks.md says."
        )
    return names


def one_thread() -> None:
    """Let torch use one thread: those that wait for work spin, on others' cores."""
    try:
        import torch
    except ModuleNotFoundError:
        return
    torch.set_num_threads(1)


def rounded(value: float) -> float:
    """Three digits: more would be noise."""
    return float(f"{value:.3g}")


def arguments(question: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--folder", help="where to put the files; default: TMPDIR")
    parser.add_argument("--peers", default=None, help="comma-separated; default: all installed")
    return parser


def run_benchmark(
    question: str | None,
    measure: Callable[[Path, argparse.Namespace], Mapping[str, object]],
    *,
    options: argparse.Namespace | None = None,
    one_torch_thread: bool = False,
    numpy_seeded: bool = False,
) -> None:
    """Parse options, measure in a temporary folder and print one line of JSON.

    Args:
        question: The script's docstring.
        measure: Called with the empty folder and the options; returns the figures.
        options: Parsed by a script that has options of its own.
        one_torch_thread: Whether torch uses one thread.
        numpy_seeded: Whether numpy's global generator is seeded: Stable-Baselines3,
            tianshou and cpprb draw with it.
    """
    if options is None:
        options = arguments(question).parse_args()
    if one_torch_thread:
        one_thread()
    if numpy_seeded:
        np.random.seed(0)  # noqa: NPY002
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report(measure(Path(folder), options))


def report(result: Mapping[str, object]) -> None:
    """Print one line of JSON."""
    print(json.dumps(result), flush=True)
