"""What a transform is given and what it does.

A pipeline looks at a draw through *layers*, one a transform, the buffer at the
bottom. A layer is asked for fields at rows near the steps drawn, and asks the one
below it: so n-step rewards are summed over rewards that hindsight has replaced, and
frames are stacked before whichever row holds the next observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.transforms.base_steps import BaseSteps, Where
from mmreplay.transforms.outline import Outline

Fields = dict[str, Any]
"""An array by path; `Ragged` of a field that varies."""
Ids = NDArray[np.int64]


RowReads = tuple[tuple[str, ...], Ids, Ids]
"""Stored fields, and where they are read: environments ``[M]`` and positions ``[M]``,
which may name rows twice, and rows that are not there."""


Asked = Mapping[Where, tuple[str, ...]]
"""Rows around the steps drawn, and the stored fields that are read there."""
Direct = Mapping[Where, Mapping[str, str]]
"""Rows of each step drawn, and the stored fields of them that batches hold as they
are, each with the name that it has there. Ends of episodes are of one row."""


class Sums(NamedTuple):
    """Stored rewards summed over the steps that are folded, with their discount.

    Attributes:
        where: The rows that are added up: those of all steps that may be folded.
        powers: float64 ``[steps + 1]``: by which each is multiplied, and the last by
            the number of steps, for the discount.
        dtypes: Paths of float32 or float64 fields, and the dtype of the sums of each.
        discount: Name of the discount, float32; None for none.
    """

    where: Where
    powers: NDArray[np.float64]
    dtypes: Mapping[str, np.dtype[np.generic]]
    discount: str | None


class FoundRows(NamedTuple):
    """What was found around some steps, in one pass; see `BufferRows.find`.

    Attributes:
        base_steps: int64 ``[3 + ..., N]``: first, last and following, as in
            `BaseSteps`.
        terminated: bool ``[N]``, as of `BaseSteps`.
        fields: What batches hold as it is, ``[N, *shape]`` by name, or
            ``[N, K, *shape]`` of K rows; sums by path, and the discount by name.
        columns: What was asked for, ``[N, K, *shape]`` each; not to be written into.
    """

    base_steps: Ids
    terminated: NDArray[np.bool_]
    fields: Fields
    columns: Mapping[Where, Fields]


class RowPlan(Protocol):
    """Where the rows that are asked for lie in a buffer; see `BufferRows.plan`."""

    def find(
        self,
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        read: Callable[[tuple[str, ...], Ids, Ids, Ids], Fields],
    ) -> FoundRows:
        """Look at the boundaries around legal starts, and read; see `BufferRows.find`.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            heads: int64 ``[E]``; rows below are written.
            read: Copies stored fields of rows, as `BufferRows.read` does, below heads.
        """


class BufferRows(Protocol):
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

    def plan(
        self, before: int, steps: int, direct: Direct, asked: Asked, sums: Sums | None
    ) -> RowPlan:
        """Find out once what every draw needs to know.

        Args:
            before: Rows before a step that may be read.
            steps: Steps folded into one, at least 1.
            direct: What batches hold as it is stored.
            asked: What is read of each draw.
            sums: What is summed for it; None for nothing.
        """

    def find(self, plan: RowPlan, env_ids: Ids, positions: Ids) -> FoundRows:
        """Look at the boundaries around legal starts, and read what was asked for.

        Args:
            plan: What `plan` returned.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
        """

    def read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Stored fields of rows, ``[B, *shape]`` per path; ends as reported."""

    def locate(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Begin and end of the episodes that hold the positions, of one moment.

        Returns:
            Two int64 ``[B]``: the first step alive, and one past the last step.
        """

    def known(self, env_ids: Ids, ends: Ids) -> Ids:
        """One past the last step of each episode whose next observation is known.

        Args:
            env_ids: int64 ``[B]``.
            ends: int64 ``[B]``, one past the last step, as of `locate`.
        """

    def intact(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Whether rows read before this call were whole, bool ``[B]``."""


class Layer(Protocol):
    """A draw of N steps as the transforms so far show it."""

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows.

        Args:
            paths: Fields that rows have (`Outline.of_rows`).
            rows: K rows in the episode of each step drawn, or their positions, int64
                ``[N, K]``; `BaseSteps.at` gives these of either. Rows by name are read
                all at once, those by position one call after the other.

        Returns:
            Per path ``[N, K, *shape]``; not to be written into, as others may be given
            the same.
        """

    def made(self, names: tuple[str, ...]) -> Fields:
        """Fields that steps drawn have and rows have not, ``[N, *shape]`` each."""

    def finish(self, fields: Fields) -> Fields:
        """Last changes to the whole batch, ``[N, *shape]`` per name."""


class Over:
    """A layer that shows what is below it; those that change something build on it."""

    def __init__(self, below: Layer, base_steps: BaseSteps) -> None:
        """Show a layer.

        Args:
            below: The one that it lies over.
            base_steps: The steps drawn.
        """
        self.below = below
        self.base_steps = base_steps

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
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
        finishes: Whether its layer has a `finish` of its own.
        stacks: Fields, as they are below, of which it shows so many rows up to each,
            oldest first, and changes nothing else.
        sums: Stored rewards that it sums, and the discount that it makes; None where
            it sums others.
    """

    outline: Outline
    over: Callable[[Layer, BaseSteps], Layer]
    elsewhere: Callable[[BaseSteps], Iterable[RowReads]] | None = None
    finishes: bool = True
    stacks: Mapping[str, int] = field(default_factory=dict)
    sums: Sums | None = None


class Transform(Protocol):
    """Something computed from stored single steps when they are drawn.

    A value: it can be pickled, and all its randomness follows from the draw's key. One
    that needs next observations has an attribute `reads_next` that is true, and is
    refused beside `WithoutNext`. A dataclass whose batches depend on nothing but its
    fields and the rows may say ``described = True``: it is made again of its fields, in
    processes that another one asks to draw.
    """

    def bind(self, outline: Outline) -> Bound:
        """Fit it to the fields below it.

        Raises:
            SchemaError: It cannot stand here; the message says why.
        """
