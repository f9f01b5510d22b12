"""tmrl's memories on disk: `Memory` and `TorchMemory` to subclass, and a generic one.

Public names and results are those of tmrl 0.7.1. docs/migrating/tmrl.md lists the
differences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from mmreplay.adapters.common.location import FOLDER, BufferLocation, PickledByPath, StrPath
from mmreplay.adapters.common.values import check_counts, seed_of_draws
from mmreplay.adapters.tmrl.nests import check_crcs, collate_torch, crcs_of
from mmreplay.adapters.tmrl.rows import Rows
from mmreplay.arguments import number
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.datasets import pickles
from mmreplay.disk import files
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Schema

Preprocessor = Callable[..., tuple[Any, ...]]
STATS = ("stat_test_return", "stat_train_return", "stat_test_steps", "stat_train_steps")
PICKLE = "data.pkl"
NOTE_EVERY_S = 10.0
"""Statistics are replaced whole and synced, at the cost of hundreds of samples."""
COLUMNS = 7
"""Of a pickle: actions, observations, rewards, both ends, infos, and whether ended."""


class Memory(ABC):
    """A replay memory that yields rounds of batches; subclass it as in tmrl.

    A direct subclass chooses where samples are stored: in ``data``, or in the ring on
    disk that ``home.ring(schema, capacity)`` makes.

    Attributes:
        home: The folder of a ring; see `BufferLocation`.
        data: A list for subclasses.
        stat_test_return: Statistic of the last appended buffer, as are the others.

    Example:
        >>> class Recent(Memory):
        ...     def append_buffer(self, buffer):
        ...         self.data = buffer.memory[-self.memory_size :]
        ...     def __len__(self):
        ...         return len(self.data)
        ...     def get_transition(self, item):
        ...         return self.data[item]
        ...     def collate(self, batch, device):
        ...         return batch
        >>> len(Recent("cpu", nb_steps=1, memory_size=100))
        0
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
            path: The ring's folder; see `BufferLocation`.
            resume: Continue the existing ring, and leave ``data.pkl`` alone.
            allow_pickle: Take in ``data.pkl``: a pickle is a program.

        Raises:
            FormatError: A ring exists, and resume is False.
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
        drawn: list[int] = self._random.integers(len(self), size=self.batch_size).tolist()
        return iter(drawn)

    def _refuse_empty(self) -> None:
        if len(self) < 1:
            raise SchemaError(
                f"cannot draw {self.batch_size} samples from a memory without "
                "transitions. Append a buffer first."
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
    """A memory whose batches are nests of tensors.

    Example:
        >>> isinstance(GenericTorchMemory(memory_size=100), TorchMemory)
        True
    """

    def collate(self, batch: list[Any], device: Any) -> Any:
        """Stack samples; see `collate_torch`."""
        return collate_torch(batch, device)


class GenericTorchMemory(PickledByPath, TorchMemory):
    """Samples of any kind in a ring on disk, one row each.

    Draws make histories of images and actions from single rows; before the start of an
    episode its first row is repeated. All transitions are equally likely, except those
    from an end to a reset, which are not drawn.

    Example:
        >>> from types import SimpleNamespace
        >>> sample = (np.zeros(1), (np.zeros(2),), 0.5, False, False, {})
        >>> statistics = dict.fromkeys(STATS, 0.0)
        >>> memory = GenericTorchMemory(memory_size=100, batch_size=4)
        >>> memory.append_buffer(SimpleNamespace(memory=[sample] * 3, **statistics))
        >>> len(memory)
        2
    """

    _ring: ReplayBuffer | None = None

    def __init__(
        self,
        memory_size: float = 1e6,
        batch_size: int = 1,
        dataset_path: StrPath = "",
        nb_steps: int = 1,
        sample_preprocessor: Preprocessor | None = None,
        crc_debug: bool = False,
        device: Any = "cpu",
        *,
        imgs_obs: int | None = None,
        act_buf_len: int = 0,
        imgs_shape: tuple[int, ...] | None = None,
        imgs_scale: float | None = None,
        path: StrPath | None = None,
        resume: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Make a memory, or go on with one.

        Args:
            memory_size: Transitions kept, those from ends to resets counted.
            batch_size: As in `Memory`, as are those not listed here.
            dataset_path: As in `Memory`, but its samples go into the ring.
            nb_steps: As in `Memory`.
            sample_preprocessor: As in `Memory`.
            crc_debug: Keep CRCs of what workers had, and check them at each draw.
            device: As in `Memory`.
            imgs_obs: The last part of the observation becomes that of so many rows,
                oldest first, along a new first axis; None leaves it alone.
            act_buf_len: So many of the last actions become further parts of the
                observation, which is then a tuple.
            imgs_shape: What the images of a sample are reshaped to, such as (-1,).
            imgs_scale: What they are divided by, as float32.
            path: As in `Memory`.
            resume: As in `Memory`.
            allow_pickle: As in `Memory`.

        Raises:
            FormatError: As in `Memory`; or the pickle is another memory's.
            SchemaError: A number is not legal, the existing memory has another size,
                or there is a pickle that is not allowed.
        """
        check_counts(memory_size=memory_size, batch_size=batch_size)
        check_counts(imgs_obs=1 if imgs_obs is None else imgs_obs)
        check_counts(0, nb_steps=nb_steps, act_buf_len=act_buf_len)
        if imgs_scale is not None:
            number("imgs_scale", imgs_scale, 0)
        if imgs_scale == 0:
            raise SchemaError(
                "imgs_scale must be a finite number above 0, got 0. Leave it out for "
                "images as they are."
            )
        if imgs_shape is not None and not (
            isinstance(imgs_shape, tuple | list)
            and all(isinstance(n, int | np.integer) for n in imgs_shape)
        ):
            raise SchemaError(
                f"imgs_shape must be a tuple of integers, got {imgs_shape!r:.80}. Use "
                "for example (-1,), which makes images flat."
            )
        self._rows = Rows(imgs_obs, act_buf_len, imgs_shape, imgs_scale, crc_debug)
        super().__init__(
            device,
            nb_steps,
            sample_preprocessor,
            memory_size,
            batch_size,
            "",
            crc_debug,
            path=path,
            resume=resume,
        )
        self.path = Path(files.expanded(dataset_path))
        self._held: list[Any] = []
        self._noted: dict[str, float] = {}
        self._noted_at = 0.0
        self._ring = None
        if self.home.resumed:
            self._reopen()
        elif columns := dataset_of(dataset_path, allow_pickle):
            self._append(_samples(self.path / PICKLE, columns))

    @property
    def memory_size(self) -> float:
        """Transitions kept; a new number resizes the ring, and the newest stay."""
        return self._memory_size

    @memory_size.setter
    def memory_size(self, size: float) -> None:
        check_counts(memory_size=size)
        if self._ring is not None:
            self._ring.resize(int(size) + 1)
        self._memory_size = size

    @property
    def crc_debug(self) -> bool:
        """Whether CRCs are kept and checked; fixed once there is a ring."""
        return self._rows.crc_debug

    @crc_debug.setter
    def crc_debug(self, value: bool) -> None:
        if self._ring is not None and value is not self._rows.crc_debug:
            raise SchemaError(
                "crc_debug cannot change: the memory was made with "
                f"crc_debug={self._rows.crc_debug}, got {value!r}. Make another memory "
                "with another path."
            )
        self._rows.crc_debug = value

    def _reopen(self, sampler: Sampler | None = None) -> None:
        with ReplayBuffer.open(self.home.path) as found:
            self._rows.load(found)
            schema = found.schema
        self._open(schema, sampler)
        assert self._ring is not None
        stats = self._ring.statistics.get("tmrl", {})
        for name in STATS:
            setattr(self, name, stats.get(name, getattr(self, name)))

    def __getstate__(self) -> dict[str, Any]:
        """See `PickledByPath`; the folder then has the statistics of now.

        Raises:
            FormatError: The folder is a temporary one, whether or not it holds a ring:
                better before the first epoch than after it.
        """
        if self.home.temporary:
            raise FormatError(
                f"pickling a memory in {self.home.path}, a temporary folder that is "
                "removed at exit; tmrl pickles it for a checkpoint after each epoch. "
                f"Pass path=, or set ${FOLDER}."
            )
        self._note()
        return super().__getstate__()

    def _open_again(self, sampler: Sampler | None) -> None:
        if self.home.resumed:
            with ReplayBuffer.open(self.home.path) as found:
                # It may have been resized since.
                self._memory_size = found.capacity - 1
            self._reopen(sampler)

    def _open(self, schema: Schema, sampler: Sampler | None = None) -> None:
        self._ring = self.home.ring(
            schema,
            # A transition needs two rows.
            int(self.memory_size) + 1,
            sampler=sampler or UniformSampler(self._seed),
            transforms=self._rows.transforms,
            user_metadata=self._rows.user_metadata,
        )

    def append_buffer(self, buffer: Any) -> None:
        """Append samples: (action, observation, reward, terminated, truncated, info).

        The action of a sample led to its observation; it may be None after a reset,
        and is then 0. All or nothing.

        Raises:
            SchemaError: A sample is of another structure or dtype than the first.
        """
        self._append(list(buffer.memory))
        if monotonic() > self._noted_at + NOTE_EVERY_S:
            self._note()

    def _note(self) -> None:
        """Store the statistics beside the data, if they have changed."""
        stats = {name: float(getattr(self, name)) for name in STATS}
        if self._ring is not None and stats != self._noted:
            self._ring.set_statistics({"tmrl": stats})
            self._noted, self._noted_at = stats, monotonic()

    def _append(self, samples: list[Any]) -> None:
        samples = self._held + samples
        if self._ring is None:
            # What an action is, is known once there is one.
            if all(sample[0] is None for sample in samples):
                self._held = samples
                return
            schema = self._rows.describe(samples)
            columns = self._rows.columns(samples)
            self._rows.check(columns)
            self._open(schema)
        elif samples:
            columns = self._rows.columns(samples)
        assert self._ring is not None
        if samples:
            self._ring.extend(columns)
        self._held = []

    def __len__(self) -> int:
        if self._ring is None:
            return 0
        view = self._ring.view
        with view.lock:
            return int(view.starts.lengths.sum()) - view.num_illegal

    def get_transition(self, item: int) -> tuple[Any, ...]:
        """Give a transition by number, oldest first; negative ones from the end.

        Raises:
            IndexError: There is none of that number.
        """
        if self._ring is None or not -len(self) <= item < len(self):
            raise IndexError(
                f"item {item} is not in a memory of {len(self)} transitions. Append more samples."
            )
        view = self._ring.view
        with view.lock:
            places = view.start_at(np.array([item % len(self)]))
        return self._rows.transition(self._ring.take(*places).fields, 0)

    def sample(self) -> Any:
        """Draw a batch in one gather; see `Memory.sample`."""
        kind = type(self)
        if (
            kind.get_transition is not GenericTorchMemory.get_transition
            or kind.sample_indices is not Memory.sample_indices
            or kind.__getitem__ is not Memory.__getitem__
        ):
            return super().sample()
        self._refuse_empty()
        assert self._ring is not None
        try:
            fields = self._ring.sample(self.batch_size).fields
        except EmptyError as error:
            raise SchemaError(str(error)) from error
        whole = kind.collate is TorchMemory.collate and not self.crc_debug
        if whole and self.sample_preprocessor is None:
            return self._rows.batch(fields, self.device)
        made = [self._rows.transition(fields, i) for i in range(self.batch_size)]
        return self.collate([self._finished(each) for each in made], self.device)

    def __repr__(self) -> str:
        return f"<GenericTorchMemory of {len(self):,} transitions in {self.home!r}>"

    def close(self) -> None:
        """Commit and close; a temporary folder goes."""
        if self._ring is not None and not self._ring.closed:
            self._note()
        self.home.close()


def dataset_of(folder: StrPath, allowed: bool) -> list[Any]:
    """Return the pickled `data` of a memory in a folder; empty without a pickle."""
    path = Path(files.expanded(folder)) / PICKLE
    if not str(folder) or not path.is_file():
        return []
    found = pickles.load(path, allowed)
    if not isinstance(found, list | tuple):
        raise FormatError(
            f"{path} must hold the list that a memory of tmrl stores as its data, got "
            f"{str(found)[:60]}. Pass another dataset_path."
        )
    return list(found)


def _samples(path: Path, columns: list[Any]) -> list[Any]:
    """Return the samples of the seven columns of tmrl's GenericTorchMemory."""
    if len(columns) != COLUMNS:
        raise FormatError(
            f"{path} must hold the {COLUMNS} columns of tmrl's GenericTorchMemory, got "
            f"{str(columns)[:60]}. Use `mmreplay convert` for other memories."
        )
    return list(zip(*columns[:6], strict=True))


def _narrowed(reward: Any) -> Any:
    """A reward as float32; tensors and arrays as they are."""
    number = isinstance(reward, int | float | np.generic)
    return np.asarray(reward, np.float32)[()] if number else reward
