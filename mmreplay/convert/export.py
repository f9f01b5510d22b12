"""Exports a buffer to a file of another format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from numpy.typing import ArrayLike

from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Progress, Report, Writer
from mmreplay.convert.by_episode import Function, SkipReward
from mmreplay.convert.description import Description
from mmreplay.convert.joined import Envs
from mmreplay.convert.select import EpisodeNumbers
from mmreplay.convert.transfer import (
    Conversion,
    Options,
    Source,
    changes_of,
    local,
    refuse_inside,
    selection_of,
)
from mmreplay.errors import SchemaError
from mmreplay.zarr_groups.source import ZarrSource


def export(
    buffer: ReplayBuffer | StrPath | Sequence[ReplayBuffer | StrPath],
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
    unique: bool = False,
    splits: Mapping[str, float] | None = None,
    envs: Envs = "append",
    frame_skip: int | None = None,
    skip_reward: SkipReward | None = None,
    map: Function | None = None,
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
    to the bit; images become arrays in formats without files of them. It appears
    complete, synced and renamed, or not at all.

    Args:
        buffer: Open, or the path of its folder; a list of several is read as one, as in
            `load`.
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
        seed: Of `fraction` and `splits`: equal seeds choose the same episodes of the
            same number.
        unique: Leave out episodes that equal an earlier one in all bytes of their
            steps and final observations, and in how they end.
        splits: Shares by name, 1 together, such as ``{"train": 0.9, "val": 0.1}``: the
            target is a folder with a file of each name, and `format` says which. With
            one source and no other choice these are the parts of `mr.split`.
        envs: Of several buffers; see `load`.
        frame_skip: Make one step of so many: observation, action and other fields of
            the first, ends of the last. An episode's last steps may be fewer.
        skip_reward: Of `frame_skip`: the ``"sum"`` of the rewards by default, else that
            of the ``"last"`` or ``"first"`` step.
        map: A function of an episode's columns by path, arrays ``[T, *shape]`` of its
            steps, that returns those that it changes. It declares columns that it adds
            by an attribute ``schema``, fields by path.
        cast: Dtype by path: integers that it does not hold are refused, floats are
            rounded, and a note says how much. Images become files by ``"jpeg:90:420"``
            or ``"png"``, and arrays by ``"uint8"``; see docs/images.md.
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
    several: list[ReplayBuffer | StrPath]
    several = list(buffer) if isinstance(buffer, list | tuple) else [buffer]  # type: ignore[list-item]  # one that is no list
    if not several:
        raise SchemaError("buffer must be at least one buffer or folder, got an empty list.")
    for each in several:
        refuse_inside(path, each.path if isinstance(each, ReplayBuffer) else absolute(each))
    target_format = registry.target_format(path, format)
    registry.refuse_unknown(target_format, "open_writer", options)
    suffix = "" if splits is None else registry.split_suffix(target_format, path)
    selection = selection_of(
        fields=fields,
        env_ids=env_ids,
        episodes=episodes,
        rows=rows,
        skip=skip,
        where=where,
        fraction=fraction,
        top=top,
        seed=seed,
        unique=unique,
        splits=splits,
    )
    changes = changes_of(
        frame_skip=frame_skip, skip_reward=skip_reward, map=map, cast=cast, rename=rename, drop=drop
    )

    def open_writer(path: Path, description: Description, overwrite: bool) -> Writer:
        return registry.open_writer(
            target_format, path, description, overwrite=overwrite, **options
        )

    with ExitStack() as stack:
        sources = [_source(each, {"priorities": priorities}, stack) for each in several]
        arrays = not target_format.takes_images(options)
        return Conversion(sources, selection, changes, envs, arrays).run(
            path, open_writer, suffix=suffix, overwrite=overwrite, strict=strict, progress=progress
        )


def _source(buffer: ReplayBuffer | StrPath, options: Options, stack: ExitStack) -> Source:
    """A buffer as a source of a conversion."""
    if isinstance(buffer, ZarrSource):
        # It also holds options; a path would lose them.
        buffer = stack.enter_context(ReplayBuffer.open(buffer))
    if isinstance(buffer, ReplayBuffer):
        return Source(buffer.path, registry.BUFFERS, options, buffer)
    return Source(absolute(buffer), registry.BUFFERS, options)
