"""``python -m tools.torture``: attack commits and readers, and print what was found."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from tools.torture import (
    actors,
    forged,
    kills,
    loading,
    mutants,
    mutate,
    outages,
    peers,
    powerloss,
    soak,
    uses,
)
from tools.torture.powerloss import Report
from tools.torture.rows import GEOMETRIES, HEAPED, SHARDED, SHARDED_HEAPS


def show(name: str, report: Report, started: float) -> int:
    """Print a report and return the exit code."""
    seconds = time.monotonic() - started
    print(f"{name}: {report.states} states in {seconds:.0f} s, {dict(report.seen)}")
    for kind, count in report.findings.most_common():
        print(f"  {count} x {kind}; first: {report.examples[kind]}")
    print(f"  {report.findings.total()} findings")
    return 1 if report.findings else 0


ENGINES = {"memmap": GEOMETRIES, "heap": HEAPED, "zarr": SHARDED, "zarr-heap": SHARDED_HEAPS}
"""Buffers to attack; those with values that vary apart."""
HEAPS = {"heap": HEAPED, "zarr-heap": SHARDED_HEAPS}
"""Beside the formats of `forged`: buffers with values that vary, whose references,
heaps, records, shards and metadata are forged."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.torture")
    commands = parser.add_subparsers(dest="command", required=True)

    def attack(name: str, description: str, counted: str, count: int) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=description)
        added.add_argument(f"--{counted}", type=int, default=count)
        added.add_argument("--seed", type=int, default=1)
        return added

    for name, description, counted, count in (
        ("powerloss", "simulated power cuts", "states", 5000),
        ("kills", "writers killed with SIGKILL", "points", 300),
    ):
        crash = attack(name, description, counted, count)
        crash.add_argument("--engine", choices=ENGINES, default="memmap")
        if name == "powerloss":
            crash.add_argument("--jobs", type=int, default=1, help="processes")
    attack("mutants", "protocols with a rule missing", "states", 8000)
    for name, description in (
        ("forged", "files that were tampered with"),
        ("mutate", "buffers whose files were damaged"),
    ):
        harm = attack(name, description, "count", 10_000)
        harm.add_argument("--first", type=int, default=0, help="number of the first")
        harm.add_argument("--verbose", action="store_true", help="print each try")
        if name == "forged":
            formats = (*forged.FORMATS, *HEAPS)
            harm.add_argument("--format", choices=formats, default=None)
    attack("actors", "eight writers and a learner", "kills", 1000)
    attack("uses", "learners that count uses", "kills", 300)
    lasting = attack("soak", "five processes for long", "rows", 100_000_000)
    lasting.add_argument("--seconds", type=float, default=1800.0, help="at least")
    loaders = attack("loading", "loaders, whatever happens to them", "count", 100)
    loaders.add_argument("--seconds", type=float, default=0.0, help="at least")
    loaders.add_argument("--first", type=int, default=0, help="number of the first")
    loaders.add_argument("--verbose", action="store_true", help="print each try")
    thin = attack("thin", "thin writers whose shard and ring go; Ray", "count", 100)
    thin.add_argument("--verbose", action="store_true", help="print each try")
    beside = attack("peers", "other ways to keep steps, by one measure", "points", 200)
    beside.add_argument("--side", choices=peers.SIDES, default=None)
    beside.add_argument("--how", choices=peers.ATTACKS, default=None)
    real = attack("outages", "real power cuts on loop mounts; root", "cuts", 500)
    real.add_argument("--kind", choices=outages.KINDS, default=None)
    return parser


def main() -> int:
    """Run one attack."""
    arguments = _parser().parse_args()
    if arguments.command == "thin" and find_spec("ray") is None:
        print("thin needs Ray. Run make install-ray, then this by build/ray/bin/python.")
        return 2
    started = time.monotonic()
    if arguments.command == "forged":
        return _forged(arguments, started)
    if arguments.command == "outages":
        return _outages(arguments, started)
    if arguments.command == "peers":
        return _peers(arguments, started)
    if arguments.command == "mutants":
        return 1 if mutants.hunt(arguments.states, arguments.seed) else 0
    return show(arguments.command, ATTACKS[arguments.command](arguments), started)


def _thin(arguments: argparse.Namespace) -> Report:
    # Ray is in an environment of its own.
    from tools.torture import thin

    return thin.attack(arguments.count, arguments.seed, arguments.verbose)


def _mutate(arguments: argparse.Namespace) -> Report:
    return mutate.attack(arguments.count, arguments.seed, arguments.first, arguments.verbose)


ATTACKS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "powerloss": lambda description: powerloss.attacks(
        description.states, description.seed, description.jobs, ENGINES[description.engine]
    ),
    "kills": lambda description: kills.attack(
        description.points, description.seed, geometries=ENGINES[description.engine]
    ),
    "loading": lambda description: loading.attack(
        description.count,
        description.seed,
        description.first,
        description.seconds,
        description.verbose,
    ),
    "mutate": _mutate,
    "thin": _thin,
    "actors": lambda description: actors.attack(description.kills, description.seed),
    "uses": lambda description: uses.attack(description.kills, description.seed),
    "soak": lambda description: soak.attack(
        soak.Size(description.rows, description.seconds), description.seed, verbose=True
    ),
}


def _outages(arguments: argparse.Namespace, started: float) -> int:
    code = 0
    for kind in [arguments.kind] if arguments.kind else outages.KINDS:
        try:
            report = outages.attack(kind, arguments.cuts, arguments.seed)
        except outages.Unavailable as error:
            print(f"outages {kind}: skipped, as {error}")
            continue
        code |= show(f"outages {kind}", report, started)
    return code


def _peers(arguments: argparse.Namespace, started: float) -> int:
    for side in [arguments.side] if arguments.side else peers.SIDES:
        for how in [arguments.how] if arguments.how else peers.ATTACKS:
            report = peers.attack(side, how, arguments.points, arguments.seed)
            show(f"peers {side} {how}", report, started)
    return 0


def _forged(arguments: argparse.Namespace, started: float) -> int:
    code = 0
    tries = arguments.count, arguments.seed, arguments.first, arguments.verbose
    for name in [arguments.format] if arguments.format else (*forged.FORMATS, *HEAPS):
        if name in HEAPS:
            report = mutate.attack(*tries, HEAPS[name])
        else:
            report = forged.attack(name, *tries)
        code |= show(f"forged {name}", report, started)
    return code


if __name__ == "__main__":
    sys.exit(main())
