"""Named tensors as fields: sizes of spaces, dtypes, and values both ways."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.common.values import (
    LOOK_ERRORS,
    PAD,
    Look,
    capsule_of,
    refuse_varying,
    varying_space,
)
from mmreplay.errors import SchemaError
from mmreplay.schema import Field
from mmreplay.schema.schema import ROLES

Shape = tuple[int, ...]
Way = tuple[str, str, Shape | None, Shape]
"""How a tensor goes in: its name; its path; the shape of its samples where that is not
what is stored, at which the ring looks, or None; and what is stored."""
ENDS = ("terminated", "truncated")
UNDER = "tensor/"
"""Where a tensor is stored whose name is that of a role it does not play."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor ``[memory_size, num_envs, *shape]``.

    Attributes:
        name: As the agent calls it.
        shape: Of one sample.
        dtype: Of torch.
        path: Of the field it is stored in.
        field: That one; of an end, a bool without axes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str
    field: Field

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype, mutable: bool) -> Tensor:
        """Lay a tensor out.

        Raises:
            SchemaError: The name, shape or dtype cannot be stored.
        """
        end = name in ENDS and dtype is torch.bool and math.prod(shape) == 1
        kind = str(dtype).removeprefix("torch.")
        plays = end or name not in ROLES
        path = name if plays else UNDER + name
        field = Field(() if end else shape, kind, mutable=mutable and not end)
        return cls(name, tuple(shape), dtype, path, field)

    @property
    def nothing(self) -> float:
        """Return the value of cells that were not written: NaN, or 0 without NaNs."""
        return math.nan if self.dtype.is_floating_point else 0

    def empty(self, *lead: int) -> torch.Tensor:
        """A tensor ``[*lead, *shape]`` of nothing."""
        return torch.full((*lead, *self.shape), self.nothing, dtype=self.dtype)

    def lead(self, value: torch.Tensor) -> tuple[int, ...]:
        """Axes of a value before those of a sample.

        Raises:
            SchemaError: It is no sample, and no samples; or no tensor.
        """
        refuse_varying(value, f"tensor {self.name!r}")
        if not isinstance(value, torch.Tensor):
            raise SchemaError(
                f"tensor {self.name!r} must be a tensor [n, "
                f"{', '.join(map(str, self.shape))}], got {type(value).__name__}. Make "
                "one by torch.as_tensor."
            )
        got = value.shape
        axes = len(got) - len(self.shape)
        if not 0 <= axes <= 1 or got[axes:] != self.shape:
            raise SchemaError(
                f"tensor {self.name!r} must be [n, {', '.join(map(str, self.shape))}], "
                f"or one sample without n, got shape {list(value.shape)}."
            )
        return tuple(got[:axes])

    def stored(self, value: torch.Tensor) -> NDArray[Any]:
        """Samples ``[n, *shape]`` as their field stores them, cast as torch casts."""
        if value.dtype is not self.dtype or not value.is_cpu:
            value = value.to("cpu", self.dtype)
        if self.dtype is torch.bfloat16:
            value = value.resolve_neg().contiguous().view(torch.uint16)
        array: NDArray[Any] = value.numpy(force=True)
        shape = (len(array), *self.field.shape)
        return array if array.shape == shape else array.reshape(shape)

    def plain(self, count: int) -> Way:
        """How so many samples go in that are stored as they come; see `looked`."""
        stored = (count, *self.field.shape)
        if self.dtype is torch.bfloat16:
            return self.name, self.path, (-1,), stored  # of no shape: it has no array
        given = (count, *self.shape)
        # Of an end the ring also takes ``[n, 1]``.
        same = given == stored and self.path not in ENDS
        return self.name, self.path, None if same else given, stored

    def seen(self, array: NDArray[Any]) -> torch.Tensor:
        """Stored values ``[*lead, *shape]`` as they lie, without a copy."""
        value = torch.from_numpy(array)
        return value.view(torch.bfloat16) if self.dtype is torch.bfloat16 else value

    def shown(self, array: NDArray[Any]) -> torch.Tensor:
        """Stored values ``[*lead, *field.shape]`` as a tensor ``[n, *shape]``."""
        value = torch.from_numpy(np.ascontiguousarray(array))
        if self.dtype is torch.bfloat16:
            value = value.view(torch.bfloat16)
        if array.ndim == len(self.shape) + 1 and array.shape[1:] == self.shape:
            return value
        return value.reshape(-1, *self.shape)


def looked(
    ways: Sequence[Way], look: Look, tensors: Mapping[str, torch.Tensor]
) -> dict[str, object] | None:
    """Samples as a ring takes them as they are.

    Args:
        ways: Of all tensors.
        look: One of `LOOKS`.
        tensors: Samples by name.

    Returns:
        By path; None where one is not to be had so, or is another shape.
    """
    found: dict[str, object] = {}
    try:
        for name, path, given, stored in ways:
            value = tensors[name]
            if given is not None:
                if value.shape != given:
                    return None
                if look is not capsule_of:
                    value = value.reshape(stored)
            found[path] = look(value)
    except LOOK_ERRORS:
        return None
    return found


def space_size(size: Any) -> int:
    """Numbers that a sample takes.

    Args:
        size: A number, a sequence of axes, or a space of gym or gymnasium: Box,
            Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them.

    Raises:
        SchemaError: It is something else.
    """
    _refuse_varying_size(size)
    if isinstance(size, int | float | np.integer | np.floating):
        return int(size)
    if isinstance(size, list | tuple):
        return math.prod(int(axis) for axis in size)
    # By name, so that neither library is needed, and both are known.
    kinds = {kind.__name__ for kind in type(size).__mro__}
    if "Discrete" in kinds:
        return 1
    if kinds & {"Box", "MultiBinary", "MultiDiscrete"}:
        return math.prod(size.shape)
    if "Dict" in kinds:
        return sum(space_size(space) for space in size.spaces.values())
    if "Tuple" in kinds:
        return sum(space_size(space) for space in size.spaces)
    raise SchemaError(
        "size must be a number, a sequence of axes, or a Box, Discrete, MultiDiscrete, "
        f"MultiBinary, Dict or Tuple space, got {size!r}. Pass its size."
    )


def space_shape(size: Any, spaces: bool) -> Shape:
    """Axes of a sample that keeps its dimensions.

    Args:
        size: A sequence of axes; a number, or a space, as in `space_size`.
        spaces: Let numbers pass, and spaces but for Dict and Tuple, which have no
            one shape.

    Raises:
        SchemaError: It is something else.
    """
    _refuse_varying_size(size)
    if isinstance(size, list | tuple):
        return tuple(int(axis) for axis in size)
    if not spaces:
        raise SchemaError(
            "size must be a list or tuple of axes with keep_dimensions=True, got "
            f"{size!r}. Pass the space's shape."
        )
    kinds = {kind.__name__ for kind in type(size).__mro__}
    if kinds & {"Dict", "Tuple"}:
        raise SchemaError(
            "size must be a space of one shape, a number or a list or tuple of axes "
            f"with keep_dimensions=True, got {size!r}. Declare one tensor for each "
            "field."
        )
    if kinds & {"Box", "MultiBinary", "MultiDiscrete"}:
        return tuple(size.shape)
    return (space_size(size),)


def _refuse_varying_size(size: Any) -> None:
    """Refuse a size that is no number: an axis that varies, and spaces with one.

    Raises:
        SchemaError: It is one.
    """
    axis = isinstance(size, list | tuple) and None in size
    if axis or varying_space(size):
        raise SchemaError(f"size must be of one shape, got {size!r:.80}. {PAD}")


def found_roles(tensors: Sequence[Tensor]) -> dict[str, str]:
    """Which tensors play the roles that transforms look for, by skrl's names."""
    named = {tensor.name: tensor for tensor in tensors}
    roles = {
        role: name for role, name in (("action", "actions"), ("reward", "rewards")) if name in named
    }
    for name in ("observations", "states"):
        now, then = named.get(name), named.get(f"next_{name}")
        # Without what followed, the newest step could not be drawn.
        if now and then and now.field == then.field:
            return roles | {"observation": now.path, "next_observation": then.path}
    return roles
