"""Fields brought to mean 0 and deviation 1, by moments measured before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.arguments import number
from mmreplay.errors import FormatError, SchemaError, shown, unmasked
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound
from mmreplay.transforms.elementwise import elementwise
from mmreplay.transforms.outline import Outline

FLAT = 1e-8
"""A deviation below this is taken as 1: the field is constant."""

Floats = NDArray[np.float64]


class HasMoments(Protocol):
    """What is known of a field; `mmreplay.Moments` is one."""

    @property
    def mean(self) -> float:
        """Arithmetic mean."""

    @property
    def std(self) -> float:
        """Population standard deviation."""


class ByName(Protocol):
    """Arrays by path: a `Batch` or a dict."""

    def __getitem__(self, path: str, /) -> Any:
        """Array ``[N, *shape]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Normalize:
    """Values as ``(value - mean) / std``, reckoned in float64; float32 comes out.

    Attributes:
        means: By path of a leaf; a number, or an array that fits the field's shape.
        stds: Likewise; below 1e-8 it is taken as 1.
        clip: Bound of what comes out, both ways; None for none.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> moments = mr.field_moments(buffer, ("observation",))["observation"]
        >>> normalize = mr.Normalize(
        ...     {"observation": moments.mean}, {"observation": moments.std}
        ... )
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[normalize])
    """

    described: ClassVar[bool] = True

    means: Mapping[str, ArrayLike]
    stds: Mapping[str, ArrayLike]
    clip: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name, statistics in (("means", self.means), ("stds", self.stds)):
            if not isinstance(statistics, Mapping):
                raise SchemaError(
                    f"Normalize {name} must be a mapping, got {shown(statistics)}. "
                    "Give a number or array by path, such as {'observation': 0.0}."
                )
        if self.means.keys() != self.stds.keys() or not self.means:
            raise SchemaError(
                "Normalize: means and stds must be of the same fields, got means of "
                f"{list(self.means)} and stds of {list(self.stds)}. Pass both for "
                "each field."
            )
        for path in self.means:
            mean, std = _floats(self.means[path]), _floats(self.stds[path])
            if not (np.isfinite(mean).all() and np.isfinite(std).all()) or (std < 0).any():
                raise SchemaError(
                    f"Normalize: mean and std of {path!r} must be finite, and std at "
                    f"least 0, got mean {mean.tolist()} and std {std.tolist()}. "
                    "Measure them over finite steps."
                )
        if self.clip is not None:
            number(
                "Normalize clip",
                self.clip,
                above=0,
                finite=False,
                way_out="None leaves the values unclipped.",
            )

    @classmethod
    def of(cls, moments: Mapping[str, HasMoments], clip: float | None = None) -> Normalize:
        """Take one mean and deviation a field, as `mmreplay.field_moments` gives.

        Args:
            moments: By path of a leaf; others than those fields stay as they are.
            clip: As in `Normalize`.

        Raises:
            SchemaError: There are none, or they are not finite.
        """
        means = {path: found.mean for path, found in moments.items()}
        stds = {path: found.std for path, found in moments.items()}
        return cls(means, stds, clip)

    @classmethod
    def fit(
        cls, batches: Iterable[ByName], paths: Sequence[str] | str, clip: float | None = None
    ) -> Normalize:
        """Measure each element of fields over batches, one batch in memory at a time.

        Moments are merged as Chan, Golub and LeVeque (1979) do: no difference of large
        sums, so a mean far from zero costs no precision.

        Args:
            batches: Arrays ``[N, *shape]`` by path: batches of a buffer, or dicts of
                numbers that numpy has.
            paths: A leaf or several to measure.
            clip: As in `Normalize`.

        Raises:
            SchemaError: There is nothing to measure.
        """
        paths = (paths,) if isinstance(paths, str) else paths
        known: dict[str, _Moments] = {}
        for batch in batches:
            for path in paths:
                values = _measured(batch, path)
                if len(values):
                    found = _Moments.of(values)
                    known[path] = found.merged(known[path]) if path in known else found
        if not known:
            raise SchemaError(
                f"Normalize.fit: the batches have no value of {list(paths)}. Pass "
                "batches with steps."
            )
        means = {path: found.mean for path, found in known.items()}
        stds = {path: np.sqrt(found.m2 / found.count) for path, found in known.items()}
        return cls(means, stds, clip)

    def to_json(self) -> dict[str, object]:
        """Everything needed to make it again, as JSON values."""
        return {
            "means": {path: _floats(v).tolist() for path, v in self.means.items()},
            "stds": {path: _floats(v).tolist() for path, v in self.stds.items()},
            "clip": self.clip,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Normalize:
        """The transform that `to_json` told of.

        Args:
            state: What it returned.

        Raises:
            FormatError: It is something else.
        """
        try:
            means, stds, clip = state["means"], state["stds"], state["clip"]
            return cls(dict(means), dict(stds), clip)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"Normalize: the state does not fit ({error}). Pass what to_json "
                "returned, or fit again."
            ) from None

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: A field is not there, or its moments have another shape.
        """
        shifts: dict[str, tuple[Field, Floats, Floats]] = {}
        for path in self.means:
            if path not in outline.pick(path, "Normalize"):
                raise SchemaError(
                    f"Normalize: {path!r} must be a leaf, got a subtree. Pass a mean "
                    "and std for each of its leaves."
                )
            outline.refuse_varying((path,), "Normalize")
            field = outline.fields[path]
            mean, std = _floats(self.means[path]), _floats(self.stds[path])
            for moment in (mean, std):
                _check_fit(path, moment, field)
            shifts[path] = field, mean, np.where(std < FLAT, 1.0, std)

        def change(path: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
            field, mean, std = shifts[path]
            wide = (widen(values, field).astype(np.float64) - mean) / std
            if self.clip is not None:
                np.clip(wide, -self.clip, self.clip, out=wide)
            return wide.astype(_normalized(path, field).numpy)

        return elementwise(outline, tuple(shifts), "Normalize", _normalized, change)


def _normalized(path: str, field: Field) -> Field:
    return Field(field.shape, "float64" if field.dtype == "float64" else "float32")


def _measured(batch: ByName, path: str) -> Floats:
    """Numbers of a field, which of bfloat16 a batch holds the bits of."""
    if isinstance(batch[path], Ragged):
        raise SchemaError(
            f"Normalize: {path!r} must have one shape, but it varies from step to "
            "step. Measure it with field_moments, and scale it in Apply."
        )
    values = unmasked(f"Normalize: {path!r}", batch[path])
    if path in getattr(batch, "bfloat16", ()):
        values = widen(values, Field(values.shape[1:], "bfloat16"))
    return values.astype(np.float64)


def _floats(values: ArrayLike) -> Floats:
    """Moments as an array.

    Raises:
        SchemaError: They are no numbers.
    """
    try:
        return np.asarray(unmasked("Normalize: a mean or std", values), np.float64)
    except SchemaError:
        raise
    except (TypeError, ValueError):
        raise SchemaError(
            "Normalize: a mean or std must be a number or an array of numbers, got "
            f"{shown(values)}. Pass, for example, 0.0."
        ) from None


def _check_fit(path: str, values: Floats, field: Field) -> None:
    try:
        fits = np.broadcast_shapes(values.shape, field.shape) == field.shape
    except ValueError:
        fits = False
    if not fits:
        raise SchemaError(
            f"Normalize: moments of {path!r} must fit its shape {list(field.shape)}, "
            f"got {list(values.shape)}. Measure that field, or normalize before the "
            "transform that reshapes it."
        )


@dataclass(frozen=True, slots=True)
class _Moments:
    """Count, and per element the mean and the squared distances from it."""

    count: int
    mean: Floats
    m2: Floats

    @classmethod
    def of(cls, values: Floats) -> _Moments:
        mean = values.mean(axis=0)
        return cls(len(values), mean, ((values - mean) ** 2).sum(axis=0))

    def merged(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        m2 = self.m2 + other.m2 + gap * gap * (self.count * other.count / count)
        return _Moments(count, mean, m2)
