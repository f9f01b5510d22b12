"""From any reader to any writer, block by block.

From any format to any other, as the command line asks for it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mmreplay.buffer import opening
from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.convert import registry
from mmreplay.convert.base import Progress, Reader, Report, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Beginnings
from mmreplay.convert.registry import BUFFER, Format
from mmreplay.convert.select import Selection, choose
from mmreplay.convert.staging import STAGED
from mmreplay.errors import FormatError, ReplayError, SchemaError, SourceError, called
from mmreplay.storage.foreign_zarr.remote import url_of


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


Options = dict[str, object]
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
CHOSEN = ("fields", "env_ids")
"""Options of a buffer's reader that have a way of their own to be told."""


def local(path: StrPath, what: str, *, remote: bool = False) -> Path:
    """An absolute path, of something on this machine.

    Args:
        path: As the user gave it.
        what: For the error.
        remote: Let addresses of stores that are read from afar pass.

    Raises:
        FormatError: It is no path, or an address, which would be taken for folders of
            that name, or to write to, a root or what the next run would remove.
    """
    typed = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(typed, str):
        raise FormatError(
            f"{what}: got {type(path).__name__}, expected a path as text or a "
            "pathlib.Path; os.fsdecode makes text of bytes"
        )
    if ADDRESS.match(typed) and not (remote and url_of(typed)):
        raise FormatError(
            f"{what}: got the address {typed!r}, expected a path on this machine; "
            "convert here, and copy the file by a tool of that place"
        )
    found = absolute(path)
    if not remote and not found.name:
        raise FormatError(
            f"{what}: got {typed!r}, the root of all folders, expected the path of a "
            "file or folder to make; give it a name"
        )
    if not remote and found.name.startswith(STAGED):
        raise FormatError(
            f"{what}: got {typed!r}, a name that begins with {STAGED!r}, expected "
            "another: that is how a target is called while it is written, and the next "
            "run removes such a one"
        )
    return found


def refuse_inside(target: Path, source: Path | None) -> None:
    """Refuse a target in the folder of the buffer that is read, if one on disk is.

    The folder itself may be replaced, and a link is: see `staging`.

    Raises:
        FormatError: It is there.
    """
    if source is not None:
        opening.refuse_inside(target, source, target.parent)


def open_source(
    path: Path, found: Format, options: Options, choice: Selection | None = None
) -> Reader:
    """Open a source, of which some is wanted; see `chosen`."""
    choice = choice or Selection()
    if found.name == BUFFER:
        # A buffer does not read what is not wanted.
        options = {**options, "fields": choice.fields, "env_ids": choice.env_ids}
        choice = replace(choice, fields=None, env_ids=None)
    return chosen(registry.open_reader(found, path, **options), choice)


def chosen(reader: Reader, choice: Selection) -> Reader:
    """What of a reader is wanted; see `choose`. An error closes it."""
    try:
        return choose(reader, choice)
    except BaseException:
        reader.close()
        raise


def share(source: Format, target: Format, options: Options) -> tuple[Options, Options]:
    """Give each option to the side, or sides, that take it.

    One that is named ``from.<name>`` or ``to.<name>`` goes to that side alone.

    Raises:
        SchemaError: Neither takes one of them.
    """
    legal = {
        side: set(registry.options_of(each, side)) - set(CHOSEN)
        for each, side in ((source, "open_reader"), (target, "open_writer"))
    }
    taken: dict[str, Options] = {side: {} for side in legal}
    for given, value in options.items():
        only, _, name = given.rpartition(".")
        sides = {"from": ["open_reader"], "to": ["open_writer"]}.get(only, [*legal])
        sides = [side for side in sides if name in legal[side]]
        for side in sides:
            taken[side][name] = value
        if not sides or only not in ("", "from", "to"):
            known = sorted(set().union(*legal.values()))
            raise SchemaError(
                f"option {given!r}: got one that neither {source.name!r} as a source "
                f"nor {target.name!r} as a target takes, expected "
                f"{', '.join(known) or 'none'}; {registry.who_takes(name)}"
            )
    return taken["open_reader"], taken["open_writer"]


@contextmanager
def told_both(options: Options, reading: Options, writing: Options) -> Iterator[None]:
    """Say in what is wrong with a source which options it was given for both sides."""
    both = sorted(options.keys() & reading.keys() & writing.keys())
    try:
        yield
    except ReplayError as error:
        for name in both:
            error.add_note(
                f"option {name!r} was given to both sides; from.{name} or to.{name} "
                "gives it to one"
            )
        raise


def write_target(
    reader: Reader,
    target: Path,
    found: Format,
    options: Options,
    *,
    overwrite: bool,
    strict: bool,
    progress: Progress | None,
) -> Report:
    """Write all that a reader gives into a target of some format."""

    def open_writer(description: Description) -> Writer:
        return registry.open_writer(
            found, target, description, overwrite=overwrite, **options
        )

    return transfer(reader, open_writer, strict=strict, progress=progress)
