"""Stable-Baselines3's steps as rows: fields, observations, and what follows what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.adapters.common.values import PAD, varying_space
from mmreplay.errors import SchemaError, refuse_masked
from mmreplay.nesting import unflatten
from mmreplay.schema import Field, Schema

Arrays = dict[str, NDArray[Any]]
NONE = np.empty(0, np.int64)
ARRAY, ONE = np.ndarray, (1,)


def refuse_varying_spaces(space: Any, name: str) -> None:
    """Refuse Text, Sequence and Graph, also as a part of a Dict.

    Args:
        space: Of observations or actions.
        name: What messages call it.

    Raises:
        SchemaError: It is one, or has one.
    """
    if varying_space(space):
        raise SchemaError(f"{name} must have values of one shape, got {space!r:.80}. {PAD}")
    parts = getattr(space, "spaces", None) or {}
    named = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    for key, part in named:
        refuse_varying_spaces(part, f"{name}[{key!r}]")


class Steps:
    """The rows of one buffer's steps.

    Attributes:
        schema: Their fields.
        kinds: Of each observation its key, what follows the role in its path, and
            its field.
        extra: Further values of the step to come, by path, ``[E, *shape]``.
    """

    def __init__(
        self,
        space: Any,
        shapes: Any,
        action: Field,
        num_envs: int,
        once: bool,
        extra: Mapping[str, Field] | None = None,
    ) -> None:
        """Lay steps out.

        Args:
            space: Of observations; a Dict gives each key a field.
            shapes: Of observations, by key where it is a Dict.
            action: The action's field.
            num_envs: Environments.
            once: Observations are stored once, and next ones derived.
            extra: Further fields.
        """
        dicts = isinstance(shapes, dict)
        keys = {key: f"/{key}" for key in shapes} if dicts else {None: ""}
        self._num_envs, self._once = num_envs, once
        self.kinds = [
            (key, path, Field(shapes[key], space.spaces[key].dtype))
            if key is not None
            else (key, path, Field(shapes, space.dtype))
            for key, path in keys.items()
        ]
        fields = {f"observation{path}": field for _, path, field in self.kinds}
        if not once:
            fields |= {f"next_{path}": field for path, field in fields.items()}
        fields |= {
            "action": action,
            "reward": Field((), "float32"),
            "terminated": Field((), "bool"),
            "truncated": Field((), "bool"),
            **(extra or {}),
        }
        self.extra: Arrays = {}
        self.schema = Schema.from_flat(fields)
        self._action = action
        # What the last step led to, to detect a step that does not follow it.
        self._led_to: dict[str, bytes] = {}
        self._over = self._none_over = np.zeros(num_envs, bool)
        self._plain = [
            (key, path, f"observation{path}", None if once else f"next_observation{path}")
            for key, path, _ in self.kinds
        ]
        self._coming: dict[str, bytes] = {}
        self._arrays = {
            path: (field.numpy, (num_envs, *field.shape))
            for path, field in fields.items()
            if path not in ("reward", "terminated", "truncated")
        }

    def plain(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any
    ) -> dict[str, Any] | None:
        """Return an ordinary step of a single environment, in few calls.

        Returns:
            Values by path for the ring, which may refuse them as they are; the next
            observation is remembered. None where the step needs more checks: it ends
            an episode, or does not follow the last one.
        """
        if (
            self._num_envs > 1
            or not type(done) is type(reward) is type(action) is ARRAY
            or done.shape != ONE
            or reward.shape != ONE
            or done.item()
        ):
            return None
        step: dict[str, Any] = {
            "reward": reward.item(),
            "terminated": False,
            "truncated": False,
            "action": action,
            **self.extra,
        }
        over = self._over is not self._none_over and self._over[0]
        known, led_to = None if over else self._led_to, {}
        for key, path, name, following in self._plain:
            now, then = (obs, next_obs) if key is None else (obs[key], next_obs[key])
            if not type(now) is type(then) is ARRAY:
                return None
            if known and now.tobytes() != known[path]:
                return None
            step[name] = now
            if following is not None:
                step[following] = then
            elif then.dtype != now.dtype or then.shape != now.shape:
                # The ring, which is given the first alone, looks at no other.
                return None
            led_to[path] = then.tobytes()
        self._coming = led_to
        return step

    def exact(self, step: dict[str, Any]) -> bool:
        """Return whether the arrays of a step of `plain` are as they are stored."""
        return all(
            step[path].dtype == dtype and step[path].shape == shape
            for path, (dtype, shape) in self._arrays.items()
        )

    def mark_added(self) -> None:
        """Remember what the step that `plain` gave led to, now that it is in."""
        self._led_to, self._over = self._coming, self._none_over

    def observed(self, observations: Any) -> Arrays:
        """Observations as they are stored, by what follows the role in their path."""
        found = {}
        for key, path, field in self.kinds:
            name = "observation" if key is None else f"observation {key!r}"
            leaf = observations if key is None else observations[key]
            refuse_masked(leaf, name)
            array = np.asarray(leaf, field.numpy)
            found[path] = fitted(name, array, (self._num_envs, *field.shape))
        return found

    def shown(self, fields: Arrays, role: str) -> Any:
        """Observations of a batch as they were given."""
        if self.kinds[0][0] is None:
            return fields[role]
        return {key: fields[role + path] for key, path, _ in self.kinds}

    def rows(
        self,
        now: Arrays,
        then: Arrays,
        action: Any,
        reward: Any,
        ended: NDArray[np.bool_],
        timeouts: NDArray[np.bool_],
    ) -> tuple[dict[str, Any], Any]:
        """One step of each environment, and the final observation where one ended.

        Args:
            now: What `observed` made of the observations.
            then: Of the next ones.
            action: ``[E, *shape]``, or of as many numbers.
            reward: ``[E]``.
            ended: bool ``[E]``.
            timeouts: bool ``[E]``.
        """
        for name, value in (("action", action), ("reward", reward)):
            refuse_masked(value, name)
        done = np.asarray(action, self._action.numpy)
        shape = (self._num_envs, *self._action.shape)
        # The action of one environment may come with its space's axes alone.
        whole = self._num_envs == 1 or len(np.atleast_1d(done)) == self._num_envs
        if whole and done.size == np.prod(shape):
            done = done.reshape(shape)
        step: dict[str, Any] = {f"observation{path}": now[path] for path in now}
        step["action"] = fitted("action", done, shape)
        step |= self.extra
        rewards = np.asarray(reward)
        if rewards.dtype != np.float64:  # the ring refuses values too large
            rewards = rewards.astype(np.float32)
        step["reward"] = fitted("reward", rewards, (self._num_envs,))
        step["terminated"] = ended & ~timeouts
        step["truncated"] = ended & timeouts
        final = None
        if not self._once:
            step |= {f"next_observation{path}": then[path] for path in then}
        elif ended.any():
            final = unflatten({f"final{path}": then[path] for path in then})["final"]
        if self._num_envs == 1:
            # Which is the ring's quickest way in.
            step = {p: a[0] if a.ndim > 1 else a.item() for p, a in step.items()}
        return step, final

    def apart(self, now: Arrays) -> NDArray[np.int64]:
        """Environments that go on elsewhere than where their last step led to.

        A second ``learn()`` resets the environments, and says so to no buffer.
        """
        found = self._over  # and so none of those
        for path, led_to in self._led_to.items():
            # Bytes: NaN equals itself.
            if now[path].tobytes() != led_to:
                before = np.frombuffer(led_to, np.uint8).reshape(self._num_envs, -1)
                found = found | (_bits(now[path]) != before).any(axis=1)
        return NONE if found is self._over else np.flatnonzero(found & ~self._over)

    def lead_to(self, then: Arrays, ended: NDArray[np.bool_]) -> None:
        """Remember what steps led to, and whose episode is over; nothing for `{}`."""
        self._led_to = {path: array.tobytes() for path, array in then.items()}
        self._over = ended


def fitted(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Values of one step of each environment, in the shape that is stored.

    Raises:
        SchemaError: They have another one, but for axes of length 1.
    """
    if array.shape == shape:
        return array
    if [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
        raise SchemaError(
            f"{name} must have the shape {list(shape)}, a value of each environment, "
            f"got {list(array.shape)}. Values are neither repeated nor moved to fit."
        )
    return array.reshape(shape)


def _bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
