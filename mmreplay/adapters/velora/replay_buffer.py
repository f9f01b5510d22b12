"""velora's replay memory on disk: `BufferBase`, `ReplayBuffer` and `BatchExperience`.

Public names, shapes, dtypes and files are those of velora 0.2.0.
docs/migrating/velora.md lists the differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.common.location import BufferLocation, PickledByPath, StrPath, fixed
from mmreplay.adapters.common.values import array_of, plain_rows, rows_of, seed_of_draws
from mmreplay.adapters.velora import save as saved
from mmreplay.adapters.velora.save import METADATA, BufferConfig
from mmreplay.arguments import integer
from mmreplay.buffer.replay_buffer import ReplayBuffer as Ring
from mmreplay.convert.safetensors import TensorFile, write_tensors
from mmreplay.disk import files
from mmreplay.errors import SchemaError
from mmreplay.recording.environments import make_vector
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field, Schema

ROLES = {
    "observation": "states",
    "action": "actions",
    "reward": "rewards",
    "next_observation": "next_states",
}
Steps = tuple[torch.Tensor, ...]
"""States, actions, rewards, next states, dones and hidden states, ``[N, ...]`` each."""


@dataclass
class BatchExperience:
    """A batch of experience, float32 ``[B, features]`` each.

    Attributes:
        states: Observations.
        actions: Actions.
        rewards: ``[B, 1]``.
        next_states: Next observations.
        dones: ``[B, 1]``, 1 where the episode ended.
        hiddens: Hidden states of the actor.

    Example:
        >>> one = torch.zeros(1, 1)
        >>> BatchExperience(one, one, one, one, one, one).rewards
        tensor([[0.]])
    """

    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_states: torch.Tensor
    dones: torch.Tensor
    hiddens: torch.Tensor


def _stored(name: str) -> Any:
    def read(self: BufferBase) -> torch.Tensor:
        return self._tensors((name,))[name]

    return property(read, doc=f"A copy of all {name}, float32 ``[capacity, features]``.")


class BufferBase(PickledByPath):
    """Experience in a ring on disk; `ReplayBuffer` adds draws.

    Example:
        >>> buffer = BufferBase(100, state_dim=2, action_dim=1, hidden_dim=3)
        >>> len(buffer), buffer.state_dict()["states"].shape
        (0, torch.Size([100, 2]))
    """

    capacity: int = fixed("capacity", "Close it, and resize its folder by `mmreplay resize`.")
    state_dim: int = fixed("state_dim", "Make another buffer.")
    action_dim: int = fixed("action_dim", "Make another buffer.")
    hidden_dim: int = fixed("hidden_dim", "Make another buffer.")
    states = _stored("states")
    actions = _stored("actions")
    rewards = _stored("rewards")
    next_states = _stored("next_states")
    dones = _stored("dones")
    hiddens = _stored("hiddens")

    def __init__(
        self,
        capacity: int,
        state_dim: int,
        action_dim: int,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a buffer, or continue with an existing one.

        Args:
            capacity: Maximum number of steps.
            state_dim: Features of a state.
            action_dim: Features of an action.
            hidden_dim: Features of a hidden state.
            device: Device of the batches.
            path: The buffer's folder; see `BufferLocation`.
            resume: Continue with the existing buffer.

        Raises:
            FormatError: The folder holds a buffer, and resume is False.
            SchemaError: A number is not positive, or the existing buffer differs.
        """
        dims = {"state_dim": state_dim, "action_dim": action_dim, "hidden_dim": hidden_dim}
        for name, dim in dims.items():
            integer(name, dim, 1, "Give the number of features.")
        self._make(
            BufferLocation("velora", path, resume),
            device,
            (capacity, state_dim, action_dim, hidden_dim),
            {},
        )

    def _make(
        self,
        location: BufferLocation,
        device: torch.device | str | None,
        dims: tuple[int, int, int, int],
        user_metadata: dict[str, int],
    ) -> None:
        self.capacity, self.state_dim, self.action_dim, self.hidden_dim = dims
        self.device = None if device is None else torch.device(device)
        self.home = location
        self._shapes = {name: (dim,) for name, dim in self._dims.items()}
        schema = Schema({name: Field((dim,), "float32") for name, dim in self._dims.items()}, ROLES)
        self._ring: Ring = location.ring(
            schema,
            self.capacity,
            sampler=UniformSampler(seed_of_draws()),
            user_metadata={METADATA: user_metadata},
        )
        # velora's row of position 0: a ring that was loaded begins where it did.
        self._oldest = int(self._ring.metadata.user.get(METADATA, {}).get("oldest", 0))
        if location.resumed:
            saved.check_loaded(location, self._ring)

    def _open_again(self, sampler: Sampler | None) -> None:
        ring = self.home.reopen(sampler)
        assert ring is not None
        # It may have been resized since.
        self._ring = ring
        vars(self)["capacity"] = ring.capacity

    @property
    def _dims(self) -> dict[str, int]:
        return {
            "states": self.state_dim,
            "actions": self.action_dim,
            "rewards": 1,
            "next_states": self.state_dim,
            "dones": 1,
            "hiddens": self.hidden_dim,
        }

    @property
    def _columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: ("float32", (dim,)) for name, dim in self._dims.items()}

    @property
    def position(self) -> int:
        """The row that is written next, in ``[0, capacity)``."""
        return (int(self._ring.heads[0]) + self._oldest) % self.capacity

    @property
    def size(self) -> int:
        """Steps stored."""
        return len(self._ring)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} of {self.size:,} of {self.capacity:,} steps in {self.home!r}>"

    def add(
        self,
        state: torch.Tensor,
        action: torch.Tensor,
        reward: float,
        next_state: torch.Tensor,
        done: bool,
        hidden: torch.Tensor,
    ) -> None:
        """Add one step, all or nothing.

        Args:
            state: ``[state_dim]`` or ``[1, state_dim]``, as are the others theirs.
            action: What was done.
            reward: A number.
            next_state: What followed.
            done: Whether the episode ended.
            hidden: Hidden state of the actor.

        Raises:
            SchemaError: A shape does not fit.
        """
        given = (state, action, reward, next_state, done, hidden)
        row = plain_rows(self._shapes, given)
        if row is not None and self._ring.try_add(row) is not None:
            return
        rows = zip(self._shapes.items(), given, strict=True)
        self._ring.add({name: rows_of(name, v, shape) for (name, shape), v in rows})

    def add_multi(
        self,
        states: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        next_states: torch.Tensor,
        dones: torch.Tensor,
        hiddens: torch.Tensor,
    ) -> None:
        """Add steps; of more than the capacity the last ones stay.

        Args:
            states: ``[N, state_dim]``, as are the others theirs; ``[N]`` where there
                is one feature.
            actions: What was done.
            rewards: Numbers.
            next_states: What followed.
            dones: Whether episodes ended.
            hiddens: Hidden states of the actor.

        Raises:
            SchemaError: A shape does not fit; nothing was added.
        """
        count = len(states)
        given = (states, actions, rewards, next_states, dones, hiddens)
        rows = zip(self._dims.items(), given, strict=True)
        steps = {name: rows_of(name, v, (count, dim)) for (name, dim), v in rows}
        if count:
            self._ring.extend(steps)

    def sample(self, batch_size: int = 0) -> BatchExperience:
        """Raise an error, with an argument or without; subclasses draw.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("BufferBase does not sample; use ReplayBuffer")

    def metadata(self) -> dict[str, Any]:
        """Return the JSON values that `load` needs in addition to the tensors."""
        return {
            "capacity": self.capacity,
            "state_dim": self.state_dim,
            "action_dim": self.action_dim,
            "hidden_dim": self.hidden_dim,
            "position": self.position,
            "size": self.size,
            "device": str(self.device) if self.device else None,
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the six tensors, float32 ``[capacity, features]``, on the device.

        Rows never written are 0. All of it is held in memory; `save` is not.
        """
        return self._tensors(tuple(self._dims))

    def _tensors(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        found = self._slots(names, 0, self.capacity)
        return {
            name: torch.from_numpy(array).to(self.device or "cpu") for name, array in found.items()
        }

    def _slots(
        self, names: tuple[str, ...], first: int, stop: int
    ) -> dict[str, NDArray[np.generic]]:
        """Return rows in the order of velora's buffer; 0 where unwritten."""
        span = self._ring.span
        last = int(span.stop[0]) - 1
        ages = (last + self._oldest - np.arange(first, stop)) % self.capacity
        alive = last - ages >= span.first[0]
        found: dict[str, NDArray[np.generic]] = {}
        for name in names:
            found[name] = np.zeros((stop - first, self._dims[name]), np.float32)
            found[name][alive] = self._ring.get_field(name, 0, (last - ages)[alive])
        return found

    def save(self, dirpath: StrPath, prefix: str = "buffer_") -> None:
        """Write ``<prefix>state.safetensors`` and ``<prefix>metadata.json``.

        Each file appears complete or not at all. Memory use does not grow with the
        capacity.

        Args:
            dirpath: The folder; made if it is missing.
            prefix: What the names begin with; dots belong to it.
        """
        names, folder = tuple(self._dims), files.absolute(dirpath)
        metadata = json.dumps(self.metadata(), indent=2)

        def read(first: int, stop: int) -> dict[str, NDArray[np.generic]]:
            return self._slots(names, first, stop)

        target = folder / f"{prefix}state.safetensors"
        write_tensors(target, self._columns, self.capacity, read, {METADATA: metadata})
        files.replace_bytes(folder / f"{prefix}metadata.json", metadata.encode())

    @classmethod
    def load(
        cls, state_path: StrPath, metadata: Mapping[str, Any], *, path: StrPath | None = None
    ) -> Self:
        """Make a buffer of what `save`, here or of velora, wrote.

        Args:
            state_path: The tensors' file, with or without ``.safetensors``.
            metadata: What the JSON file holds. A device that is not there becomes
                the CPU.
            path: The new buffer's folder; see `BufferLocation`. Without one, folders
                that hold a buffer are skipped.

        Raises:
            FormatError: The metadata lacks a key, is not of these tensors, or the
                file is damaged; or the path holds a buffer.
        """
        source = files.absolute(state_path)
        if source.suffix != ".safetensors":
            source = source.with_name(f"{source.name}.safetensors")
        numbers = saved.checked(metadata, source)
        capacity, size = numbers["capacity"], numbers["size"]
        oldest = (numbers["position"] - size) % capacity
        dims = (capacity, numbers["state_dim"], numbers["action_dim"], numbers["hidden_dim"])
        buffer = cls.__new__(cls)
        with TensorFile(source) as file:
            saved.check_pair(file, numbers)
            # Numbers of its own, or a program started again would not find those of
            # buffers that it makes beside: each load takes a new one.
            home = BufferLocation("velora-load", path, fresh=True)
            marks = {"oldest": oldest, saved.SIZE: size}
            buffer._make(home, saved.device_of(metadata["device"]), dims, marks)
            saved.fill(buffer._ring, file, buffer._columns, oldest, size)
        return buffer

    def close(self) -> None:
        """Commit and close; a temporary folder goes."""
        self.home.close()


class ReplayBuffer(BufferBase):
    """velora's replay buffer on disk: uniform draws with replacement.

    Example:
        >>> buffer = ReplayBuffer(100, state_dim=2, action_dim=1, hidden_dim=3)
        >>> state, hidden = torch.zeros(2), torch.zeros(3)
        >>> buffer.add(state, torch.zeros(1), 0.5, state, False, hidden)
        >>> buffer.sample(1).rewards
        tensor([[0.5000]])
    """

    def config(self) -> Any:
        """Velora's own ``BufferConfig``, or one like it where velora is not there."""
        made = BufferConfig
        if find_spec("velora") is not None:
            made = import_module("velora.models.config").BufferConfig
        return made(
            type="ReplayBuffer",
            capacity=self.capacity,
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            hidden_dim=self.hidden_dim,
        )

    def sample(  # type: ignore[override]  # velora's base takes no argument
        self, batch_size: int
    ) -> BatchExperience:
        """Draw steps uniformly, with replacement.

        Args:
            batch_size: Steps, at most as many as are stored.

        Raises:
            SchemaError: There are fewer; it is a ValueError.
        """
        if len(self) < batch_size:
            raise SchemaError(
                "Buffer does not contain enough experiences. Available: "
                f"{len(self)}, Requested: {batch_size}; add steps first, or `warm` it"
            )
        if batch_size == 0:
            device = self.device or "cpu"
            shapes = self._dims.items()
            return BatchExperience(**{n: torch.zeros((0, dim), device=device) for n, dim in shapes})
        batch = self._ring.sample(batch_size, contiguous=True).torch(self.device)
        return BatchExperience(**batch.fields)

    def warm(self, agent: Any, n_samples: int, num_envs: int = 8) -> None:
        """Fill the buffer up to exactly so many steps, of copies of the environment.

        What an environment returns for a reset is no step, and is left out; the hidden
        state is reset with the episode.

        Args:
            agent: Has ``env``, ``device`` and ``predict`` as velora's agents do.
            n_samples: Steps that the buffer is to hold, at most the capacity.
            num_envs: Environments side by side, at least 2.

        Raises:
            SchemaError: A number is not legal.
        """
        if num_envs < 2:
            raise SchemaError(f"'{num_envs=}' cannot be smaller than 2.")
        if n_samples > self.capacity:
            raise SchemaError(
                f"n_samples must be at most the capacity of {self.capacity}, got "
                f"{n_samples}. Pass fewer, or make a larger buffer."
            )
        missing = n_samples - len(self)
        for steps in play_steps(agent, num_envs, missing):
            self.add_multi(*steps)


def play_steps(agent: Any, num_envs: int, count: int) -> Iterator[Steps]:
    """Play a number of steps in copies of an agent's environment, and yield them.

    Results of resets are no steps and are left out. The hidden state starts again with
    each episode.

    Args:
        agent: Has ``env``, ``device`` and ``predict`` as velora's agents.
        num_envs: Number of environments.
        count: Number of steps.
    """
    spec = agent.env.spec
    # The copies are not rendered.
    kwargs = {k: v for k, v in spec.kwargs.items() if k != "render_mode"}
    envs = make_vector(spec.id, num_envs, kwargs)
    try:
        hidden = None
        states = torch.as_tensor(envs.reset()[0], device=agent.device)
        ended = torch.zeros(num_envs, dtype=torch.bool)
        while count > 0:
            actions, hidden = agent.predict(states, hidden, train_mode=True)
            found, rewards, terminated, truncated, _ = envs.step(array_of(actions))
            following = torch.as_tensor(found, device=agent.device)
            dones = torch.as_tensor(terminated | truncated)
            # Gymnasium resets in the step after an end, which is no step of a policy.
            keep = torch.nonzero(~ended)[:count, 0]
            given = (states, actions, torch.as_tensor(rewards), following, dones)
            yield tuple(v[keep.to(v.device)] for v in (*given, hidden))
            count -= len(keep)
            begun = ended.to(hidden.device)[:, None]
            hidden = torch.where(begun, torch.zeros_like(hidden), hidden)
            states, ended = following, dones & ~ended
    finally:
        envs.close()
