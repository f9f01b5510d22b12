"""What the files of each engine are, and how they are checked: one object an engine.

`verify` and `repair` ask `CHECKS` by the name of the engine in the metadata, and know
no engine besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mmreplay.disk.files import File
from mmreplay.format.metadata import Engine, Metadata
from mmreplay.schema import Schema
from mmreplay.storage.layout import FLAGS, RECORDS, record_layout
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.group import FOLDER
from mmreplay.storage.zarr.shards import DTYPE, FILE_NAME
from mmreplay.verify.group import check_group
from mmreplay.verify.report import Notebook
from mmreplay.verify.rows import SealedSumCheck, SumCheck
from mmreplay.verify.slots import CommitFile

OpenRows = Callable[[Path, Metadata], ZarrStore]
"""Opens the rows of a data folder for reading."""


class EngineCheck:
    """Of an engine whose rows stay in the files that `record_layout` names."""

    def index_sizes(self, metadata: Metadata) -> dict[str, int]:
        """Bytes of the files that say where rows are, by name: there are none."""
        return {}

    def other_names(self) -> set[str]:
        """Names in the data folder besides the files of `record_layout`: none."""
        return set()

    def lasting_files(self, schema: Schema) -> set[str]:
        """Names of the files whose rows are nowhere else: all."""
        placement = record_layout(schema)
        records = set() if placement.record is None else {RECORDS}
        return {FLAGS, *records, *placement.large.values()}

    def check_names(self, folder: Path, metadata: Metadata, notes: Notebook) -> None:
        """Check what else is in the data folder of a buffer: nothing.

        Args:
            folder: The buffer's.
            metadata: Its metadata.
            notes: Where findings go.
        """

    def sum_check(
        self,
        opened: dict[str, File],
        metadata: Metadata,
        commit_file: CommitFile,
        open_rows: OpenRows | None = None,
    ) -> SumCheck:
        """Return the check of checksums and values.

        Args:
            opened: The files of `record_layout`.
            metadata: Of the buffer.
            commit_file: Its COMMIT.
            open_rows: Opens rows that are in other files too.
        """
        return SumCheck(opened, metadata, commit_file)


class ShardCheck(EngineCheck):
    """Of the engine that moves rows to shards of a Zarr group."""

    def index_sizes(self, metadata: Metadata) -> dict[str, int]:
        """Bytes of the file that says which rows are in shards."""
        ring, sharding = metadata.ring, metadata.sharding
        assert sharding is not None
        count = ring.num_rows // (sharding.shard_rows * ring.wide)
        return {FILE_NAME: count * DTYPE.itemsize}

    def other_names(self) -> set[str]:
        """That file, and the group's folder."""
        return {FILE_NAME, FOLDER}

    def lasting_files(self, schema: Schema) -> set[str]:
        """Flags and mutable fields, which no shard ever has."""
        large = record_layout(schema).large.items()
        return {FLAGS, *(name for path, name in large if schema[path].mutable)}

    def check_names(self, folder: Path, metadata: Metadata, notes: Notebook) -> None:
        """Check the names and metadata of the group."""
        check_group(folder, metadata, notes)

    def sum_check(
        self,
        opened: dict[str, File],
        metadata: Metadata,
        commit_file: CommitFile,
        open_rows: OpenRows | None = None,
    ) -> SumCheck:
        """Return the check, of the rows in shards too."""
        where = next(iter(opened.values())).path.parent
        if open_rows is None:
            store = ZarrStore.open(where, metadata, writable=False)
        else:
            store = open_rows(where, metadata)
        return SealedSumCheck(opened, metadata, commit_file, store)


CHECKS: Mapping[Engine, EngineCheck] = {"memmap": EngineCheck(), "zarr": ShardCheck()}
