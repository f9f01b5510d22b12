"""Values changed one by one: another dtype, a scale, one-hot vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mmreplay.arguments import integer, number
from mmreplay.errors import SchemaError
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over
from mmreplay.transforms.base_steps import BaseSteps, Where
from mmreplay.transforms.outline import Outline

Change = Callable[[str, NDArray[np.generic]], NDArray[np.generic]]
"""Changes values of a path, whatever their leading axes."""


def elementwise(
    outline: Outline,
    paths: Iterable[str],
    who: str,
    field_of: Callable[[str, Field], Field],
    change: Change,
) -> Bound:
    """Fit a change of single values.

    Args:
        outline: The fields below.
        paths: Fields to change, and with them the next ones of them.
        who: The transform.
        field_of: What a field becomes.
        change: Makes its values so.
    """
    above = outline
    for path in paths:
        above = above.changed((path,), partial(field_of, path), who)
    sources = outline.sources(paths)

    def over(below: Layer, base_steps: BaseSteps) -> Layer:
        return _ElementwiseLayer(below, base_steps, sources, change)

    return Bound(above, over)


class _ElementwiseLayer(Over):
    """Some fields with their values changed."""

    def __init__(
        self, below: Layer, base_steps: BaseSteps, sources: Mapping[str, str], change: Change
    ) -> None:
        super().__init__(below, base_steps)
        self._sources = sources
        self._change = change

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows; see `Layer.read`."""
        return self._changed(self.below.read(paths, rows))

    def made(self, names: tuple[str, ...]) -> Fields:
        """Fields of steps drawn; see `Layer.made`."""
        return self._changed(self.below.made(names))

    def _changed(self, fields: Fields) -> Fields:
        return {
            path: self._change(source, values) if source else values
            for path, values in fields.items()
            for source in [self._sources.get(path)]
        }


@dataclass(frozen=True, slots=True)
class Cast:
    """Values in another dtype, scaled: ``value.astype(dtype) * scale + offset``.

    A uint8 frame stays a byte a pixel on disk and reaches the network as float32 in
    [0, 1] by ``Cast("float32", "observation", scale=1 / 255)``.

    Attributes:
        dtype: Any of a field's but bfloat16.
        paths: Fields or subtrees, and with them their next ones; the observation by
            default.
        scale: Factor, for floating dtypes.
        offset: Added after it, for floating dtypes.

    Example:
        >>> scale = mr.Cast("float16", "observation", scale=0.5)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[scale])
        >>> buffer.sample(32)["observation"].dtype
        dtype('float16')
    """

    described: ClassVar[bool] = True

    dtype: DTypeLike
    paths: str | Sequence[str] | None = None
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        field = Field((), self.dtype)
        if field.dtype == "bfloat16":
            raise SchemaError(
                "Cast: numpy has no bfloat16. Cast to float32, then cast the tensors "
                "of the batch by .to(torch.bfloat16)."
            )
        for name, value in (("scale", self.scale), ("offset", self.offset)):
            number(f"Cast {name}", value)
        if field.numpy.kind != "f" and (self.scale, self.offset) != (1.0, 0.0):
            raise SchemaError(
                "Cast: scale and offset need a floating dtype, got scale "
                f"{self.scale} and offset {self.offset} with {field.dtype}. Cast to "
                "float32."
            )

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no such field, or values would be lost.
        """
        target = Field((), self.dtype)
        paths = outline.pick(self.paths, "Cast")
        outline.refuse_varying(paths, "Cast")
        fields = {path: outline.fields[path] for path in paths}
        for path, field in fields.items():
            given = field.numpy if field.rules.integers(field) else np.float32
            if not np.can_cast(given, target.numpy, "same_kind"):
                raise SchemaError(
                    f"Cast: {target.dtype} cannot hold all values of {path!r} of "
                    f"{field.dtype}. Choose a wider dtype, or cast in Apply."
                )

        def change(path: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
            return self._cast(path, widen(values, fields[path]), target)

        def field_of(path: str, field: Field) -> Field:
            return Field(field.shape, target.dtype)

        return elementwise(outline, paths, "Cast", field_of, change)

    def _cast(self, path: str, values: NDArray[np.generic], target: Field) -> NDArray[np.generic]:
        cast = values.astype(target.numpy)
        if target.numpy.kind == "f":
            if self.scale != 1.0:
                cast *= target.numpy.type(self.scale)
            if self.offset != 0.0:
                cast += target.numpy.type(self.offset)
        elif not np.can_cast(values.dtype, target.numpy) and (cast != values).any():
            raise SchemaError(
                f"Cast: values of {path!r} must fit {target.dtype}, got values in "
                f"[{values.min()}, {values.max()}]. Choose a wider dtype."
            )
        return cast


@dataclass(frozen=True, slots=True)
class OneHot:
    """Integers as vectors that are 1 at one place and 0 elsewhere.

    The number of classes is given, not guessed from the data: the highest action may
    never have been taken.

    Attributes:
        num_classes: Places; values are in ``[start, start + num_classes)``.
        path: Field of integers; by default the one that plays the action.
        start: The lowest value (`Discrete(start=...)`).
        dtype: Of the vectors; the field becomes ``[*shape, num_classes]``.

    Example:
        >>> one_hot = mr.OneHot(2, "action")
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[one_hot])
        >>> buffer.sample(32)["action"].shape
        (32, 2)
    """

    described: ClassVar[bool] = True

    num_classes: int
    path: str | None = None
    start: int = 0
    dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        """Check the arguments."""
        integer("OneHot num_classes", self.num_classes, 1, "Give their number.")
        integer("OneHot start", self.start, np.iinfo(np.int64).min)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no such field, or it holds no integers.
        """
        chosen = self.path
        if chosen is None:
            chosen = outline.playing("action", "OneHot", "path")
        paths = outline.pick(chosen, "OneHot")
        outline.refuse_varying(paths, "OneHot")
        for path in paths:
            field = outline.fields[path]
            if not field.rules.integers(field) or field.dtype == "bool":
                raise SchemaError(
                    f"OneHot: {path!r} must be of integers, got {field.dtype}. Name a "
                    "field of discrete values."
                )
        target = Field((), self.dtype)
        if target.dtype == "bfloat16":
            raise SchemaError("OneHot: numpy has no bfloat16. Use float32.")

        def field_of(path: str, field: Field) -> Field:
            return Field((*field.shape, self.num_classes), target.dtype)

        return elementwise(outline, paths, "OneHot", field_of, self._vectors)

    def _vectors(self, path: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
        places = values.astype(np.int64) - self.start
        if places.size and not 0 <= places.min() <= places.max() < self.num_classes:
            raise SchemaError(
                f"OneHot: values of {path!r} must be in [{self.start}, "
                f"{self.start + self.num_classes}), got values in [{values.min()}, "
                f"{values.max()}]. Increase num_classes, or set start."
            )
        # Rows of an identity matrix would cost the square of the classes a batch.
        vectors = np.zeros((*places.shape, self.num_classes), np.dtype(self.dtype))
        np.put_along_axis(vectors, places[..., None], 1, axis=-1)
        return vectors
