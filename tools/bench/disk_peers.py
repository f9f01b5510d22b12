"""Rows of pixels on disk, behind one face: ours, and what others keep them in.

Each holds one field of bytes, adds rows and blocks, and draws single rows or runs of
rows, its own way where it has one. What has no way to draw gets random numbers and is
asked for those rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay import Field, ReplayBuffer, Schema, SequenceSampler, UniformSampler
from tools.bench.turns import OURS, chosen

Pixels = NDArray[np.uint8]
EPISODE = 1000
SHARD = 1024


@dataclass(frozen=True, slots=True)
class RingShape:
    """What is stored and drawn.

    Attributes:
        row: Of a stored row, in bytes.
        rows: Of the ring.
        batch: Rows a batch, or runs of rows.
        length: Rows a run; 1 for single rows.
    """

    row: tuple[int, ...]
    rows: int
    batch: int
    length: int = 1

    def starts(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Random first rows of a batch, int64 ``[batch]``."""
        return rng.integers(self.rows - self.length + 1, size=self.batch)

    def every(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """All rows of a batch, int64 ``[batch * length]``."""
        return (starts[:, None] + np.arange(self.length)).reshape(-1)


class Side(Protocol):
    """One way to keep rows on disk, that begins as `MAKERS` says, in a folder."""

    def extend(self, rows: Pixels) -> None:
        """Store a block ``[N, *row]``."""

    def add(self, row: Pixels) -> None:
        """Store one row ``[*row]``; over the oldest where the ring is full."""

    def draw(self) -> Pixels:
        """Draw a batch ``[batch * length, *row]``, runs one after another."""

    def close(self) -> None:
        """Give up what is open."""


class Ours:
    """Our ring, through `ReplayBuffer.sample`."""

    def __init__(self, folder: Path, shape: RingShape) -> None:
        """Create it."""
        # No observation role, so that a draw reads this field alone, once.
        schema = Schema({"pixels": Field(shape.row, "uint8")})
        sampler: Any = UniformSampler(seed=0)
        if shape.length > 1:
            sampler = SequenceSampler(shape.length, sampler, boundary="any")
        self.buffer = ReplayBuffer.create(folder, schema, shape.rows, sampler=sampler)
        self._shape = shape

    def extend(self, rows: Pixels) -> None:
        """See `Side`."""
        self.buffer.extend(pixels=rows)

    def add(self, row: Pixels) -> None:
        """See `Side`."""
        self.buffer.add(pixels=row)

    def draw(self) -> Pixels:
        """See `Side`."""
        drawn: Pixels = self.buffer.sample(self._shape.batch)["pixels"]
        return drawn.reshape(-1, *self._shape.row)

    def close(self) -> None:
        """See `Side`."""
        self.buffer.close()


class Loaded:
    """Our ring, through a `ReplayLoader` beside the writer."""

    def __init__(self, folder: Path, shape: RingShape) -> None:
        """Create it."""
        self._ours, self._shape = Ours(folder, shape), shape
        self.extend, self.add = self._ours.extend, self._ours.add
        self._loader: Any = None

    def draw(self) -> Pixels:
        """See `Side`."""
        if self._loader is None:
            loader = import_module("mmreplay").ReplayLoader
            self._loader = loader(self._ours.buffer, self._shape.batch)
        drawn: Pixels = next(self._loader)["pixels"].numpy()
        return drawn.reshape(-1, *self._shape.row)

    def close(self) -> None:
        """See `Side`."""
        if self._loader is not None:
            self._loader.close()
        self._ours.close()


class LazyMemmap:
    """TorchRL's ReplayBuffer over LazyMemmapStorage; runs by its SliceSampler."""

    def __init__(self, folder: Path, shape: RingShape) -> None:
        """Make one."""
        self._torch = import_module("torch")
        self._dict = import_module("tensordict").TensorDict
        data = import_module("torchrl.data")
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self._shape, self._count = shape, 0
        options: dict[str, Any] = {}
        if shape.length > 1:
            samplers = import_module("torchrl.data.replay_buffers.samplers")
            options["sampler"] = samplers.SliceSampler(
                num_slices=shape.batch, end_key="end", strict_length=True, cache_values=True
            )
        self._buffer = data.ReplayBuffer(
            storage=data.LazyMemmapStorage(shape.rows, scratch_dir=str(folder)),
            batch_size=shape.batch * shape.length,
            **options,
        )

    def extend(self, rows: Pixels) -> None:
        """See `Side`."""
        fields = {"pixels": self._torch.from_numpy(rows)}
        if self._shape.length > 1:
            numbers = self._count + np.arange(len(rows))
            fields["end"] = self._torch.from_numpy(numbers % EPISODE == EPISODE - 1)
        self._buffer.extend(self._dict(fields, batch_size=[len(rows)]))
        self._count += len(rows)

    def add(self, row: Pixels) -> None:
        """See `Side`."""
        self._buffer.add(self._dict({"pixels": self._torch.from_numpy(row)}))

    def draw(self) -> Pixels:
        """See `Side`."""
        drawn: Any = self._buffer.sample()
        return np.asarray(drawn["pixels"])

    def close(self) -> None:
        """See `Side`."""


class Cpprb:
    """cpprb's ReplayBuffer with mmap_prefix; it has no runs, and is asked for rows."""

    def __init__(self, folder: Path, shape: RingShape) -> None:
        """Make one; its file is as large as the ring from here on."""
        self._shape, self._rng = shape, np.random.default_rng(2)
        fields = {"pixels": {"shape": shape.row, "dtype": np.uint8}}
        self._buffer = import_module("cpprb").ReplayBuffer(
            shape.rows, fields, mmap_prefix=str(folder / "cpprb")
        )

    def extend(self, rows: Pixels) -> None:
        """See `Side`."""
        self._buffer.add(pixels=rows)

    def add(self, row: Pixels) -> None:
        """See `Side`."""
        self._buffer.add(pixels=row)

    def draw(self) -> Pixels:
        """See `Side`."""
        shape = self._shape
        if shape.length == 1:
            drawn = self._buffer.sample(shape.batch)
        else:
            rows = shape.every(shape.starts(self._rng))
            drawn = self._buffer._encode_sample(rows)
        return np.asarray(drawn["pixels"])

    def close(self) -> None:
        """See `Side`."""


class Memmap:
    """numpy's memmap, indexed by an array of rows."""

    def __init__(self, folder: Path, shape: RingShape) -> None:
        """Make the file, sparse."""
        self._shape, self._rng = shape, np.random.default_rng(3)
        self.file = folder / "rows"
        self._rows: Any = np.memmap(self.file, np.uint8, "w+", shape=(shape.rows, *shape.row))
        self._count = 0

    def extend(self, rows: Pixels) -> None:
        """See `Side`."""
        first = self._count % self._shape.rows
        self._rows[first : first + len(rows)] = rows
        self._count += len(rows)

    def add(self, row: Pixels) -> None:
        """See `Side`."""
        self._rows[self._count % self._shape.rows] = row
        self._count += 1

    def draw(self) -> Pixels:
        """See `Side`."""
        every = self._shape.every(self._shape.starts(self._rng))
        return np.asarray(self._rows[every])

    def close(self) -> None:
        """See `Side`."""


class Columns:
    """A dataset of h5py's or an array of zarr-python's, as large as the ring."""

    def __init__(self, shape: RingShape, rows: Any, picked: Callable[..., Any]) -> None:
        """Wrap one.

        Args:
            shape: What it holds.
            rows: Takes and gives slices.
            picked: Gives rows by number, sorted and each once.
        """
        self._shape, self._rng = shape, np.random.default_rng(4)
        self._rows, self._picked, self._count = rows, picked, 0

    def extend(self, rows: Pixels) -> None:
        """See `Side`."""
        self._rows[self._count : self._count + len(rows)] = rows
        self._count += len(rows)

    def add(self, row: Pixels) -> None:
        """See `Side`."""
        self.extend(row[None])

    def draw(self) -> Pixels:
        """See `Side`."""
        starts = self._shape.starts(self._rng)
        if self._shape.length > 1:
            ends = starts + self._shape.length
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            return np.concatenate([self._rows[a:b] for a, b in pairs])
        rows, places = np.unique(starts, return_inverse=True)
        return np.asarray(self._picked(rows))[places]

    def close(self) -> None:
        """See `Side`."""
        if hasattr(self._rows, "file"):
            self._rows.file.close()


def h5py(folder: Path, shape: RingShape) -> Columns:
    """h5py's contiguous dataset."""
    file = import_module("h5py").File(folder / "rows.h5", "w")
    rows = file.create_dataset("pixels", (shape.rows, *shape.row), "u1")
    return Columns(shape, rows, lambda picked: rows[picked])


def zarr(folder: Path, shape: RingShape) -> Columns:
    """zarr-python's array of one row a chunk, uncompressed, in shards."""
    shard = min(SHARD, shape.rows)
    array = import_module("zarr").create_array(
        store=str(folder / "rows.zarr"),
        shape=(shape.rows, *shape.row),
        dtype="u1",
        chunks=(1, *shape.row),
        shards=(shard, *shape.row),
        compressors=None,
    )
    return Columns(shape, array, lambda picked: array.oindex[picked])


MAKERS: dict[str, tuple[str, Callable[[Path, RingShape], Side]]] = {
    OURS: ("mmreplay", Ours),
    "np_memmap": ("numpy", Memmap),
    "torchrl_lazy_memmap": ("torchrl", LazyMemmap),
    "cpprb_mmap": ("cpprb", Cpprb),
    "h5py": ("h5py", h5py),
    "zarr_python": ("zarr", zarr),
}
LOADER = "mmreplay_loader"
RINGS: dict[str, tuple[str, Callable[[Path, RingShape], Side]]] = {
    **{name: MAKERS[name] for name in list(MAKERS)[:4]},
    LOADER: ("torch", Loaded),
}
"""Those that go on when they are full."""


def installed(
    wanted: str | None = None, makers: Mapping[str, tuple[str, Any]] = MAKERS
) -> list[str]:
    """Names of the others that can be imported, of those wanted; see `chosen`."""
    theirs = {n: module for n, (module, _) in makers.items() if not n.startswith(OURS)}
    return chosen(theirs, wanted)


def make(name: str, folder: Path, shape: RingShape) -> Side:
    """Make one in a new folder of its own."""
    folder.mkdir(parents=True)
    return (MAKERS | RINGS)[name][1](folder, shape)
