"""The memory engine: rows in RAM, for tests and small jobs; nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mmreplay.disk.files import File
from mmreplay.ring import Ring, Run
from mmreplay.schema import Schema
from mmreplay.storage.heap import MemoryHeap
from mmreplay.storage.layout import packer, record_layout, stored
from mmreplay.storage.store import Columns, UnsealedStore


class MemoryStore(UnsealedStore):
    """Arrays of rows; see `Store` for what each method owes.

    The pages of an array of zeros take memory when first written, so a large ring
    costs what it holds.
    """

    def __init__(self, ring: Ring, schema: Schema, heap_nbytes: int = 0) -> None:
        self.heap = MemoryHeap(ring.num_envs, heap_nbytes) if heap_nbytes else None
        self.records = None
        self.ring = ring
        self.schema = schema
        self.packed = frozenset[str]()
        self.limit_step = 1
        layout = record_layout(schema)
        self._packer = packer(schema, layout, ring.num_envs)
        self.ends = np.frombuffer(self._packer.ends, np.uint8)
        # Columns of the step prepared last, where it was packed.
        self._step: Columns = {}
        if layout.record is not None and len(self._packer.rows):
            step = np.frombuffer(self._packer.rows, layout.record)
            self._step = {path: step[path] for path in layout.record.names or ()}
        self._flags = np.zeros(ring.num_rows, np.uint8)
        self._arrays = {}
        for path, field in schema.fields.items():
            if path not in layout.served:
                dtype, shape = stored(field)
                self._arrays[path] = np.zeros((ring.num_rows, *shape), dtype)

    def write(self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]) -> None:
        """Write a batch of rows; see `Store.write`."""
        count = len(flags)
        for path, column in columns.items():
            if (array := self._arrays.get(path)) is None:
                continue
            values = column.reshape(count, *array.shape[1:])
            for row, first, stop in runs:
                array[row : row + stop - first] = values[first:stop]
        for row, first, stop in runs:
            self._flags[row : row + stop - first] = flags[first:stop]

    def prepare(self, data: Mapping[str, object]) -> int:
        """Check and pack one step; see `Store.prepare`."""
        return self._packer.prepare(data)

    def write_prepared(self, runs: Sequence[Run], flags: NDArray[np.uint8]) -> None:
        """Write the step prepared last; see `Store.write_prepared`."""
        self.write(runs, {**self._step, **self._packer.unpacked()}, flags)

    def allocate(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        """Do nothing: memory was promised when the arrays were made."""

    def give_up(self, limits: NDArray[np.int64]) -> None:
        """Do nothing: no page is read to be written."""

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`."""
        return {path: self._arrays[path].take(rows, 0) for path in paths if path in self._arrays}

    def prefetch(self, rows: NDArray[np.int64], paths: Sequence[str], now: bool = False) -> int:
        """Do nothing: the rows are in memory."""
        return 0

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        return self._flags

    def flags(self, rows: NDArray[np.int64], new: bool = False) -> NDArray[np.uint8]:
        """Flags of rows; see `Store.flags`."""
        return self._flags.take(rows)

    def set(self, path: str, rows: NDArray[np.int64], values: NDArray[np.generic]) -> None:
        """Overwrite a mutable field's values; see `Store.set`."""
        self._arrays[path][rows] = values

    def sync(self) -> None:
        """Do nothing: nothing here survives."""

    @property
    def files(self) -> list[File]:
        """None."""
        return []

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (bytes of the arrays, 0)."""
        nbytes = sum(array.nbytes for array in self._arrays.values())
        return nbytes + self._flags.nbytes, 0

    def unmap(self) -> None:
        """Do nothing: nothing is mapped."""

    def close(self) -> None:
        """Let the arrays go."""
        self._arrays = {}
