"""A sample of a buffer's steps, and facts about each field in it.

Up to 65,536 steps are all looked at. Of more, runs of 64 neighbours are taken evenly
over the ring: neighbours, so that repeated frames are seen and pages are shared. Some
MiB of one field are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import FINAL, START
from mmreplay.errors import StaleError
from mmreplay.page.frames import ImageLayout
from mmreplay.page.rows import read_left
from mmreplay.page.varying import numbers_of
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.stats import Moments, count_values, edges_of, moments_of, whole_edges

SAMPLE_ROWS = 1 << 16
SAMPLE_NBYTES, MAX_SAMPLE_NBYTES = 16 << 20, 64 << 20
"""Of one field: fewer rows of large ones are looked at. Where they need not be together
in memory, at least 64 rows, while they take no more than the latter."""
BLOCK_NBYTES = 4 << 20
"""Of rows that are in memory at a time."""
RUN_ROWS = 64
HISTOGRAM_COMPONENTS = 8
BINS = 40
FEW_VALUES = 8
"""A component with at most so many values is a switch, such as a gripper."""
FEW_ROWS = 4096
"""Rows that values are counted in."""
MAX_WHOLE = 1 << 51
"""Half a number from smaller ones is a float64 as well."""

Ids = NDArray[np.int64]
Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some steps of a buffer.

    Attributes:
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``, neighbours side by side.
        follows: bool ``[N]``, the step follows the one before it in the sample, in the
            same episode.
        complete: These are all steps that the buffer holds.
    """

    env_ids: Ids
    positions: Ids
    follows: NDArray[np.bool_]
    complete: bool

    def __len__(self) -> int:
        """Steps."""
        return len(self.positions)

    def at_most(self, count: int) -> Sample:
        """Return about so many steps of it, in runs of neighbours, evenly."""
        if len(self) <= count:
            return self
        run = min(RUN_ROWS, max(1, count // 4))
        firsts = np.linspace(0, len(self) - run, max(1, count // run)).astype(np.int64)
        rows = np.unique((firsts[:, None] + np.arange(run)).ravel())
        follows = self.follows[rows]
        follows[1:] &= np.diff(rows) == 1
        follows[0] = False
        return Sample(self.env_ids[rows], self.positions[rows], follows, False)


def take_sample(buffer: ReplayBuffer, maximum: int = SAMPLE_ROWS) -> Sample:
    """Choose steps evenly over what the buffer holds.

    Args:
        buffer: Open in any mode.
        maximum: Rows, at most.
    """
    view = buffer.view
    span = view.span
    lengths, total = span.lengths, int(span.lengths.sum())
    edges = np.cumsum(lengths)
    complete = total <= maximum
    if complete:
        env_ids = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(total) + np.repeat(span.first - edges + lengths, lengths)
    else:
        run = min(RUN_ROWS, max(1, int(lengths.max())))
        num_runs = max(2, maximum // run)
        rows = (np.arange(num_runs) * (total - run)) // (num_runs - 1)
        envs = np.searchsorted(edges, rows, "right")
        firsts = rows - (edges - lengths)[envs] + span.first[envs]
        # A run stays within its environment.
        firsts = np.maximum(np.minimum(firsts, span.stop[envs] - run), span.first[envs])
        env_ids = np.repeat(envs, run)
        positions = (firsts[:, None] + np.arange(run)).ravel()
        inside = positions < span.stop[env_ids]
        env_ids, positions = env_ids[inside], positions[inside]
    flags = view.flags(env_ids, positions)
    steps = (flags & FINAL) == 0
    env_ids, positions, flags = env_ids[steps], positions[steps], flags[steps]
    follows = np.zeros(len(positions), bool)
    if len(positions):
        follows[1:] = (np.diff(positions) == 1) & (np.diff(env_ids) == 0)
        follows &= (flags & START) == 0
    return Sample(env_ids, positions, follows, complete)


def rows_of(field: Field, together: bool = False) -> int:
    """Rows of a field that a sample reads at most.

    Args:
        field: The field.
        together: All of them are in memory together.
    """
    row_nbytes = max(1, field.nbytes)
    minimum = 1 if together else min(RUN_ROWS, MAX_SAMPLE_NBYTES // row_nbytes)
    return max(1, minimum, min(SAMPLE_ROWS, SAMPLE_NBYTES // row_nbytes))


def sample_blocks(
    buffer: ReplayBuffer, path: str, sample: Sample
) -> Iterator[tuple[NDArray[np.bool_], Values]]:
    """Read a field of a sample, some MiB at a time.

    Rows that were overwritten since the sample was taken are left out.

    Yields:
        Which rows follow the one before them, bool ``[n]`` (see `Sample.follows`), and
        the values of the rows ``[n, components]``, bfloat16 as float32.

    Raises:
        StaleError: All of the rows were overwritten.
    """
    field = numbers_of(buffer.schema[path])
    step = max(1, BLOCK_NBYTES // max(1, field.nbytes))
    joined, some = False, False
    for first in range(0, len(sample), step):
        rows = slice(first, min(first + step, len(sample)))
        left, values = read_left(
            buffer, path, sample.env_ids[rows], sample.positions[rows]
        )
        follows = sample.follows[rows].copy()
        follows[1:] &= left[:-1]
        follows[0] &= joined
        joined = bool(left[-1])
        if len(values):
            some = True
            yield follows[left], widen(values, field).reshape(len(values), -1)
    if not some:
        raise StaleError(
            f"All rows of {path} were overwritten while they were read. Look again, or "
            "make a larger buffer."
        )


def sample_values(
    buffer: ReplayBuffer, path: str, sample: Sample, components: int
) -> Values:
    """Read the first components of a field of a sample, at least one step.

    Returns:
        ``[N, components]``, N as `rows_of` has it; bfloat16 as float32.
    """
    some = sample.at_most(rows_of(numbers_of(buffer.schema[path]), together=True))
    blocks = sample_blocks(buffer, path, some)
    return np.concatenate([values[:, :components].copy() for _, values in blocks])


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values occur.

    Attributes:
        counts: int64 ``[N]``.
        edges: float64 ``[N + 1]`` of bins; None where single values are counted.
        values: float64 ``[N]``, the values that were counted; None for bins.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64] | None = None
    values: NDArray[np.float64] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        if self.values is not None:
            return {"values": self.values, "counts": self.counts}
        return {"edges": self.edges, "counts": self.counts}


def histogram_of(values: Values, field: Field, bins: int = BINS) -> Histogram:
    """Count the finite values of one component.

    Args:
        values: ``[N]``.
        field: Of the values.
        bins: At most so many; up to 8 different values are counted one by one.
    """
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    if len(values) == 0:
        return Histogram(np.zeros(0, np.int64), np.zeros(0))
    some = np.unique(values[:FEW_ROWS])
    if len(some) <= FEW_VALUES:
        distinct, counts = np.unique(values, return_counts=True)
        if len(distinct) <= FEW_VALUES:
            return Histogram(counts.astype(np.int64), None, distinct.astype(np.float64))
    return bin_values([values], field, bins)[0]


def bin_values(
    arrays: Sequence[Values], field: Field, bins: int = BINS
) -> list[Histogram]:
    """Count the values of some arrays in the same bins.

    Args:
        arrays: Finite values ``[N]`` each; at least one of them is not empty.
        field: Of the values. Whole numbers get bins of whole width in a float field
            too: bins of 2 numbers beside bins of 3 would look like a pattern of the
            values.
        bins: At most so many.
    """
    moments = Moments()
    for values in arrays:
        moments = moments.merge(moments_of(values))
    whole = max(abs(moments.min), abs(moments.max)) < MAX_WHOLE and all(
        values.dtype.kind != "f" or bool((values == np.floor(values)).all())
        for values in arrays
    )
    if whole:
        edges = whole_edges(int(moments.min), int(moments.max), bins)
    else:
        edges = edges_of(moments, field, bins)
    none = np.zeros(len(edges) - 1, np.int64)
    counts = [
        count_values(values, moments, edges) if len(values) else none
        for values in arrays
    ]
    return [Histogram(each, edges) for each in counts]


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """What a sample says of one field.

    Attributes:
        path: The field.
        varies: Values vary in length, and these are facts about their lengths.
        role: The role that it, or a branch above it, plays; or ``""``.
        shape: Of one row.
        kind: Of the dtype: ``"f"``, ``"i"``, ``"u"`` or ``"b"``.
        image: How frames lie in it; None where it is no image.
        rows: Rows looked at.
        complete: These are all steps that the buffer holds.
        moments: Over all finite elements.
        num_nan: NaN elements.
        constant: Components with one finite value in all rows, int64 ``[N]``.
        constant_value: Of the first of them; NaN where there is none.
        repeats: Rows that equal the row before, in the same episode.
        pairs: Rows that follow another one of the same episode.
        nonzero: Rows in which a finite value differs from 0.
        at_limits: Share of the values of each component that are its lowest or
            highest, float64 ``[components]``; 0 for switches. Of float actions only.
        lows: float64 ``[components]``, lowest finite values; of float actions only.
        highs: float64 ``[components]``, highest finite values; likewise.
        histograms: Of the first 8 components; of rewards and actions only.
        top_value: The most frequent value; of integer scalars only.
        top_share: Its share of the rows.
        num_values: Different values; likewise.
    """

    path: str
    varies: bool
    role: str
    shape: tuple[int, ...]
    kind: str
    image: ImageLayout | None
    rows: int
    complete: bool
    moments: Moments
    num_nan: int
    constant: Ids
    constant_value: float
    repeats: int
    pairs: int
    nonzero: int
    at_limits: NDArray[np.float64]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]
    histograms: tuple[Histogram, ...]
    top_value: float
    top_share: float
    num_values: int

    @property
    def num_components(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Elements looked at."""
        return self.rows * self.num_components

    @property
    def num_infinite(self) -> int:
        """Infinite elements."""
        return self.moments.nonfinite - self.num_nan


def measure(
    buffer: ReplayBuffer,
    path: str,
    role: str,
    sample: Sample,
    image: ImageLayout | None,
) -> FieldFacts:
    """Read a field of a sample and count what the findings need.

    Args:
        buffer: Open in any mode.
        path: The field.
        role: The role that it plays, or ``""``.
        sample: At least one step.
        image: How frames lie in it, if it is an image.
    """
    varies, field = buffer.schema[path].varies, numbers_of(buffer.schema[path])
    counted = role in ("action", "reward") and image is None
    some = sample.at_most(rows_of(field, together=counted))
    moments, num_nan, repeats, nonzero = Moments(), 0, 0, 0
    num_rows, num_pairs = 0, 0
    blocks: list[Values] = []
    changing: NDArray[np.bool_] | None = None
    last: Values | None = None
    known: Values | None = None
    for follows, values in sample_blocks(buffer, path, some):
        num_rows += len(values)
        num_pairs += int(follows.sum())
        block_moments = moments_of(values)
        moments = moments.merge(block_moments)
        finite_nonzero = values != 0
        finite: NDArray[np.bool_] | None = None
        if block_moments.nonfinite:
            finite = np.isfinite(values)
            num_nan += int(np.isnan(values).sum())
            finite_nonzero &= finite
        nonzero += int(finite_nonzero.any(axis=1).sum())
        # The row before may be in the block before.
        joined = values if last is None else np.concatenate([last, values])
        differs = joined[1:] != joined[:-1]
        follows = follows[len(values) - len(differs) :]
        repeats += int((~differs.any(axis=1) & follows).sum())
        if values.dtype.kind == "f":
            # A NaN differs from everything, and is no value of its own.
            known = _first_finite(values, finite, known)
            other = values != known
            some_change = (other if finite is None else other & finite).any(axis=0)
        else:
            some_change = differs.any(axis=0)
        changing = some_change if changing is None else changing | some_change
        last = values[-1:]
        if counted:
            blocks.append(values)
    assert changing is not None
    assert last is not None
    known = last[0] if known is None else known
    constant = np.flatnonzero(~changing & np.isfinite(known))
    if varies:
        # Values of one length differ all the same.
        constant = constant[:0]
    floats = last.dtype.kind == "f"
    none = np.zeros(0)
    at_limits, lows, highs = none, none, none
    if role == "action" and floats and blocks:
        at_limits, lows, highs = _at_limits(blocks)
    histograms = tuple(
        histogram_of(np.concatenate([values[:, number] for values in blocks]), field)
        for number in range(min(HISTOGRAM_COMPONENTS, len(changing)))
        if blocks
    )
    top_value, top_share, num_values = math.nan, 0.0, 0
    single = len(changing) == 1 and not varies
    if blocks and role == "action" and not floats and single:
        distinct, counts = np.unique(np.concatenate(blocks), return_counts=True)
        top_value = float(distinct[counts.argmax()])
        top_share, num_values = float(counts.max() / counts.sum()), len(distinct)
    return FieldFacts(
        path=path,
        varies=varies,
        role=role,
        shape=field.shape,
        kind=last.dtype.kind,
        image=image,
        rows=num_rows,
        complete=some.complete,
        moments=moments,
        num_nan=num_nan,
        constant=constant,
        constant_value=float(known[constant[0]]) if len(constant) else math.nan,
        repeats=repeats,
        pairs=num_pairs,
        nonzero=nonzero,
        at_limits=at_limits,
        lows=lows,
        highs=highs,
        histograms=histograms,
        top_value=top_value,
        top_share=top_share,
        num_values=num_values,
    )


def _first_finite(
    values: Values, finite: NDArray[np.bool_] | None, known: Values | None
) -> Values:
    """Return the first finite value of each component, or one that is not finite.

    Args:
        values: ``[n, components]``.
        finite: Which of them are; None for all.
        known: What was returned for the rows before.
    """
    if known is not None and np.isfinite(known).all():
        return known
    rows = 0 if finite is None else finite.argmax(axis=0)
    first: Values = values[rows, np.arange(values.shape[1])]
    return first if known is None else np.where(np.isfinite(known), known, first)


def _at_limits(
    blocks: list[Values],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Share of each component on its lowest or highest value, and these values.

    Args:
        blocks: Of rows ``[n, components]``; some components at a time are copied.
    """
    num_components = blocks[0].shape[1]
    shares, lows, highs = (np.zeros(num_components) for _ in range(3))
    num_rows = sum(map(len, blocks))
    step = max(1, BLOCK_NBYTES // (blocks[0].dtype.itemsize * num_rows))
    for first in range(0, num_components, step):
        some = slice(first, first + step)
        values = np.concatenate([block[:, some] for block in blocks])
        finite = np.isfinite(values)
        low = np.where(finite, values, np.inf).min(axis=0)
        high = np.where(finite, values, -np.inf).max(axis=0)
        counts = np.maximum(1, finite.sum(axis=0))
        shares[some] = ((values == low) | (values == high)).sum(axis=0) / counts
        # Evenly over the rows: the first ones may be of a warm-up.
        ordered = np.sort(values[:: -(-num_rows // FEW_ROWS)], axis=0)
        differs = (ordered[1:] != ordered[:-1]) & np.isfinite(ordered[1:])
        num_values = 1 + differs.sum(axis=0)
        shares[some][(num_values <= FEW_VALUES) | ~np.isfinite(low)] = 0
        lows[some], highs[some] = low, high
    return shares, lows, highs


def component_name(path: str, component: int, shape: tuple[int, ...]) -> str:
    """Return the name of one element of a field, such as ``"action[2]"``."""
    if math.prod(shape) == 1:
        return path
    index = ", ".join(str(int(i)) for i in np.unravel_index(component, shape))
    return f"{path}[{index}]"
