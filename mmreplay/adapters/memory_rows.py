"""skrl's and rofunc's memories on disk: tensors that are declared, and samples added.

A *cell* numbers the samples of a memory as its authors do, row by row and environment
by environment: ``row * num_envs + env_id``. Row r holds the newest step whose number,
counted from the last reset, is r modulo memory_size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.home import (
    MEMORIES,
    BufferLocation,
    PickledByPath,
    StrPath,
    fixed,
)
from mmreplay.adapters.memory_cursor import Cursor, cursor_of
from mmreplay.adapters.memory_files import Format, check_format
from mmreplay.adapters.tensors import (
    Tensor,
    Way,
    found_roles,
    looked,
    space_shape,
    space_size,
)
from mmreplay.adapters.values import LOOKS, check_counts, device_of, seed_of_draws
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import SchemaError, shown
from mmreplay.samplers.base import Sampler, truth, whole
from mmreplay.schema import Schema

MUTABLE = ("values", "returns", "advantages")
"""What on-policy agents write back; see `Memory.set_tensor_by_name`."""

Ids = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]


class Rows(PickledByPath):
    """Named tensors ``[memory_size, num_envs, *size]`` in files.

    Attributes:
        memory_size: Rows kept of each environment; fixed.
        num_envs: Environments; fixed.
        device: Where results go.
        sampling_indexes: Cells drawn last, int64, or None.
        home: Where the data is.
        ring: The `mmreplay.ReplayBuffer`, from the first sample on, else None.
    """

    system: ClassVar[str] = "memory"
    shaped: ClassVar[bool] = False
    """Whether spaces and numbers keep dimensions as well, not sequences only."""
    held = "ring"
    memory_size: int = fixed("memory_size", "make another memory with another path")
    num_envs: int = fixed("num_envs", "make another memory with another path")

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
                this machine lacks falls back to the default, with a RuntimeWarning.
            export: Save the memory each time that it is full.
            export_format: ``"pt"``, ``"npz"`` or ``"csv"``.
            export_directory: Where `save` puts files.
            path: The folder; see `Home`.
            resume: Go on with the buffer that is there.
            mutable: Tensors that `set_tensor_by_name` may write, beside those that
                the first samples come without.
            seed: Of the draws; by default torch's own.

        Raises:
            SchemaError: The format is unknown, a number is not at least 1, another
                argument is of a wrong type, or the buffer that is there has another
                size.
            FormatError: The path holds a buffer, and resume is False.
        """
        check_format(export_format)
        check_counts(memory_size=memory_size, num_envs=num_envs)
        truth("export", export)
        if not isinstance(export_directory, str | os.PathLike):
            raise SchemaError(
                f"export_directory: got {shown(export_directory)}, expected a path; "
                "leave it out for the current directory"
            )
        if isinstance(mutable, str):
            raise SchemaError(
                f"mutable: got {mutable!r:.80}, expected a sequence of names; pass "
                f"[{mutable!r:.80}]"
            )
        if seed is not None:
            whole("seed", seed, 0, "leave it out for torch's own")
        self.memory_size, self.num_envs = int(memory_size), int(num_envs)
        self.device = device_of(device)
        self._on_cpu = self.device.type == "cpu"
        self.export, self.export_format = export, export_format
        self.export_directory = export_directory
        self.sampling_indexes: torch.Tensor | None = None
        self._declared: dict[str, Tensor] = {}
        self._kept: dict[str, bool] = {}
        self._plain: list[Way] | None = None
        self._mutable = frozenset(mutable)
        self._seed = seed_of_draws() if seed is None else seed
        self._cursor = Cursor(self.num_envs)
        self.home = BufferLocation(self.system, path, resume)
        self.ring: ReplayBuffer | None = self._opened(None)

    def _open_again(self, sampler: Sampler | None) -> None:
        self.ring = self._opened(sampler)

    def _opened(self, sampler: Sampler | None) -> ReplayBuffer | None:
        """The ring, if it is there, and its cursor.

        Raises:
            SchemaError: It is of another size, as after a resize.
        """
        ring = self.home.reopen(sampler)
        if ring is not None:
            got = ring.capacity, ring.num_envs
            expected = self.memory_size, self.num_envs
            if got != expected:
                raise SchemaError(
                    f"{self.home.path} holds a memory of (memory_size, num_envs) "
                    f"{got}, got {expected}, expected the same; give another path"
                )
            self._cursor = cursor_of(ring)
        return ring

    def __getstate__(self) -> dict[str, Any]:
        """See `Kept`; the cursor is the ring's."""
        state = super().__getstate__()
        del state["_cursor"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `Kept`."""
        self._cursor = Cursor(state["num_envs"])
        super().__setstate__(state)
        # The machine that it was pickled on may have had another.
        self.device = device_of(self.device)
        self._on_cpu = self.device.type == "cpu"

    @property
    def cursor(self) -> Cursor:
        """What is written next, by whichever face of the ring."""
        if not self._cursor.sure and self.ring is not None:
            self._cursor.follow(self.ring)
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
            keep_dimensions: Samples have the axes of size; else they have one.

        Returns:
            Whether it is new.

        Raises:
            SchemaError: There is one of that name and another size or dtype, or it
                cannot be stored.
        """
        if size is None:
            return False
        shape = (
            space_shape(size, self.shaped) if keep_dimensions else (space_size(size),)
        )
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
        if not isinstance(dtype, torch.dtype):
            raise SchemaError(
                f"dtype: got {shown(dtype)} for tensor {name!r}, expected a "
                "torch.dtype; such as torch.float32"
            )
        tensor = Tensor.of(name, shape, dtype, name in self._mutable)
        for other in self._declared.values():
            if other.path == tensor.path:
                raise SchemaError(
                    f"tensor {name!r}: got the name that {other.name!r} is stored "
                    "under, expected another one; choose it"
                )
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
            if ring.metadata.user.get("adapter") not in MEMORIES:
                raise SchemaError(
                    f"tensor {tensor.name!r}: got the buffer {self.home.path}, which "
                    "has no such field and was not made by a memory, expected one that "
                    "was; give another path"
                )
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
            self._cursor = cursor_of(self.ring)
        return self.ring

    def reset(self) -> None:
        """Give up all samples; tensors stay declared."""
        if self.ring is not None:
            self._cursor.reset(self.ring)

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
                if ring.add_as_is(columns) is None:
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
        self, given: Mapping[str, torch.Tensor], names: list[str]
    ) -> tuple[Columns, int, bool]:
        """Samples by path, how many they are, and whether they are one whole row."""
        # One sample may come with the axis or without it, as in what broadcasts.
        leads = {self._declared[n].lead(value) or (1,) for n, value in given.items()}
        if len(leads) != 1:
            known = ", ".join(self._declared) or "none"
            told = f"{sorted(leads)} of samples" if leads else f"the tensors {names}"
            raise SchemaError(
                f"add_samples: got {told}, expected samples of one number for some of "
                f"the declared tensors ({known}); declare them with create_tensor"
            )
        (count,), num_envs = leads.pop(), self.num_envs
        if count < 1 or (count > num_envs > 1):
            raise SchemaError(
                f"add_samples: got {count} samples, expected 1 to {num_envs}, one of "
                "each environment; add rows one by one"
            )
        columns = {}
        for name, value in given.items():
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
                ring.extend(
                    {p: a.reshape(rows, width, *a.shape[1:]) for p, a in part.items()}
                )
            full = cursor.moved(size, ring)
        except BaseException:
            cursor.sure = False
            raise
        if full and self.export:
            self._export()
        return size

    def _export(self) -> None:
        """Save what is there, as it is full."""
        raise NotImplementedError
