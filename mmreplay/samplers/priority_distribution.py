"""The greatest or least of many numbers of which a few change between two looks.

Changes are only noted; a look works through the blocks of 16 that hold them, so
that updates which nobody looks at cost nothing. 1/15 of the numbers' own size.

By what law rows are drawn, given their priorities: in proportion to powers.

A law keeps a mass for every row that may be drawn and draws in proportion to it.

By what law rows are drawn, given their priorities: by rank.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FormatError
from mmreplay.samplers import states
from mmreplay.samplers.base import State
from mmreplay.samplers.schedules import Scheduled
from mmreplay.samplers.sum_tree import SumTree

BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS
FEW_BLOCKS = 4096
"""As many are looked through whole."""

T = TypeVar("T", np.float32, np.float64)


class RunningMaximum(Generic[T]):
    """The greatest, or the least, of the numbers above 0 in an array.

    It holds no reference to the array, which may be a mapping that is to be closed.
    """

    def __init__(self, ufunc: np.ufunc, nothing: float) -> None:
        """Make one that knows nothing yet.

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

    def note(self, places: NDArray[np.int64]) -> None:
        """Note numbers that are about to change.

        Args:
            places: int64 ``[N]``, where they are.
        """
        if self._blocks is None:
            return
        if self._num_changed > len(self._blocks):
            self.forget()
            return
        self._changed.append(places >> BLOCK_BITS)
        self._num_changed += len(places)

    def forget(self) -> None:
        """Take every number for changed."""
        self._blocks, self._changed, self._num_changed = None, [], 0

    def look(self, numbers: NDArray[T]) -> float:
        """The extreme of the numbers above 0.

        Args:
            numbers: ``[N]``, N at least 1; the same array at every look.
        """
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
            piece = numbers[first * BLOCK : (first + FEW_BLOCKS) * BLOCK]
            edges = np.arange(0, len(piece), BLOCK)
            blocks[first : first + FEW_BLOCKS] = self._ufunc.reduceat(
                self._present(piece), edges
            )
        self._blocks = blocks
        few = count <= FEW_BLOCKS
        self._above = None if few else RunningMaximum(self._ufunc, self._nothing)

    def _follow(self, numbers: NDArray[T]) -> None:
        assert self._blocks is not None
        # Blocks more than once are fewer than finding them out would be worth.
        changed = np.concatenate(self._changed)
        whole = len(numbers) // BLOCK
        if self._above is not None:
            self._above.note(changed)
        if whole:
            # Where the last block is short, the one before stands in for it.
            blocks = np.minimum(changed, whole - 1)
            found = numbers[: whole * BLOCK].reshape(whole, BLOCK).take(blocks, 0)
            # Along short rows numpy reduces nine times more slowly than across.
            across = np.ascontiguousarray(found.T)
            self._blocks[blocks] = self._ufunc.reduce(self._present(across), axis=0)
        if whole < len(self._blocks):
            rest = self._present(numbers[whole * BLOCK :])
            self._blocks[-1] = self._ufunc.reduce(rest)
        self._changed, self._num_changed = [], 0

    def _present(self, numbers: NDArray[T]) -> NDArray[T]:
        """Put what stands for nothing in the place of zeros."""
        if self._nothing == 0:
            return numbers
        present: NDArray[T] = np.where(
            numbers > 0, numbers, numbers.dtype.type(self._nothing)
        )
        return present


MAX_ALPHA = 4.0
"""The fourth power of any float32 but 0 is a float64 that a sum can hold."""

Ids = NDArray[np.int64]
Masses = NDArray[np.float64]
Numbers = NDArray[np.float32]


class PriorityDistribution(Protocol):
    """Masses of rows, kept as rows come, go and change.

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
        """Open rows, or take note of their new priorities.

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
        """Take note of new priorities, as `put` does, if all rows are open.

        Returns:
            False where one is not, and nothing was done.
        """

    def draw(
        self, shares: Masses, stratified: bool, scale: float
    ) -> tuple[Ids, Masses]:
        """Rows on which shares of the total fall, and what a scale is of their masses.

        Args:
            shares: float64 ``[B]``, in ``[0, 1]``; growing ones give growing places
                in the law's own order. Written over by the rows' probabilities.
            stratified: Share i is one of the i-th of B equal segments.
            scale: A mass, or 0 for the least of those drawn.

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
        """What it knows beside the priorities."""

    def load_state_dict(self, state: State) -> None:
        """Take that over, once all rows are open that are to be.

        Raises:
            FormatError: It is no such state.
        """


class TreeDistribution(Protocol):
    """A law whose masses are the leaves of one tree."""

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

    def is_open(self, rows: Ids) -> NDArray[np.bool_]:
        """See `Law.is_open`."""

    def put(self, rows: Ids, values: Numbers) -> None:
        """See `Law.put`."""

    def renew(self, rows: Ids, values: Numbers) -> bool:
        """See `Law.renew`."""
        if not self.is_open(rows).all():
            return False
        self.put(rows, values)
        return True

    def lowest(self) -> float:
        """The least mass above 0; see `Law.lowest`."""
        if self._low is None:
            self._low = RunningMaximum(np.minimum, np.inf)
        return self._low.look(self._tree.leaves)


class Proportional(TreeDistribution):
    """Rows in proportion to ``(priority + eps) ** alpha``.

    Schaul et al. 2016, "Prioritized experience replay", section 3.3, proportional.
    8.5 bytes a row, 9.1 once the lowest mass was asked for.
    """

    def __init__(self, num_rows: int, alpha: Scheduled, eps: float, every: int) -> None:
        """Make a law of rows that are all closed.

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
        self.positive = eps**MAX_ALPHA > 0

    def ready(self, step: int, values: Numbers) -> bool:
        """Look at alpha; see `Law.ready`."""
        if self._schedule.constant:
            return True
        alpha = self._schedule.at(step // self._every * self._every)
        same = alpha == self._alpha
        self._alpha = alpha
        return same

    def put(self, rows: Ids, values: Numbers) -> None:
        """Set masses; see `Law.put`."""
        masses: Masses = np.add(values.take(rows), self._eps, dtype=np.float64)
        np.power(masses, self._alpha, out=masses)
        self._set(rows, masses)

    def drop(self, rows: Ids) -> None:
        """Set masses of 0; see `Law.drop`."""
        self._set(rows, np.zeros(len(rows)))

    def _set(self, rows: Ids, masses: Masses) -> None:
        if self._low is not None:
            self._low.note(rows)
        self._tree.set(rows, masses)

    def reset(self) -> None:
        """Close every row; see `Law.reset`."""
        self._low = None
        self._tree = SumTree(self._tree.capacity)

    def is_open(self, rows: Ids) -> NDArray[np.bool_]:
        """See `Law.is_open`."""
        return self._tree.get(rows) > 0

    def renew(self, rows: Ids, values: Numbers) -> bool:
        """See `Law.renew`."""
        if self._low is not None:
            self._low.note(rows)
        return self._tree.set_powers(rows, values, self._eps, self._alpha)

    def draw(
        self, shares: Masses, stratified: bool, scale: float
    ) -> tuple[Ids, Masses]:
        """See `Law.draw`; rows grow with the shares."""
        return self._tree.draw_shares(shares, stratified, scale)

    def state_dict(self) -> State:
        """Nothing: masses follow from priorities, to the last bit."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Take nothing over."""


FEWEST_CHANGES = 1024
CHANGED_PART = 4
CLOSED = -1


class Ranks(TreeDistribution):
    """Rows in proportion to ``rank ** -alpha``, rank 1 being the highest priority.

    Schaul et al. 2016, "Prioritized experience replay", section 3.3 and appendix
    B.2.1: the order is sorted anew only now and then. Between two sorts a row whose
    priority changed keeps its rank, and the j-th row to enter gets the mass of rank
    j, whatever else has it. Probabilities are exact for the masses as they are.
    Rows lie in the tree by rank, so that strata are segments of like priorities.

    16.7 bytes a row (24.7 in rings of 2**31 rows); twice 8 more during a sort.
    """

    positive = True

    def __init__(self, num_rows: int, alpha: Scheduled, every: int | None) -> None:
        """Make a law of rows that are all closed.

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
        self._place: NDArray[np.signedinteger] = np.empty(num_rows, dtype)
        self._tree = SumTree(num_rows)
        self.reset()

    def reset(self) -> None:
        """Close every row; see `Law.reset`."""
        self._place.fill(CLOSED)
        self._tree = SumTree(self._tree.capacity)
        self._low: RunningMaximum[np.float64] | None = None
        self._stop = self._num_sorted = self._num_changed = 0
        self._stale = True

    def ready(self, step: int, values: Numbers) -> bool:
        """Sort where it is time to; see `Law.ready`."""
        alpha = self._schedule.at(step)
        every = self._every
        if every is None:
            every = max(FEWEST_CHANGES, self._num_sorted // CHANGED_PART)
        changes = self._num_changed + self._stop - self._num_sorted
        if self._stale or alpha != self._alpha or changes >= every:
            self._alpha = alpha
            self._sort(values)
        return True

    def put(self, rows: Ids, values: Numbers) -> None:
        """Give new rows a place after all others; see `Law.put`."""
        fresh = rows[self._place[rows] == CLOSED]
        self._num_changed += len(rows) - len(fresh)
        if len(fresh) == 0:
            return
        if self._stop + len(fresh) > len(self._order):
            self._sort(values)
        places = np.arange(self._stop, self._stop + len(fresh))
        self._order[places] = fresh
        self._place[fresh] = places
        self._set(places, self._masses(places))
        self._stop += len(fresh)

    def _masses(self, places: Ids) -> Masses:
        """Of rows that hold places: by rank, or by their turn to enter."""
        ranks = places + 1.0
        ranks[places >= self._num_sorted] -= self._num_sorted
        return np.asarray(ranks**-self._alpha, np.float64)

    def _set(self, places: Ids, masses: Masses) -> None:
        if self._low is not None:
            self._low.note(places)
        self._tree.set(places, masses)

    def drop(self, rows: Ids) -> None:
        """Empty their places; see `Law.drop`."""
        places = self._place[rows]
        places = places[places != CLOSED].astype(np.int64)
        self._place[rows] = CLOSED
        self._set(places, np.zeros(len(places)))

    def _sort(self, values: Numbers) -> None:
        """Put open rows in order; of equal priorities the order stays what it was."""
        rows = self._order[: self._stop]
        rows = rows[self._place[rows] == np.arange(self._stop)]
        rows = rows[_descending(values[rows])]
        self._arrange(rows, len(rows))
        self._num_changed = 0
        self._stale = False

    def _arrange(self, order: NDArray[np.signedinteger], num_sorted: int) -> None:
        """Take over an order, in which closed places may be."""
        self._low = None
        self._stop, self._num_sorted = len(order), num_sorted
        self._order[: len(order)] = order
        self._place.fill(CLOSED)
        places = np.flatnonzero(order != CLOSED)
        self._place[order[places]] = places
        masses = np.zeros(self._tree.capacity)
        masses[places] = self._masses(places)
        self._tree.fill(masses)

    def is_open(self, rows: Ids) -> NDArray[np.bool_]:
        """See `Law.is_open`."""
        found: NDArray[np.bool_] = self._place[rows] != CLOSED
        return found

    def draw(
        self, shares: Masses, stratified: bool, scale: float
    ) -> tuple[Ids, Masses]:
        """See `Law.draw`; the highest ranks come first."""
        places, ratios = self._tree.draw_shares(shares, stratified, scale)
        return self._order[places].astype(np.int64), ratios

    def state_dict(self) -> State:
        """The order, which later draws follow until it is sorted again."""
        order = self._order[: self._stop].astype(np.int64)
        order[self._place[order] != np.arange(self._stop)] = CLOSED
        return {
            "order": order,
            "num_sorted": self._num_sorted,
            "num_changed": self._num_changed,
            "stale": int(self._stale),
            "alpha": self._alpha,
        }

    def load_state_dict(self, state: State) -> None:
        """Take over an order, if it is one of the rows that are open now."""
        order = np.asarray(state.get("order"))
        if order.ndim != 1 or order.dtype.kind not in "iu":
            raise FormatError(
                f"sampler state: got order {order.dtype}{list(order.shape)}, expected "
                "integers [N]; pass what state_dict returned, unchanged"
            )
        num_sorted = states.stored_integer(state, "num_sorted", len(order) + 1)
        num_changed = states.stored_integer(state, "num_changed")
        stale = states.stored_integer(state, "stale", 2)
        alpha = state.get("alpha")
        if type(alpha) is not float or not 0 <= alpha <= MAX_ALPHA:
            raise FormatError(
                f"sampler state: got alpha {alpha!r:.60}, expected a number in [0, "
                f"{MAX_ALPHA:g}]; pass what state_dict returned, unchanged"
            )
        rows = np.sort(order[order != CLOSED])
        if not np.array_equal(rows, np.flatnonzero(self._place != CLOSED)):
            # The buffer moved on: what comes is not what was to come anyway.
            return
        self._alpha = alpha
        self._arrange(order.astype(self._order.dtype), num_sorted)
        self._num_changed = num_changed
        self._stale = bool(stale)


def _descending(values: Numbers) -> Ids:
    """Indices that sort, the highest first and of equal ones the first.

    Sorting whole numbers that hold place and priority in one takes a tenth of the
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
