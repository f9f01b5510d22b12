"""``mmreplay bench``: how fast this buffer is on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.options import BufferPath, Json, parse_count, usage_error

if TYPE_CHECKING:
    from mmreplay.bench import Rate, SpeedReport


def bench(
    path: BufferPath,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", parser=parse_count, metavar="N", help="Steps a batch."
        ),
    ] = 256,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="For each figure.")
    ] = 1.0,
    json: Json = False,
) -> None:
    """Measure draws from memory and from the disk, and say what would be faster.

    Reads only. For figures of the disk it drops from the page cache the pages
    of the rows that it has just drawn, and of the files, the largest first,
    those that it reads through; where pages hang together, all of the buffer.
    Memory is as it was before.
    """
    from mmreplay.bench import measure_speed

    if not seconds > 0:
        raise usage_error(f"--seconds must be above 0, got {seconds}")
    report = measure_speed(path, batch_size, seconds)
    if json:
        show.print_json(asdict(report))
    else:
        _print(str(path), report)


def _print(name: str, report: SpeedReport) -> None:
    larger = f"{report.larger_size:,}"
    kinds: list[tuple[str, str, Rate | None]] = [
        ("in memory", f"{report.batch_size:,}", report.warm),
        ("in memory", larger, report.larger),
        ("on disk, rows read at once", f"{report.batch_size:,}", report.cold),
        ("on disk, one by one", f"{report.batch_size:,}", report.unasked),
    ]
    show.print_table(
        ["rows", "batch", "steps/s", "MB/s"],
        [
            [what, size, "-", "-"]
            if rate is None
            else [what, size, show.count(rate.rows_per_s), show.number(rate.mb_per_s)]
            for what, size, rate in kinds
        ],
    )
    disk = report.disk_mb_per_s
    read = "unknown" if disk is None else f"{show.number(disk)} MB/s from end to end"
    show.print_facts(
        name,
        [
            ("disk", f"{read}, {report.file_system}"),
            ("memory", str(report.memory)),
            *(("advice", advice) for advice in report.advice),
        ],
    )
