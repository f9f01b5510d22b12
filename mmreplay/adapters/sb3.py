"""Stable-Baselines3's replay buffers on disk; give one as ``replay_buffer_class=``.

``replay_buffer_kwargs=dict(path="runs/pong")`` says where. What differs from the
buffers of Stable-Baselines3 is told in docs/migrating/sb3.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mmreplay.adapters.home import Home, StrPath
from mmreplay.adapters.sb3_steps import NONE, Steps, fitted
from mmreplay.adapters.values import check_counts
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer as Ring
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field
from mmreplay.transforms.nstep import NStep

try:
    from stable_baselines3.common import buffers, preprocessing, type_aliases
    from stable_baselines3.common.utils import get_device
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mmreplay.adapters.sb3 needs stable-baselines3, which is not installed; "
        "pip install stable-baselines3"
    ) from error


PATIENCE = 100
"""Prioritized draws without priorities after which a warning says so."""


class Samples(type_aliases.ReplayBufferSamples):  # type: ignore[misc]  # untyped here
    """A batch as Stable-Baselines3 takes it, and the draw that it is of.

    Attributes:
        batch: Positions, probabilities and weights of the draw, numpy.
    """

    batch: Batch

    @property
    def weights(self) -> torch.Tensor:
        """Importance weights, float32 ``[B, 1]``; ones unless prioritized."""
        weights = torch.from_numpy(self.batch.weights).reshape(-1, 1)
        return weights.to(self.rewards.device)


class DictSamples(type_aliases.DictReplayBufferSamples):  # type: ignore[misc]  # untyped here
    """The same for Dict observations."""

    batch: Batch
    weights = Samples.weights


class ReplayBuffer(buffers.ReplayBuffer):  # type: ignore[misc]  # untyped here
    """`stable_baselines3.common.buffers.ReplayBuffer` in files.

    Draws are uniform over all transitions, or prioritized, and are folded over
    n steps where asked for. With `optimize_memory_usage` each observation is stored
    once, and transitions at truncations are exact: the observation that the episode
    ended with takes a row of its own. The newest step of each environment is then
    drawn when the next one is there.

    Attributes:
        home: Where the data is.
    """

    _expected = "no Dict; use DictReplayBuffer"
    _timeouts_end = True
    """Whether a time limit ends an episode where `done` is false."""
    _unlearned: int | None = None
    """Prioritized draws without priorities so far; None if no warning is to come."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        path: StrPath | None = None,
        resume: bool = False,
        prioritized: bool | Mapping[str, Any] = False,
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
    ) -> None:
        """Declare a buffer; see Stable-Baselines3 for those not listed here.

        Args:
            buffer_size: Transitions in all; each environment has an equal part.
            observation_space: Box, Discrete, MultiDiscrete or MultiBinary.
            action_space: Likewise.
            device: Where samples go.
            n_envs: Environments.
            optimize_memory_usage: Store each observation once.
            handle_timeout_termination: Tell time limits from terminations by
                ``infos``; else every end is a termination.
            path: The folder; see `Home`.
            resume: Go on with the buffer that is there.
            prioritized: Draw by priorities; or the arguments of `PrioritizedSampler`.
            n_steps: Steps to fold into a transition.
            gamma: Discount of the steps that are folded.
            seed: Of the draws. By default a number from numpy's global generator,
                which Stable-Baselines3 seeds for each model just before it makes the
                buffer: two models of one seed draw alike, and so does a model that is
                made again with `resume`, from the first number on, over the steps
                that are there by then. A buffer that is loaded from a pickle goes on
                with the numbers that it had come to.

        Raises:
            FormatError: The path holds a buffer, and resume is False.
            SchemaError: An argument is not legal, or it needs `DictReplayBuffer`.
        """
        check_counts(n_envs=n_envs)
        # Not the base's own __init__: it fills the RAM.
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape = preprocessing.get_obs_shape(observation_space)
        self.action_dim = preprocessing.get_action_dim(action_space)
        self.device, self.n_envs = get_device(device), n_envs
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma = n_steps, gamma
        self._transforms = (NStep(n_steps, gamma),) if n_steps != 1 else ()
        self._prioritized = prioritized
        self._unlearned = None if prioritized is False else 0
        self.sampler = _sampler(prioritized, seed)
        self._declare()
        self.home = Home("sb3", path, resume)
        self._ring: Ring | None = None

    def _declare(self) -> None:
        """Lay out the fields of a step."""
        if isinstance(self.obs_shape, dict) != isinstance(self, DictReplayBuffer):
            raise SchemaError(
                f"{type(self).__name__}: got the observation space "
                f"{self.observation_space}, expected {self._expected}"
            )
        dtype = self._maybe_cast_dtype(self.action_space.dtype)
        self._steps = Steps(
            self.observation_space, self.obs_shape, Field((self.action_dim,), dtype),
            self.n_envs, self.optimize_memory_usage,
        )  # fmt: skip

    @property
    def ring(self) -> Ring | None:
        """The `mmreplay.ReplayBuffer`; None before the first `add`.

        One that is there already is opened when it is first asked for, not when a
        model is made or loaded.
        """
        return self._ready() if self._ring is None and self.home.resumed else self._ring

    def _ready(self) -> Ring:
        if self._ring is None:
            self._ring = self.home.ring(
                self._steps.schema, self.buffer_size, self.n_envs,
                autoreset="same_step", sampler=self.sampler,
                transforms=self._transforms, on_resume="truncate",
                size_name="buffer_size",
            )  # fmt: skip
            self.sampler = self._ring.sampler
            self._heads = np.full(self.n_envs, -1)  # its first step follows nobody's
        return self._ring

    def __repr__(self) -> str:
        """Say what it is, and where."""
        held = "not open yet" if self._ring is None else self.size()
        return f"<sb3.{type(self).__name__} {held} x {self.n_envs}, {self.home}>"

    def size(self) -> int:
        """Transitions of the environment that has fewest."""
        return 0 if (ring := self.ring) is None else int(ring.sizes.min())

    @property
    def full(self) -> bool:
        """Whether every environment's part is full."""
        if (ring := self.ring) is None:
            return False
        return bool((ring.span.lengths >= self.buffer_size).all())

    @property
    def pos(self) -> int:
        """Rows written to the first environment, modulo `buffer_size`."""
        return (
            0 if (ring := self.ring) is None else int(ring.heads[0]) % self.buffer_size
        )

    @property
    def dones(self) -> _Cuts:
        """What Stable-Baselines3 sets to end the last episode before another run."""
        return _Cuts(self)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition of each environment.

        Args:
            obs: ``[E, *shape]``, or a dict of them.
            next_obs: Likewise; where a step is done, what its episode ended with.
            action: ``[E, action_dim]``, or ``[E]``.
            reward: ``[E]``.
            done: ``[E]``.
            infos: One of each environment. With `handle_timeout_termination`,
                ``"TimeLimit.truncated"`` truncates the episode at this step, also
                where `done` is false; n-step returns stop there.

        Raises:
            SchemaError: A shape or dtype does not fit the spaces.
        """
        ring, steps = self._ring, self._steps
        if ring is None:
            ring = self._ready()
        plain = None
        if not self._cut_short(infos):
            plain = steps.plain(obs, next_obs, action, reward, done)
        added = ring.add_as_is(plain, self._heads) if plain else None
        if added is None:
            heads = ring.published
            # If not, another face has added meanwhile, and its step is the ring's last.
            follows = bool((heads == self._heads).all())
            if plain and follows:
                added = self._added(ring, plain, heads)
        if added is not None:
            steps.follow()
            self._heads = added
            return
        now, then = steps.observed(obs), steps.observed(next_obs)
        ended = fitted("done", np.asarray(done, bool), (self.n_envs,))
        timeouts = np.zeros(self.n_envs, bool)
        if self.handle_timeout_termination:
            timeouts[:] = [info.get("TimeLimit.truncated", False) for info in infos]
            if self._timeouts_end:
                ended = ended | timeouts
        step, final = steps.rows(now, then, action, reward, ended, timeouts)
        moved = NONE if follows else np.flatnonzero(heads != self._heads)
        for apart in (moved, steps.apart(now)):
            if len(apart):
                ring.cut(apart)
        if final is None:
            ring.add(step)
        else:
            ring.add(step, final_observation=final)
        steps.lead_to(then, ended)
        # Not what is published by now, which may be another face's.
        self._heads = heads + 1 if final is None else heads + 1 + ended

    def _cut_short(self, infos: list[dict[str, Any]]) -> bool:
        """Whether the only environment reports a time limit, with done or without."""
        if self.n_envs > 1 or not (self.handle_timeout_termination and infos):
            return False
        return bool(infos[0].get("TimeLimit.truncated", False))

    def _added(
        self, ring: Ring, plain: dict[str, Any], heads: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Add a step behind heads that are others than those of our last, and equal.

        Or one with a reward that the ring looks at, such as one too large for it.
        """
        added = None if heads is self._heads else ring.add_as_is(plain, heads)
        if added is None and self._steps.exact(plain):
            ring.add(plain)
            added = heads + 1
        return added

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw a batch.

        Args:
            batch_size: Transitions.
            env: A VecNormalize to normalize observations and rewards by.

        Returns:
            `Samples`, or `DictSamples`, on `device`.

        Raises:
            EmptyError: There is nothing to draw yet.
        """
        if (ring := self.ring) is None:
            raise EmptyError(
                f"cannot draw {batch_size} transitions: got none yet, expected at "
                "least one; add steps first"
            )
        if self._unlearned is not None:
            self._unlearned += 1
            if self._unlearned == PATIENCE:
                self._unlearned = None
                warnings.warn(
                    f"prioritized: got {PATIENCE} draws and no call of "
                    "update_priorities, without which priorities stay as they are; "
                    "call replay_buffer.update_priorities(samples, errors) after each "
                    "training step, which Stable-Baselines3's own train() does not "
                    "do, or leave prioritized out",
                    stacklevel=2,
                )
        return self._samples(ring.sample(batch_size, contiguous=True), env)

    def _samples(self, batch: Batch, env: Any) -> Any:
        fields = batch.fields
        now, then = (
            self._normalize_obs(self._steps.shown(fields, role), env)
            for role in ("observation", "next_observation")
        )
        ends = fields["terminated"].astype(np.float32)
        rewards = self._normalize_reward(fields["reward"].reshape(-1, 1), env)
        kind = DictSamples if isinstance(now, dict) else Samples
        samples = kind(
            *map(self._tensor, (now, fields["action"], then, ends[:, None], rewards)),
            # 0 at an end, where what it is multiplied by is 0 as well.
            self._tensor(fields["discount"][:, None] if self._transforms else None),
        )
        samples.batch = batch
        return samples

    def _tensor(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, dict):
            return {key: self._tensor(array) for key, array in value.items()}
        # A batch is nobody else's: no copy is needed.
        return torch.from_numpy(value).to(self.device)

    def update_priorities(self, samples: Any, priorities: ArrayLike) -> int:
        """Give the transitions of a batch new priorities.

        Args:
            samples: What `sample` gave.
            priorities: ``[B]`` or ``[B, 1]``, at least 0; array or tensor.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: Draws are not prioritized, or values do not fit.
        """
        if not isinstance(priorities, torch.Tensor):
            priorities = np.asarray(priorities)
        if (ring := self.ring) is None:
            raise EmptyError(
                "cannot update priorities: got a buffer without a transition, expected "
                "samples that it drew; draw them first"
            )
        dropped = ring.update_priorities(samples.batch, priorities.reshape(-1))
        self._unlearned = None
        return dropped

    def reset(self) -> None:
        """Give up all transitions."""
        if (ring := self.ring) is not None:
            ring.clear()
            self._heads = ring.published
            self._steps.lead_to({}, np.zeros(self.n_envs, bool))

    def close(self) -> None:
        """Commit and close the files; dropping the buffer, and exit, do so as well."""
        self.home.close()

    def __getstate__(self) -> dict[str, Any]:
        """A few arguments and the path: the data stays where it is.

        Raises:
            FormatError: The buffer is in a temporary folder.
        """
        left_out = ("_ring", "_heads", "sampler", "_steps")
        state = {k: v for k, v in self.__dict__.items() if k not in left_out}
        return state | {"_drawn": self.sampler.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the data that the path leads to; it may have grown since."""
        drawn = state.pop("_drawn")
        self.__dict__ |= state
        self._ring = None
        self._declare()
        self.sampler = _sampler(self._prioritized, 0)
        self.sampler.load_state_dict(drawn)


class DictReplayBuffer(ReplayBuffer):
    """`stable_baselines3.common.buffers.DictReplayBuffer` in files."""

    _expected = "a Dict; use ReplayBuffer"


class _Cuts:
    """Stands for the array of ends, of which only the last is ever set."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, index: object, done: object) -> None:
        if np.any(np.asarray(done)) and (ring := self._buffer.ring) is not None:
            ring.cut()


def _sampler(prioritized: bool | Mapping[str, Any], seed: int | None) -> Sampler:
    if seed is None:
        # Not torch's: it cannot tell a second model of the same seed from a second
        # buffer of one model. Nor a generator of our own: nobody seeds that.
        seed = int(np.random.randint(1 << 62))  # noqa: NPY002  # the one that is seeded
    if prioritized is False:
        return UniformSampler(seed)
    if prioritized is not True and not isinstance(prioritized, Mapping):
        raise SchemaError(
            f"prioritized: got {prioritized!r}, expected True, False or the arguments "
            'of PrioritizedSampler; pass such as {"alpha": 0.6, "beta": 0.4}'
        )
    options = {} if prioritized is True else dict(prioritized)
    return PrioritizedSampler(**{"seed": seed, **options})
