"""Environments by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mmreplay.arguments import integer
from mmreplay.errors import SchemaError, shown
from mmreplay.format.metadata import MAX_NUM_ENVS

ATARI = "ALE/"


def make_vector(name: str, num_envs: int, kwargs: Mapping[str, Any]) -> Any:
    """Make a vector environment of an id, which resets in the step after an end.

    Raises:
        SchemaError: Gymnasium does not know the id, or cannot make it.
        ModuleNotFoundError: gymnasium, or ale-py for Atari, is not installed.
    """
    integer("num_envs", num_envs, 1, maximum=MAX_NUM_ENVS)
    if name.count(":") > 1:
        # Gymnasium fails to unpack it.
        raise SchemaError(
            f"environment {shown(name)} must have one ':' at most, behind the module "
            "that registers it. Pass an id such as 'CartPole-v1'."
        )
    gymnasium = gymnasium_for(f"recording {name!r}")
    if name.startswith(ATARI):
        _register_atari(gymnasium, name)
    try:
        # What gymnasium.make gives, side by side: an id's own vectorization may
        # preprocess (ale-py's does) and would store something else.
        return gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="sync", **kwargs)
    except gymnasium.error.Error as error:
        raise SchemaError(
            f"environment {shown(name)} is unknown to gymnasium.make: "
            f"{str(error).rstrip('.')!r}. Call gymnasium.pprint_registry() for a list."
        ) from error


def gymnasium_for(what: str) -> Any:
    """Import gymnasium.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if find_spec("gymnasium") is None:
        raise ModuleNotFoundError(
            f"{what} needs gymnasium, which is not installed. Run pip install 'mmreplay[rl]'."
        )
    import gymnasium

    return gymnasium


def _register_atari(gymnasium: Any, name: str) -> None:
    if find_spec("ale_py") is None:
        raise ModuleNotFoundError(
            f"recording {name!r} needs ale-py for Atari, which is not installed. Run "
            "pip install 'mmreplay[rl]'."
        )
    import ale_py

    # Its banner is for people who start emulators.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
