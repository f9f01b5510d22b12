"""Other libraries' prioritized buffers behind one face, filled with known rows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tools.bench import peers, transitions
from tools.bench.transitions import BLOCK
from tools.bench.turns import chosen

ALPHA, BETA = 0.6, 0.4
Errors = NDArray[np.float32]


class Peer(Protocol):
    """One library's prioritized buffer of vector transitions, filled."""

    def turn(self, errors: Errors) -> Any:
        """Draw a batch with its weights and give its steps new priorities.

        Args:
            errors: float32 ``[B]``; the batch has as many steps.
        """

    def drawn(self, batch: int) -> dict[str, Any]:
        """Draw arrays by our paths, to be checked."""


class Cpprb:
    """cpprb's PrioritizedReplayBuffer, in RAM; numpy arrays."""

    def __init__(self, blocks: int, batch: int) -> None:
        module = import_module("cpprb")
        fields = {
            "observation": {"shape": 17, "dtype": np.float32},
            "action": {"shape": 6, "dtype": np.float32},
            "reward": {"dtype": np.float32},
            "next_observation": {"shape": 17, "dtype": np.float32},
            "terminated": {"dtype": np.bool_},
            "truncated": {"dtype": np.bool_},
        }
        self._buffer = module.PrioritizedReplayBuffer(blocks * BLOCK, fields, alpha=ALPHA)
        for number in range(blocks):
            self._buffer.add(**transitions.block(number * BLOCK))

    def turn(self, errors: Errors) -> Any:
        """See `Peer`."""
        batch = self._buffer.sample(len(errors), beta=BETA)
        self._buffer.update_priorities(batch["indexes"], errors)
        return batch

    def drawn(self, batch: int) -> dict[str, Any]:
        """See `Peer`."""
        found = self._buffer.sample(batch, beta=BETA)
        return {path: found[path] for path in peers.PATHS}


class TorchRL:
    """TorchRL's ReplayBuffer with its PrioritizedSampler, in RAM; tensors."""

    def __init__(self, blocks: int, batch: int) -> None:
        self._torch = import_module("torch")
        data = import_module("torchrl.data")
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        samplers = import_module("torchrl.data.replay_buffers.samplers")
        capacity = blocks * BLOCK
        self._buffer = data.ReplayBuffer(
            storage=data.LazyTensorStorage(capacity),
            sampler=samplers.PrioritizedSampler(capacity, ALPHA, BETA),
        )
        stored = import_module("tensordict").TensorDict
        for number in range(blocks):
            rows = transitions.block(number * BLOCK)
            tensors = {path: self._torch.from_numpy(a) for path, a in rows.items()}
            self._buffer.extend(stored(tensors, batch_size=[BLOCK]))

    def turn(self, errors: Errors) -> Any:
        """See `Peer`."""
        batch, info = self._buffer.sample(len(errors), return_info=True)
        self._buffer.update_priority(info["index"], self._torch.from_numpy(errors))
        return batch

    def drawn(self, batch: int) -> dict[str, Any]:
        """See `Peer`."""
        found = self._buffer.sample(batch)
        return {path: found[path] for path in peers.PATHS}


class Tianshou:
    """tianshou's PrioritizedVectorReplayBuffer, in RAM; numpy arrays.

    A block is one step of its environments: a row a call would take a minute.
    """

    def __init__(self, blocks: int, batch: int) -> None:
        data = import_module("tianshou.data")
        self._buffer = data.PrioritizedVectorReplayBuffer(
            blocks * BLOCK, BLOCK, alpha=ALPHA, beta=BETA
        )
        for number in range(blocks):
            rows = transitions.block(number * BLOCK)
            self._buffer.add(
                data.Batch(
                    obs=rows["observation"],
                    act=rows["action"],
                    rew=rows["reward"],
                    terminated=rows["terminated"],
                    truncated=rows["truncated"],
                    obs_next=rows["next_observation"],
                )
            )

    def turn(self, errors: Errors) -> Any:
        """See `Peer`."""
        batch, indices = self._buffer.sample(len(errors))
        self._buffer.update_weight(indices, errors)
        return batch

    def drawn(self, batch: int) -> dict[str, Any]:
        """See `Peer`."""
        found, _ = self._buffer.sample(batch)
        return {
            "observation": found.obs,
            "action": found.act,
            "reward": found.rew,
            "next_observation": found.obs_next,
            "terminated": found.terminated,
        }


class Flashbax:
    """flashbax's prioritised item buffer, in RAM, compiled; arrays of JAX."""

    def __init__(self, blocks: int, batch: int) -> None:
        self._jax = jax = import_module("jax")
        make = import_module("flashbax").make_prioritised_item_buffer
        buffer: Any = make(
            max_length=blocks * BLOCK,
            min_length=1,
            sample_batch_size=batch,
            add_sequences=True,
            add_batches=False,
            priority_exponent=ALPHA,
        )
        self._sample = jax.jit(buffer.sample)
        # Donated, or a change of some priorities would copy the buffer.
        self._set = jax.jit(buffer.set_priorities, donate_argnums=0)
        add = jax.jit(buffer.add, donate_argnums=0)
        first = {path: a[0] for path, a in transitions.block(0, 1).items()}
        self._state: Any = buffer.init(first)
        for number in range(blocks):
            self._state = add(self._state, transitions.block(number * BLOCK))
        self._key = jax.random.PRNGKey(0)

    def turn(self, errors: Errors) -> Any:
        """See `Peer`."""
        self._key, key = self._jax.random.split(self._key)
        batch = self._sample(self._state, key)
        self._state = self._set(self._state, batch.indices, errors)
        self._jax.block_until_ready((batch, self._state))
        return batch

    def drawn(self, batch: int) -> dict[str, Any]:
        """See `Peer`."""
        self._key, key = self._jax.random.split(self._key)
        found = self._sample(self._state, key).experience
        return {path: np.asarray(found[path]) for path in peers.PATHS}


MODULES: dict[str, tuple[str, Callable[[int, int], Peer]]] = {
    "cpprb": ("cpprb", Cpprb),
    "flashbax": ("flashbax", Flashbax),
    "tianshou": ("tianshou", Tianshou),
    "torchrl": ("torchrl", TorchRL),
}


def installed(wanted: str | None = None) -> list[str]:
    """Names of the peers that can be imported, of those wanted.

    Args:
        wanted: Comma-separated names; None for all, ``""`` for none.

    Raises:
        SystemExit: A peer asked for by name is unknown or missing.
    """
    return chosen({n: module for n, (module, _) in MODULES.items()}, wanted)


def build(name: str, blocks: int, batch: int) -> Peer:
    """Make one peer's buffer and fill it.

    Args:
        name: As in `MODULES`.
        blocks: Blocks of rows.
        batch: Steps in a batch, for those that are compiled for it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = MODULES[name][1](blocks, batch)
        transitions.check(peer.drawn(batch), name)
    return peer
