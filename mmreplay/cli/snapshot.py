"""``mmreplay snapshot``: a whole buffer elsewhere, taken while writing goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import copying_to
from mmreplay.cli.options import BufferPath, Json, parse_path


def snapshot(
    path: BufferPath,
    target: Annotated[
        Path,
        typer.Argument(
            parser=parse_path, metavar="TARGET", help="The new buffer's folder.", show_default=False
        ),
    ],
    pause: Annotated[
        bool, typer.Option("--pause", help="Let the writer wait instead of overwriting rows.")
    ] = False,
    json: Json = False,
) -> None:
    """Copy a buffer as it is now, also while it is written; shares blocks if it can."""
    from mmreplay.buffer.copy_files import snapshot as take
    from mmreplay.buffer.opening import absolute

    with copying_to(target), show.waiting("copying") as progress:
        made = take(absolute(path), absolute(target), pause=pause, progress=progress)
    if json:
        show.print_json(
            {
                "path": str(path),
                "target": str(target),
                "how": made.how,
                "rows": made.rows,
                "cut_rows": made.cut_rows,
                "firsts": made.firsts,
                "heads": made.heads,
                "nbytes": made.nbytes,
            }
        )
        return
    shared = "copied" if made.how == "copy" else "shared"
    show.print_line(
        f"{target}: {show.plural(made.rows, 'row')}, {show.format_size(made.nbytes)} "
        f"{shared}, {show.plural(made.cut_rows, 'row')} left out that the writer "
        "overwrote during the copy"
    )
