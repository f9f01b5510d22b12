"""Stable-Baselines3's replay buffers on disk; give one as ``replay_buffer_class=``.

``replay_buffer_kwargs=dict(path="runs/pong")`` says where. docs/migrating/sb3.md lists
the differences from the buffers of Stable-Baselines3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mmreplay.adapters.common.location import BufferLocation, StrPath
from mmreplay.adapters.common.values import check_counts
from mmreplay.adapters.sb3 import goals as sb3_goals
from mmreplay.adapters.sb3.steps import NONE, Steps, fitted, refuse_varying_spaces
from mmreplay.arguments import flag
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer as Ring
from mmreplay.episodes import END, FINAL
from mmreplay.errors import EmptyError, SchemaError, refuse_masked, shown
from mmreplay.format import metadata
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field
from mmreplay.transforms.nstep import NStep

try:
    from stable_baselines3.common import buffers, preprocessing, type_aliases
    from stable_baselines3.common.utils import get_device
    from stable_baselines3.her import goal_selection_strategy as strategies
    from stable_baselines3.her import her_replay_buffer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mmreplay.adapters.sb3 needs stable-baselines3, which is not installed; "
        "pip install stable-baselines3"
    ) from error


CPU = torch.device("cpu")
PATIENCE = 100
"""Prioritized draws without `update_priorities` after which a warning is issued."""


class Samples(type_aliases.ReplayBufferSamples):  # type: ignore[misc]  # untyped here
    """A batch for Stable-Baselines3, with its draw.

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


class HerSamples(DictSamples):
    """The same for hindsight; `batch` has the new goals and rewards.

    Attributes:
        goal_positions: int64 ``[V]``, numpy: positions of the steps whose achieved
            goals replace those of the last V transitions.
    """

    goal_positions: NDArray[np.int64]


class ReplayBuffer(buffers.ReplayBuffer):  # type: ignore[misc]  # untyped here
    """`stable_baselines3.common.buffers.ReplayBuffer` in files.

    Draws are uniform over all transitions or prioritized, and can be n-step. With
    `optimize_memory_usage` each observation is stored once, and transitions at
    truncations are exact, because the final observation of an episode has a row of its
    own. The newest step of each environment is then drawn once the next one exists.

    Attributes:
        home: The folder of the data.

    Example:
        ```python
        model = SAC(
            "MlpPolicy", env, replay_buffer_class=ReplayBuffer,
            replay_buffer_kwargs={"path": "runs/pendulum/buffer", "resume": True},
        )
        ```
    """

    _needs, _other = "a space that is no Dict", "DictReplayBuffer"
    _dicts: type[DictSamples] = DictSamples
    _extra: Mapping[str, Field] = MappingProxyType({})
    """Fields beside those of Stable-Baselines3's arrays."""
    _timeouts_end = True
    """Whether ``TimeLimit.truncated`` ends an episode where `done` is false."""
    _on_resume: Literal["truncate", "continue"] = "truncate"
    _unlearned: int | None = None
    """Prioritized draws before the first `update_priorities`; None: no more warning."""

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
            path: The folder; see `BufferLocation`.
            resume: Go on with the buffer that is there.
            prioritized: Draw by priorities; or the arguments of `PrioritizedSampler`.
            n_steps: Steps to fold into a transition.
            gamma: Discount of the steps that are folded.
            seed: Of the draws. By default a number from numpy's global generator,
                which Stable-Baselines3 seeds for each model just before it makes the
                buffer: two models of one seed draw alike. A model that is made again
                with `resume` starts the same sequence of random numbers, over the
                steps that the folder then holds. A buffer that is loaded from a
                pickle continues its sequence.

        Raises:
            FormatError: The path holds a buffer, and resume is False.
            SchemaError: An argument is not legal, or it needs `DictReplayBuffer`.
        """
        check_counts(n_envs=n_envs, buffer_size=buffer_size)
        flag("optimize_memory_usage", optimize_memory_usage)
        flag("handle_timeout_termination", handle_timeout_termination)
        # Not the base's own __init__: it fills the RAM.
        self.buffer_size = max(int(buffer_size) // n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        refuse_varying_spaces(observation_space, "observation_space")
        refuse_varying_spaces(action_space, "action_space")
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
        self.home = BufferLocation("sb3", path, resume)
        self._ring: Ring | None = None

    def _declare(self) -> None:
        """Lay out the fields of a step."""
        if isinstance(self.obs_shape, dict) != isinstance(self, DictReplayBuffer):
            raise SchemaError(
                f"{type(self).__name__} needs {self._needs}, got the observation space "
                f"{self.observation_space}. Use {self._other}."
            )
        dtype = self._maybe_cast_dtype(self.action_space.dtype)
        self._steps = Steps(
            self.observation_space,
            self.obs_shape,
            Field((self.action_dim,), dtype),
            self.n_envs,
            self.optimize_memory_usage,
            self._extra,
        )

    @property
    def ring(self) -> Ring | None:
        """The `mmreplay.ReplayBuffer`; None before the first `add`.

        An existing buffer is opened at the first access, not when a model is made or
        loaded.
        """
        return self._ready() if self._ring is None and self.home.resumed else self._ring

    def _ready(self) -> Ring:
        if self._ring is None:
            self._ring = self.home.ring(
                self._steps.schema,
                self.buffer_size,
                self.n_envs,
                autoreset="same_step",
                sampler=self.sampler,
                transforms=self._transforms,
                on_resume=self._on_resume,
                size_name="buffer_size",
            )
            self.sampler = self._ring.sampler
            self._heads = np.full(self.n_envs, -1)  # its first step follows no other
        return self._ring

    def __repr__(self) -> str:
        """Name the class, the size and the folder."""
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
        return 0 if (ring := self.ring) is None else int(ring.heads[0]) % self.buffer_size

    @property
    def dones(self) -> _Dones:
        """Stable-Baselines3 sets an item to end the last episode before another run."""
        return _Dones(self)

    def _end_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """End the episodes of some environments."""
        self._ready().end_episodes(env_ids)

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
        if not self._reports_time_limit(infos):
            plain = steps.plain(obs, next_obs, action, reward, done)
        added = ring.try_add(plain, self._heads) if plain else None
        if added is None:
            heads = ring.published
            # If not, another adapter added a step, which is the last one of the ring.
            follows = bool((heads == self._heads).all())
            if plain and follows:
                added = self._added(ring, plain, heads)
        if added is not None:
            steps.mark_added()
            self._heads = added
            return
        now, then = steps.observed(obs), steps.observed(next_obs)
        refuse_masked(done, "done")
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
                ring.end_episodes(apart)
        ring.add(step, final_observation=final)
        steps.lead_to(then, ended)
        # Another adapter may have published other heads by now.
        self._heads = heads + 1 if final is None else heads + 1 + ended

    def _reports_time_limit(self, infos: list[dict[str, Any]]) -> bool:
        """Return whether the only environment reports a time limit."""
        if self.n_envs > 1 or not (self.handle_timeout_termination and infos):
            return False
        return bool(infos[0].get("TimeLimit.truncated", False))

    def _added(
        self, ring: Ring, plain: dict[str, Any], heads: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Add a step whose heads equal those of our last step but are another array.

        Or a step whose reward has to be checked, such as one too large for the field.
        """
        added = None if heads is self._heads else ring.try_add(plain, heads)
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
                f"cannot draw {batch_size} transitions from an empty buffer. Add steps first."
            )
        if self._unlearned is not None:
            self._unlearned += 1
            if self._unlearned == PATIENCE:
                self._unlearned = None
                warnings.warn(
                    f"prioritized: update_priorities was not called in {PATIENCE} "
                    "draws, so priorities do not change. Call "
                    "replay_buffer.update_priorities(samples, errors) after each "
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
        # The batch is not shared, so no copy is needed.
        tensor: Callable[[Any], torch.Tensor] = torch.from_numpy
        if self.device != CPU:
            tensor = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731

        dicts = isinstance(now, dict)
        if dicts:
            now, then = ({k: tensor(a) for k, a in d.items()} for d in (now, then))
        samples = (self._dicts if dicts else Samples)(
            now if dicts else tensor(now),
            tensor(fields["action"]),
            then if dicts else tensor(then),
            tensor(ends[:, None]),
            tensor(rewards),
            # 0 at an end, where what it is multiplied by is 0 as well.
            tensor(fields["discount"][:, None]) if self._transforms else None,
        )
        samples.batch = batch
        return samples

    def update_priorities(self, samples: Any, priorities: ArrayLike) -> int:
        """Set the priorities of the transitions of a batch.

        Args:
            samples: What `sample` gave.
            priorities: ``[B]`` or ``[B, 1]``, at least 0; array or tensor.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: Draws are not prioritized, or values do not fit.
        """
        if not isinstance(priorities, torch.Tensor):
            refuse_masked(priorities, "priorities")
            priorities = np.asarray(priorities)
        if (ring := self.ring) is None:
            raise EmptyError("cannot update priorities of an empty buffer. Draw samples first.")
        dropped = ring.update_priorities(samples.batch, priorities.reshape(-1))
        self._unlearned = None
        return dropped

    def reset(self) -> None:
        """Remove all transitions."""
        if (ring := self.ring) is not None:
            ring.clear()
            self._heads = ring.published
            self._steps.lead_to({}, np.zeros(self.n_envs, bool))

    def close(self) -> None:
        """Commit and close the files; dropping the buffer, and exit, do so as well."""
        self.home.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the path; the data stays in its folder.

        Raises:
            FormatError: The buffer is in a temporary folder.
        """
        left_out = ("_ring", "_heads", "sampler", "_steps")
        state = {k: v for k, v in self.__dict__.items() if k not in left_out}
        return state | {"_drawn": self.sampler.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the data at the path; it may have grown since."""
        drawn = state.pop("_drawn")
        self.__dict__ |= state
        self._ring = None
        self._declare()
        self.sampler = _sampler(self._prioritized, 0)
        self.sampler.load_state_dict(drawn)


class DictReplayBuffer(ReplayBuffer):
    """`stable_baselines3.common.buffers.DictReplayBuffer` in files.

    Example:
        ```python
        model = SAC(
            "MultiInputPolicy", env, replay_buffer_class=DictReplayBuffer,
            replay_buffer_kwargs={"path": "runs/reach/buffer"},
        )
        ```
    """

    _needs, _other = "a Dict space", "ReplayBuffer"


class HerReplayBuffer(DictReplayBuffer, her_replay_buffer.HerReplayBuffer):  # type: ignore[misc]  # untyped here
    """`stable_baselines3.her.HerReplayBuffer` in files.

    Draws are uniform over the transitions of whole episodes that have ended. The last
    ``int(her_ratio * batch_size)`` transitions of a batch get a goal that their own
    episode achieved as the desired goal, and the reward that ``compute_reward`` of the
    first environment gives for it.

    A buffer that is opened with `resume` ends the episodes that were running, as
    `truncate_last_trajectory` does. A buffer that is loaded from a pickle continues
    them, unless `truncate_last_trajectory` is called, as
    ``model.load_replay_buffer`` does by default.

    Attributes:
        env: Computes rewards; None in a buffer loaded from a pickle, until `set_env`.
        her_ratio: ``1 - 1 / (n_sampled_goal + 1)``.

    Example:
        ```python
        model = SAC(
            "MultiInputPolicy", env, learning_starts=1000,
            replay_buffer_class=HerReplayBuffer,
            replay_buffer_kwargs={"path": "runs/reach/buffer", "resume": True},
        )
        ```
    """

    _dicts = HerSamples
    _timeouts_end = False

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        env: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: strategies.GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        *,
        path: StrPath | None = None,
        resume: bool = False,
        seed: int | None = None,
        info_keys: Sequence[str] | None = None,
        info_bytes: int | None = None,
    ) -> None:
        """Declare a buffer; see Stable-Baselines3 for those not listed here.

        Args:
            buffer_size: Transitions in all; each environment has an equal part.
            observation_space: Dict with ``achieved_goal`` and ``desired_goal``.
            action_space: Box, Discrete, MultiDiscrete or MultiBinary.
            env: VecEnv whose ``compute_reward`` gives rewards.
            device: Where samples go.
            n_envs: Environments.
            optimize_memory_usage: Store each observation once.
            handle_timeout_termination: Tell time limits from terminations by
                ``infos``; else every end is a termination.
            n_sampled_goal: Relabelled transitions for each real one, at least 0.
            goal_selection_strategy: ``"future"``, ``"final"`` or ``"episode"``, or
                Stable-Baselines3's enumeration.
            copy_info_dict: Store infos, and give them to ``compute_reward``. Values
                must be numbers, text, arrays, or lists and dicts of them.
            path: The folder; see `BufferLocation`.
            resume: Go on with the buffer that is there.
            seed: See `ReplayBuffer`.
            info_keys: Which keys of infos to store; by default all but
                ``"terminal_observation"``, which is the next observation.
            info_bytes: Bytes that each step has for its info, as JSON text; by
                default one and a half times what the first one takes.

        Raises:
            FormatError: The path holds a buffer, and resume is False.
            SchemaError: An argument is not legal, or the space has no goals.
        """
        given = goal_selection_strategy
        if isinstance(given, str):
            given = strategies.KEY_TO_GOAL_STRATEGY.get(given.lower(), given)
        if not isinstance(given, strategies.GoalSelectionStrategy):
            raise SchemaError(
                "goal_selection_strategy must be one of "
                f"{', '.join(sb3_goals.STRATEGIES)}, got {given!r}. 'future' is the "
                "usual one."
            )
        check_counts(0, n_sampled_goal=n_sampled_goal)
        flag("copy_info_dict", copy_info_dict)
        for name, value in (("info_keys", info_keys), ("info_bytes", info_bytes)):
            if value is not None and not copy_info_dict:
                raise SchemaError(
                    f"{name} must be left out unless copy_info_dict is True, got "
                    f"{value!r}. Pass copy_info_dict=True to store infos."
                )
        if info_bytes is not None:
            check_counts(info_bytes=info_bytes)
        if info_keys is not None and (
            isinstance(info_keys, str) or not all(isinstance(k, str) for k in info_keys)
        ):
            raise SchemaError(
                'info_keys must be a sequence of names such as ["is_success"], got '
                f"{shown(info_keys)}."
            )
        self.env, self.goal_selection_strategy = env, given
        self.n_sampled_goal, self.copy_info_dict = n_sampled_goal, copy_info_dict
        self.her_ratio = 1 - (1.0 / (n_sampled_goal + 1))
        self._info_keys = None if info_keys is None else tuple(info_keys)
        self._info_nbytes = int(info_bytes or 0)
        # Heads at which running episodes were cut; flags show it in the next row only.
        self._closed = np.full(n_envs, -1)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            path=path,
            resume=resume,
            seed=seed,
        )

    def _declare(self) -> None:
        if self.copy_info_dict and self._info_nbytes:
            self._extra = {"info": Field((self._info_nbytes,), "uint8")}
        super()._declare()
        self._hindsight = sb3_goals.Hindsight("achieved_goal")
        self._infos: list[dict[str, Any]] = []
        shapes = [self.obs_shape.get(k) for k in ("achieved_goal", "desired_goal")]
        if None in shapes or shapes[0] != shapes[1]:
            raise SchemaError(
                "HerReplayBuffer needs a Dict with achieved_goal and desired_goal of "
                f"one shape, got the observation space {self.observation_space}. Use "
                "DictReplayBuffer without goals."
            )

    def _ready(self) -> Ring:
        if self._ring is not None:
            return self._ring
        if self.copy_info_dict and not self._info_nbytes:
            schema = metadata.load(self.home.path).schema
            if "info" not in schema:
                raise SchemaError(
                    f"copy_info_dict=True needs infos, but {self.home.path} has none. "
                    "Leave copy_info_dict out, or pass another path."
                )
            self._info_nbytes = schema["info"].shape[0]
            self._declare()
        sampler = self.sampler
        ring = super()._ready()
        if not isinstance(ring.sampler, UniformSampler):
            self.sampler = sampler  # the ring's draws by priorities, for another buffer
        heads = ring.published
        if self._on_resume == "truncate":
            self._end_episodes(self._running())
            return ring
        # Keep cuts made before the pickle if no row was added since.
        self._closed = np.where(self._closed == heads, heads, -1)
        self._end_episodes(np.flatnonzero(self._closed >= 0))
        self._heads = heads
        if (ring.sizes > 0).all() and not self.optimize_memory_usage:
            every = np.arange(self.n_envs)
            then = {
                path: ring.get_field(f"next_observation{path}", every, heads - 1)
                for _, path, _ in self._steps.kinds
            }
            ended = (ring.flags(every, heads - 1) & END) != 0
            self._steps.lead_to(then, ended | (self._closed >= 0))
        return ring

    def _running(self) -> NDArray[np.int64]:
        """Environments whose newest episode has not ended."""
        ring = self._ready()
        heads = ring.published
        some = np.flatnonzero((ring.span.lengths > 0) & (self._closed != heads))
        last = ring.flags(some, heads[some] - 1)
        running: NDArray[np.int64] = some[(last & (END | FINAL)) == 0]
        return running

    def _end_episodes(self, env_ids: NDArray[np.int64]) -> None:
        if len(env_ids):
            super()._end_episodes(env_ids)
            closed = self._closed.copy()
            closed[env_ids] = self._ready().published[env_ids]
            self._closed = closed

    def truncate_last_trajectory(self) -> None:
        """End the running episodes, so that their transitions are drawn.

        A buffer that is not open yet does so when it is opened.
        """
        self._on_resume = "truncate"
        if self._ring is None or not len(running := self._running()):
            return
        warnings.warn(
            "The last trajectory in the replay buffer will be truncated.\n"
            "If you are in the same episode as when the replay buffer was saved,\n"
            "you should use `truncate_last_trajectory=False` to avoid that issue.",
            stacklevel=2,
        )
        self._end_episodes(running)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition of each environment; see `ReplayBuffer.add`.

        ``"TimeLimit.truncated"`` counts where a step is done.

        Raises:
            SchemaError: A shape or dtype does not fit the spaces, or an info cannot
                be stored.
        """
        if self.copy_info_dict:
            if self._ring is None and (self.home.path / metadata.FILE_NAME).exists():
                self._ready()
            rows = sb3_goals.encoded(infos, self._info_keys, self._info_nbytes)
            if not self._info_nbytes:
                self._info_nbytes = rows.shape[1]
                self._declare()
            self._steps.extra = {"info": rows}
        super().add(obs, next_obs, action, reward, done, infos)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw a batch; real transitions first, then those with other goals.

        Args:
            batch_size: Transitions.
            env: A VecNormalize to normalize observations and rewards by.

        Returns:
            `HerSamples`, on `device`.

        Raises:
            EmptyError: No whole episode has ended yet.
            SchemaError: There is no environment to compute rewards by, or its
                ``compute_reward`` gives no reward for each goal.
        """
        if type(batch_size) is not int or batch_size < 1:
            check_counts(batch_size=batch_size)
        if (ring := self.ring) is None:
            raise EmptyError(
                f"cannot draw {batch_size} transitions: no episode has ended yet. "
                "Choose learning_starts greater than the steps of an episode."
            )
        count = int(self.her_ratio * batch_size)
        batch, ends, goal_positions, goals = self._hindsight.draw(
            ring,
            self.sampler,
            self._closed,
            int(batch_size),
            count,
            self.goal_selection_strategy.name.lower(),
        )
        fields, real = batch.fields, batch_size - count
        if not self.handle_timeout_termination:
            fields["terminated"] = batch.positions == ends - 1
        infos = fields.pop("info", None)
        if count:
            for path in ("observation", "next_observation"):
                fields[f"{path}/desired_goal"][real:] = goals
            fields["reward"][real:] = self._rewards(
                fields["next_observation/achieved_goal"][real:],
                goals,
                self._no_infos(count) if infos is None else sb3_goals.decoded(infos[real:]),
            )
        samples = self._samples(batch, env)
        samples.goal_positions = goal_positions
        return samples

    def _no_infos(self, count: int) -> list[dict[str, Any]]:
        """Empty infos, the same ones again unless `compute_reward` wrote into them."""
        if len(self._infos) != count or any(self._infos):
            self._infos = [{} for _ in range(count)]
        return self._infos

    def _rewards(
        self, achieved: NDArray[Any], desired: NDArray[Any], infos: list[dict[str, Any]]
    ) -> NDArray[np.float32]:
        if self.env is None:
            raise SchemaError(
                "env is None, but rewards for other goals need its compute_reward. "
                "Call set_env(env)."
            )
        (found,) = self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])
        rewards = np.asarray(found, np.float32)
        if rewards.size != len(desired):
            raise SchemaError(
                f"compute_reward must return [{len(desired)}] rewards, got shape "
                f"{list(rewards.shape)} for {len(desired)} goals. Compute all rewards "
                "at once, as arrays."
            )
        return rewards.reshape(-1)

    def reset(self) -> None:
        """Remove all transitions."""
        super().reset()
        self._closed = np.full(self.n_envs, -1)

    def __getstate__(self) -> dict[str, Any]:
        """See `ReplayBuffer`; the environment is left out."""
        left_out = ("env", "_hindsight", "_infos")
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the data that the path leads to; `set_env` gives an environment."""
        super().__setstate__(state)
        self.env, self._on_resume = None, "continue"


class _Dones:
    """Stands for the array of ends; only its last row is ever set."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, index: object, done: object) -> None:
        if np.any(np.asarray(done)) and self._buffer.ring is not None:
            self._buffer._end_episodes(np.arange(self._buffer.n_envs))


def _sampler(prioritized: bool | Mapping[str, Any], seed: int | None) -> Sampler:
    if seed is None:
        # Not torch's seed: it is the same for a second model of the same seed and for a
        # second buffer of one model. Stable-Baselines3 seeds numpy for each model.
        seed = int(np.random.randint(1 << 62))  # noqa: NPY002  # seeded for each model
    if prioritized is False:
        return UniformSampler(seed)
    if prioritized is not True and not isinstance(prioritized, Mapping):
        raise SchemaError(
            "prioritized must be True, False or arguments of PrioritizedSampler, such "
            f'as {{"alpha": 0.6, "beta": 0.4}}, got {prioritized!r}.'
        )
    options = {} if prioritized is True else dict(prioritized)
    return PrioritizedSampler(**{"seed": seed, **options})
