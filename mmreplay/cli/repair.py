"""``mmreplay repair``: what is proven of a damaged buffer, in a new folder."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import FAILED, copying_to
from mmreplay.cli.options import BufferPath, Json, parse_path

if TYPE_CHECKING:
    from mmreplay.repairing import RepairReport

LISTED = 50


def repair(
    path: BufferPath,
    target: Annotated[
        Path | None,
        typer.Argument(
            parser=parse_path,
            metavar="TARGET",
            show_default=False,
            help="The new buffer's folder; PATH-repaired by default. With --in-place, "
            "the folder for the damaged buffer; PATH-damaged by default.",
        ),
    ] = None,
    keep_unproven: Annotated[
        bool, typer.Option("--keep-unproven", help="Keep rows whose checksum is lost.")
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            parser=parse_path,
            metavar="PATH",
            show_default=False,
            help="A snapshot or copy of the buffer, whose metadata.json is used.",
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place", help="Move the new buffer to PATH, and the damaged one to TARGET."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Restore the newest consistent state, and list lost rows; exits 1 if all are."""
    from mmreplay.buffer.opening import absolute
    from mmreplay.repairing import repair as restore

    named = target or Path(f"{absolute(path)}-repaired")
    # In place it is PATH that is as it was, or the repaired one.
    telling = nullcontext() if in_place else copying_to(named)
    with telling, show.waiting("repairing") as progress:
        made = restore(
            path,
            target,
            keep_unproven=keep_unproven,
            like=like,
            in_place=in_place,
            progress=progress,
        )
    if json:
        facts = {"path": str(made.path), "target": str(made.target)}
        dropped = [asdict(rows) for rows in made.cuts]
        counts = {"rows": made.rows, "cut_rows": made.cut_rows}
        show.print_json({**facts, **counts, "cuts": dropped, "restored": made.restored})
    else:
        _print(made, in_place)
    # What a script believes repaired holds something, or there was nothing to lose.
    if made.cut_rows and not made.rows:
        raise typer.Exit(FAILED)


def _print(made: RepairReport, in_place: bool) -> None:
    for fact in made.restored:
        show.print_line(f"note {fact}")
    for rows in made.cuts[:LISTED]:
        span = f"[{show.count(rows.first)}, {show.count(rows.stop)})"
        show.print_line(f"dropped {rows.why}: environment {rows.env_id}, positions {span}")
    if len(made.cuts) > LISTED:
        show.print_line(f"... and {show.count(len(made.cuts) - LISTED)} more")
    show.print_line(
        f"{made.target}: {show.plural(made.rows, 'row')} copied, "
        f"{show.count(made.cut_rows)} dropped"
    )
    unproven = sum(c.stop - c.first for c in made.cuts if c.why == "unproven")
    if made.rows and unproven:
        show.print_line(
            f"{show.plural(unproven, 'row')} dropped only because a checksum is lost: "
            "--keep-unproven copies them too"
        )
    if in_place:
        show.print_line(f"{made.path} holds the damaged buffer")
    if made.cut_rows and not made.rows:
        way = "restore the buffer from a copy"
        if unproven:
            way += ", or repair it into another folder with --keep-unproven"
        show.print_line(f"no row is left: {way}")
