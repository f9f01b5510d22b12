"""alf's ReplayBuffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from mmreplay.adapters.alf.episodes import ReturnRule
from mmreplay.adapters.alf.errors import RefusedError
from mmreplay.adapters.alf.nests import array, children, leaves, pack, subnest
from mmreplay.adapters.alf.ring import ReplayOptions, RingBuffer
from mmreplay.adapters.alf.sampling import DrawOptions
from mmreplay.adapters.common.location import BufferLocation, StrPath
from mmreplay.adapters.common.values import seed_of_draws


class BatchInfo(NamedTuple):
    """The origin of the steps of a batch.

    Attributes:
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``, of the first step of each window.
        importance_weights: float32 ``[B]``, each priority over the mean of those above
            0; ``()`` without priorities.
        replay_buffer: The buffer.
        discounted_return: float32 ``[B]``, of the first steps; ``()`` without.

    Example:
        >>> BatchInfo(env_ids=torch.arange(2)).env_ids
        tensor([0, 1])
    """

    env_ids: Any = ()
    positions: Any = ()
    importance_weights: Any = ()
    replay_buffer: Any = ()
    discounted_return: Any = ()


class ReplayBuffer(RingBuffer):
    """Steps of environments in a ring on disk, drawn in windows of consecutive steps.

    Example:
        >>> spec = {"observation": torch.zeros(3)}
        >>> buffer = ReplayBuffer(spec, num_environments=2, max_length=100)
        >>> buffer.add_batch({"observation": torch.zeros(2, 3)})
        True
        >>> batch, info = buffer.get_batch(batch_size=4, batch_length=1)
        >>> batch["observation"].shape, info.env_ids.shape
        (torch.Size([4, 1, 3]), torch.Size([4]))
    """

    ONE_MINUS = np.float32(1) - np.finfo(np.float32).eps

    def __init__(
        self,
        data_spec: Any,
        num_environments: int,
        max_length: int = 1024,
        num_earliest_frames_ignored: int = 0,
        prioritized_sampling: bool = False,
        initial_priority: float = 1.0,
        recent_data_steps: int = 1,
        recent_data_ratio: float = 0.0,
        with_replacement: bool = False,
        device: Any = "cpu",
        allow_multiprocess: bool = False,
        keep_episodic_info: bool | None = None,
        record_episodic_return: bool = False,
        default_return: float = -1000.0,
        gamma: float = 0.99,
        reward_clip: tuple[float, float] | None = None,
        enable_checkpoint: bool = False,
        name: str = "ReplayBuffer",
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make the buffer, or open the existing one.

        Args:
            data_spec: Nest of what has a ``shape`` and a ``dtype``, of one step.
            num_environments: Environments.
            max_length: Steps kept of each.
            num_earliest_frames_ignored: Oldest steps that start no window.
            prioritized_sampling: Draw starts by priority.
            initial_priority: The least priority of a new step.
            recent_data_steps: Newest starts of each environment.
            recent_data_ratio: Share of a batch that is drawn from those.
            with_replacement: Draw independently, not spread over each environment.
            device: Of the tensors that are given back.
            allow_multiprocess: Let children call, and calls wait.
            keep_episodic_info: Tell episodes apart; None where frames are ignored.
            record_episodic_return: Store the return of each step.
            default_return: Of steps whose episode has not ended.
            gamma: Discount of returns.
            reward_clip: Bounds of each reward in returns.
            enable_checkpoint: Kept, for alf's checkpointer.
            name: Kept.
            path: Folder of the buffer; see `BufferLocation`.
            resume: Continue the existing buffer.

        Raises:
            FormatError: A buffer exists, and resume is False.
            RefusedError: Returns without episodes, or leaves that they need.
            UnfitError: The spec is none, or the buffer there is of another one.
        """
        if keep_episodic_info is None:
            keep_episodic_info = num_earliest_frames_ignored > 0
        if record_episodic_return and not keep_episodic_info:
            raise RefusedError(
                "record_episodic_return=True needs keep_episodic_info=True. Pass both."
            )
        draw_options = DrawOptions(
            num_earliest_frames_ignored,
            initial_priority if prioritized_sampling else None,
            recent_data_steps,
            recent_data_ratio,
            with_replacement,
            seed_of_draws(),
        )
        rule = ReturnRule(default_return, gamma, reward_clip)
        self._ignored, self._keep = num_earliest_frames_ignored, keep_episodic_info
        self._alf_checkpoint_enabled = enable_checkpoint
        home = BufferLocation(f"alf-{name}", path, resume)
        options = ReplayOptions(
            draw_options, keep_episodic_info, rule if record_episodic_return else None
        )
        self._begin(
            data_spec, num_environments, max_length, device, allow_multiprocess, name, home, options
        )

    def add_batch(self, batch: Any, env_ids: Any = None, blocking: bool = False) -> bool:
        """Add one step of each environment; see `RingBuffer.enqueue`.

        Raises:
            RefusedError: Also where it is to wait and keeps episodes apart.
        """
        if blocking and self._keep:
            raise RefusedError(
                "blocking must be False with keep_episodic_info, because the oldest "
                "steps are overwritten. Leave it out."
            )
        return self.enqueue(batch, env_ids, blocking)

    def dequeue(self, env_ids: Any = None, n: int = 1, blocking: bool = False) -> Any:
        """Raise an error: only a `RingBuffer` removes steps.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "dequeue needs a RingBuffer, whose steps are read once, got a "
            "ReplayBuffer. Use get_batch."
        )

    def get_batch(self, batch_size: int, batch_length: int) -> tuple[Any, BatchInfo]:
        """Draw windows of consecutive steps, which may cross episode ends.

        Args:
            batch_size: B.
            batch_length: T.

        Returns:
            Nest of ``[B, T, *shape]``, and where it is from.

        Raises:
            RefusedError: An environment, or with priorities every one, is too short.
        """
        found = self._core.sample(int(batch_size), int(batch_length))
        returns, weights = found.get("returns"), found["weights"]
        info = BatchInfo(
            self._tensor(found["env_ids"]),
            self._tensor(found["positions"]),
            () if weights is None else self._tensor(weights),
            self,
            () if returns is None else self._tensor(returns),
        )
        return self._packed(found["data"]), info

    def update_priority(self, env_ids: Any, positions: Any, priorities: Any) -> None:
        """Set priorities of steps; overwritten steps are skipped.

        Args:
            env_ids: int ``[B]``.
            positions: int ``[B]``.
            priorities: ``[B]``, at least 0.

        Raises:
            RefusedError: One is negative, NaN, or of a step that is still to come.
        """
        self._core.update_priority(array(env_ids), array(positions), array(priorities))

    @property
    def initial_priority(self) -> torch.Tensor:
        """Priority of a new step, float32."""
        return torch.tensor(self._core.initial_priority(), device=self.device)

    def gather_all(
        self, ignore_earliest_frames: bool = False, convert_to_default_device: bool = True
    ) -> tuple[Any, BatchInfo]:
        """Return copies of all steps, oldest first.

        Args:
            ignore_earliest_frames: Leave out those that start no window.
            convert_to_default_device: To the device, or else to the CPU.

        Returns:
            Nest of ``[E, T, *shape]``, and where it is from.

        Raises:
            RefusedError: Environments differ in their positions, or none is left.
        """
        ignored = self._ignored if ignore_earliest_frames else 0
        found, env_ids, positions = self._core.gather_all(ignored)
        device = self.device if convert_to_default_device else "cpu"
        info = BatchInfo(self._tensor(env_ids), self._tensor(positions), (), self)
        return pack(self._nest, found, device), info

    def get_field(self, field_name: Any, env_ids: Any, positions: Any) -> Any:
        """Read fields of steps.

        Args:
            field_name: Such as ``"time_step.reward"``, or ``"reward"`` where the nest
                has a property of that name; a nest of names; or None for whole steps.
            env_ids: int, any shape that broadcasts with positions.
            positions: int.

        Returns:
            Nest of ``[*broadcast, *shape]``.

        Raises:
            MissingError: There is no such part.
            RefusedError: A step is not in the buffer.
        """
        parts = children(field_name)
        if parts is not None:
            found = [self.get_field(name, env_ids, positions) for name in parts.values()]
            if isinstance(field_name, dict):
                return dict(zip(parts, found, strict=True))
            kind = type(field_name)
            return kind(*found) if hasattr(field_name, "_fields") else kind(found)
        part = subnest(self._nest, field_name)
        paths = tuple(leaf.path for _, leaf in leaves(part))
        columns = self._core.get_field(paths, array(env_ids), array(positions))
        return pack(part, columns, self.device)

    def get_episode_begin_position(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """int64, where the episodes of steps began; perhaps before the oldest step.

        Args:
            pos: int, positions of steps.
            env_ids: int, of their shape.

        Raises:
            RefusedError: Episodes are not kept apart, or a step is not in the buffer.
        """
        return self._tensor(self._core.begins(array(env_ids), array(pos)))

    def steps_to_episode_end(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """int64, steps after each in its episode, as far as it is stored.

        See `get_episode_begin_position`.
        """
        return self._tensor(self._core.left(array(env_ids), array(pos)))

    def get_disc_0_begin_position(self, pos: Any, env_ids: Any) -> torch.Tensor:
        """int64, the last step up to each that is FIRST or has a discount of 0.

        See `get_episode_begin_position`.
        """
        return self._tensor(self._core.zeros(array(env_ids), array(pos)))
