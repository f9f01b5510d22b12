"""pytorchrl's storages as a dict of tensors ``[steps, processes, *shape]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmreplay.convert import pt
from mmreplay.convert.array_file import ArrayColumn
from mmreplay.convert.base import Notes
from mmreplay.datasets import torch_files
from mmreplay.datasets.common.fields import (
    Ends,
    Flags,
    ambiguous_end_note,
    check_done,
    ends_of,
    make_schema,
    rename_top,
)
from mmreplay.datasets.common.fragments import TRUNCATED_FIELD, Fragment, FragmentReader
from mmreplay.datasets.common.rows import ColumnRows, scalar
from mmreplay.datasets.torch_files import TensorRows
from mmreplay.disk.files import File
from mmreplay.errors import FormatError, SchemaError, undone_by
from mmreplay.nesting import under
from mmreplay.schema.naming import left_out
from mmreplay.schema.source_names import name_fields, own_names_of

NAMES = {"Observation": "observation", "Action": "action", "Reward": "reward"}
"""Names of fields there, and here."""
NEXT, DONE, NEXT_DONE = "NextObservation", "Done", "NextDone"
SIZE, STEP = "size", "step"
ENDS = dict.fromkeys(("terminated", "truncated"), NEXT_DONE)
"""Tensors that fields of ends are read from."""


class PytorchrlReader(FragmentReader):
    """Reads each process's rows, oldest first."""

    def __init__(
        self,
        file: File,
        size: int | None,
        step: int | None,
        done: str | None,
        fields: Sequence[str] | None = None,
    ) -> None:
        self._file, self._meant = file, done
        self._notes = notes = Notes()
        numbers: dict[str, int] = {}
        inner: dict[str, str] = {}
        columns = pt.read_columns(file, notes, numbers, fields, inner)
        self._tensors, self._slots, self._envs = _tensors(file, columns, notes)
        size = numbers.get(SIZE) if size is None else size
        step = numbers.get(STEP) if step is None else step
        self._steps, self._first = self._rows_and_oldest(size, step)
        paths = {
            name: rename_top(name, NAMES)
            for name in self._tensors
            if name.partition("/")[0] not in (NEXT, DONE, NEXT_DONE)
        }
        self._names = name_fields(paths, file.path, notes, fields, ENDS)
        first = self._fragment(0)
        schema = make_schema(first.columns, notes, file.path)
        super().__init__(
            lambda: map(self._fragment, range(self._envs)),
            schema,
            notes,
            file.close,
            num_envs=self._envs,
            own_names=own_names_of(self._names, ENDS, inner),
        )

    def _rows_and_oldest(self, size: int | None, step: int | None) -> tuple[int, int]:
        """Rows, and the slot of the oldest."""
        if size is None:
            self._notes.doubt(
                "the file does not say how many rows were written, or which row is the "
                "newest: all were read, in the file's order; pass size= and step="
            )
        elif size == self._slots and step is None:
            self._notes.doubt(
                "the file does not say which row is the newest: all were read in the "
                "file's order; pass step="
            )
        size = self._slots if size is None else size
        step = 0 if step is None else step
        if not 0 < size <= self._slots or not 0 <= step <= self._slots:
            raise FormatError(
                f"{self._file.path}: size {size} and step {step} must be within "
                f"{self._slots} rows. Pass the values of the storage."
            )
        return size, step % self._slots if size == self._slots else 0

    def _rows(self, name: str, env_id: int) -> ColumnRows:
        return TensorRows(
            self._file, self._tensors[name], env_id, self._first, self._steps, slots_first=True
        )

    def _fragment(self, env_id: int) -> Fragment:
        columns = {p: self._rows(name, env_id) for name, p in self._names.items()}
        next_obs = {}
        for name in under(self._tensors, NEXT):
            own = name.replace(NEXT, "Observation", 1)
            path = self._names.get(own, rename_top(own, NAMES))
            if own in self._names or path not in columns:
                next_obs[path] = self._rows(name, env_id)
        if "reward" in columns:
            columns["reward"] = scalar(columns["reward"])
        seen = {path for path in columns if path.split("/")[0] == "observation"}
        if next_obs.keys() != seen:
            self._notes.doubt(
                f"{NEXT!r} are of {sorted(next_obs)[:9]} and observations of "
                f"{sorted(seen)[:9]}: what was seen after the last step of an episode "
                "is not known"
            )
        return Fragment(
            f"{self._file.path}, process {env_id}",
            self._steps,
            columns,
            next_obs if next_obs.keys() == seen else {},
            self._ends(env_id),
            env_id=env_id,
            is_episode=False,
        )

    def _ends(self, env_id: int) -> Ends:
        if self._meant is None:
            self._notes.doubt(ambiguous_end_note(NEXT_DONE))
        flags = Flags(
            f"{self._file.path}, process {env_id}: {NEXT_DONE!r}",
            self._rows(NEXT_DONE, env_id),
            self._steps,
        )
        if self._meant == TRUNCATED_FIELD:
            return ends_of(None, flags)
        return ends_of(flags, None)


def _tensors(
    file: File, columns: Mapping[str, ArrayColumn], notes: Notes
) -> tuple[dict[str, ArrayColumn], int, int]:
    """Tensors of one row a step and process, with how many there are of each."""
    done = columns.get(NEXT_DONE)
    shape = () if done is None else done.shape[:2]
    if len(shape) < 2 or 0 in shape:
        raise FormatError(
            f"{file.path} has no {NEXT_DONE!r} of steps and processes, which "
            "pytorchrl's storages have. Name its format with format= (--from)."
        )
    found = {}
    for name, column in columns.items():
        if column.shape[:2] == shape:
            found[name] = column
        else:
            message = f"tensor {name!r} was left out: it has no row a step"
            field = rename_top(name.replace(NEXT, "next_obs", 1), NAMES)
            left_out(notes, field, message)
    return found, shape[0], shape[1]


def recognizes(path: Path) -> bool:
    """Return whether a torch file has the names of a pytorchrl storage."""
    return torch_files.names(path, NEXT.encode(), NEXT_DONE.encode())


def open_reader(
    path: Path,
    *,
    size: int | None = None,
    step: int | None = None,
    done: str | None = None,
    fields: Sequence[str] | None = None,
) -> PytorchrlReader:
    """Open a dict of a storage's tensors as a source.

    No pickle is run: torch reads it with ``weights_only=True``.

    Args:
        path: The file.
        size: Rows that were written, the storage's ``size``; that of the file by
            default.
        step: The slot that would be written next, likewise.
        done: What ``NextDone`` means, ``"terminated"`` or ``"truncated"``.
        fields: See `name_fields`.
    """
    check_done(done)
    for name, number in (("size", size), ("step", step)):
        if number is not None and type(number) is not int:
            raise SchemaError(
                f"{name} must be an integer, as in the storage, got {number!r}. Leave "
                "it out if you do not know it."
            )
    file = File.open(path, None)
    with undone_by(file.close):
        return PytorchrlReader(file, size, step, done, fields)
