"""Samplers and transforms as they travel between processes: class name and arguments.

A description is a dict of numbers, strings, lists, dicts and arrays. What it is made
into again is looked up in a list of classes of this package, so that no function and
no class of others is ever pickled.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mmreplay.errors import SchemaError, shown
from mmreplay.samplers.base import Sampler, ask
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.priority_distribution import LinearSchedule
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.shuffled import ShuffledSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.transforms.advantages import GAE, LambdaReturn
from mmreplay.transforms.base import Transform
from mmreplay.transforms.delta import Delta
from mmreplay.transforms.elementwise import Cast, OneHot
from mmreplay.transforms.normalize import Normalize
from mmreplay.transforms.nstep import NStep
from mmreplay.transforms.returns import DiscountedReturn
from mmreplay.transforms.stack import ActionHistory, FrameStack
from mmreplay.transforms.without_next import WithoutNext

Description = dict[str, Any]
"""``{"class": name, "arguments": {name: value}}``."""

SAMPLERS: tuple[type, ...] = (UniformSampler, PrioritizedSampler, SequenceSampler, ShuffledSampler)
"""Samplers that draw from several rings as from one."""
TRANSFORMS: tuple[type, ...] = (
    ActionHistory,
    Cast,
    Delta,
    DiscountedReturn,
    FrameStack,
    GAE,
    LambdaReturn,
    NStep,
    Normalize,
    OneHot,
    WithoutNext,
)
CLASSES = {each.__name__: each for each in (*SAMPLERS, *TRANSFORMS, LinearSchedule)}

LEARNERS_OWN = {
    "UniformSampler": ("seed",),
    "PrioritizedSampler": ("seed", "beta", "stratified"),
    "ShuffledSampler": (
        "seed",
        "rank",
        "num_ranks",
        "drop_last",
        "shuffle",
        "layout",
        "batches",
        "block",
    ),
    "SequenceSampler": (),
}
"""Arguments that only the learner's side of a draw uses: learners that differ in these
alone share a sampler, and its priorities, at a shard."""


def draws_from_several(sampler: Sampler) -> bool:
    """Whether a sampler, and the one inside it, draw from several rings as from one."""
    return all(type(each) in SAMPLERS for each in (sampler, *ask(sampler, "parts")))


def refused_name(sampler: Sampler) -> str:
    """What to call a sampler that does not: its class, or the one inside it as well."""
    name = type(sampler).__name__
    if type(sampler) in SAMPLERS and sampler.parts:
        return f"{name} around {type(sampler.parts[0]).__name__}"
    return name


def describe_sampler(sampler: Sampler) -> Description:
    """Describe a sampler for the processes that hold the rings.

    Args:
        sampler: One of `SAMPLERS`, without what only the learner uses.

    Raises:
        SchemaError: It is another one, or an argument is a function.
    """
    name = type(sampler).__name__
    if not draws_from_several(sampler):
        raise SchemaError(
            f"{refused_name(sampler)} cannot draw from several rings, or from a ring "
            "of another node. Use a UniformSampler, a PrioritizedSampler, a "
            "ShuffledSampler, or a SequenceSampler around one of them."
        )
    # The text of the call that makes it again; a function in it is no Python.
    try:
        call = ast.parse(_call_of(sampler), mode="eval").body
        description: Description = _from_call(call)
    except (SyntaxError, ValueError) as error:
        raise SchemaError(
            f"{name} must have arguments that are numbers, strings or LinearSchedules "
            f"to draw from rings of a run, got {sampler!r}. Functions do not travel."
        ) from error
    return description


def _call_of(sampler: Sampler) -> str:
    """The call that makes a sampler again, where beta may be a function.

    Weights are the learner's alone, and so is their exponent: it does not travel.
    """
    inner, text = sampler.parts[0] if sampler.parts else sampler, repr(sampler)
    beta = (getattr(inner, "joint_settings", None) or {}).get("beta")
    return text.replace(f"beta={beta!r}", "beta=1.0") if callable(beta) else text


def _from_call(node: ast.expr) -> Any:
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        return _from_numpy(node, function)
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name) or node.func.id not in CLASSES:
        raise ValueError(ast.unparse(node))
    name = node.func.id
    own = LEARNERS_OWN.get(name, ())
    return {
        "class": name,
        "arguments": {
            str(keyword.arg): _from_call(keyword.value)
            for keyword in node.keywords
            if keyword.arg not in own
        },
    }


def _from_numpy(node: ast.expr, function: ast.Attribute) -> Any:
    """The plain value of what numpy prints: ``np.float64(0.6)``, or ``np.True_``."""
    named = getattr(np, function.attr, None)
    if ast.unparse(function.value) != "np":
        raise ValueError(ast.unparse(node))
    if isinstance(named, np.bool):
        return bool(named)
    if (
        isinstance(node, ast.Call)
        and isinstance(named, type)
        and issubclass(named, np.integer | np.floating)
    ):
        return named(*map(ast.literal_eval, node.args)).item()
    raise ValueError(ast.unparse(node))


def describe_transforms(transforms: Sequence[Transform]) -> list[Description]:
    """Describe transforms for the processes that hold the rings.

    Raises:
        SchemaError: One is not of this package, or has a function.
    """
    return [_described(transform) for transform in transforms]


def _described(transform: object) -> Description:
    name = type(transform).__name__
    if type(transform) not in TRANSFORMS or not is_dataclass(transform):
        raise SchemaError(
            f"transforms of rings on other nodes must be of mmreplay and without a "
            f"function, got {name}. Apply functions to the batches instead."
        )
    return {
        "class": name,
        "arguments": {
            field.name: _plain(getattr(transform, field.name), name, field.name)
            for field in fields(transform)
            if field.init
        },
    }


def _plain(value: Any, who: str, argument: str) -> Any:
    """A value as numbers, strings, lists, dicts and arrays."""
    if value is None or isinstance(value, bool | int | float | str | np.ndarray):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(each, who, argument) for each in value]
    if isinstance(value, Mapping):
        return {"mapping": {str(k): _plain(v, who, argument) for k, v in value.items()}}
    raise SchemaError(
        f"{argument} of {who} must be a number, a string or an array where rings are "
        f"on other nodes, got {shown(value)}. Store it as a field, or apply the "
        "function to the batches."
    )


def make(description: Description) -> Any:
    """Make what a description is of.

    Raises:
        SchemaError: It describes nothing of this package.
    """
    name = description.get("class")
    if name not in CLASSES:
        raise SchemaError(
            f"class must be one of {sorted(CLASSES)}, got {shown(name)}. Run the same "
            "version of mmreplay on every node."
        )
    arguments = {n: _made(value) for n, value in description["arguments"].items()}
    return CLASSES[name](**arguments)


def _made(value: Any) -> Any:
    if isinstance(value, dict):
        if "mapping" in value:
            return {name: _made(each) for name, each in value["mapping"].items()}
        return make(value)
    # Options such as axes and clips compare tuples.
    return tuple(_made(each) for each in value) if isinstance(value, list) else value


def text_of(description: object) -> str:
    """Return a short text that is the same for equal descriptions."""
    return json.dumps(description, default=_array_text, sort_keys=True)


def _array_text(array: Any) -> list[Any]:
    # It is sent with each call, and an array may be of any size.
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return [array.dtype.str, list(array.shape), digest]
