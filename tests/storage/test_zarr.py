"""Rows in Zarr shards keep the contract of every engine, and are read by zarr alone."""

import numpy as np
import pytest

from mmreplay.format.metadata import Metadata
from mmreplay.format.sharding import Sharding
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.testing.disks import QuickDisk, using
from tests.contracts.store import StoreContract


def describe(ring, schema, codec="blosc-lz4"):
    """Metadata of a Zarr buffer."""
    sharding = Sharding.sized(codec, ring, schema.row_nbytes)
    return Metadata(bytes(16), "", 1, "zarr", "disabled", ring, schema, {}, sharding=sharding)


class TestZarrStore(StoreContract):
    codec = "blosc-lz4"

    @pytest.fixture(autouse=True)
    def quick(self):
        """Some forty files are synced for each of hundreds of places sealed."""
        with using(QuickDisk()):
            yield

    def make(self, ring, schema, tmp_path):
        return ZarrStore.create(tmp_path, describe(ring, schema, self.codec))

    def open(self, ring, schema, tmp_path):
        metadata = describe(ring, schema, self.codec)
        return ZarrStore.open(tmp_path, metadata, writable=True)

    def test_rows_under_a_checksum_are_asked_for_at_once(self, store, ring, rng):
        size = ring.block_rows
        store.write([(0, 0, size)], self.columns(size, rng), np.ones(size, np.uint8))
        expected = store.checksum(0, 0)
        asked = []
        prefetch = store.prefetch
        store.prefetch = lambda rows, paths, now=False: asked.append((rows, list(paths)))
        assert store.checksum(0, 0) == expected
        ((rows, paths),) = asked
        (row, step, count), *_ = ring.split_at_wrap(0, 0, size)
        assert rows.tolist() == [row + step * at for at in range(count)]
        kept = [path for path, each in store.schema.fields.items() if not each.mutable]
        assert paths == kept
        assert prefetch(rows, paths) == 0  # in memory, as it was just written


@pytest.mark.slow
class TestSealedEverywhere(TestZarrStore):
    """Every place is sealed before it is read."""

    codec = "zstd"

    def make(self, ring, schema, tmp_path):
        store = super().make(ring, schema, tmp_path)
        gather = store.gather

        def sealed(rows, paths):
            for place in np.unique(rows[:1] // store._range_rows).tolist():
                # What is put back under the lock is read out of its shards, by the
                # same call: it is sealed already.
                if not store._states.get(place) & 1:
                    # By the one thread that seals: temporary names are its own.
                    store.sealing.seal_now([place])
                sealer = store.sealing._sealer
                failed = sealer.failure is not None or sealer.short
                assert failed or store._states.get(place) & 1
            return gather(rows, paths)

        store.gather = sealed
        return store
