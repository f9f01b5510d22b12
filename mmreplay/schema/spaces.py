"""Fields of Gymnasium spaces, environments and example steps.

Gymnasium is imported only when one of its spaces is to be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from mmreplay.errors import SchemaError, shown
from mmreplay.nesting import SEPARATOR, check_name
from mmreplay.schema.convert import as_numpy
from mmreplay.schema.field import Field

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Autoreset = Literal["disabled", "same_step", "next_step"]
AUTORESETS: tuple[Autoreset, ...] = ("disabled", "same_step", "next_step")
_FIXED = "Box, Discrete, MultiDiscrete or MultiBinary"
_SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, Text, Sequence, Graph, Dict or Tuple"
_WAYS_OUT = {"OneOf": "Use a Dict of every choice, with the choice as a Discrete"}

UNSTATED_LENGTH = 4096
"""Items, or bytes of text, of spaces that do not say how long their values may be."""
CHARACTER_NBYTES = 4
"""Bytes that a character takes at most. Environments give texts with others than the
charset of their space, such as spaces between words."""


def space_fields(
    space: object, path: str, exclude: Collection[str], met: dict[str, bool]
) -> Field | dict[str, object]:
    """Return the field of a Gymnasium space, or nested fields of a Dict or Tuple.

    Text and Sequence become a field that varies, and Graph two or three: ``nodes``,
    and where there are edges ``edges`` and ``edge_links``. A space of `str`, such as
    the missions of MiniGrid, is text. Sequence, Graph and such spaces state no length:
    their fields take `UNSTATED_LENGTH`.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, Text, Sequence or Graph of the
            former, or Dict and Tuple of all these.
        path: Path of the space, for messages.
        exclude: Paths to leave out.
        met: Takes each path below and whether it is left out.

    Raises:
        SchemaError: The space is of another kind.
        ModuleNotFoundError: Gymnasium is not installed.
    """
    try:
        from gymnasium import spaces
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading spaces needs gymnasium, which is not installed. Run pip install "
            "'mmreplay[rl]'."
        ) from None
    if isinstance(space, spaces.Dict):
        return _branch(dict(space.spaces), path, exclude, met)
    if isinstance(space, spaces.Tuple):
        numbered = {str(i): inner for i, inner in enumerate(space.spaces)}
        return _branch(numbered, path, exclude, met)
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return field_at(path, space.shape, space.dtype)
    if isinstance(space, spaces.Text):
        return Field.text(max(1, CHARACTER_NBYTES * space.max_length))
    if isinstance(space, spaces.Sequence):
        return _varying(space.feature_space, path, "Sequence")
    if isinstance(space, spaces.Graph):
        graph = {"nodes": _varying(space.node_space, path, "Graph")}
        if space.edge_space is not None:
            graph["edges"] = _varying(space.edge_space, path, "Graph")
            graph["edge_links"] = Field((None, 2), "int32", max_length=UNSTATED_LENGTH)
        return _chosen(graph, path, exclude, met)
    if isinstance(space, spaces.Space) and _is_text(space.dtype):
        return Field.text(UNSTATED_LENGTH)
    kind = type(space).__name__
    way_out = _WAYS_OUT.get(kind, f"Wrap the environment so that it gives {_SUPPORTED}")
    raise SchemaError(
        f"field {path!r}: the space must be {_SUPPORTED}, got {kind}. {way_out}, or "
        f"leave it out with exclude=[{path!r}]."
    )


def env_spaces(env: object) -> tuple[object, object]:
    """Return the observation and action space of one environment, also of a vector.

    Raises:
        SchemaError: It has none.
    """
    for prefix in ("single_", ""):
        observation = getattr(env, f"{prefix}observation_space", None)
        action = getattr(env, f"{prefix}action_space", None)
        if observation is not None and action is not None:
            return observation, action
    raise SchemaError(
        "Schema.from_env: env must be a Gymnasium environment or vector environment, "
        f"got {shown(env)}. Pass what gymnasium.make returned, or the spaces to "
        "Schema.from_spaces."
    )


def env_autoreset(env: object) -> Autoreset | None:
    """Return what a vector environment does after an episode end, by its metadata.

    Returns:
        ``"disabled"``, ``"same_step"`` or ``"next_step"``; None where it does not say.
        A single environment never does: the caller resets it, or a wrapper.
    """
    metadata = getattr(env, "metadata", None)
    if not hasattr(env, "single_observation_space") or not isinstance(metadata, Mapping):
        return None
    stated = metadata.get("autoreset_mode")
    mode = stated.name.lower() if isinstance(stated, Enum) else stated
    return next((known for known in AUTORESETS if known == mode), None)


def env_count(env: object) -> int | None:
    """The number of environments of a vector environment; None if it is not one."""
    num_envs = getattr(env, "num_envs", None)
    if not hasattr(env, "single_observation_space") or not isinstance(num_envs, int):
        return None
    return num_envs


def example_field(path: str, value: object) -> Field:
    """Return the field that stores a value of one step; see `from_example`."""
    # By type, as numpy's float64 is a subclass of float and keeps its dtype.
    if type(value) is float:
        return Field((), "float32")
    array, brain = as_numpy(value, path)
    # Lists usually hold Python floats.
    if isinstance(value, list) and array.dtype == np.float64:
        return field_at(path, array.shape, "float32")
    return field_at(path, array.shape, "bfloat16" if brain else array.dtype)


def field_at(path: str, shape: tuple[int, ...] | None, dtype: object) -> Field:
    """Return a field; its errors name the path."""
    try:
        # Field refuses what is no shape or no dtype.
        return Field(cast("tuple[int, ...]", shape), cast("DTypeLike", dtype))
    except SchemaError as error:
        raise SchemaError(f"field {path!r}: {error}") from None


def _branch(
    spaces: Mapping[str, object], path: str, exclude: Collection[str], met: dict[str, bool]
) -> dict[str, object]:
    if not spaces:
        raise SchemaError(
            f"field {path!r}: the space is empty, so it has no field. Leave it out "
            f"with exclude=[{path!r}]."
        )
    fields: dict[str, object] = {}
    for name, space in spaces.items():
        check_name(name, path)
        below = f"{path}{SEPARATOR}{name}"
        met[below] = below in exclude
        if not met[below]:
            fields[name] = space_fields(space, below, exclude, met)
    return fields


def _is_text(dtype: object) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "U"


def _varying(space: object, path: str, kind: str) -> Field:
    """Return the field of a varying number of items of one space."""
    from gymnasium import spaces

    if not isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        raise SchemaError(
            f"field {path!r}: the items of {kind} must be {_FIXED}, got "
            f"{type(space).__name__}. Leave it out with exclude=[{path!r}]."
        )
    item = field_at(path, space.shape, space.dtype)
    try:
        return Field((None, *item.shape), item.dtype, max_length=UNSTATED_LENGTH)
    except SchemaError as error:
        raise SchemaError(f"field {path!r}: {error}") from None


def _chosen(
    fields: Mapping[str, Field], path: str, exclude: Collection[str], met: dict[str, bool]
) -> dict[str, object]:
    """Return the fields that are not excluded."""
    chosen: dict[str, object] = {}
    for name, field in fields.items():
        below = f"{path}{SEPARATOR}{name}"
        met[below] = below in exclude
        if not met[below]:
            chosen[name] = field
    return chosen
