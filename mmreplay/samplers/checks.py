"""Checks of arguments that several samplers share."""

from __future__ import annotations

import inspect
import math
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError, shown
from mmreplay.samplers.base import Sampler

MOST = float(np.finfo(np.float32).max)
"""The greatest priority that can be stored."""


def call_repr(thing: object, **arguments: object) -> str:
    """Text of the call that makes a sampler again: its `repr`.

    Args:
        thing: The sampler.
        arguments: By name; those that are the constructor's default are left out
            where they are given by keyword alone, or are None.
    """
    parameters = inspect.signature(type(thing)).parameters
    told = []
    for name, value in arguments.items():
        parameter = parameters[name]
        plain = parameter.kind is parameter.KEYWORD_ONLY or value is None
        if not (plain and value == parameter.default):
            told.append(f"{name}={value!r}")
    return f"{type(thing).__name__}({', '.join(told)})"


def whole(name: str, value: object, least: int, way_out: str) -> int:
    """An integer argument of at least so much.

    Raises:
        SchemaError: It is none, or less.
    """
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or cast(int, value) < least:
        raise SchemaError(
            f"{name}: got {shown(value)}, expected an integer of at least {least}; "
            f"{way_out}"
        )
    return int(cast(int, value))


def truth(name: str, value: object) -> bool:
    """An argument that is true or false, and not a word that only looks so.

    Raises:
        SchemaError: It is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise SchemaError(
            f"{name}: got {shown(value)}, expected True or False; leave it out for the "
            "default"
        )
    return bool(value)


def checked(sampler: object) -> Sampler:
    """Return what is a sampler.

    Raises:
        SchemaError: It is none.
    """
    needed = ("draw", "state_dict", "load_state_dict")
    if isinstance(sampler, type) or not all(
        callable(getattr(sampler, name, None)) for name in needed
    ):
        raise SchemaError(
            f"sampler: got {shown(sampler)}, expected an object with draw, state_dict "
            "and load_state_dict; make one, such as mmreplay.UniformSampler(seed=0)"
        )
    return cast(Sampler, sampler)


def share(name: str, value: object, way_out: str) -> float:
    """A number in ``(0, 1]``.

    Raises:
        SchemaError: It is none.
    """
    if not is_number(value) or not 0 < value <= 1:
        raise SchemaError(
            f"{name}: got {shown(value)}, expected a number in (0, 1]; {way_out}"
        )
    return float(value)


def finite(name: str, number: object) -> float:
    """A finite number of at least 0.

    Raises:
        SchemaError: It is none.
    """
    if is_number(number) and 0 <= number < math.inf:
        return float(number)
    raise SchemaError(
        f"{name}: got {shown(number)}, expected a finite number of at least 0; leave "
        "it out "
        "for the default"
    )


def storable(values: NDArray[Any]) -> NDArray[np.float32]:
    """Priorities as they are stored, ``[B]``.

    Raises:
        SchemaError: One is negative, NaN, or infinite as float32.
    """
    if len(values) == 0:
        return np.zeros(0, np.float32)
    if values.dtype == np.float16:
        # MOST would be cast to it, and no infinity is above that one.
        values = values.astype(np.float32)
    # NaN is in no order: it fails both.
    low, high = np.minimum.reduce(values), np.maximum.reduce(values)
    if not (low >= 0 and high <= MOST):
        which = int(np.argmin((values >= 0) & (values <= MOST)))
        raise SchemaError(
            f"priorities: got {values[which]} at {which}, expected finite float32 "
            "numbers of at least 0; take the absolute value of TD errors, and find "
            "out where NaN comes from"
        )
    return values.astype(np.float32)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, numpy's scalars included; NaN fails comparisons."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(
        value, bool
    )
