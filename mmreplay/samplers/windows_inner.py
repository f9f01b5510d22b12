"""The sampler inside of one that draws windows, and the view that it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers.base import Draw, Sampler, State, View
from mmreplay.samplers.epochs import draws_once, epochs_of
from mmreplay.samplers.joined import (
    check_each,
    close_each,
    keeps_priorities,
    state_of,
)
from mmreplay.samplers.states import check_kind, parts, same
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.samplers.windows import Choice, Shape, WindowView

Ids = NDArray[np.int64]


class Inner:
    """Draws the steps that windows are laid around, with any sampler of steps.

    What it knows of a buffer's episodes is kept from draw to draw, for the buffer
    that it drew from last.
    """

    def __init__(
        self, sampler: Sampler | None, shape: Shape, choice: Choice | None = None
    ) -> None:
        """Make one.

        Args:
            sampler: Uniform by default.
            shape: Which steps have a window.
            choice: Which episodes have any; None for all.
        """
        self.sampler: Sampler = UniformSampler() if sampler is None else sampler
        self._shape, self._choice = shape, choice
        self._view: View | None = None
        self._windows: WindowView | None = None

    def of(self, view: View) -> WindowView:
        """The starts of windows of a buffer.

        Raises:
            SchemaError: The view is of single steps out of the middle of episodes,
                as it says itself as ``view.check_windows``.
        """
        if self._windows is None or view is not self._view:
            check: Callable[[], None] | None = getattr(view, "check_windows", None)
            if check is not None:
                check()
            self._windows = WindowView(view, self._shape, self._choice)
            self._view = view
        return self._windows

    def draw(self, view: View, batch_size: int, what: str, way_out: str) -> Draw:
        """Draw starts.

        Args:
            view: The buffer now.
            batch_size: How many.
            what: What they are starts of, for the message.
            way_out: What to do where there is none.

        Raises:
            EmptyError: There is none.
            SchemaError: The sampler draws windows itself.
        """
        windows = self.of(view)
        if windows.look() == 0:
            raise EmptyError(
                f"cannot draw {batch_size} {what}: got "
                f"{int(view.span.lengths.sum())} published rows of which none is a "
                f"legal start of one, expected at least one; add steps first, or "
                f"{way_out}"
            )
        drawn = self.sampler.draw(windows, batch_size)
        if drawn.windows is not None or drawn.offsets is not None:
            raise SchemaError(
                f"sampler: got windows from {type(self.sampler).__name__}, expected "
                "single steps, around which windows are laid; draw with it alone"
            )
        return drawn

    @property
    def keeps_priorities(self) -> bool:
        """Whether the sampler takes priorities."""
        return keeps_priorities(self.sampler)

    def update_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None,
    ) -> int:
        """Pass priorities on; see `PrioritySampler`."""
        sampler = self.sampler
        if not keeps_priorities(sampler):
            raise SchemaError(
                f"update_priorities: got the sampler {type(sampler).__name__} for the "
                "starts of windows, which keeps no priorities, expected one that does; "
                "put a PrioritizedSampler inside"
            )
        view = self.of(view)
        return sampler.update_priorities(view, env_ids, positions, values, mask)

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None,
    ) -> None:
        """Refuse what the sampler would refuse; see `joined.check_each`."""
        view = self.of(view)
        check_each(view, [self.sampler], env_ids, positions, values, mask)

    @property
    def epoch(self) -> int | None:
        """See `EpochSampler.epoch`."""
        epochs = epochs_of(self.sampler)
        return None if epochs is None else epochs.epoch

    def more(self, view: View, batch_size: int) -> bool:
        """See `EpochSampler.more`; without epochs there always is more."""
        epochs = epochs_of(self.sampler)
        return epochs is None or epochs.more(self.of(view), batch_size)

    def num_batches(self, view: View, batch_size: int) -> int:
        """See `EpochSampler.num_batches`.

        Raises:
            TypeError: The sampler knows no epochs.
        """
        epochs = epochs_of(self.sampler)
        if epochs is None:
            raise TypeError(
                f"num_batches: got {type(self.sampler).__name__} for the starts of "
                "windows, which has no epochs, expected one that does; put a "
                "ShuffledSampler inside"
            )
        return epochs.num_batches(self.of(view), batch_size)

    def state_dict(self, priorities: bool) -> list[State]:
        """State of the sampler, as a list of one, with its priorities if asked for."""
        return [state_of(self.sampler, priorities)]

    def close(self) -> None:
        """Let go of what the sampler holds, such as stored priorities."""
        close_each([self.sampler])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffer behind: a worker has its own."""
        return self.__dict__ | {"_view": None, "_windows": None}


class WindowDrawing(Protocol):
    """What samplers of windows leave to the sampler inside."""

    # The `kind` of states, written out: renaming a class changes no state.
    _kind: ClassVar[str]
    _inner: Inner
    _arguments: State

    @property
    def keeps_priorities(self) -> bool:
        """Whether the sampler inside takes priorities."""
        return self._inner.keeps_priorities

    @property
    def draws_once(self) -> bool:
        """Whether the sampler inside draws its steps once an epoch."""
        return draws_once(self._inner.sampler)

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what the sampler inside would refuse; see `joined.check_each`."""
        self._inner.check_priorities(view, env_ids, positions, values, mask)

    @property
    def epoch(self) -> int | None:
        """See `EpochSampler.epoch`."""
        return self._inner.epoch

    def more(self, view: View, batch_size: int) -> bool:
        """See `EpochSampler.more`."""
        return self._inner.more(view, batch_size)

    def num_batches(self, view: View, batch_size: int) -> int:
        """See `EpochSampler.num_batches`."""
        return self._inner.num_batches(view, batch_size)

    def state_dict(self, priorities: bool = False) -> State:
        """The arguments that are JSON values, and the state of the sampler inside.

        Args:
            priorities: With those that the sampler inside keeps, as arrays.
        """
        inner = self._inner.state_dict(priorities)
        return {"kind": self._kind, **self._arguments, "parts": inner}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; see `Sampler.load_state_dict`."""
        check_kind(state, self._kind)
        for name, value in self._arguments.items():
            same(state, name, value)
        self._inner.sampler.load_state_dict(parts(state, "parts", 1)[0])

    def close(self) -> None:
        """Let go of what the sampler inside holds, such as stored priorities."""
        self._inner.close()
