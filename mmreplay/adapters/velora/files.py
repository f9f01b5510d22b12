"""velora's pair of files as a source and a target; see `registry.FileLayout`.

``<prefix>state.safetensors`` has six float32 tensors, and ``<prefix>metadata.json`` a
cursor; both are in one folder. A row is a transition with its next state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.convert import safetensors
from mmreplay.convert.array_file import ArrayColumn, ArrayFile, Stream
from mmreplay.convert.base import Block, Notes, Reader, Writer, doubt_priorities
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.episode_ends import NamedEnds
from mmreplay.convert.safetensors import SafetensorsPlan
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.convert.undescribed import PlainReader
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.episodes import END, FINAL, START, TERMINATED
from mmreplay.errors import CorruptError, FormatError, SchemaError, undone_by
from mmreplay.nesting import under
from mmreplay.schema.dtypes import from_bfloat16_bits
from mmreplay.strict_json import Json

METADATA, STATE = "metadata.json", "state.safetensors"
PREFIX = "buffer_"
MODEL = f"model_{STATE}"
"""An agent's parameters, in a checkpoint."""
TENSORS = ("states", "actions", "rewards", "next_states", "dones", "hiddens")
HIDDEN = ("hidden", "hiddens", "hidden_state", "hidden_states")
NUMBERS = ("capacity", "state_dim", "action_dim", "hidden_dim", "position", "size")
SINGLE = ("rewards", "dones")
MAX_NBYTES = 1 << 20
Floats = NDArray[np.float32]
Pending = tuple[dict[str, NDArray[np.generic]], NDArray[np.uint8]]
"""Columns and flags of an environment's newest row, which waits for the next row."""


def open_reader(_: str, path: Path) -> Reader:
    """Open velora's pair by its folder or its tensors.

    Raises:
        FormatError: It is none.
        CorruptError: Its parts contradict each other.
    """
    found = find(path)
    if found is None and _is_checkpoint(path):
        raise FormatError(
            f"{path} is a checkpoint of velora without its buffer. Save it with buffer=True."
        )
    if found is None:
        raise FormatError(
            f"{path} is not a pair of velora's files, {STATE} and {METADATA} with one "
            "prefix. Name the file of tensors."
        )
    file = File.open(found[0], None)
    with undone_by(file.close):
        return _reader(file, found[1])


def recognizes(path: Path) -> bool:
    """Return whether a folder is velora's by its names, or a file by its tensors.

    Anybody's file may be called so, and lie beside some metadata.json.
    """
    if path.is_dir():
        return find(path) is not None or _is_checkpoint(path)
    if find(path) is None:
        return False
    with closing(File.open(path, None)) as file:
        metadata, columns = safetensors.parse(file)
    return KEY not in metadata and set(columns) == set(TENSORS)


def open_writer(
    _: str,
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    prefix: str | None = None,
) -> Writer:
    """Make velora's pair as a target; see `registry.FileLayout`."""
    start = PREFIX if prefix is None else prefix
    return VeloraWriter(target, description, start, overwrite)


def planned(_: str, description: Description, *, prefix: str | None = None) -> None:
    """Refuse what the pair cannot hold; see `registry.FileLayout`."""
    if prefix is not None:
        check_prefix(prefix)
    TensorFields(description)


class VeloraWriter(StagedWriter):
    """Writes the pair into a folder; see `Writer`.

    Where next observations are not stored, the next row has them. Steps whose next
    observation is unknown are left out.
    """

    def __init__(
        self, target: Path, description: Description, prefix: str, overwrite: bool
    ) -> None:
        check_prefix(prefix)
        self.nbytes = 0
        self.notes = Notes()
        self._prefix = prefix
        self._tensors_of = parts = TensorFields(description)
        self._derived = not parts.paths["next_states"]
        self._ends = NamedEnds(description)
        self._ends.add_notes(self.notes, both=True)
        doubt_priorities(self.notes, description, "velora's layout")
        self._pending: dict[int, Pending] = {}
        self._capacity = max(1, description.rows)
        self._size = self._lost = 0
        self._widths = {name: parts.width(name) for name in TENSORS}
        arrays = {
            name: ("float32", (self._capacity, width)) for name, width in self._widths.items()
        }
        plan = SafetensorsPlan(arrays, {})
        self._file: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        with undone_by(self.abort):
            file = File.create(self._staging.path / f"{prefix}{STATE}", plan.nbytes)
            self._file = ArrayFile(file, plan, self._capacity)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        block = self._ends.marked(block)
        used = sorted({path for paths in self._tensors_of.paths.values() for path in paths})
        for env_id in np.unique(block.env_ids).tolist():
            part = block.select(block.env_ids == env_id)
            columns, flags = {path: part.columns[path] for path in used}, part.flags
            if self._derived:
                self._derive(env_id, columns, flags)
            else:
                steps = (flags & FINAL) == 0
                known = {path: column[steps] for path, column in columns.items()}
                self._put(known, flags[steps], None)

    def _derive(
        self, env_id: int, columns: dict[str, NDArray[np.generic]], flags: NDArray[np.uint8]
    ) -> None:
        """Write the rows before the last one, with the next observations."""
        if env_id in self._pending:
            pending, before = self._pending[env_id]
            columns = {p: np.concatenate([pending[p], c]) for p, c in columns.items()}
            flags = np.concatenate([before, flags])
        self._pending[env_id] = (
            {path: column[-1:].copy() for path, column in columns.items()},
            flags[-1:].copy(),
        )
        steps, after = flags[:-1], flags[1:]
        ended = (steps & END) != 0
        follows = np.where(ended, (after & FINAL) != 0, (after & START) == 0)
        self._put_known(columns, steps, follows)

    def _put_known(
        self,
        columns: Mapping[str, NDArray[np.generic]],
        flags: NDArray[np.uint8],
        follows: NDArray[np.bool_],
    ) -> None:
        """Write the steps whose next observation is known or not needed.

        Args:
            columns: ``[N + 1, *shape]`` or, of the very last row, ``[1, *shape]``.
            flags: uint8 ``[N]``.
            follows: bool ``[N]``, whether the next row has the next observation.
        """
        count = len(flags)
        step = (flags & FINAL) == 0
        # The next observation of a terminated step has no effect: use its own.
        known = step & (follows | ((flags & TERMINATED) != 0))
        self._lost += int((step & ~known).sum())
        rows = np.flatnonzero(known)
        after = rows + follows[rows]
        paths = self._tensors_of.paths["states"]
        next_obs = {path: columns[path][after] for path in paths}
        here = {path: column[:count][known] for path, column in columns.items()}
        self._put(here, flags[known], next_obs)

    def _put(
        self,
        columns: Mapping[str, NDArray[np.generic]],
        flags: NDArray[np.uint8],
        next_obs: Mapping[str, NDArray[np.generic]] | None,
    ) -> None:
        count = len(flags)
        paths = self._tensors_of.paths
        tensors = {
            name: self._tensor(name, columns, paths[name], count)
            for name in ("states", "actions", "rewards", "hiddens")
        }
        tensors["next_states"] = (
            self._tensor("next_states", columns, paths["next_states"], count)
            if next_obs is None
            else self._tensor("states", next_obs, paths["states"], count)
        )
        tensors["dones"] = ((flags & END) != 0).astype(np.float32)[:, None]
        self._write(tensors, count)
        self._size += count

    def _tensor(
        self,
        name: str,
        columns: Mapping[str, NDArray[np.generic]],
        paths: tuple[str, ...],
        count: int,
    ) -> Floats:
        """The fields of a tensor beside each other, float32 ``[N, width]``."""
        parts = [self._floats(path, columns[path]) for path in paths]
        made = [part.reshape(count, -1) for part in parts] if count else []
        if not made:
            return np.zeros((count, self._widths[name]), np.float32)
        return np.concatenate(made, axis=1)

    def _floats(self, path: str, column: NDArray[np.generic]) -> Floats:
        if self._tensors_of.fields[path].dtype == "bfloat16":
            return from_bfloat16_bits(column)
        with np.errstate(over="ignore"):
            found: Floats = column.astype(np.float32)
        if column.dtype.itemsize >= 4 and column.dtype != np.float32:
            same = found.astype(column.dtype) == column
            if not (same | (column != column)).all():
                self.notes.doubt(
                    f"field {path!r} of {column.dtype} was rounded to float32, the one "
                    "dtype of velora's layout"
                )
        return found

    def _write(self, tensors: Mapping[str, NDArray[np.generic]], count: int) -> None:
        assert self._file is not None
        nothing = np.zeros(count, np.int64)
        block = Block(tensors, nothing, nothing, np.zeros(count, np.uint8))
        self._file.write(block)

    def finish(self) -> None:
        """See `Writer.finish`."""
        for columns, flags in self._pending.values():
            self._put_known(columns, flags, np.zeros(1, bool))
        self._pending.clear()
        self._pad()
        assert self._file is not None
        self._file.finish()
        metadata = {
            "capacity": self._capacity,
            "state_dim": self._widths["states"],
            "action_dim": self._widths["actions"],
            "hidden_dim": self._widths["hiddens"],
            "position": self._size % self._capacity,
            "size": self._size,
            "device": None,
        }
        path = self._staging.path / f"{self._prefix}{METADATA}"
        files.replace_bytes(path, json.dumps(metadata, indent=2).encode())
        self._add_notes()
        self.nbytes = self._staging.publish()

    def _pad(self) -> None:
        """Fill the rows that no transition came for with zeros, as velora does."""
        assert self._file is not None
        while self._file.rows_left:
            count = min(self._file.rows_left, 4096)
            zeros = {
                name: np.zeros((count, width), np.float32) for name, width in self._widths.items()
            }
            self._write(zeros, count)

    def _add_notes(self) -> None:
        note = self.notes.note
        if self._lost:
            note(
                f"{self._lost:,} steps were left out: their next states are unknown "
                "(cut off, truncated without a final observation, or the newest)"
            )
        if not self._widths["hiddens"]:
            note(f"no field is named {' or '.join(HIDDEN)}: hiddens has no columns")
        note("dones are terminations and truncations; environments follow each other")


class TensorFields:
    """The fields of each tensor."""

    def __init__(self, description: Description) -> None:
        """Find the fields by their roles.

        Raises:
            SchemaError: A field that a transition needs is missing.
        """
        schema = description.schema
        self.fields = schema.fields
        self.paths: dict[str, tuple[str, ...]] = {}
        tensors = {
            "states": "observation",
            "actions": "action",
            "rewards": "reward",
            "next_states": "next_observation",
        }
        for tensor, role in tensors.items():
            top = schema.role(role)
            found = () if top is None else under(schema.paths, top)
            if not found and role != "next_observation":
                raise SchemaError(
                    f"role {role!r} has no field, but velora's layout needs one for "
                    f"{tensor!r}. Add it, or name it by roles=."
                )
            self.paths[tensor] = found
        hidden = [name for name in HIDDEN if under(schema.paths, name)][:1]
        self.paths["hiddens"] = under(schema.paths, hidden[0]) if hidden else ()

    def width(self, tensor: str) -> int:
        """Return the length of a row of a tensor."""
        if tensor == "dones":
            return 1
        if tensor == "next_states":
            tensor = "states"
        shapes = [self.fields[path].shape for path in self.paths[tensor]]
        return sum(int(np.prod(shape, dtype=object)) for shape in shapes)


class RotatedBytes(Stream):
    """Bytes of a ring that lies in a file, from some row on."""

    def __init__(self, file: File, offset: int, nbytes: int, start: int) -> None:
        """Read nbytes from offset on, the first of them at start."""
        self._file, self._offset, self._nbytes = file, offset, nbytes
        self._at = start

    def read_into(self, view: memoryview) -> None:
        """See `Stream.read_into`."""
        while view:
            size = min(len(view), self._nbytes - self._at)
            self._file.pread_into(view[:size], self._offset + self._at)
            self._at = (self._at + size) % self._nbytes
            view = view[size:]

    def finish(self) -> None:
        """See `Stream.finish`: a part has no checksum."""


def owns(folder: Path) -> bool:
    """Return whether a folder holds such a pair and nothing else."""
    names = sorted(each.name for each in folder.iterdir())
    prefix = names[0].removesuffix(METADATA) if names else ""
    return names == [prefix + METADATA, prefix + STATE]


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no file name can have.

    Raises:
        SchemaError: It has a slash or a null character, or is no text.
    """
    if not isinstance(prefix, str) or set(prefix) & set("/\0"):
        raise SchemaError(
            f"prefix must be the beginning of a file's name, such as {PREFIX!r}, got {prefix!r}."
        )


def find(path: Path) -> tuple[Path, Path] | None:
    """The tensors and the metadata that a folder, or a file of tensors, means."""
    if path.is_dir():
        states = sorted(path.glob(f"*{STATE}"))
        if _is_checkpoint(path):
            states = [each for each in states if each.name == PREFIX + STATE]
        return find(states[0]) if len(states) == 1 else None
    if not path.name.endswith(STATE):
        return None
    # An agent's checkpoint holds the buffer's under a key of its own.
    for name in (path.name.removesuffix(STATE) + METADATA, METADATA):
        if path.with_name(name).is_file():
            return path, path.with_name(name)
    return None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder has an agent's parameters beside its buffer."""
    return (path / MODEL).is_file() and (path / METADATA).is_file()


def _reader(file: File, metadata_path: Path) -> Reader:
    metadata = _metadata(metadata_path)
    _, columns = safetensors.parse(file)
    rows = _check(file, columns, metadata, metadata_path)
    notes = Notes()
    if metadata["capacity"] != rows:
        notes.doubt(
            f"{metadata_path} says capacity {metadata['capacity']}, but the tensors "
            f"have {rows} rows: all of them were read"
        )
    size, position = metadata["size"], metadata["position"]
    start = position if size == rows else 0
    if size < rows and position != size:
        notes.doubt(
            f"{metadata_path} says position {position} and size {size} of {rows}, "
            "which does not fit any buffer: the first rows were read"
        )
    note = f"velora's pair: {size:,} of {rows:,} rows were written"
    notes.note(f"{note}, the oldest is row {start:,}")
    ordered = {
        name: _ordered_rows(file, name, column, size, start) for name, column in columns.items()
    }
    return PlainReader(file, ordered, notes)


def _metadata(metadata_path: Path) -> Json:
    value = strict_json.parse(files.read_bytes(metadata_path, MAX_NBYTES), str(metadata_path))
    inner = value.get("buffer", value)
    for key in NUMBERS:
        number = inner.get(key) if isinstance(inner, dict) else None
        if type(number) is not int or not 0 <= number < 1 << 48:
            raise FormatError(
                f"{metadata_path}: {key} must be an integer of at least 0, got "
                f"{str(number)[:60]}. It is not the metadata of a buffer of velora."
            )
    return dict(inner)


def _check(
    file: File, columns: Mapping[str, ArrayColumn], metadata: Json, metadata_path: Path
) -> int:
    """Rows of the six tensors, which are as the metadata says."""
    widths = {
        "states": metadata["state_dim"],
        "next_states": metadata["state_dim"],
        "actions": metadata["action_dim"],
        "hiddens": metadata["hidden_dim"],
        "rewards": 1,
        "dones": 1,
    }
    if set(columns) != set(TENSORS):
        raise FormatError(
            f"{file.path} must hold the tensors {', '.join(TENSORS)} as velora saves "
            f"them, got {sorted(columns)[:10]}."
        )
    rows = columns["states"].shape[0] if columns["states"].shape else 0
    for name, column in columns.items():
        want = (rows, widths[name])
        if column.dtype != "float32" or column.shape != want:
            raise FormatError(
                f"{file.path}: tensor {name!r} must be float32{list(want)} as "
                f"{metadata_path} says, got {column.dtype}{list(column.shape)}."
            )
    if metadata["size"] > rows or metadata["position"] > max(0, rows - 1):
        raise CorruptError(
            f"{metadata_path}: size and position must be within the {rows} rows of "
            f"{file.path}, got {metadata['size']} and {metadata['position']}. The two "
            "files are not of the same save."
        )
    return rows


def _ordered_rows(file: File, name: str, column: ArrayColumn, size: int, start: int) -> ArrayColumn:
    """The rows that were written, the oldest first."""
    row, rows = column.row_nbytes, column.shape[0]
    shape = (size,) if name in SINGLE else (size, *column.shape[1:])
    if size == rows and not start:
        return replace(column, shape=shape)
    assert column.offset is not None
    stream = partial(RotatedBytes, file, column.offset, rows * row, start * row)
    return replace(column, shape=shape, open=stream, offset=None)
