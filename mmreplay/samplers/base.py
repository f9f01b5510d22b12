"""What a sampler is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.ring import Span

State = dict[str, Any]
"""JSON values and arrays."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Steps drawn from a buffer.

    Attributes:
        env_ids: int64 ``[B]``, in ``[0, num_envs)``.
        positions: int64 ``[B]``, within the span that the sampler saw.
        probabilities: float64 ``[B]``, of each step under the sampler's law.
        weights: float32 ``[B]``, importance weights.
    """

    env_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float32]

    def __len__(self) -> int:
        """Steps drawn."""
        return len(self.positions)


class View(Protocol):
    """A buffer as a sampler sees it: spans and boundaries of one moment, no data."""

    @property
    def span(self) -> Span:
        """What is alive."""

    @property
    def starts(self) -> Span:
        """Where legal starts lie: the span less newest rows that cannot be drawn."""

    @property
    def num_illegal(self) -> int:
        """Rows within `starts` that are no legal start."""

    def legal(
        self, env_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""

    def start_at(
        self, ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Legal starts by rank: environment by environment, oldest first.

        Args:
            ranks: int64 ``[B]``, in ``[0, number of legal starts)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each.
        """


class Sampler(Protocol):
    """Chooses steps.

    A draw is a function of (seed, step) and of the view: the same seed over the
    same buffer gives the same draws, and `state_dict` brings them back.
    """

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch.

        Args:
            view: The buffer now.
            batch_size: Steps to draw, at least 1.

        Raises:
            EmptyError: There is no legal start.
        """

    def state_dict(self) -> State:
        """Everything needed to go on exactly here."""

    def load_state_dict(self, state: State) -> None:
        """Go on from a state.

        Raises:
            FormatError: It is another sampler's, or not a state at all.
        """
