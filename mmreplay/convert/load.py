"""Loads a file of another format into a new buffer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from numpy.typing import ArrayLike

from mmreplay.buffer.opening import StrPath
from mmreplay.convert import buffer_writer, registry
from mmreplay.convert.base import Progress, Report
from mmreplay.convert.buffer_writer import BufferWriter
from mmreplay.convert.by_episode import Function, SkipReward
from mmreplay.convert.description import Description
from mmreplay.convert.joined import Envs
from mmreplay.convert.select import EpisodeNumbers
from mmreplay.convert.transfer import (
    Conversion,
    Source,
    changes_of,
    local,
    refuse_inside,
    selection_of,
)
from mmreplay.datasets import minari
from mmreplay.errors import SchemaError
from mmreplay.format.metadata import Engine
from mmreplay.format.sharding import Codec
from mmreplay.zarr_groups.source import ZarrSource


class MinariDataset(Protocol):
    """The part of a ``minari.MinariDataset`` that `load` uses."""

    @property
    def storage(self) -> Any:
        """Has ``data_path``, the folder of the files."""


def load(
    source: StrPath | MinariDataset | Sequence[StrPath],
    target: StrPath,
    *,
    format: str | None = None,
    capacity: int | None = None,
    engine: Engine | None = None,
    codec: Codec | None = None,
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
    heap_bytes: int | str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    **options: object,
) -> Report:
    """Make a new buffer from the rows of a file.

    Streams in blocks: memory does not grow with the file. A file of `export` gives the
    same buffer to the bit, with positions, flags and statistics; images that became
    arrays in it stay arrays. For any other file the report says how episode ends were
    found and what was left out. The buffer appears complete, synced and renamed, or not
    at all. Nothing read from the file is executed.

    Args:
        source: A file, or a folder of a known kind; or a Minari dataset, by its id
            or as ``minari.load_dataset`` returns it, with its filter of episodes. A
            list of several is read as one, a source after the other; each of them is
            closed, or read up to the rows that it has at the start.
        target: The buffer's folder to make.
        format: A format's name, where the source does not show it.
        capacity: Rows per environment; the source's by default. Of more rows the
            newest stay.
        engine: ``"memmap"``, or ``"zarr"`` for compressed shards; by default that of
            the first of several sources, else ``"memmap"``.
        codec: How those are packed; see `ReplayBuffer.create`.
        fields: The part of the source to load, as in `export`, also by the names that
            columns have in the source; the next ten are as in `export`.
        env_ids: int ``[N]``.
        episodes: Such as ``slice(0, 100)``.
        rows: Such as ``slice(0, 1000)``.
        skip: Such as ``[3, 7]``.
        where: Such as ``"return > 20"``.
        fraction: Such as 0.1.
        top: Such as 0.1, or 30.
        seed: Of `fraction` and `splits`.
        unique: Leave out episodes that equal an earlier one, as in `export`.
        splits: Such as ``{"train": 0.9, "val": 0.1}``: the target is a folder with a
            buffer of each name.
        envs: Of several sources: ``"append"`` continues each environment by that of
            the next source, ``"stack"`` sets their environments side by side.
        frame_skip: Make one step of so many, as in `export`.
        skip_reward: Of `frame_skip`.
        map: A function that changes episodes, as in `export`.
        cast: Dtype by path: integers that it does not hold are refused, floats are
            rounded, and a note says how much. Images become files by ``"jpeg:90:420"``
            or ``"png"``, and arrays by ``"uint8"``; see docs/images.md.
        rename: New path by path of a field or subtree, after casts.
        drop: Paths, or subtrees, to leave out at last: conditions may name them.
        priorities: Name of the column to store the source's priorities in, for a
            sampler of that name; their old name by default.
        heap_bytes: Bytes for the values that vary, of each environment, such as
            ``"1 GiB"``. By default the source's; where it has none, or for another
            capacity, enough for these rows and a capacity of average ones.
        overwrite: Replace a closed buffer at the target.
        strict: Refuse a source that requires guesses.
        progress: Called after each block with (rows done, rows in all).
        **options: The format's own.

    Raises:
        FormatError: The target exists, or the source is not of its format.
        CorruptError: The source is damaged.
        SourceError: Its rows contradict each other, or strict and doubtful.
        FullError: No space is left; the target is as it was.

    Example:
        >>> report = mr.export("runs/cartpole", "cartpole.npz")
        >>> report = mr.load("cartpole.npz", "runs/again")
        >>> report.rows > 0
        True
    """
    several: list[StrPath | MinariDataset]
    several = list(source) if isinstance(source, list | tuple) else [source]  # type: ignore[list-item]  # one that is no list
    if not several:
        raise SchemaError("source must name at least one file or folder, got an empty list.")
    sources = [source_of(each, format, options) for each in several]
    target_path = local(target, "target")
    for each in sources:
        is_buffer = each.format.name == registry.BUFFER
        refuse_inside(target_path, each.path, "buffer" if is_buffer else "source")
    if splits is not None:
        registry.split_suffix(registry.BUFFERS, target_path)
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

    def open_writer(path: Path, description: Description, overwrite: bool) -> BufferWriter:
        return buffer_writer.open_writer(
            path,
            description,
            overwrite=overwrite,
            capacity=capacity,
            engine=engine,
            codec=codec,
            priorities=priorities,
            heap_bytes=heap_bytes,
        )

    return Conversion(sources, selection, changes, envs).run(
        target_path,
        open_writer,
        overwrite=overwrite,
        strict=strict,
        progress=progress,
        uncompressed=engine != "zarr",
    )


def source_of(
    source: StrPath | MinariDataset,
    format: str | None = None,
    options: dict[str, object] | None = None,
) -> Source:
    """What `load` reads a source as.

    Args:
        source: As `load` takes it.
        format: Name of its format, where it does not show it.
        options: For its reader.

    Raises:
        FormatError: It does not exist, or is of no known format.
    """
    options = options or {}
    named = format in (None, "minari") and not isinstance(source, os.PathLike)
    if named and (dataset := minari.located(source)) is not None:
        source, minari_options = dataset
        format, options = "minari", {**minari_options, **options}
    path = local(cast("StrPath", source), "source", remote=True)
    if isinstance(source, ZarrSource):
        options = {**source.options, **options}
    return Source(path, registry.source_format(path, format), options)
