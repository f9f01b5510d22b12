"""What benchmarks printed, drawn: one line a question, a mark for each library.

Axes are logarithmic, and the limits of the machine are drawn in: what copying memory
and reading the disk give whoever asks (`bench_limits`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from tools.bench.tables import groups, words
from tools.bench.transitions import ROW_NBYTES
from tools.bench.turns import OURS

RATES = "mb_per_s"
TIMES = "median_us"
COLOURS = [c for name in ("tab20", "tab20b") for c in plt.get_cmap(name).colors]  # type: ignore[attr-defined]  # of a list
COUNTED = re.compile(r"(?:add|sample|vectors)_(\d+)")
Line = tuple[str, dict[str, float], float | None]
"""A question, each side's figure, and what the machine's limit is, where known."""


def lines(results: Mapping[str, Any], kind: str, limits: Mapping[str, float]) -> list[Line]:
    """Every group of figures of a kind in the results.

    Args:
        results: By script, each a record with its result.
        kind: Part of the name of the groups, `RATES` or `TIMES`.
        limits: Of the machine, MB a second by name.
    """
    lines = []
    for script, record in results.items():
        if script == "bench_limits":
            continue
        for path, figures in groups(record["result"]):
            if not any(kind in part for part in path):
                continue
            # Names of libraries; what is by numbers of rows compares none.
            sides = {
                name: float(figure)
                for name, figure in figures.items()
                if _drawn(figure) and not name.isdigit()
            }
            # Ours beside each other are compared in the tables.
            if any(name.startswith(OURS) for name in sides):
                title = _title(script[6:], [part.replace(kind, "") for part in path])
                lines.append((title, sides, _least_us(script, path, limits)))
    return lines


def _title(script: str, path: list[str]) -> str:
    """What a line is of: the script, and where in its result."""
    where = [words(part).strip() for part in path if part.strip("_") not in ("", script)]
    return ": ".join(filter(None, [words(script), ", ".join(where)]))


def _drawn(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > 0


def _least_us(script: str, path: tuple[str, ...], limits: Mapping[str, float]) -> float | None:
    """What copying as many bytes takes of the vector transitions, if it is they."""
    counted = COUNTED.search(" ".join(path))
    if script not in ("bench_add", "bench_sample") or counted is None:
        return None
    rate = limits.get("memcpy")
    return int(counted[1]) * ROW_NBYTES / rate if rate else None


def draw(lines: list[Line], limits: Mapping[str, float], unit: str, target: Path) -> None:
    """Draw lines of marks, with the limits of the whole axis, into an SVG file."""
    sides = sorted({side for _, figures, _ in lines for side in figures})
    # Ours first, in the same colour in every figure.
    sides.sort(key=lambda side: not side.startswith(OURS))
    height = 1.2 + 0.16 * len(sides) / 3 + 0.24 * len(lines)
    figure, axis = plt.subplots(figsize=(9, height), layout="constrained")
    for number, side in enumerate(sides):
        places = [(f[side], -row) for row, (_, f, _) in enumerate(lines) if side in f]
        ours = side.startswith(OURS)
        x, y = zip(*places, strict=True)
        axis.scatter(
            x,
            y,
            s=34,
            label=words(side),
            color=COLOURS[number % len(COLOURS)],
            marker="D" if ours else "o",
            zorder=3 if ours else 2,
        )
    least = [(us, -row) for row, (_, _, us) in enumerate(lines) if us is not None]
    if least:
        x, y = zip(*least, strict=True)
        label = "memcpy of as many bytes"
        axis.scatter(x, y, marker="|", s=120, color="0.3", label=label)
    for style, (name, limit) in zip("-:", limits.items(), strict=False):
        axis.axvline(limit, color="0.3", linewidth=1, linestyle=style, label=name)
    axis.set_xscale("log")
    axis.set_xlabel(unit)
    axis.set_yticks([-row for row in range(len(lines))], [t for t, _, _ in lines])
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(visible=True, color="0.9")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    _save(figure, target)


def _save(figure: Any, target: Path) -> None:
    """Write a figure, the same bytes each time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "mmreplay"}):
        figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def limits_of(results: Mapping[str, Any]) -> dict[str, float]:
    """MB a second of the machine by name; empty where they were not measured."""
    result = results.get("bench_limits", {}).get("result", {})
    memory, disk = result.get("memory_mb_per_s", {}), result.get("disk_mb_per_s", {})
    lines = {"memcpy": memory.get("memcpy"), "disk": max(disk.values(), default=None)}
    return {name: rate for name, rate in lines.items() if rate}


def draw_all(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what there is to draw; return the files."""
    limits = limits_of(results)
    drawn = []
    for kind, unit, shown in (
        (RATES, "MB a second (log); further right is better", limits),
        (TIMES, "microseconds (log); further left is better", {}),
    ):
        found = lines(results, kind, limits)
        if found:
            target = folder / f"benchmarks_{kind}.svg"
            draw(found, shown, unit, target)
            drawn.append(target)
    return drawn
