"""Whole numbers in given shares, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from mmreplay.errors import FormatError, SchemaError
from mmreplay.samplers.base import State
from mmreplay.samplers.checks import is_number
from mmreplay.samplers.states import integers


class Shares:
    """Splits batches so that every part's total follows its share.

    Each batch is split by the largest remainder (Hamilton's method), and what a
    part got too little or too much of goes into the next batch. So after any number
    of batches no part is off its share of everything drawn by as much as one step,
    of two parts, or as there are parts, of more.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """Take shares.

        Args:
            shares: One a part, above 0; only their ratios count.

        Raises:
            SchemaError: There is none, or one is not above 0.
        """
        if not shares or not all(
            is_number(share) and isfinite(share) and share > 0 for share in shares
        ):
            raise SchemaError(
                f"shares: got {list(shares)}, expected numbers above 0, one for each "
                "part; leave a part out to draw none of it"
            )
        total = float(sum(shares))
        self.fractions = np.array([share / total for share in shares])
        self._drawn = np.zeros(len(shares), np.int64)

    def split(self, batch_size: int) -> list[int]:
        """Say how many each part is to draw, their sum being batch_size."""
        owed = self.fractions * (int(self._drawn.sum()) + batch_size) - self._drawn
        owed = np.maximum(owed, 0)
        # What was held back at 0 above is taken from the others alike.
        owed *= batch_size / owed.sum()
        counts = np.floor(owed + 1e-9).astype(np.int64)
        rest = batch_size - int(counts.sum())
        counts[np.argsort(counts - owed, kind="stable")[:rest]] += 1
        return [int(count) for count in counts]

    def count(self, drawn: Sequence[int]) -> None:
        """Note how many each part drew: fewer than asked for where it had no more."""
        self._drawn = self._drawn + np.array(drawn, np.int64)

    def state_dict(self) -> State:
        """What each part has drawn, and the shares."""
        return {"shares": self.fractions.tolist(), "drawn": self._drawn.tolist()}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state.

        Raises:
            FormatError: It is of other shares.
        """
        if state.get("shares") != self.fractions.tolist():
            raise FormatError(
                f"sampler state: got shares {state.get('shares')!r:.60}, expected "
                f"{self.fractions.tolist()}; load it into a mixture of the same shares"
            )
        drawn = integers(state, "drawn")
        if len(drawn) != len(self._drawn) or (drawn > 1 << 52).any():
            raise FormatError(
                f"sampler state: got drawn {drawn.tolist()!r:.60}, expected one number "
                f"below 2**52 for each of {len(self._drawn)} parts; pass what "
                "state_dict returned, unchanged"
            )
        self._drawn = drawn
