"""A file of another format into a new buffer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol, cast

from numpy.typing import ArrayLike

from mmreplay.buffer.opening import StrPath
from mmreplay.convert import buffer_reader as buffers
from mmreplay.convert import registry
from mmreplay.convert.base import Progress, Report
from mmreplay.convert.buffer_writer import BufferWriter
from mmreplay.convert.description import Description
from mmreplay.convert.select import Selection
from mmreplay.convert.transfer import (
    local,
    open_source,
    refuse_inside,
    told_of,
    transfer,
)
from mmreplay.datasets import minari
from mmreplay.format.metadata import Engine
from mmreplay.format.sharding import Codec
from mmreplay.storage.foreign_zarr.source import ZarrSource


class MinariDataset(Protocol):
    """What is taken of a ``minari.MinariDataset``."""

    @property
    def storage(self) -> Any:
        """Its files; ``data_path`` is their folder."""


def load(
    source: StrPath | MinariDataset,
    target: StrPath,
    *,
    format: str | None = None,
    capacity: int | None = None,
    engine: Engine = "memmap",
    codec: Codec | None = None,
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
    """Make a new buffer of a file's rows.

    Streams in blocks: memory does not grow with the file. What `export` wrote comes
    back to the bit, positions, flags and statistics included; of any other file the
    report says how episode ends were found and what was left out. The buffer appears
    whole, synced and renamed, or not at all; nothing read from the file is executed.

    Args:
        source: A file, or a folder of a known kind; or a Minari dataset, by its id
            or as ``minari.load_dataset`` returns it, with its filter of episodes.
        target: The buffer's folder to make.
        format: A format's name, where the source does not tell it.
        capacity: Rows per environment; the source's by default. Of more rows the
            newest stay.
        engine: ``"memmap"``, or ``"zarr"`` for compressed shards.
        codec: How those are packed; see `ReplayBuffer.create`.
        fields: As in `export`, as are the next three: the part of the source to load.
        env_ids: int ``[N]``.
        episodes: Such as ``slice(0, 100)``.
        rows: Such as ``slice(0, 1000)``.
        priorities: What the column is to be called, with which a sampler of that name
            draws; where the source holds priorities, the name they had by default.
        overwrite: Replace a closed buffer at the target.
        strict: Refuse a source that leaves something to be guessed.
        progress: Called after each block with (rows done, rows in all).
        **options: The format's own.

    Raises:
        FormatError: The target exists, or the source is not what it should be.
        CorruptError: The source is damaged.
        SourceError: Its rows contradict each other, or strict and doubtful.
        FullError: No space is left; the target is as it was.

    Example:
        >>> report = mr.export("runs/cartpole", "cartpole.npz")
        >>> report = mr.load("cartpole.npz", "runs/again")
        >>> report.rows > 0
        True
    """
    named = format in (None, "minari") and not isinstance(source, os.PathLike)
    if named and (dataset := minari.located(source)) is not None:
        source, told = dataset
        format, options = "minari", {**told, **options}
    path = local(cast("StrPath", source), "source", remote=True)
    place = local(target, "target")
    if isinstance(source, ZarrSource):
        options = {**source.options, **options}
    found = registry.source_format(path, format)
    refuse_inside(place, path if found.name == registry.BUFFER else None)
    choice = Selection(fields, env_ids, episodes, rows)
    with told_of(path), open_source(path, found, options, choice) as reader:

        def open_writer(description: Description) -> BufferWriter:
            return buffers.open_writer(
                place, description, overwrite=overwrite,
                capacity=capacity, engine=engine, codec=codec, priorities=priorities,
            )  # fmt: skip

        return transfer(reader, open_writer, strict=strict, progress=progress)
