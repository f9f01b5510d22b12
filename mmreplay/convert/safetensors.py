"""safetensors: tensors under a JSON header, without a library of its own to write.

The library reads it, slices included. The description, and a CRC32C of every column,
which the format itself lacks, stand in ``__metadata__``. Large ones can be split into
parts under an index (`safetensors_parts`).
"""

from __future__ import annotations

from pathlib import Path

from mmreplay.convert import (
    safetensors_file,
    safetensors_parts,
    velora,
    velora_read,
)
from mmreplay.convert.array_file import ArrayWriter
from mmreplay.convert.arrays import ArrayReader
from mmreplay.convert.base import Notes, Reader, Writer
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.losses import undescribed
from mmreplay.convert.plain import PlainReader
from mmreplay.convert.safetensors_file import METADATA, SUMS, SafetensorsPlan
from mmreplay.convert.safetensors_parts import INDEX, PART, PartsReader, PartsWriter
from mmreplay.convert.skrl import check_layout
from mmreplay.convert.velora import VeloraWriter
from mmreplay.errors import SchemaError
from mmreplay.files import File

LAYOUT = "velora"


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    part_bytes: float | None = None,
    layout: str | None = None,
    prefix: str | None = None,
) -> Writer:
    """Make a safetensors file as a target, or a folder of them.

    Args:
        target: The file, or the folder.
        description: What will come.
        overwrite: Replace what is there.
        part_bytes: Split into files of about so many bytes, and at least one row,
            in a folder with an index.
        layout: ``"velora"`` for a folder with velora's pair of files.
        prefix: Of the names of that pair; ``"buffer_"`` by default.

    Raises:
        SchemaError: An option is not legal, or the layout cannot hold the fields.
    """
    _check(layout, part_bytes, prefix)
    if layout is not None:
        start = velora.PREFIX if prefix is None else prefix
        return VeloraWriter(target, description, start, overwrite)
    if part_bytes is not None:
        rows = safetensors_parts.part_rows(description, part_bytes)
        return PartsWriter(target, description, rows, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def _plan(description: Description) -> SafetensorsPlan:
    for name in (METADATA, SUMS):
        if name in description.columns:
            raise SchemaError(
                f"field {name!r}: got a name that files of safetensors keep for "
                "themselves, expected another; leave it out with fields=, or choose "
                "another format"
            )
    told = {KEY: description.to_bytes().decode()}
    return SafetensorsPlan(description.columns, description.rows, told)


def _check(layout: str | None, part_bytes: float | None, prefix: str | None) -> None:
    check_layout(layout, LAYOUT)
    if layout is not None and part_bytes is not None:
        raise SchemaError(
            f"part_bytes: got {part_bytes!r} with layout={layout!r}, expected None "
            "with it, which is one pair of files; leave one of them out"
        )
    if prefix is None:
        return
    velora.check_prefix(prefix)
    if layout is None:
        raise SchemaError(
            f"prefix: got {prefix!r} without a layout, expected it with "
            f"layout={LAYOUT!r} only; name that one as well, or leave it out"
        )


def planned(
    description: Description,
    *,
    part_bytes: float | None = None,
    layout: str | None = None,
    prefix: str | None = None,
) -> int | None:
    """Bytes of the file, or nearly of its parts; see `registry.planned`."""
    _check(layout, part_bytes, prefix)
    if layout is not None:
        velora.Parts(description)
        return None
    if part_bytes is not None:
        safetensors_parts.part_rows(description, part_bytes)
    return _plan(description).nbytes


def recognizes(path: Path) -> bool:
    """Whether a folder holds parts, or velora's pair; see `registry`."""
    return (path / INDEX).is_file() or velora_read.recognizes(path)


def open_reader(path: Path, *, layout: str | None = None) -> Reader:
    """Open a safetensors file, an index of parts or their folder as a source.

    Args:
        path: It.
        layout: ``"velora"`` for velora's pair; known where its names and tensors are
            there.
    """
    check_layout(layout, LAYOUT)
    if layout is not None or velora_read.recognizes(path):
        return velora_read.open_pair(path)
    if path.is_dir():
        return PartsReader(path)
    if path.name == INDEX:
        return PartsReader(path.parent)
    file = File.open(path, None)
    try:
        return _reader(file)
    except BaseException:
        file.close()
        raise


def _reader(file: File) -> Reader:
    metadata, columns = safetensors_file.parse(file)
    safetensors_parts.refuse_part(file, metadata)
    notes = Notes()
    if KEY not in metadata:
        if safetensors_file.sums_of(file, metadata).keys() & {KEY, PART}:
            raise undescribed(file.path)
        return PlainReader(file, columns, notes)
    told = safetensors_file.text(file, metadata, KEY)
    name = f"{file.path}: {KEY!r} in its metadata"
    description = Description.from_bytes(told.encode("utf-8", "replace"), name)
    summed = (KEY, *description.columns)
    safetensors_file.check_summed(file, metadata, summed, notes)
    return ArrayReader(file, columns, description, notes)
