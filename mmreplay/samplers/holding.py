"""What a draw takes is claimed until its batch is handed out, and released otherwise.

A sampler that uses something up with a draw, as a `UseCounter` does, reserves it in RAM
and puts the reservation into the `Claims` of the draw that is under way in its thread:
at any depth, also below a wrapper that knows nothing of claims. The caller that hands
the batch out stores its claims right before, and releases those of a failed batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

from mmreplay.samplers.base import Sampler, ask
from mmreplay.samplers.random import StepGenerator

Args = TypeVarTuple("Args")
T = TypeVar("T")


class Claim(Protocol):
    """Something that a draw took, which is in RAM alone until it is stored."""

    def store(self) -> None:
        """Store it, or nothing of it; once."""

    def take_back(self) -> None:
        """Undo `store`, where that was done; and `release`."""

    def release(self) -> None:
        """Let other draws have it; nothing where it was stored."""


class Claims(list[Claim]):
    """What was taken for one batch, by all samplers that draw for it.

    Attributes:
        sampler: Put back by the holder where its draw fails; not set where none is.
        before: Its bookmark from before it drew; not set before that.
        after: Its bookmark after the draw; likewise.
        number: Of its last draw, among those of a buffer; likewise.
    """

    __slots__ = ("after", "before", "number", "sampler")

    sampler: Sampler
    before: Any
    after: Any
    number: int

    def call(self, draw: Callable[[*Args], T], /, *args: *Args) -> T:
        """Call what draws; what is taken meanwhile, in this thread, is held here."""
        drawing = threads.drawing
        outer = drawing.claims
        # In line, with no call between: Ctrl-C leaves no hold behind in the thread.
        try:
            drawing.claims = self
            return draw(*args)
        finally:
            drawing.claims = outer

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
        outer = threads.drawing.claims
        if outer is None:
            self.store()
        else:
            outer.append(self)


class Drawing:
    """What a thread is doing.

    Attributes:
        claims: Of the draw that is under way in this thread; None without one.
        drawn: Of which buffer each draw was that this thread made for a batch of
            several buffers, as an object of its own for each; None without one.
    """

    __slots__ = ("claims", "drawn")

    def __init__(self) -> None:
        """Begin with no draw."""
        self.claims: Claims | None = None
        self.drawn: list[object] | None = None


class _Threads(threading.local):
    """Looked up once a draw: an attribute of a thread costs as much as a call.

    Attributes:
        drawing: What the thread that asks is doing.
    """

    def __init__(self) -> None:
        """Begin with no draw, in each thread."""
        self.drawing = Drawing()


threads = _Threads()


def all_or_nothing(samplers: Sequence[Sampler], draw: Callable[[*Args], T], /, *args: *Args) -> T:
    """Call what draws with some samplers; where it fails, nothing has been drawn.

    What it took is released then, and the samplers are put back to where they were;
    by the holder of the draw under way, where the state that it has includes theirs.
    """
    drawing = threads.drawing
    outer = drawing.claims
    if outer is not None and _puts_back(outer, samplers):
        return draw(*args)
    bookmarks = [bookmark_of(sampler) for sampler in samplers]
    claims = Claims()
    try:
        # `Claims.call`, in line: a call is felt in a small draw of windows.
        try:
            drawing.claims = claims
            result = draw(*args)
        finally:
            drawing.claims = outer
        if claims:
            claims.keep()
        return result
    except BaseException as error:
        claims.release()
        for sampler, bookmark in zip(samplers, bookmarks, strict=True):
            put_back(sampler, bookmark, error)
        raise


def _puts_back(claims: Claims, samplers: Sequence[Sampler]) -> bool:
    """Whether the holder of claims puts some samplers back where a draw fails."""
    whole: Any = getattr(claims, "sampler", None)
    # Of a user's sampler nothing is known of what its state includes.
    if not type(whole).__module__.startswith("mmreplay."):
        return False
    parts = whole.parts
    # Nearly always the parts of the sampler that draws.
    return parts is samplers or {*map(id, samplers)} <= {*map(id, parts)}


def bookmark_of(sampler: Sampler) -> Any:
    """Where a sampler of any class is now; see `Sampler.bookmark`.

    None of one that has no state: it stays where it is.
    """
    made = getattr(sampler, "bookmark", None) or getattr(sampler, "state_dict", None)
    return None if made is None else made()


def return_to(sampler: Sampler, bookmark: Any) -> None:
    """Have a sampler of any class go back to its own bookmark."""
    if bookmark is None:
        return
    if not isinstance(bookmark, dict):
        sampler.return_to(bookmark)
        return
    before = _generators(sampler)
    sampler.load_state_dict(bookmark)
    # The seed is the one that it had: it has become no other one by that.
    for own, loaded in zip(before, _generators(sampler), strict=False):
        if own.seed == loaded.seed:
            loaded.given, loaded.pid = own.given, own.pid


def put_back(sampler: Sampler, bookmark: Any, error: BaseException) -> None:
    """Have a sampler draw from an earlier state of its own again.

    Args:
        sampler: Any.
        bookmark: Of the sampler, from before.
        error: Why; notes that the sampler refused its own state.
    """
    try:
        return_to(sampler, bookmark)
    except Exception as refused:
        error.add_note(f"{type(sampler).__name__} refuses the state that it had before: {refused}")


def unmoved(bookmark: Any, now: Any) -> bool:
    """Whether a sampler is where a bookmark of it was made.

    Not known of states, which may hold arrays: they are taken for equal.
    """
    if isinstance(bookmark, tuple) and isinstance(now, tuple):
        return len(bookmark) == len(now) and all(map(unmoved, bookmark, now))
    if isinstance(bookmark, int) and isinstance(now, int):
        return bookmark == now
    return bookmark is now or (isinstance(bookmark, dict) and isinstance(now, dict))


def _generators(sampler: Any) -> list[StepGenerator]:
    """All random generators of a sampler and its parts."""
    found = list(ask(sampler, "generators")())
    for part in ask(sampler, "parts"):
        found += _generators(part)
    return found
