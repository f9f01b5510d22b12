"""Saving and loading a memory, in files as skrl and rofunc lay them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from mmreplay.adapters.common.tensors import UNDER, Tensor
from mmreplay.adapters.skrl.cursor import Cursor
from mmreplay.adapters.skrl.tensor_file import (
    InterleavedReader,
    is_float,
    is_nan,
    rows_per_environment,
)
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Block, Reader, Writer
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.description import Description
from mmreplay.convert.transfer import open_source, refuse_inside, transfer
from mmreplay.disk import files
from mmreplay.errors import SchemaError, SourceError, undone_by
from mmreplay.schema import Field, Schema

FORMATS = {"pt": "pt", "npz": "npz", "csv": "csv"}
"""Suffixes of the files by the names of their formats."""
CELLS = "cells"
"""A tensor of a file that marks samples: 1 where one is, NaN where none is."""

Format = Literal["pt", "np", "npz", "csv"]
"""Names of formats; ``"np"`` is one of rofunc's alone."""
Tensors = Mapping[str, Tensor]


def suffix_of(name: str, formats: Mapping[str, str] = FORMATS) -> str:
    """Return the suffix of files of a format.

    Args:
        name: Of the format.
        formats: Suffixes by the names that are legal.

    Raises:
        SchemaError: It is none of them.
    """
    if name not in tuple(formats):  # it may be what no dict can look up
        raise SchemaError(
            f"Unsupported export format {name!r}. Pass one of {', '.join(formats)}; "
            "mmreplay.export(memory.ring, file) writes other formats."
        )
    return formats[name]


def save(ring: ReplayBuffer, target: Path, *, half: bool) -> None:
    """Write the samples that a ring holds, oldest first.

    Args:
        ring: Of a memory.
        target: The file; its suffix is of a legal format.
        half: The newest row is not whole.
    """
    refuse_inside(target, ring.path)
    found = registry.target_format(target, None)

    def open_writer(description: Description) -> Writer:
        return registry.open_writer(found, target, description, overwrite=False, layout="skrl")

    # Lines of csv are cells, and just those that are there.
    marked = found.name == "csv" or _nan_marks_end(ring, half=half)
    with BufferReader(ring) as reader:
        transfer(_Named(reader, cells=not marked), open_writer)


def _nan_marks_end(ring: ReplayBuffer, *, half: bool) -> bool:
    """Return whether the NaNs of a file's floats show where samples stop.

    They do where the newest sample of each environment has a number. Unwritten values
    are NaN, too.
    """
    env_ids = np.flatnonzero(ring.span.lengths)
    newest = ring.heads[env_ids] - 1
    fields = ring.schema.fields.items()
    floats = {path: field.dtype for path, field in fields if is_float(field.dtype)}
    marked = np.zeros(len(env_ids), bool)
    for path, dtype in floats.items():
        marked |= ~is_nan(ring.get_field(path, env_ids, newest), dtype)
    return bool(marked.all()) if floats else not half


def load(
    path: str, num_envs: int, tensors: Tensors, ready: Callable[[], tuple[ReplayBuffer, Cursor]]
) -> None:
    """Replace the samples of a ring with those of a file.

    A load that fails or is killed leaves the ring empty.

    Args:
        path: A file of `save`'s, or of skrl's or rofunc's own, of a legal suffix.
        num_envs: Environments of the memory.
        tensors: What to read, by name.
        ready: Called when the file fits, for the ring and its cursor.

    Raises:
        KeyError: A tensor is not in the file.
        SchemaError: One is of another size there.
        SourceError: It is of another number of environments, or damaged.
    """
    source = files.absolute(path)
    found = registry.source_format(source, None)
    with open_source(source, found, {"layout": "skrl"}) as opened:
        reader: Reader = opened
        if found.name == "csv":
            # A line a sample; a memory may have fewer samples than environments.
            reader = InterleavedReader(
                opened, rows_per_environment(opened.describe().rows, num_envs)
            )
        described = reader.describe()
        names = _names(described, tensors)
        if described.num_envs != num_envs:
            raise SourceError(
                f"{path} must hold {num_envs} environments, got {described.num_envs}. "
                f"Make the memory with num_envs={described.num_envs}."
            )
        ring, cursor = ready()
        cursor.reset(ring, loading=True)
        # Environments may differ in their rows then.
        with undone_by(cursor.reset, ring):
            for block in reader.blocks():
                _take(ring, names, block)
    cursor.loaded(ring)


def _names(described: Description, tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors by their names in the file.

    Raises:
        KeyError: One is not there.
        SchemaError: One is of another size there.
    """
    found = {}
    for name, tensor in tensors.items():
        # Files of before say the path.
        said = name if name in described.schema else tensor.path
        if said not in described.schema:
            raise KeyError(name)
        got, size = (math.prod(t.shape) for t in (described.schema[said], tensor))
        if got != size:
            raise SchemaError(
                f"tensor {name!r} has {got} numbers per sample in the file, but is "
                f"declared with {size}. Declare it as it was saved."
            )
        found[said] = tensor
    return found


def _take(ring: ReplayBuffer, names: Tensors, block: Block) -> None:
    """Add the rows of a block, environment by environment."""
    for env_id in np.unique(block.env_ids).tolist():
        rows = block.env_ids == env_id
        columns = {}
        for name, tensor in names.items():
            array = np.ascontiguousarray(block.columns[name][rows])
            columns[tensor.path] = tensor.stored(tensor.shown(array))[:, None]
        ring.extend(columns, env_ids=[env_id])


class _Plain(Schema):
    """Fields of a file in which no name has a meaning."""

    __slots__ = ()

    def __init__(self, fields: Mapping[str, Field]) -> None:
        object.__setattr__(self, "fields", dict(fields))
        object.__setattr__(self, "roles", {})


class _Named(Reader):
    """The rows of a memory's ring, its tensors named as the agent names them."""

    def __init__(self, reader: Reader, cells: bool) -> None:
        """Wrap a reader.

        Args:
            reader: Of the ring; closed by who opened it.
            cells: Tell which cells hold a sample, where nothing else does.
        """
        self.report, self._reader = reader.report, reader
        described = reader.describe()
        paths = described.schema.fields
        self._names = {path.removeprefix(UNDER): path for path in paths}
        fields = {name: paths[path] for name, path in self._names.items()}
        self._cells = cells and CELLS not in fields
        if self._cells:
            fields[CELLS] = Field((), "float32")
        self._description = replace(described, schema=_Plain(fields))

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for block in self._reader.blocks(rows_per_block):
            columns = {name: block.columns[path] for name, path in self._names.items()}
            if self._cells:
                columns[CELLS] = np.ones(len(block), np.float32)
            yield Block(columns, block.env_ids, block.positions, block.flags)

    def close(self) -> None:
        """Do nothing: the opener of the reader closes it."""
