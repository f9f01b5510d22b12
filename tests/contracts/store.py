"""Holds one engine to `mmreplay.testing.check_store`; subclass and fill in `make`."""

import pytest

from mmreplay.ring import LAYOUTS, Ring
from mmreplay.testing import STORE_RULES, check_store
from mmreplay.testing.stores import SCHEMA, columns

RULES = [
    pytest.param(rule, marks=[pytest.mark.slow] if "disk_calls" in rule else [])
    for rule in STORE_RULES
]


class StoreContract:
    """Every rule of the contract, and fixtures for tests of one engine.

    `open` opens what `make` made in a folder; it stays None for a store in RAM.
    """

    open = None

    def make(self, ring, schema, tmp_path):
        """A new store."""
        raise NotImplementedError

    @pytest.fixture(params=LAYOUTS)
    def ring(self, request):
        return Ring.sized(13, 3, request.param)

    @pytest.fixture
    def store(self, ring, tmp_path):
        store = self.make(ring, SCHEMA, tmp_path)
        yield store
        store.close()

    def columns(self, count, rng, schema=SCHEMA):
        return columns(count, rng, schema)

    @pytest.mark.parametrize("rule", RULES)
    def test_the_contract_holds(self, rule, tmp_path):
        check_store(self.make, tmp_path, open_store=self.open, rules=[rule])
