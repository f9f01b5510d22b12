"""skrl's and rofunc's memories on disk: samples drawn, tensors read whole, and files.

The names, shapes and defaults are theirs; `mmreplay.adapters.skrl` and
`mmreplay.adapters.rofunc` tell them apart.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mmreplay.adapters import memory_files
from mmreplay.adapters.memory_files import Format, check_format
from mmreplay.adapters.memory_rows import Rows
from mmreplay.adapters.tensors import Tensor
from mmreplay.adapters.values import check_counts
from mmreplay.batch import Batch
from mmreplay.buffer.opening import absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.errors import EmptyError, SchemaError, StaleError
from mmreplay.samplers.base import Sampler, truth, whole
from mmreplay.samplers.distinct import DistinctSampler
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.uniform import UniformSampler

Ids = NDArray[np.int64]
Samples = list[list[Any]]
"""Per mini-batch, per name a tensor ``[n, *size]``, or None."""


class Memory(Rows):
    """A memory that is read by index and whole; `RandomMemory` draws from it.

    Attributes:
        tensors: `get_tensor_by_name` by name, read when asked for.
        tensors_view: The same as ``[memory_size * num_envs, *size]``.
    """

    strict: ClassVar[bool] = False
    """Whether a name that is no tensor's is a KeyError, and not None among samples."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Whole tensors by name."""
        return _Live(self, keepdim=True)

    @property
    def tensors_view(self) -> Mapping[str, torch.Tensor]:
        """Whole tensors by name, one axis for all samples."""
        return _Live(self, keepdim=False)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Whole tensors as ``_tensor_<name>``."""
        tensor = name.removeprefix("_tensor_")
        if tensor != name and tensor in self._declared:
            return self.get_tensor_by_name(tensor)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _known(self, name: str) -> Tensor:
        """A tensor's layout.

        Raises:
            KeyError: There is none of that name.
        """
        return self._declared[name]

    def get_tensor_by_name(self, name: str, keepdim: bool = True) -> torch.Tensor:
        """Show a tensor as it is now: a view of its file where it can be, or a copy.

        It is a view while the memory is full, its next row is row 0 and no turn of the
        ring lies between its rows, as the first time; never of a mutable tensor, which
        `set_tensor_by_name` would change. A write into it changes it alone.

        Args:
            name: Its name.
            keepdim: ``[memory_size, num_envs, *size]``, or one axis for both.

        Raises:
            KeyError: There is none of that name.
        """
        tensor = self._known(name)
        whole = self._view(tensor)
        if whole is None:
            flat = tensor.empty(self.memory_size * self.num_envs)
            if self.ring is not None:
                cells = self._cells(self.ring)
                places = self._places(self.ring, cells)
                found = self.ring.get_field(tensor.path, *places)
                flat[torch.from_numpy(cells)] = tensor.shown(found)
            whole = flat.reshape(self.memory_size, self.num_envs, *tensor.shape)
        whole = whole.to(self.device)
        return whole if keepdim else whole.flatten(0, 1)

    def _view(self, tensor: Tensor) -> torch.Tensor | None:
        """A tensor as it lies in its file, if its rows are there in order."""
        ordered = self.filled and not self.memory_index and not self.env_index
        if self.ring is None or not ordered or tensor.field.mutable:
            return None
        views = self.ring.mapped(tensor.path) or []
        return tensor.seen(views[0]) if len(views) == 1 else None

    def set_tensor_by_name(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor's samples that are there; indexes stay.

        Args:
            name: Its name.
            tensor: What can be broadcast to ``[memory_size, num_envs, *size]``.

        Raises:
            KeyError: There is none of that name.
            SchemaError: It is not mutable; see ``mutable=``.
            EmptyError: No sample is there.
        """
        known = self._known(name)
        if self.ring is None:
            raise EmptyError(
                f"tensor {name!r}: got values for a memory without samples, expected "
                "some; add samples first"
            )
        if not known.field.mutable:
            raise SchemaError(
                f"tensor {name!r} is not mutable, expected one that is; name it when "
                f"the memory is made, by mutable=[{name!r}, ...]"
            )
        cells = self._cells(self.ring)
        shape = (self.memory_size, self.num_envs, *known.shape)
        whole = torch.as_tensor(tensor).detach().cpu().broadcast_to(shape)
        values = whole.reshape(-1, *known.shape)[torch.from_numpy(cells)]
        places = self._places(self.ring, cells)
        self.ring.set(known.path, *places, known.stored(values))

    def _cells(self, ring: ReplayBuffer) -> Ids:
        """Cells that hold a sample, in order."""
        env_ids, positions = self._places(
            ring, np.arange(self.memory_size * self.num_envs)
        )
        return np.flatnonzero(positions >= ring.span.first[env_ids])

    def _places(self, ring: ReplayBuffer, cells: Ids) -> tuple[Ids, Ids]:
        """Environments and positions of cells; below its first, of an empty one."""
        rows, env_ids = np.divmod(cells, self.num_envs)
        newest = ring.heads[env_ids] - 1
        age = (newest - self.cursor.base[env_ids] - rows) % self.memory_size
        return env_ids, newest - age

    def sample(
        self,
        names: Sequence[str],
        batch_size: int,
        mini_batches: int = 1,
        sequence_length: int = 1,
    ) -> Samples:
        """Draw samples; `RandomMemory` does.

        Raises:
            NotImplementedError: This class does not.
        """
        raise NotImplementedError("Memory draws nothing; use RandomMemory")

    def sample_by_index(
        self,
        names: Sequence[str],
        indexes: ArrayLike | torch.Tensor,
        mini_batches: int = 1,
    ) -> Samples:
        """Read samples by their cells.

        Args:
            names: Of tensors.
            indexes: Integers ``[n]``; negative ones count from the last cell. Or a
                mask of all cells, bool ``[memory_size * num_envs]``.
            mini_batches: Parts of the result.

        Raises:
            StaleError: A cell holds no sample.
        """
        if isinstance(indexes, torch.Tensor):
            indexes = indexes.cpu()
        cells, total = np.asarray(indexes), self.memory_size * self.num_envs
        if cells.dtype == bool:
            if cells.shape != (total,):
                raise StaleError(
                    f"indexes: got a mask of shape {list(cells.shape)}, expected "
                    f"[{total}], one of all cells; give the numbers of cells"
                )
            cells = np.flatnonzero(cells)
        elif cells.size == 0 or cells.dtype.kind in "iu":
            # Bounds may be more than a narrow integer holds.
            cells = cells.astype(np.int64)
        outside = (cells < -total) | (cells >= total)
        if self.ring is None or outside.any():
            told = f"{int(cells[outside][0])}" if outside.any() else "an empty memory"
            raise StaleError(
                f"indexes: got {told}, expected cells in [0, {len(self)}); add samples "
                "first, or leave it out"
            )
        cells = np.where(cells < 0, cells + total, cells).reshape(-1)
        batch = self.ring.take(*self._places(self.ring, cells))
        return self._parted(batch, names, mini_batches)

    def sample_all(
        self, names: Sequence[str], mini_batches: int = 1, sequence_length: int = 1
    ) -> Samples:
        """Read every sample that is there.

        Args:
            names: Of tensors.
            mini_batches: Parts of the result, of sizes that differ by one at most.
            sequence_length: 1 goes row by row, more environment by environment.
        """
        if self.ring is None:
            return self.sample_by_index(names, [], mini_batches)
        cells = self._cells(self.ring)
        if sequence_length > 1:
            cells = cells[np.argsort(cells % self.num_envs, kind="stable")]
        return self.sample_by_index(names, cells, mini_batches)

    def _parted(self, batch: Batch, names: Sequence[str], mini_batches: int) -> Samples:
        """Tensors of a batch, or of its windows one after another."""
        found = [self._shown(batch, name) for name in names]
        if mini_batches == 1:
            return [found]
        check_counts(mini_batches=mini_batches)
        parts = [
            [None] * mini_batches
            if tensor is None
            else torch.tensor_split(tensor, mini_batches)
            for tensor in found
        ]
        return [[part[number] for part in parts] for number in range(mini_batches)]

    def _shown(self, batch: Batch, name: str) -> torch.Tensor | None:
        if name not in self._declared and not self.strict:
            return None
        tensor = self._known(name)
        found = tensor.shown(batch.fields[tensor.path])
        return found if self._on_cpu else found.to(self.device)

    def get_sampling_indexes(self) -> torch.Tensor | None:
        """Cells drawn last, int64 ``[n]``, or None."""
        return self.sampling_indexes

    def save(self, directory: str = "", format: Format = "pt") -> None:
        """Write the samples that are there, oldest first.

        The file is ``<directory>/memories/<time>_memory_<id>.<format>``, whole or not
        there, laid out as skrl does: ``[steps, num_envs, *size]`` each, and a line a
        sample in csv.

        Args:
            directory: ``export_directory`` by default.
            format: ``"pt"``, ``"npz"`` or ``"csv"``.

        Raises:
            SchemaError: The format is unknown.
            EmptyError: There is no sample.
        """
        check_format(format)
        if self.ring is None:
            raise EmptyError(
                "cannot save a memory without samples, expected some; add them first"
            )
        folder = absolute(directory or self.export_directory) / "memories"
        for place in [*reversed(folder.parents), folder]:
            if not place.exists():
                files.make_folder(place, exist_ok=True)
        now = datetime.datetime.now().strftime("%y-%m-%d_%H-%M-%S-%f")
        name = f"{now}_memory_{hex(id(self))}.{format}"
        memory_files.save(self.ring, folder / name, half=bool(self.env_index))

    def _export(self) -> None:
        self.save(self.export_directory, self.export_format)

    def load(self, path: str) -> None:
        """Give up all samples and read others from a file of `save`'s, or skrl's.

        Tensors are those that are declared; the file may hold more. Of more rows than
        memory_size the newest stay. A load that is cut short leaves no sample.

        Raises:
            SchemaError: The format is unknown, or values do not fit.
            KeyError: A tensor is not in the file.
            SourceError: It is of another number of environments.
        """
        suffix = Path(path).suffix.removeprefix(".")
        check_format(suffix)
        memory_files.load(
            path, self.num_envs, self._declared,
            lambda: (self._ready(self._declared), self.cursor),
        )  # fmt: skip


class RandomMemory(Memory):
    """A memory that draws samples at random, with or without replacement."""

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Format = "pt",
        export_directory: str = "",
        replacement: bool = True,
        **options: Any,
    ) -> None:
        """Declare a memory.

        Args:
            memory_size: As in `Memory`, as are those not listed here.
            num_envs: Environments.
            device: Where results go.
            export: Save the memory each time that it is full.
            export_format: ``"pt"``, ``"npz"`` or ``"csv"``.
            export_directory: Where `save` puts files.
            replacement: Whether a sample may be drawn more than once a batch; without,
                a batch is no larger than what there is.
            **options: As in `Memory`.

        Raises:
            SchemaError: `replacement` is no truth value; see also `Memory`.
        """
        self._replacement = truth("replacement", replacement)
        super().__init__(
            memory_size, num_envs, device, export, export_format, export_directory,
            **options,
        )  # fmt: skip
        self._samplers: dict[int, Sampler] = {}

    def sample(
        self,
        names: Sequence[str],
        batch_size: int,
        mini_batches: int = 1,
        sequence_length: int = 1,
    ) -> Samples:
        """Draw samples.

        Args:
            names: Of tensors.
            batch_size: Samples, or sequences.
            mini_batches: Parts of the result, of sizes that differ by one at most.
            sequence_length: Steps of one environment that follow each other, for each
                draw; results hold them one after another.

        Raises:
            EmptyError: There is no sample, or no such sequence.
            KeyError: A name is no tensor's, where that is refused; else it gives None.
        """
        if self.ring is None:
            raise EmptyError(
                f"cannot draw {batch_size} samples: got an empty memory, expected "
                "some; add samples first"
            )
        self.ring.sampler = self._sampler(sequence_length)
        batch = self.ring.sample(batch_size, contiguous=True)
        env_ids, positions = batch.env_ids, batch.positions
        if batch.window_positions is not None:
            positions = batch.window_positions.reshape(-1)
            env_ids = np.repeat(env_ids, sequence_length)
        rows = (positions - self.cursor.base[env_ids]) % self.memory_size
        self.sampling_indexes = torch.from_numpy(rows * self.num_envs + env_ids)
        return self._parted(batch, names, mini_batches)

    def _sampler(self, length: int) -> Sampler:
        whole("sequence_length", length, 1, "leave it out for single steps")
        if length not in self._samplers:
            seed = (self._seed + length) % (1 << 63)
            sampler: Sampler = (
                UniformSampler(seed) if self._replacement else DistinctSampler(seed)
            )
            if length > 1:
                sampler = SequenceSampler(length, sampler, boundary="any")
            self._samplers[length] = sampler
        return self._samplers[length]


class _Live(Mapping[str, torch.Tensor]):
    """Tensors of a memory by name, read when asked for."""

    def __init__(self, memory: Memory, *, keepdim: bool) -> None:
        self._memory, self._keepdim = memory, keepdim

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._memory.get_tensor_by_name(name, self._keepdim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._memory.get_tensor_names())

    def __len__(self) -> int:
        return len(self._memory.get_tensor_names())
