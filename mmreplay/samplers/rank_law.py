"""By what law rows are drawn, given their priorities: by rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FormatError
from mmreplay.samplers import states
from mmreplay.samplers.base import State
from mmreplay.samplers.extremes import Extremes
from mmreplay.samplers.laws import MAX_ALPHA, Ids, Masses, Numbers, TreeLaw
from mmreplay.samplers.schedules import Scheduled
from mmreplay.sumtree import SumTree

FEWEST_CHANGES = 1024
CHANGED_PART = 4
CLOSED = -1


class Ranks(TreeLaw):
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
        self._low: Extremes[np.float64] | None = None
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
        num_sorted = states.integer(state, "num_sorted", len(order) + 1)
        num_changed = states.integer(state, "num_changed")
        stale = states.integer(state, "stale", 2)
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
