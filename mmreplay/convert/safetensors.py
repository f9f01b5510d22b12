"""safetensors: tensors under a JSON header, without a library of its own to write.

The library reads it, slices included. The description, and a CRC32C of every column,
which the format itself lacks, stand in ``__metadata__``. Large ones can be split into
parts under an index (`safetensors_parts`).
"""

from __future__ import annotations

from pathlib import Path

from mmreplay.convert import safetensors_file, safetensors_parts
from mmreplay.convert.array_file import ArrayWriter
from mmreplay.convert.arrays import ArrayReader
from mmreplay.convert.base import Notes, Reader, Writer
from mmreplay.convert.description import KEY, Description
from mmreplay.convert.plain import PlainReader
from mmreplay.convert.safetensors_file import SafetensorsPlan
from mmreplay.convert.safetensors_parts import INDEX, PartsReader, PartsWriter
from mmreplay.files import File


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    part_bytes: float | None = None,
) -> Writer:
    """Make a safetensors file as a target, or a folder of them.

    Args:
        target: The file, or the folder.
        description: What will come.
        overwrite: Replace what is there.
        part_bytes: Split into files of about so many bytes, and at least one row,
            in a folder with an index.

    Raises:
        SchemaError: part_bytes is no number of bytes.
    """
    if part_bytes is not None:
        rows = safetensors_parts.part_rows(description, part_bytes)
        return PartsWriter(target, description, rows, overwrite)
    return ArrayWriter(target, description, _plan(description), overwrite)


def _plan(description: Description) -> SafetensorsPlan:
    told = {KEY: description.to_bytes().decode()}
    return SafetensorsPlan(description.columns, description.rows, told)


def planned(description: Description, *, part_bytes: float | None = None) -> int:
    """Bytes of the file, or nearly of its parts; see `registry.planned`."""
    if part_bytes is not None:
        safetensors_parts.part_rows(description, part_bytes)
    return _plan(description).nbytes


def recognizes(path: Path) -> bool:
    """Whether a folder holds parts; see `registry`."""
    return (path / INDEX).is_file()


def open_reader(path: Path) -> Reader:
    """Open a safetensors file, an index of parts or their folder as a source."""
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
    if KEY not in metadata:
        return PlainReader(file, columns, Notes())
    told = safetensors_file.text(file, metadata, KEY)
    name = f"{file.path}: {KEY!r} in its metadata"
    description = Description.from_bytes(told.encode("utf-8", "replace"), name)
    return ArrayReader(file, columns, description)
