"""Stores and publishes steps and blocks by one call: twin of ``_rows_append.h``."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.kernels.slot import SlotKernel

Array = NDArray[np.int64]


class StepPacker(Protocol):
    """The members of a packer that an `Append` uses; see `rows.PackerKernel`."""

    rows: bytearray
    num_envs: int
    stride: int

    def prepare(self, data: Mapping[str, object], /) -> int:
        """Check and pack one step, or return -1."""

    def stream(self, out: memoryview, columns: Mapping[str, Any], first: int, stop: int, /) -> None:
        """Pack rows of columns."""


class AppendKernel(Protocol):
    """Stores steps through mappings whose pages are ready, and publishes them."""

    def reserve(
        self,
        records: Any,
        flags: Any,
        commit: Any,
        limits: Array,
        tails: Array,
        low: int,
        high: int,
        until: float,
        heap_tails: Array | None = None,
        /,
    ) -> None:
        """Allow steps into some rows until a time; the former reservation ends.

        Args:
            records: A mapping of the records.
            flags: A mapping of the flags.
            commit: A mapping of the COMMIT file.
            limits: int64 ``[E]``, published with each step.
            tails: int64 ``[E]``, likewise.
            low: The first row.
            high: The row after the last one.
            until: In seconds of `time.monotonic`.
            heap_tails: int64 ``[E]``, published likewise where there is a heap.

        Raises:
            ValueError: There are no such rows, a step is too long to be packed, or heap
                tails are missing.
        """

    def release(self) -> None:
        """End the reservation and release the mappings."""

    def add(
        self,
        data: Mapping[str, object],
        row: int,
        offset: int,
        number: int,
        heads: Array,
        heap_heads: Array | None = None,
        /,
    ) -> bool:
        """Store a step that ends no episode and needs no conversion, and publish it.

        Args:
            data: A nested or flat mapping; see `rows.PackerKernel.prepare`.
            row: The step's first row.
            offset: Where its publication goes in the COMMIT file.
            number: The publication's sequence number.
            heads: int64 ``[E]``, published with it.
            heap_heads: int64 ``[E]``, likewise, where there is a heap.

        Returns:
            Whether the step was added; if not, nothing was stored.

        Raises:
            ValueError: The offset lies outside the COMMIT file.
            TypeError: Heap heads are missing, or there is no heap.
        """

    def extend(
        self,
        columns: Mapping[str, Any],
        first: int,
        flags: NDArray[np.uint8],
        records: Any,
        row: int,
        marks: Any,
        commit: Any,
        offset: int,
        number: int,
        heads: Array,
        limits: Array,
        tails: Array,
        /,
    ) -> None:
        """Store rows and their flags through mappings, and publish them.

        No reservation is needed: the pages of the rows are ready.

        Args:
            columns: C-contiguous arrays of whole rows, for each field of the record.
            first: Rows of the columns that come before the block.
            flags: uint8, a byte of each row of the block, C-contiguous.
            records: A mapping of the records.
            row: The block's first row.
            marks: A mapping of the flags.
            commit: A mapping of the COMMIT file.
            offset: Where the publication goes in the COMMIT file.
            number: The publication's sequence number.
            heads: int64 ``[E]``, published with it.
            limits: int64 ``[E]``, likewise.
            tails: int64 ``[E]``, likewise.

        Raises:
            ValueError: There are no such rows, the offset lies outside the COMMIT file,
                or there is a heap.
        """


class Append:
    """Adds steps to reserved rows; see `AppendKernel`."""

    def __init__(self, packer: StepPacker, slot: SlotKernel, /) -> None:
        """Begin without a reservation.

        Args:
            packer: Prepares the steps.
            slot: Encodes the publications.
        """
        self._packer, self._slot = packer, slot
        self._reserved: tuple[Any, ...] = ()

    def reserve(
        self,
        records: Any,
        flags: Any,
        commit: Any,
        limits: Array,
        tails: Array,
        low: int,
        high: int,
        until: float,
        heap_tails: Array | None = None,
        /,
    ) -> None:
        """See `AppendKernel.reserve`."""
        self._reserved = ()
        if not self._slot.has_heap:
            heap_tails = None
        elif heap_tails is None:
            raise ValueError("reserve: heap tails must be given")
        packer = self._packer
        stride = packer.stride
        fits = 0 <= low <= high <= len(flags) and stride > 0
        fits = fits and high <= len(records) // stride and len(packer.rows) > 0
        bounds = limits, tails, tails if heap_tails is None else heap_tails
        if not fits or {len(bound) for bound in bounds} != {packer.num_envs}:
            raise ValueError("reserve: rows must be in the files, packed together")
        self._reserved = (records, flags, commit, limits, tails, low, high, until, heap_tails)

    def release(self) -> None:
        """See `AppendKernel.release`."""
        self._reserved = ()

    def add(
        self,
        data: Mapping[str, object],
        row: int,
        offset: int,
        number: int,
        heads: Array,
        heap_heads: Array | None = None,
        /,
    ) -> bool:
        """See `AppendKernel.add`."""
        if (heap_heads is not None) != self._slot.has_heap:
            raise TypeError("add takes heap heads exactly where there is a heap")
        if not self._reserved:
            return False
        records, flags, commit, limits, tails, low, high, until, heap_tails = self._reserved
        packer, envs = self._packer, self._packer.num_envs
        if not low <= row <= high - envs or monotonic() >= until:
            return False
        if not 0 <= offset <= len(commit) - len(self._slot.data):
            raise ValueError("add: offset must be of a publication")
        if packer.prepare(data) != 0:
            return False
        publication = self._slot.publish(number, heads, limits, tails, heap_heads, heap_tails)
        first = row * packer.stride
        records[first : first + len(packer.rows)] = packer.rows
        flags[row : row + envs] = bytes(envs)
        commit[offset : offset + len(publication)] = publication
        return True

    def extend(
        self,
        columns: Mapping[str, Any],
        first: int,
        flags: NDArray[np.uint8],
        records: Any,
        row: int,
        marks: Any,
        commit: Any,
        offset: int,
        number: int,
        heads: Array,
        limits: Array,
        tails: Array,
        /,
    ) -> None:
        """See `AppendKernel.extend`."""
        if self._slot.has_heap:
            raise ValueError("extend: it publishes no heap")
        stride, count = self._packer.stride, flags.size
        fits = stride > 0 and count > 0 and first >= 0
        fits = fits and 0 <= row <= min(len(marks), len(records) // stride) - count
        if not fits or not 0 <= offset <= len(commit) - len(self._slot.data):
            raise ValueError("extend: rows must be in the files, and offset of a publication")
        out = memoryview(records)[row * stride : (row + count) * stride]
        self._packer.stream(out, columns, first, first + count)
        marks[row : row + count] = flags.tobytes()
        publication = self._slot.publish(number, heads, limits, tails)
        commit[offset : offset + len(publication)] = publication
