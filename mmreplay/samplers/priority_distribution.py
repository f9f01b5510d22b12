"""Distributions over rows: how likely each is drawn, given the priorities.

`Proportional` draws in proportion to powers of the priorities, `RankBased` by their
order. Both keep a mass for each row that may be drawn in a `SumTree`. Their exponent
may follow a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import is_number
from mmreplay.errors import FormatError, SchemaError, called, shown
from mmreplay.samplers import states
from mmreplay.samplers.base import State
from mmreplay.samplers.sum_tree import SumTree, to_masses

MAX_ALPHA = 4.0
"""The fourth power of any float32 but 0 is a float64 that a sum can hold."""

Ids = NDArray[np.int64]
Masses = NDArray[np.float64]
Numbers = NDArray[np.float32]


class PriorityDistribution(Protocol):
    """A mass for every row that may be drawn; rows are drawn in proportion to it.

    It lives as long as one ring: rows are opened, changed and closed, and their
    priorities are handed in with each call.

    Attributes:
        positive: No open row has the mass 0.
    """

    positive: bool

    def ready(self, step: int, values: Numbers) -> bool:
        """Get ready for a draw.

        Args:
            step: The draw's; alpha follows it.
            values: float32 ``[num_rows]``, every row's priority.

        Returns:
            False where every open row has to be put again.
        """

    def put(self, rows: Ids, values: Numbers) -> None:
        """Open rows, or use their new priorities.

        Args:
            rows: int64 ``[N]``; an open row may be named more than once.
            values: float32 ``[num_rows]``, every row's priority.
        """

    def drop(self, rows: Ids) -> None:
        """Close rows ``[N]``: they are not drawn until they are put again."""

    def reset(self) -> None:
        """Close every row."""

    def is_open(self, rows: Ids) -> NDArray[np.bool_]:
        """Tell which rows have a mass above 0, bool ``[N]``."""

    def renew(self, rows: Ids, values: Numbers) -> bool:
        """Use new priorities, as `put` does, if all rows are open.

        Returns:
            False where one is not, and nothing was done.
        """

    def draw(self, shares: Masses, stratified: bool, scale: float) -> tuple[Ids, Masses]:
        """Draw the rows that shares of the total fall on.

        Args:
            shares: float64 ``[B]``, in ``[0, 1]``; growing shares give rows that grow
                in the distribution's own order. Overwritten with the rows'
                probabilities.
            stratified: Share i is one of the i-th of B equal segments.
            scale: A mass to compare with, or 0 for the least of those drawn.

        Returns:
            Rows, and the scale over their masses, ``[B]`` each.
        """

    @property
    def total(self) -> float:
        """Sum of all masses."""

    @property
    def num_open(self) -> int:
        """Rows with a mass above 0."""

    def lowest(self) -> float:
        """The least mass above 0, or infinity where there is none."""

    def state_dict(self) -> State:
        """Its state beside the priorities."""

    def load_state_dict(self, state: State) -> None:
        """Continue from a state, after all rows that it had open are open again.

        Raises:
            FormatError: It is no such state.
        """


Schedule = float | Callable[[int], float]
"""A constant, or a number by step: a sampler's draws are its steps, from 0 on."""


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """Moves from one number to another in equal steps, and stays there.

    Attributes:
        start: The number at step 0.
        stop: The number from step `steps` on.
        steps: At least 1.

    Example:
        >>> beta = mr.LinearSchedule(0.4, 1.0, steps=100_000)
        >>> beta(50_000)
        0.7
        >>> sampler = mr.PrioritizedSampler(beta=beta)
    """

    described: ClassVar[bool] = True

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            number = getattr(self, name)
            if not (is_number(number) and math.isfinite(number)):
                raise SchemaError(
                    f"LinearSchedule {name} must be a finite number, got "
                    f"{shown(number)}. Pass, for example, 0.4."
                )
        if type(self.steps) is not int or self.steps < 1:
            raise SchemaError(
                "LinearSchedule steps must be an integer of at least 1, got "
                f"{shown(self.steps)}. For a constant, pass the number itself instead "
                "of a schedule."
            )

    def __call__(self, step: int) -> float:
        """The number at a step."""
        if step >= self.steps:
            return float(self.stop)
        return self.start + (self.stop - self.start) * (step / self.steps)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule and the range of its numbers.

    Attributes:
        name: Its name in messages.
        schedule: The number, or a callable of the step.
        maximum: The greatest number allowed; the least one is 0.
    """

    name: str
    schedule: Schedule
    maximum: float

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            self._checked(self.schedule)

    @property
    def constant(self) -> bool:
        """Whether it is the same at every step."""
        return not callable(self.schedule)

    def at(self, step: int) -> float:
        """The number at a step.

        Raises:
            SchemaError: It is out of range.
        """
        if not callable(self.schedule):
            return float(self.schedule)
        return self._checked(called(f"the schedule of {self.name}", self.schedule, step))

    def _checked(self, number: object) -> float:
        if not (is_number(number) and 0 <= number <= self.maximum):
            raise SchemaError(
                f"{self.name} must be a number in [0, {self.maximum:g}] or a callable "
                f"that maps a step to one, got {shown(number)}. Pass, for example, "
                "mmreplay.LinearSchedule(0.4, 1.0, steps=100_000)."
            )
        return float(number)


class TreeDistribution(PriorityDistribution, Protocol):
    """A distribution whose masses are the leaves of one sum tree."""

    _tree: SumTree
    _low: RunningMaximum[np.float64] | None

    @property
    def total(self) -> float:
        """Sum of all masses."""
        return self._tree.total

    @property
    def num_open(self) -> int:
        """Rows with a mass above 0."""
        return self._tree.nnz

    def renew(self, rows: Ids, values: Numbers) -> bool:
        """Use new priorities, if all rows are open."""
        if not self.is_open(rows).all():
            return False
        self.put(rows, values)
        return True

    def lowest(self) -> float:
        """The least mass above 0, or infinity where there is none."""
        if self._low is None:
            self._low = RunningMaximum(np.minimum, np.inf)
        return self._low.look(self._tree.leaves)


class Proportional(TreeDistribution):
    """Rows in proportion to ``(priority + eps) ** alpha``.

    Schaul et al. 2016, "Prioritized experience replay", section 3.3, proportional.
    8.5 bytes a row, 9.1 once the lowest mass was asked for.
    """

    def __init__(self, num_rows: int, alpha: Scheduled, eps: float, every: int) -> None:
        """Make one whose rows are all closed.

        Args:
            num_rows: Rows.
            alpha: The exponent.
            eps: Added to every priority.
            every: Steps between two looks at an alpha that is not constant.
        """
        self._tree = SumTree(num_rows)
        self._schedule = alpha
        self._eps = eps
        self._every = every
        self._alpha = alpha.at(0)
        self._low: RunningMaximum[np.float64] | None = None
        with np.errstate(over="ignore"):
            self.positive = bool(to_masses(np.array([eps], float), MAX_ALPHA) > 0)

    def ready(self, step: int, values: Numbers) -> bool:
        """Follow alpha; False where it changed."""
        if self._schedule.constant:
            return True
        alpha = self._schedule.at(step // self._every * self._every)
        same = alpha == self._alpha
        self._alpha = alpha
        return same

    def put(self, rows: Ids, values: Numbers) -> None:
        """Open rows, or use their new priorities."""
        numbers: Masses = np.add(values.take(rows), self._eps, dtype=np.float64)
        self._set(rows, to_masses(numbers, self._alpha))

    def drop(self, rows: Ids) -> None:
        """Close rows."""
        self._set(rows, np.zeros(len(rows)))

    def _set(self, rows: Ids, masses: Masses) -> None:
        if self._low is not None:
            self._low.note(rows)
        self._tree.set(rows, masses)

    def reset(self) -> None:
        """Close every row."""
        self._low = None
        self._tree = SumTree(self._tree.capacity)

    def is_open(self, rows: Ids) -> NDArray[np.bool_]:
        """Tell which rows have a mass above 0, bool ``[N]``."""
        return self._tree.get(rows) > 0

    def renew(self, rows: Ids, values: Numbers) -> bool:
        """Use new priorities, if all rows are open."""
        if self._low is not None:
            self._low.note(rows)
        return self._tree.set_powers(rows, values, self._eps, self._alpha)

    def draw(self, shares: Masses, stratified: bool, scale: float) -> tuple[Ids, Masses]:
        """Draw rows, which grow with the shares."""
        return self._tree.draw_shares(shares, stratified, scale)

    def state_dict(self) -> State:
        """Nothing: masses follow from priorities, to the last bit."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


MIN_CHANGES = 1024
SORT_FRACTION = 4
CLOSED = -1


class RankBased(TreeDistribution):
    """Rows in proportion to ``rank ** -alpha``, rank 1 being the highest priority.

    Schaul et al. 2016, "Prioritized experience replay", section 3.3 and appendix
    B.2.1: the order is sorted again only now and then. Between two sorts a row whose
    priority changed keeps its rank, and the j-th row to enter gets the mass of rank
    j, even if another row has it. Probabilities are exact for the masses as they are.
    Rows lie in the tree by rank, so that strata are segments of like priorities.

    16.7 bytes a row (24.7 in rings of 2**31 rows); twice 8 more during a sort.
    """

    positive = True

    def __init__(self, num_rows: int, alpha: Scheduled, every: int | None) -> None:
        """Make one whose rows are all closed.

        Args:
            num_rows: Rows.
            alpha: The exponent; a change of it sorts.
            every: Changed and new priorities between two sorts; None for a quarter
                of the rows that were sorted last, and at least 1,024.
        """
        self._schedule = alpha
        self._alpha = alpha.at(0)
        self._every = every
        dtype = np.int32 if num_rows < 1 << 31 else np.int64
        self._order: NDArray[np.signedinteger] = np.empty(num_rows, dtype)
        self._index_of: NDArray[np.signedinteger] = np.empty(num_rows, dtype)
        self._tree = SumTree(num_rows)
        self.reset()

    def reset(self) -> None:
        """Close every row."""
        self._index_of.fill(CLOSED)
        self._tree = SumTree(self._tree.capacity)
        self._low: RunningMaximum[np.float64] | None = None
        self._stop = self._num_sorted = self._num_changed = 0
        self._stale = True

    def ready(self, step: int, values: Numbers) -> bool:
        """Sort if enough changed since the last sort, or alpha did."""
        alpha = self._schedule.at(step)
        every = self._every
        if every is None:
            every = max(MIN_CHANGES, self._num_sorted // SORT_FRACTION)
        changes = self._num_changed + self._stop - self._num_sorted
        if self._stale or alpha != self._alpha or changes >= every:
            self._alpha = alpha
            self._sort(values)
        return True

    def put(self, rows: Ids, values: Numbers) -> None:
        """Append new rows after all others."""
        fresh = rows[self._index_of[rows] == CLOSED]
        self._num_changed += len(rows) - len(fresh)
        if len(fresh) == 0:
            return
        if self._stop + len(fresh) > len(self._order):
            self._sort(values)
        indices = np.arange(self._stop, self._stop + len(fresh))
        self._order[indices] = fresh
        self._index_of[fresh] = indices
        self._set(indices, self._masses(indices))
        self._stop += len(fresh)

    def _masses(self, indices: Ids) -> Masses:
        """Masses of entries: by rank, or by their turn to enter."""
        ranks: Masses = np.add(indices, 1.0, dtype=np.float64)
        ranks[indices >= self._num_sorted] -= self._num_sorted
        return to_masses(ranks, -self._alpha)

    def _set(self, indices: Ids, masses: Masses) -> None:
        if self._low is not None:
            self._low.note(indices)
        self._tree.set(indices, masses)

    def drop(self, rows: Ids) -> None:
        """Close rows: empty their entries in the order."""
        indices = self._index_of[rows]
        indices = indices[indices != CLOSED].astype(np.int64)
        self._index_of[rows] = CLOSED
        self._set(indices, np.zeros(len(indices)))

    def _sort(self, values: Numbers) -> None:
        """Put open rows in order; of equal priorities the order stays what it was."""
        rows = self._order[: self._stop]
        rows = rows[self._index_of[rows] == np.arange(self._stop)]
        rows = rows[_descending(values[rows])]
        self._arrange(rows, len(rows))
        self._num_changed = 0
        self._stale = False

    def _arrange(self, order: NDArray[np.signedinteger], num_sorted: int) -> None:
        """Use an order, which may hold closed entries."""
        self._low = None
        self._stop, self._num_sorted = len(order), num_sorted
        self._order[: len(order)] = order
        self._index_of.fill(CLOSED)
        indices = np.flatnonzero(order != CLOSED)
        self._index_of[order[indices]] = indices
        masses = np.zeros(self._tree.capacity)
        masses[indices] = self._masses(indices)
        self._tree.fill(masses)

    def is_open(self, rows: Ids) -> NDArray[np.bool_]:
        """Tell which rows have a mass above 0, bool ``[N]``."""
        is_open: NDArray[np.bool_] = self._index_of[rows] != CLOSED
        return is_open

    def draw(self, shares: Masses, stratified: bool, scale: float) -> tuple[Ids, Masses]:
        """Draw rows, the highest ranks first."""
        indices, ratios = self._tree.draw_shares(shares, stratified, scale)
        return self._order[indices].astype(np.int64), ratios

    def state_dict(self) -> State:
        """The order, which later draws follow until it is sorted again."""
        order = self._order[: self._stop].astype(np.int64)
        order[self._index_of[order] != np.arange(self._stop)] = CLOSED
        return {
            "order": order,
            "num_sorted": self._num_sorted,
            "num_changed": self._num_changed,
            "stale": int(self._stale),
            "alpha": self._alpha,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue with an order, if it is one of the rows that are open now."""
        order = np.asarray(state.get("order"))
        if order.ndim != 1 or order.dtype.kind not in "iu":
            raise FormatError(
                "sampler state: order must be integers [N], got "
                f"{order.dtype}{list(order.shape)}. Pass what state_dict returned, "
                "unchanged."
            )
        num_sorted = states.stored_integer(state, "num_sorted", len(order) + 1)
        num_changed = states.stored_integer(state, "num_changed")
        stale = states.stored_integer(state, "stale", 2)
        alpha = state.get("alpha")
        if type(alpha) is not float or not 0 <= alpha <= MAX_ALPHA:
            raise FormatError(
                f"sampler state: alpha must be a number in [0, {MAX_ALPHA:g}], got "
                f"{alpha!r:.60}. Pass what state_dict returned, unchanged."
            )
        rows = np.sort(order[order != CLOSED])
        if not np.array_equal(rows, np.flatnonzero(self._index_of != CLOSED)):
            # The buffer moved on: what comes is not what was to come anyway.
            return
        self._alpha = alpha
        self._arrange(order.astype(self._order.dtype), num_sorted)
        self._num_changed = num_changed
        self._stale = bool(stale)


def _descending(values: Numbers) -> Ids:
    """Indices that sort, the highest first and of equal ones the first.

    Sorting whole numbers that hold index and priority in one takes a tenth of the
    time of a stable argsort, and gives the same on every processor.

    Args:
        values: float32 ``[N]``, at least 0.
    """
    if len(values) >= 1 << 32:
        return np.argsort(-values, kind="stable")
    # The bits of floats of at least 0 are in the order of the floats.
    keys = (values + np.float32(0)).view(np.uint32).astype(np.uint64)
    np.subtract(np.uint64(0xFFFFFFFF), keys, out=keys)
    keys <<= np.uint64(32)
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(0xFFFFFFFF)
    return keys.astype(np.int64)


BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS
FEW_BLOCKS = 4096
FEW_NUMBERS = 4096
"""Up to this many, all blocks are looked through."""

T = TypeVar("T", np.float32, np.float64)


class RunningMaximum(Generic[T]):
    """The greatest, or the least, of the numbers above 0 in an array.

    Few numbers change between two looks. Changes are only noted; a look works through
    the blocks of 16 that hold them, so that updates between looks cost next to nothing.
    It takes 1/15 of the size of the numbers, and holds no reference to the array, which
    may be a mapping that is to be closed.
    """

    def __init__(self, ufunc: np.ufunc, nothing: float) -> None:
        """Make one that has seen no number.

        Args:
            ufunc: ``np.maximum`` or ``np.minimum``.
            nothing: What a look gives where no number is above 0.
        """
        self._ufunc = ufunc
        self._nothing = nothing
        self._blocks: NDArray[T] | None = None
        self._above: RunningMaximum[T] | None = None
        self._changed: list[NDArray[np.int64]] = []
        self._num_changed = 0

    def note(self, indices: NDArray[np.int64]) -> None:
        """Note numbers that are about to change.

        Args:
            indices: int64 ``[N]``, theirs.
        """
        if self._blocks is None:
            return
        if self._num_changed > len(self._blocks):
            self.forget()
            return
        self._changed.append(indices >> BLOCK_BITS)
        self._num_changed += len(indices)

    def forget(self) -> None:
        """Treat every number as changed."""
        self._blocks, self._changed, self._num_changed = None, [], 0

    def look(self, numbers: NDArray[T]) -> float:
        """The extreme of the numbers above 0.

        Args:
            numbers: ``[N]``, N at least 1; the same array at every look.
        """
        if self._nothing == 0 and len(numbers) <= FEW_NUMBERS:
            # All are looked through sooner than some blocks.
            return float(self._ufunc.reduce(numbers))
        if self._blocks is None:
            self._fill(numbers)
        elif self._changed:
            self._follow(numbers)
        assert self._blocks is not None
        if self._above is not None:
            return self._above.look(self._blocks)
        return float(self._ufunc.reduce(self._present(self._blocks)))

    def _fill(self, numbers: NDArray[T]) -> None:
        count = -(-len(numbers) // BLOCK)
        blocks: NDArray[T] = np.empty(count, numbers.dtype)
        for first in range(0, count, FEW_BLOCKS):
            chunk = numbers[first * BLOCK : (first + FEW_BLOCKS) * BLOCK]
            edges = np.arange(0, len(chunk), BLOCK)
            blocks[first : first + FEW_BLOCKS] = self._ufunc.reduceat(self._present(chunk), edges)
        self._blocks = blocks
        few = count <= FEW_BLOCKS
        self._above = None if few else RunningMaximum(self._ufunc, self._nothing)

    def _follow(self, numbers: NDArray[T]) -> None:
        assert self._blocks is not None
        # Blocks more than once are fewer than finding them out would be worth.
        changed = np.concatenate(self._changed)
        num_full = len(numbers) // BLOCK
        if self._above is not None:
            self._above.note(changed)
        if num_full:
            # Where the last block is short, the one before stands in for it.
            blocks = np.minimum(changed, num_full - 1)
            rows = numbers[: num_full * BLOCK].reshape(num_full, BLOCK).take(blocks, 0)
            # Along short rows numpy reduces nine times more slowly than across.
            across = np.ascontiguousarray(rows.T)
            self._blocks[blocks] = self._ufunc.reduce(self._present(across), axis=0)
        if num_full < len(self._blocks):
            rest = self._present(numbers[num_full * BLOCK :])
            self._blocks[-1] = self._ufunc.reduce(rest)
        self._changed, self._num_changed = [], 0

    def _present(self, numbers: NDArray[T]) -> NDArray[T]:
        """Replace zeros by the number that stands for none."""
        if self._nothing == 0:
            return numbers
        present: NDArray[T] = np.where(numbers > 0, numbers, numbers.dtype.type(self._nothing))
        return present
