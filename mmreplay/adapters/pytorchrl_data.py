"""pytorchrl's keys, and rows of a storage as the mappings that it passes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

OBS, RHS, DONE, ACT, REW = (
    "Observation", "RecurrentHiddenStates", "Done", "Action", "Reward",
)  # fmt: skip
IREW, ACTPROBS = "IntrinsicReward", "ActionProbs"
OBS2, RHS2, DONE2 = "NextObservation", "NextRecurrentHiddenStates", "NextDone"
ENDED = "terminated"
"""A field of ours: NextDone as the end of an episode, for n-step returns."""
NARROW = ("bool", "uint8", "int8")
"""What is stored as it is; all else is float32, as pytorchrl stores everything."""
Columns = dict[str, NDArray[Any]]
Factory = Callable[[Any, Any, Any, Any], Any]


class Storage(Protocol):
    """What a slice is of."""

    def read(self, first: int, stop: int) -> dict[str, Any]:
        """Rows of positions ``[first, stop)`` by key."""


class Slice(Mapping[str, Any]):
    """Rows of a storage by key, read when they are looked at; pickled, a plain dict."""

    def __init__(self, storage: Storage, first: int, stop: int) -> None:
        """Name rows of positions ``[first, stop)``."""
        self.storage = storage
        self.range = (first, stop)
        self._found: dict[str, Any] | None = None

    def loaded(self) -> dict[str, Any]:
        """The rows as a plain dict of arrays."""
        if self._found is None:
            self._found = self.storage.read(*self.range)
        return self._found

    def __getitem__(self, key: str) -> Any:
        return self.loaded()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.loaded())

    def __len__(self) -> int:
        return len(self.loaded())

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (self.loaded(),)


def put(nested: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested dicts, by path."""
    top, _, rest = path.partition("/")
    if not rest:
        nested[top] = value
        return
    if not isinstance(nested.get(top), dict):
        nested[top] = {}
    nested[top][rest] = value


def zeros_like(value: Any) -> Any:
    """One row of zeros like a value, as float32."""
    if isinstance(value, Mapping):
        return {name: zeros_like(part) for name, part in value.items()}
    return np.zeros((1, *np.shape(value)), np.float32)
