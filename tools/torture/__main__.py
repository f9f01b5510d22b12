"""``python -m tools.torture``: attack commits and readers, and print what was found."""

from __future__ import annotations

import argparse
import sys
import time

from tools.torture import actors, forged, kills, mutants, mutate, outages, powerloss
from tools.torture.powerloss import Report


def show(name: str, report: Report, started: float) -> int:
    """Print a report and return the exit code."""
    seconds = time.monotonic() - started
    print(f"{name}: {report.states} states in {seconds:.0f} s, {dict(report.seen)}")
    for kind, count in report.findings.most_common():
        print(f"  {count} x {kind}; first: {report.examples[kind]}")
    print(f"  {report.findings.total()} findings")
    return 1 if report.findings else 0


def main() -> int:
    """Run one attack."""
    parser = argparse.ArgumentParser(prog="python -m tools.torture")
    commands = parser.add_subparsers(dest="command", required=True)
    power = commands.add_parser("powerloss", help="simulated power cuts")
    power.add_argument("--states", type=int, default=5000)
    power.add_argument("--seed", type=int, default=1)
    killed = commands.add_parser("kills", help="writers killed with SIGKILL")
    killed.add_argument("--points", type=int, default=300)
    killed.add_argument("--seed", type=int, default=1)
    broken = commands.add_parser("mutants", help="protocols with a rule missing")
    broken.add_argument("--states", type=int, default=8000)
    broken.add_argument("--seed", type=int, default=1)
    tampered = commands.add_parser("forged", help="files that were tampered with")
    tampered.add_argument("--format", choices=forged.FORMATS, default=None)
    tampered.add_argument("--count", type=int, default=10_000, help="of each format")
    tampered.add_argument("--first", type=int, default=0, help="number of the first")
    tampered.add_argument("--seed", type=int, default=1)
    tampered.add_argument("--tell", action="store_true", help="print each try")
    harmed = commands.add_parser("mutate", help="buffers whose files were damaged")
    harmed.add_argument("--count", type=int, default=10_000)
    harmed.add_argument("--first", type=int, default=0, help="number of the first")
    harmed.add_argument("--seed", type=int, default=1)
    harmed.add_argument("--tell", action="store_true", help="print each try")
    played = commands.add_parser("actors", help="eight writers and a learner")
    played.add_argument("--kills", type=int, default=1000)
    played.add_argument("--seed", type=int, default=1)
    real = commands.add_parser("outages", help="real power cuts on loop mounts; root")
    real.add_argument("--kind", choices=outages.KINDS, default=None)
    real.add_argument("--cuts", type=int, default=500, help="of each file system")
    real.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    if arguments.command == "forged":
        return _forged(arguments, started)
    if arguments.command == "outages":
        return _outages(arguments, started)
    if arguments.command == "mutants":
        return 1 if mutants.hunt(arguments.states, arguments.seed) else 0
    if arguments.command == "mutate":
        options = arguments.count, arguments.seed, arguments.first, arguments.tell
        return show("mutate", mutate.attack(*options), started)
    if arguments.command == "actors":
        return show("actors", actors.attack(arguments.kills, arguments.seed), started)
    if arguments.command == "kills":
        return show("kills", kills.attack(arguments.points, arguments.seed), started)
    report = powerloss.attack(arguments.states, arguments.seed)
    return show(arguments.command, report, started)


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


def _forged(arguments: argparse.Namespace, started: float) -> int:
    code = 0
    for name in [arguments.format] if arguments.format else forged.FORMATS:
        report = forged.attack(
            name, arguments.count, arguments.seed, arguments.first, arguments.tell
        )
        code |= show(f"forged {name}", report, started)
    return code


if __name__ == "__main__":
    sys.exit(main())
