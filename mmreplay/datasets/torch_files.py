"""Torch files read without torch: the names in one, and tensors as rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmreplay.convert import zip_file
from mmreplay.convert.array_file import ArrayColumn, native
from mmreplay.convert.description import KEY
from mmreplay.convert.zip_file import STORED
from mmreplay.datasets.common.rows import Array
from mmreplay.disk.files import File
from mmreplay.errors import FormatError

MAX_NBYTES = 16 << 20
SLAB_NBYTES = 16 << 20


def names(path: Path, *needed: bytes) -> bool:
    """Return whether a torch file of others has all of these strings."""
    try:
        file = File.open(path, None)
    except FormatError:
        return False
    try:
        entries = zip_file.parse(file)
        for name, entry in entries.items():
            small = entry.method == STORED and entry.nbytes <= MAX_NBYTES
            if name.endswith("/data.pkl") and small:
                data = file.pread(entry.nbytes, entry.offset)
                return KEY.encode() not in data and all(each in data for each in needed)
    except FormatError:
        return False
    finally:
        file.close()
    return False


class TensorRows:
    """One environment's rows of a circular tensor; see `common.rows.Rows`.

    The tensor is ``[environments, slots, *shape]``, or has slots first.
    """

    def __init__(
        self,
        file: File,
        column: ArrayColumn,
        env_id: int,
        first: int,
        count: int,
        *,
        slots_first: bool,
    ) -> None:
        """Read a circular tensor.

        Args:
            file: The torch file.
            column: The tensor in the file.
            env_id: The environment.
            first: Slot of the oldest row.
            count: Number of rows.
            slots_first: Whether slots are the first axis.
        """
        self.dtype, self.count = column.dtype, count
        self.shape = column.shape[2:]
        self._file, self._column = file, column
        self._slots = column.shape[0 if slots_first else 1]
        self._row_nbytes = column.stored.itemsize
        for axis in self.shape:
            self._row_nbytes *= axis
        # Distance of the environment's slots, and position of the first, in rows.
        self._step = column.shape[1] if slots_first else 1
        self._begin = env_id if slots_first else env_id * self._slots
        self._first = first

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        found = np.empty((stop - first, *self.shape), self._column.stored)
        size = max(1, SLAB_NBYTES // max(1, self._row_nbytes * self._step))
        done = 0
        while done < len(found):
            slot = (self._first + first + done) % self._slots
            many = min(size, len(found) - done, self._slots - slot)
            found[done : done + many] = self._slab(slot, many)
            done += many
        return native(found, self.dtype)

    def _slab(self, slot: int, many: int) -> Array:
        """Return consecutive slots; rows of other environments are skipped."""
        span = (many - 1) * self._step + 1
        slab = np.empty((span, *self.shape), self._column.stored)
        if not slab.size:
            return slab[:: self._step]
        assert self._column.offset is not None
        place = (self._begin + slot * self._step) * self._row_nbytes
        data = slab.reshape(-1).view(np.uint8).data
        self._file.pread_into(data, self._column.offset + place)
        return slab[:: self._step]
