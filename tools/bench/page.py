"""Write docs/benchmarks.md and README's table of ratios from the recorded figures.

``python -m tools.bench.page`` reads benchmarks.json (what `tools.bench.all` recorded)
and recorded.json (figures of other commands, kept with the command that printed them),
both in docs/figures. `questions` says which figures answer which question.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench import held_to, tables
from tools.bench.questions import QUESTIONS, Figure, Question, Ratios

ROOT = Path(__file__).resolve().parents[2]
RAW, RECORDED = "benchmarks.json", "recorded.json"
NAMES = {
    "bare_ray": "bare Ray",
    "cpprb": "cpprb",
    "cpprb_mmap": "cpprb, mmap",
    "cpprb_step": "cpprb, a step at a time",
    "h5py": "h5py",
    "lmdb": "LMDB",
    "mmreplay_memmap": "mmreplay's mapped files",
    "np_memmap": "np.memmap",
    "np_savez": "np.savez",
    "original": "the original",
    "padded": "padded rows",
    "pandas_inexact": "pandas, inexact",
    "pyarrow_alone": "pyarrow alone",
    "ray_data": "Ray Data",
    "rings-1": "one ring",
    "rings-2": "two rings",
    "rllib": "RLlib",
    "save_file": "safetensors",
    "sqlite": "SQLite",
    "stable_baselines3": "Stable-Baselines3",
    "synced_copy": "a synced copy",
    "tensorstore_cached": "tensorstore, cached",
    "tensors": "tensors in RAM",
    "torch_save": "torch.save",
    "torchrl": "TorchRL",
    "torchrl_lazy_memmap": "TorchRL, LazyMemmapStorage",
    "transfer_queue": "TransferQueue",
    "zarr_python": "zarr-python",
}
OTHER_COMMANDS = {
    "bench_beyond_8": "bench_beyond --times 8",
    "bench_beyond_small": "bench_beyond --row-nbytes 168",
}
NONE = "\N{EN DASH}"
OF_OTHERS = ("fastest",)
"""Names among ratios that are no library: the lowest ratio of the same line."""
README_SIDES = {
    "np.memmap": ("np_memmap",),
    "TorchRL": ("torchrl", "torchrl_lazy_memmap"),
    "cpprb": ("cpprb", "cpprb_mmap"),
    "Stable-Baselines3": ("stable_baselines3",),
}
README_ROWS = (
    ("add 1 transition to a full ring", "bench_add", "speedup add_1_full_ring"),
    ("add a block of 1,024", "bench_add", "speedup add_1024_full_ring"),
    ("draw 256 at random", "bench_sample", "sample_256 speedup_of_mmreplay"),
    ("draw 256 by priority and update them", "bench_prioritized", "turn_256 speedup_of_mmreplay"),
    ("draw 32 sequences of 50", "bench_sequences", "speedup"),
    ("draw 256 three-step returns", "bench_transforms", "n_step speedup_of_mmreplay"),
    ("draw 256 frames of 28 KB, none in memory", "bench_cold", "uniform_256_x_28_kb speedup"),
    ("ring 4 times larger than memory: draw 256", "bench_beyond", "draw_speedup_of_mmreplay"),
    ("the same, adds beside the draws", "bench_beyond", "add_speedup_of_mmreplay"),
)
HEAD = """# Benchmarks

<!-- Written by `python -m tools.bench.page`; do not edit. -->

Each script in `tools/bench` asks one question in its first line, measures both
sides in turns in one process, checks that both sides draw the right rows, and
prints one line of JSON: ratios first, then the raw medians.

A ratio is how many times as fast mmreplay is; below 1 the other library is faster.
It is the median of the ratios of each turn. The machines are virtual and were
shared: where two runs differ, the ratio moves less than the times do. All figures,
with those that are not shown here, are in
[figures/benchmarks.json](figures/benchmarks.json), with the libraries' versions;
figures of other commands are in [figures/recorded.json](figures/recorded.json).
[Design notes](design-notes.md#measurements) explain what was missed, and how
figures moved.
"""
RUN = """## Run them

```sh
python3 -m tools.bench.make_peers      # once: build/peers, pinned, minutes and 3 GB
.venv/bin/python -m tools.bench.all    # hours; 10 GB of disk
.venv/bin/python -m tools.bench.all bench_cold bench_add      # some of them
.venv/bin/python -m tools.bench.all --quick        # minutes; into build/bench
.venv/bin/python -m tools.bench.all --redraw                  # runs nothing
.venv/bin/python -m tools.bench.page                          # this page alone
.venv/bin/python -m tools.bench.against HEAD~1 bench_add      # is a line slower now?
```

`all` runs the scripts in the environment of the peers, if it was made, and
records what each printed, with the day, the machine, its load and the libraries'
versions. From it come this page, the plots and README's table. A script that fails
leaves its last record.

`against` compares this tree with a commit: it runs the scripts of both in turns, each
with its own package and without other libraries, and prints the ratio of every line.
It ends with status 1 if best and median of a line are below 0.95 of the commit's speed.
Two runs of one tree differ by 10 % on a shared machine: such a line is called slower
where nearly all rounds are below, 7 of 8, and else unclear. Then run more
(`--rounds 10 --more 10`).

One alone, with its own options (`--help` lists them):

```sh
.venv/bin/python -m tools.bench.bench_add --quick
build/peers/bin/python -m tools.bench.bench_prioritized  # --many 10000000: less memory
build/peers/bin/python -m tools.bench.bench_tree         # 3 GB of memory
build/peers/bin/python -m tools.bench.bench_transforms   # 3 GB of memory
build/peers/bin/python -m tools.bench.bench_pixels       # 3 GB of disk
build/peers/bin/python -m tools.bench.bench_cold         # 4 GB of disk
build/peers/bin/python -m tools.bench.bench_beyond       # 10 GB of disk
build/peers/bin/python -m tools.bench.bench_ragged       # 3 GB of disk; starts Ray
```

`--quick` is small and takes seconds, `--folder` says where the files go (a real
disk, not tmpfs), `--peers cpprb,skrl` names libraries and `--peers ""` none. With
pytest in that environment, `python -m pytest tests/bench -m peer` runs each once,
small.
"""

Records = Mapping[str, Mapping[str, Any]]


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """Return what stands under the keys of a path in a record's result, or None."""
    place: Any = record["result"]
    for key in path.split():
        if not isinstance(place, Mapping) or key not in place:
            return None
        place = place[key]
    return place


def name_of(side: str) -> str:
    """The name of a side as it is printed."""
    return NAMES.get(side, side.replace("_", " "))


def ratio_table(question: Question, record: Mapping[str, Any]) -> list[str]:
    """Lines of the table of one question's ratios: a column for each library."""
    found: list[tuple[Ratios, dict[str, Any]]] = []
    for row in question.ratios:
        ratios = look_up(record, row.ratios)
        if isinstance(ratios, Mapping) and ratios:
            found.append((row, {k: v for k, v in ratios.items() if k not in OF_OTHERS}))
    sides = sorted({side for _, ratios in found for side in ratios})
    if not found:
        return []
    unit = f" ({question.unit})" if question.unit else ""
    heads = ["", f"mmreplay{unit}", *(f"over {name_of(side)}" for side in sides)]
    lines = [_row(heads), "|---|" + "---:|" * (len(heads) - 1)]
    for row, ratios in found:
        amounts = look_up(record, row.amounts) if row.amounts else None
        ours: Any = amounts
        if isinstance(amounts, Mapping):
            ours = amounts.get(row.ours)
        cells = [row.label, "" if ours is None else tables.figure(ours)]
        for side in sides:
            cell = ""
            if side in ratios:
                cell = f"**{tables.figure(ratios[side])}**"
                theirs = amounts.get(side) if isinstance(amounts, Mapping) else None
                if theirs is not None:
                    cell += f" ({tables.figure(theirs)})"
            cells.append(cell)
        lines.append(_row(cells))
    return lines


def figure_table(figures: Sequence[Figure], record: Mapping[str, Any]) -> list[str]:
    """Lines of the table of figures without a peer."""
    lines = []
    for row in figures:
        found = look_up(record, row.path)
        if isinstance(found, Mapping):
            plain = {k: v for k, v in found.items() if not isinstance(v, Mapping | list)}
            found = ", ".join(
                f"{name_of(key)} **{tables.figure(value)}**" for key, value in plain.items()
            )
        elif found is not None:
            found = f"**{tables.figure(found)}**"
        if found:
            lines.append(_row([row.label, found]))
    return ["| | |", "|---|---|", *lines] if lines else []


def source(question: Question, record: Mapping[str, Any]) -> str:
    """The command that printed a question's figures, with its day and machine."""
    command = record.get("command")
    if command is None:
        script = OTHER_COMMANDS.get(question.script, question.script)
        command = f"python -m tools.bench.{script}"
    told = [f"`{command}`"]
    told += [record[key] for key in ("day", "machine") if key in record]
    if "load_before" in record:
        told.append(f"load {record['load_before']:g} before")
    if "seconds" in record:
        told.append(f"{record['seconds']:g} s")
    if "day" not in record:
        told.append(record.get("versions", ""))
        told.append("day and machine not recorded")
    return "; ".join(part for part in told if part) + "."


def section(question: Question, records: Records) -> list[str]:
    """Lines of one question: the set-up, its tables and their source."""
    lines = [f"## {question.title}", "", question.setup, ""]
    record = records.get(question.script)
    if record is None:
        return [*lines, "Not measured."]
    for table in (ratio_table(question, record), figure_table(question.figures, record)):
        lines += [*table, ""] if table else []
    return [*lines, source(question, record)]


def page(records: Records, plots: Sequence[str]) -> str:
    """Return the page.

    Args:
        records: Records by script.
        plots: Paths of the plots from the page's folder.
    """
    lines = [HEAD]
    if plots:
        lines += ["## Plots", "", "A diamond is mmreplay.", ""]
        lines += [f"![{Path(plot).stem}]({plot})" for plot in plots]
    for question in QUESTIONS:
        lines += ["", *section(question, records)]
    lines += ["", "## Targets", ""]
    lines += ["What each figure is held to (`tools/bench/held_to.py`).", ""]
    lines += tables.targets(records, held_to.TARGETS)
    return "\n".join([*lines, "", RUN])


def readme_table(records: Records) -> list[str]:
    """Lines of README's table of ratios, with the count of killed writers."""
    lines = [_row(["mmreplay over", *README_SIDES]), "|---|" + "---:|" * len(README_SIDES)]
    for label, script, path in README_ROWS:
        ratios = (look_up(records[script], path) if script in records else None) or {}
        cells = [f"{label} (`{script}`)"]
        for sides in README_SIDES.values():
            ratio = next((ratios[side] for side in sides if side in ratios), None)
            cells.append(NONE if ratio is None else tables.figure(ratio))
        lines.append(_row(cells))
    kills = records.get("torture_peers")
    if kills is not None:
        right, of = look_up(kills, "right_after_kill"), look_up(kills, "attacks")
        cells = [
            "**killed with `kill -9`, reopened**: every step reported as stored "
            f"survived; mmreplay {right['mmreplay']} of {of}"
        ]
        for sides in README_SIDES.values():
            count = next((right[side] for side in sides if side in right), None)
            cells.append(NONE if count is None else f"{count} of {of}")
        lines.append(_row(cells))
    lines += [
        "",
        "In the first six lines the other libraries hold transitions in RAM,",
        "mmreplay in files. All lines but the last are from",
        "[Benchmarks](docs/benchmarks.md), with days, commands and machines (2 shared",
        "virtual cores). The last is from `python -m tools.torture peers --seed 1`",
        "([evidence](docs/evidence.md)); np.memmap is a memory map beside a JSON file,",
        "TorchRL the `dumps` of a `LazyMemmapStorage`. A dash: not measured, or no",
        "such call.",
    ]
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write(
    records: Records,
    document: Path,
    figures: Path,
    plots: Sequence[Path],
    readme: Path | None = None,
) -> list[Path]:
    """Write the page, and README's table where a README is given.

    Args:
        records: Records by script, as benchmarks.json holds them.
        document: The page.
        figures: Folder of recorded.json, if there is one.
        plots: The plots, beside the figures.
        readme: Gets the table between its markers; all else in it stays.

    Returns:
        What was written.
    """
    kept = figures / RECORDED
    others = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    both = {**others, **records}
    shown = [Path(os.path.relpath(plot, document.parent)).as_posix() for plot in plots]
    document.write_text(page(both, shown), "utf-8")
    if readme is None:
        return [document]
    text = tables.with_block(readme.read_text("utf-8"), "readme", readme_table(both))
    readme.write_text(text, "utf-8")
    return [document, readme]


def main() -> int:
    """Write docs/benchmarks.md and README's table."""
    figures = ROOT / "docs" / "figures"
    records = json.loads((figures / RAW).read_text("utf-8"))
    plots = sorted(figures.glob("benchmarks_*.svg"))
    docs = ROOT / "docs" / "benchmarks.md"
    for path in write(records, docs, figures, plots, ROOT / "README.md"):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
