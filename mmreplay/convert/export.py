"""A buffer into a file of another format."""

from __future__ import annotations

import os
from collections.abc import Sequence

from numpy.typing import ArrayLike

from mmreplay.buffer.lifecycle import StrPath, absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry, rows
from mmreplay.convert.base import Progress, Report, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.transfer import transfer


def export(
    buffer: ReplayBuffer | StrPath,
    target: StrPath,
    *,
    format: str | None = None,
    fields: Sequence[str] | None = None,
    env_ids: ArrayLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: object,
) -> Report:
    """Write the rows of a buffer that are alive into a file, oldest first.

    Streams in blocks: memory does not grow with the buffer. Final rows, flags,
    positions, schema and statistics go along, so that `load` makes the same buffer to
    the bit. The file appears whole, synced and renamed, or not at all.

    Args:
        buffer: Open, or the path of its folder.
        target: The file to make; its suffix says the format.
        format: A format's name, where the suffix does not say it.
        fields: Paths, or subtrees, to write; all by default.
        env_ids: int ``[N]``, environments to write; all by default. They keep their
            numbers.
        overwrite: Replace the target if it exists.
        progress: Called after each block with (rows done, rows in all).
        **options: The format's own.

    Raises:
        FormatError: The target exists, or is of no known format.
        SchemaError: A field or option is unknown, or the format cannot hold a field.
        StaleError: A live writer gave up rows before they were read.
        FullError: No space is left; the target is as it was.
    """
    place = absolute(target)
    found = registry.target_format(place, format)
    with _reader(buffer, fields, env_ids) as reader:

        def open_writer(description: Description) -> Writer:
            return registry.open_writer(
                found, place, description, overwrite=overwrite, **options
            )

        return transfer(reader, open_writer, progress=progress)


def _reader(
    buffer: ReplayBuffer | StrPath,
    fields: Sequence[str] | None,
    env_ids: ArrayLike | None,
) -> rows.BufferReader:
    if isinstance(buffer, ReplayBuffer):
        return rows.BufferReader(buffer, fields=fields, env_ids=env_ids)
    path = absolute(os.fspath(buffer))
    return rows.open_reader(path, fields=fields, env_ids=env_ids)
