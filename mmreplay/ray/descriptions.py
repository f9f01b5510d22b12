"""Samplers and transforms as they travel between processes: class name and arguments.

A description is a dict of numbers, strings, lists, dicts and arrays. What it is made
into again is a class that a process can import by its name, and that says that it may
be made so, ``described = True``: no function and no object is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np

from mmreplay.errors import SchemaError, shown
from mmreplay.samplers.base import Sampler, ask, traits_of
from mmreplay.samplers.divided import refuse_alone
from mmreplay.transforms.base import Transform

Description = dict[str, Any]
"""``{"class": "module:name", "arguments": {name: value}}``."""


def describe_sampler(sampler: Sampler) -> Description:
    """Describe a sampler for the processes that hold the rings.

    Args:
        sampler: One whose batches can be divided. What `Traits.local` names is left
            out: learners that differ in it alone share a sampler, and its priorities.

    Raises:
        SchemaError: It is another one, an argument is a function, or its class cannot
            be imported.
    """
    refuse_alone([sampler], "a run of several rings", ranks=True)
    if Sampler not in type(sampler).__mro__:
        raise SchemaError(
            f"{type(sampler).__name__} must derive from mmreplay.samplers.base.Sampler to draw "
            "from a run of several rings. Give it that base class."
        )
    return _described(sampler)


def describe_transforms(transforms: Sequence[Transform]) -> list[Description]:
    """Describe transforms for the processes that hold the rings.

    Raises:
        SchemaError: One does not say that it can be described, or has a function.
    """
    return [_described(transform) for transform in transforms]


def _may_be_made(kind: object) -> bool:
    return isinstance(kind, type) and getattr(kind, "described", False) is True


def _described(thing: Any) -> Description:
    kind = type(thing)
    if not _may_be_made(kind):
        raise SchemaError(
            "samplers and transforms of rings on other nodes must be of a class that says "
            f"described = True, and without a function, got {kind.__name__}. Apply functions "
            "to the batches instead."
        )
    if is_dataclass(thing):
        made_by = next(each for each in kind.__mro__ if "__init__" in vars(each))
        if "__dataclass_fields__" not in vars(made_by):
            raise SchemaError(
                f"{kind.__name__} must be made by its fields to travel to rings on other nodes, "
                "and has a constructor of its own. Make the arguments fields."
            )
        arguments = {each.name: getattr(thing, each.name) for each in fields(thing) if each.init}
    else:
        local = traits_of(thing).local
        settings = ask(thing, "settings")()
        arguments = {name: value for name, value in settings.items() if name not in local}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_of(name) is not kind:
        raise SchemaError(
            f"{kind.__name__} must be a class that the nodes of a run can import, got one of "
            f"{kind.__module__}. Put it into a module that is installed on all of them."
        )
    return {
        "class": name,
        "arguments": {
            each: _plain(value, kind.__name__, each) for each, value in arguments.items()
        },
    }


def _class_of(name: str) -> object:
    """What a name is of in this process; None where there is no such thing."""
    module, _, path = name.partition(":")
    if module == "__main__":
        # It is another module in each process.
        return None
    try:
        found: object = reduce(getattr, path.split("."), import_module(module))
    except Exception:
        return None
    return found


def _plain(value: Any, who: str, argument: str) -> Any:
    """A value as numbers, strings, lists, dicts and arrays."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | np.ndarray):
        return value
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(each, who, argument) for each in value]
    if isinstance(value, Mapping):
        return {"mapping": {str(k): _plain(v, who, argument) for k, v in value.items()}}
    if _may_be_made(type(value)):
        return _described(value)
    raise SchemaError(
        f"{argument} of {who} must be a number, a string or an array where rings are "
        f"on other nodes, got {shown(value)}. Functions do not travel: use a LinearSchedule, "
        "store a field, or apply the function to the batches."
    )


def make(description: Description) -> Any:
    """Make what a description is of.

    Raises:
        SchemaError: It describes nothing that may be made here.
    """
    name = description.get("class")
    kind = _class_of(name) if isinstance(name, str) else None
    if not isinstance(kind, type) or not _may_be_made(kind):
        raise SchemaError(
            "class must be one that this node can import and that says described = True, "
            f"got {shown(name)}. Have the same versions of mmreplay and of your own modules "
            "on every node."
        )
    return kind(**{each: _made(value) for each, value in description["arguments"].items()})


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
