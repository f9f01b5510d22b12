"""From any reader to any writer, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmreplay.convert.base import Progress, Reader, Report, Writer
from mmreplay.convert.count import Beginnings
from mmreplay.convert.description import Description
from mmreplay.errors import SourceError, called


def transfer(
    reader: Reader,
    open_writer: Callable[[Description], Writer],
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write everything that a reader gives; the target appears last, whole.

    Args:
        reader: The source.
        open_writer: Makes the target for a description.
        strict: Refuse what is guessed.
        progress: Called after each block with (rows done, rows in all).

    Raises:
        SourceError: The source is not what it says, or strict and doubtful.
    """
    begin = time.monotonic()
    description = reader.describe()
    refuse_doubts(reader, strict)
    rows = episodes = 0
    beginnings = Beginnings(description.num_envs)
    with open_writer(description) as writer:
        for block in reader.blocks():
            writer.write(block)
            rows += len(block)
            episodes += int(beginnings.look(block).sum())
            if progress is not None:
                called("progress", progress, rows, description.rows)
        if rows != description.rows:
            raise SourceError(
                f"the source ended after {rows} rows, expected the "
                f"{description.rows} that it describes; it was cut"
            )
        refuse_doubts(reader, strict)
        _refuse_losses(writer, strict)
        writer.finish()
    return Report(
        rows=rows,
        episodes=episodes,
        nbytes=writer.nbytes,
        seconds=time.monotonic() - begin,
        notes=(*reader.report.notes, *writer.notes.notes),
        doubts=(*reader.report.doubts, *writer.notes.doubts),
    )


def refuse_doubts(reader: Reader, strict: bool) -> None:
    """Refuse what a source leaves to be guessed, as far as it is known by now.

    Raises:
        SourceError: Strict, and there is something.
    """
    if strict and reader.report.doubts:
        raise SourceError(
            f"{reader.report.doubts[0]}, expected a source that leaves nothing to be "
            "guessed (strict); tell what it is by options, or load without strict"
        )


def _refuse_losses(writer: Writer, strict: bool) -> None:
    if strict and writer.notes.doubts:
        raise SourceError(
            f"{writer.notes.doubts[0]}, expected a target that holds everything "
            "(strict); choose another format, or convert without strict"
        )


@contextmanager
def told_of(source: Path) -> Iterator[None]:
    """Name the source in what is wrong with its rows."""
    try:
        yield
    except SourceError as error:
        if str(source) not in str(error):
            error.add_note(f"while reading {source}")
        raise
