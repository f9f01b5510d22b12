"""alf's replay buffers in the state dict of a checkpoint: rings with their positions.

A row is a time step: the observation, the reward and discount that led to it, and the
action taken at it. A row of step type LAST is an episode's final observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert import pt
from mmreplay.convert.array_file import ArrayColumn
from mmreplay.convert.base import Notes
from mmreplay.datasets import torch_files
from mmreplay.datasets.common.fields import make_schema
from mmreplay.datasets.common.fragments import NOTE, Fragment, FragmentReader, episodes
from mmreplay.datasets.common.rows import ColumnRows, is_scalar, scalar
from mmreplay.datasets.torch_files import TensorRows
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, undone_by
from mmreplay.schema.naming import left_out
from mmreplay.schema.source_names import name_fields, own_names_of

POSITIONS, SIZES = "_current_pos", "_current_size"
FIRST, LAST = 0, 2
MAX_ENVS = 1 << 20
STEP = "time_step"
LED = ("reward", "discount")
ENDS = dict.fromkeys(("terminated", "truncated"), "time_step|step_type")
"""Tensors that fields of ends are read from."""


class AlfReader(FragmentReader):
    """Reads each environment's ring, oldest row first."""

    def __init__(self, file: File, fields: Sequence[str] | None = None) -> None:
        notes = Notes()
        inner: dict[str, str] = {}
        columns = pt.read_columns(file, notes, fields=fields, own_names=inner)
        prefix = _prefix(file, columns)
        inner = {own: name.removeprefix(prefix) for own, name in inner.items()}
        self._file = file
        self._heads = _numbers(file, columns, prefix + POSITIONS)
        self._lengths = _numbers(file, columns, prefix + SIZES)
        self._names: dict[str, str] = {}
        self._tensors = self._find(columns, prefix, notes, fields)
        first = self._columns(0, 0, 0)
        first.pop("step_type")
        schema = make_schema(first, notes, file.path)
        notes.note(f"{NOTE}; step types and discounts say how episodes end")
        super().__init__(
            self._episodes,
            schema,
            notes,
            file.close,
            num_envs=len(self._heads),
            own_names=own_names_of(self._names, ENDS, inner),
        )

    def _find(
        self,
        columns: Mapping[str, ArrayColumn],
        prefix: str,
        notes: Notes,
        fields: Sequence[str] | None,
    ) -> dict[str, ArrayColumn]:
        """The ring's leaves by path, and the state beside them left out."""
        lengths, envs = set(), len(self._heads)
        held: dict[str, ArrayColumn] = {}
        for name, column in columns.items():
            leaf = name.removeprefix(prefix)
            if not name.startswith(prefix) or leaf.startswith("_"):
                continue
            if len(column.shape) < 2 or column.shape[0] != envs:
                message = f"tensor {name!r} was left out: it has no row a step"
                left_out(notes, _renamed(leaf), message)
                continue
            held[leaf] = column
            lengths.add(column.shape[1])
        paths = {leaf: _renamed(leaf) for leaf in held}
        if fields is not None:
            # Ends are read from these, whatever is selected.
            fields = [*fields, *(f"{STEP}|{name}" for name in ("step_type", "discount"))]
        self._names = name_fields(paths, self._file.path, notes, fields, ENDS)
        found = {path: held[leaf] for leaf, path in self._names.items()}
        if len(lengths) != 1 or not {"step_type", "observation"} <= {
            path.split("/")[0] for path in found
        }:
            raise FormatError(
                f"{self._file.path} must have step_type and observation of one length "
                f"under {prefix!r}, got {sorted(found)[:10]} of lengths "
                f"{sorted(lengths)[:5]}. It is not a replay buffer of alf."
            )
        self._slots = lengths.pop()
        bad = (self._lengths < 0) | (self._lengths > self._slots)
        if (bad | (self._heads < self._lengths)).any() or len(self._lengths) != envs:
            raise CorruptError(
                f"{self._file.path}: {SIZES} must be at most {self._slots} and at most "
                f"{POSITIONS}, got {self._lengths[:5].tolist()} and "
                f"{self._heads[:5].tolist()}. The file is damaged."
            )
        return found

    def _columns(self, env_id: int, first: int, count: int) -> dict[str, ColumnRows]:
        found: dict[str, ColumnRows] = {
            path: TensorRows(self._file, column, env_id, first, count, slots_first=False)
            for path, column in self._tensors.items()
        }
        if "reward" in found:
            found["reward"] = scalar(found["reward"])
        return found

    def _episodes(self) -> Iterator[Fragment]:
        for env_id in range(len(self._heads)):
            count = int(self._lengths[env_id])
            if not count:
                continue
            first = int(self._heads[env_id] - count) % self._slots
            columns = self._columns(env_id, first, count)
            kinds = columns.pop("step_type")
            if not is_scalar(kinds.shape):
                raise FormatError(
                    f"{self._file.path}: step_type must hold one number per row, got "
                    f"rows of shape {list(kinds.shape)}."
                )
            kind = kinds.read(0, count).reshape(count)
            last = kind == LAST
            over = np.ones(count, bool)
            if "discount" in columns and is_scalar(columns["discount"].shape):
                over = columns["discount"].read(0, count).reshape(count) == 0
            else:
                self.report.doubt(
                    "no discount says which ends are time limits: all ends are terminations"
                )
            name = f"{self._file.path}, environment {env_id}"
            yield from episodes(
                name, columns, LED, last & over, last & ~over, env_id, kind == FIRST
            )


def _prefix(file: File, columns: Mapping[str, ArrayColumn]) -> str:
    """Return the prefix of the names of the only replay buffer."""
    found = [n.removesuffix(POSITIONS) for n in columns if n.endswith(POSITIONS)]
    found = [prefix for prefix in found if prefix + SIZES in columns]
    if len(found) != 1:
        raise FormatError(
            f"{file.path} must hold one replay buffer with {POSITIONS} and {SIZES}, "
            f"got {len(found)} ({found[:5]}). Save the state_dict() of one buffer."
        )
    return found[0]


def _renamed(leaf: str) -> str:
    """A leaf's path here: alf joins names by |, and puts most under time_step."""
    parts = leaf.split("|")
    return "/".join(parts[1:] if parts[0] == STEP and len(parts) > 1 else parts)


def _numbers(file: File, columns: Mapping[str, ArrayColumn], name: str) -> NDArray[np.int64]:
    """Read a small tensor of one integer per environment."""
    column = columns[name]
    good = len(column.shape) == 1 and 0 < column.shape[0] <= MAX_ENVS
    if column.dtype != "int64" or not good:
        raise FormatError(
            f"{file.path}: {name!r} must be int64 with one number per environment, got "
            f"{column.dtype}{list(column.shape)}. It is not a replay buffer of alf."
        )
    found = np.empty(column.shape, column.stored)
    stream = column.open()
    stream.read_into(found.view(np.uint8).data)
    stream.finish()
    return found.astype(np.int64)


def recognizes(path: Path) -> bool:
    """Return whether a torch file names what alf's rings have; torch is not asked."""
    return torch_files.names(path, POSITIONS.encode(), SIZES.encode())


def open_reader(path: Path, *, fields: Sequence[str] | None = None) -> AlfReader:
    """Open a checkpoint, or a replay buffer's state dict, as a source.

    No pickle is run: torch reads it with ``weights_only=True``.

    Args:
        path: The file.
        fields: See `name_fields`.
    """
    file = File.open(path, None)
    with undone_by(file.close):
        return AlfReader(file, fields)
