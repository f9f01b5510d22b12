"""alf's RingBuffer and DataBuffer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.alf import nests
from mmreplay.adapters.alf.core import Core, RingSpec
from mmreplay.adapters.alf.episodes import Names, ReturnRule
from mmreplay.adapters.alf.errors import RefusedError, refusing
from mmreplay.adapters.alf.nests import array, fields_of, flatten, leaf_nest, pack
from mmreplay.adapters.alf.sampling import DrawOptions
from mmreplay.adapters.alf.sharing import Remote, Server, serve
from mmreplay.adapters.common.location import BufferLocation, StrPath, open_here
from mmreplay.adapters.common.values import LOOKS, Look, array_as_is, seed_of_draws

Ids = NDArray[np.int64]


_rings: weakref.WeakValueDictionary[Path, RingBuffer] = weakref.WeakValueDictionary()
"""Buffers of this process by their folders."""


class ReplayOptions(NamedTuple):
    """Options that a `ReplayBuffer` has in addition to a `RingBuffer`."""

    draw_options: DrawOptions | None = None
    keep: bool = False
    rule: ReturnRule | None = None
    episodic: bool = True


class RingBuffer:
    """A queue of environment steps in a ring on disk.

    Positions count the steps of each environment and never restart. With
    `allow_multiprocess`, child processes can use it too, after a fork or when it is
    sent to them.

    Attributes:
        name: Name of the buffer.
        device: Device of the results.

    Example:
        >>> buffer = RingBuffer(torch.zeros(2), num_environments=1, max_length=10)
        >>> buffer.enqueue(torch.ones(1, 2))
        True
        >>> buffer.dequeue(n=1)
        tensor([[[1., 1.]]])
    """

    def __init__(
        self,
        data_spec: Any,
        num_environments: int,
        max_length: int = 1024,
        device: Any = "cpu",
        allow_multiprocess: bool = False,
        name: str = "RingBuffer",
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make the ring, or open the existing one.

        Args:
            data_spec: Nest of what has a ``shape`` and a ``dtype``, of one step.
            num_environments: Environments.
            max_length: Steps kept of each.
            device: Of the tensors that are given back.
            allow_multiprocess: Let children call, and calls wait.
            name: Kept.
            path: Folder of the buffer; see `BufferLocation`.
            resume: Continue the existing buffer.

        Raises:
            FormatError: A buffer exists, and resume is False.
            UnfitError: The spec is none, or the existing buffer has another spec.
        """
        self._begin(
            data_spec,
            num_environments,
            max_length,
            device,
            allow_multiprocess,
            name,
            BufferLocation(f"alf-{name}", path, resume),
            ReplayOptions(),
        )

    def _begin(
        self,
        data_spec: Any,
        num_environments: int,
        max_length: int,
        device: Any,
        allow_multiprocess: bool,
        name: str,
        location: BufferLocation,
        options: ReplayOptions,
    ) -> None:
        self.name = self._name = name  # alf's data transformers read the second
        self.device = device
        self._spec, self._shared = data_spec, allow_multiprocess
        self._num_envs, self._max_length = int(num_environments), int(max_length)
        with refusing():
            fields = fields_of(data_spec)
        self._nest = leaf_nest(data_spec)
        names = Names.among(fields, self._nest) if options.episodic else Names()
        _refuse_shared(location.path, name)
        spec = RingSpec(
            fields,
            names,
            self._num_envs,
            self._max_length,
            options.draw_options,
            options.keep,
            options.rule,
        )
        self._own: Core | None = Core(spec, location)
        _rings[location.path] = self
        self._remote: Remote | None = None
        self._server: Server | None = None
        self._pid, self._outline = os.getpid(), nests.outlined(data_spec)
        # Leaves that mark episodes are read here.
        episodic: dict[str, Look] = {}
        episodic |= {path: array_as_is for path in (names.step_type,) if path}
        # A tensor of uint16 would be taken for the bits of one of bfloat16.
        episodic |= {p: nests.never for p, f in fields.items() if f.dtype == "bfloat16"}
        self._looks = [dict.fromkeys(fields, look) | episodic for look in LOOKS]
        if allow_multiprocess:
            self._server = serve(self, self._own)
            self._remote = Remote(self._server.address)

    @property
    def _core(self) -> Core:
        """The ring, or a proxy of the owner's ring with the same methods."""
        if self._own is not None and (os.getpid() == self._pid or not self._remote):
            return self._own
        return self._remote  # type: ignore[return-value]  # every method is called there

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the owner's address instead of the ring, for child processes.

        Raises:
            RefusedError: It was not made for more processes than one.
        """
        if self._remote is None:
            raise RefusedError(
                f"{self.name} was sent to another process without "
                "allow_multiprocess=True. Pass that, or give the other process the "
                "path."
            )
        reached = {"_own": None, "_server": None, "_remote": self._remote.address}
        return self.__dict__ | reached

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_remote": Remote(state["_remote"])})

    def __repr__(self) -> str:
        """Say where the data is."""
        return f"<{type(self).__name__} {self.name!r}, {self._core.where()}>"

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        # ascontiguousarray gives an axis to what has none.
        whole = np.ascontiguousarray(values).reshape(np.shape(values))
        return torch.from_numpy(whole).to(self.device)

    def _packed(self, columns: Mapping[str, NDArray[Any]]) -> Any:
        return pack(self._nest, columns, self.device)

    def circular(self, pos: Any) -> Any:
        """Return the index of a position in alf's storage: ``pos % max_length``.

        Args:
            pos: int, or ints of any shape.
        """
        return pos % self._max_length

    def check_convert_env_ids(self, env_ids: Any) -> torch.Tensor:
        """Return environments as int64 ``[B]``; all of them for None.

        Raises:
            RefusedError: They have not exactly one axis.
        """
        if env_ids is None:
            return self._tensor(np.arange(self._num_envs))
        ids = array(env_ids).astype(np.int64)
        if ids.ndim != 1:
            raise RefusedError(
                f"env_ids must have one axis, got shape {list(ids.shape)}. Flatten them."
            )
        return self._tensor(ids)

    def enqueue(self, batch: Any, env_ids: Any = None, blocking: bool = False) -> bool:
        """Add one step of each environment, all or nothing.

        Args:
            batch: Nest of ``[B, *shape]``.
            env_ids: int ``[B]``, different ones; all by default.
            blocking: Wait until none of them is full, rather than overwrite.

        Returns:
            False if waiting was stopped, and nothing was added.

        Raises:
            RefusedError: B or the environments are not right, or it may not wait.
            UnfitError: The nest does not fit the spec.
            UnknownError: There is no such environment.
        """
        self._may_wait(blocking)
        own = None if self._own is not self._core else self._own
        if env_ids is None and not blocking and own is not None:
            for looks in self._looks:
                found: nests.LeafValues = {}
                plain = nests.plain(self._outline, batch, found, looks)
                if plain and own.enqueue_plain(found):
                    return True
        ids = None if env_ids is None else array(env_ids)
        return self._core.enqueue(flatten(self._spec, batch), ids, blocking)

    def dequeue(self, env_ids: Any = None, n: int = 1, blocking: bool = False) -> Any:
        """Remove and return the earliest steps.

        Args:
            env_ids: int ``[B]``; all by default.
            n: Steps of each.
            blocking: Wait until there are as many.

        Returns:
            Nest of ``[B, n, *shape]``; None if waiting was stopped.

        Raises:
            RefusedError: There are fewer, and it does not wait.
        """
        self._may_wait(blocking)
        ids = None if env_ids is None else array(env_ids)
        found = self._core.dequeue(ids, int(n), blocking)
        return None if found is None else self._packed(found)

    def _may_wait(self, blocking: bool) -> None:
        if blocking and not self._shared:
            raise RefusedError(
                "blocking=True needs a buffer that other threads or processes may "
                "call. Make it with allow_multiprocess=True."
            )

    def remove_up_to(self, n: int, env_ids: Any = None) -> None:
        """Remove the n earliest steps of each environment, or all of fewer."""
        self._core.remove_up_to(int(n), None if env_ids is None else array(env_ids))

    def clear(self, env_ids: Any = None) -> None:
        """Remove all steps of some environments; positions continue."""
        self._core.clear(None if env_ids is None else array(env_ids))

    def stop(self) -> None:
        """Let waiting calls return without effect, and new ones not wait."""
        self._core.stop()

    def revive(self) -> None:
        """Permit waiting again after `stop`."""
        self._core.revive()

    def has_space(self, env_ids: Any = None) -> bool:
        """Return whether none of some environments is full."""
        return bool((self._lengths(env_ids) < self._max_length).all())

    def has_data(self, env_ids: Any = None, n: int = 1) -> bool:
        """Return whether each of some environments has n steps."""
        return bool((self._lengths(env_ids) >= n).all())

    def _lengths(self, env_ids: Any = None) -> Ids:
        first, stop = self._core.bounds()
        return (stop - first)[slice(None) if env_ids is None else array(env_ids)]

    @property
    def num_environments(self) -> int:
        """Environments."""
        return self._num_envs

    @property
    def current_size(self) -> torch.Tensor:
        """int64 ``[E]``, steps of each environment."""
        return self._tensor(self._lengths())

    @property
    def current_pos(self) -> torch.Tensor:
        """int64 ``[E]``, position of the next step of each."""
        return self.get_current_position()

    @property
    def total_size(self) -> torch.Tensor:
        """int64, steps of all environments."""
        return self._tensor(self._lengths().sum(keepdims=True))[0]

    def get_earliest_position(self, env_ids: Any = None) -> torch.Tensor:
        """int64 ``[B]``, the first position alive of some environments."""
        first = self._core.bounds()[0]
        return self._tensor(first[slice(None) if env_ids is None else array(env_ids)])

    def get_current_position(self) -> torch.Tensor:
        """int64 ``[E]``, one past the newest position of each environment."""
        return self._tensor(self._core.bounds()[1])

    def state_dict(self) -> dict[str, Any]:
        """Commit, and return a state for another run.

        Numbers, text and lists; the steps stay in the folder.

        Raises:
            FormatError: The folder goes with this process.
        """
        return self._core.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from a state, in a buffer opened with its path and resume=True.

        Or, in a new buffer, from a state that alf wrote, which holds the steps: they
        are added, positions counting from 0, and their priorities set. The newest step
        of each environment becomes a LAST one.

        Args:
            state_dict: What `state_dict` returned.
            strict: For torch's signature.

        Raises:
            FormatError: It is another buffer's, or no state.
        """
        self._core.load_state_dict(dict(state_dict))

    def close(self) -> None:
        """Commit and close, and let waiting calls return. A child only disconnects."""
        if self._own is not None and os.getpid() == self._pid:
            self._own.close()
            if self._server is not None:
                self._server.close()
        elif self._remote is not None:
            self._remote.close()


class Answer(int):
    """A truth value that can also be called, because alf has a method of its name.

    Example:
        >>> full = Answer(True)
        >>> bool(full), bool(full())
        (True, True)
    """

    def __call__(self) -> np.bool:
        """The truth value."""
        return np.bool(self)

    def __repr__(self) -> str:
        """``True`` or ``False``."""
        return repr(bool(self))


def _refuse_shared(path: Path, name: str) -> None:
    """Refuse a folder that a buffer of another name has open, so that rows would mix.

    Raises:
        RefusedError: One has.
    """
    other = _rings.get(path)
    if other is not None and open_here(path):
        raise RefusedError(
            f"path: {path} is open as the buffer {other.name!r}, and cannot hold "
            f"{name!r} as well. Give each buffer a path of its own."
        )


class DataBuffer(RingBuffer):
    """The newest rows, without environments.

    It is a `RingBuffer` of one environment, and has all of its calls.

    Example:
        >>> buffer = DataBuffer(torch.zeros(2), capacity=3)
        >>> buffer.add_batch(torch.arange(8.0).reshape(4, 2))
        >>> buffer.get_all().tolist()
        [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """

    def __init__(
        self,
        data_spec: Any,
        capacity: int,
        device: Any = "cpu",
        name: str = "DataBuffer",
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make it; see `RingBuffer`."""
        self._begin(
            data_spec,
            1,
            capacity,
            device,
            False,
            name,
            BufferLocation(f"alf-{name}", path, resume),
            ReplayOptions(episodic=False),
        )
        self._random = np.random.default_rng(seed_of_draws())

    @property
    def current_size(self) -> torch.Tensor:
        """int64 without axes, rows."""
        return self.total_size

    @property
    def current_pos(self) -> torch.Tensor:
        """int64 without axes, position of the next row; it only grows."""
        return self.get_current_position()[0]

    @property
    def is_full(self) -> Answer:
        """Whether the next row overwrites another; also as a call, ``is_full()``."""
        return Answer(not self.has_space())

    def add_batch(self, batch: Any) -> None:
        """Add rows, a nest of ``[N, *shape]``; if N > capacity, the last ones.

        Raises:
            RefusedError: Leaves differ in N.
            UnfitError: The nest does not fit the spec.
        """
        columns = flatten(self._spec, batch)
        counts = {path: np.shape(column)[:1] for path, column in columns.items()}
        if len(set(counts.values())) > 1 or () in counts.values():
            raise RefusedError(
                "batch: leaves must have the same number of rows, got "
                f"{ ({p: list(n) for p, n in counts.items()}) }. Give every leaf a "
                "first axis of N."
            )
        if (0,) not in counts.values():
            self._core.extend(
                {path: column[-self._max_length :] for path, column in columns.items()}
            )

    def get_batch(self, batch_size: int) -> Any:
        """Draw rows uniformly with replacement; a nest of ``[B, *shape]``.

        Raises:
            RefusedError: There is none.
        """
        size = int(self.current_size)
        if size == 0:
            raise RefusedError(
                f"cannot draw {batch_size} rows from a buffer without rows. Add some first."
            )
        return self.get_batch_by_indices(self._random.integers(size, size=batch_size))

    def get_batch_by_indices(self, indices: Any) -> Any:
        """Rows by age, 0 being the earliest; a nest of ``[B, *shape]``.

        Raises:
            RefusedError: There is no such row.
        """
        first = self._core.bounds()[0][0]
        return self._packed(self._core.take(array(indices) + first))

    def get_all(self) -> Any:
        """Every row, earliest first; a nest of ``[N, *shape]``."""
        found, _, _ = self._core.gather_all(0)
        return self._packed({path: column[0] for path, column in found.items()})
