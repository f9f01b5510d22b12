"""Rows in RAM keep the contract of every engine."""

from mmreplay.storage.memory import MemoryStore
from tests.contracts.store import StoreContract


class TestMemoryStore(StoreContract):
    def make(self, ring, schema, tmp_path):
        return MemoryStore(ring, schema)
