"""velora's pair, read: rows in the order they came, those that were written only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from mmreplay import strict_json
from mmreplay.convert import safetensors
from mmreplay.convert.array_file import ArrayColumn, Stream
from mmreplay.convert.base import Notes, Reader, Writer
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.undescribed import PlainReader
from mmreplay.convert.velora import (
    METADATA,
    PREFIX,
    STATE,
    TENSORS,
    Parts,
    VeloraWriter,
    check_prefix,
)
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError
from mmreplay.strict_json import Json

MAX_NBYTES = 1 << 20
NUMBERS = ("capacity", "state_dim", "action_dim", "hidden_dim", "position", "size")
SINGLE = ("rewards", "dones")


def find(path: Path) -> tuple[Path, Path] | None:
    """The tensors and the metadata that a folder, or a file of tensors, means."""
    if path.is_dir():
        states = sorted(path.glob(f"*{STATE}"))
        return find(states[0]) if len(states) == 1 else None
    if not path.name.endswith(STATE):
        return None
    # An agent's checkpoint holds the buffer's under a key of its own.
    for name in (path.name.removesuffix(STATE) + METADATA, METADATA):
        if path.with_name(name).is_file():
            return path, path.with_name(name)
    return None


def open_writer(
    _: str,
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    prefix: str | None = None,
) -> Writer:
    """Make velora's pair as a target; see `registry.Layout`."""
    start = PREFIX if prefix is None else prefix
    return VeloraWriter(target, description, start, overwrite)


def planned(_: str, description: Description, *, prefix: str | None = None) -> None:
    """Refuse what the pair cannot hold; see `registry.Layout`."""
    if prefix is not None:
        check_prefix(prefix)
    Parts(description)


def open_reader(_: str, path: Path) -> Reader:
    """Open velora's pair by its folder or its tensors.

    Raises:
        FormatError: It is none.
        CorruptError: Its parts contradict each other.
    """
    found = find(path)
    if found is None:
        raise FormatError(
            f"{path} is no pair of velora's, expected one {STATE} and its {METADATA} "
            "under one prefix; name the file of tensors"
        )
    file = File.open(found[0], None)
    try:
        return _reader(file, found[1])
    except BaseException:
        file.close()
        raise


def recognizes(path: Path) -> bool:
    """Whether a folder is velora's by its names, or a file by its tensors as well.

    Anybody's file may be called so, and lie beside some metadata.json.
    """
    if find(path) is None or path.is_dir():
        return find(path) is not None
    with closing(File.open(path, None)) as file:
        metadata, columns = safetensors.parse(file)
    return KEY not in metadata and set(columns) == set(TENSORS)


def _reader(file: File, place: Path) -> Reader:
    metadata = _metadata(place)
    _, columns = safetensors.parse(file)
    rows = _check(file, columns, metadata, place)
    notes = Notes()
    if metadata["capacity"] != rows:
        notes.doubt(
            f"{place} says capacity {metadata['capacity']}, the tensors have {rows} "
            "rows: they were taken for all"
        )
    size, position = metadata["size"], metadata["position"]
    start = position if size == rows else 0
    if size < rows and position != size:
        notes.doubt(
            f"{place} says position {position} and size {size} of {rows}, which no "
            "buffer has: the first rows were taken"
        )
    note = f"velora's pair: {size:,} of {rows:,} rows were written"
    notes.note(f"{note}, the oldest is row {start:,}")
    taken = {
        name: _part(file, name, column, size, start) for name, column in columns.items()
    }
    return PlainReader(file, taken, notes)


def _metadata(place: Path) -> Json:
    value = strict_json.parse(files.read_bytes(place, MAX_NBYTES), str(place))
    inner = value.get("buffer", value)
    for key in NUMBERS:
        number = inner.get(key) if isinstance(inner, dict) else None
        if type(number) is not int or not 0 <= number < 1 << 48:
            raise FormatError(
                f"{place} says {key} {str(number)[:60]}, expected an integer of at "
                "least 0; it is no metadata of velora's buffer"
            )
    return dict(inner)


def _check(
    file: File, columns: Mapping[str, ArrayColumn], metadata: Json, place: Path
) -> int:
    """Rows of the six tensors, which are as the metadata says."""
    widths = {
        "states": metadata["state_dim"], "next_states": metadata["state_dim"],
        "actions": metadata["action_dim"], "hiddens": metadata["hidden_dim"],
        "rewards": 1, "dones": 1,
    }  # fmt: skip
    if set(columns) != set(TENSORS):
        raise FormatError(
            f"{file.path} holds the tensors {sorted(columns)[:10]}, expected "
            f"{', '.join(TENSORS)} as velora saves them"
        )
    rows = columns["states"].shape[0] if columns["states"].shape else 0
    for name, column in columns.items():
        want = (rows, widths[name])
        if column.dtype != "float32" or column.shape != want:
            raise FormatError(
                f"{file.path}: tensor {name!r} is {column.dtype}{list(column.shape)}, "
                f"expected float32{list(want)} as {place} says"
            )
    if metadata["size"] > rows or metadata["position"] > max(0, rows - 1):
        raise CorruptError(
            f"{place} says size {metadata['size']} and position "
            f"{metadata['position']}, expected them within the {rows} rows of "
            f"{file.path}; the two are not of one save"
        )
    return rows


def _part(
    file: File, name: str, column: ArrayColumn, size: int, start: int
) -> ArrayColumn:
    """The rows that were written, the oldest first."""
    row, rows = column.row_nbytes, column.shape[0]
    shape = (size,) if name in SINGLE else (size, *column.shape[1:])
    if size == rows and not start:
        return replace(column, shape=shape)
    assert column.offset is not None
    stream = partial(Rolled, file, column.offset, rows * row, start * row)
    return replace(column, shape=shape, open=stream, offset=None)


class Rolled(Stream):
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
