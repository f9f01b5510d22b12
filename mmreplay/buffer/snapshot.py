"""A whole buffer beside another one, as that was at one moment, while it is written.

Where the file system can share blocks (reflink), every file is cloned; elsewhere the
rows alive are copied, oldest first. Sealed shards, which nobody writes again, are
linked; never a file of the ring, which is written in place. Samplers' columns come
along.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import files, recovery
from mmreplay.buffer import lifecycle
from mmreplay.buffer.filling import filled
from mmreplay.buffer.lifecycle import Parts
from mmreplay.buffer.state import FILE_NAME as STATISTICS
from mmreplay.buffer.state import MAX_NBYTES as STATISTICS_NBYTES
from mmreplay.buffer.taking import How, Progress, Taking
from mmreplay.buffer.taking_columns import Columns
from mmreplay.buffer.taking_shards import ShardTaking
from mmreplay.errors import VersionError
from mmreplay.format import metadata as metadata_file
from mmreplay.storage.engines import create_store
from mmreplay.storage.pause import Pause
from mmreplay.storage.zarr import ZarrStore

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What `ReplayBuffer.snapshot` made.

    Attributes:
        path: Its folder, a whole buffer.
        how: ``"reflink"`` (blocks shared with the original), ``"link"`` (sealed shards
            are; the rest is copied) or ``"copy"``.
        firsts: int64 ``[E]``, the oldest position in it.
        heads: int64 ``[E]``, the heads of the buffer when it began.
        cut_rows: Rows alive when it began that the writer gave up before they were
            taken; 0 with a pause.
        nbytes: Bytes copied or shared.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> taken = buffer.snapshot("runs/copy")
        >>> taken.cut_rows
        0
    """

    path: Path
    how: How
    firsts: Array
    heads: Array
    cut_rows: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Rows in it."""
        return int((self.heads - self.firsts).sum())


def snapshot(
    source: Path,
    target: Path,
    *,
    pause: bool = False,
    allow_network: bool = False,
    progress: Progress | None = None,
) -> Snapshot:
    """Make a snapshot of a buffer's folder; see `ReplayBuffer.snapshot`."""
    # What is no buffer is told so, and no file of a pause is left in it.
    metadata_file.load(source)
    lifecycle.refuse_inside(target, source)
    with ExitStack() as stack:
        if pause:
            stack.callback(Pause(source).release)
        parts = lifecycle.open_reader(source)
        stack.callback(parts.store.unmap)
        stack.callback(parts.close)
        metadata = parts.metadata
        if metadata.unknown_features:
            raise VersionError(
                f"{source} uses the features {list(metadata.unknown_features)}, which "
                "this mmreplay cannot copy; install a newer mmreplay"
            )
        stack.enter_context(filled(target, allow_network))
        return _build(parts, source, target, progress)


def _build(
    parts: Parts, source: Path, target: Path, progress: Progress | None
) -> Snapshot:
    """Fill the target's folder; metadata.json is the last file to appear in it."""
    metadata = parts.metadata
    folder = target / metadata.folder
    files.make_folder(folder)
    columns = Columns(source, target, metadata)
    store = create_store(folder, metadata)
    try:
        kind = ShardTaking if metadata.engine == "zarr" else Taking
        taking = kind(parts, store, columns.pairs, progress)
        how = taking.run()
        if isinstance(store, ZarrStore):
            store.settle(taking.tails, taking.heads, seal=False)
        store.sync()
        taking.sum()
        store.sync_sums()
        columns.finish(taking.heads)
    finally:
        columns.close()
        store.close()
        store.unmap()
    recovery.create(folder, metadata, taking.heads, taking.tails)
    files.sync_folder(folder)
    _copy_statistics(source, target)
    encoded = metadata_file.encode(metadata)
    files.replace_bytes(target / metadata_file.FILE_NAME, encoded)
    files.remove_tree(target / recovery.HALF)
    return Snapshot(
        target, how, taking.tails, taking.heads, taking.cut_rows, taking.nbytes
    )


def _copy_statistics(source: Path, target: Path) -> None:
    if (source / STATISTICS).exists():
        data = files.read_bytes(source / STATISTICS, STATISTICS_NBYTES)
        files.replace_bytes(target / STATISTICS, data)
