"""Facts about a sample and about sections of it: environments, newest steps.

A value that is rare in a buffer may be the only one in one environment, or in the
newest steps. The memory of facts is bounded by the environments, and by 4,096 steps of
each component.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MIN_ROWS = 32
"""Of fewer rows nothing is concluded about values that do not change."""
MIN_ENV_ROWS = 65
"""Of an environment: neighbours alone may be one manoeuvre."""
TAIL = 0.01
"""Share of values that may lie beyond the ends of a component's range, at each end."""
OFTEN = 0.1
"""Share of the older steps: with a value that is as frequent, a component may stay."""
NEAR = 0.005
"""Share of the range that is taken for its end."""
AT_A_TIME = 1 << 19
"""Values that are sorted together."""
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
COUNTED_COMPONENTS = 256
"""Of an action, whose values are counted."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that values are of, by number.

    Attributes:
        env_ids: int64 ``[N]``, growing.
        eighths: uint8 ``[N]``, 0 for the oldest of an environment, 7 for the newest.
        ends: bool ``[N]``, the step ends its episode.
        num_envs: Of the buffer.
    """

    env_ids: Ids
    eighths: NDArray[np.uint8]
    ends: Bools
    num_envs: int

    def pick(self, which: Bools | slice) -> Steps:
        """Return some of them."""
        return Steps(self.env_ids[which], self.eighths[which], self.ends[which], self.num_envs)

    def lately(self) -> list[tuple[str, Bools]]:
        """Return the newest quarter and the newest eighth where they have the rows."""
        found = [("the newest quarter", self.eighths >= 6)]
        found.append(("the newest eighth", self.eighths == 7))
        return [(name, rows) for name, rows in found if rows.sum() >= MIN_ROWS]

    def large_envs(self) -> tuple[Ids, Ids]:
        """Return the environments with enough rows, and numbers for all rows.

        Returns:
            int64 ``[P]``, and int64 ``[N]`` in ``[0, P)``, -1 for other environments.
            Of a single environment nothing, as it is the whole.
        """
        counts = np.bincount(self.env_ids, minlength=self.num_envs)
        large = np.flatnonzero(counts >= MIN_ENV_ROWS)
        if self.num_envs < 2:
            large = large[:0]
        numbers = np.full(self.num_envs, -1)
        numbers[large] = np.arange(len(large))
        return large, numbers[self.env_ids]


def looked_at(rows: int, complete: bool, num_sections: int = 0, num_envs: int = 1) -> str:
    """Say what a finding is from.

    Args:
        rows: Steps.
        complete: They are all steps of the buffer.
        num_sections: Environments that were looked at by themselves.
        num_envs: Of the buffer.
    """
    # Of all steps no number: a writer may have added some since.
    steps = "all steps" if complete else f"a sample of {rows:,} steps"
    if num_envs < 2:
        return steps
    if num_sections == 0:
        return f"{steps}, not by environment"
    if num_sections == num_envs:
        return f"{steps} and each of {num_envs:,} environments"
    return f"{steps} and {num_sections:,} of {num_envs:,} environments"


@dataclass(frozen=True, slots=True)
class Spread:
    """How values of each component are spread, in all steps and in sections of them.

    Attributes:
        sections: ``""`` for all steps, then names such as ``"environment 3"``, ``[P]``.
        rows: Steps that were looked at, evenly over the sample.
        num_envs: Environments among the sections.
        num_values: int64 ``[C]``, different finite values.
        lows: float64 ``[C]``, the lowest but 1 % of the values; NaN where none is
            finite.
        highs: float64 ``[C]``, the highest but 1 %.
        at_lows: float64 ``[P, C]``, share of the finite values within 0.5 % of the
            range of its low end.
        at_highs: float64 ``[P, C]``, likewise.
        sizes: float64 ``[C]``, root mean square of the finite values.
        stopped: bool ``[C]``, the newest eighth, of several episodes, has one value,
            which is rare before.
        one_hot: Of each row one component is 1, the others 0: a choice, whose numbers
            stand in `top_values`.
        top_values: float64 ``[P, K]``, the most frequent values of the first
            components, at most 256; K is 0 where they are not counted.
        top_shares: float64 ``[P, K]``, their shares of the rows.
    """

    sections: tuple[str, ...]
    rows: int
    num_envs: int
    num_values: Ids
    lows: Floats
    highs: Floats
    at_lows: Floats
    at_highs: Floats
    sizes: Floats
    stopped: Bools
    one_hot: bool
    top_values: Floats
    top_shares: Floats


def spread_of(values: NDArray[np.generic], steps: Steps, counted: bool) -> Spread:
    """Measure the spread of values.

    Args:
        values: ``[N, C]``, at least one row.
        steps: N, that they are of.
        counted: How often the single values occur, and sections by themselves, matter.
    """
    step = max(COUNTED_COMPONENTS, AT_A_TIME // len(values))
    one_hot = (
        counted
        and values.shape[1] > 1
        and bool(((values == 0) | (values == 1)).all())
        and bool((values.sum(axis=1) == 1).all())
    )
    pieces = []
    for first in range(0, values.shape[1], step):
        columns = values[:, first : first + step]
        pieces.append(_spread_of(columns, steps, counted, first == 0, one_hot))
    if len(pieces) == 1:
        return pieces[0]
    joined: dict[str, Any] = {
        each.name: np.concatenate([getattr(piece, each.name) for piece in pieces], -1)
        for each in fields(Spread)
        if isinstance(getattr(pieces[0], each.name), np.ndarray)
    }
    return replace(pieces[0], **joined)


def _spread_of(
    values: NDArray[np.generic], steps: Steps, counted: bool, first: bool, one_hot: bool
) -> Spread:
    """Measure the spread of some components, the first ones or others."""
    sections: list[tuple[str, Bools | slice]] = [("", slice(None))]
    num_envs = 0
    if counted:
        sections += steps.lately()
        large, _ = steps.large_envs()
        begins, ends = (np.searchsorted(steps.env_ids, large, s) for s in SIDES)
        sections += [
            (f"environment {env_id}", slice(begin, end))
            for env_id, begin, end in zip(large, begins, ends, strict=True)
        ]
        num_envs = len(large)
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    wide[~finite] = np.nan
    ordered = np.sort(wide, axis=0)  # NaN last
    counts = finite.sum(axis=0)
    last = np.maximum(counts - 1, 0)
    columns = np.arange(wide.shape[1])
    lows = ordered[np.floor(TAIL * last).astype(np.int64), columns]
    highs = ordered[np.ceil((1 - TAIL) * last).astype(np.int64), columns]
    num_values = (counts > 0) + (ordered[1:] > ordered[:-1]).sum(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        near = NEAR * (highs - lows)
        low = np.abs(wide - lows) <= near
        high = (np.abs(wide - highs) <= near) & ~low
        sizes = np.sqrt(np.square(wide).sum(0, where=finite) / np.maximum(counts, 1))

    some = wide[:, : COUNTED_COMPONENTS if counted and first else 0]
    if some.size and one_hot:
        some = wide.argmax(axis=1)[:, None].astype(np.float64)
    tops = [_tops(some[rows]) for _, rows in sections]
    return Spread(
        sections=tuple(name for name, _ in sections),
        rows=len(wide),
        num_envs=num_envs,
        num_values=num_values,
        lows=lows,
        highs=highs,
        at_lows=np.stack([_share(low[rows], finite[rows]) for _, rows in sections]),
        at_highs=np.stack([_share(high[rows], finite[rows]) for _, rows in sections]),
        sizes=sizes,
        stopped=_stopped(wide, steps),
        one_hot=one_hot,
        top_values=np.stack([top for top, _ in tops]),
        top_shares=np.stack([share for _, share in tops]),
    )


def _stopped(values: Floats, steps: Steps) -> Bools:
    """Which components had several values, and have one of late."""
    newest = steps.eighths == 7
    if newest.sum() < MIN_ROWS or steps.ends[newest].sum() < 2:
        return np.zeros(values.shape[1], bool)
    value = values[newest][0]
    stopped: Bools = (values[newest] == value).all(axis=0)
    # A contact may have no force for long, as it had before.
    stopped &= (values[~newest] == value).mean(axis=0) <= OFTEN
    return stopped


def _share(mask: Bools, finite: Bools) -> Floats:
    """Share of the finite values of each component that a mask has."""
    found: Floats = mask.sum(axis=0) / np.maximum(1, finite.sum(axis=0))
    return found


def _tops(values: Floats) -> tuple[Floats, Floats]:
    """Return the most frequent value of each component, and its share of the rows.

    Args:
        values: ``[N, C]``, at least one row.

    Returns:
        float64 ``[C]`` twice.
    """
    tops, shares = np.full(values.shape[1], np.nan), np.zeros(values.shape[1])
    for number in range(values.shape[1]):
        distinct, counts = np.unique(values[:, number], return_counts=True)
        tops[number] = distinct[counts.argmax()]
        shares[number] = counts.max() / len(values)
    return tops, shares


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """What a sample says of one reward field, by environment and over time.

    Attributes:
        rows: int64 ``[E]``, steps by environment.
        nonzero: int64 ``[E]``, those with a finite reward other than 0.
        newest_rows: Steps of the newest quarter.
        newest_nonzero: Those of them with a reward.
        old_size: Typical size of the rewards of the oldest quarter, and of the highest
            of them: ``(median, 98 % quantile)`` of those other than 0; NaN where there
            are few. Steps that end an episode are left out, unless nearly all of them
            are such.
        new_size: Of the newest eighth, and the highest of the newest quarter.
        outliers: Steps whose reward is far beyond all others.
        outlier: The largest of them in size; NaN where there is none.
        usual: Size that 99 % of the rewards other than 0 do not exceed.
    """

    rows: Ids
    nonzero: Ids
    newest_rows: int
    newest_nonzero: int
    old_size: tuple[float, float]
    new_size: tuple[float, float, float]
    outliers: int
    outlier: float
    usual: float


FAR, FAR_AT_END = 1e3, 1e5
"""Of an outlier: times the usual size. A goal may be worth much."""
SPARSE = 0.1
"""Share of the rewards other than 0: where fewer are within episodes, their ends are
compared."""


def reward_facts(values: NDArray[np.generic], steps: Steps) -> RewardFacts:
    """Measure rewards ``[N, C]`` of N steps."""
    wide = values.astype(np.float64)
    wide[~np.isfinite(wide)] = 0
    largest = np.abs(wide).argmax(axis=1)
    rewards = wide[np.arange(len(wide)), largest]
    sizes = np.abs(rewards)
    some = sizes > 0
    within, newest = some & ~steps.ends, steps.eighths >= 6
    if within.sum() <= SPARSE * some.sum():
        within = some
    old, new = sizes[within & (steps.eighths < 2)], sizes[within & newest]
    latest = sizes[within & (steps.eighths == 7)]
    usual = float(np.quantile(sizes[some], 0.99, method="lower")) if some.any() else 0.0
    far = some & (sizes > usual * np.where(steps.ends, FAR_AT_END, FAR))
    return RewardFacts(
        rows=np.bincount(steps.env_ids, minlength=steps.num_envs),
        nonzero=np.bincount(steps.env_ids[some], minlength=steps.num_envs),
        newest_rows=int(newest.sum()),
        newest_nonzero=int((some & newest).sum()),
        old_size=(_quantile(old, 0.5), _quantile(old, 0.98)),
        new_size=(_quantile(latest, 0.5), _quantile(latest, 0.98), _quantile(new, 0.98)),
        outliers=int(far.sum()),
        outlier=float(rewards[sizes.argmax()]) if far.any() else np.nan,
        usual=usual,
    )


def _quantile(sizes: Floats, share: float) -> float:
    """A quantile of at least 8 sizes, else NaN."""
    return float(np.quantile(sizes, share)) if len(sizes) >= 8 else np.nan


class RowRepeats:
    """Which steps of a sample equal the step before, in all of some fields.

    Attributes:
        paths: Of the fields.
        same: bool ``[N]``, the step follows the one before it, and all fields agree.
        looked: bool ``[N]``, the step and the one before it were read of all fields.
    """

    def __init__(self, follows: Bools) -> None:
        """Begin without a field; `follows` is that of the sample."""
        self.paths: list[str] = []
        self.same = follows.copy()
        self.looked = follows.copy()

    def take(self, path: str, same: Bools, looked: Bools) -> None:
        """Take one more field.

        Args:
            path: The field.
            same: bool ``[N]``, equal to the row before.
            looked: bool ``[N]``, both rows were read.
        """
        self.paths.append(path)
        self.looked &= looked
        self.same &= same & looked

    def shares(self, steps: Steps, alone: bool = False) -> list[tuple[str, int, float]]:
        """Return the shares of repeated steps: of all, of the newest, by environment.

        Args:
            steps: Of the sample.
            alone: Of several repeated steps in a row count the first.

        Returns:
            Names of the sections (``""`` for all), their steps, and the shares.
            Sections with few steps are left out.
        """
        of_pairs = steps.pick(self.looked)
        same = self.same.copy()
        if alone:
            same[1:] &= ~self.same[:-1]
        same = same[self.looked]
        sections = [("", len(same), float(same.mean()) if len(same) else 0.0)]
        for name, rows in of_pairs.lately():
            sections.append((name, int(rows.sum()), float(same[rows].mean())))
        large, numbers = of_pairs.large_envs()
        counts = np.bincount(numbers[numbers >= 0], minlength=len(large)).tolist()
        sums = np.bincount(numbers[(numbers >= 0) & same], minlength=len(large))
        for env_id, count, total in zip(large, counts, sums.tolist(), strict=True):
            sections.append((f"environment {env_id}", count, total / count))
        return [section for section in sections if section[1] >= MIN_ROWS]
