"""Checksums of a Zarr buffer: its blocks are in shards, or still in the tail."""

from __future__ import annotations

from mmreplay.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.storage import places, zarr_group
from mmreplay.storage.zarr import ZarrStore
from mmreplay.verify.report import Notebook
from mmreplay.verify.slots import CommitFile
from mmreplay.verify.sums import Stripe, SumCheck


def extra_names(metadata: Metadata) -> dict[str, int]:
    """Names in the data folder that only this engine knows."""
    zarr = metadata.engine == "zarr"
    return {places.FILE_NAME: 0, zarr_group.FOLDER: 0} if zarr else {}


def sum_check(
    opened: dict[str, File], metadata: Metadata, commit_file: CommitFile
) -> SumCheck:
    """What checks the checksums of a buffer of either engine."""
    kind = SealedSumCheck if metadata.engine == "zarr" else SumCheck
    return kind(opened, metadata.folder, metadata, commit_file)


class SealedSumCheck(SumCheck):
    """Through the store, which unpacks what is sealed."""

    def __init__(
        self,
        opened: dict[str, File],
        folder: str,
        metadata: Metadata,
        commit_file: CommitFile,
    ) -> None:
        """See `SumCheck`."""
        super().__init__(opened, folder, metadata, commit_file)
        where = next(iter(opened.values())).path.parent
        self._store = ZarrStore.open(where, metadata, writable=False)

    def compute(self, stripe: Stripe, notes: Notebook | None) -> list[int]:
        """See `SumCheck.compute`."""
        found = [self._store.checksum(env, block) for _, env, block in stripe.blocks]
        if notes is not None:
            notes.read(self.stripe_nbytes(stripe))
        return found

    def close(self) -> None:
        """Give files back."""
        self._store.close()
