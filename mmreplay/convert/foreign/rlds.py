"""RLDS datasets as TensorFlow Datasets keeps them, read without TensorFlow.

One Example of a TFRecord file is one episode; ``features.json`` says what its lists
are. In RLDS the last row of an episode is its final observation: its action, reward and
discount mean nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay import files
from mmreplay.convert.base import Notes
from mmreplay.convert.ends import Bools
from mmreplay.convert.foreign.columns import Array, ArrayRows, Later, Rows
from mmreplay.convert.foreign.fields import make_schema, scalar
from mmreplay.convert.foreign.images import ImageRows
from mmreplay.convert.foreign.stretches import Stretch, StretchReader
from mmreplay.convert.foreign.tfrecord import Values, example, records
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.files import File
from mmreplay.schema.dtypes import DTYPES, bfloat16_bits, storage_dtype
from mmreplay.schema.naming import left_out

FEATURES = "features.json"
MAX_NBYTES = 16 << 20
SHARD = re.compile(r"(?:.*-)?([\w]+)\.tfrecord(?:-(\d+)-of-(\d+))?")
STEPS = "steps/"
MARKS = ("is_first", "is_last", "is_terminal")
LASTS = ("final", "step")


@dataclass(frozen=True, slots=True)
class Feature:
    """What a list of an episode's Example holds.

    Attributes:
        dtype: Of a field.
        shape: Of one step's value; of an image the first one's counts.
        image: Steps are packed images.
    """

    dtype: str
    shape: tuple[int, ...]
    image: bool = False


class RldsReader(StretchReader):
    """Reads the episodes of all shards as one environment; each is held whole."""

    def __init__(
        self, folder: Path, shards: list[Path], features: dict[str, Feature], last: str
    ) -> None:
        self._folder, self._shards, self._last = folder, shards, last
        self._features = features
        self._notes = notes = Notes()
        self._empty = self._rewarded = self._inner = 0
        first = next(self._read(), None)
        if first is None:
            raise FormatError(f"{folder} holds no episode, expected at least one")
        schema = make_schema(self._columns(*first), notes, folder)
        as_final = last == "final"
        notes.note(
            "the last row of an episode is its final observation: is_terminal says "
            "that it terminated, otherwise it is truncated"
            if as_final
            else "the last row of an episode was taken as a step; what was seen after "
            "it is not known"
        )
        super().__init__(self._stretches_of, schema, notes, lambda: None)
        if self._empty:
            notes.note(f"{self._empty:,} episodes of one row were left out: no step")
        if self._inner:
            notes.doubt(
                f"{self._inner:,} episodes begin within what the source calls one, by "
                "is_first and is_last: each was taken as one of its own"
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

    def _columns(self, name: str, values: Mapping[str, Values]) -> dict[str, Rows]:
        """Columns of an episode by path, all of its rows."""
        count = len(_marks(name, values, "is_last"))
        found: dict[str, Rows] = {}
        for path, feature in self._features.items():
            held = values.get(STEPS + path, [])
            if feature.image:
                found[path] = _images(name, path, held, count)
            else:
                found[path] = ArrayRows(_array(name, path, held, feature, count))
        if "reward" in found:
            found["reward"] = scalar(found["reward"])
        return found

    def _stretches_of(self) -> Iterator[Stretch]:
        self._empty = self._rewarded = self._inner = 0
        for name, values in self._read():
            whole = self._columns(name, values)
            terminal = _marks(name, values, "is_terminal")
            bounds = _bounds(name, values)
            self._inner += len(bounds) - 2
            for first, stop in pairwise(bounds):
                columns = {
                    path: Later(rows, first, stop - first)
                    for path, rows in whole.items()
                }
                told = f"{name}, row {first}" if first else name
                yield from self._stretch(told, columns, terminal[first:stop])

    def _stretch(
        self, name: str, columns: Mapping[str, Rows], terminal: Bools
    ) -> Iterator[Stretch]:
        """The rows of one episode; none if there is no step in it."""
        count = len(terminal)
        if self._last == "step":
            yield Stretch(name, count, columns, {}, _ends(terminal, count))
            return
        if count < 2:
            self._empty += 1
            return
        if "reward" in columns:
            self._rewarded += bool(columns["reward"].read(count - 1, count).any())
        nexts = {
            path: Later(rows, 1, count - 1)
            for path, rows in columns.items()
            if path.split("/")[0] == "observation"
        }
        yield Stretch(name, count - 1, columns, nexts, _ends(terminal[1:], count - 1))


def _bounds(name: str, values: Mapping[str, Values]) -> list[int]:
    """Where episodes begin in what the source calls one, and its count of rows.

    Raises:
        CorruptError: It has not one mark of each kind a row.
    """
    last = _marks(name, values, "is_last")
    over = last[:-1].copy()
    for mark in MARKS:
        if mark == "is_first" and STEPS + mark not in values:
            continue
        found = _marks(name, values, mark)
        if len(found) != len(last):
            raise CorruptError(
                f"{name}: got {len(found)} values of {mark!r} and {len(last)} of "
                "'is_last', expected one of each a row; the file is damaged"
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
            f"{name} has no {STEPS + mark!r} of one flag a row, expected it of an RLDS "
            "episode; name the format with format= (--from)"
        )
    flags: Bools = found != 0
    return flags


def _array(name: str, path: str, values: Values, feature: Feature, count: int) -> Array:
    """Values of an episode's rows as the field has them.

    Raises:
        CorruptError: There are too many or too few, or one does not fit its dtype.
    """
    size = count * int(np.prod(feature.shape, dtype=object))
    if not isinstance(values, np.ndarray) or len(values) != size:
        raise CorruptError(
            f"{name}: got {len(values)} values of {path!r}, expected {size} for "
            f"{count} rows of {feature.dtype}{list(feature.shape)} as {FEATURES} says"
        )
    stored = storage_dtype(feature.dtype)
    if feature.dtype == "bfloat16":
        array: Array = bfloat16_bits(values.astype(np.float32))
    else:
        array = values != 0 if stored.kind == "b" else values.astype(stored)
    if stored.kind in "iu" and (array.astype(np.int64) != values).any():
        raise CorruptError(
            f"{name}: got a value of {path!r} beyond {feature.dtype}, expected it as "
            f"{FEATURES} says"
        )
    return array.reshape(count, *feature.shape)


def _images(name: str, path: str, values: Values, count: int) -> ImageRows:
    if not isinstance(values, list) or len(values) != count:
        raise CorruptError(
            f"{name}: got {len(values)} images of {path!r}, expected {count}, one a row"
        )
    return ImageRows(lambda a, b: values[a:b], count, f"{name}: {path!r}")


def _leaves(node: Any, path: str, notes: Notes) -> Iterator[tuple[str, Feature]]:
    """The steps' features by path; what can be no field is told."""
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
        left_out(notes, path, f"{path!r} can be no field, and was left out")


def _features(folder: Path, notes: Notes) -> dict[str, Feature]:
    """The steps' features, as features.json says.

    Raises:
        FormatError: It says none.
    """
    path = folder / FEATURES
    data = files.read_bytes(path, MAX_NBYTES)
    try:
        steps = json.loads(data)["featuresDict"]["features"]["steps"]
        return dict(_leaves(steps["sequence"]["feature"], "", notes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path} says no features of steps ({type(error).__name__}: "
            f"{str(error)[:80]}), expected a dataset of episodes in RLDS; name its "
            "format with format= (--from)"
        ) from None


def _shards(folder: Path, split: str | None) -> list[Path]:
    """Files of a split, or of all, in order, none missing."""
    found: dict[str, dict[int, Path]] = {}
    totals: dict[str, int] = {}
    for path in folder.iterdir():
        match = SHARD.fullmatch(path.name)
        if match:
            found.setdefault(match[1], {})[int(match[2] or 0)] = path
            totals[match[1]] = int(match[3] or 1)
    # A list: what the command line makes of an option may have no hash.
    if (split is not None and split not in list(found)) or not found:
        raise SchemaError(
            f"split: got {split!r}, expected one of {sorted(found)} in {folder}; leave "
            "it out for all"
        )
    chosen = sorted(found) if split is None else [split]
    for name in chosen:
        if sorted(found[name]) != list(range(totals[name])):
            raise CorruptError(
                f"{folder} holds {len(found[name])} files of split {name!r}, expected "
                f"{totals[name]}; download the dataset again"
            )
    return [found[name][number] for name in chosen for number in sorted(found[name])]


def recognizes(path: Path) -> bool:
    """Whether a folder has features and TFRecord files."""
    if not path.is_dir() or not (path / FEATURES).is_file():
        return False
    return any(SHARD.fullmatch(each.name) for each in path.iterdir())


def open_reader(
    path: Path, *, split: str | None = None, last: str = "final"
) -> RldsReader:
    """Open a dataset's folder (that of features.json) as a source.

    Args:
        path: The folder.
        split: Read this split only; all, in the order of their names, by default.
        last: ``"final"`` takes the last row of an episode as what was seen at its end,
            as RLDS says; ``"step"`` as a step like the others.
    """
    if last not in LASTS:
        raise SchemaError(
            f"last: got {last!r}, expected one of {', '.join(LASTS)}; leave it out for "
            "what RLDS says"
        )
    told = Notes()
    features = _features(path, told)
    reader = RldsReader(path, _shards(path, split), features, last)
    for text in told.notes:
        reader.report.note(text)
    for text in told.doubts:
        reader.report.doubt(text)
    return reader
