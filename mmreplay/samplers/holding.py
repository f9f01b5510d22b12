"""What a draw takes is held until its batch is handed out, and given back otherwise.

A sampler that uses something up with a draw, as a `UseCounter` does, reserves it in RAM
and puts the reservation into the `Hold` of the draw that is under way in its thread: at
any depth, also below a wrapper that knows nothing of holds. Whoever hands the batch
out stores the hold, right before; a hold of a batch that is not handed out is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

from mmreplay.samplers.base import Sampler, State, ask
from mmreplay.samplers.random import StepGenerator

Args = TypeVarTuple("Args")
T = TypeVar("T")


class Held(Protocol):
    """Something that a draw took, which is in RAM alone until it is stored."""

    def store(self) -> None:
        """Store it, or nothing of it; once."""

    def take_back(self) -> None:
        """Undo `store`, where that was done; and `release`."""

    def release(self) -> None:
        """Let other draws have it; nothing where it was stored."""


class Hold(list[Held]):
    """What was taken for one batch, by all samplers that draw for it.

    Attributes:
        state: Of the sampler, before it drew; not set before that.
        number: Of its last draw, among those of a reader; likewise.
    """

    __slots__ = ("number", "state")

    state: State
    number: int

    def call(self, draw: Callable[[*Args], T], /, *args: *Args) -> T:
        """Call what draws; what is taken meanwhile, in this thread, is held here."""
        outer = drawing.hold
        # In line, with no call between: Ctrl-C leaves no hold behind in the thread.
        try:
            drawing.hold = self
            return draw(*args)
        finally:
            drawing.hold = outer

    def store(self) -> None:
        """Store all of it, or nothing: where one fails, the others are taken back.

        A process that dies in between has stored some, and hands nothing out.
        """
        try:
            for each in self:
                each.store()
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Undo `store`, the last part first; and `release`."""
        for each in reversed(self):
            each.take_back()
        self.clear()

    def release(self) -> None:
        """Let other draws have all of it."""
        for each in self:
            each.release()
        self.clear()

    def keep(self) -> None:
        """Store it; within another draw, leave that to the draw."""
        outer = drawing.hold
        if outer is None:
            self.store()
        else:
            outer.append(self)


class Drawing(threading.local):
    """What a thread is doing.

    Attributes:
        hold: Of the draw that is under way in this thread; None without one.
    """

    hold: Hold | None = None


drawing = Drawing()


def all_or_nothing(
    samplers: Sequence[Sampler],
    draw: Callable[[*Args], T],
    /,
    *args: *Args,
) -> T:
    """Call what draws with some samplers; where it fails, nothing has been drawn.

    What it took is released then, and the samplers are put back to where they were.
    """
    states = [(sampler, sampler.state_dict()) for sampler in samplers]
    hold = Hold()
    try:
        result = hold.call(draw, *args)
        hold.keep()
        return result
    except BaseException as error:
        hold.release()
        for sampler, state in states:
            put_back(sampler, state, error)
        raise


def put_back(sampler: Sampler, state: State, error: BaseException) -> None:
    """Have a sampler draw from an earlier state of its own again.

    Args:
        sampler: Any.
        state: What its `state_dict` returned.
        error: Why; notes that the sampler refused its own state.
    """
    before = _generators(sampler)
    try:
        sampler.load_state_dict(state)
    except Exception as refused:
        error.add_note(
            f"{type(sampler).__name__} refuses the state that it had before: {refused}"
        )
        return
    # The seed is the one that it had: it has become no other one by that.
    for own, loaded in zip(before, _generators(sampler), strict=False):
        if own.seed == loaded.seed:
            loaded.given, loaded.pid = own.given, own.pid


def _generators(sampler: Any) -> list[StepGenerator]:
    """All random generators of a sampler and its parts."""
    found = list(ask(sampler, "generators")())
    for part in ask(sampler, "parts"):
        found += _generators(part)
    return found
