"""Exports a buffer to a file of another format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Progress, Reader, Report, Writer
from mmreplay.convert.buffer_reader import BufferReader, open_reader
from mmreplay.convert.description import Description
from mmreplay.convert.mapped import Changes, change
from mmreplay.convert.select import EpisodeNumbers, Selection, select
from mmreplay.convert.transfer import local, refuse_inside, transfer
from mmreplay.zarr_groups.source import ZarrSource


def export(
    buffer: ReplayBuffer | StrPath,
    target: StrPath,
    *,
    format: str | None = None,
    fields: Sequence[str] | None = None,
    env_ids: ArrayLike | None = None,
    episodes: EpisodeNumbers | None = None,
    rows: slice | None = None,
    skip: EpisodeNumbers | None = None,
    where: str | None = None,
    fraction: float | None = None,
    top: float | None = None,
    seed: int = 0,
    cast: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    priorities: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    **options: object,
) -> Report:
    """Write all rows of a buffer into a file, oldest first.

    Streams in blocks: memory does not grow with the buffer. The file also holds final
    rows, flags, positions, schema and statistics, so that `load` makes the same buffer
    to the bit. It appears complete, synced and renamed, or not at all.

    Args:
        buffer: Open, or the path of its folder.
        target: The file to make; its suffix says the format.
        format: A format's name, where the suffix does not say it.
        fields: Paths, or subtrees, to write; all by default.
        env_ids: int ``[N]``, environments to write; all by default. They keep their
            numbers.
        episodes: Complete episodes to write, such as ``slice(0, 100)``, ``[3, 7]`` or
            an `EpisodeTable`: counted environment by environment, oldest first,
            including unfinished episodes and those whose beginning was overwritten.
        rows: Rows to write, counted likewise, final rows included, within the other
            selections. Not with `where`.
        skip: Episodes to leave out, in place of `episodes`.
        where: A condition that episodes meet, such as ``"return > 20"``, in the
            language of docs/convert.md.
        fraction: A share of these episodes, chosen at random.
        top: The whole episodes with the highest returns: a share below 1, or a number.
        seed: Of `fraction`: equal seeds choose the same episodes of the same number.
        cast: Dtype by path: integers that it does not hold are refused, floats are
            rounded, and a note says how much.
        rename: New path by path of a field or subtree, after casts.
        drop: Paths, or subtrees, to leave out at last: conditions may name them.
        priorities: Name of a sampler's stored column to write as well; see `load`.
        overwrite: Replace the target if it exists.
        strict: Refuse any loss, such as the payload of a NaN in csv.
        progress: Called after each block with (rows done, rows in all).
        **options: The format's own.

    Raises:
        FormatError: The target exists, is of no known format, or inside the buffer.
        SchemaError: A field, option or column of priorities is unknown, or the format
            cannot hold a field.
        SourceError: Strict, and something would be lost.
        CorruptError: A value that varies differs from its checksum, or is not where its
            row says; the target is as it was.
        StaleError: A live writer overwrote rows before they were read.
        FullError: No space is left; likewise.

    Example:
        >>> report = mr.export("runs/cartpole", "cartpole.npz")
        >>> np.load("cartpole.npz")["observation"].shape[1:]
        (4,)
    """
    path = local(target, "target")
    refuse_inside(path, _folder(buffer))
    target_format = registry.target_format(path, format)
    registry.refuse_unknown(target_format, "open_writer", options)
    # Fields that choose episodes need not be selected themselves.
    read = fields if where is None and top is None else None
    reader: Reader = _open_reader(buffer, read, env_ids, priorities)
    if any(part is not None for part in (episodes, rows, skip, where, fraction, top)):
        selection = Selection(
            fields,
            episodes=episodes,
            rows=rows,
            skip=skip,
            where=where,
            fraction=fraction,
            top=top,
            seed=seed,
        )
        reader = select(reader, selection)
    if cast or rename or drop:
        reader = change(reader, Changes(cast or {}, rename or {}, drop))
    with reader:

        def open_writer(description: Description) -> Writer:
            return registry.open_writer(
                target_format, path, description, overwrite=overwrite, **options
            )

        return transfer(reader, open_writer, strict=strict, progress=progress)


def _folder(buffer: ReplayBuffer | StrPath) -> Path | None:
    """The folder of a buffer, or None for one in RAM."""
    if isinstance(buffer, ReplayBuffer):
        return buffer.path
    return absolute(buffer)


def _open_reader(
    buffer: ReplayBuffer | StrPath,
    fields: Sequence[str] | None,
    env_ids: ArrayLike | None,
    priorities: str | None,
) -> Reader:
    if isinstance(buffer, ReplayBuffer):
        return BufferReader(buffer, fields=fields, env_ids=env_ids, priorities=priorities)
    # A ZarrSource also holds options; a path would lose them.
    path = buffer if isinstance(buffer, ZarrSource) else absolute(buffer)
    return open_reader(path, fields=fields, env_ids=env_ids, priorities=priorities)
