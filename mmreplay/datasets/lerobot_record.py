"""meta/mmreplay.json of a LeRobot dataset: what its fields were, for the way back.

It holds the schema with its roles, the feature that each field became, what the
environments did at episode ends and the user metadata. A dataset whose features do not
fit it, such as one that another tool edited, is read as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import Description, select_fields
from mmreplay.datasets.common.rows import Array, is_scalar
from mmreplay.datasets.lerobot_frames import StoredFrames
from mmreplay.datasets.lerobot_layout import ENDS, WIDER, Layout
from mmreplay.disk import files
from mmreplay.episodes import BREAK, START
from mmreplay.errors import FormatError, ReplayError, StaleError
from mmreplay.format.metadata import AUTORESETS, Autoreset
from mmreplay.nesting import under
from mmreplay.ring import Span
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import bfloat16_bits
from mmreplay.strict_json import Json

RECORD = "meta/mmreplay.json"
TASK = "task"
"""The field of the texts of tasks, as a reader of any dataset names it."""
FORMAT, VERSION = "mmreplay lerobot", 1
MAX_NBYTES = 16 << 20


def to_json(description: Description, layout: Layout) -> Json:
    """What meta/mmreplay.json holds of a dataset.

    Args:
        description: Of the rows that were written.
        layout: What became of their fields.
    """
    written = {each.path for each in layout.features.values()} | {layout.task_path}
    written |= {description.schema.role(end) or "" for end in ENDS}
    # Without columns that the writer computes itself, such as a timestamp.
    paths = tuple(path for path in description.schema.paths if path in written)
    schema = select_fields(description.schema.drawn, paths)
    return {
        "format": FORMAT,
        "version": VERSION,
        "schema": schema.to_json(),
        "roles": dict(schema.roles),
        "names": {each.path: name for name, each in layout.features.items()},
        "task": layout.task_path,
        "autoreset": description.autoreset,
        "user": description.user,
    }


@dataclass(frozen=True, slots=True)
class Appends:
    """What the record of a dataset said of appends when it was opened.

    Attributes:
        folder: Of the dataset.
        count: How many there were; None of a dataset without appends.
    """

    folder: Path
    count: object

    @classmethod
    def of(cls, folder: Path) -> Appends:
        """Look at a dataset."""
        path = folder / RECORD
        try:
            value = strict_json.parse(files.read_bytes(path, MAX_NBYTES), str(path))
        except ReplayError:
            # The report of a load says so.
            return cls(folder, None)
        appends = value.get("appends")
        return cls(folder, appends.get("count") if isinstance(appends, dict) else None)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say so where reading fails since episodes were appended.

        Raises:
            StaleError: The dataset has more appends by now.
        """
        try:
            yield
        except ReplayError as error:
            if self.count is None or Appends.of(self.folder) == self:
                raise
            raise StaleError(
                f"{self.folder}: episodes were appended while it was read ({error}) Read a copy "
                "that stays, which mr.linked_copy makes."
            ) from error


def to_bytes(
    description: Description, layout: Layout, appends: Mapping[str, object] | None = None
) -> bytes:
    """The file meta/mmreplay.json; see `to_json`.

    Args:
        description: Of the rows.
        layout: What became of their fields.
        appends: What it says of appends, if there are any.
    """
    value = to_json(description, layout)
    return strict_json.dump(value if appends is None else {**value, "appends": appends}, RECORD)


@dataclass(frozen=True, slots=True)
class Record:
    """The fields that a dataset was written from.

    Attributes:
        schema: Of them.
        names: The feature of each, by path; those without one are ends, or the task.
        task: The field with the text of the task, or ``""``.
        autoreset: What the environments did at episode ends.
        user_metadata: The user's own JSON.
    """

    schema: Schema
    names: dict[str, str]
    task: str
    autoreset: Autoreset
    user_metadata: Json


def read_record(folder: Path) -> Record | None:
    """Read the record of a dataset; None if it has none.

    Raises:
        FormatError: It is no record, or of another version.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    value = strict_json.parse(files.read_bytes(path, MAX_NBYTES), str(path))
    names, task, autoreset = value.get("names"), value.get("task"), value.get("autoreset")
    user = value.get("user")
    legal = value.get("format") == FORMAT and value.get("version") == VERSION
    legal &= isinstance(names, dict) and isinstance(task, str) and isinstance(user, dict)
    if not legal or autoreset not in AUTORESETS:
        raise FormatError(
            f"{path} must be a record of version {VERSION}, got format {value.get('format')!r} and "
            f"version {value.get('version')!r}. Remove it to read the dataset as any other."
        )
    assert isinstance(names, dict)
    assert isinstance(task, str)
    assert isinstance(user, dict)
    try:
        schema = Schema.from_json(value.get("schema"), value.get("roles"))
    except ReplayError as error:
        raise FormatError(f"{path}: {error} Remove it to read the dataset as any other.") from error
    named = {str(own): str(name) for own, name in names.items()}
    return Record(schema, named, task, autoreset, user)


def restored(
    reader: Reader, record: Record, left_out: Sequence[str], *, texts: bool = False
) -> Reader:
    """A reader of the fields of a record, or the reader itself where they do not fit.

    Args:
        reader: Of the dataset as any other; it is closed with the result.
        record: Of the dataset.
        left_out: Features that the user leaves out.
        texts: A task of the dataset has a text. Where the record names no field for it,
            field ``task`` is added.
    """
    own_names, schema = reader.own_names(), reader.describe().schema
    if texts and not record.task:
        if under(record.schema.paths, TASK):
            reader.report.doubt(
                f"the texts of the tasks were left out, as {RECORD} names fields below {TASK!r}"
            )
        elif TASK in schema:
            fields = {**record.schema.fields, TASK: schema[TASK]}
            widened = Schema.from_flat(fields, record.schema.roles)
            record = replace(record, schema=widened, task=TASK)
    sources: dict[str, str] = {}
    for path, each in record.schema.fields.items():
        source = ""
        if path in record.names:
            if record.names[path] in left_out:
                continue
            found = own_names.get(record.names[path], ())
            # Both ends may come of one column, which is no feature of a field then.
            source = found[0] if len(found) == 1 else ""
        elif path == record.task:
            source = TASK
        elif path in (ends := {record.schema.role(end): end for end in ENDS}):
            source = ends[path]
        if source not in schema or not _fits(each, schema[source]):
            reader.report.doubt(
                f"{RECORD} names field {path!r}, and the dataset has no data of its shape and "
                "dtype: the record was not used"
            )
            return reader
        if source in sources.values():
            reader.report.doubt(
                f"{RECORD} names two fields of {source!r}, such as {path!r}: the record was not "
                "used"
            )
            return reader
        sources[path] = source
    return RecordedReader(reader, record, sources)


def _fits(field: Field, stored: Field) -> bool:
    """Whether a dataset has what an export makes of a field."""
    if field.varies or stored.varies:
        return field.kind == stored.kind
    # Another dtype would be cast, which loses fractions and large numbers.
    if stored.dtype != WIDER.get(field.dtype, field.dtype):
        return False
    if field.dtype == "uint8" and len(field.shape) == 3 and len(stored.shape) in (2, 3):
        height, width, *channels = stored.shape
        first = field.shape[0] in (1, 3) and field.shape[1:] == (height, width)
        if first or field.shape[:2] == (height, width):
            # Of a video with three channels a gray image has one.
            return field.shape[0 if first else -1] <= math.prod(channels)
    return math.prod(field.shape) == math.prod(stored.shape)


class RecordedReader(Reader):
    """Reads a LeRobot dataset as the fields that it was written from."""

    def __init__(self, reader: Reader, record: Record, sources: dict[str, str]) -> None:
        """Wrap a reader, which is closed with this one.

        Args:
            reader: Of the dataset as any other.
            record: Of the dataset.
            sources: The other reader's path of each field.
        """
        self.report, self._reader, self._sources = reader.report, reader, sources
        schema = select_fields(record.schema, tuple(sources))
        self._final_follows = record.autoreset == "next_step"
        description = reader.describe()
        # Of the dataset itself, which may be newer than what the record holds.
        about = dict(description.user["lerobot"])
        known = about.get("features", {})
        about["features"] = {
            path: known[sources[path]] for path in sources if sources[path] in known
        }
        self._description = replace(
            description,
            schema=schema,
            autoreset=record.autoreset,
            user={**record.user_metadata, "lerobot": about},
        )
        self.only(schema.paths)
        self._own_names: dict[str, tuple[str, ...]] = {
            name: (path,) for path, name in record.names.items() if path in sources and path != name
        }

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def own_names(self) -> dict[str, tuple[str, ...]]:
        """See `Reader.own_names`."""
        return self._own_names

    def identity(self) -> object:
        """See `Reader.identity`."""
        return self._reader.identity()

    def as_files(self, path: str, codec: str) -> bool:
        """See `Reader.as_files`."""
        source = self._sources.get(path)
        if source is None or not self._reader.as_files(source, codec):
            return False
        field = self._reader.describe().schema[source]
        schema = self._description.schema
        fields = {**schema.fields, path: field}
        self._description = replace(
            self._description, schema=Schema.from_flat(fields, schema.roles)
        )
        return True

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`."""
        self._paths = paths
        self._reader.only(tuple(dict.fromkeys(self._sources[path] for path in paths)))

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`."""
        self._reader.narrow(span)

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for block in self._reader.blocks(rows_per_block):
            columns = {
                path: _restored(block.columns[self._sources[path]], self._description.schema[path])
                for path in self._paths
            }
            yield replace(block, columns=columns, flags=self._flags(block))

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for block in self._reader.marks():
            yield replace(block, flags=self._flags(block))

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        varying = [path for path in self._paths if path in self._description.schema.varying]
        for block in self._reader.measures():
            columns = {path: block.columns[self._sources[path]] for path in varying}
            yield replace(block, columns=columns, flags=self._flags(block))

    def _flags(self, block: Block) -> NDArray[np.uint8]:
        """Flags, of which some say that a final row is not there any more."""
        if not self._final_follows:
            return block.flags
        begins = ((block.flags & START) != 0) & (block.positions > 0)
        return np.where(begins, block.flags | np.uint8(BREAK), block.flags)

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


def _restored(column: Any, field: Field) -> Any:
    """Values as a field had them, ``[N, *shape]``."""
    if field.varies:
        return column
    if isinstance(column, StoredFrames):
        if column.shape[1:] == field.shape:
            return column
        return column.restored(field.shape, lambda frames: _restored(frames, field))
    if column.ndim - 1 != len(field.shape) or column.shape[1:] != field.shape:
        column = _image(column, field) if field.dtype == "uint8" else column
    if field.dtype == "bfloat16":
        column = bfloat16_bits(column.astype(np.float32)).astype("<u2")
    found: Array = column.reshape(len(column), *field.shape).astype(field.numpy, copy=False)
    return found


def _image(column: Array, field: Field) -> Array:
    """Images with the channels of a field, where it has them."""
    if len(field.shape) != 3 or column.ndim not in (3, 4) or is_scalar(column.shape[1:]):
        return column
    if column.ndim == 3:
        column = column[..., None]
    first = field.shape[0] in (1, 3) and field.shape[1:] == column.shape[1:3]
    channels = field.shape[0] if first else field.shape[-1]
    column = column[..., :channels]
    return np.ascontiguousarray(np.moveaxis(column, -1, 1)) if first else column
