"""Zarr groups as sources: arrays along time, local or in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert.base import Block, Notes, refuse_expansion
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.errors import SchemaError, SourceError, undone_by
from mmreplay.schema.naming import ENDS
from mmreplay.schema.source_names import OwnNames, name_fields
from mmreplay.zarr_groups.mapping import DATA, array_paths
from mmreplay.zarr_groups.source import ZarrSource, source_of


class ZarrReader(BufferReader):
    """Reads a group opened as a buffer; its report is the mapping's."""

    def __init__(self, buffer: ReplayBuffer, renamed: Notes) -> None:
        super().__init__(buffer, owned=True)
        mapping = buffer.mapping
        assert mapping is not None
        self.report = Notes([*mapping.notes, *renamed.notes], list(mapping.doubts))
        # Ends have no array: flags hold them.
        self._own_names = {DATA + path: (path,) for path in ENDS}
        for path, name in mapping.arrays.items():
            self._own_names[name] = (path,)
            if path != name:
                self.report.note(f"field {path!r} is array {name!r}")

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        yield from super().blocks(rows_per_block)
        assert self._buffer.mapping is not None
        for name, count in self._buffer.mapping.missing.items():
            chunks = "1 chunk" if count == 1 else f"{count:,} chunks"
            self.report.doubt(
                f"{chunks} of array {name!r} are not there, and were read as its fill "
                "value: writers leave out chunks of nothing else, but a copy may lack "
                "some"
            )

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._own_names


def _nbytes(path: Path) -> int:
    """Return the bytes of a zip file, or of all files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _check_texts(options: Mapping[str, str | None]) -> None:
    """Refuse numbers and lists, which the command line may make of a text.

    Raises:
        SchemaError: An option is neither a text nor left out.
    """
    for name, value in options.items():
        if value is not None and type(value) is not str:
            raise SchemaError(
                f"{name} must be a text, got {value!r}. Leave it out if you do not know it."
            )


def recognizes(path: Path) -> bool:
    """Return whether a folder or zip file is a Zarr group."""
    return source_of(path) is not None


def open_reader(
    path: Path,
    *,
    fields_of: Mapping[str, str] | None = None,
    episode_ends: str | None = None,
    ends: str = "truncated",
    endpoint: str | None = None,
    region: str | None = None,
    anonymous: bool = False,
    allow_expansion: bool = False,
    fields: Sequence[str] | None = None,
) -> ZarrReader:
    """Open a group as a source; see `ZarrSource`.

    Args:
        path: A folder, a zip file or ``s3://bucket/prefix``.
        fields_of: Field paths by array path.
        episode_ends: Path of the array of episode ends.
        ends: How the last step of such an episode ends.
        endpoint: URL of an S3 server other than Amazon's.
        region: Region of the bucket.
        anonymous: Send no credentials.
        allow_expansion: Read a group that holds more than 1,000 times what its files
            take; data in a bucket is not measured.
        fields: See `name_fields`.
    """
    if isinstance(fields_of, Mapping):
        _check_texts({f"fields_of[{name!r}]": to for name, to in fields_of.items()})
    source = ZarrSource(str(path), fields_of, episode_ends, ends, endpoint, region, anonymous)
    renamed = Notes()
    try:
        buffer = ReplayBuffer.open(source)
    except SourceError:
        if source.remote or fields_of is not None:
            raise
        paths = array_paths(source)
        names = name_fields(paths, path, renamed, fields)
        if names == paths:
            raise
        buffer = ReplayBuffer.open(replace(source, fields=names))
    with undone_by(buffer.close):
        if not source.remote:
            held = int(buffer.span.lengths.sum()) * buffer.schema.row_nbytes
            refuse_expansion(path, held, _nbytes(path), allowed=allow_expansion)
        return ZarrReader(buffer, renamed)
