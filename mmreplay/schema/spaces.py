"""Fields of Gymnasium spaces, environments and example steps.

Gymnasium is imported only when one of its spaces is to be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.nesting import SEPARATOR, check_name
from mmreplay.schema.convert import as_numpy
from mmreplay.schema.field import Field

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Autoreset = Literal["disabled", "same_step", "next_step"]
AUTORESETS: tuple[Autoreset, ...] = ("disabled", "same_step", "next_step")
_TAKEN = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
_WAYS_OUT = {
    "Text": "encode it as a Box of uint8",
    "Graph": "pad its nodes and edges to Boxes of a fixed size",
    "Sequence": "pad it to a Box of a fixed size, with its length as a Discrete",
    "OneOf": "use a Dict of every choice, with the choice as a Discrete",
}


def space_fields(
    space: object, path: str, exclude: Collection[str], met: dict[str, bool]
) -> Field | dict[str, object]:
    """The field of a Gymnasium space, or nested fields of a Dict or Tuple.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them.
        path: Where it stands, as messages name it.
        exclude: Paths to leave out.
        met: Takes each path below and whether it is left out.

    Raises:
        SchemaError: It is another space, or one without a fixed size.
        ModuleNotFoundError: Gymnasium is not installed.
    """
    try:
        from gymnasium import spaces
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading spaces needs gymnasium, which is not installed; "
            "pip install 'mmreplay[rl]'"
        ) from None
    if isinstance(space, spaces.Dict):
        return _branch(dict(space.spaces), path, exclude, met)
    if isinstance(space, spaces.Tuple):
        parts = {str(i): part for i, part in enumerate(space.spaces)}
        return _branch(parts, path, exclude, met)
    if isinstance(
        space,
        spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary,
    ):
        return field_at(path, space.shape, space.dtype)
    kind = type(space).__name__
    way_out = _WAYS_OUT.get(kind, f"wrap the environment so that it gives {_TAKEN}")
    raise SchemaError(
        f"field {path!r}: got a {kind} space, expected {_TAKEN}; {way_out}, or leave "
        f"it out with exclude=[{path!r}]"
    )


def env_spaces(env: object) -> tuple[object, object]:
    """Observation and action space of one environment, also of a vector's.

    Raises:
        SchemaError: It has none.
    """
    for prefix in ("single_", ""):
        observation = getattr(env, f"{prefix}observation_space", None)
        action = getattr(env, f"{prefix}action_space", None)
        if observation is not None and action is not None:
            return observation, action
    raise SchemaError(
        f"Schema.from_env: got {type(env).__name__}, expected a Gymnasium environment "
        "or vector environment; pass its spaces to Schema.from_spaces"
    )


def env_autoreset(env: object) -> Autoreset | None:
    """What a vector environment does after an episode's end, by its metadata.

    Returns:
        ``"disabled"``, ``"same_step"`` or ``"next_step"``; None where it does not say.
        A single environment never does: who steps it resets it, or a wrapper.
    """
    metadata = getattr(env, "metadata", None)
    if not hasattr(env, "single_observation_space") or not isinstance(
        metadata, Mapping
    ):
        return None
    told = metadata.get("autoreset_mode")
    mode = told.name.lower() if isinstance(told, Enum) else told
    return next((each for each in AUTORESETS if each == mode), None)


def example_field(path: str, value: object) -> Field:
    """The field that one step's value would be stored in; see `from_example`."""
    # By type, as numpy's float64 is a subclass of float and keeps its dtype.
    if type(value) is float:
        return Field((), "float32")
    array, brain = as_numpy(value, path)
    # What a list holds is, as a rule, Python's own float.
    if isinstance(value, list) and array.dtype == np.float64:
        return field_at(path, array.shape, "float32")
    return field_at(path, array.shape, "bfloat16" if brain else array.dtype)


def field_at(path: str, shape: tuple[int, ...] | None, dtype: object) -> Field:
    """A field whose refusal names its path."""
    try:
        # Field refuses what is no shape or no dtype.
        return Field(cast("tuple[int, ...]", shape), cast("DTypeLike", dtype))
    except SchemaError as error:
        raise SchemaError(f"field {path!r}: {error}") from None


def _branch(
    parts: Mapping[str, object],
    path: str,
    exclude: Collection[str],
    met: dict[str, bool],
) -> dict[str, object]:
    if not parts:
        raise SchemaError(
            f"field {path!r}: got an empty space, expected {_TAKEN} with something "
            f"in it; leave it out with exclude=[{path!r}]"
        )
    fields: dict[str, object] = {}
    for name, part in parts.items():
        check_name(name, path)
        below = f"{path}{SEPARATOR}{name}"
        met[below] = below in exclude
        if not met[below]:
            fields[name] = space_fields(part, below, exclude, met)
    return fields
