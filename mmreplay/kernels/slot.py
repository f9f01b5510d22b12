"""Publications with their checksums: the twin of ``_rows_slot.h``."""

from __future__ import annotations

import struct
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


class SlotKernel(Protocol):
    """Encodes publications.

    Attributes:
        data: The last publication's bytes; they change with the next.
    """

    data: bytearray

    def publish(
        self, number: int, heads: Array, limits: Array, tails: Array, /
    ) -> bytearray:
        """Put the values and their checksum into `data`, and return it."""


class Slot:
    """Encodes publications of some environments; see `SlotKernel`."""

    def __init__(
        self, template: bytes, sequence: int, columns: int, num_envs: int, /
    ) -> None:
        """Begin with one record.

        Args:
            template: A record's bytes, zeros between its body and its checksum.
            sequence: Where its number stands.
            columns: Where its body begins: four columns of int64 ``[E]``.
            num_envs: Environments.

        Raises:
            ValueError: The parts do not fit each other.
        """
        end = columns + 32 * num_envs
        fits = num_envs >= 1 and 0 <= sequence <= columns - 8
        if not fits or end > len(template) - 4 or any(template[end:-4]):
            raise ValueError(
                f"Slot: the record must have {num_envs} environments, and zeros up to "
                "its checksum"
            )
        self.data = bytearray(template)
        self._sequence = sequence
        body = np.frombuffer(self.data, "<i8", 4 * num_envs, columns)
        self._columns = body.reshape(4, num_envs)

    def publish(
        self, number: int, heads: Array, limits: Array, tails: Array, /
    ) -> bytearray:
        """See `SlotKernel.publish`."""
        for column, values in zip(self._columns, (heads, limits, tails), strict=False):
            if values.shape != column.shape:
                raise ValueError(
                    f"Slot: values must be int64 [{len(column)}], got "
                    f"{values.nbytes} bytes"
                )
            column[...] = values
        struct.pack_into("<Q", self.data, self._sequence, number)
        crc = google_crc32c.value(bytes(memoryview(self.data)[:-4]))
        struct.pack_into("<I", self.data, len(self.data) - 4, crc)
        return self.data
