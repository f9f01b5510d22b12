"""Is any line of the benchmarks slower than at an earlier commit?

``python -m tools.bench.against REVISION [SCRIPT...]`` exports the revision into a
temporary folder, builds its kernels there, and runs the scripts of both trees in turns,
each with its own package and without other libraries. It compares lines by their keys
in the JSON that the scripts print. A line is below where both its best and its median
over the rounds are below --bound of the revision's speed. Scripts with such a line run
--more rounds before that is said. A line that is below is called slower if it was below
in so many rounds as a line at the bound is in at most 1 of 20 runs (sign test: 7 of 8
rounds), and else unclear: two runs of one tree differ, too. The exit status is 1 if a
line is below, slower or unclear, or if a script failed in this tree.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench import make_peers
from tools.bench.all import OTHERWISE, PEERS_OF, SCRIPTS
from tools.bench.turns import OURS

Line = tuple[str, ...]
"""Keys of one figure in the JSON of its script."""
Figures = dict[Line, float]
BETTER_HIGH = ("per_s", "a_second", "frames_s", "steps_s")
BETTER_LOW = ("us", "ms", "s", "seconds", "busy")
"""Units as the last word of a key, or as one of its words."""
CHANCE = 0.05
"""How often a line at the bound may be called slower, at most."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One line in both trees.

    Attributes:
        script: Its script.
        line: Its keys.
        now: Best and median figure of this tree.
        before: Best and median figure of the revision.
        best: Speed of this tree over that of the revision, by the best rounds.
        middle: The same by the medians.
        rounds: The same of each round.
    """

    script: str
    line: Line
    now: tuple[float, float]
    before: tuple[float, float]
    best: float
    middle: float
    rounds: tuple[float, ...]

    @property
    def speed(self) -> float:
        """The higher of both ratios: noise seldom lowers both."""
        return max(self.best, self.middle)

    def said(self, bound: float) -> str:
        """``"slower"``, ``"unclear"``, or nothing of a line at or above the bound."""
        if self.speed >= bound:
            return ""
        count, below = len(self.rounds), sum(ratio < bound for ratio in self.rounds)
        chance = sum(math.comb(count, each) for each in range(below, count + 1)) / 2**count
        return "slower" if chance <= CHANCE else "unclear"


def higher_is_better(line: Line) -> bool | None:
    """Say how a figure is read, by the last key that names a unit.

    Returns:
        None where no key names a unit of time or of speed.
    """
    for key in reversed(line):
        if any(unit in key for unit in BETTER_HIGH):
            return True
        if any(word in BETTER_LOW for word in key.split("_")):
            return False
    return None


def own_lines(result: Mapping[str, Any]) -> Figures:
    """Times and speeds of mmreplay in the JSON of one script.

    Beside a key that begins with ``mmreplay``, other keys are of other libraries.
    """
    return {
        line: value
        for line, value in _figures(result, ())
        if value > 0 and higher_is_better(line) is not None
    }


def _figures(results: Mapping[str, Any], above: Line) -> Iterator[tuple[Line, float]]:
    several = any(key.startswith(OURS) for key in results)
    for key, value in results.items():
        if several and not key.startswith(OURS):
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, (*above, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*above, key), float(value)


def compare(script: str, now: Sequence[Figures], before: Sequence[Figures]) -> list[Compared]:
    """Compare the lines that every round of both trees has.

    Args:
        script: Its name.
        now: Lines of this tree, a round each.
        before: Lines of the revision.
    """
    rounds = [*now, *before]
    lines = [line for line in now[0] if all(line in each for each in rounds)]
    found = []
    for line in lines:
        high = bool(higher_is_better(line))
        sides = [each[line] for each in now], [each[line] for each in before]
        ours, theirs = (_best_and_median(figures, high=high) for figures in sides)
        best, middle, *each_round = (
            mine / other if high else other / mine
            for mine, other in [*zip(ours, theirs, strict=True), *zip(*sides, strict=True)]
        )
        found.append(Compared(script, line, ours, theirs, best, middle, tuple(each_round)))
    return found


def _best_and_median(values: list[float], *, high: bool) -> tuple[float, float]:
    return (max(values) if high else min(values)), median(values)


def table(lines: Sequence[Compared], bound: float) -> str:
    """A table of all lines in the order of their speed, the slowest ones first."""
    header = ("", "now/before: best", "median", "median now", "before", "line")
    rows = [header] + [
        (
            line.said(bound),
            f"{line.best:.3f}",
            f"{line.middle:.3f}",
            f"{line.now[1]:.4g}",
            f"{line.before[1]:.4g}",
            f"{line.script}: {' '.join(line.line)}",
        )
        for line in sorted(lines, key=lambda line: line.speed)
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(header) - 1)]
    return "\n".join("  ".join([*map(str.rjust, row, widths), row[-1]]).rstrip() for row in rows)


def summary(lines: Sequence[Compared], bound: float) -> str:
    """How many lines there are, and how many of them are below the bound."""
    if not lines:
        return "no lines to compare"
    said = [each.said(bound) for each in lines]
    middle = median(each.middle for each in lines)
    return (
        f"{len(lines)} lines, {len(said) - said.count('')} below {bound:g}, "
        f"{said.count('unclear')} of these unclear; median ratio {middle:.3f}"
    )


def export(root: Path, revision: str, folder: Path) -> None:
    """Write a revision's files into a folder, and build its kernels."""
    archive = folder / "tree.tar"
    git = ["git", "-C", str(root), "archive", f"--output={archive}", revision]
    subprocess.run(git, check=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], check=True)
    archive.unlink()
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=True)


def refuse_other_package(python: Path, tree: Path) -> None:
    """Check that scripts in a tree import the package of that tree.

    Raises:
        SystemExit: They import another one.
    """
    program = "import mmreplay; print(mmreplay.__file__)"
    done = subprocess.run(
        [str(python), "-c", program], cwd=tree, capture_output=True, text=True, check=True
    )
    if not Path(done.stdout.strip()).is_relative_to(tree):
        raise SystemExit(
            f"{python} imports {done.stdout.strip()} in {tree}. "
            "Pass --python with an interpreter that imports it from there."
        )


def run(script: str, tree: Path, options: argparse.Namespace) -> Figures:
    """Run one script of a tree and return its lines.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    module, *given = OTHERWISE.get(script, (script,))
    command = [str(options.python), "-m", f"tools.bench.{module}", *given]
    command += ["--quick"] if options.quick else []
    command += ["--folder", options.folder] if options.folder else []
    command += ["--peers", ""] if script in PEERS_OF else []
    command += shlex.split(options.options)
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, check=False, timeout=options.timeout
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script} took more than {options.timeout:g} s") from error
    if done.returncode:
        raise RuntimeError(f"{script} failed: {done.stderr.strip()[-1000:]}")
    return own_lines(json.loads(done.stdout.splitlines()[-1]))


def measure(script: str, trees: tuple[Path, Path], options: argparse.Namespace) -> list[Compared]:
    """Run one script in both trees in turns, and again where a line is slower.

    Args:
        script: One of `SCRIPTS`.
        trees: This tree and that of the revision.
        options: Of the command.

    Raises:
        RuntimeError: It failed in one of them.
    """
    figures: tuple[list[Figures], list[Figures]] = [], []
    lines: list[Compared] = []
    for rounds in (options.rounds, options.more):
        for _ in range(rounds):
            order = (0, 1) if len(figures[0]) % 2 else (1, 0)
            for side in order:
                figures[side].append(run(script, trees[side], options))
        lines = compare(script, *figures)
        if all(each.speed >= options.bound for each in lines):
            break
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit status."""
    options = _options(arguments)
    lines: list[Compared] = []
    failed = []
    with tempfile.TemporaryDirectory(prefix="mmreplay-against-") as name:
        now, before = make_peers.ROOT, Path(name).resolve()
        export(now, options.revision, before)
        for tree in (now, before):
            refuse_other_package(options.python, tree)
        for script in options.scripts or SCRIPTS:
            module = OTHERWISE.get(script, (script,))[0]
            if not (before / "tools" / "bench" / f"{module}.py").exists():
                print(f"{script}: not in {options.revision}", flush=True)
                continue
            try:
                found = measure(script, (now, before), options)
            except RuntimeError as error:
                failed.append(script)
                print(error, file=sys.stderr, flush=True)
                continue
            lines += found
            print(f"{script}: {summary(found, options.bound)}", flush=True)
            if below := [each for each in found if each.speed < options.bound]:
                print(table(below, options.bound), flush=True)
    print(table(lines, options.bound))
    print(f"in all: {summary(lines, options.bound)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    slower = any(each.speed < options.bound for each in lines)
    return 1 if slower or failed else 0


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="what to compare with, such as a commit")
    parser.add_argument(
        "scripts",
        nargs="*",
        choices=[[], *SCRIPTS],
        metavar="SCRIPT",
        help="such as bench_add; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="small and short runs")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each tree")
    parser.add_argument(
        "--more", type=int, default=5, help="further runs of scripts with a line below --bound"
    )
    parser.add_argument("--bound", type=float, default=0.95, help="least speed over the revision's")
    parser.add_argument("--options", default="", help="of one script: --options='--rows=100000'")
    parser.add_argument("--folder", help="where scripts put files; default: TMPDIR")
    parser.add_argument("--timeout", type=float, default=3600, help="of a run, s")
    found = make_peers.python_of(make_peers.FOLDER)
    python = found if found.exists() else Path(sys.executable)
    # Scripts run in the folders of both trees: a path from here must lead there, too.
    parser.add_argument(
        "--python", type=lambda text: Path(text).absolute(), default=python, help="runs the scripts"
    )
    options = parser.parse_args(arguments)
    if options.options and len(options.scripts) != 1:
        parser.error("--options are of one script. Name it.")
    return options


if __name__ == "__main__":
    sys.exit(main())
