"""Reads states back: they come from files, so everything is checked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import FormatError
from mmreplay.samplers.base import State

LIMIT = 1 << 63


def check_kind(state: State, kind: str, owner: str = "sampler") -> None:
    """Refuse what is no state, or another sampler's.

    Args:
        state: What was given.
        kind: What it is to be.
        owner: Whose, in the user's words.

    Raises:
        FormatError: It is not of this kind.
    """
    if isinstance(state, Mapping) and state.get("kind") == kind:
        return
    got = state.get("kind") if isinstance(state, Mapping) else type(state).__name__
    raise FormatError(
        f"{owner} state: kind must be {kind!r}, got {got!r}. Load it into the {owner} "
        "from which it was saved."
    )


def stored_integer(state: State, name: str, stop: int = LIMIT) -> int:
    """One integer in ``[0, stop)``.

    Raises:
        FormatError: It is missing or none.
    """
    value = state.get(name)
    if type(value) is not int or not 0 <= value < stop:
        raise FormatError(
            f"sampler state: {name} must be an integer in [0, {_power(stop)}), got "
            f"{value!r}. Pass what state_dict returned, unchanged."
        )
    return value


def integers(
    state: State, name: str, owner: str = "sampler state", source: str = "state_dict"
) -> NDArray[np.int64]:
    """Return a list or array of integers of at least 0 as int64 ``[N]``.

    Args:
        state: What was given.
        name: Its key.
        owner: What it is, in the user's words.
        source: The method that returned it.

    Raises:
        FormatError: It is missing or none.
    """
    value = state.get(name)
    arrays = isinstance(value, list) or hasattr(value, "__array__")  # or a tensor
    array = np.asarray(value) if arrays else None
    good = array is not None and array.ndim == 1
    if array is None or not good or (array.size and array.dtype.kind not in "iu"):
        raise FormatError(
            f"{owner}: {name} must be a list of integers, got {_short(value)}. "
            f"Pass what {source} returned, unchanged."
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) >= LIMIT):
        raise FormatError(
            f"{owner}: {name} must be in [0, 2**63), got values in "
            f"[{array.min()}, {array.max()}]. Pass what {source} returned, "
            "unchanged."
        )
    return array.astype(np.int64)


def fraction(state: State, name: str) -> float:
    """One number in ``(0, 1]``.

    Raises:
        FormatError: It is missing or none.
    """
    value = state.get(name)
    if type(value) is not float or not 0 < value <= 1:
        raise FormatError(
            f"sampler state: {name} must be a number in (0, 1], got {value!r}. Pass "
            "what state_dict returned, unchanged."
        )
    return value


def parts(state: State, name: str, count: int) -> list[State]:
    """States of the samplers that a sampler is made of.

    Raises:
        FormatError: They are missing, or not as many.
    """
    value = state.get(name)
    if not isinstance(value, list) or len(value) != count:
        got = len(value) if isinstance(value, list) else type(value).__name__
        raise FormatError(
            f"sampler state: {name} must be a list of {count}, got {got}. Load it "
            "into a sampler made of the same samplers."
        )
    return value


def same(state: State, name: str, own: object) -> None:
    """Refuse the state of a sampler that was made with another argument.

    Raises:
        FormatError: They differ.
    """
    value = state.get(name)
    if type(value) is not type(own) or value != own:
        raise FormatError(
            f"sampler state: {name} must be {own!r} as in this sampler, got "
            f"{_short(value)}. Load it into a sampler made with the same arguments."
        )


def _power(stop: int) -> str:
    return "2**63" if stop == LIMIT else str(stop)


def _short(value: object) -> str:
    return f"{value!r:.60}"
