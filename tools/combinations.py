"""Runs random cases of `tests/combinations` against plain-Python twins.

``python -m tools.combinations --cases 5000 --seed 1 --processes 2`` draws cases, which
have one value of each dimension (engine, environments, layout, ends, kind of field,
history and so on), builds each buffer through the public calls beside its twin, and has
samplers, transforms, loaders, exports and so on look at both. It prints how many pairs
of values at least three cases had, and each kind of failure once: its simplest case, as
a script that shows it again. The exit status is 1 if a case failed.

``--mutants`` runs the package with one fault after another instead, and prints by which
case each is noticed; the exit status is 1 if one survives.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

# Tests have no types.
drawing: Any = import_module("tests.combinations.cases")
running: Any = import_module("tests.combinations.run")

TOGETHER = 16
"""Cases that a process is given at once."""


def main(arguments: list[str] | None = None) -> int:
    """Run cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.combinations",
        description="Run random cases of tests/combinations against plain twins.",
    )
    parser.add_argument("--cases", type=int, default=5000, help="default: 5000")
    parser.add_argument("--seed", type=int, default=1, help="of the cases; default: 1")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--consumer",
        action="append",
        metavar="NAME",
        help="run these consumers alone, not those of each case's seed",
    )
    parser.add_argument("--keep", action="store_true", help="show failures as found, not shrunk")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="run the package with one fault after another, by its recorded case and "
        "then by as many as --cases",
    )
    parser.add_argument("--mutant", action="append", metavar="NAME", help="of those, these alone")
    parser.add_argument("--record", action="store_true", help="write down by which cases")
    options = parser.parse_args(arguments)
    if options.mutants:
        return run_mutants(options)
    begin = time.monotonic()
    cases = list(drawing.draw_cases(options.cases, options.seed))
    kinds = defaultdict[Any, list[Any]](list)
    for failure in run(cases, options.consumer, options.processes):
        if failure.kind not in kinds:
            # A long run says at once what it found.
            print(f"{failure.consumer}: {failure.error}", file=sys.stderr, flush=True)
        kinds[failure.kind].append(failure)
    taken = time.monotonic() - begin
    possible = len(drawing.possible_pairs())
    covered = possible - len(running.uncovered(cases))
    print(
        f"{len(cases):,} cases of seed {options.seed} in {taken:.0f} s: "
        f"{sum(map(len, kinds.values()))} failed; {covered:,} of {possible:,} possible "
        "pairs in 3 cases or more"
    )
    for failures in kinds.values():
        failure = failures[0] if options.keep else running.shrunk(failures[0])
        print(f"\n{len(failures)} x {failure.consumer}: {failure.error}\n")
        print(failure.text)
        print(failure.script())
    return 1 if kinds else 0


def run(cases: list[Any], names: list[str] | None, processes: int) -> Iterator[Any]:
    """Run cases in some processes, and yield what failed."""
    if processes == 1:
        yield from run_some(cases, names)
        return
    with ProcessPoolExecutor(processes) as pool:
        starts = range(0, len(cases), TOGETHER)
        blocks = [cases[start : start + TOGETHER] for start in starts]
        for failures in pool.map(run_some, blocks, [names] * len(blocks)):
            yield from failures


def run_some(cases: Any, names: list[str] | None) -> list[Any]:
    """Run cases in this process."""
    failures = (running.run_case(case, names) for case in cases)
    return [failure for failure in failures if failure is not None]


def run_mutants(options: argparse.Namespace) -> int:
    """Run mutants, and print a table; return 1 if one survives."""
    # It keeps the functions of the package that it replaces.
    mutated: Any = import_module("tests.combinations.mutants")
    survivors, found = 0, mutated.recorded()
    print(f"{'mutant':42} {'noticed by':26} {'seed':>9} {'case':>5}  fault")
    for mutant in mutated.MUTANTS:
        if options.mutant and mutant.name not in options.mutant:
            continue
        caught = notice(mutant, options.cases, options.seed, options.record)
        seed, number = ("", "survives")
        if caught is None:
            survivors += 1
        else:
            found[mutant.name] = caught
            seed, number = (str(each) for each in divmod(caught.seed, 1_000_000))
        row = f"{mutant.name:42} {mutant.consumer:26} {seed:>9} {number:>5}"
        print(f"{row}  {mutant.fault}", flush=True)
    if options.record:
        mutated.record(found)
    return 1 if survivors else 0


def notice(mutant: Any, count: int, seed: int, simplify: bool) -> Any:
    """Return a case that fails with a mutant and passes without; None for none."""
    names = [mutant.consumer]
    first = [] if mutant.case is None else [mutant.case]
    for case in [*first, *drawing.draw_cases(count, seed)]:
        with mutant.alive():
            failure = running.run_case(case, names)
        if failure is None or running.run_case(case, names) is not None:
            continue
        if simplify and case not in first:
            with mutant.alive():
                case = running.shrunk(failure).case
            if running.run_case(case, names) is not None:
                case = failure.case
        return case
    return None


if __name__ == "__main__":
    sys.exit(main())
