"""What a transform is given and what it does.

A pipeline looks at a draw through *layers*, one a transform, the buffer at the
bottom. A layer is asked for fields at rows near the steps drawn, and asks the one
below it: so n-step rewards are summed over rewards that hindsight has replaced, and
frames are stacked before whichever row holds the next observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.transforms.anchors import Anchors
from mmreplay.transforms.outline import Outline

Fields = dict[str, NDArray[np.generic]]
Ids = NDArray[np.int64]


Touched = tuple[tuple[str, ...], Ids, Ids]
"""Stored fields, and where they are read: environments ``[M]`` and positions ``[M]``,
which may name rows twice, and rows that are not there."""


class Rows(Protocol):
    """A buffer as transforms read it: stored rows by position, and boundaries.

    What is read lies within the declared window of a legal start, or in its episode's
    future: the caller checks afterwards that all of it was still alive. Who reads an
    episode's past asks `intact`.
    """

    @property
    def heads(self) -> Ids:
        """int64 ``[E]``: rows below are written."""

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows, uint8 ``[B]``; see `episodes`."""

    def read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Stored fields of rows, ``[B, *shape]`` per path; ends as reported."""

    def locate(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Begin and end of the episodes that hold the positions, of one moment.

        Returns:
            Two int64 ``[B]``: the first step alive, and one past the last step.
        """

    def intact(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Whether rows read before this call were whole, bool ``[B]``."""


class Layer(Protocol):
    """A draw of N steps as the transforms so far show it."""

    def read(self, paths: tuple[str, ...], rows: Ids) -> Fields:
        """Fields of rows.

        Args:
            paths: Fields that rows have (`Outline.of_rows`).
            rows: int64 ``[N, K]``, positions in the episode of each step drawn.

        Returns:
            Per path ``[N, K, *shape]``; the caller may write into it.
        """

    def made(self, names: tuple[str, ...]) -> Fields:
        """Fields that steps drawn have and rows have not, ``[N, *shape]`` each."""

    def finish(self, fields: Fields) -> Fields:
        """Last changes to the whole batch, ``[N, *shape]`` per name."""


class Over:
    """A layer that shows what is below it; those that change something build on it."""

    def __init__(self, below: Layer, anchors: Anchors) -> None:
        """Show a layer.

        Args:
            below: The one that it lies over.
            anchors: The steps drawn.
        """
        self.below = below
        self.anchors = anchors

    def read(self, paths: tuple[str, ...], rows: Ids) -> Fields:
        """Fields of rows; see `Layer.read`."""
        return self.below.read(paths, rows)

    def made(self, names: tuple[str, ...]) -> Fields:
        """Fields of steps drawn; see `Layer.made`."""
        return self.below.made(names)

    def finish(self, fields: Fields) -> Fields:
        """Last changes; see `Layer.finish`."""
        return self.below.finish(fields)


@dataclass(frozen=True, slots=True)
class Bound:
    """A transform fitted to the fields below it.

    Attributes:
        outline: The fields above it.
        over: Makes its layer, over the one below.
        elsewhere: Rows that it reads beside those that the outline tells of, so that
            the disk is asked for them early; None where there are none.
    """

    outline: Outline
    over: Callable[[Layer, Anchors], Layer]
    elsewhere: Callable[[Anchors], Iterable[Touched]] | None = None


class Transform(Protocol):
    """Something computed from stored single steps when they are drawn.

    A value: it can be pickled, and all its randomness follows from the draw's key.
    """

    def bind(self, outline: Outline) -> Bound:
        """Fit it to the fields below it.

        Raises:
            SchemaError: It cannot stand here; the message says why.
        """
