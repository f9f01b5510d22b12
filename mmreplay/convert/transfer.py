"""Copies all blocks of a reader to a writer, and prepares both ends of a conversion."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mmreplay.buffer import opening
from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.convert import registry
from mmreplay.convert.base import Block, Progress, Reader, Report, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import EpisodeStarts
from mmreplay.convert.registry import BUFFER, Format
from mmreplay.convert.select import Selection, select
from mmreplay.convert.staging import STAGED
from mmreplay.convert.values import ValueSizes
from mmreplay.disk import files
from mmreplay.disk.address import url_of
from mmreplay.errors import FormatError, ReplayError, SchemaError, SourceError, called
from mmreplay.ring import Span


def transfer(
    reader: Reader,
    open_writer: Callable[[Description], Writer],
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write all rows of a reader; the target appears at the end, complete.

    Args:
        reader: The source.
        open_writer: Makes the target for a description.
        strict: Refuse guesses and losses.
        progress: Called after each block with (rows done, rows in all).

    Raises:
        SourceError: The source contradicts its description, or strict and doubtful.
    """
    begin = time.monotonic()
    description = describe(reader)
    refuse_doubts(reader, strict)
    rows = episodes = 0
    beginnings = EpisodeStarts(description.num_envs)
    with open_writer(description) as writer:
        blocks = env_by_env(reader, description) if writer.env_by_env else reader.blocks()
        try:
            for block in blocks:
                writer.write(block)
                rows += len(block)
                episodes += int(beginnings.look(block).sum())
                if progress is not None:
                    called("progress", progress, rows, description.rows)
        finally:
            # A thread that reads ahead ends now, not in the thread that collects it.
            if isinstance(blocks, Generator):
                blocks.close()
        if rows != description.rows:
            raise SourceError(
                f"the source ended after {rows} rows, but it describes "
                f"{description.rows}. The source is truncated."
            )
        refuse_doubts(reader, strict)
        if strict and writer.notes.doubts:
            raise SourceError(
                f"{writer.notes.doubts[0]}, and strict allows no loss. Choose another "
                "format, or convert without strict."
            )
        writer.finish()
    return Report(
        rows=rows,
        episodes=episodes,
        nbytes=writer.nbytes,
        seconds=time.monotonic() - begin,
        notes=(*reader.report.notes, *writer.notes.notes),
        doubts=(*reader.report.doubts, *writer.notes.doubts),
    )


def env_by_env(reader: Reader, description: Description) -> Iterator[Block]:
    """All rows, those of an environment without others between them.

    One pass where they come so, else one for each environment.
    """
    env_ids, seen, apart = -1, np.zeros(description.num_envs, bool), False
    for block in reader.marks() if description.num_envs > 1 else ():
        at = np.flatnonzero(np.diff(block.env_ids, prepend=env_ids))
        begun = block.env_ids[at]
        apart |= bool(seen[begun].any()) or len(np.unique(begun)) < len(begun)
        seen[begun] = True
        env_ids = block.env_ids[-1] if len(block) else env_ids
    if not apart:
        yield from reader.blocks()
        return
    for env_id in np.flatnonzero(description.first < description.stop).tolist():
        first = description.stop.copy()
        first[env_id] = description.first[env_id]
        reader.narrow(Span(first, description.stop))
        for block in reader.blocks():
            rows = block.select(block.env_ids == env_id)
            if len(rows):
                yield rows


def describe(reader: Reader) -> Description:
    """The description of a reader, with what measures the values of its rows."""
    description = reader.describe()
    if not description.schema.varying:
        return description
    values = ValueSizes(reader.measures, description.schema, description.num_envs)
    return replace(description, values=values)


def refuse_doubts(reader: Reader, strict: bool) -> None:
    """Refuse a source whose reader had to guess so far.

    Raises:
        SourceError: Strict, and it had to.
    """
    if strict and reader.report.doubts:
        raise SourceError(
            f"{reader.report.doubts[0]}, and strict allows no guess. Load without "
            "strict if the guess is right, or pass the option that says it, if any."
        )


@contextmanager
def name_source(source: Path) -> Iterator[None]:
    """Add the source's path to errors about its rows."""
    try:
        yield
    except SourceError as error:
        if str(source) not in str(error):
            error.add_note(f"while reading {source}")
        raise


Options = dict[str, object]
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
SELECTED = ("fields", "env_ids")
"""Options of a buffer's reader that `Selection` holds."""


def local(path: StrPath, what: str, *, remote: bool = False) -> Path:
    """The absolute path of a file or folder on this machine.

    Args:
        path: As the user gave it.
        what: Name of the argument, for errors.
        remote: Allow addresses of remote stores; the path is read, not written.

    Raises:
        FormatError: It is no path, or an address, which would be a folder of that
            name; or, to write to, a root or a name that the next run would remove.
    """
    typed = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(typed, str):
        raise FormatError(
            f"{what} must be a str or pathlib.Path, got {type(path).__name__}. "
            f"{files.path_advice(path)}"
        )
    if ADDRESS.match(typed) and not (remote and url_of(typed)):
        raise FormatError(
            f"{what} must be a path on this machine, got the address {typed!r}. "
            "Convert here, then copy the file there."
        )
    found = absolute(path)
    if not remote and not found.name:
        raise FormatError(
            f"{what} must be the path of a file or folder to make, got {typed!r}, the "
            "root of all folders. Add a name."
        )
    if not remote and found.name.startswith(STAGED):
        raise FormatError(
            f"{what} must not begin with {STAGED!r}, got {typed!r}. Such names are for "
            "unfinished targets, and the next run removes them."
        )
    return found


def refuse_inside(target: Path, source: Path | None) -> None:
    """Refuse a target inside the source buffer's folder, if it has one.

    The folder itself may be replaced, as may a link to it: see `staging`.

    Raises:
        FormatError: The target is inside.
    """
    if source is not None:
        opening.refuse_inside(target, source, target.parent)


def open_source(
    path: Path,
    file_format: Format,
    options: Options,
    selection: Selection | None = None,
    *,
    stored: bool = False,
) -> Reader:
    """Open a source, or the selected part of it.

    Args:
        path: Of the source.
        file_format: Of it.
        options: Of its reader.
        selection: What to read.
        stored: The target is of this format as well; see `registry.open_stored`.
    """
    registry.refuse_unknown(file_format, "open_reader", options)
    open_reader = registry.open_stored if stored else registry.open_reader
    if selection is None:
        return open_reader(file_format, path, **options)
    if file_format.name == BUFFER:
        # A buffer's reader skips other fields and environments itself.
        options = {**options, "env_ids": selection.env_ids}
        selection = replace(selection, env_ids=None)
        if not selection.reads_fields:
            options = {**options, "fields": selection.fields}
            selection = replace(selection, fields=None)
    elif "fields" in registry.options_of(file_format, "open_reader"):
        # It decides between columns that become one field.
        options = {**options, "fields": selection.fields}
    return select(open_reader(file_format, path, **options), selection)


def opener_of(
    path: Path,
    file_format: Format,
    options: Options,
    selection: Selection,
    target: Format | None = None,
) -> Callable[[Selection | None], Reader]:
    """What opens one of several sources.

    Args:
        path: Of the source.
        file_format: Of it.
        options: As `open_source` takes them.
        selection: Of all sources: the formats that decide between columns that become
            one field are given its fields.
        target: Format of the target, where it is no buffer.
    """
    takes_fields = "fields" in registry.options_of(file_format, "open_reader")
    if file_format.name != BUFFER and takes_fields and not selection.reads_fields:
        options = {**options, "fields": selection.fields}
    stored = target is not None and target.name == file_format.name
    return partial(open_source, path, file_format, options, stored=stored)


def split_options(source: Format, target: Format, options: Options) -> tuple[Options, Options]:
    """Split options into those of the source and those of the target.

    An option ``from.<name>`` or ``to.<name>`` goes to that side only, any other to each
    side that knows it.

    Raises:
        SchemaError: Neither side knows one of them.
    """
    legal = {
        side: set(registry.options_of(each, side)) - set(SELECTED)
        for each, side in ((source, "open_reader"), (target, "open_writer"))
    }
    split: dict[str, Options] = {side: {} for side in legal}
    for option, value in options.items():
        only, _, name = option.rpartition(".")
        sides = {"from": ["open_reader"], "to": ["open_writer"]}.get(only, [*legal])
        sides = [side for side in sides if name in legal[side]]
        for side in sides:
            split[side][name] = value
        if not sides or only not in ("", "from", "to"):
            known = sorted(set().union(*legal.values()))
            raise SchemaError(
                f"option {option!r} is unknown to {source.name!r} as a source and "
                f"{target.name!r} as a target, which take "
                f"{', '.join(known) or 'none'}. {registry.option_advice(name, known)}"
            )
    return split["open_reader"], split["open_writer"]


@contextmanager
def name_shared_options(options: Options, reading: Options, writing: Options) -> Iterator[None]:
    """Add a note to errors about options that both sides received."""
    both = sorted(options.keys() & reading.keys() & writing.keys())
    try:
        yield
    except ReplayError as error:
        for name in both:
            error.add_note(
                f"option {name!r} was passed to both sides. Use from.{name} or to.{name}."
            )
        raise


def write_target(
    reader: Reader,
    target: Path,
    file_format: Format,
    options: Options,
    *,
    overwrite: bool,
    strict: bool,
    progress: Progress | None,
) -> Report:
    """Write all rows of a reader into a target of a format."""

    def open_writer(description: Description) -> Writer:
        return registry.open_writer(
            file_format, target, description, overwrite=overwrite, **options
        )

    return transfer(reader, open_writer, strict=strict, progress=progress)
