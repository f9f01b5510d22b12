"""What was drawn from several buffers, without the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.samplers.base import Draw
from mmreplay.samplers.forms import padded

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BufferDraw:
    """What was drawn from one of several buffers.

    Attributes:
        number: Which buffer.
        draw: Its steps, probabilities being of all buffers' steps.
    """

    number: int
    draw: Draw

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.draw)


@dataclass(frozen=True, slots=True)
class ConcatDraw:
    """What was drawn from several buffers, to be gathered in any process.

    Attributes:
        parts: One for each buffer that anything was drawn from, in their order.
    """

    parts: tuple[BufferDraw, ...]

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return sum(len(part) for part in self.parts)

    @staticmethod
    def joined(parts: Sequence[BufferDraw], pad: bool) -> ConcatDraw:
        """Put draws of several buffers together.

        Args:
            parts: One for each buffer that anything was drawn from, in their order.
            pad: They are of padded episodes, and padded to the longest of all.
        """
        if not pad:
            return ConcatDraw(tuple(parts))
        windows = [w for part in parts if (w := part.draw.windows) is not None]
        whole = [
            BufferDraw(part.number, part.draw.around(longer))
            for part, longer in zip(parts, padded(windows), strict=True)
        ]
        return ConcatDraw(tuple(whole))

    @property
    def buffer_ids(self) -> Ids:
        """int64 ``[B]``, which buffer each step is of."""
        numbers = [np.full(len(part), part.number) for part in self.parts]
        return np.concatenate(numbers)
