"""The engine that a buffer's metadata names, for those that live in a folder."""

from __future__ import annotations

from pathlib import Path

from mmreplay.format.metadata import Metadata
from mmreplay.storage.layout import SUMS
from mmreplay.storage.memmap import POLICY, MemmapStore
from mmreplay.storage.store import ReadPolicy
from mmreplay.storage.zarr.engine import ZarrStore

ON_DISK = ("memmap", "zarr")


def create_store(
    folder: Path, metadata: Metadata, most_nbytes: int | None = None
) -> MemmapStore | ZarrStore:
    """Create the files of a new generation in an existing folder.

    Space for checksums is reserved at once, at most 8 bytes a row, in large rings a
    thousandth of that: a full disk would keep rows that it holds from a commit.

    Args:
        folder: The generation's.
        metadata: What it will be.
        most_nbytes: Reserve no space for checksums that take more.
    """
    store = _created(folder, metadata)
    try:
        for file in store.files:
            few = most_nbytes is None or file.nbytes <= most_nbytes
            if file.path.name == SUMS and few:
                file.allocate(0, file.nbytes)
    except BaseException:
        store.close()
        raise
    return store


def _created(folder: Path, metadata: Metadata) -> MemmapStore | ZarrStore:
    if metadata.engine == "zarr":
        return ZarrStore.create(folder, metadata)
    return MemmapStore.create(folder, metadata.ring, metadata.schema)


def open_store(
    folder: Path, metadata: Metadata, *, writable: bool, policy: ReadPolicy = POLICY
) -> MemmapStore | ZarrStore:
    """Open the files of a generation, after checking type and size of each."""
    if metadata.engine == "zarr":
        return ZarrStore.open(folder, metadata, writable=writable, policy=policy)
    return MemmapStore.open(
        folder, metadata.ring, metadata.schema, writable=writable, policy=policy
    )
