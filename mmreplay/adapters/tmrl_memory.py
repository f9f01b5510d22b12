"""What memories of tmrl have in common: rounds of batches, and samples checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.adapters.home import BufferLocation, StrPath
from mmreplay.adapters.tmrl_nests import check_crcs, collate_torch, crcs_of
from mmreplay.adapters.values import seed_of_draws
from mmreplay.datasets import pickles
from mmreplay.disk import files
from mmreplay.errors import FormatError, SchemaError

Preprocessor = Callable[..., tuple[Any, ...]]
STATS = (
    "stat_test_return", "stat_train_return", "stat_test_steps", "stat_train_steps",
)  # fmt: skip
PICKLE = "data.pkl"


class Memory(ABC):
    """A replay memory that gives rounds of batches; subclass it as in tmrl.

    Whoever subclasses it directly keeps samples where it likes: in ``data``, or in
    the ring on disk that ``home.ring(schema, capacity)`` makes.

    Attributes:
        home: Where a ring would be; see `Home`.
        data: For subclasses; a list.
        stat_test_return: Of the buffer appended last, as are the others.
    """

    def __init__(
        self,
        device: Any,
        nb_steps: int,
        sample_preprocessor: Preprocessor | None = None,
        memory_size: float = 1000000,
        batch_size: int = 256,
        dataset_path: StrPath = "",
        crc_debug: bool = False,
        *,
        path: StrPath | None = None,
        resume: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Make a memory.

        Args:
            device: Where batches go.
            nb_steps: Batches of a round.
            sample_preprocessor: Changes the six parts of each sample drawn.
            memory_size: Samples kept.
            batch_size: Samples of a batch.
            dataset_path: Folder with a ``data.pkl``, if there is one, which becomes
                `data`; "" is none, and not the working folder.
            crc_debug: Compare each sample drawn with what the worker had.
            path: The ring's folder; see `Home`.
            resume: Go on with the ring that is there, and leave ``data.pkl`` alone.
            allow_pickle: Take in ``data.pkl``: a pickle is a program.

        Raises:
            FormatError: A ring is there, and resume is False.
            SchemaError: There is a pickle that is not allowed.
        """
        self.device = device
        self.nb_steps = nb_steps
        self.sample_preprocessor = sample_preprocessor
        self.memory_size = memory_size
        self.batch_size = batch_size
        self.crc_debug = crc_debug
        self.path = Path(files.expanded(dataset_path))
        self.stat_test_return = 0.0
        self.stat_train_return = 0.0
        self.stat_test_steps = 0
        self.stat_train_steps = 0
        self.home = BufferLocation("tmrl", path, resume)
        self.data: list[Any] = []
        if not self.home.resumed:
            self.data = dataset_of(dataset_path, allow_pickle)
        self._seed = seed_of_draws()
        self._random = np.random.default_rng(self._seed)

    def __iter__(self) -> Iterator[Any]:
        """One round: `nb_steps` batches."""
        for _ in range(self.nb_steps):
            yield self.sample()

    @abstractmethod
    def append_buffer(self, buffer: Any) -> None:
        """Append the samples of a tmrl ``Buffer``, which is not empty."""

    @abstractmethod
    def __len__(self) -> int:
        """Transitions that can be drawn."""

    @abstractmethod
    def get_transition(self, item: int) -> tuple[Any, ...]:
        """Give the transition of a number below the length.

        Returns:
            Previous observation, new action, reward, new observation, terminated,
            truncated, info.
        """

    @abstractmethod
    def collate(self, batch: list[Any], device: Any) -> Any:
        """Put samples, of the first six parts, together on a device."""

    def append(self, buffer: Any) -> None:
        """Append a tmrl ``Buffer`` and take over its statistics; nothing if empty."""
        if len(buffer) > 0:
            for name in STATS:
                setattr(self, name, getattr(buffer, name))
            self.append_buffer(buffer)

    def sample(self) -> Any:
        """Draw a batch: six parts, each a tensor or nest of tensors ``[B, ...]``."""
        batch = [self[index] for index in self.sample_indices()]
        return self.collate(batch, self.device)

    def sample_indices(self) -> Iterable[int]:
        """Draw `batch_size` numbers below the length, with replacement.

        Raises:
            SchemaError: The memory is empty; it is a ValueError.
        """
        self._refuse_empty()
        drawn: list[int] = self._random.integers(
            len(self), size=self.batch_size
        ).tolist()
        return iter(drawn)

    def _refuse_empty(self) -> None:
        if len(self) < 1:
            raise SchemaError(
                f"cannot draw {self.batch_size} samples: got a memory without a "
                "transition, expected at least one; append a buffer first"
            )

    def __getitem__(self, item: int) -> tuple[Any, ...]:
        """One sample: checked, preprocessed, its flags and reward as float32."""
        return self._finished(self.get_transition(item))

    def _finished(self, transition: tuple[Any, ...]) -> tuple[Any, ...]:
        *parts, info = transition
        if self.crc_debug:
            previous, action, reward, following, *ends = parts
            rebuilt = (previous, action, following, reward, *ends)
            crcs = info["crcs"] if "crcs" in info else crcs_of(info["crc_sample"])
            check_crcs(crcs, rebuilt, info["crc_sample_ts"])
        if self.sample_preprocessor is not None:
            parts = list(self.sample_preprocessor(*parts))
        previous, action, reward, following, terminated, truncated = parts
        ends = [np.float32(terminated), np.float32(truncated)]
        return (previous, action, _narrowed(reward), following, *ends)


class TorchMemory(Memory, ABC):
    """A memory whose batches are nests of tensors."""

    def collate(self, batch: list[Any], device: Any) -> Any:
        """Stack samples; see `collate_torch`."""
        return collate_torch(batch, device)


def dataset_of(folder: StrPath, allowed: bool) -> list[Any]:
    """What a folder's pickle of a memory's `data` holds; nothing without one."""
    path = Path(files.expanded(folder)) / PICKLE
    if not str(folder) or not path.is_file():
        return []
    found = pickles.load(path, allowed)
    if not isinstance(found, list | tuple):
        raise FormatError(
            f"{path}: got {str(found)[:60]}, expected the list that a memory of tmrl "
            "keeps as its data; give another dataset_path"
        )
    return list(found)


def _narrowed(reward: Any) -> Any:
    """A reward as float32; tensors and arrays as they are."""
    number = isinstance(reward, int | float | np.generic)
    return np.asarray(reward, np.float32)[()] if number else reward
