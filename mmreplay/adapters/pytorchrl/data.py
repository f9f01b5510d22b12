"""pytorchrl's keys, and rows of a storage as the mappings that it passes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import BREAK
from mmreplay.errors import SchemaError
from mmreplay.schema import Field, Schema

OBS, RHS, DONE, ACT, REW = ("Observation", "RecurrentHiddenStates", "Done", "Action", "Reward")
IREW, ACTPROBS = "IntrinsicReward", "ActionProbs"
OBS2, RHS2, DONE2 = "NextObservation", "NextRecurrentHiddenStates", "NextDone"
N_STEP = "n_step"
ENDED = "terminated"
"""Field of mmreplay: NextDone as the end of an episode, for n-step returns."""
PRIORITY = "sequence_priority"
"""Field of mmreplay: the error of a sequence, at its first row; 0 until it is set."""
PRIORITIES = "priority"
"""Key of the priorities in slices."""
KNOWN_ZERO = -1.0
"""Stored instead of 0 for a sequence whose error is 0."""
KEY, UNSTORED = "pytorchrl", "unstored"
"""Keys of the folder's metadata: the grid of sequences, and the shapes of hidden states
that are not stored."""
NARROW = frozenset(map(np.dtype, ("bool", "uint8", "int8")))
"""Dtypes that are stored; others become float32, as all do in pytorchrl."""
GAMMAS = "gammas"
"""Key of the gammas in the folder's statistics, with their first positions."""
Columns = dict[str, NDArray[Any]]
COPY_ROWS = 1024


@dataclass(frozen=True)
class Maker:
    """A factory of storages of a class, which can be sent to another process."""

    kind: Callable[..., Any]
    size: int
    options: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self, device: Any, actor: Any, algorithm: Any, envs: Any) -> Any:
        """Make a storage."""
        return self.kind(self.size, device, actor, algorithm, envs, *self.options, **self.named)


class Gammas:
    """The discount that each row's rewards are summed with.

    A change holds for the rows whose sum is not complete yet and for those to come;
    older rows keep theirs.

    Attributes:
        begins: Positions from which on a gamma holds, ascending.
        values: The gammas, one for each.
    """

    def __init__(self, gamma: float) -> None:
        """Use one gamma for all rows."""
        self.begins, self.values = [0], [gamma]

    def restore(self, begins: list[int], values: list[float]) -> None:
        """Use gammas that were those of rows before."""
        self.begins, self.values = begins, values

    def begin(self, position: int, gamma: float) -> None:
        """Use a gamma for the rows from a position on."""
        while self.begins and self.begins[-1] >= position:
            del self.begins[-1], self.values[-1]
        if not self.values or self.values[-1] != gamma:
            self.begins.append(position)
            self.values.append(gamma)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Gammas of rows, float64, in the shape of their positions."""
        which = np.searchsorted(self.begins, positions, side="right") - 1
        found: NDArray[np.float64] = np.array(self.values)[np.maximum(which, 0)]
        return found

    def copied(self, first: int, stop: int, shift: int) -> None:
        """Give copies of the rows ``[first, stop)`` the gammas of those rows.

        The copies lie `shift` rows later, behind all other rows. The rows behind the
        copies have the gamma that the newest rows had.
        """
        newest = self.values[-1]
        found = [(first, float(self.at(np.array(first))))]
        pairs = zip(self.begins, self.values, strict=True)
        found += [pair for pair in pairs if first < pair[0] < stop]
        for position, gamma in found:
            self.begin(position + shift, gamma)
        self.begin(stop + shift, newest)

    def forget(self, first: int) -> None:
        """Drop what concerns only rows before a position."""
        while len(self.begins) > 1 and self.begins[1] <= first:
            del self.begins[0], self.values[0]


def nstep_sums(
    rewards: NDArray[Any],
    ends: NDArray[np.bool_],
    there: NDArray[np.bool_],
    gammas: NDArray[np.float64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Sum the discounted rewards of rows over their next steps, up to the first end.

    Args:
        rewards: ``[*rows, n_step, *shape]``, of a row's own step and those after it.
        ends: ``[*rows, n_step]``, steps that end an episode.
        there: ``[*rows, n_step]``, steps that are stored.
        gammas: ``[*rows]``, the discount of each row.

    Returns:
        Which steps are summed, ``[*rows, n_step]``, and the sums, float64
        ``[*rows, features]``.
    """
    # A step counts as long as none before it was an end.
    summed = there & (np.cumsum(ends, -1) - ends == 0)
    wide = rewards.reshape(*ends.shape, -1).astype(np.float64)
    factors = np.repeat(gammas[..., None], ends.shape[-1], -1)
    factors[..., 0] = 1
    # Products round alike on every processor, and powers do not.
    discounts = np.multiply.accumulate(factors, -1)
    # Not by a weight of 0: 0 times infinity is no 0.
    wide = np.where(summed[..., None], wide, 0)
    return summed, (wide * discounts[..., None]).sum(-2)


class Hooks:
    """Calls of a learner before and after an update."""

    device: Any

    def before_gradients(self) -> None:
        """Do nothing."""

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Return the info."""
        return info

    def _tensors(self, fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """A batch of fields by key, float32 on the device."""
        found: dict[str, Any] = {}
        for path, array in fields.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32))
            put(found, path, tensor.to(self.device))
        return found


class Storage(Protocol):
    """The owner of a slice."""

    def sliced_rows(self, first: int, stop: int) -> dict[str, Any]:
        """Rows of positions ``[first, stop)`` by key, as a slice has them."""


class Slice(Mapping[str, Any]):
    """Rows of a storage by key, read on access; it pickles as a plain dict."""

    def __init__(self, storage: Storage, first: int, stop: int) -> None:
        """Name rows of positions ``[first, stop)``."""
        self.storage = storage
        self.range = (first, stop)
        self._rows: dict[str, Any] | None = None
        self._turn = threading.Lock()

    def loaded(self) -> dict[str, Any]:
        """The rows as a plain dict of arrays."""
        # A collector's thread reads them before it overwrites them, and waits here
        # where the learner's does so already.
        with self._turn:
            if self._rows is None:
                self._rows = self.storage.sliced_rows(*self.range)
            return self._rows

    def __getitem__(self, key: str) -> Any:
        return self.loaded()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.loaded())

    def __len__(self) -> int:
        return len(self.loaded())

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (self.loaded(),)


def uninterrupted_ranges(
    ring: ReplayBuffer, first: int, stop: int
) -> Iterator[tuple[int, int, bool]]:
    """Split rows ``[first, stop)`` where a row does not follow the one before.

    Yields:
        First row and stop of a range of at most `COPY_ROWS` rows, and whether its first
        row does not follow the one before, as rows of another writer or slice.
    """
    envs = np.arange(ring.num_envs)
    for begin in range(first, stop, COPY_ROWS):
        end = min(stop, begin + COPY_ROWS)
        flags = ring.flags(envs, np.arange(begin, end)[:, None])
        breaks = ((flags & BREAK) != 0).any(axis=1)
        edges = [begin, *(begin + 1 + np.flatnonzero(breaks[1:])).tolist(), end]
        for left, right in pairwise(edges):
            yield left, right, bool(breaks[left - begin])


def put(nested: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested dicts, by path."""
    top, _, rest = path.partition("/")
    if not rest:
        nested[top] = value
        return
    if not isinstance(nested.get(top), dict):
        nested[top] = {}
    nested[top][rest] = value


def zeros_like(value: Any, lead: int) -> Any:
    """One row of zeros like a value's, as float32, lead being its axes before a row."""
    if isinstance(value, Mapping):
        return {name: zeros_like(part, lead) for name, part in value.items()}
    return np.zeros((1, *np.shape(value)[lead:]), np.float32)


def first_of(value: Any) -> Any:
    """Copy the first row of an array, or of nested ones."""
    if isinstance(value, Mapping):
        return {name: first_of(part) for name, part in value.items()}
    return value[0].copy()


def shapes_of(values: Mapping[str, Any], above: str = "") -> dict[str, list[int]]:
    """Shapes of nested arrays by path, as JSON."""
    found: dict[str, list[int]] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= shapes_of(value, f"{above}{name}/")
        else:
            found[f"{above}{name}"] = list(value.shape)
    return found


def described(columns: Columns) -> tuple[Schema, int]:
    """Schema, and number of environments, of rows ``[T, num_proc, *shape]`` by path.

    Raises:
        SchemaError: The environments of two values differ in number.
    """
    counts = {path: array.shape[1:2] for path, array in columns.items()}
    if len(set(counts.values())) != 1 or () in counts.values():
        raise SchemaError(
            "transition: the first axis of all keys must have one length, the number "
            f"of environments, got {counts}."
        )
    fields = {
        path: Field(array.shape[2:], array.dtype, mutable=path == PRIORITY)
        for path, array in columns.items()
    }
    roles = {"observation": OBS, "action": ACT, "reward": REW, "next_observation": OBS2}
    tops = {path.split("/")[0] for path in fields}
    known_roles = roles if tops >= set(roles.values()) else {}
    (num_envs,) = next(iter(counts.values()))
    return Schema.from_flat(fields, known_roles), num_envs
