"""From a sampler's draw to a batch: pending draws, what is left of them, transforms.

A draw names steps, windows or whole episodes. The reader copies their data, now or
later; meanwhile a writer may overwrite some of them, and what is left is whole again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.episodes.starts import BufferIdentity
from mmreplay.errors import SchemaError, shown
from mmreplay.format.metadata import Metadata
from mmreplay.samplers.base import Draw, Sampler, ask, require_integer, traits_of
from mmreplay.samplers.holding import Claims, threads
from mmreplay.schema import Schema
from mmreplay.schema.convert import array_of
from mmreplay.transforms.base import BufferRows, Fields, Ids, RowReads

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

MAX_INT64 = 2**63 - 1
LimitsBefore = tuple[Ids, Ids]
"""Limits and tails before rows were copied; see `GenerationReader.stale`."""


@dataclass(frozen=True, slots=True)
class PendingDraw:
    """A draw whose data is copied later.

    Attributes:
        sampler: The sampler that made it, for steps in place of overwritten ones.
        draw: Steps, or windows.
        count: How many were asked for.
        before: Limits and tails when it was made.
        home: Of the reader that it was made with: the identity of one generation.
        hold: What it took; stored by the caller, when the batch is handed out.
    """

    sampler: Sampler
    draw: Draw
    count: int
    before: LimitsBefore
    home: BufferIdentity
    claims: Claims


class DrawCount:
    """How often a buffer was drawn from; under the lock of its view.

    A sampler is put back after a failure only where no other thread has drawn since.

    Attributes:
        total: By all threads.
    """

    __slots__ = ("total",)

    def __init__(self) -> None:
        """Begin at 0."""
        self.total = 0

    def count(self) -> None:
        """Count a draw of this thread."""
        self.total += 1
        drawn = threads.drawing.drawn
        if drawn is not None:
            drawn.append(self)


class BatchTransform(Protocol):
    """All transforms of a buffer composed: makes batches of stored rows.

    Attributes:
        before: Rows before a step that its data reaches, where its episode has them.
        after: Rows after it, up to the episode's end; the row of the next observation
            is one of them.
        derived: Next observations are read from the row after a step.
        as_stored: Paths of fields that batches hold as they are stored.
    """

    before: int
    after: int
    derived: bool
    as_stored: frozenset[str]

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the fields of a batch; None where a function makes them."""

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the fields whose arrays hold the bits of bfloat16 numbers."""

    @property
    def unknown(self) -> frozenset[str]:
        """Names of the fields that are NaN where they cannot be computed."""

    @property
    def reach(self) -> dict[str, tuple[int, ...]]:
        """Rows around a step that its batch is read from, by stored field."""

    def rows_read(
        self, rows: BufferRows, env_ids: Ids, positions: Ids, key: int, length: int | None
    ) -> Iterable[RowReads]:
        """Say which rows `gather` will read, some of them twice; see there."""

    def gather(
        self, rows: BufferRows, env_ids: Ids, positions: Ids, key: int, length: int | None
    ) -> Fields:
        """Make the fields of legal starts, ``[N, *shape]`` per name.

        Args:
            rows: The buffer.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, legal starts under before and after.
            key: All randomness follows from it.
            length: Steps a window, one window after another; None without windows.
        """


def batch_transform(transforms: Sequence[Transform], metadata: Metadata) -> BatchTransform | None:
    """Compose a buffer's transforms, or return None where there are none.

    Raises:
        SchemaError: The transforms do not fit the schema, the ring, or each other.
    """
    if not transforms:
        return None
    from mmreplay.transforms.pipeline import Pipeline

    follows = metadata.autoreset == "next_step"
    composed = Pipeline(transforms, metadata.schema, final_follows=follows)
    rows, capacity = composed.before + 1 + composed.after, metadata.ring.capacity
    if rows > capacity:
        raise SchemaError(
            f"transforms must read at most {capacity} rows of each environment, which "
            f"the buffer holds, got windows of {rows}. Read fewer steps, or increase "
            "the capacity with resize."
        )
    return composed


def check_sampler(sampler: object) -> Sampler:
    """Return what can draw from a buffer; `check_fields` checks its fields.

    Raises:
        SchemaError: It is no sampler.
    """
    made = sampler is not None and not isinstance(sampler, type)
    if not made or not callable(getattr(sampler, "draw", None)):
        raise SchemaError(
            "sampler must be a sampler such as UniformSampler(seed=0), got "
            f"{shown(sampler)}. Make one, or leave it out."
        )
    return cast(Sampler, sampler)


def check_fields(sampler: Sampler, schema: Schema, transform: BatchTransform | None) -> None:
    """Check the fields that a sampler, and those in it, names.

    Args:
        sampler: Any.
        schema: Of the rows that it draws.
        transform: What makes batches of them; None for the rows as they are.

    Raises:
        SchemaError: Rows are looked up by a field that is not there, or is not one
            integer, or is mutable; or `first_only` names no field of the batch.
    """
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        if traits_of(each).ends:
            check_ends(each)
        path = ask(each, "looked_up")
        if path is not None:
            require_integer(path, schema)
        waiting += ask(each, "parts")
    names = [*schema.paths, *next_paths(schema).values()]
    made = names if transform is None else transform.names
    if made is not None:
        fields_under(traits_of(sampler).first_only, made)


def check_ends(sampler: Sampler) -> None:
    """Check that a sampler whose epochs end says when they do.

    Raises:
        SchemaError: It has no `epoch`, `more` or `num_batches` of its own.
    """
    lacking = [] if ask(sampler, "epoch") is not None else ["epoch"]
    lacking += [
        name
        for name in ("more", "num_batches")
        # What it inherits says that no epoch ends.
        if getattr(type(sampler), name, None) in (None, getattr(Sampler, name))
    ]
    if lacking:
        raise SchemaError(
            f"{type(sampler).__name__} has traits with ends=True, and no "
            f"{' or '.join(lacking)} of its own. Define what is missing, as "
            "mmreplay.samplers.base.Sampler says, or leave ends=True out."
        )


def next_paths(schema: Schema) -> dict[str, str]:
    """Path of each observation field to the name of its derived successor.

    Empty where there is no observation, or next observations are stored.
    """
    role = schema.role("observation")
    if role is None or schema.role("next_observation") is not None:
        return {}
    return {
        path: "next_observation" + path[len(role) :] for path in schema.role_paths("observation")
    }


def draw_of(env_ids: Ids, positions: Ids, key: int = 0) -> Draw:
    """Make a draw of given steps, each as likely."""
    count = len(positions)
    probabilities = np.full(count, 1 / max(1, count))
    return Draw(env_ids, positions, probabilities, np.ones(count, np.float32), key)


def integers(name: str, values: ArrayLike) -> Ids:
    """Return int64 numbers of rows.

    Raises:
        SchemaError: They are no integers, or none that a row can have.
    """
    array = array_of(values, name)
    kind = array.dtype.kind
    if array.size and kind not in "iu":
        raise SchemaError(f"{name} must be integers, got {array.dtype}. Cast them first.")
    if array.size and kind == "u" and int(array.max()) > MAX_INT64:
        raise SchemaError(
            f"{name} must be at most {MAX_INT64}, got {array.max()}. See buffer.span "
            "for the positions alive."
        )
    return array.astype(np.int64)


def steps_of(draw: Draw) -> tuple[Ids, Ids]:
    """Environments and positions of every step, one window after another."""
    if draw.windows is None:
        return draw.env_ids, draw.positions
    positions = draw.windows.positions
    return np.repeat(draw.env_ids, positions.shape[1]), positions.reshape(-1)


def oldest_steps(draw: Draw) -> Ids:
    """Oldest step of each draw: the ring overwrites the oldest rows first."""
    return draw.positions if draw.windows is None else draw.windows.positions[:, 0]


def newest_steps(draw: Draw) -> Ids:
    """Newest step of each draw."""
    if draw.windows is None:
        return draw.positions
    newest: Ids = draw.windows.positions.max(axis=1)
    return newest


def num_drawn(draw: Draw) -> int:
    """Steps, windows or, where whole episodes are drawn, episodes of a draw."""
    return len(draw) if draw.offsets is None else len(draw.offsets) - 1


def left_of(draw: Draw, good: NDArray[np.bool_]) -> tuple[Ids, Draw]:
    """Return indices of the good steps or windows of a draw, and a draw of those alone.

    Args:
        draw: Steps, windows or whole episodes.
        good: bool ``[B]``, which to keep; episodes are kept whole or not at all.
    """
    offsets = draw.offsets
    if offsets is not None:
        lengths = np.diff(offsets)
        complete = np.logical_and.reduceat(good, offsets[:-1])
        good = np.repeat(complete, lengths)
        offsets = np.append(0, np.cumsum(lengths[complete]))
    indices = np.flatnonzero(good)
    return indices, replace(draw.taken(indices), offsets=offsets)


def fields_under(paths: tuple[str, ...], fields: Iterable[str]) -> list[str]:
    """Return the fields of these paths, and those nested in them.

    Raises:
        SchemaError: There is none of some path.
    """
    selected = []
    for path in paths:
        below = [name for name in fields if f"{name}/".startswith(f"{path}/")]
        if not below:
            way_out = "Check the spelling."
            if path.startswith("next_"):
                way_out = "The transform WithoutNext leaves next observations out."
            raise SchemaError(
                f"first_only must name fields of the batch ({list(fields)}), got "
                f"{path!r}. {way_out}"
            )
        selected += below
    return selected
