"""skrl's and rofunc's memories on disk: tensors that are declared, and samples added.

A *cell* numbers the samples of a memory as its authors do, row by row and environment
by environment: ``row * num_envs + env_id``. Row r holds the newest step whose number,
counted from the last reset, is r modulo memory_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.home import Home, Kept, StrPath
from mmreplay.adapters.tensors import Shape, Tensor, found_roles, space_size
from mmreplay.adapters.values import check_counts
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Sampler
from mmreplay.schema import Schema

FORMATS = ("pt", "npz", "csv")
MUTABLE = ("values", "returns", "advantages")
"""What on-policy agents write back; see `Memory.set_tensor_by_name`."""
RESET = "reset"
"""Of the buffer's statistics: the heads at the last reset, from where rows count."""

Format = Literal["pt", "npz", "csv"]
Ids = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]


class Rows(Kept):
    """Named tensors ``[memory_size, num_envs, *size]`` in files.

    Attributes:
        memory_size: Rows kept of each environment.
        num_envs: Environments.
        device: Where results go.
        filled: Whether every row was written.
        memory_index: The row that is written next.
        env_index: The environment whose sample comes next in that row.
        sampling_indexes: Cells drawn last, int64, or None.
        home: Where the data is.
        ring: The `mmreplay.ReplayBuffer`, from the first sample on, else None.
    """

    system: ClassVar[str] = "memory"
    held = "ring"

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
            device: Where results go; the first GPU by default, or the CPU.
            export: Save the memory each time that it is full.
            export_format: ``"pt"``, ``"npz"`` or ``"csv"``.
            export_directory: Where `save` puts files.
            path: The folder; see `Home`.
            resume: Go on with the buffer that is there.
            mutable: Tensors that `set_tensor_by_name` may write, beside those that
                the first samples come without.
            seed: Of the draws; by default torch's own.

        Raises:
            SchemaError: The format is unknown, a number is not at least 1, or the
                buffer that is there has another size.
            FormatError: The path holds a buffer, and resume is False.
        """
        check_format(export_format)
        check_counts(memory_size=memory_size, num_envs=num_envs)
        default = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.memory_size, self.num_envs = int(memory_size), int(num_envs)
        self.device = torch.device(default if device is None else device)
        self._on_cpu = self.device.type == "cpu"
        self.export, self.export_format = export, export_format
        self.export_directory = export_directory
        self.filled = False
        self.env_index = self.memory_index = 0
        self.sampling_indexes: torch.Tensor | None = None
        self._declared: dict[str, Tensor] = {}
        self._kept: dict[str, bool] = {}
        self._plain: list[tuple[str, str, Shape, np.dtype[Any], Shape | None]] | None
        self._plain = None
        self._mutable = frozenset(mutable)
        self._seed = torch.initial_seed() % (1 << 63) if seed is None else seed
        self._base = np.zeros(num_envs, np.int64)
        self.home = Home(self.system, path, resume)
        self.ring: ReplayBuffer | None = self.home.reopen()
        if self.ring is not None:
            got = self.ring.capacity, self.ring.num_envs
            if got != (memory_size, num_envs):
                raise SchemaError(
                    f"{self.home.path} holds a memory of (memory_size, num_envs) "
                    f"{got}, got {(memory_size, num_envs)}, expected the same; give "
                    "another path"
                )
            self._follow(self.ring)

    def _open_again(self, sampler: Sampler | None) -> None:
        self.ring = self.home.reopen(sampler)
        if self.ring is not None:
            self._follow(self.ring)

    def _follow(self, ring: ReplayBuffer) -> None:
        """Take the indexes from what the ring holds."""
        told = ring.statistics.get(RESET, [0] * self.num_envs)
        self._base = np.array(told, np.int64)
        if (ring.span.first < self._base).any():
            ring.clear()  # a reset that was cut short
        rows = ring.heads - self._base
        least = int(rows.min())
        self.filled = least >= self.memory_size
        self.memory_index = least % self.memory_size
        self.env_index = int((rows > least).sum())

    def __len__(self) -> int:
        """Samples that are there."""
        if self.filled:
            return self.memory_size * self.num_envs
        return self.memory_index * self.num_envs + self.env_index

    def __repr__(self) -> str:
        """Say what it is, and where."""
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
        self,
        name: str,
        size: Any,
        dtype: torch.dtype | None = None,
        keep_dimensions: bool = False,
    ) -> bool:
        """Declare a tensor.

        Args:
            name: Its name.
            size: See `space_size`; None declares nothing.
            dtype: Torch's default one by default.
            keep_dimensions: Samples have the axes of size, a sequence; else one axis.

        Returns:
            Whether it is new.

        Raises:
            SchemaError: There is one of that name and another size or dtype, or it
                cannot be stored.
        """
        if size is None:
            return False
        if keep_dimensions and not isinstance(size, list | tuple):
            raise SchemaError(
                f"size: got {size!r} with keep_dimensions=True, expected a list or "
                "tuple of axes; give the space's shape"
            )
        shape = tuple(size) if keep_dimensions else (space_size(size),)
        known = self._declared.get(name)
        if known is not None:
            if known.shape != shape or dtype not in (None, known.dtype):
                raise SchemaError(
                    f"tensor {name!r}: got {list(shape)} {dtype}, expected "
                    f"{list(known.shape)} {known.dtype} as it is declared already; use "
                    "another name"
                )
            return False
        dtype = torch.get_default_dtype() if dtype is None else dtype
        tensor = Tensor.of(name, shape, dtype, name in self._mutable)
        if self.ring is not None:
            tensor = self._joined(self.ring, tensor)
        self._declared[name] = tensor
        self._plain = None
        self._kept[name] = keep_dimensions
        return True

    def _joined(self, ring: ReplayBuffer, tensor: Tensor) -> Tensor:
        """A tensor of a ring that is there: its field, or a new one of nothing."""
        path = tensor.path
        if path not in ring.schema:
            ring.add_field(path, tensor.field, tensor.nothing)
        stored = ring.schema[path]
        if (stored.shape, stored.dtype) != (tensor.field.shape, tensor.field.dtype):
            raise SchemaError(
                f"tensor {tensor.name!r}: got {tensor.field}, expected {stored} as in "
                f"{self.home.path}; declare it as it is stored, or give another path"
            )
        return Tensor.of(tensor.name, tensor.shape, tensor.dtype, stored.mutable)

    def _ready(self, given: Mapping[str, object]) -> ReplayBuffer:
        """The ring, made now that it is known what samples come with."""
        if self.ring is None:
            for name, tensor in self._declared.items():
                late = tensor.field.mutable or name not in given
                self._declared[name] = Tensor.of(name, tensor.shape, tensor.dtype, late)
            fields = {each.path: each.field for each in self._declared.values()}
            roles = found_roles(list(self._declared.values()))
            self.ring = self.home.ring(
                Schema.from_flat(fields, roles), self.memory_size, self.num_envs,
                layout="time_major", autoreset="same_step",
            )  # fmt: skip
        return self.ring

    def reset(self) -> None:
        """Give up all samples; tensors stay declared."""
        self.filled = False
        self.env_index = self.memory_index = 0
        if self.ring is not None:
            # In this order, a reset that is cut short is finished by the next opening.
            self.ring.commit()
            self._base = self.ring.heads
            told = self.ring.statistics | {RESET: self._base.tolist()}
            self.ring.set_statistics(told)
            self.ring.clear()

    def add_samples(self, **tensors: torch.Tensor) -> None:
        """Add samples, cell by cell from the one that is next.

        ``[num_envs, *size]`` is a row; fewer are cells of it, and of the next one; more
        are rows of a memory with one environment; without the first axis it is one
        cell. Tensors that are missing are nothing there: NaN, or 0.

        Raises:
            SchemaError: No tensor is known, shapes do not fit, or a whole row comes
                while one is half written.
        """
        if self._add_plain(tensors):
            return
        given = {
            name: value
            for name, value in tensors.items()
            if name in self._declared and value is not None
        }
        columns, count, whole = self._columns(given, list(tensors))
        if whole and self.env_index:
            raise SchemaError(
                f"add_samples: got samples of all {count} environments, expected those "
                f"from {self.env_index} on, as the row is half written; add the rest "
                "of it first"
            )
        ring, done = self._ready(given), 0
        for name in self._declared.keys() - given.keys():
            tensor = self._declared[name]
            columns[tensor.path] = tensor.stored(tensor.empty(count))
        while done < count:
            done += self._put(ring, columns, done, count)

    def _add_plain(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Add a whole row of tensors as they are stored; False where one is not so."""
        if self.ring is None or self.env_index or len(tensors) != len(self._declared):
            return False
        if self._plain is None:
            every = self._declared.items()
            self._plain = [(name, *each.plain(self.num_envs)) for name, each in every]
        columns: Columns = {}
        try:
            for name, path, given, dtype, stored in self._plain:
                array = tensors[name].numpy()
                if array.shape != given or array.dtype != dtype:
                    return False
                columns[path] = array if stored is None else array.reshape(stored)
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # A tensor on a device, with a gradient or without a numpy dtype; or none.
            return False
        self.ring.add(columns)
        self._moved(self.num_envs)
        return True

    def _columns(
        self, given: Mapping[str, torch.Tensor], names: list[str]
    ) -> tuple[Columns, int, bool]:
        """Samples by path, how many they are, and whether they are one whole row."""
        leads = {self._declared[name].lead(value) for name, value in given.items()}
        if len(leads) != 1:
            known = ", ".join(self._declared) or "none"
            told = f"{sorted(leads)} of samples" if leads else f"the tensors {names}"
            raise SchemaError(
                f"add_samples: got {told}, expected samples of one number for some of "
                f"the declared tensors ({known}); declare them with create_tensor"
            )
        lead = leads.pop()
        count, num_envs = (lead or (1,))[0], self.num_envs
        if count < 1 or (count > num_envs > 1):
            raise SchemaError(
                f"add_samples: got {count} samples, expected 1 to {num_envs}, one of "
                "each environment; add rows one by one"
            )
        columns = {}
        for name, value in given.items():
            tensor = self._declared[name]
            columns[tensor.path] = tensor.stored(value if lead else value[None])
        return columns, count, count == num_envs > 1 and bool(lead)

    def _put(self, ring: ReplayBuffer, columns: Columns, done: int, count: int) -> int:
        """Write some of the samples left: whole rows, or a part of one."""
        left, width = count - done, self.num_envs
        rows = min(left // width, self.memory_size - self.memory_index)
        if self.env_index or not rows:
            size = min(width - self.env_index, left)
            part = {path: array[done : done + size] for path, array in columns.items()}
            ring.add(part, env_ids=np.arange(self.env_index, self.env_index + size))
            self._moved(size)
            return size
        size = rows * width
        if size == count:
            part = columns
        else:
            part = {path: array[done : done + size] for path, array in columns.items()}
        if rows == 1:
            ring.add(part)
        else:
            ring.extend(
                {p: a.reshape(rows, width, *a.shape[1:]) for p, a in part.items()}
            )
        self._moved(size)
        return size

    def _moved(self, cells: int) -> None:
        rows, self.env_index = divmod(self.env_index + cells, self.num_envs)
        self.memory_index += rows
        if self.memory_index >= self.memory_size:
            self.memory_index = 0
            self.filled = True
            if self.export:
                self._export()

    def _export(self) -> None:
        """Save what is there, as it is full."""
        raise NotImplementedError


def check_format(name: str) -> None:
    """Refuse a format that memories are not saved in.

    Raises:
        SchemaError: It is none.
    """
    if name not in FORMATS:
        raise SchemaError(
            f"Unsupported export format: got {name!r}, expected one of "
            f"{', '.join(FORMATS)}; mmreplay.export(memory.ring, file) knows others"
        )
