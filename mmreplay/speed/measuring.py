"""What is measured of a buffer, in which order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, SchemaError
from mmreplay.mounts import file_system
from mmreplay.ram import whole_nbytes
from mmreplay.sizes import size
from mmreplay.speed.advice import advice
from mmreplay.speed.disk import sequential, written_nbytes
from mmreplay.speed.draws import cold_rate, warm_rate
from mmreplay.speed.report import LARGER, SpeedReport
from mmreplay.storage.zarr_source import source_of

SMALL_NBYTES = 8 << 20
"""Files with less in them say nothing of the disk: a batch of 256 rows, each with its
page, is a MiB of them, and waiting for the first request a good part of reading all."""
SHARDS = (
    "rows of a compressed buffer are asked for through mappings of their shards, whose "
    "pages cannot be dropped, so nothing was measured cold"
)
STAYED = (
    "pages of the files cannot be dropped (another process has them mapped, or the "
    "disk is in RAM), so nothing was measured cold"
)


def measure_speed(
    path: str | os.PathLike[str], batch_size: int = 256, seconds: float = 1.0
) -> SpeedReport:
    """Measure uniform draws of a buffer, which it only reads.

    For figures of the disk the pages of the rows just drawn are dropped from the page
    cache, and those that are read through; all of the buffer's where they hang
    together with those.

    Args:
        path: The buffer's folder.
        batch_size: Steps a batch, at least 1.
        seconds: For each figure, above 0.

    Raises:
        SchemaError: A number is not legal, or a batch larger than memory.
        FailedError: The path is a Zarr group, whose pages are not looked at.
        EmptyError: There is nothing to draw.
    """
    _check(path, batch_size, seconds)
    with ReplayBuffer.open(path) as buffer:
        paths, memory = buffer.reading.paths, buffer.memory()
        compressed = buffer.zarr_path is not None
        row_nbytes = buffer.schema.row_nbytes
    larger_nbytes, ram = LARGER * batch_size * row_nbytes, whole_nbytes()
    if larger_nbytes > ram > 0:
        raise SchemaError(
            f"batch_size: got {batch_size:,}, and {LARGER} times as many are drawn at "
            f"once, too: {size(larger_nbytes)}, and this machine has {size(ram)} of "
            "memory; choose a smaller batch"
        )
    nbytes = written_nbytes(paths)
    asked = unasked = disk = None
    not_cold = _too_small(nbytes)
    if not not_cold:
        # While nothing of it is mapped here: such pages cannot be dropped.
        if not compressed:
            asked = cold_rate(path, batch_size, seconds, "always")
            unasked = cold_rate(path, batch_size, seconds, "never")
        disk = sequential(paths, seconds)
        if asked is None:
            not_cold = SHARDS if compressed and disk is not None else STAYED
    with ReplayBuffer.open(path) as buffer:
        warm = warm_rate(buffer, batch_size, seconds)
        larger = warm_rate(buffer, LARGER * batch_size, seconds, 1)
    kind = file_system(Path(path))
    report = SpeedReport(
        batch_size, warm, larger, asked, unasked, not_cold, disk, memory, nbytes,
        whole_nbytes(), kind, (),
    )  # fmt: skip
    return replace(report, advice=tuple(advice(report)))


def _check(path: str | os.PathLike[str], batch_size: int, seconds: float) -> None:
    """Refuse what cannot be measured."""
    source = source_of(path)
    if source is not None:
        raise FailedError(
            f"{source} is a Zarr group, expected a buffer's folder, whose files' pages "
            "are dropped and looked at; make one with mmreplay convert"
        )
    if batch_size < 1 or not seconds > 0:
        raise SchemaError(
            f"batch_size, seconds: got {batch_size} and {seconds}, expected at least 1 "
            "and above 0; ask for a step and some time"
        )


def _too_small(nbytes: int) -> str:
    """Why so many bytes say nothing of the disk; empty where they do."""
    if nbytes >= SMALL_NBYTES:
        return ""
    return (
        f"the buffer is too small to say anything of the disk: {size(nbytes)}, where "
        f"{size(SMALL_NBYTES)} would; nothing was measured cold"
    )
