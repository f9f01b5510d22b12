"""What the Zarr engine asks of the memmap engine's files beyond rows."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from mmreplay.storage.base import Columns, Store
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.placement import RECORDS, place
from mmreplay.sums import crc32c


def free(tail: MemmapStore, row: int, count: int) -> None:
    """Give back the space of rows, but for flags and mutable fields."""
    placement = place(tail.schema)
    names = {
        name
        for path, name in placement.large.items()
        if not tail.schema.fields[path].mutable
    }
    for name in tail.space.names:
        if name in names | {RECORDS}:
            tail.space.free(name, row, count)


def put_back(tail: MemmapStore, row: int, columns: Columns, count: int) -> None:
    """Write rows anew that were there before, but for flags and mutable fields.

    Unlike `MemmapStore.write`, it is not said of the rows after them that they are to
    come: those may be alive.

    Args:
        tail: Where they go.
        row: The first one.
        columns: Per path ``[count, *shape]``.
        count: How many.
    """
    placement, schema = place(tail.schema), tail.schema
    if placement.record is not None:
        # Padding between fields is zeros.
        packed = np.zeros((count, placement.stride), np.uint8)
        tail.packer.pack(packed, columns, 0, count)
        offset = row * placement.stride
        tail.file(RECORDS).pwrite_pieces(packed.reshape(-1).data, offset)
    for path, name in placement.large.items():
        if not schema.fields[path].mutable:
            data = np.ascontiguousarray(columns[path]).reshape(-1).view(np.uint8)
            tail.file(name).pwrite_pieces(data.data, row * schema.fields[path].nbytes)


def checksum(store: Store, position: int, rows: NDArray[np.int64]) -> int:
    """CRC32C of a block's rows, as the memmap engine makes it of its files.

    Args:
        store: Where the rows are.
        position: The block's first.
        rows: int64 ``[block_rows]``.
    """
    placement, schema = place(store.schema), store.schema
    kept = [path for path, field in schema.fields.items() if not field.mutable]
    # Missing pages are else waited for one by one, by who holds the lock of Python.
    store.prefetch(rows, kept)
    crc = crc32c(struct.pack("<Q", position))
    crc = crc32c(store.flags(rows).tobytes(), crc)
    if placement.record is not None:
        names = placement.record.names or ()
        # Padding between fields is zeros.
        raw = np.zeros((len(rows), placement.stride), np.uint8)
        packed = raw.reshape(-1).view(placement.record)
        for path, column in store.gather(rows, names).items():
            packed[path] = column
        crc = crc32c(raw.data, crc)
    for path in placement.large:
        if not schema.fields[path].mutable:
            column = store.gather(rows, [path])[path]
            crc = crc32c(np.ascontiguousarray(column).tobytes(), crc)
    return crc
