"""Checksums of a Zarr buffer: its blocks are in shards, or still in the tail."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmreplay.errors import CorruptError, FailedError, raise_if_out_of_files
from mmreplay.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.storage import places, zarr_group
from mmreplay.storage.placement import FLAGS
from mmreplay.storage.zarr import ZarrStore
from mmreplay.verify.group import GroupFlags
from mmreplay.verify.report import Notebook
from mmreplay.verify.slots import Claim, CommitFile
from mmreplay.verify.sums import CHUNK_NBYTES, Stripe, SumCheck


def extra_names(metadata: Metadata) -> dict[str, int]:
    """Names in the data folder that only this engine knows."""
    zarr = metadata.engine == "zarr"
    return {places.FILE_NAME: 0, zarr_group.FOLDER: 0} if zarr else {}


def sum_check(
    opened: dict[str, File], metadata: Metadata, commit_file: CommitFile
) -> SumCheck:
    """What checks the checksums of a buffer of either engine."""
    given = (opened, metadata.folder, metadata, commit_file)
    if metadata.engine != "zarr":
        return SumCheck(*given)
    where = next(iter(opened.values())).path.parent
    return SealedSumCheck(*given, ZarrStore.open(where, metadata, writable=False))


class SealedSumCheck(SumCheck):
    """Through the store, which unpacks what is sealed."""

    def __init__(
        self,
        opened: dict[str, File],
        folder: str,
        metadata: Metadata,
        commit_file: CommitFile,
        store: ZarrStore,
    ) -> None:
        """Check what a store serves, which is closed with this; see `SumCheck`."""
        super().__init__(opened, folder, metadata, commit_file)
        self._store = store
        self._group_flags = GroupFlags(opened[FLAGS], metadata)

    def run(self, claim: Claim, notes: Notebook) -> None:
        """See `SumCheck.run`; then unpack what is served and has no checksum.

        A shard may hold rows of the newest block, and rows that are published and
        not yet committed. What does not unpack is told; its values are not known.
        Then compare the flags that the group has for other readers.
        """
        super().run(claim, notes)
        size = self._ring.block_rows
        firsts, stops = self._blocks(claim)
        for env_id in range(self._ring.num_envs):
            first, head = int(claim.firsts[env_id]), int(claim.published[env_id])
            low, high = int(firsts[env_id]) * size, int(stops[env_id]) * size
            for begin, stop in ((first, min(low, head)), (max(first, high), head)):
                for _, _, error in unreadable(self._store, env_id, begin, stop):
                    notes.note("file", self._folder, None, str(error))
        self._group_flags.run(claim, notes)

    def compute(self, stripe: Stripe, notes: Notebook | None) -> list[int]:
        """See `SumCheck.compute`."""
        found = [self._store.checksum(env, block) for _, env, block in stripe.blocks]
        if notes is not None:
            notes.read(self.stripe_nbytes(stripe))
        return found

    def close(self) -> None:
        """Give files back."""
        self._store.close()


def unreadable(
    store: ZarrStore, env_id: int, first: int, stop: int
) -> Iterator[tuple[int, int, CorruptError | FailedError]]:
    """Stretches of at most a block with rows in a shard that does not unpack, and why.

    What is not sealed is bytes of files, which can always be read.

    Args:
        store: Opened for reading.
        env_id: The environment.
        first: The first position to look at.
        stop: The one after the last.
    """
    ring, schema = store.ring, store.schema
    paths = [path for path, each in schema.fields.items() if not each.mutable]
    step = max(1, CHUNK_NBYTES // max(1, schema.row_nbytes))
    while first < stop:
        end = min(stop, (first // ring.block_rows + 1) * ring.block_rows)
        positions = np.arange(first, end)
        rows = ring.rows(np.full(len(positions), env_id), positions)
        rows = rows[store.sealed(rows)]
        try:
            for at in range(0, len(rows), step):
                store.prefetch(rows[at : at + step], paths)
                store.gather(rows[at : at + step], paths)
        except (CorruptError, FailedError) as error:
            raise_if_out_of_files(error)
            yield first, end, error
        first = end
