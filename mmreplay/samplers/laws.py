"""By what law rows are drawn, given their priorities: in proportion to powers.

A law keeps a mass for every row that may be drawn and draws in proportion to it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.samplers.base import State
from mmreplay.samplers.extremes import Extremes
from mmreplay.samplers.schedules import Scheduled
from mmreplay.sumtree import SumTree

MAX_ALPHA = 4.0
"""The fourth power of any float32 but 0 is a float64 that a sum can hold."""

Ids = NDArray[np.int64]
Masses = NDArray[np.float64]
Numbers = NDArray[np.float32]


class Law(Protocol):
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


class TreeLaw(Protocol):
    """A law whose masses are the leaves of one tree."""

    _tree: SumTree
    _low: Extremes[np.float64] | None

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
            self._low = Extremes(np.minimum, np.inf)
        return self._low.look(self._tree.leaves)


class Powers(TreeLaw):
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
        self._low: Extremes[np.float64] | None = None
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
