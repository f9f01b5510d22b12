"""Policies, with their names for messages: errors say what a policy did wrong."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.schema.convert import on_host

Policy = Callable[[Any], Any]
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Actor:
    """A policy and what it is asked for.

    Attributes:
        policy: Takes an observation and returns an action.
        space: The environment's action space.
    """

    policy: Policy
    space: Any

    def __post_init__(self) -> None:
        """Refuse what cannot be called with an observation.

        Raises:
            SchemaError: It cannot.
        """
        legal = "a function of one observation that returns an action"
        if not callable(self.policy):
            raise SchemaError(
                f"policy must be {legal}, got {_short(self.policy)}. Leave it out "
                "for random actions."
            )
        try:
            signature = inspect.signature(self.policy)
        except ValueError:
            return  # of what is not written in Python
        try:
            signature.bind(None)
        except TypeError as error:
            raise SchemaError(
                f"policy must be {legal}, got {self.name}{signature}. Bind other "
                "arguments with functools.partial."
            ) from error

    @property
    def name(self) -> str:
        """The policy's, as its author knows it."""
        return getattr(self.policy, "__qualname__", type(self.policy).__qualname__)

    def act(self, observation: Any) -> Any:
        """Return the policy's action; its exceptions get a note that names the policy.

        Tensors become arrays, also within tuples, lists and dicts.
        """
        try:
            return _arrays(self.policy(observation))
        except Exception as error:
            error.add_note(f"raised by the policy {self.name}")
            raise

    @contextmanager
    def acting(self, action: Any) -> Iterator[None]:
        """Tell apart what fails because of an action, and what fails by itself.

        Raises:
            SchemaError: It failed, and the action is none of the space's.
        """
        try:
            yield
        except Exception as error:
            if _fits(self.space, action):
                raise
            raise SchemaError(
                f"policy {self.name} must return an action of {self.space}, got "
                f"{_short(action)}. Return an action that action_space.contains "
                f"accepts ({type(error).__name__}: {_line(str(error))})."
            ) from error


def _arrays(action: Any) -> Any:
    """An action with numpy arrays for tensors, which few environments take."""
    if isinstance(action, dict):
        return {name: _arrays(part) for name, part in action.items()}
    if isinstance(action, list | tuple) and not hasattr(action, "_fields"):
        return type(action)(_arrays(part) for part in action)
    return on_host(action).numpy() if hasattr(action, "detach") else action


def _fits(space: Any, action: Any) -> bool:
    """Whether a space contains an action, in whatever width its numbers come."""
    kind = getattr(getattr(space, "dtype", None), "kind", "")
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        if kind == "f" and np.asarray(action).dtype.kind == "f":
            action = np.asarray(action).astype(space.dtype)
        return bool(space.contains(action))
    return False


def _short(value: object) -> str:
    text = _line(repr(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _line(text: str) -> str:
    return " ".join(text.split())
