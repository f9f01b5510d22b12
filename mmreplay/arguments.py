"""Checks of arguments, and how messages write them.

Each check returns the argument as a plain Python value, or raises an error that says
what is wrong, with the name and the value, and then what to do::

    capacity must be an integer of at least 1, got 0. Give the rows per environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any, TypeGuard

import numpy as np

from mmreplay.errors import SchemaError, shown

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
DEFAULT = "Leave it out for the default."


def integer(
    name: str,
    value: object,
    minimum: int | None = None,
    way_out: str = DEFAULT,
    *,
    maximum: int | None = None,
    error: type[Exception] = SchemaError,
) -> int:
    """Return an integer argument as an ``int``.

    Args:
        name: The argument's name.
        value: Its value; numpy's integers are integers, True and False are not.
        minimum: The smallest legal value; None for any.
        way_out: A sentence that says what to do instead.
        maximum: The largest legal value; None for any.
        error: The class of the error.

    Raises:
        SchemaError: It is no integer, or out of range; or another class of `error`.
    """
    if (
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and (minimum is None or value >= minimum)
        and (maximum is None or value <= maximum)
    ):
        return int(value)
    if maximum is not None and minimum is not None:
        legal = f"an integer in [{minimum}, {maximum}]"
    elif maximum is not None:
        legal = f"an integer of at most {maximum}"
    elif minimum is not None:
        legal = f"an integer of at least {minimum}"
    else:
        legal = "an integer"
    raise error(f"{name} must be {legal}, got {shown(value)}. {way_out}")


def number(
    name: str,
    value: object,
    minimum: float = -math.inf,
    way_out: str = DEFAULT,
    *,
    maximum: float = math.inf,
    above: float | None = None,
    finite: bool = True,
    nan: bool = False,
    error: type[Exception] = SchemaError,
) -> float:
    """Return a real number as a ``float``.

    Args:
        name: The argument's name.
        value: Its value; numpy's numbers are numbers, True and False are not.
        minimum: The smallest legal value.
        way_out: A sentence that says what to do instead.
        maximum: The largest legal value.
        above: The value must be greater than this one; it replaces `minimum`.
        finite: Whether infinity is refused.
        nan: Whether NaN is legal.
        error: The class of the error.

    Raises:
        SchemaError: It is no number, or out of range; or another class of `error`.
    """
    if is_number(value):
        if math.isnan(value):
            legal_value = nan
        elif math.isinf(value) and finite:
            legal_value = False
        else:
            large_enough = value >= minimum if above is None else value > above
            legal_value = bool(large_enough and value <= maximum)
        if legal_value:
            return float(value)
    kind = "a finite number" if finite and maximum == math.inf else "a number"
    if maximum < math.inf:
        first = f"({above:g}" if above is not None else f"[{minimum:g}"
        legal = f"{kind} in {first}, {maximum:g}]"
    elif above is not None:
        legal = f"{kind} above {above:g}"
    elif minimum > -math.inf:
        legal = f"{kind} of at least {minimum:g}"
    else:
        legal = kind
    raise error(f"{name} must be {legal}, got {shown(value)}. {way_out}")


def one_of(
    name: str,
    value: object,
    choices: Collection[Any],
    way_out: str = DEFAULT,
    *,
    error: type[Exception] = SchemaError,
) -> None:
    """Refuse an argument that is none of some choices.

    Args:
        name: The argument's name.
        value: Its value; anything, unhashable values too.
        choices: The legal values.
        way_out: A sentence that says what to do instead.
        error: The class of the error.

    Raises:
        SchemaError: It is none of them; or another class of `error`.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        legal = ", ".join(repr(choice) for choice in choices)
        raise error(f"{name} must be one of {legal}, got {shown(value)}. {way_out}")


def flag(
    name: str, value: object, way_out: str = DEFAULT, *, error: type[Exception] = SchemaError
) -> bool:
    """Return a boolean argument as a ``bool``; a word that looks like one is none.

    Args:
        name: The argument's name.
        value: Its value; numpy's booleans are legal, 0 and 1 are not.
        way_out: A sentence that says what to do instead.
        error: The class of the error.

    Raises:
        SchemaError: It is neither True nor False; or another class of `error`.
    """
    if not isinstance(value, bool | np.bool_):
        raise error(f"{name} must be True or False, got {shown(value)}. {way_out}")
    return bool(value)


def size_in_bytes(name: str, value: object) -> int:
    """Return a size in bytes, given as an integer or as text such as ``"1.5 GiB"``.

    Args:
        name: The argument's name.
        value: Its value.

    Raises:
        SchemaError: It is neither, or below 1.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTPE]i)?B?\s*", value)
        if match:
            unit = UNITS.index(f"{match[2]}B") if match[2] else 0
            value = int(float(match[1]) * 1024**unit)
        else:
            raise SchemaError(
                f"{name} must be a size such as '1 GiB', got {shown(value)}. Use the "
                f"units {', '.join(UNITS)}, or an integer of bytes."
            )
    return integer(name, value, 1, "Give bytes, or a size such as '1 GiB'.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, numpy's and NaN included, and no boolean."""
    real = isinstance(value, int | float | np.integer | np.floating)
    return real and not isinstance(value, bool)


def format_size(nbytes: float) -> str:
    """Return bytes with a unit: ``"1.50 GiB"``."""
    step = 0
    while abs(nbytes) >= 1024 and step < len(UNITS) - 1:
        nbytes /= 1024
        step += 1
    return f"{nbytes:,.0f} B" if step == 0 else f"{nbytes:,.2f} {UNITS[step]}"


def printable(text: str) -> str:
    """A text in which nothing but what is seen reaches a terminal, or a page.

    Names come from files that anybody may have made: escape sequences in them would
    move the cursor or set a title, a line break would forge a line of ours, and half
    a surrogate pair, which stands for a byte that is no UTF-8, cannot be printed.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
