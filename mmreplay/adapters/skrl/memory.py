"""skrl's memories on disk: tensors that are declared, samples added, and draws.

A *cell* numbers the samples of a memory as skrl does, row by row and environment by
environment: ``row * num_envs + env_id``. Row r holds the newest step whose number,
counted from the last reset, is r modulo memory_size.

Agents call a memory's methods only, so skrl does not have to be installed.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mmreplay.adapters.common.location import (
    MEMORIES,
    BufferLocation,
    PickledByPath,
    StrPath,
    fixed,
    make_folders,
)
from mmreplay.adapters.common.tensors import (
    Tensor,
    Way,
    found_roles,
    looked,
    space_shape,
    space_size,
)
from mmreplay.adapters.common.values import LOOKS, check_counts, device_of, seed_of_draws, unusable
from mmreplay.adapters.skrl import save as saved
from mmreplay.adapters.skrl.cursor import Cursor, cursor_of
from mmreplay.adapters.skrl.save import FORMATS, Format, suffix_of
from mmreplay.arguments import flag, integer
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.errors import EmptyError, SchemaError, StaleError, shown
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.distinct import DistinctSampler
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Schema

MUTABLE = ("values", "returns", "advantages")
"""Tensors that on-policy agents write back; see `Memory.set_tensor_by_name`."""
Ids = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]
Samples = list[list[Any]]
"""Per mini-batch, per name a tensor ``[n, *size]``, or None."""


class Memory(PickledByPath):
    """`skrl.memories.torch.Memory` in files.

    Each tensor is ``[memory_size, num_envs, *size]``, read by index or as a whole.
    `RandomMemory` also draws from it.

    Attributes:
        memory_size: Rows of each environment; fixed.
        num_envs: Environments; fixed.
        device: Device of the results.
        sampling_indexes: Cells of the last draw, int64, or None.
        home: The folder of the data.
        ring: The `mmreplay.ReplayBuffer`, from the first sample on, else None.
        tensors: `get_tensor_by_name` by name, read on access.
        tensors_view: The same as ``[memory_size * num_envs, *size]``.

    Example:
        >>> import torch
        >>> from mmreplay.adapters.skrl import RandomMemory
        >>> memory = RandomMemory(memory_size=100, num_envs=2, device="cpu")
        >>> memory.create_tensor("states", size=3, dtype=torch.float32)
        True
        >>> memory.add_samples(states=torch.zeros(2, 3))
        >>> len(memory)
        2
    """

    system: ClassVar[str] = "skrl"
    shaped: ClassVar[bool] = False
    """Whether spaces and numbers keep dimensions as well, not sequences only."""
    strict: ClassVar[bool] = False
    """Whether an unknown name is a KeyError, and not None among samples."""
    formats: ClassVar[Mapping[str, str]] = FORMATS
    """Suffixes of saved files by the names of formats."""
    held = "ring"
    memory_size: int = fixed("memory_size", "Make another memory with another path.")
    num_envs: int = fixed("num_envs", "Make another memory with another path.")

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Format = "pt",
        export_directory: str = "",
        *,
        path: StrPath | None = None,
        resume: bool = False,
        mutable: Sequence[str] = MUTABLE,
        seed: int | None = None,
    ) -> None:
        """Declare a memory.

        Args:
            memory_size: Rows.
            num_envs: Environments.
            device: Where results go; the first GPU by default, or the CPU. One that
                this machine lacks falls back to the default, with a RuntimeWarning,
                but not in a process with a skrl older than 1.4.
            export: Save the memory each time that it is full.
            export_format: ``"pt"``, ``"npz"`` or ``"csv"``.
            export_directory: Where `save` puts files.
            path: The folder; see `BufferLocation`.
            resume: Continue with the existing buffer.
            mutable: Tensors that `set_tensor_by_name` may write, beside those that
                the first samples come without.
            seed: Of the draws; by default torch's own.

        Raises:
            SchemaError: The format is unknown, a number is not at least 1, another
                argument is of a wrong type, or the existing buffer has another size.
            FormatError: The path holds a buffer, and resume is False.
        """
        suffix_of(export_format, self.formats)
        check_counts(memory_size=memory_size, num_envs=num_envs)
        flag("export", export)
        if not isinstance(export_directory, str | os.PathLike):
            raise SchemaError(
                f"export_directory must be a path, got {shown(export_directory)}. "
                "Leave it out for the current directory."
            )
        if isinstance(mutable, str):
            raise SchemaError(
                f"mutable must be a sequence of names, got {mutable!r:.80}. Pass [{mutable!r:.80}]."
            )
        if seed is not None:
            integer("seed", seed, 0, "Leave it out for torch's own seed.")
        self.memory_size, self.num_envs = int(memory_size), int(num_envs)
        self.device = self._device(device)
        self._on_cpu = self.device.type == "cpu"
        self.export, self.export_format = export, export_format
        self.export_directory = export_directory
        self.sampling_indexes: torch.Tensor | None = None
        self._declared: dict[str, Tensor] = {}
        self._keep_dimensions: dict[str, bool] = {}
        self._plain: list[Way] | None = None
        self._mutable = frozenset(mutable)
        self._seed = seed_of_draws() if seed is None else seed
        self._cursor = Cursor(self.num_envs)
        self.home = BufferLocation(self.system, path, resume)
        self.ring: ReplayBuffer | None = self._opened(None)

    def _device(self, device: str | torch.device | None) -> torch.device:
        """The device of an argument, as the loaded skrl finds it.

        Before 1.4 it had no `parse_device`, and took any device.
        """
        loaded = sys.modules.get("skrl")
        config = getattr(getattr(loaded, "config", None), "torch", None)
        if loaded is None or device is None or hasattr(config, "parse_device"):
            return device_of(device)
        return torch.device(device)

    def _open_again(self, sampler: Sampler | None) -> None:
        self.ring = self._opened(sampler)

    def _opened(self, sampler: Sampler | None) -> ReplayBuffer | None:
        """Return the ring, if it exists, and read its cursor.

        Raises:
            SchemaError: It is of another size, as after a resize.
        """
        ring = self.home.reopen(sampler)
        if ring is not None:
            got = ring.capacity, ring.num_envs
            expected = self.memory_size, self.num_envs
            if got != expected:
                raise SchemaError(
                    f"{self.home.path} must hold a memory of (memory_size, num_envs) "
                    f"{expected}, got {got}. Choose another path."
                )
            self._cursor = cursor_of(ring)
        return ring

    def __getstate__(self) -> dict[str, Any]:
        """See `PickledByPath`; the cursor is the ring's."""
        state = super().__getstate__()
        del state["_cursor"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `PickledByPath`."""
        self._cursor = Cursor(state["num_envs"])
        super().__setstate__(state)
        # The machine that it was pickled on may have had another.
        self.device = device_of(self.device)
        self._on_cpu = self.device.type == "cpu"

    @property
    def cursor(self) -> Cursor:
        """Where the next sample goes; shared by all memories of the ring."""
        if not self._cursor.sure and self.ring is not None:
            self._cursor.count_rows(self.ring)
        return self._cursor

    @property
    def filled(self) -> bool:
        """Whether every row was written."""
        return self.cursor.filled

    @property
    def memory_index(self) -> int:
        """The row that is written next."""
        return self.cursor.memory_index

    @property
    def env_index(self) -> int:
        """The environment whose sample comes next in that row."""
        return self.cursor.env_index

    def __len__(self) -> int:
        """Samples that are there."""
        if self.filled:
            return self.memory_size * self.num_envs
        return self.memory_index * self.num_envs + self.env_index

    def __repr__(self) -> str:
        """Name the class, the size and the folder."""
        return (
            f"<{self.system}.{type(self).__name__} {len(self):,} of "
            f"{self.memory_size:,} x {self.num_envs}, {self.home}>"
        )

    @property
    def all_sequence_indexes(self) -> Ids:
        """Every cell, environment by environment."""
        cells = np.arange(self.memory_size * self.num_envs)
        return cells.reshape(self.memory_size, self.num_envs).T.reshape(-1)

    def share_memory(self) -> None:
        """Do nothing: files are shared by all processes; read them by their path."""

    def get_tensor_names(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._declared)

    def create_tensor(
        self, name: str, size: Any, dtype: torch.dtype | None = None, keep_dimensions: bool = False
    ) -> bool:
        """Declare a tensor.

        Args:
            name: Its name.
            size: See `space_size`; None declares nothing.
            dtype: Torch's default one by default.
            keep_dimensions: Samples have the axes of size; else they have one.

        Returns:
            Whether it is new.

        Raises:
            SchemaError: There is one of that name and another size or dtype, or it
                cannot be stored; or the machine lacks the memory's device.
        """
        if size is None:
            return False
        why = "" if self._on_cpu else unusable(self.device)
        if why:
            raise SchemaError(
                f"device: cannot use {str(self.device)!r} ({why}). Make the memory "
                "with a device of this machine."
            )
        shape = space_shape(size, self.shaped) if keep_dimensions else (space_size(size),)
        known = self._declared.get(name)
        if known is not None:
            if known.shape != shape or dtype not in (None, known.dtype):
                raise SchemaError(
                    f"tensor {name!r} is declared as {list(known.shape)} {known.dtype} "
                    f"already, got {list(shape)} {dtype}. Use another name."
                )
            return False
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise SchemaError(
                f"dtype must be a torch.dtype, got {shown(dtype)} for tensor {name!r}. "
                "Use for example torch.float32."
            )
        tensor = Tensor.of(name, shape, dtype, name in self._mutable)
        for other in self._declared.values():
            if other.path == tensor.path:
                raise SchemaError(
                    f"tensor {name!r}: {other.name!r} is stored under this name. Choose another."
                )
        if self.ring is not None:
            tensor = self._joined(self.ring, tensor)
        self._declared[name] = tensor
        self._plain = None
        self._keep_dimensions[name] = keep_dimensions
        return True

    def _joined(self, ring: ReplayBuffer, tensor: Tensor) -> Tensor:
        """Return a tensor of an existing ring: its field, or a new empty field."""
        path = tensor.path
        if path not in ring.schema:
            if ring.metadata.user.get("adapter") not in MEMORIES:
                raise SchemaError(
                    f"tensor {tensor.name!r}: the buffer {self.home.path} has no such "
                    "field and was not made by a memory. Choose another path."
                )
            ring.add_field(path, tensor.field, tensor.nothing)
        stored = ring.schema[path]
        if (stored.shape, stored.dtype) != (tensor.field.shape, tensor.field.dtype):
            raise SchemaError(
                f"tensor {tensor.name!r} is {tensor.field}, but {stored} in "
                f"{self.home.path}. Declare it as it is stored, or choose another path."
            )
        return Tensor.of(tensor.name, tensor.shape, tensor.dtype, stored.mutable)

    def _ready(self, values: Mapping[str, object]) -> ReplayBuffer:
        """The ring, made now that it is known what samples come with."""
        if self.ring is None:
            for name, tensor in self._declared.items():
                late = tensor.field.mutable or name not in values
                self._declared[name] = Tensor.of(name, tensor.shape, tensor.dtype, late)
            fields = {each.path: each.field for each in self._declared.values()}
            roles = found_roles(list(self._declared.values()))
            self.ring = self.home.ring(
                Schema.from_flat(fields, roles),
                self.memory_size,
                self.num_envs,
                layout="time_major",
                autoreset="same_step",
            )
            self._cursor = cursor_of(self.ring)
        return self.ring

    def reset(self) -> None:
        """Remove all samples; tensors stay declared."""
        if self.ring is not None:
            self._cursor.reset(self.ring)

    def add_samples(self, **tensors: torch.Tensor) -> None:
        """Add samples, cell by cell from the next cell on.

        ``[num_envs, *size]`` is a row; fewer are cells of it, and of the next one; more
        are rows of a memory with one environment; without the first axis it is one
        cell. Tensors that are missing are nothing there: NaN, or 0.

        Raises:
            SchemaError: No tensor is known, shapes do not fit, or a whole row comes
                while one is half written.
        """
        if self._add_plain(tensors):
            return
        values = {
            name: value
            for name, value in tensors.items()
            if name in self._declared and value is not None
        }
        columns, count, whole = self._columns(values, list(tensors))
        if whole and self.env_index:
            raise SchemaError(
                f"add_samples must get samples of environments from {self.env_index} "
                f"on, because the row is incomplete, got those of all {count}. Add the "
                "rest of the row first."
            )
        ring, done = self._ready(values), 0
        for name in self._declared.keys() - values.keys():
            tensor = self._declared[name]
            columns[tensor.path] = tensor.stored(tensor.empty(count))
        while done < count:
            done += self._put(ring, columns, done, count)

    def _add_plain(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Add a whole row of tensors as they are stored; False where one is not so."""
        cursor, ring = self.cursor, self.ring
        if ring is None or cursor.env_index or len(tensors) != len(self._declared):
            return False
        if self._plain is None:
            every = self._declared.values()
            self._plain = [each.plain(self.num_envs) for each in every]
        for look in LOOKS:
            columns = looked(self._plain, look, tensors)
            if columns is None:
                continue
            try:
                if ring.try_add(columns) is None:
                    continue  # another shape or dtype, or an end in a capsule
                full = cursor.moved(self.num_envs, ring)
            except BaseException:
                # An interrupt: rows may be in that were not counted.
                cursor.sure = False
                raise
            if full and self.export:
                self._export()
            return True
        return False

    def _columns(
        self, values: Mapping[str, torch.Tensor], names: list[str]
    ) -> tuple[Columns, int, bool]:
        """Samples by path, how many they are, and whether they are one whole row."""
        # One sample may come with the axis or without it, as in what broadcasts.
        leads = {self._declared[n].lead(value) or (1,) for n, value in values.items()}
        if len(leads) != 1:
            known = ", ".join(self._declared) or "none"
            got = f"{sorted(leads)} of samples" if leads else f"the tensors {names}"
            raise SchemaError(
                "add_samples must get the same number of samples for declared tensors "
                f"({known}), got {got}. Declare tensors with create_tensor."
            )
        (count,), num_envs = leads.pop(), self.num_envs
        if count < 1 or (count > num_envs > 1):
            raise SchemaError(
                f"add_samples must get 1 to {num_envs} samples, one per environment, "
                f"got {count}. Add rows one by one."
            )
        columns = {}
        for name, value in values.items():
            tensor = self._declared[name]
            columns[tensor.path] = tensor.stored(value.reshape(count, *tensor.shape))
        return columns, count, count == num_envs > 1

    def _put(self, ring: ReplayBuffer, columns: Columns, done: int, count: int) -> int:
        """Write some of the samples left: whole rows, or a part of one."""
        left, width, cursor = count - done, self.num_envs, self.cursor
        rows = min(left // width, self.memory_size - cursor.memory_index)
        half = bool(cursor.env_index) or not rows
        size = min(width - cursor.env_index, left) if half else rows * width
        part = columns
        if size != count:
            part = {path: array[done : done + size] for path, array in columns.items()}
        try:
            if half:
                first = cursor.env_index
                ring.add(part, env_ids=np.arange(first, first + size))
            elif rows == 1:
                ring.add(part)
            else:
                ring.extend({p: a.reshape(rows, width, *a.shape[1:]) for p, a in part.items()})
            full = cursor.moved(size, ring)
        except BaseException:
            cursor.sure = False
            raise
        if full and self.export:
            self._export()
        return size

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
                places = self._positions(self.ring, cells)
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
            EmptyError: The memory has no samples.
        """
        known = self._known(name)
        if self.ring is None:
            raise EmptyError(
                f"tensor {name!r}: the memory has no samples to change. Add samples first."
            )
        if not known.field.mutable:
            raise SchemaError(
                f"tensor {name!r} is not mutable. Name it when the memory is made, by "
                f"mutable=[{name!r}, ...]."
            )
        cells = self._cells(self.ring)
        shape = (self.memory_size, self.num_envs, *known.shape)
        whole = torch.as_tensor(tensor).detach().cpu().broadcast_to(shape)
        values = whole.reshape(-1, *known.shape)[torch.from_numpy(cells)]
        positions = self._positions(self.ring, cells)
        self.ring.write_field(known.path, *positions, known.stored(values))

    def _cells(self, ring: ReplayBuffer) -> Ids:
        """Cells that hold a sample, in order."""
        env_ids, positions = self._positions(ring, np.arange(self.memory_size * self.num_envs))
        return np.flatnonzero(positions >= ring.span.first[env_ids])

    def _positions(self, ring: ReplayBuffer, cells: Ids) -> tuple[Ids, Ids]:
        """Environments and positions of cells; below its first, of an empty one."""
        rows, env_ids = np.divmod(cells, self.num_envs)
        newest = ring.heads[env_ids] - 1
        age = (newest - self.cursor.base[env_ids] - rows) % self.memory_size
        return env_ids, newest - age

    def sample(
        self, names: Sequence[str], batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> Samples:
        """Draw samples; `RandomMemory` does.

        Raises:
            NotImplementedError: This class does not.
        """
        raise NotImplementedError("Memory draws nothing; use RandomMemory")

    def sample_by_index(
        self, names: Sequence[str], indexes: ArrayLike | torch.Tensor, mini_batches: int = 1
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
                    f"indexes: a mask must have the shape [{total}], one value per "
                    f"cell, got {list(cells.shape)}. Or pass the numbers of cells."
                )
            cells = np.flatnonzero(cells)
        elif cells.size == 0 or cells.dtype.kind in "iu":
            # Bounds may be more than a narrow integer holds.
            cells = cells.astype(np.int64)
        outside = (cells < -total) | (cells >= total)
        if self.ring is None or outside.any():
            got = f"{int(cells[outside][0])}" if outside.any() else "an empty memory"
            raise StaleError(
                f"indexes must be cells in [0, {len(self)}), got {got}. Add samples "
                "first, or leave it out."
            )
        cells = np.where(cells < 0, cells + total, cells).reshape(-1)
        batch = self.ring.take(*self._positions(self.ring, cells))
        return self._parted(batch, names, mini_batches)

    def sample_all(
        self, names: Sequence[str], mini_batches: int = 1, sequence_length: int = 1
    ) -> Samples:
        """Read all samples.

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
            [None] * mini_batches if tensor is None else torch.tensor_split(tensor, mini_batches)
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
        suffix = suffix_of(format, self.formats)
        if self.ring is None:
            raise EmptyError("cannot save a memory without samples. Add samples first.")
        folder = files.absolute(directory or self.export_directory) / "memories"
        make_folders(folder)
        now = datetime.datetime.now().strftime("%y-%m-%d_%H-%M-%S-%f")
        name = f"{now}_memory_{hex(id(self))}.{suffix}"
        saved.save(self.ring, folder / name, half=bool(self.env_index))

    def _export(self) -> None:
        self.save(self.export_directory, self.export_format)

    def load(self, path: str) -> None:
        """Discard all samples and read others from a file of `save`'s, or skrl's.

        Tensors are those that are declared; the file may hold more. Of more rows than
        memory_size the newest stay. A load that is cut short leaves no sample.

        Raises:
            SchemaError: The format is unknown, or values do not fit.
            KeyError: A tensor is not in the file.
            SourceError: It is of another number of environments.
        """
        suffix_of(Path(path).suffix.removeprefix("."))
        saved.load(
            path, self.num_envs, self._declared, lambda: (self._ready(self._declared), self.cursor)
        )


class RandomMemory(Memory):
    """`skrl.memories.torch.RandomMemory` in files, which draws samples at random.

    Example:
        >>> memory = RandomMemory(memory_size=100, num_envs=2, device="cpu")
        >>> memory.create_tensor("states", size=3, dtype=torch.float32)
        True
        >>> memory.add_samples(states=torch.zeros(2, 3))
        >>> memory.sample(["states"], batch_size=2)[0][0].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: str | torch.device | None = None,
        export: bool = False,
        export_format: Format = "pt",
        export_directory: str = "",
        replacement: bool = False,
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
        self._replacement = flag("replacement", replacement)
        super().__init__(
            memory_size, num_envs, device, export, export_format, export_directory, **options
        )
        self._samplers: dict[int, Sampler] = {}

    def sample(
        self, names: Sequence[str], batch_size: int, mini_batches: int = 1, sequence_length: int = 1
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
                f"cannot draw {batch_size} samples from an empty memory. Add samples first."
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
        integer("sequence_length", length, 1, "Leave it out for single steps.")
        if length not in self._samplers:
            seed = (self._seed + length) % (1 << 63)
            sampler: Sampler = UniformSampler(seed) if self._replacement else DistinctSampler(seed)
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
