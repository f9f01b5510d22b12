"""A buffer into a file of another format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from numpy.typing import ArrayLike

from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import buffer_reader as buffers
from mmreplay.convert import registry
from mmreplay.convert.base import Progress, Report, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.select import Selection
from mmreplay.convert.transfer import chosen, local, refuse_inside, transfer
from mmreplay.storage.foreign_zarr.source import ZarrSource


class Wanted(TypedDict):
    """What a buffer's reader is told; see `export`."""

    fields: Sequence[str] | None
    env_ids: ArrayLike | None
    priorities: str | None


def export(
    buffer: ReplayBuffer | StrPath,
    target: StrPath,
    *,
    format: str | None = None,
    fields: Sequence[str] | None = None,
    env_ids: ArrayLike | None = None,
    episodes: slice | None = None,
    rows: slice | None = None,
    priorities: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
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
        episodes: Whole episodes to write, such as ``slice(0, 100)``: counted
            environment by environment, oldest first, the headless and the running
            among them.
        rows: Rows to write, counted likewise, final rows among them, within what
            else was chosen.
        priorities: Name of a sampler's stored column that goes along; see `load`.
        overwrite: Replace the target if it exists.
        strict: Refuse to lose anything, such as what a NaN carries in csv.
        progress: Called after each block with (rows done, rows in all).
        **options: The format's own.

    Raises:
        FormatError: The target exists, is of no known format, or inside the buffer.
        SchemaError: A field, option or column of priorities is unknown, or the format
            cannot hold a field.
        SourceError: Strict, and something would be lost.
        StaleError: A live writer gave up rows before they were read.
        FullError: No space is left; the target is as it was.

    Example:
        >>> report = mr.export("runs/cartpole", "cartpole.npz")
        >>> np.load("cartpole.npz")["observation"].shape[1:]
        (4,)
    """
    place = local(target, "target")
    refuse_inside(place, _home(buffer))
    found = registry.target_format(place, format)
    wanted: Wanted = {
        "fields": fields, "env_ids": env_ids, "priorities": priorities,
    }  # fmt: skip
    choice = Selection(episodes=episodes, rows=rows)
    with chosen(_reader(buffer, wanted), choice) as reader:

        def open_writer(description: Description) -> Writer:
            return registry.open_writer(
                found, place, description, overwrite=overwrite, **options
            )

        return transfer(reader, open_writer, strict=strict, progress=progress)


def _home(buffer: ReplayBuffer | StrPath) -> Path | None:
    """The folder of a buffer, or None for one in RAM."""
    if isinstance(buffer, ReplayBuffer):
        return buffer.path
    return absolute(buffer)


def _reader(buffer: ReplayBuffer | StrPath, wanted: Wanted) -> buffers.BufferReader:
    if isinstance(buffer, ReplayBuffer):
        return buffers.BufferReader(buffer, **wanted)
    # A Zarr group that says more than where it lies stays what it is.
    known = isinstance(buffer, ZarrSource)
    place = buffer if known else absolute(buffer)
    return buffers.open_reader(place, **wanted)
