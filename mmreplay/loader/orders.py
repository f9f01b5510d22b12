"""Draws that are made now and copied later, in any thread, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import ArrayLike

from mmreplay.batch import Batch
from mmreplay.buffer.drawing import Drawing, Drawn
from mmreplay.buffer.limiting import Limit
from mmreplay.samplers.base import State


@dataclass(slots=True)
class Part:
    """What was drawn from one buffer.

    Attributes:
        number: Which buffer.
        fraction: Its share of all steps.
        drawing: What it was drawn with.
        drawn: The draw.
    """

    number: int
    fraction: float
    drawing: Drawing
    drawn: Drawn

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.drawn.draw)


class Order:
    """A batch that was drawn and is to be copied.

    Attributes:
        state: That of the source before the draw; None where even that failed.
        parts: What was drawn, of each buffer.
    """

    __slots__ = ("parts", "state")

    def __init__(self) -> None:
        self.state: State | None = None
        self.parts: Sequence[Part] = ()


class Entry(Order):
    """One batch on its way, or the error in its place.

    Attributes:
        nbytes: What it is read from.
        asked: The disk was asked for it, or it was left at what was seen before.
        early: Pages were missing, and are on their way.
        result: What the learner is to have.
        error: Raised in the learner.
        done: One of both is there.
    """

    __slots__ = ("asked", "done", "early", "error", "nbytes", "result")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.asked = self.early = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


class Source(Protocol):
    """What is drawn from. One thread at a time draws; any may copy."""

    def begin(self) -> None:
        """Begin an iteration, which ends where the epoch does that is under way.

        Raises:
            FailedError: Another loader goes through the sampler's epoch.
        """

    def end(self) -> None:
        """Leave the sampler to others; a second call does nothing."""

    def held(self) -> bool:
        """Whether this thread is in the middle of what draws wait for."""

    def more(self, count: int) -> bool:
        """Whether the epoch has another batch."""

    def draw(self, order: Order, count: int) -> bool:
        """Fill an order with the next draw.

        The state from before it is there first: who is interrupted goes back to it.

        Returns:
            Whether the epoch had another batch; where not, nothing was drawn.
        """

    def make(self, order: Order, count: int) -> Batch | None:
        """Draw and copy at once, until there is something; None: an epoch is over."""

    def nbytes(self, order: Order) -> int:
        """Bytes that it is copied from."""

    def ask(self, order: Order) -> int:
        """Ask the disk for its rows; return bytes asked for, 0 where all are there."""

    def finish(self, order: Order) -> Batch | None:
        """Copy the data of an order; None where nothing is left of it to be had."""

    def num_batches(self, count: int) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: There are no epochs.
        """

    def state_dict(self, priorities: bool = False) -> State:
        """State of what draws now."""

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on."""

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Give the steps of a batch new priorities; return how many were dropped."""

    @property
    def limits(self) -> Sequence[Limit]:
        """What has to allow a batch, and is told of it."""

    def count(self, batch: Batch, size: int) -> None:
        """Tell limits of a batch."""


def raisable(error: BaseException) -> BaseException:
    """The error itself, unless it would end the learner's loop without a word."""
    if not isinstance(error, StopIteration):
        return error
    changed = RuntimeError("a sampler or transform raised StopIteration")
    changed.__cause__ = error
    return changed
