"""Windows of steps, for recurrent learners, world models and sequence models.

A window of ``burn_in + length + bootstrap`` steps is laid around a step that another
sampler drew, so that uniform, prioritized, recent and shuffled windows follow those
samplers' own distributions over the windows' starts:

- *burn-in*, the first columns: only for warming up a recurrent state, no loss on them
  (R2D2, Kapturowski et al. 2019).
- *length* columns to learn from; the first of them is the step drawn.
- *bootstrap*, the last columns: only for the targets of those before (the extra
  observation of R2D2's and IMPALA's sequences).
- *stride*: starts are this far apart. R2D2's sequences of 80 that overlap by 40 are
  ``length=80, stride=40``; acme and flashbax call it the period.

What a window may reach over is its *boundary*:

- ``"episode"``: all of it lies in one episode (TorchRL's slices with strict_length,
  R2D2).
- ``"any"``: steps of one environment that follow each other, over the ends of
  episodes, which `is_first` marks (DreamerV3; Hafner et al. 2023; alf and skrl,
  which do not mark them). Rows that are no step, such as final rows, are left out,
  so that every column is a step; the newest step is never followed by the oldest.
- ``"pad"``: every step of the buffer is the drawn step of one window. What it lacks in
  burn-in, length and bootstrap within its episode is padded, with its first or last
  step again, and the mask is false there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.episodes import START
from mmreplay.episodes.starts import EpisodeFilter, WindowShape, WindowStarts
from mmreplay.errors import EmptyError, SchemaError, frames_to_caller, shown
from mmreplay.samplers.base import (
    Draw,
    Sampler,
    State,
    Traits,
    View,
    Windows,
    ask,
    call_repr,
    single,
    traits_of,
)
from mmreplay.samplers.combine import NarrowingSampler, state_of
from mmreplay.samplers.holding import all_or_nothing, bookmark_of, return_to
from mmreplay.samplers.states import check_kind, parts, same
from mmreplay.samplers.uniform import UniformSampler

Ids = NDArray[np.int64]


class WindowSampler(NarrowingSampler):
    """A sampler of windows or episodes around steps that another one draws.

    The starts of a buffer's windows are kept from draw to draw, for the buffer that
    was drawn from last.
    """

    # The `kind` of states, written out: renaming a class changes no state.
    _kind: ClassVar[str]
    _arguments: State
    # A user's class may have a state beyond that of its parts.
    _ours: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        """See whether the class is one of mmreplay."""
        super().__init_subclass__()
        cls._ours = cls.__module__.startswith("mmreplay.")

    def __init__(
        self, sampler: Sampler | None, shape: WindowShape, episodes: EpisodeFilter | None = None
    ) -> None:
        """Make one.

        Args:
            sampler: Draws the steps; uniform by default.
            shape: Which steps have a window.
            episodes: Which episodes have any; None for all.
        """
        super().__init__([UniformSampler() if sampler is None else sampler])
        self._shape, self._episodes = shape, episodes
        self._view: View | None = None
        self._starts: WindowStarts | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the buffer: a worker has its own."""
        return self.__dict__ | {"_view": None, "_starts": None}

    def _form(self) -> str:
        """What it draws, for messages and for samplers of one batch to agree."""
        raise NotImplementedError

    def shown(self, view: View) -> WindowStarts:
        """Return the starts of windows of a buffer.

        Raises:
            SchemaError: The view is of single steps out of the middle of episodes.
        """
        if self._starts is None or view is not self._view:
            view.check_windows()
            self._starts = WindowStarts(view, self._shape, self._episodes)
            self._view = view
        return self._starts

    def _draw_starts(self, view: View, batch_size: int, what: str, way_out: str) -> Draw:
        """Draw the steps that windows are laid around.

        Args:
            view: The buffer now.
            batch_size: How many.
            what: The windows, for the message.
            way_out: What to do where there is none.

        Raises:
            EmptyError: There is none.
            SchemaError: The sampler draws windows itself.
        """
        starts, sampler = self.shown(view), self.parts[0]
        if starts.look() == 0:
            raise EmptyError(
                f"cannot draw {batch_size} {what}: none of "
                f"{int(view.span.lengths.sum())} published rows begins one. Add steps "
                f"first, or {way_out}."
            )
        drawn = sampler.draw(starts, batch_size)
        if drawn.windows is not None or drawn.offsets is not None:
            raise SchemaError(
                "the sampler inside a SequenceSampler must draw single steps, got the "
                f"{type(sampler).__name__}, of windows. Use it alone."
            )
        return drawn

    def bookmark(self) -> Any:
        """That of the sampler inside: windows have no state of their own."""
        return (bookmark_of(self.parts[0]),) if self._ours else self.state_dict()

    def return_to(self, bookmark: Any) -> None:
        """See `Sampler.return_to`."""
        if type(bookmark) is tuple:
            return_to(self.parts[0], bookmark[0])
        else:
            self.load_state_dict(bookmark)

    def state_dict(self, priorities: bool = False) -> State:
        """The arguments that are JSON values, and the state of the sampler inside.

        Args:
            priorities: With those that the sampler inside keeps, as arrays.
        """
        inside = [state_of(self.parts[0], priorities)]
        return {"kind": self._kind, **self._arguments, "parts": inside}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, self._kind)
        for name, value in self._arguments.items():
            same(state, name, value)
        self.parts[0].load_state_dict(parts(state, "parts", 1)[0])


BOUNDARIES = ("episode", "any", "pad")


class SequenceSampler(WindowSampler):
    """Draws windows of T = burn_in + length + bootstrap steps of one environment.

    The sampler inside draws the steps at column `burn_in`; `Draw.positions`,
    probabilities and weights are theirs. Batches hold ``[B, T, *shape]`` and a field
    ``is_first``, bool ``[B, T]``: an episode begins there.

    With a stride, starts are the first possible one of each episode and the
    positions that the stride divides, so that they stay the same while the ring
    moves on. Costs O(B·T + B log episodes) a draw.

    Attributes:
        length: Steps to learn from in each window.
        burn_in: Steps before them.
        bootstrap: Steps after them.

    Example:
        >>> sampler = mr.SequenceSampler(8, mr.UniformSampler(seed=0))
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> buffer.sample(32)["observation"].shape
        (32, 8, 4)
    """

    _kind = "SequenceSampler"
    _warned_of_mask = False  # of the class: pickles of before have none of their own

    def __init__(
        self,
        length: int,
        sampler: Sampler | None = None,
        *,
        boundary: str = "episode",
        burn_in: int = 0,
        stride: int = 1,
        bootstrap: int = 0,
        first_only: Sequence[str] = (),
    ) -> None:
        """Make a sampler of windows.

        Args:
            length: Steps to learn from, at least 1.
            sampler: What draws the starts, of single steps; uniform by default.
            boundary: ``"episode"``, ``"any"`` or ``"pad"``; see the module.
            burn_in: Steps before those to learn from.
            stride: Distance of starts.
            bootstrap: Steps after those to learn from.
            first_only: Paths of fields, such as recurrent states, of which only the
                window's first step is wanted: ``[B, *shape]`` in the batch.

        Raises:
            SchemaError: A number is out of range, the boundary is unknown, or the
                sampler draws windows itself.
        """
        way_out = "Give a number of steps."
        length = integer("length", length, 1, way_out)
        burn_in = integer("burn_in", burn_in, 0, way_out)
        stride = integer("stride", stride, 1, way_out)
        bootstrap = integer("bootstrap", bootstrap, 0, way_out)
        _check_kinds(boundary, first_only)
        self.length, self.burn_in, self.bootstrap = length, burn_in, bootstrap
        self._arguments: State = {
            "length": length,
            "boundary": boundary,
            "burn_in": burn_in,
            "stride": stride,
            "bootstrap": bootstrap,
        }
        around = (burn_in, length + bootstrap) if boundary != "pad" else (0, 1)
        self._boundary = boundary
        inside = None if sampler is None else single(sampler, "SequenceSampler")
        super().__init__(inside, WindowShape(*around, stride, boundary == "any"))
        self._first_only = tuple(first_only)
        self._offsets = np.arange(-burn_in, length + bootstrap)
        self.form = self._form()

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        others = dict(self._arguments)
        return {
            "length": others.pop("length"),
            "sampler": self.parts[0],
            **others,
            "first_only": self._first_only,
        }

    @property
    def joint_settings(self) -> dict[str, Any]:
        """See `Sampler.joint_settings`."""
        inner: dict[str, Any] = ask(self.parts[0], "joint_settings")
        return {**self._arguments, "first_only": self._first_only, **inner}

    @property
    def divides(self) -> str:  # type: ignore[override]  # set by its part alone
        """As of the sampler inside."""
        return traits_of(self.parts[0]).divides

    @property
    def traits(self) -> Traits:
        """Those of the sampler inside, and of the windows."""
        return replace(
            super().traits,
            window_length=self.window_length,
            first_only=tuple(sorted(set(self._first_only))),
            learned=(self.burn_in, self.burn_in + self.length),
        )

    @property
    def window_length(self) -> int:
        """T, the columns of a window."""
        return len(self._offsets)

    def _form(self) -> str:
        return f"windows of {self.window_length} steps"

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw windows; see `Sampler.draw`.

        Raises:
            EmptyError: No window fits.
        """
        return all_or_nothing(self.parts, self._draw, view, batch_size)

    def _draw(self, view: View, batch_size: int) -> Draw:
        drawn = self._draw_starts(
            view,
            batch_size,
            f"windows of {self.window_length} steps with boundary {self._boundary!r}",
            "ask for shorter windows or boundary='pad'",
        )
        return drawn.around(self._around(self.shown(view), drawn))

    def draw_at(self, view: View, shares: NDArray[np.float64]) -> Draw:
        """Draw the windows that shares fall on; see `Sampler.draw_at`."""
        drawn = super().draw_at(view, shares)
        return drawn.around(self._around(self.shown(view), drawn))

    def update_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Pass priorities on to the sampler inside; see `PrioritySampler`.

        Args:
            view: The buffer now.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, the steps drawn.
            values: ``[B]``, ``[B, T]``, of which burn-in and bootstrap are left out,
                or ``[B, length]``.
            mask: bool ``[B, T]``, which steps there are; None for all.

        Raises:
            SchemaError: The sampler inside keeps no priorities, or the shape is
                another.
        """
        values, mask = self._learned(values, mask)
        return super().update_priorities(view, env_ids, positions, values, mask)

    def check_priorities(
        self,
        view: View,
        env_ids: Ids,
        positions: Ids,
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what `update_priorities` would; see `Sampler.check_priorities`."""
        values, mask = self._learned(values, mask)
        super().check_priorities(view, env_ids, positions, values, mask)

    def _learned(
        self, values: NDArray[np.generic], mask: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.generic], NDArray[np.bool_] | None]:
        """Values, and which there are, of the steps to learn from alone."""
        learn = slice(self.burn_in, self.burn_in + self.length)
        if mask is not None and mask.shape[1] != self.length:
            mask = mask[:, learn]
        if values.ndim == 2 and values.shape[1] == self.window_length:
            values = values[:, learn]
        if values.ndim == 2 and values.shape[1] != self.length:
            raise SchemaError(
                f"priorities must have shape [B], [B, {self.window_length}] (steps of "
                f"the windows) or [B, {self.length}] (steps to learn from), got "
                f"{list(values.shape)}. Pass one priority for each."
            )
        return values, mask

    def _around(self, view: WindowStarts, drawn: Draw) -> Windows:
        """Lay windows around the steps drawn."""
        env_ids, starts = drawn.env_ids, drawn.positions
        if self._boundary == "any":
            steps, first = view.steps_around(env_ids, starts)
            mask = view.transitions(env_ids, steps)
            if mask is None:
                mask = np.ones(steps.shape, bool)
            elif not self._warned_of_mask and not mask.all():
                self._warned_of_mask = True
                warnings.warn(
                    "windows with boundary='any' hold steps whose next observation is "
                    "unknown: the last steps of episodes that were truncated or broken "
                    "off. Weigh losses with batch.mask, which is false there, or draw "
                    "with the transform WithoutNext where no next observation is "
                    "needed.",
                    RuntimeWarning,
                    stacklevel=frames_to_caller(),
                )
            return Windows(steps, mask, first, self._first_only)
        steps = starts[:, None] + self._offsets
        if self._boundary == "episode":
            mask, first = np.ones(steps.shape, bool), np.zeros(steps.shape, bool)
            first[:, 0] = view.flags(env_ids, steps[:, 0]) & START
            mask = with_transitions(view, env_ids, steps, mask)
            return Windows(steps, mask, first, self._first_only)
        begin, stop = view.episode_bounds(env_ids, starts)
        inside = np.minimum(steps, stop[:, None] - 1)
        if self.burn_in:
            inside = np.maximum(inside, begin[:, None])
        mask = steps == inside
        whole = (view.flags(env_ids, begin) & START) != 0
        first = (steps == begin[:, None]) & whole[:, None]
        mask = with_transitions(view, env_ids, inside, mask)
        return Windows(inside, mask, first, self._first_only)


def with_transitions(
    view: WindowStarts, env_ids: Ids, steps: Ids, mask: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return a mask of windows that is false also where a step is no transition.

    Args:
        view: Of the windows.
        env_ids: int64 ``[B]``.
        steps: int64 ``[B, T]``.
        mask: bool ``[B, T]``, which of them belong to their windows.
    """
    known = view.transitions(env_ids, steps)
    return mask if known is None else mask & known


def _check_kinds(boundary: str, first_only: object) -> None:
    if boundary not in BOUNDARIES:
        raise SchemaError(
            f"boundary must be one of {list(BOUNDARIES)}, got {shown(boundary)}. "
            "'episode' limits windows to one episode."
        )
    if isinstance(first_only, str):
        raise SchemaError(
            "first_only must be a sequence of paths, got the string "
            f"{shown(first_only)}. Pass ({first_only!r},)."
        )
    if not isinstance(first_only, Sequence):
        raise SchemaError(
            f"first_only must be a sequence of paths, got {shown(first_only)}. Pass, "
            "for example, ('state',)."
        )
