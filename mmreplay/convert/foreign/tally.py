"""What was found of episodes while a source's rows were counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Notes
from mmreplay.convert.ends import Bools


@dataclass(slots=True)
class Tally:
    """Rows and episodes.

    Attributes:
        rows: int64 ``[E]``, final rows included.
        finals: Episodes whose last observation is known.
        split: Episodes that were told apart by their observations only.
        cut: Stretches whose last step ends nothing, but has a next observation.
        open: Stretches that stop without an end or a next observation.
        inner: Ends that a source says within what it calls one episode.
    """

    rows: NDArray[np.int64]
    finals: int = 0
    split: int = 0
    cut: int = 0
    open: int = 0
    inner: int = 0

    def add(
        self, env_id: int, given: Bools, split: Bools, final: Bools, *,
        last: bool, whole: bool,
    ) -> None:  # fmt: skip
        """Count steps.

        Args:
            env_id: Of what environment.
            given: bool ``[N]``, steps that end something as the source says.
            split: bool ``[N]``, those that end something nevertheless.
            final: bool ``[N]``, those that a final row follows.
            last: The last of them is its stretch's last.
            whole: The stretch is one episode, as the source says.
        """
        self.rows[env_id] += len(given) + int(final.sum())
        self.finals += int(final.sum())
        cut = last and bool(split[-1])
        self.cut += cut
        self.split += int(split.sum()) - cut
        self.open += last and not (given[-1] or split[-1])
        if whole:
            self.inner += int(given.sum()) - (last and bool(given[-1]))

    def tell(self, report: Notes) -> None:
        """Say it in the report."""
        if self.finals:
            report.note(
                f"{self.finals:,} episodes end with the observation that was seen "
                "next, kept as a final row"
            )
        if self.split:
            report.note(
                f"{self.split:,} episodes without an end of their own were told apart "
                "where the next observation is not the one that follows: truncated"
            )
        if self.cut:
            report.note(
                f"{self.cut:,} episodes were cut off without an end, and have a next "
                "observation: truncated"
            )
        if self.open:
            report.note(
                f"{self.open:,} episodes were cut off without an end or a next "
                "observation: their last step is not drawn where one is needed"
            )
        if self.inner:
            report.doubt(
                f"{self.inner:,} steps end within what the source calls one episode, "
                "and each was taken as an end"
            )
