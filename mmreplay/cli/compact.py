"""``mmreplay compact``: a buffer in compressed shards, or out of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import copying_to
from mmreplay.cli.options import (
    BufferPath,
    Json,
    Level,
    check_choice,
    completing,
    parse_path,
    usage_error,
)
from mmreplay.format.sharding import CODECS

RAW = "raw"


def compact(
    path: BufferPath,
    target: Annotated[
        Path,
        typer.Argument(
            parser=parse_path, metavar="TARGET", help="The new buffer's folder.", show_default=False
        ),
    ],
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            metavar="|".join([*CODECS, RAW]),
            autocompletion=completing(*CODECS, RAW),
            help="Codec of the shards; raw for uncompressed mapped files.",
        ),
    ] = "blosc-lz4",
    level: Level = None,
    chunk_crc32c: Annotated[
        bool, typer.Option("--chunk-crc32c", help="A checksum for every chunk.")
    ] = False,
    json: Json = False,
) -> None:
    """Copy a buffer into compressed Zarr shards, or back into plain files."""
    check_choice("--codec", codec, (*CODECS, RAW))
    if codec == RAW and (level is not None or chunk_crc32c):
        raise usage_error(
            "--level and --chunk-crc32c need a codec that compresses, got --codec raw"
        )
    from mmreplay.buffer.copy_rows import compact as copy

    with copying_to(target), show.waiting("copying") as progress:
        made = copy(
            path,
            target,
            codec=None if codec == RAW else codec,  # type: ignore[arg-type]  # checked above
            level=level,
            chunk_crc32c=chunk_crc32c,
            progress=progress,
        )
    if json:
        show.print_json({**asdict(made), "path": str(path), "target": str(target)})
        return
    for note in made.notes:
        show.print_line(f"note {note}")
    show.print_line(
        f"{target}: {show.plural(made.rows, 'row')}, "
        f"{show.format_size(made.nbytes_before)} -> {show.format_size(made.nbytes)}"
    )
