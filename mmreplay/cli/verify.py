"""``mmreplay verify``: every claim of the files, checked."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import FAILED, code_of, message_of
from mmreplay.cli.options import BufferPath, Json

if TYPE_CHECKING:
    from mmreplay.verify import VerifyReport

LISTED = 50


def verify(
    path: BufferPath,
    deep: Annotated[
        bool, typer.Option("--deep/--fast", help="Read all data and compare its checksums, or not.")
    ] = True,
    json: Json = False,
) -> None:
    """Check metadata, files, commit records, flags and checksums; exits 1 on damage."""
    from mmreplay.verify import verify_buffer

    started = perf_counter()
    try:
        with show.waiting("verifying") as progress:
            report = verify_buffer(path, progress, deep=deep)
    except Exception as error:
        if json and code_of(error) is not None:
            _print_refusal(path, deep, error)
        raise
    seconds = perf_counter() - started
    if json:
        facts = {**asdict(report), "path": str(report.path), "ok": report.ok}
        facts["error"] = None
        if not report.deep:
            facts["unsummed_rows"] = None
        facts["findings"] = [
            {**asdict(finding), "damage": finding.damage} for finding in report.findings
        ]
        show.print_json(facts)
    else:
        _print(str(path), report, seconds)
    if not report.ok:
        raise typer.Exit(FAILED)


def _print_refusal(path: Path, deep: bool, error: Exception) -> None:
    """Print the error as JSON too; the line on stderr follows."""
    facts = {"ok": False, "findings": [], "deep": deep, "error": message_of(error)}
    show.print_json({"path": os.path.abspath(path), **facts})


def _print(name: str, report: VerifyReport, seconds: float) -> None:
    for finding in report.findings[:LISTED]:
        where = finding.file
        if finding.offset is not None:
            where += f" byte {show.count(finding.offset)}"
        mark = "DAMAGE" if finding.damage else "note"
        show.print_line(f"{mark} {finding.kind}: {where}: {finding.message}")
    unlisted = max(0, len(report.findings) - LISTED) + report.omitted
    if unlisted:
        show.print_line(f"... and {show.count(unlisted)} more findings")
    damaged = sum(finding.damage for finding in report.findings) + report.omitted
    others = len(report.findings) + report.omitted - damaged
    rate = show.format_size(report.nbytes / seconds)
    facts = [
        ("findings", f"{show.count(damaged)} of damage, {show.plural(others, 'note')}"),
        (
            "checksums",
            f"{show.plural(report.blocks, 'block')} compared, "
            f"{show.count(report.skipped_blocks)} overwritten by a writer "
            "during the check"
            if report.deep
            else "not looked at",
        ),
        ("rows", _rows(report)),
        ("read", f"{show.format_size(report.nbytes)} in {seconds:.1f} s, {rate}/s"),
    ]
    show.print_facts(f"{name}: {'whole' if report.ok else 'DAMAGED'}", facts)
    if not report.ok:
        # Not folded, so that it can be copied whole.
        repair = f"mmreplay repair {shlex.quote(name)} TARGET"
        way = f"restore it from a copy, or copy its intact rows with {repair}"
        show.print_line(f"way out    {way}")


def _rows(report: VerifyReport) -> str:
    if report.rows is None:
        return "not counted: the file that says which rows there are is damaged"
    rows = f"{show.count(report.rows)} committed rows alive"
    if report.deep:
        unsummed = show.count(report.unsummed_rows)
        rows += f", of them {unsummed} in blocks without a checksum yet"
    if report.uncommitted_rows:
        rows += f"; {show.count(report.uncommitted_rows)} published since"
    return rows
