"""Publications with their checksums: the twin of ``_rows_slot.h``."""

from __future__ import annotations

import struct
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
HEAP_COLUMN = 4
"""Where the columns of a heap begin."""


class SlotKernel(Protocol):
    """Encodes publications.

    Attributes:
        data: The last publication's bytes; they change with the next.
        has_heap: Whether records have columns for a heap.
    """

    data: bytearray
    has_heap: bool

    def publish(
        self,
        number: int,
        heads: Array,
        limits: Array,
        tails: Array,
        heap_heads: Array | None = None,
        heap_tails: Array | None = None,
        /,
    ) -> bytearray:
        """Put the values and their checksum into `data`, and return it.

        Those of the heap only where a record has columns for them.
        """


class Slot:
    """Encodes publications of some environments; see `SlotKernel`."""

    def __init__(
        self, template: bytes, sequence: int, columns: int, num_envs: int, num_columns: int = 4, /
    ) -> None:
        """Begin with one record.

        Args:
            template: A record's bytes, zeros between its body and its checksum.
            sequence: Where its number stands.
            columns: Where its body begins: columns of int64 ``[E]``.
            num_envs: Environments.
            num_columns: 4, or 6 with those of the heap.

        Raises:
            ValueError: The parts do not fit each other.
        """
        end = columns + 8 * num_columns * num_envs
        fits = num_envs >= 1 and 0 <= sequence <= columns - 8
        fits = fits and num_columns in (4, 6)
        if not fits or end > len(template) - 4 or any(template[end:-4]):
            raise ValueError(
                f"Slot: the record must have {num_envs} environments, and zeros up to its checksum"
            )
        self.data = bytearray(template)
        self._sequence = sequence
        body = np.frombuffer(self.data, "<i8", num_columns * num_envs, columns)
        self._columns = body.reshape(num_columns, num_envs)
        self.has_heap = num_columns > HEAP_COLUMN

    def publish(
        self,
        number: int,
        heads: Array,
        limits: Array,
        tails: Array,
        heap_heads: Array | None = None,
        heap_tails: Array | None = None,
        /,
    ) -> bytearray:
        """See `SlotKernel.publish`."""
        given = [(0, heads), (1, limits), (2, tails)]
        if heap_heads is not None and heap_tails is not None:
            # After the cuts, which stay.
            given += [(HEAP_COLUMN, heap_heads), (HEAP_COLUMN + 1, heap_tails)]
        if len(self._columns) < given[-1][0]:
            raise ValueError("Slot: the record has no columns for a heap")
        for which, values in given:
            column = self._columns[which]
            if values.shape != column.shape:
                raise ValueError(
                    f"Slot: values must be int64 [{len(column)}], got {values.nbytes} bytes"
                )
            column[...] = values
        struct.pack_into("<Q", self.data, self._sequence, number)
        crc = google_crc32c.value(bytes(memoryview(self.data)[:-4]))
        struct.pack_into("<I", self.data, len(self.data) - 4, crc)
        return self.data
