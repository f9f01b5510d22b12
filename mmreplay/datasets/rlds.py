"""RLDS datasets as TensorFlow Datasets stores them, read without TensorFlow.

One tf.train.Example of a TFRecord file is one episode; ``features.json`` describes its
lists. In RLDS the last row of an episode is its final observation: its action, reward
and discount have no meaning.

A TFRecord is a length, its checksum, the bytes, and their checksum: masked CRC32C. An
Example maps names to lists of bytes, floats or integers, in protobuf's wire format.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.convert.base import Notes
from mmreplay.convert.episode_ends import Bools
from mmreplay.datasets.common.fields import make_schema
from mmreplay.datasets.common.fragments import Fragment, FragmentReader
from mmreplay.datasets.common.rows import Array, ArrayRows, ColumnRows, ShiftedRows, scalar
from mmreplay.datasets.images import ImageRows
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.schema.dtypes import DTYPES, bfloat16_bits, storage_dtype
from mmreplay.schema.source_names import name_fields, own_names_of

FEATURES = "features.json"
MAX_NBYTES = 16 << 20
SHARD = re.compile(r"(?:.*-)?([\w]+)\.tfrecord(?:-(\d+)-of-(\d+))?")
STEPS = "steps/"
MARKS = ("is_first", "is_last", "is_terminal")
ENDS = {"terminated": "is_terminal", "truncated": "is_last"}
"""Features that fields of ends are read from."""
LASTS = ("final", "step")
HEAD = struct.Struct("<QI")
SUM = struct.Struct("<I")
MASK = 0xA282EAD8
MAX_RECORD_NBYTES = 1 << 30
MAX_FEATURES = 10_000
VARINT, FIXED64, SIZED, FIXED32 = 0, 1, 2, 5
BYTES, FLOATS, INTEGERS = 1, 2, 3
Values = list[bytes] | Array
"""A list of bytes, or float32 or int64 ``[N]``."""


def open_reader(
    path: Path,
    *,
    split: str | None = None,
    last: str = "final",
    fields: Sequence[str] | None = None,
) -> RldsReader:
    """Open a dataset's folder (that of features.json) as a source.

    Args:
        path: The folder.
        split: Read this split only; all, in the order of their names, by default.
        last: ``"final"`` takes the last row of an episode as its final observation, as
            RLDS defines; ``"step"`` as a step.
        fields: See `name_fields`.
    """
    if last not in LASTS:
        raise SchemaError(
            f"last must be one of {', '.join(LASTS)}, got {last!r}. Leave it out for "
            "the meaning that RLDS gives it."
        )
    feature_notes = Notes()
    features = _features(path, feature_notes)
    names = name_fields(
        {name: name for name in features}, path / FEATURES, feature_notes, fields, ENDS
    )
    reader = RldsReader(path, _shards(path, split), features, last, names)
    for text in feature_notes.notes:
        reader.report.note(text)
    for text in feature_notes.doubts:
        reader.report.doubt(text)
    return reader


def recognizes(path: Path) -> bool:
    """Return whether a folder has features and TFRecord files."""
    if not path.is_dir() or not (path / FEATURES).is_file():
        return False
    return any(SHARD.fullmatch(each.name) for each in path.iterdir())


@dataclass(frozen=True, slots=True)
class Feature:
    """The content of a list in an episode's Example.

    Attributes:
        dtype: Dtype of the field.
        shape: Shape of one step's value; ignored for images.
        image: Whether steps are compressed images.
    """

    dtype: str
    shape: tuple[int, ...]
    image: bool = False


class RldsReader(FragmentReader):
    """Reads the episodes of all shards as one environment, one episode at a time."""

    def __init__(
        self,
        folder: Path,
        shards: list[Path],
        features: dict[str, Feature],
        last: str,
        names: Mapping[str, str],
    ) -> None:
        self._folder, self._shards, self._last = folder, shards, last
        self._features, self._names = features, names
        self._notes = notes = Notes()
        self._empty = self._rewarded = self._inner = 0
        first = next(self._read(), None)
        if first is None:
            raise FormatError(f"{folder} holds no episode.")
        schema = make_schema(self._columns(*first), notes, folder)
        as_final = last == "final"
        notes.note(
            "the last row of an episode is its final observation: is_terminal says "
            "that it terminated, otherwise it is truncated"
            if as_final
            else "the last row of an episode was read as a step; its next observation is not known"
        )
        super().__init__(
            self._fragments_of, schema, notes, lambda: None, own_names=own_names_of(names, ENDS)
        )
        if self._empty:
            notes.note(f"{self._empty:,} episodes of one row were left out: no step")
        if self._inner:
            notes.doubt(
                f"{self._inner:,} episodes begin inside an episode of the source, by "
                "is_first and is_last: each was read as an episode"
            )
        if self._rewarded:
            notes.doubt(
                f"{self._rewarded:,} episodes have a reward in their last row, which "
                "was left out as RLDS says: pass last='step' if it is a step"
            )

    def _read(self) -> Iterator[tuple[str, dict[str, Values]]]:
        for path in self._shards:
            with closing(File.open(path, None)) as file:
                for offset, data in records(file):
                    name = f"{path}: the record at byte {offset}"
                    yield name, example(data, name)

    def _columns(self, name: str, values: Mapping[str, Values]) -> dict[str, ColumnRows]:
        """Return the columns of an episode by path, with all rows."""
        count = len(_marks(name, values, "is_last"))
        found: dict[str, ColumnRows] = {}
        for own, path in self._names.items():
            feature, held = self._features[own], values.get(STEPS + own, [])
            if feature.image:
                found[path] = _images(name, own, held, count)
            else:
                found[path] = ArrayRows(_array(name, own, held, feature, count))
        if "reward" in found:
            found["reward"] = scalar(found["reward"])
        return found

    def _fragments_of(self) -> Iterator[Fragment]:
        self._empty = self._rewarded = self._inner = 0
        for name, values in self._read():
            whole = self._columns(name, values)
            terminal = _marks(name, values, "is_terminal")
            bounds = _bounds(name, values)
            self._inner += len(bounds) - 2
            for first, stop in pairwise(bounds):
                columns = {
                    path: ShiftedRows(rows, first, stop - first) for path, rows in whole.items()
                }
                where = f"{name}, row {first}" if first else name
                yield from self._fragment(where, columns, terminal[first:stop])

    def _fragment(
        self, name: str, columns: Mapping[str, ColumnRows], terminal: Bools
    ) -> Iterator[Fragment]:
        """Yield one episode; nothing if it has no step."""
        count = len(terminal)
        if self._last == "step":
            yield Fragment(name, count, columns, {}, _ends(terminal, count))
            return
        if count < 2:
            self._empty += 1
            return
        if "reward" in columns:
            self._rewarded += bool(columns["reward"].read(count - 1, count).any())
        next_obs = {
            path: ShiftedRows(rows, 1, count - 1)
            for path, rows in columns.items()
            if path.split("/")[0] == "observation"
        }
        yield Fragment(name, count - 1, columns, next_obs, _ends(terminal[1:], count - 1))


def _bounds(name: str, values: Mapping[str, Values]) -> list[int]:
    """Return the starts of episodes in one of the source, and its number of rows.

    Raises:
        CorruptError: A row lacks a mark.
    """
    last = _marks(name, values, "is_last")
    over = last[:-1].copy()
    for mark in MARKS:
        if mark == "is_first" and STEPS + mark not in values:
            continue
        found = _marks(name, values, mark)
        if len(found) != len(last):
            raise CorruptError(
                f"{name} must have one flag of each per row, got {len(found)} values "
                f"of {mark!r} and {len(last)} of 'is_last'. The file is damaged."
            )
        if mark == "is_first":
            over |= found[1:]
    return [0, *(np.flatnonzero(over) + 1).tolist(), len(last)]


def _ends(terminal: Bools, steps: int) -> Any:
    def ends(first: int, stop: int) -> tuple[Bools, Bools]:
        last = np.zeros(stop - first, bool)
        last[-1] = stop == steps
        return terminal[first:stop], last & ~terminal[first:stop]

    return ends


def _marks(name: str, values: Mapping[str, Values], mark: str) -> Bools:
    found = values.get(STEPS + mark)
    if not isinstance(found, np.ndarray) or found.dtype != np.int64 or not len(found):
        raise FormatError(
            f"{name} has no {STEPS + mark!r} with one flag per row, which RLDS has. "
            "Name the format with format= (--from)."
        )
    flags: Bools = found != 0
    return flags


def _array(name: str, path: str, values: Values, feature: Feature, count: int) -> Array:
    """Return the values of an episode's rows in the dtype of the field.

    Raises:
        CorruptError: Their number is wrong, or one does not fit the dtype.
    """
    size = count * int(np.prod(feature.shape, dtype=object))
    if not isinstance(values, np.ndarray) or len(values) != size:
        raise CorruptError(
            f"{name} must have {size} values for {count} rows of "
            f"{feature.dtype}{list(feature.shape)} as {FEATURES} says, got "
            f"{len(values)} of {path!r}."
        )
    stored = storage_dtype(feature.dtype)
    if feature.dtype == "bfloat16":
        array: Array = bfloat16_bits(values.astype(np.float32))
    else:
        array = values != 0 if stored.kind == "b" else values.astype(stored)
    if stored.kind in "iu" and (array.astype(np.int64) != values).any():
        raise CorruptError(
            f"{name} has a value of {path!r} beyond {feature.dtype}, which {FEATURES} says."
        )
    return array.reshape(count, *feature.shape)


def _images(name: str, path: str, values: Values, count: int) -> ImageRows:
    if not isinstance(values, list) or len(values) != count:
        raise CorruptError(
            f"{name} must have {count} images of {path!r}, one per row, got {len(values)}."
        )
    return ImageRows(lambda a, b: values[a:b], count, f"{name}: {path!r}")


def _leaves(node: Any, path: str, notes: Notes) -> Iterator[tuple[str, Feature]]:
    """Yield the features of steps by path; note those that no field can hold."""
    below = node.get("featuresDict", {}).get("features")
    if isinstance(below, dict):
        for key, each in below.items():
            yield from _leaves(each, f"{path}/{key}" if path else key, notes)
        return
    if path in MARKS:
        return
    kind = node.get("image") or node.get("tensor") or {}
    shape = kind.get("shape", {}).get("dimensions", [])
    sides = tuple(int(side) for side in shape if str(side).isdecimal())
    if "classLabel" in node:
        yield path, Feature("int64", ())
    elif "image" in node:
        yield path, Feature("uint8", sides, image=True)
    elif (
        kind.get("dtype") in DTYPES
        and len(sides) == len(shape)
        and kind.get("encoding", "none") in ("none", "ENCODING_UNSPECIFIED")
    ):
        yield path, Feature(kind["dtype"], sides)
    else:
        notes.doubt(f"{path!r} can be no field, and was left out")


def _features(folder: Path, notes: Notes) -> dict[str, Feature]:
    """Return the features of steps in features.json.

    Raises:
        FormatError: It describes none.
    """
    path = folder / FEATURES
    data = files.read_bytes(path, MAX_NBYTES)
    try:
        steps = json.loads(data)["featuresDict"]["features"]["steps"]
        leaves = list(_leaves(steps["sequence"]["feature"], "", notes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path} does not describe steps ({type(error).__name__}: "
            f"{str(error)[:80]}), so it is not an RLDS dataset of episodes. Name its "
            "format with format= (--from)."
        ) from None
    features = dict(leaves)
    if len(features) < len(leaves):
        paths = [path for path, _ in leaves]
        twice = next(path for path in features if paths.count(path) > 1)
        raise FormatError(
            f"{path} has two features {twice!r}, by its name or by that of a dict. "
            "Rename one of them."
        )
    return features


def _shards(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a split, or of all splits, in order."""
    found: dict[str, dict[int, Path]] = {}
    totals: dict[str, int] = {}
    for path in folder.iterdir():
        match = SHARD.fullmatch(path.name)
        if match:
            found.setdefault(match[1], {})[int(match[2] or 0)] = path
            totals[match[1]] = int(match[3] or 1)
    # A list, because options of the command line may be unhashable.
    if (split is not None and split not in list(found)) or not found:
        raise SchemaError(
            f"split must be one of {sorted(found)} in {folder}, got {split!r}. Leave "
            "it out for all."
        )
    chosen = sorted(found) if split is None else [split]
    for name in chosen:
        if sorted(found[name]) != list(range(totals[name])):
            raise CorruptError(
                f"{folder} must hold {totals[name]} files of split {name!r}, got "
                f"{len(found[name])}. Download the dataset again."
            )
    return [found[name][number] for name in chosen for number in sorted(found[name])]


def records(file: File) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each record.

    Raises:
        CorruptError: A record is cut off, or does not match its checksum.
        FormatError: A record is longer than 1 GiB.
    """
    at = 0
    while at < file.nbytes:
        if at + HEAD.size > file.nbytes:
            raise _corrupt(file, at, "has only part of its header before the end of the file")
        head = file.pread(HEAD.size, at)
        size, checksum = HEAD.unpack(head)
        if masked(head[:8]) != checksum:
            raise _corrupt(file, at, f"has length {size}, which does not match its checksum")
        begin = at + HEAD.size
        if begin + size + SUM.size > file.nbytes:
            raise _corrupt(file, at, f"has {size} bytes, more than the file has after it")
        if size > MAX_RECORD_NBYTES:
            raise FormatError(
                f"{file.path}: the record at byte {at} must have at most "
                f"{MAX_RECORD_NBYTES} bytes, got {size}. Split the episodes."
            )
        data = file.pread(size, begin)
        (checksum,) = SUM.unpack(file.pread(SUM.size, begin + size))
        if masked(data) != checksum:
            raise _corrupt(file, at, "has bytes that do not match their checksum")
        yield at, data
        at = begin + size + SUM.size


def example(data: bytes, name: str) -> dict[str, Values]:
    """Return the features of a tf.train.Example by name.

    Args:
        data: The message.
        name: Name for errors.

    Raises:
        CorruptError: It is no Example.
    """
    found: dict[str, Values] = {}
    try:
        for features in _sized(memoryview(data), 1):
            for entry in _sized(features, 1):
                key = b"".join(bytes(each) for each in _sized(entry, 1))
                values = list(_sized(entry, 2))
                found[key.decode()] = _values(values[-1] if values else entry[:0])
                if len(found) > MAX_FEATURES:
                    raise MalformedProtobuf(f"more than {MAX_FEATURES} features")
    except (MalformedProtobuf, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{name} is not a tf.train.Example: {error}. The file is damaged, or of another kind."
        ) from error
    return found


def masked(data: bytes) -> int:
    """Return the checksum of bytes in TFRecord's form."""
    checksum = crc32c(memoryview(data))
    return ((checksum >> 15 | checksum << 17) + MASK) & 0xFFFFFFFF


class MalformedProtobuf(ValueError):
    """Bytes that are no protobuf message."""


def _corrupt(file: File, offset: int, problem: str) -> CorruptError:
    return CorruptError(
        f"{file.path}: the record at byte {offset} {problem}. The file is truncated or "
        "damaged: restore it from a copy."
    )


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a message: its number, wire type, and number or bytes."""

    number: int
    kind: int
    value: int
    data: memoryview


def _fields(data: memoryview) -> Iterator[_Field]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        value, size = 0, {FIXED64: 8, FIXED32: 4}.get(kind, 0)
        if kind == VARINT:
            value, at = _varint(data, at)
        elif kind == SIZED:
            size, at = _varint(data, at)
        elif not size:
            raise MalformedProtobuf(f"wire type {kind} at byte {at}")
        if at + size > len(data):
            raise MalformedProtobuf(f"a field of {size} bytes at byte {at}, past its message")
        yield _Field(number, kind, value, data[at : at + size])
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise MalformedProtobuf(f"a number that does not end at byte {at}")


def _sized(data: memoryview, number: int) -> Iterator[memoryview]:
    for each in _fields(data):
        if each.number == number and each.kind == SIZED:
            yield each.data


def _values(feature: memoryview) -> Values:
    """Return the list of a feature."""
    for each in _fields(feature):
        if each.number == BYTES:
            return [bytes(item) for item in _sized(each.data, 1)]
        if each.number == FLOATS:
            return _floats(each.data)
        if each.number == INTEGERS:
            return _integers(each.data)
    return []


def _floats(data: memoryview) -> Array:
    parts = [each.data for each in _fields(data) if each.number == 1]
    if any(len(part) % 4 for part in parts):
        raise MalformedProtobuf("floats of no whole number of bytes")
    return np.frombuffer(b"".join(parts), "<f4")


def _integers(data: memoryview) -> Array:
    parts = [
        _unpacked(each.data)
        if each.kind == SIZED
        else np.array([each.value], np.uint64).view(np.int64)
        for each in _fields(data)
        if each.number == 1
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _unpacked(data: memoryview) -> NDArray[np.int64]:
    """Decode consecutive varints."""
    raw = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(raw < 128)
    if len(raw) and (not len(stops) or stops[-1] != len(raw) - 1):
        raise MalformedProtobuf("a number that does not end")
    starts = np.concatenate([[0], stops[:-1] + 1])
    sizes = stops - starts[: len(stops)] + 1
    if len(sizes) and sizes.max() > 10:
        raise MalformedProtobuf("a number of more than 10 bytes")
    values = np.zeros(len(stops), np.uint64)
    for place in range(int(sizes.max()) if len(sizes) else 0):
        here = sizes > place
        digits = (raw[starts[: len(stops)][here] + place] & 127).astype(np.uint64)
        values[here] |= digits << np.uint64(7 * place)
    return values.view(np.int64)
