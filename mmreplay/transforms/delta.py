"""What a step changed, for models of the dynamics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmreplay.errors import SchemaError
from mmreplay.nesting import under
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound, Fields, Layer, Over
from mmreplay.transforms.base_steps import BaseSteps
from mmreplay.transforms.checks import label
from mmreplay.transforms.outline import Outline, ReadAt

_SIGNED = {
    "uint8": "int16",
    "int8": "int16",
    "uint16": "int32",
    "int16": "int32",
    "uint32": "int64",
    "int32": "int64",
    "uint64": "int64",
}


@dataclass(frozen=True, slots=True)
class Delta:
    """The next observation less the observation, the target of a dynamics model.

    Makes one field an observation leaf: ``delta``, or ``delta/pixels`` and so on.
    Integers are widened, so that differences keep their sign. Of a terminated step
    without a final observation it is 0, as its next observation is its own.

    Attributes:
        paths: Observation leaves or subtrees; all by default.
        name: Of what it makes.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[mr.Delta()])
        >>> buffer.sample(32)["delta"].shape  # next_observation - observation
        (32, 4)
    """

    described: ClassVar[bool] = True

    paths: str | Sequence[str] | None = None
    name: str = "delta"

    reads_next = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        label("Delta name", self.name)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: A field has no next one, or holds no numbers.
        """
        top = outline.schema.role("observation") or ""
        above, names = outline, dict[str, str]()
        for path in outline.pick(self.paths, "Delta"):
            outline.refuse_varying((path,), "Delta")
            field = outline.fields[path]
            if path not in outline.next_obs or field.dtype == "bool":
                raise SchemaError(
                    f"Delta: {path!r} must be a field of numbers in the observation, "
                    f"got {field.dtype}. Name such fields in paths=."
                )
            rest = path.removeprefix(top) if under([path], top) else "/" + path
            names[path] = self.name + rest
            made = Field(field.shape, _dtype(field))
            above = above.with_field(names[path], made, ReadAt.MADE, "Delta")

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _Deltas(below, base_steps, names, outline)

        return Bound(above, over)


def _dtype(field: Field) -> str:
    """The dtype of differences of a field's numbers."""
    if field.rules.integers(field):
        return _SIGNED.get(field.dtype, field.dtype)
    if field.numpy.kind == "f":
        return field.dtype
    return "float32" if field.numpy.itemsize < 4 else "float64"


class _Deltas(Over):
    """Differences of next observations and observations."""

    def __init__(
        self, below: Layer, base_steps: BaseSteps, names: Mapping[str, str], outline: Outline
    ) -> None:
        super().__init__(below, base_steps)
        self._names = names
        self._outline = outline

    def made(self, names: tuple[str, ...]) -> Fields:
        """Differences; see `Layer.made`."""
        mine = {path: name for path, name in self._names.items() if name in names}
        fields = self.below.made(tuple(n for n in names if n not in mine.values()))
        if not mine:
            return fields
        here = self.below.read(tuple(mine), self.base_steps.batch_rows.here)
        next_obs = self._next_obs(tuple(mine))
        for path, name in mine.items():
            field = self._outline.fields[path]
            dtype = Field((), _dtype(field)).numpy
            then = widen(next_obs[path][:, 0], field).astype(dtype)
            fields[name] = then - widen(here[path][:, 0], field).astype(dtype)
        return fields

    def _next_obs(self, paths: tuple[str, ...]) -> Fields:
        outline, base_steps = self._outline, self.base_steps
        derived = tuple(p for p in paths if outline.read_at[outline.next_obs[p]] is ReadAt.NEXT)
        stored = {outline.next_obs[p]: p for p in paths if p not in derived}
        found = dict(self.below.read(derived, base_steps.batch_rows.following))
        for name, values in self.below.read(tuple(stored), base_steps.batch_rows.last).items():
            found[stored[name]] = values
        return found
