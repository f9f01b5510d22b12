"""What a transform is given and what it does."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes import EpisodeIndex
from mmreplay.schema import Schema

Fields = dict[str, NDArray[np.generic]]
Ids = NDArray[np.int64]


class Rows(Protocol):
    """A buffer as transforms read it: stored rows by position, and boundaries.

    What is read must lie within the declared window of a legal start, or in its
    episode's future. The caller checks afterwards that all of it was still alive.
    """

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""

    @property
    def heads(self) -> Ids:
        """int64 ``[E]``: rows below are written."""

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows, uint8 ``[B]``; see `episodes`."""

    def read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Stored fields of rows, ``[B, *shape]`` per path; ends as reported."""
