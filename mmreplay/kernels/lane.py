"""Steps taken, stored and published by one call: the twin of ``_rows_lane.h``."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.kernels.slot import SlotKernel

Array = NDArray[np.int64]


class PackerOfSteps(Protocol):
    """What a lane asks of a packer; see `rows.PackerKernel`."""

    record: bytearray
    rows: bytearray
    num_envs: int

    def step(self, given: Mapping[str, object], /) -> int:
        """Take one step of the only environment, or return -1."""

    def wide(self, given: Mapping[str, object], /) -> int:
        """Take one step of all environments, or return -1."""


class LaneKernel(Protocol):
    """Stores steps through mappings whose pages are ready, and publishes them."""

    def lease(
        self, records: Any, flags: Any, commit: Any, limits: Array, tails: Array,
        low: int, high: int, until: float, /,
    ) -> None:  # fmt: skip
        """Allow steps into some rows, for some time; what was allowed before ends.

        Args:
            records: A mapping of the records.
            flags: A mapping of the flags.
            commit: A mapping of the publications.
            limits: int64 ``[E]``, as long as the lease is used.
            tails: int64 ``[E]``, likewise.
            low: The first row.
            high: The row after the last one.
            until: As `time.monotonic` tells it.

        Raises:
            ValueError: There are no such rows, or a step is too long to be packed.
        """

    def revoke(self) -> None:
        """Allow nothing more, and let the mappings go."""

    def add(
        self, given: Mapping[str, object], row: int, place: int, number: int,
        heads: Array, /,
    ) -> bool:  # fmt: skip
        """Take, store and publish a step that is plain and ends nowhere.

        Its flags are 0. Who sees the publication sees the step.

        Args:
            given: The step; see `rows.PackerKernel.step` and `wide`.
            row: Where it goes, or the first of its environments.
            place: Where the publication goes.
            number: Of the publication.
            heads: int64 ``[E]``, published.

        Returns:
            Whether it is in; if not, nothing was stored.

        Raises:
            ValueError: There is no such place.
        """


class Lane:
    """See `LaneKernel`."""

    def __init__(self, packer: PackerOfSteps, slot: SlotKernel, /) -> None:
        """Allow nothing yet.

        Args:
            packer: Of the steps.
            slot: Of the publications.
        """
        self._packer, self._slot = packer, slot
        self._leased: tuple[Any, ...] = ()

    def lease(
        self, records: Any, flags: Any, commit: Any, limits: Array, tails: Array,
        low: int, high: int, until: float, /,
    ) -> None:  # fmt: skip
        """See `LaneKernel.lease`."""
        self._leased = ()
        packer = self._packer
        envs, stride = packer.num_envs, len(packer.record)
        fits = 0 <= low <= high <= len(flags) and stride > 0
        fits = fits and high <= len(records) // stride
        fits = fits and (envs == 1 or len(packer.rows) > 0)
        if not fits or not len(limits) == len(tails) == envs:
            raise ValueError("lease: expected rows of the files, packed together")
        self._leased = records, flags, commit, limits, tails, low, high, until

    def revoke(self) -> None:
        """See `LaneKernel.revoke`."""
        self._leased = ()

    def add(
        self, given: Mapping[str, object], row: int, place: int, number: int,
        heads: Array, /,
    ) -> bool:  # fmt: skip
        """See `LaneKernel.add`."""
        if not self._leased:
            return False
        records, flags, commit, limits, tails, low, high, until = self._leased
        packer, envs = self._packer, self._packer.num_envs
        if not low <= row <= high - envs or monotonic() >= until:
            return False
        if not 0 <= place <= len(commit) - len(self._slot.data):
            raise ValueError("add: expected a place for a publication")
        if (packer.wide(given) if envs > 1 else packer.step(given)) != 0:
            return False
        data = self._slot.publish(number, heads, limits, tails)
        step = packer.rows if envs > 1 else packer.record
        first = row * len(packer.record)
        records[first : first + len(step)] = step
        flags[row : row + envs] = bytes(envs)
        commit[place : place + len(data)] = data
        return True
