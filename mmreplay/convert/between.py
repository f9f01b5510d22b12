"""From any format to any other, as the command line asks for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mmreplay.buffer import lifecycle
from mmreplay.buffer.lifecycle import StrPath, absolute
from mmreplay.convert import registry
from mmreplay.convert.base import Progress, Reader, Report, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.registry import BUFFER, Format
from mmreplay.convert.select import Choice, choose
from mmreplay.convert.staging import STAGED
from mmreplay.convert.transfer import transfer
from mmreplay.errors import FormatError, ReplayError, SchemaError
from mmreplay.storage.remote import url_of

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
        lifecycle.refuse_inside(target, source, target.parent)


def open_source(
    path: Path, found: Format, options: Options, choice: Choice | None = None
) -> Reader:
    """Open a source, of which some is wanted; see `chosen`."""
    choice = choice or Choice()
    if found.name == BUFFER:
        # A buffer does not read what is not wanted.
        options = {**options, "fields": choice.fields, "env_ids": choice.env_ids}
        choice = replace(choice, fields=None, env_ids=None)
    return chosen(registry.open_reader(found, path, **options), choice)


def chosen(reader: Reader, choice: Choice) -> Reader:
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
