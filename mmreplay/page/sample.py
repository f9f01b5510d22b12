"""A sample of a buffer's steps, and facts about each field in it.

Up to 65,536 steps are all looked at. Of more, runs of 64 neighbours are taken about
evenly over the ring: neighbours, so that repeated frames are seen and pages are shared.
Some MiB of one field are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import END, FINAL, START
from mmreplay.errors import StaleError
from mmreplay.page.frames import ImageLayout
from mmreplay.page.rows import read_left
from mmreplay.page.sections import (
    MIN_ROWS,
    RewardFacts,
    RowRepeats,
    Spread,
    Steps,
    reward_facts,
    spread_of,
)
from mmreplay.page.varying import numbers_of
from mmreplay.ring import Span
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.stats import Moments, count_values, edges_of, moments_of

SAMPLE_ROWS = 1 << 16
SAMPLE_NBYTES, MAX_SAMPLE_NBYTES = 16 << 20, 64 << 20
"""Of one field: fewer rows of large ones are looked at. Where they need not be together
in memory, at least 64 rows, while they take no more than the latter."""
BLOCK_NBYTES = 4 << 20
"""Of rows that are in memory at a time."""
RUN_ROWS = 64
GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, are spread evenly."""
HISTOGRAM_COMPONENTS = 8
BINS = 40
FEW_VALUES = 8
"""A component with at most so many values is a switch, such as a gripper."""
FEW_ROWS = 4096
"""Rows that values are counted in."""
SPREAD_VALUES = 1 << 19
"""Of one field, whose spread is measured: fewer rows of many components, at least 64.
That of an observation with more than 16,384 components is not measured."""

Ids = NDArray[np.int64]
Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some steps of a buffer.

    Attributes:
        env_ids: int64 ``[N]``, growing.
        positions: int64 ``[N]``, neighbours side by side.
        follows: bool ``[N]``, the step follows the one before it in the sample, in the
            same episode.
        ends: bool ``[N]``, the step ends its episode.
        eighths: uint8 ``[N]``, from 0 for the oldest eighth of what its environment
            holds to 7 for the newest.
        rows: int64 ``[N]``, where the steps stand in the sample that they are chosen
            from.
        complete: These are all steps that the buffer holds.
        num_envs: Of the buffer.
    """

    env_ids: Ids
    positions: Ids
    follows: NDArray[np.bool_]
    ends: NDArray[np.bool_]
    eighths: NDArray[np.uint8]
    rows: Ids
    complete: bool
    num_envs: int

    def __len__(self) -> int:
        """Steps."""
        return len(self.positions)

    def at_most(self, count: int) -> Sample:
        """Return about so many steps of it, in runs of neighbours, evenly."""
        if len(self) <= count:
            return self
        # A game may stand still for as long as a run of neighbours.
        run = min(RUN_ROWS, max(2, count // 16))
        firsts = np.linspace(0, len(self) - run, max(1, count // run)).astype(np.int64)
        rows = np.unique((firsts[:, None] + np.arange(run)).ravel())
        follows = self.follows[rows]
        follows[1:] &= np.diff(rows) == 1
        follows[0] = False
        return Sample(
            self.env_ids[rows],
            self.positions[rows],
            follows,
            self.ends[rows],
            self.eighths[rows],
            self.rows[rows],
            False,
            self.num_envs,
        )

    @property
    def steps(self) -> Steps:
        """The steps by environment and age."""
        return Steps(self.env_ids, self.eighths, self.ends, self.num_envs)


def take_sample(
    buffer: ReplayBuffer, maximum: int = SAMPLE_ROWS, span: Span | None = None
) -> Sample:
    """Choose steps evenly over what the buffer holds.

    Args:
        buffer: Open in any mode.
        maximum: Rows, at most.
        span: Which rows it holds; None for those at the moment.
    """
    view = buffer.view
    span = view.span if span is None else span
    lengths, total = span.lengths, int(span.lengths.sum())
    edges = np.cumsum(lengths)
    complete = total <= maximum
    if complete:
        env_ids = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(total) + np.repeat(span.first - edges + lengths, lengths)
    else:
        run = min(RUN_ROWS, max(1, int(lengths.max())))
        num_runs = max(2, maximum // run)
        numbers = np.arange(num_runs)
        rows = (numbers * (total - run)) // (num_runs - 1)
        # Not at equal distances: environments as long as one of them would each be
        # looked at in one place.
        spare = max(0, (total - run) // (num_runs - 1) - run)
        rows[1:-1] += (numbers[1:-1] * GOLDEN % 1 * spare).astype(np.int64)
        envs = np.searchsorted(edges, rows, "right")
        firsts = rows - (edges - lengths)[envs] + span.first[envs]
        # A run stays within its environment.
        firsts = np.maximum(np.minimum(firsts, span.stop[envs] - run), span.first[envs])
        env_ids = np.repeat(envs, run)
        positions = (firsts[:, None] + np.arange(run)).ravel()
        inside = positions < span.stop[env_ids]
        env_ids, positions = env_ids[inside], positions[inside]
        # Two runs overlap where both were moved away from the same edge.
        rows = positions - span.first[env_ids] + (edges - lengths)[env_ids]
        _, once = np.unique(rows, return_index=True)
        env_ids, positions = env_ids[once], positions[once]
    flags = view.flags(env_ids, positions)
    steps = (flags & FINAL) == 0
    env_ids, positions, flags = env_ids[steps], positions[steps], flags[steps]
    follows = np.zeros(len(positions), bool)
    if len(positions):
        follows[1:] = (np.diff(positions) == 1) & (np.diff(env_ids) == 0)
        follows &= (flags & START) == 0
    ages = (positions - span.first[env_ids]) * 8 // lengths[env_ids]
    return Sample(
        env_ids,
        positions,
        follows,
        (flags & END) != 0,
        ages.astype(np.uint8),
        np.arange(len(positions)),
        complete,
        len(lengths),
    )


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
) -> Iterator[tuple[Ids, NDArray[np.bool_], Values]]:
    """Read a field of a sample, some MiB at a time.

    Rows that were overwritten since the sample was taken are left out.

    Yields:
        Where the rows stand in the sample, int64 ``[n]``; which of them follow the one
        before them, bool ``[n]`` (see `Sample.follows`); and their values
        ``[n, components]``, bfloat16 as float32.

    Raises:
        StaleError: All of the rows were overwritten.
    """
    field = numbers_of(buffer.schema.drawn[path])
    step = max(1, BLOCK_NBYTES // max(1, field.nbytes))
    joined, some = False, False
    for first in range(0, len(sample), step):
        rows = slice(first, min(first + step, len(sample)))
        left, values = read_left(buffer, path, sample.env_ids[rows], sample.positions[rows])
        follows = sample.follows[rows].copy()
        follows[1:] &= left[:-1]
        follows[0] &= joined
        joined = bool(left[-1])
        if len(values):
            some = True
            at = first + np.flatnonzero(left)
            yield at, follows[left], widen(values, field).reshape(len(values), -1)
    if not some:
        raise StaleError(
            f"All rows of {path} were overwritten while they were read. Look again, or "
            "make a larger buffer."
        )


def sample_values(buffer: ReplayBuffer, path: str, sample: Sample, components: int) -> Values:
    """Read the first components of a field of a sample, at least one step.

    Returns:
        ``[N, components]``, N as `rows_of` has it; bfloat16 as float32.
    """
    some = sample.at_most(rows_of(numbers_of(buffer.schema.drawn[path]), together=True))
    blocks = sample_blocks(buffer, path, some)
    return np.concatenate([values[:, :components].copy() for *_, values in blocks])


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


def bin_values(arrays: Sequence[Values], field: Field, bins: int = BINS) -> list[Histogram]:
    """Count the values of some arrays in the same bins.

    Args:
        arrays: Finite values ``[N]`` each; at least one of them is not empty.
        field: Of the values.
        bins: At most so many.
    """
    moments = Moments()
    for values in arrays:
        moments = moments.merge(moments_of(values))
    edges = edges_of(moments, field, bins)
    none = np.zeros(len(edges) - 1, np.int64)
    counts = [count_values(values, moments, edges) if len(values) else none for values in arrays]
    return [Histogram(each, edges) for each in counts]


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """What a sample says of one field.

    Attributes:
        path: The field.
        varies: Values vary in length, and these are facts about their lengths.
        unread: No value was read; any may be NaN or infinite.
        role: The role that it, or a branch above it, plays; or ``""``.
        shape: Of one row.
        kind: Of the dtype: ``"f"``, ``"i"``, ``"u"`` or ``"b"``.
        image: How frames lie in it; None where it is no image.
        rows: Rows looked at.
        complete: These are all steps that the buffer holds.
        num_envs: Of the buffer.
        moments: Over all finite elements.
        num_nan: NaN elements.
        constant: Components with one finite value in all rows, int64 ``[N]``.
        constant_value: Of the first of them; NaN where there is none.
        nonzero: Rows in which a finite value differs from 0.
        spread: Of actions, and of observations that are no images; None of others, and
            of fewer than 32 rows.
        rewards: Of a reward; None of others.
        histograms: Of the first 8 components; of rewards and actions only.
    """

    path: str
    varies: bool
    unread: bool
    role: str
    shape: tuple[int, ...]
    kind: str
    image: ImageLayout | None
    rows: int
    complete: bool
    num_envs: int
    moments: Moments
    num_nan: int
    constant: Ids
    constant_value: float
    nonzero: int
    spread: Spread | None
    rewards: RewardFacts | None
    histograms: tuple[Histogram, ...]

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
    repeats: Sequence[RowRepeats] = (),
) -> FieldFacts:
    """Read a field of a sample and count what the findings need.

    Args:
        buffer: Open in any mode.
        path: The field.
        role: The role that it plays, or ``""``.
        sample: At least one step.
        image: How frames lie in it, if it is an image.
        repeats: Take which rows equal the row before.
    """
    varies, field = buffer.schema.drawn[path].rules.by_length, numbers_of(buffer.schema.drawn[path])
    counted = role in ("action", "reward") and image is None
    some = sample.at_most(rows_of(field, together=counted))
    moments, num_nan, nonzero, num_rows = Moments(), 0, 0, 0
    blocks: list[Values] = []
    num_components = math.prod(field.shape)
    spread_rows = max(RUN_ROWS, min(FEW_ROWS, SPREAD_VALUES // max(1, num_components)))
    spreads = image is None and role == "observation" and not varies
    spreads &= RUN_ROWS * num_components <= 2 * SPREAD_VALUES
    # Some rows, evenly; all of them where single values are counted.
    every = 1 if counted else -(-len(some) // spread_rows)
    places: list[Ids] = []
    same, looked = np.zeros((2, len(sample)), bool)
    changing: NDArray[np.bool_] | None = None
    last: Values | None = None
    known: Values | None = None
    for at, follows, values in sample_blocks(buffer, path, some):
        num_rows += len(values)
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
        if repeats:
            pairs = some.rows[at[len(values) - len(differs) :]]
            looked[pairs], same[pairs] = follows, ~differs.any(axis=1) & follows
        if values.dtype.kind == "f":
            # A NaN differs from everything, and is no value of its own.
            known = _first_finite(values, finite, known)
            other = values != known
            some_change = (other if finite is None else other & finite).any(axis=0)
        else:
            some_change = differs.any(axis=0)
        changing = some_change if changing is None else changing | some_change
        last = values[-1:]
        if counted or spreads:
            chosen = at % every == 0
            places.append(at[chosen])
            blocks.append(values if every == 1 else values[chosen])
    assert changing is not None
    assert last is not None
    known = last[0] if known is None else known
    constant = np.flatnonzero(~changing & np.isfinite(known))
    if varies:
        # Values of one length differ all the same.
        constant = constant[:0]
    for each in repeats:
        each.take(path, same, looked)
    spread: Spread | None = None
    rewards: RewardFacts | None = None
    if blocks and not varies and role in ("action", "observation", "reward"):
        values = np.concatenate(blocks)
        steps = some.steps.pick(np.concatenate(places))
        if role == "reward":
            rewards = reward_facts(values, steps)
        elif len(values) >= MIN_ROWS:
            thin = 1 if len(changing) == 1 else -(-len(values) // spread_rows)
            steps = steps.pick(slice(None, None, thin))
            spread = spread_of(values[::thin], steps, counted=role == "action")
    histograms = tuple(
        histogram_of(np.concatenate([values[:, number] for values in blocks]), field)
        for number in range(min(HISTOGRAM_COMPONENTS, len(changing)))
        if counted
    )
    return FieldFacts(
        path=path,
        varies=varies,
        unread=varies and "float" in buffer.schema.drawn[path].dtype,
        role=role,
        shape=field.shape,
        kind=last.dtype.kind,
        image=image,
        rows=num_rows,
        complete=some.complete,
        num_envs=sample.num_envs,
        moments=moments,
        num_nan=num_nan,
        constant=constant,
        constant_value=float(known[constant[0]]) if len(constant) else math.nan,
        nonzero=nonzero,
        spread=spread,
        rewards=rewards,
        histograms=histograms,
    )


def _first_finite(values: Values, finite: NDArray[np.bool_] | None, known: Values | None) -> Values:
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


def component_name(path: str, component: int, shape: tuple[int, ...]) -> str:
    """Return the name of one element of a field, such as ``"action[2]"``."""
    if math.prod(shape) == 1:
        return path
    index = ", ".join(str(int(i)) for i in np.unravel_index(component, shape))
    return f"{path}[{index}]"
