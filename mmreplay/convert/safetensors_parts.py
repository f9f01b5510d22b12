"""safetensors in parts: a folder of files of some rows each, and an index.

Names and index are those of the Hugging Face Hub: ``model-00001-of-00004.safetensors``
and ``model.safetensors.index.json``, whose ``weight_map`` gives each tensor one file.
Rows of one column lie in several, so tensors are named for their part as well:
``observation.00001``. What else is to be known stands in the index's ``metadata``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from mmreplay import files
from mmreplay.convert import safetensors_file
from mmreplay.convert.array_file import ArrayFile
from mmreplay.convert.arrays import ArrayReader, Column
from mmreplay.convert.base import Block, Notes, Reader, Writer
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.safetensors_file import SafetensorsPlan
from mmreplay.convert.staging import Staging
from mmreplay.errors import FormatError, SchemaError
from mmreplay.files import File
from mmreplay.format import strict_json

STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
PART, ROWS = "mmreplay.part", "mmreplay.rows"
MAX_INDEX_NBYTES = 16 << 20
MAX_PARTS = 99_999


def part_name(number: int, count: int) -> str:
    """File of a part, counted from 1."""
    return f"{STEM}-{number:05d}-of-{count:05d}.safetensors"


def part_rows(description: Description, part_bytes: float) -> int:
    """Rows of a part of about so many bytes, at least one.

    Raises:
        SchemaError: It is no number of bytes, or makes too many parts.
    """
    sized = type(part_bytes) in (int, float) and 1 <= part_bytes < 1 << 62
    rows = max(1, int(part_bytes // description.row_nbytes)) if sized else 1
    if not sized or description.rows > rows * MAX_PARTS:
        raise SchemaError(
            f"part_bytes: got {part_bytes!r}, expected bytes of a file, such as 5e9, "
            f"that make at most {MAX_PARTS} parts; give a larger number"
        )
    return rows


def _told(number: int, count: int, first: int, stop: int, told: bytes) -> str:
    """What a part says of itself; by the checksum parts of two exports differ."""
    of = f"{google_crc32c.value(told):08x}"
    value = {"part": number, "parts": count, "rows": [first, stop], "of": of}
    return json.dumps(value, separators=(",", ":"))


def owns(folder: Path) -> bool:
    """Whether a folder holds parts and their index, and nothing else."""
    names = {each.name for each in folder.iterdir()}
    count = len(names) - 1
    return names == {INDEX, *(part_name(k + 1, count) for k in range(count))}


class PartsWriter(Writer):
    """Writes the folder, part by part; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, rows: int, overwrite: bool
    ) -> None:
        """Make a folder of parts of so many rows."""
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._rows = rows
        self._count = max(1, -(-description.rows // rows))
        self._bytes = description.to_bytes()
        self._done, self._size = 0, 0
        self._map: dict[str, str] = {}
        self._spans: dict[str, list[int]] = {}
        self._part: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> None:
        number = len(self._spans) + 1
        stop = min(self._done + self._rows, self._description.rows)
        told = _told(number, self._count, self._done, stop, self._bytes)
        plan = SafetensorsPlan(
            self._description.columns, stop - self._done, {PART: told}, f".{number:05d}"
        )
        name = part_name(number, self._count)
        self._spans[name] = [self._done, stop]
        self._map |= dict.fromkeys(plan.tensors, name)
        self._size += plan.nbytes
        file = File.create(self._staging.path / name, plan.nbytes)
        self._part = ArrayFile(file, plan, stop - self._done)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        assert self._part is not None
        first = 0
        while first < len(block):
            if not self._part.room and self._done < self._description.rows:
                self._part.finish()
                self._begin()
            room = self._part.room or len(block)
            piece = block.between(first, first + room)
            self._part.write(piece)
            self._done += len(piece)
            first += len(piece)

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._part is not None
        self._part.finish()
        metadata = {
            "total_size": self._size, KEY: self._bytes.decode(), ROWS: self._spans,
        }  # fmt: skip
        value = {"metadata": metadata, "weight_map": self._map}
        data = json.dumps(value, indent=1).encode()
        if len(data) > MAX_INDEX_NBYTES:
            raise FormatError(
                f"the index takes {len(data)} bytes, expected at most "
                f"{MAX_INDEX_NBYTES}; give a larger part_bytes"
            )
        files.replace_bytes(self._staging.path / INDEX, data)
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._part is not None:
            self._part.close()
        self._staging.abort()


class PartsReader(Reader):
    """Reads such a folder, part by part; see `Reader`."""

    def __init__(self, folder: Path) -> None:
        """Open the index, and look into every part once."""
        self.report = Notes()
        self._folder = folder
        index = folder / INDEX
        self._value = strict_json.parse(
            files.read_bytes(index, MAX_INDEX_NBYTES), str(index)
        )
        self._index = index
        self._description = self._describe()
        self._spans = self._check_spans()
        self._check_map()
        for number in range(1, len(self._spans) + 1):
            self._open(number).close()

    def _metadata(self) -> dict[str, Any]:
        metadata = self._value.get("metadata")
        if not isinstance(metadata, dict) or not {KEY, ROWS} <= metadata.keys():
            raise FormatError(
                f"{self._index} has no metadata of {KEY!r} and {ROWS!r}, expected the "
                "index of a buffer's parts; load files of others one by one"
            )
        return metadata

    def _describe(self) -> Description:
        told, name = self._metadata()[KEY], f"{self._index}: {KEY!r} in its metadata"
        if not isinstance(told, str):
            raise FormatError(f"{name} is no text")
        self._bytes = told.encode("utf-8", "replace")
        return Description.from_bytes(self._bytes, name)

    def _check_spans(self) -> list[tuple[int, int]]:
        """Rows of each part, which follow each other.

        Raises:
            FormatError: They do not, or a part is named otherwise than parts are.
        """
        rows = self._metadata()[ROWS]
        if not isinstance(rows, dict) or not 1 <= len(rows) <= MAX_PARTS:
            raise FormatError(
                f"{self._index}: {ROWS!r} is {str(rows)[:60]}, expected the rows of 1 "
                f"to {MAX_PARTS} parts"
            )
        spans, end = [], 0
        for number, (name, span) in enumerate(rows.items(), 1):
            expected = part_name(number, len(rows))
            # Never a path: what else it says is not even looked at.
            if name != expected:
                raise FormatError(
                    f"{self._index} names the part {name[:80]!r}, expected "
                    f"{expected!r} beside it; it was edited"
                )
            pair = span if isinstance(span, list) and len(span) == 2 else [-1, -1]
            stop = pair[1]
            if type(stop) is not int or pair[0] != end or stop < end:
                raise FormatError(
                    f"{self._index} says rows {str(span)[:60]} of {name}, expected "
                    f"[{end}, ...] as they follow each other; it was edited"
                )
            spans.append((end, stop))
            end = stop
        if end != self._description.rows:
            raise FormatError(
                f"{self._index} says {end} rows in its parts, expected "
                f"{self._description.rows} as its description says; it was edited"
            )
        return spans

    def _check_map(self) -> None:
        """Refuse an index that gives a tensor another file than the one it is in."""
        found = self._value.get("weight_map")
        count = len(self._spans)
        expected = {
            f"{name}.{number:05d}": part_name(number, count)
            for number in range(1, count + 1)
            for name in self._description.columns
        }
        if found != expected:
            found = found if isinstance(found, dict) else {}
            names = found.keys() | expected.keys()
            name = min(n for n in names if found.get(n) != expected.get(n))
            raise FormatError(
                f"{self._index}: weight_map gives tensor {name[:80]!r} the file "
                f"{str(found.get(name))[:80]!r}, expected {expected.get(name)!r}; it "
                "was edited"
            )

    def _open(self, number: int) -> ArrayReader:
        """A part as a reader of its rows, checked against the index."""
        first, stop = self._spans[number - 1]
        count = len(self._spans)
        file = File.open(self._folder / part_name(number, count), None)
        try:
            metadata, columns = safetensors_file.parse(file)
            told = safetensors_file.text(file, metadata, PART)
            expected = _told(number, count, first, stop, self._bytes)
            if told != expected:
                raise FormatError(
                    f"{file.path} says that it is part {told[:120]}, expected "
                    f"{expected} as {self._index} says; it is of another export"
                )
            names = (f"{name}.{number:05d}" for name in self._description.columns)
            summed = (PART, *names)
            safetensors_file.check_summed(file, metadata, summed, self.report)
            return ArrayReader(file, _plain(columns, number), self._rows(stop - first))
        except BaseException:
            file.close()
            raise

    def _rows(self, count: int) -> Description:
        """The description with so many rows, of whichever environment."""
        stop = np.zeros(self._description.num_envs, np.int64)
        stop[0] = count
        return replace(self._description, first=np.zeros_like(stop), stop=stop)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as part:
                yield from part.blocks(rows_per_block)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for number in range(1, len(self._spans) + 1):
            with self._open(number) as part:
                yield from part.marks()

    def close(self) -> None:
        """See `Reader.close`."""


def _plain(columns: dict[str, Column], number: int) -> dict[str, Column]:
    suffix = f".{number:05d}"
    return {name.removesuffix(suffix): column for name, column in columns.items()}


def refuse_part(file: File, metadata: dict[str, Any]) -> None:
    """Refuse a part alone: its rows are not all.

    Raises:
        FormatError: It is one.
    """
    if PART in metadata:
        raise FormatError(
            f"{file.path} is one part of several, expected their folder or {INDEX}; "
            "name that"
        )
