"""The past of each step: stacked frames, and the actions that led there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.errors import SchemaError
from mmreplay.ragged import join_columns
from mmreplay.schema import Field
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over, RowReads
from mmreplay.transforms.base_steps import BaseSteps, Where, around
from mmreplay.transforms.outline import Outline, ReadAt

MAX_AXES = 64
"""Of an array of numpy."""


@dataclass(frozen=True, slots=True)
class FrameStack:
    """The last k frames up to each step (Mnih et al. 2015), stored one a row.

    Oldest first. Before the episode's beginning stands its first frame, repeated. A
    next observation is stacked likewise, over the k frames that end with it. Of an
    episode whose beginning has left the buffer, steps with fewer than k - 1 rows
    before them are no legal starts.

    Costs k rows of the field a step drawn, and k more where it has a next one.

    Attributes:
        k: Frames, at least 1.
        paths: Fields or subtrees to stack; the observation by default.
        axis: None stacks along a new first axis: ``[k, *shape]``. An axis of the field
            joins the frames along it: -1 gives ``[H, W, k * C]`` of ``[H, W, C]``.
            Of a field that varies each frame is a value of its own: axis is None.

    Example:
        >>> stack = mr.FrameStack(4)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[stack])
        >>> buffer.sample(32)["observation"].shape
        (32, 4, 4)
    """

    described: ClassVar[bool] = True

    k: int
    paths: str | Sequence[str] | None = None
    axis: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        integer("FrameStack k", self.k, 1, "Give the number of frames.")
        if self.axis is not None:
            integer("FrameStack axis", self.axis, -MAX_AXES)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: A field is stacked already, is no row's, or lacks the axis.
        """
        paths = outline.pick(self.paths, "FrameStack")
        for path in paths:
            self._check(path, outline)
        before = dict(outline.before)
        for path in paths:
            before[path] = before.get(path, 0) + self.k - 1
        above = replace(outline.changed(paths, self._stacked, "FrameStack"), before=before)
        sources = outline.sources(paths)

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _Stack(below, base_steps, self.k, sources, self._join)

        # The rows of a stack of one are those of the field itself.
        plain = self.axis is None and self.k > 1
        own = dict.fromkeys(paths, self.k) if plain else {}
        return Bound(above, over, finishes=False, stacks=own)

    def _check(self, path: str, outline: Outline) -> None:
        if not outline.of_rows(path):
            raise SchemaError(
                f"FrameStack: {path!r} must be a field that each row has, but it is "
                "made from several rows. Stack before the transform that adds it."
            )
        if "FrameStack" in outline.changed_by.get(path, ()):
            raise SchemaError(
                f"FrameStack: {path!r} is already a stack. Use one FrameStack with the total k."
            )
        if outline.fields[path].varies and self.axis is not None:
            raise SchemaError(
                f"FrameStack: axis must be None for {path!r}, which varies from step "
                f"to step, got {self.axis}. Stack it apart from the other fields."
            )
        axes = len(outline.fields[path].shape)
        if self.axis is not None and not -axes <= self.axis < axes:
            raise SchemaError(
                "FrameStack: axis must be an axis of "
                f"{list(outline.fields[path].shape)} for {path!r}, got {self.axis}. "
                "Pass axis=None for a new axis."
            )

    def _stacked(self, field: Field) -> Field:
        if field.varies:
            # A value for each frame: `Ragged` of the shape ``[B, k]``.
            return field
        shape = list(field.shape)
        if self.axis is None:
            shape = [self.k, *shape]
        else:
            shape[self.axis] *= self.k
        return Field(shape, field.dtype)

    def _join(self, frames: Any) -> Any:
        """``[N, K, k, *shape]`` to what the field has become."""
        if self.axis is None:
            return frames
        shape = list(frames.shape[3:])
        axis = self.axis % len(shape)
        shape[axis] *= self.k
        moved = np.moveaxis(frames, 2, 2 + axis)
        return moved.reshape(*frames.shape[:2], *shape)


class _Stack(Over):
    """Fields stacked over the rows up to each."""

    def __init__(
        self,
        below: Layer,
        base_steps: BaseSteps,
        k: int,
        sources: Mapping[str, str],
        join: Callable[[Any], Any],
    ) -> None:
        super().__init__(below, base_steps)
        self._k = k
        self._sources = sources
        self._join = join

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows, some stacked; see `Layer.read`."""
        sources = self._sources
        mine = [p for p in paths if p in sources]
        if not mine:
            return self.below.read(paths, rows)
        rest = tuple([p for p in paths if p not in sources])
        fields = self.below.read(rest, rows) if rest else {}
        own = tuple([p for p in mine if sources[p] == p])
        stored = tuple([p for p in mine if sources[p] != p])
        if own:
            for path, frames in self.below.read(own, self._up_to(rows, self._k)).items():
                count, width = frames.shape[:2]
                shape = (count, width // self._k, self._k, *frames.shape[2:])
                fields[path] = self._join(frames.reshape(*shape))
        return fields | self._stored_next(stored, rows) if stored else fields

    def _stored_next(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Next observations that are stored; the frames before are of their steps."""
        newest, before, fields = self.below.read(paths, rows), Fields(), Fields()
        if self._k > 1:
            given = tuple({self._sources[p]: 0 for p in paths})
            before = self.below.read(given, self._up_to(rows, self._k - 1))
        for path in paths:
            array = newest[path]
            stack = array.reshape(*array.shape[:2], 1, *array.shape[2:])
            if self._k > 1:
                older = before[self._sources[path]]
                shape = (*stack.shape[:2], self._k - 1, *older.shape[2:])
                stack = join_columns([older.reshape(*shape), stack], 2)
            fields[path] = self._join(stack)
        return fields

    def _up_to(self, rows: Where | Ids, k: int) -> Where | Ids:
        """The k rows up to each."""
        if isinstance(rows, Where):
            return rows.stacked(k)
        back: Ids = rows[:, :, None] - np.arange(k - 1, -1, -1)
        np.maximum(back, self.base_steps.first[:, None, None], out=back)
        return back.reshape(len(rows), -1)


@dataclass(frozen=True, slots=True)
class ActionHistory:
    """The k actions before each step, for agents that must know what is under way.

    Real-time control acts on an observation that the last actions have not reached
    yet; the state is the observation with those actions (Bouteiller et al. 2021). The
    field it makes holds the actions of steps ``t - k`` to ``t - 1``, oldest first,
    ``[k, *shape]``; the one named ``next_...`` those up to the last step folded. Where
    the episode had not begun yet stands `fill`.

    Attributes:
        k: Actions, at least 1.
        path: Field of the action; by default the one that plays it.
        name: Of the field it makes.
        fill: A number, or an array of the action's shape.

    Example:
        >>> history = mr.ActionHistory(3)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[history])
        >>> buffer.sample(32)["action_history"].shape
        (32, 3)
    """

    described: ClassVar[bool] = True

    k: int
    path: str | None = None
    name: str = "action_history"
    fill: object = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        integer("ActionHistory k", self.k, 1, "Give the number of actions.")

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no such action, it is several fields, or a name is
                taken.
        """
        path = self._path(outline)
        field, following = outline.fields[path], "next_" + self.name
        fill = self._filling(field)
        depth = outline.before.get(path, 0) + self.k
        made = Field((self.k, *field.shape), field.dtype)
        above = outline.with_field(self.name, made, ReadAt.HERE, "ActionHistory", depth)
        shifts = {self.name: 0}
        if outline.next_obs:
            above = above.with_field(following, made, ReadAt.LAST, "ActionHistory", depth)
            above = replace(above, next_obs={**above.next_obs, self.name: following})
            shifts[following] = 1

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _History(below, base_steps, path, shifts, fill)

        def elsewhere(base_steps: BaseSteps) -> Iterator[RowReads]:
            yield ((path,), *around(base_steps, base_steps.positions, base_steps.last, depth))

        return Bound(above, over, elsewhere)

    def _path(self, outline: Outline) -> str:
        chosen = self.path
        if chosen is None:
            chosen = outline.playing("action", "ActionHistory", "path")
        paths = outline.pick(chosen, "ActionHistory")
        if len(paths) > 1 or not outline.of_rows(paths[0]):
            raise SchemaError(
                f"ActionHistory: {chosen!r} must be one field that each row has, but "
                f"it is {list(paths)}. Name one field, and use one history for each."
            )
        outline.refuse_varying(paths, "ActionHistory")
        return paths[0]

    def _filling(self, field: Field) -> NDArray[np.generic]:
        try:
            value = field.convert(np.asarray(self.fill), "fill", ())
        except SchemaError:
            plain = np.asarray(self.fill)
            if plain.ndim or plain.dtype.kind not in "iufb":
                raise
            value = np.full(field.shape, self.fill).astype(field.numpy)
        return np.broadcast_to(np.stack([value] * self.k), (self.k, *field.shape))


class _History(Over):
    """Actions of the rows before each."""

    def __init__(
        self,
        below: Layer,
        base_steps: BaseSteps,
        path: str,
        shifts: Mapping[str, int],
        fill: NDArray[np.generic],
    ) -> None:
        super().__init__(below, base_steps)
        self._path = path
        self._shifts = shifts
        self._fill = fill

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows, and histories; see `Layer.read`."""
        mine = [path for path in paths if path in self._shifts]
        fields = self.below.read(tuple([p for p in paths if p not in mine]), rows)
        first, k = self.base_steps.first[:, None], len(self._fill)
        for name in mine:
            shift = self._shifts[name]
            wanted: Where | Ids
            if isinstance(rows, Where):
                wanted = rows.stacked(k, 1 - shift)
                known = self.base_steps.unclipped(wanted) >= first
            else:
                back = rows[:, :, None] - np.arange(k, 0, -1) + shift
                wanted = back.reshape(len(rows), -1)
                known = wanted >= first
                # An existing row, in place of a missing one.
                wanted = np.where(known, wanted, self.base_steps.positions[:, None])
            actions = self.below.read((self._path,), wanted)[self._path]
            count, width = known.shape
            shape = (count, width // k, k)
            known = known.reshape(*shape, *[1] * (actions.ndim - 2))
            shape = (*shape, *actions.shape[2:])
            fields[name] = np.where(known, actions.reshape(shape), self._fill)
        return fields
