"""``mmreplay verify``: every claim of the files, checked."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import FAILED
from mmreplay.cli.options import BufferPath, Json

if TYPE_CHECKING:
    from mmreplay.verify import VerifyReport

LISTED = 50


def verify(
    path: BufferPath,
    deep: Annotated[
        bool,
        typer.Option("--deep/--fast", help="Read the data for its checksums, or not."),
    ] = True,
    json: Json = False,
) -> None:
    """Check metadata, files, commit records, flags and checksums; exits 1 on damage."""
    from mmreplay.verify import verify_buffer

    started = perf_counter()
    with show.waiting("verifying") as progress:
        report = verify_buffer(path, progress, deep=deep)
    seconds = perf_counter() - started
    if json:
        facts = {**asdict(report), "path": str(report.path), "ok": report.ok}
        facts["findings"] = [
            {**asdict(finding), "damage": finding.damage} for finding in report.findings
        ]
        show.print_json(facts)
    else:
        _print(str(path), report, seconds)
    if not report.ok:
        raise typer.Exit(FAILED)


def _print(name: str, report: VerifyReport, seconds: float) -> None:
    for finding in report.findings[:LISTED]:
        where = finding.file
        if finding.offset is not None:
            where += f" byte {show.count(finding.offset)}"
        mark = "DAMAGE" if finding.damage else "note"
        typer.echo(f"{mark} {finding.kind}: {where}: {finding.message}")
    unlisted = max(0, len(report.findings) - LISTED) + report.omitted
    if unlisted:
        typer.echo(f"... and {show.count(unlisted)} more findings")
    damaged = sum(finding.damage for finding in report.findings) + report.omitted
    others = len(report.findings) + report.omitted - damaged
    rate = show.size(report.nbytes / seconds)
    show.print_facts(
        f"{name}: {'whole' if report.ok else 'DAMAGED'}",
        [
            ("findings", f"{show.count(damaged)} of damage, "
                         f"{show.plural(others, 'note')}"),
            ("checksums", f"{show.plural(report.blocks, 'block')} compared, "
                          f"{show.count(report.skipped_blocks)} given up by a live "
                          "writer meanwhile" if report.deep else "not looked at"),
            ("rows", f"{show.count(report.rows)} committed rows alive, of them "
                     f"{show.count(report.unsummed_rows)} in blocks without a "
                     "checksum yet"),
            ("read", f"{show.size(report.nbytes)} in {seconds:.1f} s, {rate}/s"),
        ],
    )  # fmt: skip
