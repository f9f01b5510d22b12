"""How far ahead a writer reserves disk space, and whether the disk has enough of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import format_size
from mmreplay.disk.files import free_nbytes, total_nbytes
from mmreplay.errors import FullWarning, SchemaError
from mmreplay.format.metadata import HEAP_STEP_NBYTES, Metadata
from mmreplay.ring import Ring
from mmreplay.storage.committer import Committer
from mmreplay.storage.layout import record_layout
from mmreplay.storage.store import rounded_up

Array = NDArray[np.int64]


def targets(
    ring: Ring,
    committer: Committer | None,
    heads: Array,
    limits: Array,
    needed: Array,
    ahead_rows: int,
    limit_step: int,
) -> tuple[Array, bool]:
    """Limits to ask for, and whether nothing is overwritten below them.

    Args:
        ring: Of the rows.
        committer: Knows which blocks no power cut brings back; None in RAM.
        heads: int64 ``[E]``, what is written.
        limits: int64 ``[E]``, what may be.
        needed: int64 ``[E]``, what is to be.
        ahead_rows: Rows whose space is promised in the first lap.
        limit_step: See `Store`.
    """
    ahead = np.maximum(heads + min(ring.reserve, ahead_rows), needed)
    free: Array | int = ring.slots
    if committer is not None:
        # Whole shards: of one that is overwritten in part the other rows are put back.
        # A slow reader may still copy these, as no limit and no tail discards them, and
        # the heap may have given up their values.
        removed = committer.free_blocks() * ring.block_rows
        free = free + removed // limit_step * limit_step
    first_lap = np.minimum(ahead, np.maximum(free, needed))
    if (first_lap <= free).all():
        return np.maximum(first_lap, limits), True
    wide = np.maximum(heads + ring.reserve, needed)
    return np.maximum(rounded_up(wide, limit_step), limits), False


def ring_nbytes(metadata: Metadata, heads: Array | None = None) -> int:
    """Bytes that a ring takes on disk, with its heap.

    Args:
        metadata: Of the ring.
        heads: int64 ``[E]``, what is written of it; all is by default.

    Returns:
        0 where it is not known: in RAM, and in compressed shards.
    """
    if metadata.engine != "memmap":
        return 0
    ring = metadata.ring
    sizes = record_layout(metadata.schema).file_sizes(ring, metadata.schema, metadata.heap_nbytes)
    nbytes = sum(sizes.values())
    if heads is None:
        return nbytes
    return nbytes * int(np.minimum(heads, ring.slots).sum()) // ring.num_rows


def refuse_larger_heap(path: Path, metadata: Metadata) -> None:
    """Refuse heaps that the disk can never hold, whatever else is on it.

    The file is sparse, so that nothing else would find it out before it is written.

    Args:
        path: The buffer's folder, which need not exist yet.
        metadata: Of the ring to be made.

    Raises:
        SchemaError: The heaps are larger than the whole disk.
    """
    num_envs = metadata.ring.num_envs
    nbytes = metadata.heap_nbytes * num_envs
    try:
        total = total_nbytes(path) if nbytes else 0
    except OSError:
        # A folder without permission to enter: making a file there reports it.
        return
    # Some file systems do not say how large they are.
    if 0 < total < nbytes:
        most = total // num_envs // HEAP_STEP_NBYTES * HEAP_STEP_NBYTES
        whose = "" if num_envs == 1 else f" for each of {num_envs} environments"
        raise SchemaError(
            f"heap_bytes must be at most {most:,}{whose}, as the disk of {path} has "
            f"{format_size(total)} in all, got {metadata.heap_nbytes:,}. Pass less: "
            f"{format_size(free_nbytes(path))} is free."
        )


def warn_where_short(path: Path, metadata: Metadata, there_nbytes: int, frames: int) -> None:
    """Warn of a ring that its disk cannot hold, days before an add would find out.

    Args:
        path: The buffer's folder, which need not exist yet.
        metadata: Of the ring to be filled.
        there_nbytes: Of its rows, what takes space already.
        frames: Calls from the user's own to this one.
    """
    ring_size = ring_nbytes(metadata)
    left = ring_size - there_nbytes
    try:
        free = free_nbytes(path)
    except OSError:
        # A folder without permission to enter: opening a file there reports it.
        return
    if left > free:
        smaller = "capacity or heap_bytes" if metadata.heap_nbytes else "capacity"
        warnings.warn(
            f"{path}: the full ring takes {format_size(ring_size)} and needs "
            f"{format_size(left)} more, but its disk has {format_size(free)} free, so "
            "adds will raise FullError. Free some space, or choose a smaller "
            f"{smaller} (mmreplay plan computes the size).",
            FullWarning,
            stacklevel=frames + 1,
        )
