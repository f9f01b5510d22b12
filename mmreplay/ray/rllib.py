"""RLlib's replay buffers over a ring, and rings as RLlib's offline data.

For the new API stack. Give a buffer by its dotted name::

    config.training(
        replay_buffer_config={
            "type": "mmreplay.ray.rllib.PrioritizedRingEpisodeReplayBuffer",
            "path": "runs/rllib",
            "capacity": 1_000_000,
            "num_envs": 8,
            "alpha": 0.6,
            "beta": 0.4,
        }
    )

DQN takes it as it is; SAC takes it from the `SACConfig` of this module. RLlib's
checkpoints do not hold replay buffers: the path does, and an algorithm that is restored
finds every step there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

try:
    # RLlib imports it, and says only that it is missing.
    import_module("gymnasium")
except ImportError as error:
    raise ModuleNotFoundError(
        "mmreplay.ray.rllib needs RLlib, which is not installed: gymnasium is missing. "
        "Run: pip install 'mmreplay[rllib]'",
        name="gymnasium",
    ) from error
import numpy as np
import ray.data
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.sac import SACConfig as RLlibSACConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics import (
    NUM_ENV_STEPS_ADDED,
    NUM_ENV_STEPS_ADDED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_STORED,
    NUM_EPISODES_ADDED,
    NUM_EPISODES_ADDED_LIFETIME,
)
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer
from ray.rllib.utils.spaces.space_utils import batch as batch_items

from mmreplay.arguments import integer
from mmreplay.batch import Batch
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.errors import EmptyError, SchemaError, refuse_masked
from mmreplay.format.metadata import load
from mmreplay.nesting import flatten, unflatten
from mmreplay.ray.data import Columns, RingDatasource, read_as
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field, Schema
from mmreplay.schema.convert import array_of
from mmreplay.transforms.nstep import NStep

Reads = tuple[int, float]
"""Steps that are folded, and their discount."""


class RingEpisodes:
    """What both buffers share: episodes into a ring, and one-step episodes out of it.

    A running episode has an environment of the ring for itself, the one with fewest
    rows that is free, so that all fill alike. A final observation takes a row, too. The
    last step of a chunk can be drawn once the next chunk is there, or the episode has
    ended. Infos and extra model outputs are not stored.

    Attributes:
        path: The ring's folder.
        capacity: Steps that the ring keeps, of all environments.
        ring: The ring, once there is one.
    """

    capacity: int
    metrics: Any
    sampled_timesteps: int
    _beta: float = 0.0

    def _open(self, path: StrPath, num_envs: int, seed: int | None) -> None:
        """Open the ring at the path, where there is one."""
        _refuse_several_learners()
        self.path = files.absolute(path)
        self._num_envs = integer("num_envs", num_envs, 1, "Give one for each env.")
        integer("capacity", self.capacity, num_envs, "Each environment needs a row.")
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._env_of: dict[str, int] = {}
        self._warned = False
        self._readers: dict[Reads, ReplayBuffer] = {}
        self._sampler: Sampler | None = None
        self._drawn_from: ReplayBuffer | None = None
        self._last: tuple[ReplayBuffer, Batch] | None = None
        self._since = dict.fromkeys(("steps", "episodes", "sampled"), 0)
        self.ring: ReplayBuffer | None = None
        if (self.path / "metadata.json").exists():
            # Before it is opened for writing, which ends the episodes that run.
            if (made := load(self.path).autoreset) != "disabled":
                raise SchemaError(
                    f"path must be a ring that RLlib's episodes made, but {self.path} "
                    f"has autoreset={made!r}. Give another path: a ring is made there."
                )
            self.ring = ReplayBuffer.open(self.path, "r+", on_resume="truncate")
            self._num_envs = self.ring.num_envs

    def _make_sampler(self) -> Sampler:
        return UniformSampler(self._seed)

    def close(self) -> None:
        """Close the ring, so that another algorithm may open it; RLlib does not."""
        for reader in self._readers.values():
            reader.close()
        self._readers, self._last, self._sampler = {}, None, None
        if self.ring is not None and not self.ring.closed:
            # What runs is truncated by the next opening.
            self.ring.skip_autoreset_check()
            self.ring.close()

    # Episodes into the ring.

    def add(self, episodes: Any, weight: float | None = None) -> None:
        """Add chunks of episodes; those of one length together.

        Args:
            episodes: `SingleAgentEpisode`s, running or done.
            weight: None: steps enter at the highest priority of the buffer.

        Raises:
            SchemaError: They do not fit the ring.
            FullError: No space is left.
        """
        if weight is not None:
            raise SchemaError(
                f"weight must be None, got {weight!r}. New steps enter at the highest "
                "priority of the buffer."
            )
        groups: dict[int, dict[int, Any]] = {}
        waiting: set[int] = set()
        for episode in force_list(episodes):
            if not isinstance(episode, SingleAgentEpisode):
                raise SchemaError(
                    "a ring holds episodes of one agent, got "
                    f"{type(episode).__name__}. Use RLlib's own buffer for several "
                    "agents."
                )
            length = len(episode)
            if not length:
                continue
            ring = self._create(episode) if self.ring is None else self.ring
            env_id, broken = self._env_of.pop(episode.id_, None), False
            if env_id is None:
                env_id, broken = self._choose_env(ring, waiting)
            if broken or env_id in waiting:
                # Rows of one environment are added in order.
                self._extend(ring, groups)
                groups, waiting = {}, set()
            if broken:
                ring.end_episodes([env_id])
            groups.setdefault(length, {})[env_id] = episode
            waiting.add(env_id)
            if not episode.is_done:
                # Put last: the first may be an episode whose runner died.
                self._env_of[episode.id_] = env_id
            self._since["steps"] += length
            self._since["episodes"] += episode.is_done
        if self.ring is not None:
            self._extend(self.ring, groups)

    def _choose_env(self, ring: ReplayBuffer, waiting: set[int]) -> tuple[int, bool]:
        """An environment for a new episode, and whether another one loses it."""
        used = set(self._env_of.values())
        free = [env_id for env_id in range(ring.num_envs) if env_id not in used]
        if free:
            heads = ring.published
            return min(free, key=lambda env_id: (env_id in waiting, heads[env_id])), False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"num_envs is {ring.num_envs}, but more episodes run at a time, so the "
                "ring truncates one for each new one. Pass num_envs=, the number of "
                "environments of all runners, and a new path.",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._env_of.pop(next(iter(self._env_of))), True

    def _create(self, episode: Any) -> ReplayBuffer:
        """Create the ring for episodes like this one."""
        columns = _columns(episode, 1)
        fields = {
            path: Field(values.shape[1:], str(values.dtype)) for path, values in columns.items()
        }
        fields["reward"] = Field((), "float32")
        for role in ("terminated", "truncated"):
            fields[role] = Field((), "bool")
        self.ring = ReplayBuffer.create(
            self.path,
            Schema.from_flat(fields),
            -(-self.capacity // self._num_envs),
            num_envs=self._num_envs,
            autoreset="disabled",
        )
        # RLlib says when an episode ends, and no reset is a step.
        self.ring.skip_autoreset_check()
        return self.ring

    def _extend(self, ring: ReplayBuffer, groups: dict[int, dict[int, Any]]) -> None:
        """Add chunks by length: one call for a length, not one for each episode."""
        for length, group in groups.items():
            every = [_columns(episode, length) for episode in group.values()]
            stacked = {
                path: np.stack([columns[path] for columns in every], axis=1) for path in every[0]
            }
            observations = {
                path: values
                for path, values in stacked.items()
                if path.split("/")[0] == "observation"
            }
            ends = np.zeros((2, length, len(every)), np.bool_)
            ends[0, -1] = [episode.is_terminated for episode in group.values()]
            ends[1, -1] = [episode.is_truncated for episode in group.values()]
            rows = stacked | {path: obs[:-1] for path, obs in observations.items()}
            rows |= {"terminated": ends[0], "truncated": ends[1]}
            final = None
            if ends[:, -1].any():
                following = {path: obs[1:] for path, obs in observations.items()}
                if ring.num_envs == 1:
                    following = {path: obs[:, 0] for path, obs in following.items()}
                final = unflatten(following)["observation"]
            if ring.num_envs == 1:
                ring.extend(
                    {path: values[:, 0] for path, values in rows.items()}, final_observation=final
                )
            else:
                ring.extend(rows, final_observation=final, env_ids=list(group))

    # Episodes of one step out of it.

    def sample(
        self,
        num_items: int | None = None,
        *,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float | None = None,
        sample_episodes: bool | None = False,
        batch_length_T: int | None = None,
        include_infos: bool = False,
        include_extra_model_outputs: bool = False,
        **others: Any,
    ) -> list[SingleAgentEpisode]:
        """Draw steps, as episodes of one step each.

        Args:
            num_items: Steps to draw.
            n_step: Steps folded into one: that many, or fewer at an episode's end; or
                a range ``(low, high)`` from which each step's is drawn.
            gamma: Discount a step.
            beta: Exponent of the importance weights; None for the buffer's own.
            sample_episodes: True, as RLlib's off-policy algorithms of the new API stack
                pass.
            batch_length_T: None or 0: no sequences.
            include_infos: False.
            include_extra_model_outputs: False.
            others: Options of RLlib that have no effect here.

        Raises:
            SchemaError: Sequences, infos or model outputs are asked for.
            EmptyError: No step can be drawn yet.
        """
        count = num_items if num_items is not None else others.get("batch_size_B")
        for name, value, wanted in (
            ("sample_episodes", bool(sample_episodes), True),
            ("batch_length_T", batch_length_T or 0, 0),
            ("include_infos", bool(include_infos), False),
            ("include_extra_model_outputs", bool(include_extra_model_outputs), False),
        ):
            if value != wanted:
                raise SchemaError(
                    f"{name} must be {wanted}, got {value!r}: the ring gives single "
                    "steps without infos and model outputs. Use RLlib's own buffer for "
                    "sequences and stateful modules."
                )
        if self.ring is None or count is None:
            raise EmptyError("the ring has no step yet. Sample some steps before learning starts.")
        low, stop = n_step if isinstance(n_step, tuple) else (n_step or 1, None)
        if beta is not None:
            self._beta = beta
        most = low if stop is None else stop - 1
        reader = self._reader((most, gamma))
        if self._sampler is None or self._drawn_from is not reader:
            # Other steps can be drawn where others are folded, and stored priorities
            # belong to one sampler at a time.
            if self._sampler is not None:
                self._sampler.close()
            self._sampler, self._drawn_from = self._make_sampler(), reader
        batch = reader.sample_by(self._sampler, count, contiguous=True)
        self._last = reader, batch
        self.sampled_timesteps += count
        self._since["sampled"] += count
        fields = dict(batch.fields)
        steps = _steps_folded(batch, most, gamma)
        if stop is not None:
            asked = self._rng.integers(low, stop, len(batch))
            for fewer in range(low, most):
                rows = np.flatnonzero(asked == fewer)
                other = self._reader((fewer, gamma)).take(
                    batch.env_ids[rows], batch.positions[rows]
                )
                steps[rows] = _steps_folded(other, fewer, gamma)
                for path, values in other.fields.items():
                    if path in fields:
                        fields[path][rows] = values
        return _one_step_episodes(fields, batch.weights, steps)

    def _reader(self, reads: Reads) -> ReplayBuffer:
        """The ring with these steps folded."""
        reader = self._readers.get(reads)
        if reader is None:
            transforms = [NStep(*reads)] if reads[0] > 1 else []
            reader = ReplayBuffer.open(self.path, transforms=transforms)
            self._readers[reads] = reader
        return reader

    # What RLlib asks a buffer for.

    def __len__(self) -> int:
        """Steps in the ring."""
        return self.get_num_timesteps()

    def get_num_timesteps(self, module_id: Any = None) -> int:
        """Steps in the ring."""
        return 0 if self.ring is None else len(self.ring)

    def get_num_episodes(self, module_id: Any = None) -> int:
        """Episodes with a step in the ring, running ones included."""
        if self.ring is None:
            return 0
        index = self.ring.episodes
        return sum(len(index.episodes(env).begin) for env in range(self.ring.num_envs))

    def get_added_timesteps(self, module_id: Any = None) -> int:
        """Rows ever added to the ring, final observations included."""
        return 0 if self.ring is None else int(self.ring.published.sum())

    def get_metrics(self) -> Any:
        """Steps stored; and steps and episodes added and drawn since the last call."""
        since, self._since = self._since, dict.fromkeys(self._since, 0)
        log = self.metrics.log_value
        log(NUM_ENV_STEPS_STORED, self.get_num_timesteps(), reduce="mean", window=1)
        for name, lifetime, count in (
            (NUM_ENV_STEPS_ADDED, NUM_ENV_STEPS_ADDED_LIFETIME, since["steps"]),
            (NUM_EPISODES_ADDED, NUM_EPISODES_ADDED_LIFETIME, since["episodes"]),
            (NUM_ENV_STEPS_SAMPLED, NUM_ENV_STEPS_SAMPLED_LIFETIME, since["sampled"]),
        ):
            log(name, count, reduce="sum")
            log(lifetime, count, reduce="lifetime_sum")
        return self.metrics.reduce()

    def get_state(self) -> dict[str, Any]:
        """The path, as the ring holds all else."""
        return {"path": str(self.path), "sampled_timesteps": self.sampled_timesteps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take what `get_state` gave; steps come from the path alone."""
        self.sampled_timesteps = int(state["sampled_timesteps"])


class RingEpisodeReplayBuffer(RingEpisodes, EpisodeReplayBuffer):
    """RLlib's `EpisodeReplayBuffer` over a ring: steps are drawn uniformly.

    Its name holds ``EpisodeReplayBuffer``, as RLlib looks for that text.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        path: StrPath,
        num_envs: int = 8,
        seed: int | None = None,
        metrics_num_episodes_for_smoothing: int = 100,
        **others: Any,
    ) -> None:
        """Open the ring at the path, or create it with the first episode.

        Args:
            capacity: Steps to keep, divided evenly between the environments.
            path: The ring's folder. One that is there keeps its capacity and num_envs.
            num_envs: At least the environments of all runners.
            seed: Of the draws; None takes one from the system.
            metrics_num_episodes_for_smoothing: RLlib passes it.
            others: Options of RLlib's buffers that have no effect here.

        Raises:
            SchemaError: A number is not legal, or the algorithm has several learners.
            LockedError: The ring is being written, such as by an algorithm of this
                process whose buffer was not closed.
        """
        EpisodeReplayBuffer.__init__(self, capacity)
        self._open(path, num_envs, seed)


class PrioritizedRingEpisodeReplayBuffer(RingEpisodes, PrioritizedEpisodeReplayBuffer):
    """RLlib's `PrioritizedEpisodeReplayBuffer` over a ring.

    Priorities lie beside the rows, and survive the process as they do.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        path: StrPath,
        num_envs: int = 8,
        alpha: float = 1.0,
        beta: float = 0.4,
        seed: int | None = None,
        metrics_num_episodes_for_smoothing: int = 100,
        **others: Any,
    ) -> None:
        """Open the ring at the path, or create it with the first episode.

        Args:
            capacity: As in `RingEpisodeReplayBuffer`.
            path: See there.
            num_envs: See there.
            alpha: How much priorities count.
            beta: Exponent of the importance weights, where RLlib passes none.
            seed: See there.
            metrics_num_episodes_for_smoothing: See there.
            others: See there.

        Raises:
            SchemaError: As in `RingEpisodeReplayBuffer`.
            LockedError: See there.
        """
        # Not that of the class itself, which makes two trees in Python.
        EpisodeReplayBuffer.__init__(self, capacity)
        self._alpha, self._beta = alpha, beta
        self._open(path, num_envs, seed)

    def _make_sampler(self) -> Sampler:
        # RLlib adds nothing to priorities, and divides weights by the greatest that
        # any step of the buffer has.
        return PrioritizedSampler(
            self._alpha, lambda _: self._beta, eps=1e-12, normalize="buffer", seed=self._seed
        )

    def update_priorities(self, priorities: Any, module_id: Any = None) -> None:
        """Set the priorities of the steps drawn last.

        Args:
            priorities: Numbers ``[B]``, such as TD errors, whose size counts.
            module_id: Of the one module.

        Raises:
            SchemaError: There is not one for each step drawn.
        """
        if self._last is None or self._sampler is None:
            raise SchemaError("update_priorities needs a sample before. Call sample.")
        reader, batch = self._last
        refuse_masked(priorities, "priorities")
        values = np.abs(np.asarray(priorities, np.float64))
        reader.view.update_priorities(self._sampler, batch, values)


class SACConfig(RLlibSACConfig):
    """RLlib's `SACConfig`, which accepts the buffers of this module as well."""

    def validate(self) -> None:
        """Check the configuration; see RLlib.

        Raises:
            SchemaError: There are several learners.
        """
        config = self.replay_buffer_config
        given = config.get("type")
        if not _is_ours(given):
            super().validate()
            return
        _check_learners(self)
        # RLlib knows the names of four classes.
        config["type"] = "PrioritizedEpisodeReplayBuffer"
        try:
            super().validate()
        finally:
            config["type"] = given


def _is_ours(name: object) -> bool:
    """Whether a type of buffer is a dotted name of one of these."""
    if not isinstance(name, str) or "." not in name:
        return False
    module, _, class_name = name.rpartition(".")
    found = getattr(import_module(module), class_name, None)
    return isinstance(found, type) and issubclass(found, RingEpisodes)


def _refuse_several_learners() -> None:
    """Refuse to be made by an algorithm of several learners.

    The algorithm's configuration is read from the frame that calls, as RLlib 2.60 has
    no other way to it. `Algorithm._create_local_replay_buffer_if_necessary` makes a
    buffer of the ``replay_buffer_config`` alone; no later call says how many learners
    there are, as `sample` gets the size of the whole batch and `update_priorities` the
    joined errors; and `DQNConfig.validate` asks the type of a buffer for its name only.
    Where the configuration is ours, in `SACConfig`, `validate` refuses.
    """
    frame = sys._getframe(1)
    while frame is not None:
        config = getattr(frame.f_locals.get("self"), "config", None)
        if isinstance(config, AlgorithmConfig):
            _check_learners(config)
            return
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop


def _check_learners(config: Any) -> None:
    """Refuse several learners.

    Raises:
        SchemaError: There are several.
    """
    if config.num_learners > 1:
        raise SchemaError(
            f"num_learners must be at most 1 with a ring, got {config.num_learners}: "
            "the TD errors of several learners come in another order than the batch. "
            "Use config.learners(num_learners=1)."
        )


def _columns(episode: Any, length: int) -> Columns:
    """Observations, one more than steps, actions and rewards of a chunk, by path."""
    nested = {
        "observation": episode.get_observations(slice(0, length + 1)),
        "action": episode.get_actions(slice(0, length)),
        "reward": episode.get_rewards(slice(0, length)),
    }
    nested = {
        name: batch_items(values) if isinstance(values, list) else values
        for name, values in nested.items()
    }
    flat = flatten(nested)
    return {path: array_of(values, f"field {path!r}") for path, values in flat.items()}


def _steps_folded(batch: Batch, n_step: int, gamma: float) -> NDArray[np.int64]:
    """How many steps are folded into each; any number where nothing follows.

    The learner multiplies the next value by ``gamma ** n_step * (1 - terminated)``.
    """
    steps = np.full(len(batch), n_step)
    if n_step > 1 and 0 < gamma < 1:
        discount = batch["discount"].astype(np.float64)
        some = discount > 0
        steps[some] = np.rint(np.log(discount[some]) / np.log(gamma)).astype(np.int64)
    return steps


def _one_step_episodes(
    fields: Columns, weights: NDArray[np.float32], steps: NDArray[np.int64]
) -> list[SingleAgentEpisode]:
    """Episodes of one step that are views of a batch.

    Made slot by slot: the constructor of RLlib takes some fifteen times as long.
    """
    observations = _items(fields, "observation", "next_observation")
    actions = _items(fields, "action")
    episodes = []
    for number, (observation, action, reward, ended, cut, weight, n_step) in enumerate(
        zip(
            observations,
            actions,
            fields["reward"][:, None],
            fields["terminated"].tolist(),
            fields["truncated"].tolist(),
            weights[:, None],
            steps[:, None],
            strict=True,
        )
    ):
        episode = SingleAgentEpisode.__new__(SingleAgentEpisode)
        episode.id_ = str(number)
        episode.agent_id = episode.module_id = episode.multi_agent_episode_id = None
        episode._observation_space = episode._action_space = None
        episode._start_time = episode._last_step_time = None
        episode._last_added_observation = episode._last_added_infos = None
        episode._custom_data = {}
        episode.observations, episode.actions = _values(observation), _values(action)
        episode.rewards = _values(reward)
        episode.infos = _values([{}, {}], finalized=False)
        episode.extra_model_outputs = {"weights": _values(weight), "n_step": _values(n_step)}
        episode.is_terminated, episode.is_truncated = ended, cut
        episode.t_started, episode.t = 0, 1
        episodes.append(episode)
    return episodes


def _items(fields: Columns, name: str, following: str | None = None) -> Sequence[Any]:
    """Values of each step, nested as RLlib had them: one each, or it and the next."""
    paths = [path for path in fields if path.split("/")[0] == name]
    joined = {}
    for path in paths:
        values = fields[path]
        joined[path] = values[:, None]
        if following is not None:
            after = fields[following + path[len(name) :]]
            joined[path] = np.stack([values, after], axis=1)
    if name in joined:
        return list(joined[name])
    count = len(next(iter(joined.values())))
    return [
        unflatten({path: values[row] for path, values in joined.items()})[name]
        for row in range(count)
    ]


def _values(data: Any, finalized: bool = True) -> InfiniteLookbackBuffer:
    """Values of an episode, without a call of the constructor."""
    values = InfiniteLookbackBuffer.__new__(InfiniteLookbackBuffer)
    values.data, values.lookback, values.finalized = data, 0, finalized
    values._space = values._space_struct = None
    return values


# Rings as offline data.

NAMES = {
    "observation": "obs",
    "action": "actions",
    "reward": "rewards",
    "next_observation": "new_obs",
    "terminated": "terminateds",
    "truncated": "truncateds",
}
"""RLlib's columns, by the role whose field they are."""


class RLlibDatasource(RingDatasource):
    """Rings as rows of RLlib's offline data, one for each step that can be drawn."""

    def supports_projection_pushdown(self) -> bool:
        """RLlib reads all columns."""
        return False

    @staticmethod
    def _finish(buffer: ReplayBuffer, block: Columns) -> Columns:
        schema, rows = buffer.schema, {}
        for role, name in NAMES.items():
            path = schema.role(role)
            if path is None and role == "next_observation":
                path = role
            if path is None or path not in block:
                raise SchemaError(
                    f"the ring must have one field for the role {role!r}, got "
                    f"{list(schema.paths)}. RLlib's offline data has no nested ones."
                )
            rows[name] = block[path]
        env_ids, positions = block["env_id"], block["position"]
        with buffer.view.lock:
            begins = buffer.view.locate(env_ids, positions)[0]
        # Rings may have other numbers of environments than this one.
        number = block["buffer_id"].tolist()
        episodes = zip(number, env_ids.tolist(), begins.tolist(), strict=True)
        rows["eps_id"] = np.array([f"{ring}/{env_id}/{begin}" for ring, env_id, begin in episodes])
        return rows


class RingOfflineData(OfflineData):
    """Rings as RLlib's offline data, for BC and CQL.

    Example::

        config.offline_data(
            input_=["runs/expert"],
            offline_data_class=RingOfflineData,
            input_read_method_kwargs={"episodes": slice(0, 100)},
        )

    ``input_read_method_kwargs`` are further arguments of `mmreplay.ray.read`:
    transforms, episodes and live.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """Read the rings at ``config.input_``.

        Raises:
            SchemaError: A ring has no such fields as RLlib needs, or nested ones.
        """
        # The base class reads by a name of ray.data's; what it read is replaced.
        stand_in = config.copy(copy_frozen=False)
        stand_in.input_, stand_in.input_read_method = [{"row": 0}], "from_items"
        stand_in.input_read_method_kwargs = {}
        super().__init__(stand_in)
        self.config, self.path = config, config.input_
        options = dict(config.input_read_method_kwargs)
        self.data: ray.data.Dataset = read_as(RLlibDatasource, config.input_, **options)
        if self.materialize_data:
            self.data = self.data.materialize()
