"""Time several sides in turns, so that a noisy machine moves them alike."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

Side = Callable[[], object]
Times = dict[str, NDArray[np.float64]]
"""Seconds of one call, float64 ``[turns]``, by side."""

OURS = "mmreplay"


def race(sides: Mapping[str, Side], turns: int, calls: int = 1, warm: int = 1) -> Times:
    """Time each side once a turn, a burst of calls at a time.

    Args:
        sides: What to call, by name.
        turns: Bursts of each side.
        calls: Calls in a burst; the time of one call is the burst's mean.
        warm: Bursts of each side before any is timed.
    """
    names = list(sides)
    times = {name: np.empty(turns) for name in names}
    for turn in range(-warm, turns):
        # Whoever goes second finds caches as the first one left them: swap.
        for name in names if turn % 2 else reversed(names):
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
    return {
        name: rounded(float(np.median(t / ours)))
        for name, t in times.items()
        if name != over
    }


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
    parser.add_argument(
        "--peers", default=None, help="comma-separated; default: all installed"
    )
    return parser


def report(result: Mapping[str, object]) -> None:
    """Print one line of JSON."""
    print(json.dumps(result), flush=True)
