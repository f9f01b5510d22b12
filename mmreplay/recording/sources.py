"""Environments as the recorder sees them: single, or vectors in any autoreset mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import one_of
from mmreplay.errors import SchemaError, refuse_masked
from mmreplay.format.metadata import AUTORESETS, Autoreset
from mmreplay.nesting import flatten
from mmreplay.recording.environments import gymnasium_for

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

Leaves = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one call of ``step``, every array ``[E, ...]``.

    Attributes:
        reward: Of each environment.
        terminated: bool.
        truncated: bool.
        final: Observations that followed the ends, by path; void elsewhere. None
            where nothing ended, or the next row holds them.
    """

    reward: NDArray[np.generic]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final: Leaves | None

    def leaves(self) -> Leaves:
        """What is stored of it beside the observation and the action."""
        return {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated}


class Source(Protocol):
    """Environments as the recorder sees them."""

    num_envs: int
    autoreset: Autoreset
    observation: Any
    """What the policy sees next, as the environment gave it."""
    varying: Collection[str]
    """Paths of fields that vary, whose values come in arrays of objects ``[E]``."""
    left_out: Collection[str]
    """Paths of fields that are not stored."""

    def reset(self, seed: int | None) -> None:
        """Begin every episode anew."""

    def step(self, action: Any) -> Turn:
        """Act, and move `observation` on."""

    def leaves(self, name: str, value: Any) -> Leaves:
        """Copies of an observation's or action's arrays by path, ``[E, *shape]``."""


class Single:
    """One plain environment, which is reset here."""

    num_envs = 1
    autoreset: Autoreset = "disabled"

    def __init__(self, env: Env[Any, Any]) -> None:
        self._env = env
        self.observation: Any = None
        self.varying: Collection[str] = ()
        self.left_out: Collection[str] = ()

    def reset(self, seed: int | None) -> None:
        """See `Source.reset`."""
        self.observation, _ = self._env.reset(seed=seed)

    def step(self, action: Any) -> Turn:
        """See `Source.step`."""
        observation, reward, terminated, truncated, _ = self._env.step(action)
        final = None
        if terminated or truncated:
            final = self.leaves("observation", observation)
            observation, _ = self._env.reset()
        self.observation = observation
        return Turn(
            _reward(reward)[None], np.array([terminated], bool), np.array([truncated], bool), final
        )

    def leaves(self, name: str, value: Any) -> Leaves:
        """See `Source.leaves`."""
        return {
            path: _cells([leaf]) if path in self.varying else _copied(path, leaf)[None]
            for path, leaf in flatten({name: value}, self.varying).items()
            if path not in self.left_out
        }


class Vector:
    """A vector environment in any of Gymnasium's three autoreset modes."""

    def __init__(self, env: VectorEnv[Any, Any, Any], autoreset: Autoreset) -> None:
        self._env = env
        self.num_envs: int = env.num_envs
        self.autoreset: Autoreset = autoreset
        self.observation: Any = None
        self.varying: Collection[str] = ()
        self.left_out: Collection[str] = ()

    def reset(self, seed: int | None) -> None:
        """See `Source.reset`."""
        self.observation, _ = self._env.reset(seed=seed)

    def step(self, action: Any) -> Turn:
        """See `Source.step`."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        ended = terminated | truncated
        final = None
        if ended.any() and self.autoreset == "same_step":
            final = self._final(observation, info, ended)
        elif ended.any() and self.autoreset == "disabled":
            final = self.leaves("observation", observation)
            observation, _ = self._env.reset(options={"reset_mask": ended})
        self.observation = observation
        return Turn(_reward(reward), terminated, truncated, final)

    def _final(
        self,
        observation: Any,
        info: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        ended: NDArray[np.bool_],
    ) -> Leaves:
        """The observations before the resets, which the step returned aside."""
        if isinstance(info, Mapping):
            given = info.get("final_obs")
        else:  # one of each environment, as Gymnasium's DictInfoToList gives them
            given = [one.get("final_obs") for one in info]
        if isinstance(given, list):
            given = _cells(given)
        of_each = isinstance(given, np.ndarray) and given.dtype == object
        if given is None or (of_each and any(one is None for one in given[ended])):
            raise SchemaError(
                f"{type(self._env).__name__}: an episode ended without "
                "info['final_obs'], which autoreset_mode=SameStep needs. Use another "
                "autoreset mode, or update gymnasium."
            )
        if not of_each:
            return self.leaves("observation", given)
        final = self.leaves("observation", observation)
        for env_id in np.flatnonzero(ended).tolist():
            one = {"observation": given[env_id]}
            for path, leaf in flatten(one, self.varying).items():
                if path in self.left_out:
                    continue
                if path in self.varying:
                    final[path][env_id : env_id + 1] = _cells([leaf])
                else:
                    final[path][env_id] = _copied(path, leaf)
        return final

    def leaves(self, name: str, value: Any) -> Leaves:
        """See `Source.leaves`."""
        return {
            path: _cells(leaf) if path in self.varying else _copied(path, leaf)
            for path, leaf in flatten({name: value}, self.varying).items()
            if path not in self.left_out
        }


def _cells(values: Any) -> NDArray[np.object_]:
    """Copies of the values of environments that vary, as objects ``[E]``."""
    cells = np.empty(len(values), object)
    for env_id, value in enumerate(values):
        cells[env_id] = deepcopy(value)
    return cells


def _copied(path: str, leaf: Any) -> NDArray[Any]:
    refuse_masked(leaf, f"field {path!r}")
    return np.array(leaf)


def _reward(reward: Any) -> NDArray[np.float32]:
    refuse_masked(reward, "field 'reward'")
    # Some environments reward in integers, whatever Gymnasium's interface says.
    return np.asarray(reward, np.float32)


def open_source(env: Any, autoreset: Autoreset | None, num_envs: int | None) -> Source:
    """Take an environment as a source.

    Args:
        env: A Gymnasium environment or vector environment.
        autoreset: What a vector environment does, if its metadata do not say.
        num_envs: How many environments it should have; None for as it is.

    Raises:
        SchemaError: It is none, or is not what was told.
    """
    gymnasium = gymnasium_for("recording")
    found = getattr(env, "num_envs", 1)
    if num_envs is not None and num_envs != found:
        raise SchemaError(
            f"num_envs must be {found} like the environment's, got {num_envs}. Leave "
            "num_envs out, or pass the environment's id."
        )
    if isinstance(env, gymnasium.vector.VectorEnv):
        return Vector(env, _mode(env, autoreset))
    if isinstance(env, gymnasium.Env):
        return Single(env)
    raise SchemaError(
        "env must be a Gymnasium environment, a vector environment, or the id of one, "
        f"got {type(env).__name__}. Wrap it, or call buffer.add yourself."
    )


def _mode(env: Any, asked: Autoreset | None) -> Autoreset:
    """A vector environment's autoreset mode, in our words."""
    if asked is not None:
        one_of("autoreset", asked, AUTORESETS, "Leave it out if the environment says it.")
    stated = env.metadata.get("autoreset_mode")
    if stated is None:
        if asked is None:
            raise SchemaError(
                f"{type(env).__name__} has no metadata['autoreset_mode']. Pass "
                f"autoreset=, one of {AUTORESETS}."
            )
        return asked
    from gymnasium.vector import AutoresetMode

    words: dict[AutoresetMode, Autoreset] = {
        AutoresetMode.NEXT_STEP: "next_step",
        AutoresetMode.SAME_STEP: "same_step",
        AutoresetMode.DISABLED: "disabled",
    }
    mode = words[AutoresetMode(stated)]
    if asked not in (None, mode):
        raise SchemaError(
            f"autoreset must be {mode!r} as the environment's metadata say, got "
            f"{asked!r}. Leave autoreset out."
        )
    return mode
